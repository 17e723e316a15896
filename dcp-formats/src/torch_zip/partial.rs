//! Reads as much of an archive as a parser needs.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::FormatError;

use super::sparse::{ParseStep, Sparse};

/// The maximum number of reads per parse; directory, pickle and headers need a few.
const ROUNDS_MAX: usize = 64;

/// A blob of which some ranges are in memory, and which reads further ones as a parser needs them.
#[derive(Clone, Debug)]
pub struct PartialBlob {
    what: &'static str,
    byte_len: u64,
    need_max: u64,
    parts: Vec<(u64, Bytes)>,
}

impl PartialBlob {
    /// An empty blob of `byte_len` bytes, called `what` in errors. Never reads a range of more than
    /// `need_max` bytes because the blob itself says so.
    #[must_use]
    pub fn new(what: &'static str, byte_len: u64, need_max: u64) -> Self {
        Self { what, byte_len, need_max, parts: Vec::new() }
    }

    /// The length of the whole blob.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// Adds the bytes at `byte_offset`, and returns them.
    pub fn add(&mut self, byte_offset: u64, bytes: Bytes) -> &[u8] {
        self.parts.push((byte_offset, bytes));
        self.parts.last().map(|(_, bytes)| &**bytes).unwrap_or_default()
    }

    /// Sets the limit on what is read because the blob says so.
    pub fn limited_to(&mut self, need_max: u64) -> &mut Self {
        self.need_max = need_max;
        self
    }

    /// Drops all bytes from memory.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// The ranges in memory.
    #[must_use]
    pub fn sparse(&self) -> Sparse<'_> {
        let empty = Sparse::new(self.byte_len);
        self.parts.iter().fold(empty, |blob, (at, bytes)| blob.with(*at, bytes))
    }

    /// Runs `parse` until it has what it needs; `read` returns the bytes it requests. Errors of the
    /// blob pass through `located`.
    ///
    /// # Errors
    ///
    /// When `parse` or `read` fails, or `parse` requests too much.
    pub async fn parse<T, E, F>(
        &mut self,
        parse: impl Fn(&Sparse<'_>) -> Result<ParseStep<T>, FormatError>,
        read: impl Fn(Range<u64>) -> F,
        located: impl Fn(FormatError) -> E,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<Bytes, E>>,
    {
        for _ in 0..ROUNDS_MAX {
            let range = match parse(&self.sparse()).map_err(&located)? {
                ParseStep::Ready(done) => return Ok(done),
                ParseStep::Need(range) => range,
            };
            let len = range.end.saturating_sub(range.start);
            if len > self.need_max {
                let problem = format!("{len} bytes are too many for a description");
                return Err(located(FormatError::new(self.what, problem).at(range.start)));
            }
            let bytes = read(range.clone()).await?;
            self.add(range.start, bytes);
        }
        Err(located(FormatError::new(self.what, "its parts refer to ever more bytes")))
    }
}
