//! A communicator of NCCL.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dcp_core::Rank;
use dcp_cuda::cudarc::driver::CudaStream;
use dcp_cuda::cudarc::driver::sys::CUdeviceptr;

use super::library::{Comm, Config, Library, NcclError, UINT8, UniqueId};
use super::{failed, poll};
use crate::link::{LinkDeadline, LinkError};

/// The time for which a rank that leaves waits for the others to have received.
const LEAVING: Duration = Duration::from_secs(10);

/// A communicator whose calls do not block. `abort` or `leave` ends it.
#[derive(Debug)]
pub(super) struct Communicator {
    library: Arc<Library>,
    comm: Comm,
}

// SAFETY: NCCL allows calls from any thread, one at a time, as `&mut self` makes them (2).
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the group with these bytes, on the device of the thread's context.
    pub(super) fn join(
        library: Arc<Library>,
        group: &[u8],
        rank: Rank,
        world_size: u32,
        patience: &LinkDeadline,
    ) -> Result<Self, LinkError> {
        let bug = |problem: &str| LinkError::Failed(problem.to_owned());
        let number = |number: u32| c_int::try_from(number).map_err(|_| bug("too many ranks"));
        let (rank, world_size) = (number(rank)?, number(world_size)?);
        let group: [u8; 128] =
            group.try_into().map_err(|_| bug("the id of a group has other than 128 bytes"))?;
        let id = UniqueId { internal: group.map(|byte| byte as _) };
        let (mut comm, mut config) = (ptr::null_mut(), Config::not_blocking());
        // SAFETY: pointers to a communicator and a configuration that the call reads and fills (1).
        let code = unsafe { (library.init)(&raw mut comm, world_size, id, rank, &raw mut config) };
        let begun = library.check("ncclCommInitRankConfig", code);
        if comm.is_null() {
            begun.map_err(|error| failed(&error))?;
            return Err(bug("NCCL returned no communicator"));
        }
        let mut communicator = Self { library, comm };
        let joined = match begun {
            Ok(_) => communicator.settle(patience),
            Err(error) => Err(failed(&error)),
        };
        match joined {
            Ok(()) => Ok(communicator),
            Err(error) => {
                communicator.abort();
                Err(error)
            }
        }
    }

    /// Submits the broadcast of `byte_len` bytes of device memory from `root`, in place.
    ///
    /// # Safety
    ///
    /// The memory at `address` has `byte_len` bytes, which nothing else uses before the work of `stream`
    /// has ended.
    pub(super) unsafe fn broadcast(
        &mut self,
        address: CUdeviceptr,
        byte_len: usize,
        root: Rank,
        stream: &CudaStream,
        patience: &LinkDeadline,
    ) -> Result<(), LinkError> {
        let bug = |_| LinkError::Failed("too many ranks".to_owned());
        let root = c_int::try_from(root).map_err(bug)?;
        let memory = address as usize as *mut c_void;
        let stream = stream.cu_stream().cast::<c_void>();
        // SAFETY: as the caller promises; the communicator is alive (2).
        let code = unsafe {
            (self.library.broadcast)(memory, memory, byte_len, UINT8, root, self.comm, stream)
        };
        match self.library.check("ncclBroadcast", code) {
            Ok(true) => Ok(()),
            Ok(false) => self.settle(patience),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Whether no call is under way. Fails with the error that NCCL found while it worked.
    fn state(&mut self) -> Result<bool, NcclError> {
        let mut state = 0;
        // SAFETY: a pointer to a number that the call fills; the communicator is alive (2).
        let code = unsafe { (self.library.async_error)(self.comm, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code)?;
        self.library.check("a call", state)
    }

    /// Fails when the device or another rank did.
    pub(super) fn check(&mut self) -> Result<(), LinkError> {
        self.state().map(drop).map_err(|error| failed(&error))
    }

    /// Waits until no call is under way.
    fn settle(&mut self, patience: &LinkDeadline) -> Result<(), LinkError> {
        poll(patience, || {
            let is_done = self.state().map_err(|error| failed(&error))?;
            Ok(is_done.then_some(()))
        })
    }

    /// Ends the communicator with all that is under way, without the other ranks.
    pub(super) fn abort(self) {
        // SAFETY: the communicator is alive, and nothing uses it any more (2).
        let code = unsafe { (self.library.abort)(self.comm) };
        if let Err(error) = self.library.check("ncclCommAbort", code) {
            tracing::warn!(%error, "a communicator is not freed");
        }
    }

    /// Ends the communicator after the other ranks have received what this one sent, or without that
    /// when they do not.
    pub(super) fn leave(mut self) {
        // SAFETY: the communicator is alive (2).
        let code = unsafe { (self.library.finalize)(self.comm) };
        let begun = self.library.check("ncclCommFinalize", code);
        let patience = LinkDeadline::new(LEAVING, &Arc::new(AtomicBool::new(false)));
        if begun.is_err() || self.settle(&patience).is_err() {
            return self.abort();
        }
        // SAFETY: the communicator is alive, and nothing uses it any more (2).
        let code = unsafe { (self.library.destroy)(self.comm) };
        if let Err(error) = self.library.check("ncclCommDestroy", code) {
            tracing::warn!(%error, "a communicator is not freed");
        }
    }
}
