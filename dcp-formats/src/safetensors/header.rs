//! Parses the header of a safetensors image.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use dcp_core::{DType, Dims, FormatError};
use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::dtype::{packing, parse_dtype};
use crate::unique::UniqueMap;

/// Bytes before the JSON text: its length.
pub const PREFIX_LEN: u64 = 8;

/// The library's own limit.
const HEADER_MAX: u64 = 100_000_000;

/// The contents of a safetensors image. Offsets are in bytes from the end of the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    tensors: IndexMap<Arc<str>, TensorInfo>,
    metadata: IndexMap<String, String>,
}

/// One tensor of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: DType,
    /// The shape, in elements of `dtype` (a packed type counts bytes, as in PyTorch).
    pub shape: Dims,
    /// The range of its bytes, row-major and little-endian.
    pub byte_range: Range<u64>,
}

/// The length in bytes of the JSON text, from the first [`PREFIX_LEN`] bytes of an image of
/// `image_len` bytes.
///
/// # Errors
///
/// When the image is shorter, or the length exceeds the library's limit of 100 MB.
pub fn header_len(prefix: &[u8], image_len: u64) -> Result<u64, FormatError> {
    let bad = |problem: String| Err(FormatError::new("safetensors header", problem).at(0));
    let Some(prefix) = prefix.first_chunk::<8>() else {
        return bad(format!("there are only {} bytes", prefix.len()));
    };
    if prefix == b"version " {
        return bad("it is a pointer of Git LFS, not the file: fetch it with `git lfs pull`".into());
    }
    let len = u64::from_le_bytes(*prefix);
    if len > HEADER_MAX {
        return bad(format!("it claims {len} bytes, the limit is {HEADER_MAX}"));
    }
    if len < 2 || len > image_len.saturating_sub(PREFIX_LEN) {
        return bad(format!("it claims {len} bytes in an image of {image_len}"));
    }
    Ok(len)
}

impl Header {
    /// Parses the JSON text of an image whose data is `data_len` bytes long.
    ///
    /// # Errors
    ///
    /// When the text is not a header, a name or field occurs twice, a dtype is unknown, or the
    /// tensors do not fill the data contiguously.
    pub fn parse(json: &[u8], data_len: u64) -> Result<Self, FormatError> {
        let header = Self::parse_claims(json)?;
        match header.range_problem(data_len) {
            None => Ok(header),
            Some(problem) => Err(problem.into_error()),
        }
    }

    /// Parses the JSON text without checking the ranges of tensors.
    pub(crate) fn parse_claims(json: &[u8]) -> Result<Self, FormatError> {
        let Raw { tensors, metadata } = serde_json::from_slice(json).map_err(|error| {
            FormatError::new("safetensors header", error.to_string()).at(PREFIX_LEN)
        })?;
        let tensors = tensors
            .into_iter()
            .map(|(name, raw)| {
                let info = raw.check().map_err(|problem| {
                    FormatError::new("safetensors header", format!("{name:?} {problem}"))
                        .at(PREFIX_LEN)
                })?;
                Ok((Arc::from(name), info))
            })
            .collect::<Result<IndexMap<_, _>, FormatError>>()?;
        Ok(Self { tensors, metadata })
    }

    pub(super) fn from_parts(
        tensors: IndexMap<Arc<str>, TensorInfo>,
        metadata: IndexMap<String, String>,
    ) -> Self {
        Self { tensors, metadata }
    }

    /// The tensors by name, in the order of the header.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &TensorInfo)> {
        self.tensors.iter()
    }

    /// The tensor of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The strings of `__metadata__`.
    #[must_use]
    pub fn metadata(&self) -> &IndexMap<String, String> {
        &self.metadata
    }

    /// The library's rule: in order of their offsets, each tensor begins at the end of the one
    /// before, and the last ends with the data.
    pub(crate) fn range_problem(&self, data_len: u64) -> Option<RangeProblem> {
        let mut sorted: Vec<_> = self.tensors.iter().collect();
        sorted.sort_by_key(|(_, info)| (info.byte_range.start, info.byte_range.end));
        let ranges = sorted.iter().map(|(_, info)| (info.byte_range.start, info.byte_range.end));
        let end = match contiguous_end(ranges, data_len) {
            Ok(end) => end,
            Err(Discontinuity { position, kind, start, next, end }) => {
                let name = sorted.get(position).map(|(name, _)| Arc::clone(name));
                let tensor = name.as_deref().unwrap_or_default();
                let problem = if kind == Ranges::Short {
                    format!(
                        "{tensor:?} ends at {next} of the data, which has only {data_len} bytes: the \
                         file was cut short"
                    )
                } else {
                    format!("{tensor:?} begins at {start} of the data, not at {end}")
                };
                return Some(RangeProblem { kind, name, problem });
            }
        };
        let kind = Ranges::Long;
        let problem = format!("the tensors have {end} bytes, the data has {data_len}");
        (end != data_len).then_some(RangeProblem { kind, name: None, problem })
    }
}

/// The first tensor, in the order of offsets, that does not begin at the end of the one before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Discontinuity {
    /// The tensor's position in that order.
    pub(crate) position: usize,
    pub(crate) kind: Ranges,
    /// The tensor's start and end.
    pub(crate) start: u64,
    pub(crate) next: u64,
    /// The end of the tensor before.
    pub(crate) end: u64,
}

/// The end of the last of these ranges, which are sorted, each a start and an end: the library refuses data
/// with a gap or a shared byte. A range that ends before it starts overlaps the one before.
pub(crate) fn contiguous_end(
    sorted: impl IntoIterator<Item = (u64, u64)>,
    data_len: u64,
) -> Result<u64, Discontinuity> {
    let mut end = 0;
    for (position, (start, next)) in sorted.into_iter().enumerate() {
        let kind = match start.cmp(&end) {
            _ if next < start => Ranges::Overlap,
            Ordering::Less => Ranges::Overlap,
            Ordering::Greater => Ranges::Gap,
            Ordering::Equal if next > data_len => Ranges::Short,
            Ordering::Equal => {
                end = next;
                continue;
            }
        };
        return Err(Discontinuity { position, kind, start, next, end });
    }
    Ok(end)
}

/// A problem of the ranges of an image's tensors.
#[derive(Clone, Debug)]
pub(crate) struct RangeProblem {
    pub(crate) kind: Ranges,
    /// The tensor.
    pub(crate) name: Option<Arc<str>>,
    pub(crate) problem: String,
}

/// Kinds of problems of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ranges {
    /// Two tensors overlap.
    Overlap,
    /// There is a gap between two tensors.
    Gap,
    /// The data ends before a tensor does.
    Short,
    /// The data continues after the last tensor.
    Long,
}

impl RangeProblem {
    /// The problem as an error.
    pub(crate) fn into_error(self) -> FormatError {
        FormatError::new("safetensors header", self.problem).at(PREFIX_LEN)
    }
}

/// The JSON form of the header.
struct Raw {
    tensors: IndexMap<String, RawTensor>,
    metadata: IndexMap<String, String>,
}

#[derive(Deserialize)]
#[serde(expecting = "a tensor with dtype, shape and data_offsets")]
pub(crate) struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// The range of its bytes, and the reason why dtype and shape contradict it. A dtype that is not known
    /// contradicts nothing: another program may read it.
    pub(crate) fn claim(self) -> ((u64, u64), Option<String>) {
        let range = self.data_offsets;
        let problem = parse_dtype(&self.dtype).and_then(|_| self.check().err());
        (range, problem)
    }

    fn check(mut self) -> Result<TensorInfo, String> {
        let dtype = parse_dtype(&self.dtype)
            .ok_or_else(|| format!("has the unknown dtype {:?}", self.dtype))?;
        if self.shape.len() > Dims::MAX_AXES {
            let (axes, max) = (self.shape.len(), Dims::MAX_AXES);
            return Err(format!("has {axes} axes, more than {max}"));
        }
        if let Some(last) = self.shape.last_mut() {
            if *last % packing(dtype) != 0 {
                return Err(format!("packs {last} values of {dtype} into bytes"));
            }
            *last /= packing(dtype);
        }
        let shape = Dims::from(self.shape);
        let (start, end) = self.data_offsets;
        let byte_len = shape.checked_volume().and_then(|v| v.checked_mul(dtype.size() as u64));
        if byte_len.is_none() || end.checked_sub(start) != byte_len {
            return Err(format!("of {dtype} and shape {shape} cannot lie at bytes {start}..{end}"));
        }
        Ok(TensorInfo { dtype, shape, byte_range: start..end })
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let mut raw = Raw { tensors: IndexMap::new(), metadata: IndexMap::new() };
                let mut seen_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    let twice = if name == "__metadata__" {
                        let metadata: Option<UniqueMap<String>> = map.next_value()?;
                        raw.metadata = metadata.unwrap_or_default().0;
                        std::mem::replace(&mut seen_metadata, true)
                    } else {
                        let tensor = map.next_value()?;
                        raw.tensors.insert(name.clone(), tensor).is_some()
                    };
                    if twice {
                        return Err(A::Error::custom(format!("{name:?} occurs twice")));
                    }
                }
                Ok(raw)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, data_len: u64) -> Result<Header, FormatError> {
        Header::parse(json.as_bytes(), data_len)
    }

    #[test]
    fn a_header_of_the_library() {
        let header = parse(
            r#"{"__metadata__":{"format":"pt"},
                "b":{"dtype":"F4","shape":[2,4],"data_offsets":[8,12]},
                "a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}  "#,
            12,
        )
        .unwrap();
        let b = header.get("b").unwrap();
        assert_eq!((b.dtype, &*b.shape), (DType::Float4E2M1FnX2, &[2, 2][..]));
        assert_eq!(header.get("a").unwrap().byte_range, 0..8);
        assert_eq!(header.metadata()["format"], "pt");
        let header = parse(r#"{"__metadata__":null}"#, 0).unwrap();
        assert!(header.metadata().is_empty());
        let error = parse(r#"{"a":1}"#, 0).unwrap_err().to_string();
        assert!(error.contains("a tensor with dtype") && !error.contains("struct"), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let a = r#""a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
        assert!(parse(&format!("{{{a}}}"), 2).is_ok());
        let cases = [
            (format!("{{{a}}}"), 3, "the data has 3"),
            (format!("{{{a},{a}}}"), 2, "occurs twice"),
            (format!(r#"{{{a},"__metadata__":{{}},"__metadata__":{{}}}}"#), 2, "occurs twice"),
            (format!(r#"{{{a},"__metadata__":{{"x":"","x":""}}}}"#), 2, "occurs twice"),
            (format!("{{{a}}}"), 1, "cut short"),
            (a.replace("[2]", "[3]"), 2, "cannot lie"),
            (a.replace("[2]", "[18446744073709551615,3]"), 2, "cannot lie"),
            (a.replace("[0,2]", "[2,0]"), 2, "cannot lie"),
            (a.replace("U8", "X8"), 2, "unknown dtype"),
            (a.replace("[0,2]", "[1,3]"), 3, "not at 0"),
            (a.replace("[2]", "[-2]"), 2, "invalid value"),
            ("[".repeat(100_000), 0, "invalid type"),
        ];
        for (json, data_len, problem) in cases {
            let json = if json.starts_with(['{', '[']) { json } else { format!("{{{json}}}") };
            let error = parse(&json, data_len).unwrap_err().to_string();
            assert!(error.contains(problem), "{error} instead of {problem}");
        }
    }

    #[test]
    fn a_length_cannot_exceed_the_image() {
        assert_eq!(header_len(&16_u64.to_le_bytes(), 24).unwrap(), 16);
        assert!(header_len(&17_u64.to_le_bytes(), 24).is_err());
        assert!(header_len(&u64::MAX.to_le_bytes(), u64::MAX).is_err());
        assert!(header_len(&[1, 0], 24).is_err());
        let pointer = b"version https://git-lfs.github.com/spec/v1";
        assert!(header_len(pointer, 130).unwrap_err().to_string().contains("Git LFS"));
    }
}
