//! Staging memory that saves use one after the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dcp_core::error::TensorError;
use dcp_core::{CheckpointError, HostMemory};

/// Unused arenas to keep: a trainer has one or two kinds of save.
const KEPT: usize = 2;

/// The arenas of a stager that no save uses now, in the order of their last use.
#[derive(Debug, Default)]
pub(super) struct Arenas {
    unused: Mutex<Vec<HostMemory>>,
}

/// An arena that one save uses.
#[derive(Debug)]
pub(super) struct Lease {
    memory: HostMemory,
    /// The arenas to return it to.
    arenas: Weak<Arenas>,
}

impl Arenas {
    /// An unused arena of about `len` bytes, or a new one.
    pub(super) fn take(self: &Arc<Self>, len: u64) -> Result<Lease, CheckpointError> {
        let exhausted = || TensorError::OutOfMemory { what: "a staged copy".into(), byte_len: len };
        let len = usize::try_from(len).map_err(|_| exhausted())?;
        let fits = |memory: &HostMemory| {
            // A dropped save may have a write under way that still reads the memory.
            memory.len() >= len && memory.len() / 2 <= len && memory.lend(0..memory.len()).is_ok()
        };
        let found = {
            let mut unused = self.unused();
            let position = unused.iter().position(fits);
            position.map(|position| unused.remove(position))
        };
        let memory = match found {
            Some(memory) => memory,
            None => HostMemory::try_zeroed(len).ok_or_else(exhausted)?,
        };
        Ok(Lease { memory, arenas: Arc::downgrade(self) })
    }

    pub(super) fn release(&self) {
        self.unused().clear();
    }

    fn unused(&self) -> MutexGuard<'_, Vec<HostMemory>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    pub(super) fn memory(&self) -> &HostMemory {
        &self.memory
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(arenas) = self.arenas.upgrade() else { return };
        let mut unused = arenas.unused();
        if unused.len() == KEPT {
            unused.remove(0);
        }
        unused.push(self.memory.clone());
    }
}
