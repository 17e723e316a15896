//! The data of one record.

use std::borrow::Cow;
use std::io::Read;
use std::ops::Range;

use dcp_core::FormatError;

use crate::crc_parts::compare_crc32;

/// The storage method of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Unencoded, as PyTorch writes all records.
    Stored,
    /// Deflated. PyTorch reads such archives of other writers.
    Deflated,
}

/// The position of a record's data, and its expected content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The range of the stored data, in bytes from the start of the archive.
    pub data: Range<u64>,
    /// The size of the decoded data in bytes.
    pub byte_len: u64,
    /// The CRC-32 of the decoded data; `None` if the writer omitted it.
    pub crc32: Option<u32>,
    /// The storage method.
    pub method: Method,
}

impl Record {
    /// The content, from the bytes of [`data`](Self::data).
    ///
    /// # Errors
    ///
    /// When `kept` has another length, does not inflate to the size in the directory, the CRC
    /// differs, or a deflated content exceeds `limit` bytes.
    pub fn decode<'a>(&self, kept: &'a [u8], limit: u64) -> Result<Cow<'a, [u8]>, FormatError> {
        let bad = |problem: String| FormatError::new("archive record", problem).at(self.data.start);
        let expected = self.data.end.saturating_sub(self.data.start);
        if kept.len() as u64 != expected {
            return Err(bad(format!("{} bytes were read instead of {expected}", kept.len())));
        }
        let content = match self.method {
            Method::Stored => Cow::Borrowed(kept),
            Method::Deflated => {
                if self.byte_len > limit {
                    return Err(bad(format!("{} bytes, at most {limit} allowed", self.byte_len)));
                }
                let mut inflated = Vec::new();
                flate2::read::DeflateDecoder::new(kept)
                    .take(self.byte_len.saturating_add(1))
                    .read_to_end(&mut inflated)
                    .map_err(|error| bad("it does not inflate".into()).with_source(error))?;
                Cow::Owned(inflated)
            }
        };
        if content.len() as u64 != self.byte_len {
            let (is, should) = (content.len(), self.byte_len);
            return Err(bad(format!("its content has not {should} bytes (stops at {is})")));
        }
        self.check_crc32(crc32fast::hash(&content))?;
        Ok(content)
    }

    /// Compares `found` with the CRC-32 of the decoded data, for callers that stream them.
    ///
    /// # Errors
    ///
    /// When it differs. PyTorch (2.15) loads such a record silently.
    pub fn check_crc32(&self, found: u32) -> Result<(), FormatError> {
        match self.crc32 {
            Some(expected) => compare_crc32(found, expected, self.data.start),
            None => Ok(()),
        }
    }
}
