//! Pinned memory, which is allocated once and used by one save or load after the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_core::HostMemory;
use dcp_core::memory::Buffer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::device::Device;
use crate::error::StagingError;

/// Loans begin at multiples of this.
const GRANULE: usize = 64 << 10;

/// The pinned memory of a device: an area of which parts are lent to callers, and chunks that only
/// copies use, so that they come back without a caller.
#[derive(Debug)]
pub(crate) struct PinnedMemory<D> {
    device: Arc<D>,
    lent_bytes: usize,
    chunk_bytes: usize,
    chunks: u32,
    area: Mutex<Area>,
    chunk_memory: Mutex<Vec<HostMemory>>,
    /// A permit for each chunk that no copy uses.
    free: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Area {
    memory: Option<HostMemory>,
    /// The address of the memory.
    address: usize,
    /// The granule behind the last loan, where the next one probably finds room.
    next: usize,
}

/// A chunk, which is free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Chunk {
    // Dropped first: whoever gets the permit finds the memory.
    pub(crate) buffer: Buffer,
    pub(crate) permit: OwnedSemaphorePermit,
}

impl<D: Device> PinnedMemory<D> {
    pub(crate) fn new(device: Arc<D>, lent_bytes: usize, chunk_bytes: usize, chunks: u32) -> Self {
        let free = Arc::new(Semaphore::new(chunks as usize));
        let (area, chunk_memory) = Default::default();
        Self { device, lent_bytes, chunk_bytes, chunks, area, chunk_memory, free }
    }

    pub(crate) fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Memory for a caller to keep; `None` when there is no room for it now.
    pub(crate) fn lend(&self, byte_len: usize) -> Result<Option<Buffer>, StagingError> {
        if byte_len > self.lent_bytes {
            return Ok(None);
        }
        let mut area = self.area();
        let memory = match &area.memory {
            Some(memory) => memory.clone(),
            None => {
                let memory = self.allocate(self.lent_bytes)?;
                area.address = memory.read().map_or(0, |bytes| bytes.as_ptr().addr());
                area.memory.insert(memory).clone()
            }
        };
        let granules = self.lent_bytes.div_ceil(GRANULE).max(1);
        for step in 0..granules {
            let granule = (area.next + step) % granules;
            let start = granule * GRANULE;
            if let Ok(buffer) = memory.lend(start..start.saturating_add(byte_len)) {
                area.next = granule + byte_len.div_ceil(GRANULE);
                return Ok(Some(buffer));
            }
        }
        Ok(None)
    }

    /// Whether bytes are in memory that [`lend`](Self::lend) lent.
    pub(crate) fn has(&self, bytes: &[u8]) -> bool {
        let area = self.area();
        let start = bytes.as_ptr().addr();
        let inside = |memory: &HostMemory| {
            start >= area.address && start + bytes.len() <= area.address + memory.len()
        };
        area.memory.as_ref().is_some_and(inside)
    }

    /// A chunk, as soon as one is free.
    pub(crate) async fn chunk(&self) -> Result<Chunk, StagingError> {
        match Arc::clone(&self.free).acquire_owned().await {
            Ok(permit) => self.chunk_of(permit),
            Err(_) => Err(self.lost()),
        }
    }

    /// A chunk, if one is free now.
    pub(crate) fn try_chunk(&self) -> Result<Option<Chunk>, StagingError> {
        let permit = Arc::clone(&self.free).try_acquire_owned().ok();
        permit.map(|permit| self.chunk_of(permit)).transpose()
    }

    fn chunk_of(&self, permit: OwnedSemaphorePermit) -> Result<Chunk, StagingError> {
        let mut chunks = self.chunk_memory();
        let lend = |memory: &HostMemory| memory.lend(0..memory.len()).ok();
        if let Some(buffer) = chunks.iter().find_map(lend) {
            return Ok(Chunk { buffer, permit });
        }
        if chunks.len() >= self.chunks as usize {
            return Err(self.lost());
        }
        let memory = self.allocate(self.chunk_bytes)?;
        let buffer = lend(&memory).ok_or_else(|| self.lost())?;
        chunks.push(memory);
        Ok(Chunk { buffer, permit })
    }

    /// Frees the memory that nothing uses now.
    pub(crate) fn release(&self) {
        let is_free = |memory: &HostMemory| memory.lend(0..memory.len()).is_ok();
        let mut area = self.area();
        if area.memory.as_ref().is_some_and(is_free) {
            *area = Area::default();
        }
        self.chunk_memory().retain(|memory| !is_free(memory));
    }

    /// The bytes of pinned memory now.
    pub(crate) fn byte_len(&self) -> u64 {
        let area = self.area().memory.as_ref().map_or(0, HostMemory::len);
        let chunks: usize = self.chunk_memory().iter().map(HostMemory::len).sum();
        (area + chunks) as u64
    }

    fn allocate(&self, byte_len: usize) -> Result<HostMemory, StagingError> {
        let device = || self.device.name().to_owned();
        let pinned = self.device.pinned(byte_len);
        pinned.map_err(|source| StagingError::Pinned { device: device(), byte_len, source })
    }

    fn lost(&self) -> StagingError {
        StagingError::Lost { device: self.device.name().to_owned() }
    }

    fn area(&self) -> MutexGuard<'_, Area> {
        self.area.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn chunk_memory(&self) -> MutexGuard<'_, Vec<HostMemory>> {
        self.chunk_memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
