//! Stored data as a [`DataSource`]. Data is read from the source checkpoint when it is written, so
//! a checkpoint of any size needs little memory.

use dcp_core::storage::{Lane, OwnThreads, StorageExt, is_own_thread, on_own_thread};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use crc32fast::Hasher;
use dcp_core::checkpoint::DataSource;
use dcp_core::metadata::TensorEntry;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, Payload, PlanError, Region};
use dcp_formats::CrcParts;
use dcp_formats::torch_object::encode_object;
use futures_util::future::{BoxFuture, join_all};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

use crate::error::JobError;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::read::objects::{read_objects, unread};
use crate::read::segment_memory::SegmentMemory;
use crate::read::tensor_read::{TensorReader, read_tensor};
use crate::source::Source;

/// The origin of one plan item's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// A box of a stored tensor.
    Tensor { reader: Arc<TensorReader>, region: Region, element_bytes: u64 },
    /// Bytes of a file, unchanged, and their checksum at first reading unless the writer compares
    /// them.
    Stored { key: Key, byte_offset: u64, first: Option<Arc<FirstRead>> },
    /// Bytes in memory.
    Encoded(Bytes),
    /// The `torch.save` archive of the object at this position.
    Object { metadata: Arc<CheckpointMetadata>, entry: usize, first: Arc<FirstRead> },
}

/// The length and checksum of an object at first reading, to detect changes at the second.
#[derive(Debug)]
pub(crate) struct FirstRead {
    fqn: Arc<str>,
    byte_len: u64,
    crc32: u32,
    /// The CRC-32s of the second reading so far; several ranges are read at once.
    again: Mutex<CrcParts>,
}

impl FirstRead {
    pub(crate) fn new(fqn: &str, bytes: &[u8]) -> Arc<Self> {
        let (byte_len, crc32) = (bytes.len() as u64, crc32fast::hash(bytes));
        Arc::new(Self { fqn: fqn.into(), byte_len, crc32, again: Mutex::default() })
    }

    /// Adds bytes of the second reading. After the last ones, fails if they differ from the first.
    fn compare(&self, bytes: &Payload, byte_range: &Range<u64>) -> Result<(), FormatError> {
        let mut hasher = Hasher::new();
        bytes.pieces().iter().for_each(|piece| hasher.update(piece));
        let mut again = self.again.lock().unwrap_or_else(PoisonError::into_inner);
        if !again.add(byte_range.start, byte_range.end, hasher.clone()) {
            // A writer that starts again.
            *again = CrcParts::new();
            again.add(byte_range.start, byte_range.end, hasher);
        }
        let Some(found) = again.whole(self.byte_len) else { return Ok(()) };
        *again = CrcParts::new();
        if found == self.crc32 {
            return Ok(());
        }
        let problem = format!(
            "{:?} has the CRC-32 {found:08x}, and had {:08x} when it was checked: the file has \
             changed meanwhile or is damaged",
            self.fqn, self.crc32
        );
        Err(FormatError::new("object", problem))
    }
}

impl Part {
    /// The whole tensor at position `entry` of `source`.
    pub(crate) fn whole_tensor(
        source: &CheckedSource,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
        tensor: &TensorEntry,
    ) -> Result<Self, JobError> {
        let reader = Arc::clone(&source.reader);
        let reader = TensorReader::new(reader, Arc::clone(metadata), entry)?;
        let region = Region::full(tensor.shape.clone()).map_err(PlanError::from)?;
        let element_bytes = tensor.dtype.size() as u64;
        Ok(Self::Tensor { reader: Arc::new(reader), region, element_bytes })
    }
}

/// The items of one rank's plan, or of a file, by position.
#[derive(Debug)]
pub(crate) struct CheckpointData(Arc<Job>);

/// The state that the tasks which read segments share.
#[derive(Debug)]
struct Job {
    /// The source of a [`CheckedSource`].
    source: Source,
    parts: Vec<Part>,
    segment_bytes: u64,
    segments: Arc<SegmentMemory>,
    options: JobOptions,
    /// Whether the writer needs CRC-32s.
    hashed: bool,
}

impl CheckpointData {
    /// Data of `parts`, for a writer without checksums.
    pub(crate) fn new(source: &CheckedSource, parts: Vec<Part>, options: &JobOptions) -> Self {
        Self::with_hashes(source, parts, options, false)
    }

    /// Data of `parts`, for a writer of archives, whose records have CRC-32s.
    pub(crate) fn hashed(source: &CheckedSource, parts: Vec<Part>, options: &JobOptions) -> Self {
        Self::with_hashes(source, parts, options, true)
    }

    fn with_hashes(
        source: &CheckedSource,
        parts: Vec<Part>,
        options: &JobOptions,
        hashed: bool,
    ) -> Self {
        let gap = source.storage.capabilities().coalesce_gap;
        let segment_bytes = options.write_segment_bytes(gap);
        let segments = SegmentMemory::new(segment_bytes);
        let (source, options) = (Source::clone(source), options.clone());
        Self(Arc::new(Job { source, parts, segment_bytes, segments, options, hashed }))
    }

    /// The number of segments in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.0.options.parallelism.max(1)
    }

    /// Bytes on their way to the storage.
    pub(crate) fn upload_bytes(&self) -> u64 {
        self.0.options.upload_bytes()
    }
}

#[async_trait]
impl DataSource for CheckpointData {
    /// Reads a segment in a task of its own: checksums take processor time, and the task that
    /// requests segments also gathers and sends them.
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        if is_own_thread() {
            return self.0.resolve(item, byte_range).await;
        }
        let job = Arc::clone(&self.0);
        let reading = async move { job.resolve(item, byte_range).await };
        match Handle::try_current() {
            Ok(runtime) => {
                let mut task = Aborted(runtime.spawn(reading.in_current_span()));
                (&mut task.0).await.map_err(CheckpointError::application)?
            }
            Err(_) => reading.await,
        }
    }

    fn segment_bytes(&self) -> u64 {
        self.0.segment_bytes
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        if !self.0.source.storage.capabilities().blocking {
            return None;
        }
        Some(Arc::new(BlockingThreads(Handle::try_current().ok()?)))
    }
}

/// Threads of a runtime that may block.
#[derive(Debug)]
struct BlockingThreads(Handle);

impl OwnThreads for BlockingThreads {
    /// Two on one core, so that the disk is busy; beyond the cores, lanes wait for each other.
    fn count(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from).max(2)
    }

    fn run(
        &self,
        count: usize,
        lane: Arc<dyn Fn() -> Lane + Send + Sync>,
    ) -> BoxFuture<'static, Result<(), CheckpointError>> {
        let span = Span::current();
        let lanes = (0..count).map(|_| {
            let (runtime, span, lane) = (self.0.clone(), span.clone(), Arc::clone(&lane));
            self.0.spawn_blocking(move || {
                span.in_scope(|| on_own_thread(|| runtime.block_on(lane())));
            })
        });
        let lanes = join_all(lanes.collect::<Vec<_>>());
        Box::pin(async move {
            let ended: Result<(), _> = lanes.await.into_iter().collect();
            ended.map_err(CheckpointError::application)
        })
    }
}

/// A task that ends when nobody waits for it any more.
struct Aborted(JoinHandle<Result<Payload, CheckpointError>>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Job {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        self.options.check_group()?;
        let len = byte_range.end.saturating_sub(byte_range.start);
        let payload = match self.parts.get(item) {
            Some(Part::Tensor { reader, region, element_bytes }) => {
                let (element, segments) = (*element_bytes, &self.segments);
                read_tensor(reader, region, element, byte_range, segments).await?
            }
            Some(Part::Stored { key, byte_offset, first }) => {
                let start = byte_offset.saturating_add(byte_range.start);
                let end = byte_offset.saturating_add(byte_range.end);
                let bytes = self.source.storage.read_range(key, start..end).await?.into();
                if let Some(first) = first {
                    first
                        .compare(&bytes, &byte_range)
                        .map_err(|error| error.in_file(key.as_str(), *byte_offset))?;
                }
                bytes
            }
            Some(Part::Object { metadata, entry, first }) => {
                let bytes = self.object(metadata, *entry).await?.slice(byte_range.clone());
                first.compare(&bytes, &byte_range)?;
                bytes
            }
            Some(Part::Encoded(bytes)) => Payload::from(bytes.clone()).slice(byte_range),
            None => {
                let items = self.parts.len() as u64;
                return Err(PlanError::no_item(item as u64, items).into());
            }
        };
        self.options.advance(len);
        if !self.hashed {
            return Ok(payload);
        }
        let mut hasher = Hasher::new();
        payload.pieces().iter().for_each(|piece| hasher.update(piece));
        Ok(payload.with_crc32(hasher.finalize()))
    }

    /// Encodes an object that was encodable when the plan was made.
    async fn object(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
    ) -> Result<Payload, CheckpointError> {
        let mut values = read_objects(&self.source, metadata, &[entry]).await;
        let value = values.remove(&entry).ok_or_else(|| unread(metadata, entry))??;
        Ok(Payload::from(encode_object(&value)?))
    }
}

#[cfg(test)]
mod tests {
    use dcp_conformance::MemoryStorage;
    use dcp_core::Storage;
    use dcp_core::storage::PutMode;
    use dcp_testing::block_on;

    use super::*;

    #[test]
    fn an_object_that_changes_after_it_was_checked_is_refused() {
        let storage = Arc::new(MemoryStorage::new());
        let key = Key::new("__0_0.distcp").unwrap();
        let resolve = |bytes: &[u8], ranges: [Range<u64>; 2]| {
            let put = storage.put(&key, bytes.to_vec().into(), PutMode::Overwrite);
            block_on(put).unwrap();
            let first = Some(FirstRead::new("extra.big", b"as it was"));
            let part = Part::Stored { key: key.clone(), byte_offset: 2, first };
            let (source, options) =
                (Source::dcp(Arc::clone(&storage) as _, false), JobOptions::default());
            let source = CheckedSource::new(&source, &options);
            let data = CheckpointData::new(&source, vec![part], &options);
            let [one, other] = ranges;
            block_on(data.resolve(0, one)).unwrap();
            block_on(data.resolve(0, other)).map(|_| ())
        };
        // Segments are read at once, so a later one may be there first.
        for ranges in [[0..4, 4..9], [4..9, 0..4]] {
            resolve(b"..as it was", ranges.clone()).unwrap();
            let error = resolve(b"..As it was", ranges).unwrap_err();
            assert!(matches!(error, CheckpointError::Format(_)), "{error:?}");
            let error = dcp_core::error::error_chain(&error);
            assert!(error.contains("extra.big") && error.contains("__0_0.distcp"), "{error}");
        }
    }
}
