//! The claims of a safetensors header about its data, read without keeping the header.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use crate::safetensors::{Discontinuity, RawTensor, contiguous_end};
use crate::unique::UniqueMap;

/// The ranges of the tensors of a header. A dtype that is not known does not make a file incomplete.
#[derive(Debug)]
pub(crate) struct HeaderClaims {
    /// The end of the last tensor, in bytes from the end of the header.
    pub(crate) end: u64,
    /// A tensor whose dtype and shape contradict its bytes, or a reason why the tensors do not follow each other
    /// without a gap, as the predicate of a sentence about the file.
    pub(crate) problem: Option<String>,
}

impl HeaderClaims {
    /// Reads the JSON text of a header; `on_tensor` gets the name of each tensor. What stays in memory are 16
    /// bytes for each tensor.
    pub(crate) fn read(
        json: &[u8],
        on_tensor: &mut dyn FnMut(&str),
    ) -> Result<Self, serde_json::Error> {
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let (ranges, contradiction) = Items { on_tensor }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        let claims = Self::of(ranges);
        Ok(Self { problem: contradiction.or(claims.problem), ..claims })
    }

    fn of(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let last = ranges.iter().map(|(_, end)| *end).max().unwrap_or(0);
        let problem = contiguous_end(ranges, u64::MAX).err().map(|found| {
            let Discontinuity { start, next, end, .. } = found;
            if start > next {
                format!("has a tensor that ends at byte {next}, before its start {start}")
            } else if start < end {
                format!(
                    "has two tensors that share bytes: one begins at byte {start} of the data, and the one \
                     before ends at {end}"
                )
            } else {
                format!("has no tensor at the bytes {end}..{start} of the data")
            }
        });
        Self { end: last, problem }
    }
}

struct Items<'a> {
    on_tensor: &'a mut dyn FnMut(&str),
}

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = (Vec<(u64, u64)>, Option<String>);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = (Vec<(u64, u64)>, Option<String>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut ranges, mut contradiction) = (Vec::new(), None);
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<Option<UniqueMap<String>>>()?;
                continue;
            }
            let (range, problem) = map.next_value::<RawTensor>()?.claim();
            (self.on_tensor)(&name);
            ranges.push(range);
            contradiction = contradiction
                .or_else(|| problem.map(|problem| format!("has {name:?}, which {problem}")));
        }
        Ok((ranges, contradiction))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(ranges: &[(u64, u64)]) -> HeaderClaims {
        let tensors = ranges.iter().enumerate();
        let tensors = tensors.map(|(n, (start, end))| {
            format!(r#""t{n}":{{"dtype":"NEW","shape":[],"data_offsets":[{start},{end}]}}"#)
        });
        let tensors: Vec<_> = tensors.collect();
        let json = format!(r#"{{"__metadata__":null,{}}}  "#, tensors.join(","));
        let mut names = Vec::new();
        let claims = HeaderClaims::read(json.as_bytes(), &mut |name| names.push(name.to_owned()));
        assert_eq!(names.len(), ranges.len());
        claims.unwrap()
    }

    #[test]
    fn tensors_follow_each_other_in_any_order_of_the_header() {
        let found = claims(&[(8, 16), (0, 8), (16, 16), (16, 20)]);
        assert_eq!((found.end, found.problem), (20, None));
        for (ranges, said) in [
            (&[(0, 8), (4, 12)][..], "share bytes: one begins at byte 4"),
            (&[(0, 8), (12, 16)], "no tensor at the bytes 8..12"),
            (&[(4, 8)], "no tensor at the bytes 0..4"),
            (&[(0, 8), (8, 4)], "ends at byte 4"),
        ] {
            let problem = claims(ranges).problem.unwrap();
            assert!(problem.contains(said), "{problem}");
        }
        for damaged in [
            r#"{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[18446744073709551615,4],"data_offsets":[0,8]}}"#,
        ] {
            let claims = HeaderClaims::read(damaged.as_bytes(), &mut |_| {}).unwrap();
            assert!(claims.problem.unwrap().contains("\"a\""), "{damaged}");
        }
        for damaged in [
            r#"{"a":{"shape":[2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[2]}}"#,
            r#"{"__metadata__":{"format":1}}"#,
        ] {
            assert!(HeaderClaims::read(damaged.as_bytes(), &mut |_| {}).is_err(), "{damaged}");
        }
        assert!(HeaderClaims::read(b"[]", &mut |_| {}).is_err());
        assert!(HeaderClaims::read(b"{} x", &mut |_| {}).is_err());
    }
}
