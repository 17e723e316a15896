//! [`Upload`] to a temporary file.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PartFuture, PutMode, Upload};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind};

use crate::blocking::blocking;
use crate::error::on_key;
use crate::shared::Shared;
use crate::temp::Temp;
use crate::write::write_payload_at;

const OP: StorageOp = StorageOp::Upload;

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
}

/// The state of the parts so far.
#[derive(Debug, Default)]
struct Parts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Parts that no thread writes yet.
    waiting: usize,
    /// Parts that a thread writes.
    running: usize,
    /// The error that keeps the file from completion.
    failed: Option<StorageErrorKind>,
    wakers: Vec<Waker>,
}

impl Parts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

impl FsUpload {
    pub(crate) fn new(shared: Arc<Shared>, key: Key, mode: PutMode, temp: Temp) -> Self {
        Self { shared, key, mode, temp, byte_len: 0, parts: Arc::default() }
    }
}

#[async_trait]
impl Upload for FsUpload {
    fn put_part(&mut self, payload: Payload) -> PartFuture {
        let (file, key) = (Arc::clone(self.temp.file()), self.key.clone());
        let byte_offset = self.byte_len;
        self.byte_len = byte_offset.saturating_add(payload.len());
        let mut part = Part::new(&self.parts);
        Box::pin(async move {
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
                // The caller gets its memory back before the result.
                drop(payload);
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
            (_, Some(kind)) => lacks(kind, "an earlier part was not written"),
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
