//! [`Upload`] to a temporary file.
//!
//! One thread of the runtime at a time writes to it: Linux lets one writer into a file, and others would
//! spend processor time on waiting. Where files are durable, another thread syncs what was written so far, so
//! that the disk is busy before the last part, too.

use std::fs::File;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PartFuture, PutMode, Upload, is_own_thread};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind};
use tokio::runtime::Handle;

use crate::blocking::blocking;
use crate::error::on_key;
use crate::shared::Shared;
use crate::temp::Temp;
use crate::write::write_payload_at;

const OP: StorageOp = StorageOp::Upload;

/// Bytes that are written between two syncs.
const SYNCED_AT_ONCE: u64 = 128 << 20;

/// An upload in progress. Dropping it removes the file, unless it was completed.
#[derive(Debug)]
pub(crate) struct FsUpload {
    shared: Arc<Shared>,
    key: Key,
    mode: PutMode,
    temp: Temp,
    /// The place of the next part.
    byte_len: u64,
    parts: Arc<Parts>,
    /// Held by the part that a thread of the runtime writes.
    turn: Arc<Turn>,
}

type Turn = futures_util::lock::Mutex<()>;

/// The state of the parts so far.
#[derive(Debug, Default)]
struct Parts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Parts that no thread writes yet.
    waiting: usize,
    /// Parts that a thread writes, and syncs.
    running: usize,
    /// Bytes that were written and are in no sync that has begun.
    unsynced: u64,
    is_syncing: bool,
    /// The error that keeps the file from completion.
    failed: Option<StorageErrorKind>,
    wakers: Vec<Waker>,
}

impl Parts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the `byte_len` bytes that were just written are enough for a sync, which then counts as
    /// running.
    fn begin_sync(&self, byte_len: u64) -> bool {
        let mut state = self.state();
        state.unsynced = state.unsynced.saturating_add(byte_len);
        if state.is_syncing || state.unsynced < SYNCED_AT_ONCE {
            return false;
        }
        (state.unsynced, state.is_syncing) = (0, true);
        state.running += 1;
        true
    }

    /// Waits until no thread writes.
    async fn settled(&self) {
        poll_fn(|context| {
            let mut state = self.state();
            if state.running == 0 {
                return Poll::Ready(());
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// A part that is to be written; it counts as failed if it is dropped before.
struct Part {
    parts: Arc<Parts>,
    begun: bool,
    written: bool,
}

impl Part {
    fn new(parts: &Arc<Parts>) -> Self {
        parts.state().waiting += 1;
        Self { parts: Arc::clone(parts), begun: false, written: false }
    }

    /// A thread will write it.
    fn begin(&mut self) {
        let mut state = self.parts.state();
        state.waiting -= 1;
        state.running += 1;
        self.begun = true;
    }

    fn fail(&self, kind: StorageErrorKind) {
        self.parts.state().failed.get_or_insert(kind);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut state = self.parts.state();
        if self.begun {
            state.running -= 1;
        } else {
            state.waiting -= 1;
        }
        if !self.written {
            state.failed.get_or_insert(StorageErrorKind::Other);
        }
        state.wakers.drain(..).for_each(Waker::wake);
    }
}

/// A sync that is running.
struct Syncing(Arc<Parts>);

impl Syncing {
    /// The system reports each failure to one sync, so that of this one is kept.
    fn run(self, file: &File, key: &Key) {
        if let Err(error) = file.sync_data() {
            let kind = on_key(OP, key)(error).kind();
            self.0.state().failed.get_or_insert(kind);
        }
    }
}

impl Drop for Syncing {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        state.is_syncing = false;
        state.wakers.drain(..).for_each(Waker::wake);
    }
}

/// Syncs on another thread, if there is a runtime.
fn sync_meanwhile(parts: &Arc<Parts>, file: Arc<File>, key: Key) {
    let sync = Syncing(Arc::clone(parts));
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn_blocking(move || sync.run(&file, &key));
    }
}

impl FsUpload {
    pub(crate) fn new(shared: Arc<Shared>, key: Key, mode: PutMode, temp: Temp) -> Self {
        Self { shared, key, mode, temp, byte_len: 0, parts: Arc::default(), turn: Arc::default() }
    }
}

#[async_trait]
impl Upload for FsUpload {
    fn put_part(&mut self, payload: Payload) -> PartFuture {
        let (file, key) = (Arc::clone(self.temp.file()), self.key.clone());
        let byte_offset = self.byte_len;
        self.byte_len = byte_offset.saturating_add(payload.len());
        let mut part = Part::new(&self.parts);
        let (turn, is_durable) = (Arc::clone(&self.turn), self.shared.sync);
        Box::pin(async move {
            // The system lets the writers of own threads in, of which there are few: no runtime has to
            // wake them.
            let turn = if is_own_thread() { None } else { Some(turn.lock_owned().await) };
            part.begin();
            let for_thread = key.clone();
            blocking(OP, Some(&key), move || {
                // As a whole: a closure takes fields alone where it can.
                let mut part = part;
                let written = write_payload_at(&file, byte_offset, &payload);
                #[cfg(feature = "disk-log")]
                if written.is_ok() {
                    crate::disk_log::wrote(&file, byte_offset, &payload);
                }
                drop(turn);
                let byte_len = payload.len();
                // The caller gets its memory back before the result.
                drop(payload);
                if is_durable && written.is_ok() && part.parts.begin_sync(byte_len) {
                    sync_meanwhile(&part.parts, file, for_thread.clone());
                }
                let written = written.map_err(on_key(OP, &for_thread));
                match &written {
                    Ok(()) => part.written = true,
                    Err(error) => part.fail(error.kind()),
                }
                written
            })
            .await
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        self.parts.settled().await;
        let Self { shared, key, mode, temp, parts, .. } = *self;
        let (waiting, failed) = {
            let state = parts.state();
            (state.waiting, state.failed)
        };
        let lacks = |kind, message: &str| {
            Err(StorageError::new(kind, OP, Some(key.clone())).with_message(message))
        };
        let lacking = match (waiting, failed) {
            (0, None) => Ok(()),
            (_, None) => lacks(StorageErrorKind::Invalid, "a part was not written"),
            (_, Some(kind)) => {
                lacks(kind, "an earlier part was not written, or cannot be made durable")
            }
        };
        let for_thread = key.clone();
        blocking(OP, Some(&key), move || {
            // That thread removes the file as well.
            lacking.and_then(|()| shared.publish(OP, &for_thread, temp, &mode))
        })
        .await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        let Self { key, temp, parts, .. } = *self;
        parts.settled().await;
        blocking(OP, Some(&key), move || {
            drop(temp);
            Ok(())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sync_at_a_time_begins_when_enough_is_written() {
        let parts = Arc::new(Parts::default());
        assert!(!parts.begin_sync(SYNCED_AT_ONCE - 1));
        assert!(parts.begin_sync(1));
        let running = Syncing(Arc::clone(&parts));
        assert!(!parts.begin_sync(SYNCED_AT_ONCE), "another is running");
        assert_eq!(parts.state().running, 1);
        drop(running);
        assert!(parts.begin_sync(0), "what was written meanwhile");
        drop(Syncing(Arc::clone(&parts)));
        assert!(!parts.begin_sync(1));
        assert_eq!(parts.state().running, 0);
    }

    /// The system reports a failure once, so a later sync would succeed.
    #[test]
    fn a_sync_that_fails_keeps_the_file_from_completion() {
        let parts = Arc::new(Parts::default());
        assert!(parts.begin_sync(SYNCED_AT_ONCE));
        let null = File::options().write(true).open("/dev/null").unwrap();
        assert!(null.sync_data().is_err(), "a device that has nothing to sync");
        Syncing(Arc::clone(&parts)).run(&null, &Key::new("file").unwrap());
        assert!(parts.state().failed.is_some());
        assert_eq!(parts.state().running, 0);
    }
}
