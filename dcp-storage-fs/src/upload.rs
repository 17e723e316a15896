//! [`Upload`] to a temporary file.

use std::mem;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{PutMode, Upload};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::blocking::{blocking, lost};
use crate::error::on_key;
use crate::shared::Shared;
use crate::temp::Temp;
use crate::write::write_payload;

const OP: StorageOp = StorageOp::Upload;

/// An object in the making. The file goes when the upload does, unless it was completed.
#[derive(Debug)]
pub(crate) struct FsUpload {
    shared: Arc<Shared>,
    key: Key,
    mode: PutMode,
    state: State,
}

#[derive(Debug)]
enum State {
    Ready(Temp),
    /// A thread appends a part. It stays so when the caller drops the future, and the next call
    /// waits for that thread, so that parts keep their order.
    Writing(JoinHandle<Result<Temp, StorageError>>),
    /// A part failed, and the file is gone.
    Failed,
}

impl FsUpload {
    pub(crate) fn new(shared: Arc<Shared>, key: Key, mode: PutMode, temp: Temp) -> Self {
        Self { shared, key, mode, state: State::Ready(temp) }
    }

    /// Waits until no part is being written, and takes the file.
    async fn take(&mut self) -> Result<Temp, StorageError> {
        if let State::Writing(thread) = &mut self.state {
            let outcome = thread.await;
            self.state = State::Failed;
            return outcome.unwrap_or_else(|error| Err(lost(OP, Some(&self.key), error)));
        }
        match mem::replace(&mut self.state, State::Failed) {
            State::Ready(temp) => Ok(temp),
            State::Writing(_) | State::Failed => {
                let kind = StorageErrorKind::Other;
                Err(StorageError::new(kind, OP, Some(self.key.clone()))
                    .with_message("an earlier part failed"))
            }
        }
    }
}

fn append(temp: Temp, key: &Key, part: &Payload) -> Result<Temp, StorageError> {
    write_payload(&mut temp.file(), part).map_err(on_key(OP, key))?;
    Ok(temp)
}

#[async_trait]
impl Upload for FsUpload {
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError> {
        let temp = self.take().await?;
        let Ok(runtime) = Handle::try_current() else {
            self.state = State::Ready(append(temp, &self.key, &part)?);
            return Ok(());
        };
        let key = self.key.clone();
        self.state = State::Writing(runtime.spawn_blocking(move || append(temp, &key, &part)));
        self.state = State::Ready(self.take().await?);
        Ok(())
    }

    async fn complete(mut self: Box<Self>) -> Result<(), StorageError> {
        let temp = self.take().await?;
        let Self { shared, key, mode, .. } = *self;
        let for_thread = key.clone();
        blocking(OP, Some(&key), move || shared.publish(OP, &for_thread, temp, mode)).await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), StorageError> {
        // Of an upload that failed nothing is left.
        if let Ok(temp) = self.take().await {
            blocking(OP, Some(&self.key), move || {
                drop(temp);
                Ok(())
            })
            .await?;
        }
        Ok(())
    }
}
