//! Parses a blob of which only some bytes are in memory.

use std::ops::Range;

use dcp_core::FormatError;

/// A blob of known length of which the caller has some byte ranges.
///
/// All offsets are in bytes from the start of the blob, wherever it is in a file.
#[derive(Clone, Debug)]
pub struct Sparse<'a> {
    byte_len: u64,
    parts: Vec<(u64, &'a [u8])>,
}

/// The result of parsing, or the bytes that it still needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseStep<T> {
    /// The result.
    Ready(T),
    /// Parse again with this range of the blob as one part, in addition to the current ones.
    Need(Range<u64>),
}

impl<'a> Sparse<'a> {
    /// A blob of `byte_len` bytes without any in memory.
    #[must_use]
    pub fn new(byte_len: u64) -> Self {
        Self { byte_len, parts: Vec::new() }
    }

    /// A blob that is entirely in memory.
    #[must_use]
    pub fn whole(blob: &'a [u8]) -> Self {
        Self::new(blob.len() as u64).with(0, blob)
    }

    /// A blob of `byte_len` bytes that ends with `tail`.
    #[must_use]
    pub fn tail(byte_len: u64, tail: &'a [u8]) -> Self {
        Self::new(byte_len).with(byte_len.saturating_sub(tail.len() as u64), tail)
    }

    /// Adds the bytes at `byte_offset`.
    #[must_use]
    pub fn with(mut self, byte_offset: u64, bytes: &'a [u8]) -> Self {
        self.parts.push((byte_offset, bytes));
        self
    }

    /// The length of the whole blob.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// The bytes of `range`, if one part contains all of them.
    #[must_use]
    pub fn get(&self, range: Range<u64>) -> Option<&'a [u8]> {
        self.parts.iter().find_map(|(offset, bytes)| {
            let start = usize::try_from(range.start.checked_sub(*offset)?).ok()?;
            let end = usize::try_from(range.end.checked_sub(*offset)?).ok()?;
            bytes.get(start..end)
        })
    }

    /// The bytes of `range`, or the reason to stop parsing.
    pub(crate) fn need(&self, what: &str, range: Range<u64>) -> Result<&'a [u8], Halt> {
        if range.start > range.end || range.end > self.byte_len {
            let problem =
                format!("{what} should lie at {range:?}, but there are {} bytes", self.byte_len);
            return Err(FormatError::new("torch archive", problem).at(range.start).into());
        }
        self.get(range.clone()).ok_or(Halt::Need(range))
    }
}

/// The reason to stop parsing early.
#[derive(Debug)]
pub(crate) enum Halt {
    Need(Range<u64>),
    Bad(FormatError),
}

impl From<FormatError> for Halt {
    fn from(error: FormatError) -> Self {
        Self::Bad(error)
    }
}

/// For a blob that is entirely in memory: missing bytes were cut off.
impl From<Halt> for FormatError {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Bad(error) => error,
            Halt::Need(range) => Self::new("torch archive", "it is cut short").at(range.start),
        }
    }
}

impl<T> ParseStep<T> {
    pub(crate) fn from_halting(result: Result<T, Halt>) -> Result<Self, FormatError> {
        match result {
            Ok(done) => Ok(Self::Ready(done)),
            Err(Halt::Need(range)) => Ok(Self::Need(range)),
            Err(Halt::Bad(error)) => Err(error),
        }
    }

    /// The result, for a blob that is entirely in memory.
    ///
    /// # Errors
    ///
    /// When bytes are missing.
    pub fn ready(self) -> Result<T, FormatError> {
        match self {
            Self::Ready(done) => Ok(done),
            Self::Need(range) => {
                Err(FormatError::new("torch archive", format!("bytes {range:?} are not at hand")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_comes_from_one_part() {
        let blob = Sparse::new(10).with(0, b"abc").with(3, b"def").with(2, b"cd");
        assert_eq!(blob.get(1..3), Some(&b"bc"[..]));
        assert_eq!(blob.get(2..4), Some(&b"cd"[..]));
        assert_eq!(blob.get(1..5), None);
        assert!(matches!(blob.need("x", 1..5), Err(Halt::Need(range)) if range == (1..5)));
        assert!(matches!(blob.need("x", 9..11), Err(Halt::Bad(_))));
        assert_eq!(Sparse::tail(10, b"xyz").get(7..10), Some(&b"xyz"[..]));
    }
}
