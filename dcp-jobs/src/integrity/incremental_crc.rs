//! Compares chunks with their checksums while a job reads them in parts.
//!
//! A reader compares the CRC-32 of a chunk when one read covers all of it. Jobs read large tensors
//! in segments; without this module damage would pass, and the new file would get a fresh checksum
//! over it. So it combines the CRC-32s of parts, in any order, until they cover the chunk. Parts
//! that are not contiguous in the chunk are read again at the end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use crc32fast::Hasher;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::format::ChunkChecksum;
use dcp_core::metadata::Layout;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, Region, StorageReader, TensorView, Value};
use dcp_formats::CrcParts;

use crate::integrity::archive_audit;
use crate::integrity::archive_audit::{Expected, differs};
use crate::integrity::refuse_damaged::named;
use crate::options::JobOptions;
use crate::read::stored_items::Placed;
use crate::source::Source;

/// Archives up to this many bytes are read and checked whole.
const ALWAYS_WHOLE: u64 = 64 << 10;
/// Bytes of an archive besides its tensor, rounded up.
const ARCHIVE_EXTRA: u64 = 4096;
/// The number of non-contiguous parts of a chunk to keep.
pub(super) const PARTS_MAX: usize = 256;

/// A reader that compares chunks with their checksums across partial reads.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(super) source: Source,
    pub(super) chunks: Mutex<HashMap<(u32, u32), Chunk>>,
}

/// The state of a chunk that was read in parts.
#[derive(Clone, Debug)]
pub(super) enum Chunk {
    /// CRC-32s of the parts so far.
    Parts(CrcParts),
    /// The number of bytes read in parts that cannot be combined.
    Scattered(u64),
    /// The checksum matches.
    Right,
}

impl Checked {
    pub(crate) fn new(source: Source) -> Self {
        Self { source, chunks: Mutex::default() }
    }

    /// Records a part that was read, and compares the chunk when it is complete.
    async fn note(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        item: &ReadItem,
        view: &TensorView,
    ) -> Result<(), CheckpointError> {
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else { return Ok(()) };
        let wanted = Wanted::new(metadata, item.entry, *chunk);
        let Some(wanted) = wanted else { return Ok(()) };
        let at = (item.entry, *chunk);
        let checksum = match self.source.audit() {
            Some(audit) => audit.checksum(metadata, item.entry as usize, *chunk as usize).await?,
            None => ChunkChecksum::Encoding,
        };
        match checksum {
            ChunkChecksum::Crc32(_) | ChunkChecksum::Record => {}
            ChunkChecksum::Encoding | ChunkChecksum::EncodingOf(_) if wanted.in_archive => {}
            _ => return Ok(()),
        }
        if wanted.region == *region || view.byte_len() == 0 {
            // The format's own reader compares chunks that one read covers.
            let compared = match checksum {
                ChunkChecksum::Record => false,
                ChunkChecksum::Encoding | ChunkChecksum::EncodingOf(_) => !wanted.is_view(),
                _ => true,
            };
            if !compared {
                self.scatter(at, view.byte_len());
            }
            return Ok(());
        }
        let Some(start) = wanted.byte_position(region) else {
            self.scatter(at, view.byte_len());
            return Ok(());
        };
        let failed =
            |source| CheckpointError::Memory { fqn: wanted.placed.fqn.to_string(), source };
        let mut hasher = Hasher::new();
        for piece in view.payload().map_err(failed)?.pieces() {
            hasher.update(piece);
        }
        let whole = self.add(at, start, start + view.byte_len(), hasher, wanted.byte_len);
        let Some(found) = whole else { return Ok(()) };
        if self.compare_whole(metadata, &wanted, found).await? {
            self.set(at, Chunk::Right);
        } else {
            self.scatter(at, wanted.byte_len);
        }
        Ok(())
    }

    /// Compares a chunk whose CRC-32 is `found`. Returns whether that is enough.
    pub(super) async fn compare_whole(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        wanted: &Wanted,
        found: u32,
    ) -> Result<bool, CheckpointError> {
        let job = archive_audit::Job::new(&self.source, metadata, &JobOptions::default());
        let expected = job.expected(&wanted.placed).await;
        match expected.map_err(|error| named(error, &wanted.placed, metadata))? {
            Expected::Crc32(crc32) if crc32 != found => {
                let error = differs(found, crc32).into();
                Err(named(error, &wanted.placed, metadata))
            }
            Expected::Elsewhere => Ok(false),
            _ => Ok(true),
        }
    }

    fn set(&self, at: (u32, u32), chunk: Chunk) {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner).insert(at, chunk);
    }

    fn scatter(&self, at: (u32, u32), bytes: u64) {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let chunk = chunks.entry(at).or_insert(Chunk::Scattered(0));
        let before = match chunk {
            Chunk::Parts(parts) => parts.byte_len(),
            Chunk::Scattered(bytes) => *bytes,
            Chunk::Right => return,
        };
        *chunk = Chunk::Scattered(bytes.saturating_add(before));
    }

    /// Adds bytes `start..end` of a chunk of `byte_len` bytes. Returns the CRC-32 of the chunk when
    /// it is complete.
    fn add(
        &self,
        at: (u32, u32),
        start: u64,
        end: u64,
        hasher: Hasher,
        byte_len: u64,
    ) -> Option<u32> {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let chunk = chunks.entry(at).or_insert_with(|| Chunk::Parts(CrcParts::new()));
        let parts = match chunk {
            Chunk::Parts(parts) => parts,
            Chunk::Scattered(bytes) => {
                *bytes = bytes.saturating_add(end - start);
                return None;
            }
            Chunk::Right => return None,
        };
        let added = parts.add(start, end, hasher);
        if !added || parts.len() > PARTS_MAX {
            // A repeated part, or too many separate ones.
            *chunk = Chunk::Scattered(parts.byte_len());
            return None;
        }
        parts.whole(byte_len)
    }
}

/// A chunk to compare with its checksum.
pub(super) struct Wanted {
    pub(super) placed: Placed,
    region: Region,
    element_bytes: u64,
    pub(super) byte_len: u64,
    /// Whether it is in an archive that may be read in parts.
    in_archive: bool,
}

impl Wanted {
    /// The chunk, unless it has no checksum or the format's reader always compares it.
    pub(super) fn new(metadata: &CheckpointMetadata, entry: u32, chunk: u32) -> Option<Self> {
        let (fqn, tensor) = metadata.at(entry as usize)?;
        let tensor = tensor.as_tensor()?;
        let stored = tensor.chunks.get(chunk as usize)?;
        let placement = stored.placement?;
        let encoding = metadata.encoding(&placement)?;
        // Transformed chunks are decoded and compared whole.
        let plain = encoding.transforms.is_empty();
        let in_archive = encoding.layout != Layout::Raw && placement.byte_len > ALWAYS_WHOLE;
        let region = stored.region().ok().filter(|_| plain)?;
        let element_bytes = tensor.dtype.size() as u64;
        let byte_len = region.volume().checked_mul(element_bytes)?;
        let fqn = Arc::clone(fqn);
        let placed = Placed { fqn, entry: entry as usize, chunk: Some(chunk), placement };
        Some(Self { placed, region, element_bytes, byte_len, in_archive })
    }

    /// Whether the archive holds more than the chunk, so that its checksum covers more.
    fn is_view(&self) -> bool {
        self.placed.placement.byte_len > self.byte_len.saturating_add(ARCHIVE_EXTRA)
    }

    /// The byte offset of `part` in the chunk, if the part is contiguous.
    fn byte_position(&self, part: &Region) -> Option<u64> {
        let inner = part.relative_to(self.region.offsets())?;
        let mut runs = inner.runs_in(self.region.sizes());
        let (start, len) = runs.next()?;
        (len == part.volume()).then(|| start.checked_mul(self.element_bytes)).flatten()
    }
}

#[async_trait]
impl StorageReader for Checked {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.source.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let noting = Arc::new(Noting { sink, filled: Mutex::default() });
        let report = self.source.reader.read(metadata, plan, Arc::clone(&noting) as _).await?;
        let filled = {
            let mut filled = noting.filled.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *filled)
        };
        for (item, view) in &filled {
            self.note(metadata, item, view).await?;
        }
        Ok(report)
    }
}

/// Records the parts that a read delivers.
#[derive(Debug)]
struct Noting {
    sink: Arc<dyn DataSink>,
    filled: Mutex<Vec<(ReadItem, TensorView)>>,
}

impl DataSink for Noting {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let view = self.sink.destination(item)?;
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        filled.push((item.clone(), view.clone()));
        Ok(view)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        self.sink.commit(item)
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.sink.object(item, value)
    }
}
