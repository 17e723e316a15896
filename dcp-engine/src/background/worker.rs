//! The thread on which background saves run.

use std::sync::{Arc, Mutex, mpsc};
use std::{io, thread};

use dcp_core::CheckpointError;
use tokio::runtime::{self, Handle};
use tokio::sync::{oneshot, watch};

use super::handle::{Slot, Unread, lock, over};

/// The state that a saver, its clones and its saves share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    worker: Mutex<Option<Worker>>,
    last: Mutex<Option<Last>>,
    unread: Unread,
}

/// The save that was started last.
#[derive(Debug)]
struct Last {
    slot: Arc<Slot>,
    /// Ends with the save.
    ended: watch::Receiver<()>,
}

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    /// Ends the thread, after the save that it receives.
    stop: oneshot::Sender<Option<watch::Receiver<()>>>,
    thread: thread::JoinHandle<()>,
}

impl Shared {
    /// The runtime of the saves; the first call starts its thread.
    pub(super) fn runtime(&self) -> io::Result<Handle> {
        let mut worker = lock(&self.worker);
        if let Some(worker) = &*worker {
            return Ok(worker.runtime.clone());
        }
        let (stop, stopped) = oneshot::channel::<Option<watch::Receiver<()>>>();
        let (built, runtime) = mpsc::channel();
        let thread = thread::Builder::new().name("dcp-save".into()).spawn(move || {
            // Here, because a runtime must not be dropped within another one.
            let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(built.send(Err(error))),
            };
            let _ = built.send(Ok(runtime.handle().clone()));
            runtime.block_on(async {
                if let Ok(Some(last)) = stopped.await {
                    over(last).await;
                }
            });
        })?;
        let gone = |_| io::Error::other("the thread of the saves ended at once");
        let runtime = runtime.recv().map_err(gone)??;
        *worker = Some(Worker { runtime: runtime.clone(), stop, thread });
        Ok(runtime)
    }

    /// Makes a save the last one, and returns the end of the one before it.
    pub(super) fn append(
        &self,
        slot: Arc<Slot>,
        ended: watch::Receiver<()>,
    ) -> Option<watch::Receiver<()>> {
        lock(&self.last).replace(Last { slot, ended }).map(|before| before.ended)
    }

    /// Ends with the save that was started last.
    pub(super) fn last_ended(&self) -> Option<watch::Receiver<()>> {
        lock(&self.last).as_ref().map(|last| last.ended.clone())
    }

    /// Blocks until the save that was started last has ended.
    pub(super) fn wait_for_last(&self) {
        let slot = lock(&self.last).as_ref().map(|last| Arc::clone(&last.slot));
        if let Some(slot) = slot {
            slot.wait_until_finished();
        }
    }

    /// Whether a save is under way.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.last).as_ref().is_some_and(|last| !last.slot.is_finished())
    }

    /// The place for the error of a save whose handle was dropped.
    pub(super) fn unread(&self) -> Unread {
        Arc::clone(&self.unread)
    }

    pub(super) fn take_unread(&self) -> Option<CheckpointError> {
        lock(&self.unread).take()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(Worker { stop, thread, .. }) = lock(&self.worker).take() else { return };
        // Each save waits for the one before it, so the last one ends last.
        let _ = stop.send(lock(&self.last).take().map(|last| last.ended));
        let by_itself = thread.thread().id() == thread::current().id();
        if !by_itself && !thread::panicking() {
            // It only ends with a panic when a runtime does.
            let _ = thread.join();
        }
    }
}
