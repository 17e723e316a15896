//! NCCL on a CUDA device: the only module of this crate with `unsafe`.
//!
//! # Safety
//!
//! What the `unsafe` blocks rely on:
//!
//! 1. The functions of [`Library`] have the signatures of `nccl.h` since 2.14, and the library stays
//!    loaded as long as the last `Library`, which every [`NcclLink`] has.
//! 2. A communicator comes from `ncclCommInitRankConfig`, is used by one link, whose methods take
//!    `&mut self`, and is destroyed or aborted once.
//! 3. A slot has pinned memory and device memory of `chunk_bytes`. Between `start` and the end of the work
//!    that it submitted, only the device touches them: `finish` waits for that end before it looks, and a
//!    link that cannot wait for it never drops them.
//! 4. The driver was found by [`CudaDevice::open`], with the functions that are called here.

#![allow(unsafe_code, reason = "the leaf module that proves its calls of C sound, see above")]

mod communicator;
mod library;

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp_core::error::error_chain;
use dcp_core::memory::Buffer;
use dcp_core::{HostMemory, Rank};
use dcp_cuda::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, result,
};
use dcp_cuda::{CudaDevice, Device};

use self::communicator::Communicator;
use self::library::Library;
pub use self::library::NcclError;
use crate::link::{Link, LinkDeadline, LinkError, Network, SLOTS};

/// The pauses of a rank that waits for its device: short at first.
const RESTS: Range<u32> = 0..8;
const FIRST_REST: Duration = Duration::from_micros(20);

/// NCCL on the CUDA device of this rank. Each rank has a device of its own.
#[derive(Clone, Debug)]
pub struct NcclNetwork {
    device: usize,
}

impl NcclNetwork {
    /// NCCL on the device with this number. Loads nothing yet.
    #[must_use]
    pub fn new(device: usize) -> Self {
        Self { device }
    }
}

fn failed(error: &(dyn std::error::Error + 'static)) -> LinkError {
    LinkError::Failed(error_chain(error))
}

impl Network for NcclNetwork {
    type Link = NcclLink;

    fn name(&self) -> String {
        format!("NCCL on cuda:{}", self.device)
    }

    fn probe(&self) -> Result<(), LinkError> {
        CudaDevice::open(self.device).map_err(|error| failed(&error))?;
        Library::load().map(drop).map_err(|error| failed(&error))
    }

    fn identify(&self) -> Result<Vec<u8>, LinkError> {
        let library = Library::load().map_err(|error| failed(&error))?;
        library.identify().map_err(|error| failed(&error))
    }

    fn join(
        &self,
        group: &[u8],
        rank: Rank,
        world_size: u32,
        chunk_bytes: usize,
        patience: &LinkDeadline,
    ) -> Result<NcclLink, LinkError> {
        let device = CudaDevice::open(self.device).map_err(|error| failed(&error))?;
        let library = Library::load().map_err(|error| failed(&error))?;
        let driver = |error: DriverError| failed(&error);
        let stream = device.context().new_stream().map_err(driver)?;
        let mut slots = Vec::with_capacity(SLOTS);
        for _ in 0..SLOTS {
            let pinned = device.pinned(chunk_bytes).map_err(|error| failed(&*error))?;
            let host = pinned.lend(0..chunk_bytes).map_err(|error| failed(&error))?;
            let device = stream.alloc_zeros::<u8>(chunk_bytes).map_err(driver)?;
            slots.push(Slot {
                _pinned: pinned,
                host,
                device,
                byte_len: 0,
                is_root: false,
                end: None,
            });
        }
        stream.synchronize().map_err(driver)?;
        device.context().bind_to_thread().map_err(driver)?;
        let communicator = Communicator::join(library, group, rank, world_size, patience)?;
        Ok(NcclLink { device, stream, slots, communicator: Some(communicator), rank })
    }
}

/// The memory of a chunk.
#[derive(Debug)]
struct Slot {
    /// The owner of the memory that `host` lends.
    _pinned: HostMemory,
    host: Buffer,
    device: CudaSlice<u8>,
    /// Of the chunk under way.
    byte_len: usize,
    is_root: bool,
    /// Behind the chunk in the stream.
    end: Option<CudaEvent>,
}

/// A member of a group of NCCL.
#[derive(Debug)]
pub struct NcclLink {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    slots: Vec<Slot>,
    /// `None` after an abort.
    communicator: Option<Communicator>,
    rank: Rank,
}

/// Calls `look` until it finds something, with pauses.
fn poll<T>(
    patience: &LinkDeadline,
    mut look: impl FnMut() -> Result<Option<T>, LinkError>,
) -> Result<T, LinkError> {
    let mut rests = RESTS;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        patience.check()?;
        thread::sleep(FIRST_REST * (1 << rests.next().unwrap_or(RESTS.end)));
    }
}

impl Link for NcclLink {
    fn start(
        &mut self,
        slot: usize,
        root: Rank,
        from: Option<&[u8]>,
        byte_len: usize,
        patience: &LinkDeadline,
    ) -> Result<(), LinkError> {
        let driver = |error: DriverError| failed(&error);
        let bug = |problem: &str| LinkError::Failed(problem.to_owned());
        let communicator = self.communicator.as_mut().ok_or(LinkError::Aborted)?;
        let slot = self.slots.get_mut(slot).ok_or_else(|| bug("there is no such slot"))?;
        if slot.end.is_some() || byte_len > slot.host.len() || byte_len > slot.device.num_bytes() {
            return Err(bug("a chunk does not fit its slot"));
        }
        self.device.context().bind_to_thread().map_err(driver)?;
        let stream = &self.stream;
        (slot.byte_len, slot.is_root) = (byte_len, root == self.rank);
        if slot.is_root {
            let from = from.filter(|from| from.len() == byte_len);
            let from = from.ok_or_else(|| bug("the root of a chunk has other bytes"))?;
            let host = slot.host.get_mut(..byte_len).ok_or_else(|| bug("a chunk is too long"))?;
            host.copy_from_slice(from);
            let (address, _recorded) = slot.device.device_ptr_mut(stream);
            // SAFETY: both memories have the bytes, and stay until the copy has ended (3, 4).
            unsafe { result::memcpy_htod_async(address, &*host, stream.cu_stream()) }
                .map_err(driver)?;
        }
        {
            let (address, _recorded) = slot.device.device_ptr_mut(stream);
            // SAFETY: the device memory has the bytes, and stays until the work has ended (3).
            unsafe { communicator.broadcast(address, byte_len, root, stream, patience) }?;
        }
        if !slot.is_root {
            let (address, _recorded) = slot.device.device_ptr(stream);
            let host = slot.host.get_mut(..byte_len).ok_or_else(|| bug("a chunk is too long"))?;
            // SAFETY: as above; nobody reads the host memory before `finish` has waited (3).
            unsafe { result::memcpy_dtoh_async(host, address, stream.cu_stream()) }
                .map_err(driver)?;
        }
        slot.end = Some(stream.record_event(None).map_err(driver)?);
        Ok(())
    }

    fn finish(&mut self, slot: usize, patience: &LinkDeadline) -> Result<&[u8], LinkError> {
        let bug = |problem: &str| LinkError::Failed(problem.to_owned());
        let communicator = self.communicator.as_mut().ok_or(LinkError::Aborted)?;
        let slot = self.slots.get_mut(slot).ok_or_else(|| bug("there is no such slot"))?;
        let end = slot.end.as_ref().ok_or_else(|| bug("no chunk is under way in this slot"))?;
        let context = self.device.context();
        poll(patience, || {
            context.bind_to_thread().map_err(|error| failed(&error))?;
            communicator.check()?;
            let ended = end.try_is_complete().map_err(|error| failed(&error))?;
            Ok(ended.then_some(()))
        })?;
        slot.end = None;
        let received = if slot.is_root { 0 } else { slot.byte_len };
        slot.host.get(..received).ok_or_else(|| bug("a chunk is too long"))
    }

    fn abort(&mut self) {
        if let Some(communicator) = self.communicator.take() {
            communicator.abort();
        }
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        let context = self.device.context();
        context.record_err(context.bind_to_thread());
        if let Some(communicator) = self.communicator.take() {
            communicator.leave();
        }
        if self.stream.synchronize().is_err() {
            // The device may still write: nobody else gets this memory.
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_or_the_library_the_network_names_what_is_missing() {
        match NcclNetwork::new(0).probe() {
            Ok(()) => println!("SKIPPED: NCCL and a device are here"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("CUDA") || text.contains("NCCL"), "{text}");
                println!("{text}");
            }
        }
    }
}
