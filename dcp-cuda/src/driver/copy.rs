//! A copy that the driver makes.

use std::fmt;
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use dcp_core::memory::Buffer;

use super::{CudaError, CudaMemory};

/// The host memory of a copy.
#[derive(Debug)]
pub(super) enum Held {
    Read(Buffer),
    /// Never looked at again; kept while the driver reads it.
    Written(Bytes),
}

/// A copy that was started on a stream. Dropping it waits for its end.
pub struct CudaCopy {
    stream: Arc<CudaStream>,
    /// Behind the copy in the stream; `None` until all of it is submitted.
    end: Option<CudaEvent>,
    /// Taken when the copy has ended.
    held: Option<(Held, Arc<CudaMemory>)>,
}

impl CudaCopy {
    pub(super) fn new(stream: &Arc<CudaStream>, memory: &Arc<CudaMemory>, held: Held) -> Self {
        let held = Some((held, Arc::clone(memory)));
        Self { stream: Arc::clone(stream), end: None, held }
    }

    pub(super) fn held_mut(&mut self) -> Option<&mut Held> {
        self.held.as_mut().map(|(held, _)| held)
    }

    /// All of the copy is submitted.
    pub(super) fn started(&mut self) -> Result<(), CudaError> {
        // The thread that waits sleeps, so that the processor is free.
        let event = self.stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
        let failed = |source| CudaError::Driver { operation: "record the end of a copy", source };
        self.end = Some(event.map_err(failed)?);
        Ok(())
    }

    pub(super) fn wait(mut self) -> Result<Option<Buffer>, CudaError> {
        let failed = |source| CudaError::Driver { operation: "copy", source };
        match self.end().map_err(failed)? {
            Some(Held::Read(buffer)) => Ok(Some(buffer)),
            _ => Ok(None),
        }
    }

    /// Waits for the end of the copy and returns its host memory, which a failure leaks.
    fn end(&mut self) -> Result<Option<Held>, DriverError> {
        let Some(held) = self.held.take() else { return Ok(None) };
        let ended = match self.end.take() {
            Some(event) => event.synchronize(),
            None => self.stream.synchronize(),
        };
        match ended {
            Ok(()) => Ok(Some(held.0)),
            Err(error) => {
                // The device may still write: nobody else gets this memory.
                mem::forget(held);
                Err(error)
            }
        }
    }
}

impl Drop for CudaCopy {
    fn drop(&mut self) {
        // The copies that follow report the failure.
        drop(self.end());
    }
}

impl fmt::Debug for CudaCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaCopy").field("held", &self.held).finish_non_exhaustive()
    }
}
