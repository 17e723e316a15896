//! Compares what several ranks stored under one FQN.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::metadata::{Encoding, Layout, Placement};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageError, StorageErrorKind};

use crate::torch_zip::{ArchiveIndex, ParseStep, Sparse};

/// Bytes to read first at the end of an archive; the directory of one tensor is smaller.
const TAIL: u64 = 2 << 10;
/// The maximum number of bytes to read at once.
const SEGMENT: u64 = 8 << 20;
/// The maximum number of reads of an archive's directory.
const NEEDS_MAX: usize = 8;
/// A record that PyTorch (2.15) computes from the other records' names and checksums.
const DERIVED: &str = ".data/serialization_id";

/// The content of a stored item, for comparison.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// Name below the root, length in bytes and CRC-32 of each record of an archive.
    Records(Vec<(Arc<str>, u64, u32)>),
    /// Length in bytes and CRC-32 of the stored item.
    Bytes(u64, u32),
}

impl Content {
    /// Reads the content of an item; `None` if its file is missing or short.
    pub(super) async fn read(
        storage: &dyn Storage,
        metadata: &CheckpointMetadata,
        placement: Placement,
    ) -> Result<Option<Self>, CheckpointError> {
        let Some(key) = metadata.file(placement.file) else { return Ok(None) };
        let item = Item { storage, key, placement };
        let archive = Encoding::new(Layout::TorchArchive);
        let found = match metadata.encoding(&placement) == Some(&archive) {
            true => match item.records().await {
                Ok(None) => item.bytes().await.map(Some),
                found => found,
            },
            false => item.bytes().await.map(Some),
        };
        match found {
            Err(error) => match error.kind() {
                StorageErrorKind::NotFound | StorageErrorKind::Truncated => Ok(None),
                _ => Err(error.into()),
            },
            Ok(found) => Ok(found),
        }
    }
}

struct Item<'a> {
    storage: &'a dyn Storage,
    key: &'a Key,
    placement: Placement,
}

impl Item<'_> {
    /// Reads a range that is relative to the start of the item.
    async fn range(&self, start: u64, end: u64) -> Result<Bytes, StorageError> {
        let at = self.placement.byte_offset;
        self.storage.read_range(self.key, at.saturating_add(start)..at.saturating_add(end)).await
    }

    /// The records of the directory; `None` if it is unreadable or lacks checksums.
    async fn records(&self) -> Result<Option<Content>, StorageError> {
        let len = self.placement.byte_len;
        let mut start = len.saturating_sub(TAIL);
        for _ in 0..NEEDS_MAX {
            let tail = self.range(start, len).await?;
            match ArchiveIndex::parse(&Sparse::tail(len, &tail)) {
                Ok(ParseStep::Ready(index)) => return Ok(records(&index)),
                Ok(ParseStep::Need(range))
                    if range.start < start && len - range.start <= SEGMENT =>
                {
                    start = range.start;
                }
                Ok(ParseStep::Need(_)) | Err(_) => return Ok(None),
            }
        }
        Ok(None)
    }

    async fn bytes(&self) -> Result<Content, StorageError> {
        let len = self.placement.byte_len;
        let (mut crc32, mut at) = (crc32fast::Hasher::new(), 0);
        while at < len {
            let end = len.min(at.saturating_add(SEGMENT));
            crc32.update(&self.range(at, end).await?);
            at = end;
        }
        Ok(Content::Bytes(len, crc32.finalize()))
    }
}

fn records(index: &ArchiveIndex) -> Option<Content> {
    let root = index.root().len() + 1;
    let records = index.entries().filter_map(|entry| {
        let name = entry.name().get(root..).unwrap_or_default();
        (name != DERIVED).then(|| Some((name.into(), entry.byte_len(), entry.crc32()?)))
    });
    records.collect::<Option<_>>().map(Content::Records)
}
