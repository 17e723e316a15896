//! A file that is read in parts, as its parser needs them.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::storage::{ReadInto, StorageExt as _};
use dcp_core::{Buffer, CheckpointError, FormatError, Key, Storage, StorageError};

use crate::torch_zip::{ParseStep, PartialBlob, Sparse};

/// The maximum number of small ranges per request.
const RANGES_MAX: usize = 1024;

/// The parts of a file in memory, and access to the others.
pub(super) struct File<'s> {
    storage: &'s dyn Storage,
    key: &'s Key,
    known: PartialBlob,
}

impl<'s> File<'s> {
    pub(super) async fn open(storage: &'s dyn Storage, key: &'s Key) -> Result<Self, StorageError> {
        let byte_len = storage.stat(key).await?.byte_len;
        let known = PartialBlob::new("torch.save file", byte_len, 0);
        Ok(Self { storage, key, known })
    }

    pub(super) fn byte_len(&self) -> u64 {
        self.known.byte_len()
    }

    /// Reads a range, clamped to the end of the file.
    pub(super) async fn bring(&mut self, range: Range<u64>) -> Result<&[u8], StorageError> {
        let len = self.byte_len();
        let range = range.start.min(len)..range.end.min(len);
        let bytes = self.storage.read_range(self.key, range.clone()).await?;
        Ok(self.known.add(range.start, bytes))
    }

    /// Frees the parts in memory.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    /// Reads what `parse` needs until it succeeds, at most `limit` bytes at a time.
    pub(super) async fn parse<T>(
        &mut self,
        limit: u64,
        parse: impl Fn(&Sparse<'_>) -> Result<ParseStep<T>, FormatError>,
    ) -> Result<T, CheckpointError> {
        let (storage, key) = (self.storage, self.key);
        let located = |error: FormatError| CheckpointError::from(error.in_file(key.as_str(), 0));
        let read = async |range| Ok(storage.read_range(key, range).await?);
        self.known.limited_to(limit).parse(parse, read, located).await
    }

    /// The bytes of many short ranges, in order.
    pub(super) async fn scattered(
        &self,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>, StorageError> {
        let mut all = Vec::with_capacity(ranges.len());
        for ranges in ranges.chunks(RANGES_MAX) {
            let mut wanted = Vec::new();
            let known = self.known.sparse();
            let at_hand: Vec<_> = ranges.iter().map(|range| known.get(range.clone())).collect();
            for (range, at_hand) in ranges.iter().zip(&at_hand) {
                if at_hand.is_none() {
                    // Each is a header, whose length is that of a name.
                    let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
                    let buffer = Buffer::zeroed(len);
                    wanted.push(ReadInto { byte_offset: range.start, buffer });
                }
            }
            let mut read = match wanted.is_empty() {
                true => Vec::new(),
                false => self.storage.read(self.key, wanted.into()).await?.buffers,
            }
            .into_iter();
            all.extend(at_hand.into_iter().map(|at_hand| match at_hand {
                Some(bytes) => Bytes::copy_from_slice(bytes),
                None => read.next().map(Buffer::freeze).unwrap_or_default(),
            }));
        }
        Ok(all)
    }

    /// Adds the name of the file to an error.
    pub(super) fn locate(&self, error: FormatError) -> FormatError {
        error.in_file(self.key.as_str(), 0)
    }
}
