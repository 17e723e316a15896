//! Parses slices of a tensor, such as `0:2,:`.

use dcp_core::text::Quoted;
use dcp_core::{Dims, Region};

use crate::error::JobError;

/// A part of a tensor, with its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorSlice {
    /// The smallest box that contains the part, in the coordinates of the whole tensor.
    pub region: Region,
    /// The shape of the part. Axes with a single index are dropped.
    pub shape: Dims,
    /// The elements taken from each axis of the tensor.
    pub(crate) axes: Vec<Axis>,
}

/// The elements taken from one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) first: u64,
    /// The distance between indices; never 0.
    pub(crate) step: i64,
    pub(crate) count: u64,
    /// Whether the axis has a single index, which drops it from the shape.
    pub(crate) indexed: bool,
}

impl TensorSlice {
    /// The whole of a tensor of `shape`.
    ///
    /// # Errors
    ///
    /// When its volume exceeds 64 bits.
    pub fn whole(shape: &Dims) -> Result<Self, JobError> {
        let region = Region::full(shape.clone()).map_err(dcp_core::PlanError::from)?;
        let axes = shape.iter().map(|len| Axis { first: 0, step: 1, count: *len, indexed: false });
        Ok(Self { region, shape: shape.clone(), axes: axes.collect() })
    }

    /// Parses NumPy's notation. Per axis, from the first: `start:stop:step`, where each may be
    /// omitted, negative values count from the end, and values outside the tensor are clamped; a
    /// single index, which drops the axis; or `...` for any number of whole axes. Axes not
    /// mentioned are whole.
    ///
    /// # Errors
    ///
    /// When the text is not a slice, or has an index outside this tensor.
    pub fn parse(text: &str, shape: &Dims) -> Result<Self, JobError> {
        let bad = |problem: String| JobError::BadSlice { slice: text.to_owned(), problem };
        let mut parts: Vec<&str> = match text.trim() {
            "" => Vec::new(),
            // NumPy accepts a trailing comma, as in a tuple of one item.
            text => text.strip_suffix(',').unwrap_or(text).split(',').map(str::trim).collect(),
        };
        let dots = parts.iter().position(|part| *part == "...");
        let given = parts.len() - usize::from(dots.is_some());
        if given > shape.ndim() {
            return Err(bad(format!("it has {given} axes, the tensor has shape {shape}")));
        }
        let at = dots.unwrap_or(parts.len());
        let replaced = at..at + usize::from(dots.is_some());
        parts.splice(replaced, vec![":"; shape.ndim() - given]);

        let mut axes = Vec::with_capacity(shape.ndim());
        for (axis, (part, len)) in parts.iter().zip(shape.iter()).enumerate() {
            axes.push(Axis::parse(part, *len).map_err(|problem| {
                bad(format!("{problem} on axis {axis} of a tensor of shape {shape}"))
            })?);
        }
        let (offsets, sizes): (Vec<u64>, Vec<u64>) = axes.iter().map(Axis::extent).unzip();
        let region = Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))?;
        let kept = axes.iter().filter(|axis| !axis.indexed).map(|axis| axis.count);
        Ok(Self { region, shape: kept.collect(), axes })
    }

    /// Whether the part is a box: no element of its region is skipped or reversed.
    pub(crate) fn is_box(&self) -> bool {
        self.axes.iter().all(|axis| axis.step == 1)
    }
}

impl Axis {
    fn parse(part: &str, len: u64) -> Result<Self, String> {
        if !part.contains(':') {
            let index = number(part)?;
            let place = if index < 0 { index + i128::from(len) } else { index };
            return match u64::try_from(place) {
                Ok(first) if first < len => Ok(Self { first, step: 1, count: 1, indexed: true }),
                _ => Err(format!("index {index} is outside {len} elements")),
            };
        }
        let given: Vec<Option<i128>> = part
            .split(':')
            .map(|text| if text.trim().is_empty() { Ok(None) } else { number(text).map(Some) })
            .collect::<Result<_, _>>()?;
        let (start, stop, step) = match *given {
            [start, stop] => (start, stop, None),
            [start, stop, step] => (start, stop, step),
            _ => return Err(format!("{part:?} has more than a start, a stop and a step")),
        };
        let step = step.unwrap_or(1);
        if step == 0 {
            return Err(format!("{part:?} has a step of zero"));
        }
        // The rules of Python's `slice.indices`.
        let len = i128::from(len);
        let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let end = |given: Option<i128>, default: i128| {
            let given = given.map(|n| if n < 0 { n.saturating_add(len) } else { n });
            given.unwrap_or(default).clamp(lowest, highest)
        };
        let (start, stop) = match step > 0 {
            true => (end(start, lowest), end(stop, highest)),
            false => (end(start, highest), end(stop, lowest)),
        };
        let distance = if step > 0 { stop - start } else { start - stop };
        let count = if distance > 0 { (distance - 1) / step.abs() + 1 } else { 0 };
        // Any step selects the same single element.
        let step = if count <= 1 { 1 } else { i64::try_from(step).unwrap_or(1) };
        let first = u64::try_from(start).unwrap_or(0);
        Ok(Self { first, step, count: u64::try_from(count).unwrap_or(0), indexed: false })
    }

    /// The index of the `n`-th selected element.
    pub(crate) fn index(&self, n: u64) -> u64 {
        let step = self.step.unsigned_abs().saturating_mul(n);
        if self.step > 0 {
            self.first.saturating_add(step)
        } else {
            self.first.saturating_sub(step)
        }
    }

    /// The start and length of the range that contains the selected elements.
    fn extent(&self) -> (u64, u64) {
        let Some(last) = self.count.checked_sub(1) else { return (self.first, 0) };
        let (a, b) = (self.first, self.index(last));
        (a.min(b), a.abs_diff(b) + 1)
    }
}

/// Parses an integer of any length.
fn number(text: &str) -> Result<i128, String> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (if text.starts_with('-') { -1 } else { 1 }, digits),
        None => (1, text),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{} is not a number", Quoted(text)));
    }
    // Beyond any axis, and small enough that sums do not overflow.
    const BEYOND: i128 = 1 << 100;
    Ok(sign * digits.parse::<i128>().unwrap_or(BEYOND).min(BEYOND))
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
        ok("3:1,:", "[3:3, 0:6]", &[0, 6]);
        ok("0:99,:", "[0:4, 0:6]", &[4, 6]);
        ok("3:-6", "[3:3, 0:6]", &[0, 6]);
        ok("-99:2,99:", "[0:2, 6:6]", &[2, 0]);
        ok("::2,::-1", "[0:3, 0:6]", &[2, 6]);
        ok("3:0:-2,4::99", "[1:4, 4:5]", &[2, 1]);
        ok("::99999999999999999999", "[0:1, 0:6]", &[1, 6]);
        ok("0:2,", "[0:2, 0:6]", &[2, 6]);
        ok("+1", "[1:2, 0:6]", &[6]);
        assert_eq!(parse("", &[]), Ok(("[]".to_owned(), vec![])));
        assert_eq!(parse("...", &[]), Ok(("[]".to_owned(), vec![])));
    }

    /// The elements that NumPy 2 takes of `range(len)`, by Python's `slice.indices`.
    #[test]
    fn steps_take_what_python_takes() {
        let taken = |text: &str, len: u64| {
            let axis = Axis::parse(text, len).unwrap();
            (0..axis.count).map(|n| axis.index(n)).collect::<Vec<_>>()
        };
        assert_eq!(taken("::2", 5), [0, 2, 4]);
        assert_eq!(taken("1::2", 5), [1, 3]);
        assert_eq!(taken("::-1", 3), [2, 1, 0]);
        assert_eq!(taken("::-2", 4), [3, 1]);
        assert_eq!(taken("-1:-4:-1", 3), [2, 1, 0]);
        assert_eq!(taken("2:0:-1", 3), [2, 1]);
        assert_eq!(taken("5:-9:-3", 4), [3, 0]);
        assert_eq!(taken("::-1", 0), [0; 0]);
        assert_eq!(taken("1:3:-1", 4), [0; 0]);
        assert_eq!(taken("-3:-1", 5), [2, 3]);
    }

    #[test]
    fn what_lies_outside_is_refused() {
        for (text, problem) in [
            ("4", "index 4 is outside 4 elements"),
            ("-5", "index -5 is outside 4 elements"),
            ("::0", "step of zero"),
            ("1:2:3:4", "more than"),
            ("0:2,:,:", "it has 3 axes"),
            ("...,...", "\"...\" is not a number"),
            ("a", "\"a\" is not a number"),
            ("1.0:", "\"1.0\" is not a number"),
            (",,", "\"\" is not a number"),
            ("99999999999999999999", "is outside"),
            ("-9223372036854775808", "is outside"),
        ] {
            let error = parse(text, &[4, 6]).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
