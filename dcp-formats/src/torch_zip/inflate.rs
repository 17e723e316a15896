//! Inflates records in pieces, in bounded memory.

use dcp_core::FormatError;
use flate2::{Decompress, FlushDecompress, Status};

use super::record::Record;

/// The maximum inflated size of a storage's record, in bytes. Reading a part of it requires
/// inflating everything before, so readers keep all of it in memory.
pub const INFLATED_MAX: u64 = 1 << 30;
/// The number of bytes to inflate at a time.
const PIECE: usize = 64 << 10;

/// Inflates a record whose bytes arrive in pieces, and compares its length and CRC-32 with the
/// directory.
#[derive(Debug)]
pub struct Inflater<'r> {
    record: &'r Record,
    inner: Decompress,
    piece: Vec<u8>,
    crc32: crc32fast::Hasher,
    done: u64,
    ended: bool,
}

impl<'r> Inflater<'r> {
    /// For a record with [`Method::Deflated`](super::Method::Deflated).
    ///
    /// # Errors
    ///
    /// When it inflates to more than [`INFLATED_MAX`] bytes.
    pub fn new(record: &'r Record) -> Result<Self, FormatError> {
        if record.byte_len > INFLATED_MAX {
            let problem = format!(
                "it is deflated and has {} bytes, of which at most {INFLATED_MAX} are inflated; \
                 load it with PyTorch and save it again, which stores it as it is",
                record.byte_len
            );
            return Err(FormatError::new("archive record", problem).at(record.data.start));
        }
        Ok(Self {
            record,
            inner: Decompress::new(false),
            piece: vec![0; PIECE],
            crc32: crc32fast::Hasher::new(),
            done: 0,
            ended: false,
        })
    }

    /// Inflates the next deflated bytes; `take` receives the content in pieces.
    ///
    /// # Errors
    ///
    /// When they do not inflate, or inflate to more than the directory states.
    pub fn push(
        &mut self,
        mut kept: &[u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), FormatError> {
        while !self.ended {
            let (read, made) = (self.inner.total_in(), self.inner.total_out());
            let status = self
                .inner
                .decompress(kept, &mut self.piece, FlushDecompress::None)
                .map_err(|error| self.bad("it does not inflate".into()).with_source(error))?;
            let read = usize::try_from(self.inner.total_in() - read).unwrap_or(usize::MAX);
            let made = usize::try_from(self.inner.total_out() - made).unwrap_or(usize::MAX);
            kept = kept.get(read..).unwrap_or_default();
            let content = self.piece.get(..made).unwrap_or_default();
            self.done += content.len() as u64;
            if self.done > self.record.byte_len {
                let should = self.record.byte_len;
                return Err(self.bad(format!("its content has more than {should} bytes")));
            }
            self.crc32.update(content);
            take(content);
            self.ended = status == Status::StreamEnd;
            if read == 0 && made == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Ends, after all bytes.
    ///
    /// # Errors
    ///
    /// When the content is shorter than the directory states, or its CRC-32 differs.
    pub fn finish(self) -> Result<(), FormatError> {
        if self.done != self.record.byte_len || !self.ended {
            let (is, should) = (self.done, self.record.byte_len);
            return Err(self.bad(format!("its content has not {should} bytes (stops at {is})")));
        }
        self.record.check_crc32(self.crc32.finalize())
    }

    fn bad(&self, problem: String) -> FormatError {
        FormatError::new("archive record", problem).at(self.record.data.start)
    }
}
