//! Executes a load plan by the placements in the metadata: divides it into requests with bounded
//! memory. Serves every format that stores chunks unencoded or in archives of their own.
//!
//! Items of the plan that read one stored chunk are a *blob*. Each blob goes one of three ways:
//!
//! ```text
//! blob ─┬─ small (64 KiB) ─ whole, with its neighbors in one request ─ decode in scratch ─ copy into place
//!       ├─ unencoded ────── byte runs, coalesced ──────────────────── straight into the caller's memory
//!       └─ encoded, large ─ last, as many at once as memory allows ─── copy into place
//! ```
//!
//! A small blob costs a request whatever its length, so a gap to the next one is read along. A large one is
//! never read for a slice of it: only the runs that its items need, and gaps shorter than a request is
//! worth. Blobs that need much memory to decode wait (`to_decode`) until all others are read, and are then
//! decoded as many at once as fit into the scratch memory.
//!
//! Invariants: scratch memory is at most `scratch`, divided among `parallelism` requests; every item is
//! filled once, or the load fails; the CRC-32 of a blob is compared when one read or all parts together
//! cover it.

#[cfg(feature = "torch-dcp")]
mod archives;
mod blobs;
mod direct;
mod pieces;
mod transform;
#[cfg(not(feature = "torch-dcp"))]
mod unread_archives;
mod whole;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::format::StreamTransforms;
use dcp_core::metadata::Placement;
use dcp_core::plan::LoadPlan;
use dcp_core::storage::{ReadInto, StorageExt as _};
use dcp_core::{
    Buffer, CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageError,
};
use futures_util::stream;
use futures_util::{StreamExt as _, TryStreamExt as _};

pub use transform::without_transforms;

#[cfg(not(feature = "torch-dcp"))]
use unread_archives as archives;

use archives::Archives;
#[cfg(feature = "torch-dcp")]
pub(crate) use archives::{KnownArchives, SavedCrcs, SavedSource};
use blobs::{Blob, Content, group};
use direct::{Requests, execute, prepare};
use whole::read_span;

use crate::crc_parts::compare_crc32;
use crate::upload::ByteProgress;

/// The default memory for what cannot be read straight into place, in bytes.
pub(crate) const SCRATCH_BYTES: u64 = 64 << 20;
/// Blobs up to this length are read whole, together with their neighbors.
const SMALL_BLOB: u64 = 64 << 10;
/// The scratch memory of one request, in bytes.
const SCRATCH_PER_REQUEST: Range<u64> = SMALL_BLOB..4 << 20;

/// CRC-32s of a file's byte ranges, by offset and length.
type Checksums = Arc<HashMap<(u64, u64), u32>>;

/// Reads items at the placements in the metadata, with few requests and little memory. Serves every
/// format that stores chunks unencoded ([`Layout::Raw`](dcp_core::metadata::Layout::Raw)) or in
/// archives of their own.
pub(crate) struct PlacedReads {
    storage: Arc<dyn Storage>,
    checksums: Checksums,
}

impl PlacedReads {
    pub(crate) fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, checksums: Arc::default() }
    }

    /// Compares raw chunks with the checksums of their file when one read covers the chunk.
    pub(crate) fn with_checksums(mut self, checksums: Checksums) -> Self {
        self.checksums = checksums;
        self
    }

    pub(crate) async fn read(
        self,
        metadata: &CheckpointMetadata,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut context = Context::new(self.storage, sink, true, SCRATCH_BYTES, None);
        context.checksums = self.checksums;
        run(Arc::new(context), metadata, plan).await
    }
}

/// The state that all parts of a load share.
pub(crate) struct Context {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) sink: Arc<dyn DataSink>,
    pub(super) verify: bool,
    pub(super) coalesce_gap: u64,
    pub(super) scratch_per_request: u64,
    progress: Option<ByteProgress>,
    checksums: Checksums,
    /// The transforms of items that plug-ins undo.
    pub(crate) transforms: StreamTransforms,
    /// The state of a load of archives.
    pub(crate) archives: Archives,
    parallelism: usize,
    pub(super) scratch: u64,
    bytes_read: AtomicU64,
    /// Large blobs that need decoding.
    to_decode: Mutex<Vec<Blob>>,
}

impl Context {
    pub(crate) fn new(
        storage: Arc<dyn Storage>,
        sink: Arc<dyn DataSink>,
        verify: bool,
        scratch: u64,
        progress: Option<ByteProgress>,
    ) -> Self {
        let capabilities = storage.capabilities();
        let parallelism = usize::from(capabilities.parallelism.max(1));
        let Range { start, end } = SCRATCH_PER_REQUEST;
        Self {
            storage,
            sink,
            verify,
            coalesce_gap: capabilities.coalesce_gap,
            scratch_per_request: (scratch / parallelism as u64).clamp(start, end),
            progress,
            checksums: Arc::default(),
            transforms: StreamTransforms::default(),
            archives: Archives::default(),
            parallelism,
            scratch,
            bytes_read: AtomicU64::new(0),
            to_decode: Mutex::default(),
        }
    }

    /// The CRC-32 of a whole unencoded chunk, if there is one.
    pub(super) fn expected_crc(&self, placement: &Placement) -> Option<ExpectedCrc> {
        let Placement { byte_offset, byte_len, .. } = *placement;
        let crc32 = *self.checksums.get(&(byte_offset, byte_len))?;
        Some(ExpectedCrc { start: 0, byte_len, crc32 })
    }

    /// Reads ranges, and counts the bytes.
    pub(super) async fn read(
        &self,
        key: &Key,
        reads: Vec<ReadInto>,
    ) -> Result<Vec<Buffer>, StorageError> {
        let bytes: u64 = reads.iter().map(|read| read.buffer.len() as u64).sum();
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        Ok(self.storage.read(key, reads.into()).await?.buffers)
    }

    /// Reads a range into new memory, and counts the bytes.
    pub(super) async fn read_range(
        &self,
        key: &Key,
        range: Range<u64>,
    ) -> Result<Bytes, StorageError> {
        self.bytes_read.fetch_add(range.end.saturating_sub(range.start), Ordering::Relaxed);
        self.storage.read_range(key, range).await
    }

    pub(super) fn report(&self, bytes: u64) {
        if let Some(progress) = &self.progress {
            progress(bytes);
        }
    }

    fn to_decode(&self) -> std::sync::MutexGuard<'_, Vec<Blob>> {
        self.to_decode.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The CRC-32 that the elements of a chunk must have.
pub(crate) struct ExpectedCrc {
    /// Their offset in the stored chunk, for errors.
    start: u64,
    byte_len: u64,
    crc32: u32,
}

impl ExpectedCrc {
    fn compare(&self, found: u32) -> Result<(), FormatError> {
        compare_crc32(found, self.crc32, self.start)
    }
}

/// A unit of work.
enum Task {
    /// Small blobs of one file, near each other.
    Span(Vec<Blob>),
    /// A large blob, whose elements are probably stored unencoded.
    Direct(Blob),
}

/// Reads the plan's items, by their placements and encodings.
pub(crate) async fn run(
    ctx: Arc<Context>,
    metadata: &CheckpointMetadata,
    plan: &LoadPlan,
) -> Result<ReadReport, CheckpointError> {
    let (blobs, needed) = group(metadata, plan)?;
    let tasks = divide(&ctx, blobs);
    let started = stream::iter(tasks).map(|task| begin(Arc::clone(&ctx), task));
    let requests = started
        .buffer_unordered(ctx.parallelism)
        .map_ok(|requests| stream::iter(requests.map(Ok::<_, CheckpointError>)))
        .try_flatten();
    let done = requests.map(|request: Result<_, CheckpointError>| {
        let ctx = Arc::clone(&ctx);
        async move { execute(&ctx, request?).await }
    });
    done.buffer_unordered(ctx.parallelism).try_collect::<()>().await?;

    let large = std::mem::take(&mut *ctx.to_decode());
    let largest = large.iter().map(memory_to_decode).max().unwrap_or(1).max(1);
    let at_once = usize::try_from(ctx.scratch / largest).unwrap_or(1).clamp(1, ctx.parallelism);
    let decoded = stream::iter(large).map(|blob| {
        let ctx = Arc::clone(&ctx);
        async move { read_span(&ctx, vec![blob]).await }
    });
    decoded.buffer_unordered(at_once).try_collect::<()>().await?;
    Ok(ReadReport::new(needed, ctx.bytes_read.load(Ordering::Relaxed)))
}

/// Executes a task, except for the requests that it returns.
async fn begin(ctx: Arc<Context>, task: Task) -> Result<Requests, CheckpointError> {
    match task {
        Task::Span(blobs) => read_span(&ctx, blobs).await?,
        Task::Direct(blob) => match prepare(&ctx, blob).await? {
            Ok(requests) => return Ok(requests),
            Err(blob) => ctx.to_decode().push(blob),
        },
    }
    Ok(Requests::default())
}

/// Divides blobs, sorted by file and offset, into tasks; those that need much memory come last.
fn divide(ctx: &Context, blobs: Vec<Blob>) -> Vec<Task> {
    let mut tasks: Vec<Task> = Vec::new();
    for blob in blobs {
        let object = matches!(blob.content, Content::Object { .. });
        let coded = !blob.encoding.transforms.is_empty();
        if !object && !coded && blob.placement.byte_len > SMALL_BLOB {
            tasks.push(Task::Direct(blob));
            continue;
        }
        if memory_to_decode(&blob) > ctx.scratch_per_request {
            ctx.to_decode().push(blob);
            continue;
        }
        match tasks.last_mut() {
            Some(Task::Span(span)) if joins(ctx, span, &blob) => span.push(blob),
            _ => tasks.push(Task::Span(vec![blob])),
        }
    }
    tasks
}

fn joins(ctx: &Context, span: &[Blob], blob: &Blob) -> bool {
    let (Some(first), Some(end)) = (span.first(), span.iter().map(Blob::end).max()) else {
        return false;
    };
    first.placement.file == blob.placement.file
        && blob.placement.byte_offset <= end.saturating_add(ctx.coalesce_gap)
        && blob.end().max(end).saturating_sub(first.placement.byte_offset)
            <= ctx.scratch_per_request
}

/// Bytes of memory that a blob needs from read to delivery.
///
/// The size of a compressed object is unknown in advance, but blobs are decoded one at a time,
/// within the limits of [`read_span`].
fn memory_to_decode(blob: &Blob) -> u64 {
    let decoded = if blob.encoding.transforms.is_empty() { 0 } else { blob.raw_len() };
    blob.placement.byte_len.saturating_add(decoded)
}
