//! Reading as much of an archive as a parser asks for.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::FormatError;

use super::sparse::{Progress, Sparse};

/// How often a parser may ask for more: directory, pickle and headers do a few times.
const ROUNDS_MAX: usize = 64;

/// A blob of which some ranges are at hand, and which reads what a parser needs besides.
#[derive(Clone, Debug)]
pub struct PartialBlob {
    what: &'static str,
    byte_len: u64,
    need_max: u64,
    parts: Vec<(u64, Bytes)>,
}

impl PartialBlob {
    /// A blob of `byte_len` bytes, none of them at hand, called `what` in errors. No range of more
    /// than `need_max` bytes is read because the blob itself says so.
    #[must_use]
    pub fn new(what: &'static str, byte_len: u64, need_max: u64) -> Self {
        Self { what, byte_len, need_max, parts: Vec::new() }
    }

    /// The length of the whole blob.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// Adds the bytes that begin at `byte_offset`, and returns them.
    pub fn add(&mut self, byte_offset: u64, bytes: Bytes) -> &[u8] {
        self.parts.push((byte_offset, bytes));
        self.parts.last().map(|(_, bytes)| &**bytes).unwrap_or_default()
    }

    /// The same blob, with another limit of what is read because the blob says so.
    pub fn limited_to(&mut self, need_max: u64) -> &mut Self {
        self.need_max = need_max;
        self
    }

    /// Drops all bytes.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// What is at hand.
    #[must_use]
    pub fn sparse(&self) -> Sparse<'_> {
        let empty = Sparse::new(self.byte_len);
        self.parts.iter().fold(empty, |blob, (at, bytes)| blob.with(*at, bytes))
    }

    /// What `parse` makes of the blob; `read` returns the bytes that it asks for. Errors of the blob
    /// are passed through `located`.
    ///
    /// # Errors
    ///
    /// When `parse` or `read` fail, or `parse` asks for too much.
    pub async fn parse<T, E, F>(
        &mut self,
        parse: impl Fn(&Sparse<'_>) -> Result<Progress<T>, FormatError>,
        read: impl Fn(Range<u64>) -> F,
        located: impl Fn(FormatError) -> E,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<Bytes, E>>,
    {
        for _ in 0..ROUNDS_MAX {
            let range = match parse(&self.sparse()).map_err(&located)? {
                Progress::Ready(done) => return Ok(done),
                Progress::Need(range) => range,
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
