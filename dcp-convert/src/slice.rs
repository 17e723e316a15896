//! Slices of a tensor, as text: `0:2,:`.

use dcp_core::{Dims, Region};

use crate::error::ConvertError;

/// A part of a tensor: a box of it, and the shape that the part has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The elements, in the coordinates of the whole tensor.
    pub region: Region,
    /// The sizes of the box, without the axes that were given a single index.
    pub shape: Dims,
    /// Per axis of the tensor, whether it was given a single index.
    pub(crate) indexed: Vec<bool>,
}

impl TensorSlice {
    /// All of a tensor of `shape`.
    ///
    /// # Errors
    ///
    /// When its volume exceeds 64 bits.
    pub fn whole(shape: &Dims) -> Result<Self, ConvertError> {
        let region = Region::full(shape.clone())
            .map_err(|error| ConvertError::unsupported("the shape", error.to_string()))?;
        Ok(Self { region, shape: shape.clone(), indexed: vec![false; shape.ndim()] })
    }

    /// Reads NumPy's notation: per axis, from the first on, `start:stop`, either end left out for
    /// the tensor's own, negative ones counted from the end; a single index, which removes the
    /// axis; or `...` for as many whole axes as there are. Axes not mentioned are whole.
    ///
    /// Unlike NumPy, an end outside the tensor is an error.
    ///
    /// # Errors
    ///
    /// When the text is no slice, or not one of this tensor.
    pub fn parse(text: &str, shape: &Dims) -> Result<Self, ConvertError> {
        let bad = |problem: String| ConvertError::BadSlice { slice: text.to_owned(), problem };
        let mut parts: Vec<&str> = match text.trim() {
            "" => Vec::new(),
            text => text.split(',').map(str::trim).collect(),
        };
        let dots = parts.iter().position(|part| *part == "...");
        let given = parts.len() - usize::from(dots.is_some());
        if given > shape.ndim() {
            return Err(bad(format!("it has {given} axes, the tensor has shape {shape}")));
        }
        let at = dots.unwrap_or(parts.len());
        let replaced = at..at + usize::from(dots.is_some());
        parts.splice(replaced, vec![":"; shape.ndim() - given]);

        let mut offsets = Vec::with_capacity(shape.ndim());
        let mut sizes = Vec::with_capacity(shape.ndim());
        let mut kept = Vec::with_capacity(shape.ndim());
        let mut indexed = Vec::with_capacity(shape.ndim());
        for (axis, (part, len)) in parts.iter().zip(shape.iter()).enumerate() {
            let pick = Pick::parse(part, *len).map_err(|problem| {
                bad(format!("{problem} on axis {axis} of a tensor of shape {shape}"))
            })?;
            indexed.push(matches!(pick, Pick::Index(_)));
            let (offset, size) = match pick {
                Pick::Index(index) => (index, 1),
                Pick::Range(start, stop) => {
                    kept.push(stop - start);
                    (start, stop - start)
                }
            };
            offsets.push(offset);
            sizes.push(size);
        }
        let region = Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))?;
        Ok(Self { region, shape: kept.into(), indexed })
    }
}

/// What is taken of one axis.
enum Pick {
    Index(u64),
    Range(u64, u64),
}

impl Pick {
    fn parse(part: &str, len: u64) -> Result<Self, String> {
        let number = |text: &str| match text.trim().parse::<i64>() {
            Ok(number) => Ok(number),
            Err(_) => Err(format!("{text:?} is no number")),
        };
        // Counted from the end when negative; `None` outside the axis.
        let place = |number: i64| match u64::try_from(number) {
            Ok(place) => Some(place),
            Err(_) => len.checked_sub(number.unsigned_abs()),
        };
        let Some((start, stop)) = part.split_once(':') else {
            let index = number(part)?;
            return match place(index).filter(|index| *index < len) {
                Some(index) => Ok(Self::Index(index)),
                None => Err(format!("index {index} is outside of {len}")),
            };
        };
        if stop.contains(':') {
            return Err(format!("{part:?} has a step, which is not supported,"));
        }
        let end = |text: &str, default: u64| match text.trim() {
            "" => Ok(default),
            text => {
                let number = number(text)?;
                let place = place(number).filter(|place| *place <= len);
                place.ok_or_else(|| format!("{number} is outside of {len}"))
            }
        };
        let (start, stop) = (end(start, 0)?, end(stop, len)?);
        if start > stop {
            return Err(format!("{part:?} ends before it begins"));
        }
        Ok(Self::Range(start, stop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, shape: &[u64]) -> Result<(String, Vec<u64>), String> {
        TensorSlice::parse(text, &shape.into())
            .map(|slice| (slice.region.to_string(), slice.shape.to_vec()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn slices_as_numpy_reads_them() {
        let ok = |text: &str, region: &str, shape: &[u64]| {
            assert_eq!(parse(text, &[4, 6]), Ok((region.to_owned(), shape.to_vec())), "{text}");
        };
        ok("0:2,:", "[0:2, 0:6]", &[2, 6]);
        ok("0:2", "[0:2, 0:6]", &[2, 6]);
        ok("", "[0:4, 0:6]", &[4, 6]);
        ok("-1", "[3:4, 0:6]", &[6]);
        ok(" 1 , 2 ", "[1:2, 2:3]", &[]);
        ok("..., -2:", "[0:4, 4:6]", &[4, 2]);
        ok("...", "[0:4, 0:6]", &[4, 6]);
        ok("1:3,...", "[1:3, 0:6]", &[2, 6]);
        ok("2:2,:", "[2:2, 0:6]", &[0, 6]);
        assert_eq!(parse("", &[]), Ok(("[]".to_owned(), vec![])));
        assert_eq!(parse("...", &[]), Ok(("[]".to_owned(), vec![])));
    }

    #[test]
    fn what_lies_outside_is_refused() {
        for (text, problem) in [
            ("0:5,:", "5 is outside of 4"),
            ("4", "index 4 is outside of 4"),
            ("-5:", "-5 is outside of 4"),
            ("3:1", "ends before it begins"),
            ("::2", "step"),
            ("0:2,:,:", "it has 3 axes"),
            ("...,...", "\"...\" is no number"),
            ("a", "\"a\" is no number"),
            ("0:2,", "\"\" is no number"),
            ("99999999999999999999", "is no number"),
            ("-9223372036854775808", "is outside"),
        ] {
            let error = parse(text, &[4, 6]).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
