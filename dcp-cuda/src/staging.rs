//! The way of bytes between a device and a checkpoint.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::HostMemory;
use dcp_core::device::{DeviceError, DeviceMemory};
use dcp_core::memory::Buffer;

use crate::completion::{Completion, Pending};
use crate::device::Device;
use crate::error::StagingError;
use crate::pinned::{Chunk, PinnedMemory};
use crate::ranges::{byte_len, cut};

/// Default of [`PinnedStagingBuilder::lent_bytes`]: what one save or load of `dcp-engine` holds.
pub const DEFAULT_LENT_BYTES: usize = 64 << 20;
/// Default of [`PinnedStagingBuilder::chunk_bytes`].
pub const DEFAULT_CHUNK_BYTES: usize = 4 << 20;
/// Default of [`PinnedStagingBuilder::chunks`].
pub const DEFAULT_CHUNKS: u32 = 4;

/// Copies of one call under way at once where its bytes go through chunks: the device makes one
/// while the processor copies the other.
const DEPTH: usize = 2;

/// The pinned memory of a device and the copies through it. Clones share both.
///
/// A save receives the pinned memory itself and returns it after the bytes are written; a load reads
/// files into it. Where all of it is lent, bytes go through chunks of pinned memory to and from
/// ordinary memory, so that no save or load waits for what itself holds. The memory is allocated when
/// it is first used and kept for the next save or load; see [`release`](Self::release).
pub struct PinnedStaging<D: Device>(Arc<Staging<D>>);

#[derive(Debug)]
struct Staging<D: Device> {
    device: Arc<D>,
    memory: PinnedMemory<D>,
    reads: Completion<D>,
    writes: Completion<D>,
}

/// Options of a [`PinnedStaging`].
#[derive(Debug)]
pub struct PinnedStagingBuilder<D> {
    device: D,
    lent_bytes: usize,
    chunk_bytes: usize,
    chunks: u32,
}

impl<D: Device> PinnedStagingBuilder<D> {
    /// The pinned memory that saves and loads hold at once. Each concurrent save or load needs its
    /// `staging_bytes` for copies without a detour.
    #[must_use]
    pub fn lent_bytes(mut self, bytes: usize) -> Self {
        self.lent_bytes = bytes;
        self
    }

    /// The length of a chunk, at least 1.
    #[must_use]
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = bytes.max(1);
        self
    }

    /// The number of chunks, at least 1.
    #[must_use]
    pub fn chunks(mut self, chunks: u32) -> Self {
        self.chunks = chunks.max(1);
        self
    }

    /// The staging. Allocates nothing yet.
    #[must_use]
    pub fn build(self) -> PinnedStaging<D> {
        let Self { device, lent_bytes, chunk_bytes, chunks } = self;
        let device = Arc::new(device);
        let memory = PinnedMemory::new(Arc::clone(&device), lent_bytes, chunk_bytes, chunks);
        let (reads, writes) =
            (Completion::new(Arc::clone(&device)), Completion::new(Arc::clone(&device)));
        PinnedStaging(Arc::new(Staging { device, memory, reads, writes }))
    }
}

impl<D: Device> PinnedStaging<D> {
    /// Staging for `device`, by default of 64 MiB to lend and 4 chunks of 4 MiB.
    pub fn builder(device: D) -> PinnedStagingBuilder<D> {
        PinnedStagingBuilder {
            device,
            lent_bytes: DEFAULT_LENT_BYTES,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            chunks: DEFAULT_CHUNKS,
        }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.0.device
    }

    /// Memory of the device as that of a [`Shard`](dcp_core::Shard), all of which it is.
    #[must_use]
    pub fn memory(&self, memory: impl Into<Arc<D::Memory>>) -> Arc<dyn DeviceMemory> {
        Arc::new(StagedMemory { staging: Arc::clone(&self.0), memory: memory.into() })
    }

    /// The bytes of pinned memory now.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.0.memory.byte_len()
    }

    /// Frees the pinned memory that nothing uses now. The next save or load allocates it again.
    pub fn release(&self) {
        self.0.memory.release();
    }
}

impl<D: Device> Clone for PinnedStaging<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> fmt::Debug for PinnedStaging<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedStaging").field("device", &self.0.device).finish_non_exhaustive()
    }
}

impl<D: Device> Staging<D> {
    /// Starts to fill `into` from the device.
    fn start_read(
        &self,
        memory: &Arc<D::Memory>,
        ranges: &[Range<u64>],
        mut into: Buffer,
    ) -> Result<(D::Copy, usize), StagingError> {
        let len = self.len(ranges)?;
        let into = if into.len() > len { into.split_to(len) } else { into };
        let copy = self.device.start_read(memory, ranges, into);
        Ok((copy.map_err(|source| self.failed(len, source))?, len))
    }

    /// Copies to memory that a caller keeps.
    async fn read(
        &self,
        memory: &Arc<D::Memory>,
        ranges: &[Range<u64>],
    ) -> Result<Bytes, StagingError> {
        let len = self.len(ranges)?;
        if len == 0 {
            return Ok(Bytes::new());
        }
        if let Some(buffer) = self.memory.lend(len)? {
            let (copy, len) = self.start_read(memory, ranges, buffer)?;
            let arrived = self.reads.watch(copy, len, None)?.finish().await?;
            return Ok(arrived.buffer.map_or_else(Bytes::new, Buffer::freeze));
        }
        let mut out = Vec::new();
        let exhausted = |_| self.out_of_memory(len);
        out.try_reserve_exact(len).map_err(exhausted)?;
        let start = |group: &[Range<u64>], Chunk { buffer, permit }| {
            let (copy, len) = self.start_read(memory, group, buffer)?;
            self.reads.watch(copy, len, Some(permit))
        };
        let take = |filled: Option<Buffer>| out.extend_from_slice(filled.as_deref().unwrap_or(&[]));
        self.through_chunks(ranges, start, take).await?;
        Ok(out.into())
    }

    async fn write(
        &self,
        memory: &Arc<D::Memory>,
        ranges: &[Range<u64>],
        mut bytes: Bytes,
    ) -> Result<(), StagingError> {
        let start = |group: &[Range<u64>], from: Bytes| {
            let len = from.len();
            let copy = self.device.start_write(memory, group, from);
            Ok::<_, StagingError>((copy.map_err(|source| self.failed(len, source))?, len))
        };
        if self.memory.has(&bytes) && !bytes.is_empty() {
            let (copy, len) = start(ranges, bytes)?;
            self.writes.watch(copy, len, None)?.finish().await?;
            return Ok(());
        }
        let start = |group: &[Range<u64>], Chunk { mut buffer, permit }| {
            let now = bytes.split_to(self.len(group)?.min(bytes.len()));
            let mut filled = buffer.split_to(now.len().min(buffer.len()));
            filled.copy_from_slice(&now);
            let (copy, len) = start(group, filled.freeze())?;
            self.writes.watch(copy, len, Some(permit))
        };
        self.through_chunks(ranges, start, drop).await
    }

    /// Copies `ranges` chunk by chunk, in their order: `start` starts a copy, `take` takes what it
    /// has left. Waits for a chunk only while it holds none, so that two calls never wait for each
    /// other.
    async fn through_chunks(
        &self,
        ranges: &[Range<u64>],
        mut start: impl FnMut(&[Range<u64>], Chunk) -> Result<Pending, StagingError>,
        mut take: impl FnMut(Option<Buffer>),
    ) -> Result<(), StagingError> {
        let mut groups = cut(ranges, self.memory.chunk_bytes() as u64).peekable();
        let mut pending = VecDeque::with_capacity(DEPTH);
        loop {
            while pending.len() < DEPTH && groups.peek().is_some() {
                let chunk = match pending.is_empty() {
                    true => Some(self.memory.chunk().await?),
                    false => self.memory.try_chunk()?,
                };
                let Some(chunk) = chunk else { break };
                let Some(group) = groups.next() else { break };
                pending.push_back(start(&group, chunk)?);
            }
            let Some(first) = pending.pop_front() else { return Ok(()) };
            take(first.finish().await?.buffer);
        }
    }

    fn len(&self, ranges: &[Range<u64>]) -> Result<usize, StagingError> {
        usize::try_from(byte_len(ranges)).map_err(|_| self.out_of_memory(usize::MAX))
    }

    fn out_of_memory(&self, byte_len: usize) -> StagingError {
        StagingError::OutOfMemory { device: self.device.name().to_owned(), byte_len }
    }

    fn failed(&self, byte_len: usize, source: DeviceError) -> StagingError {
        StagingError::Copy { device: self.device.name().to_owned(), byte_len, source }
    }
}

/// Memory of a device, which is copied through pinned memory.
#[derive(Debug)]
struct StagedMemory<D: Device> {
    staging: Arc<Staging<D>>,
    memory: Arc<D::Memory>,
}

#[async_trait]
impl<D: Device> DeviceMemory for StagedMemory<D> {
    fn device(&self) -> &str {
        self.staging.device.name()
    }

    fn byte_len(&self) -> u64 {
        self.staging.device.byte_len(&self.memory)
    }

    async fn read(&self, ranges: &[Range<u64>]) -> Result<Bytes, DeviceError> {
        Ok(self.staging.read(&self.memory, ranges).await?)
    }

    async fn write(&self, ranges: &[Range<u64>], bytes: Bytes) -> Result<(), DeviceError> {
        Ok(self.staging.write(&self.memory, ranges, bytes).await?)
    }

    fn staging(&self, byte_len: usize) -> Option<HostMemory> {
        // What cannot be pinned fails in `write`, with an error.
        let lent = self.staging.memory.lend(byte_len).ok().flatten();
        lent.filter(|buffer| !buffer.is_empty()).map(HostMemory::from)
    }
}
