//! Objects in parts.

use std::fmt;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PartFuture, PutMode, Upload};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind};
use opendal::Writer;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::error::{refused, storage_error};
use crate::storage::OpendalStorage;

type Part = (opendal::Buffer, oneshot::Sender<Result<(), StorageError>>);

/// Parts that a task writes one after the other, in the order of the calls. So a future that is
/// dropped, or awaited late, delays and loses no part.
#[derive(Debug)]
pub(crate) struct OpendalUpload {
    storage: OpendalStorage,
    key: Key,
    mode: PutMode,
    parts: mpsc::UnboundedSender<Part>,
    writing: JoinHandle<Written>,
}

/// What a task has written.
struct Written {
    writer: Writer,
    byte_len: u64,
    failed: bool,
}

impl fmt::Debug for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Written").field("byte_len", &self.byte_len).finish_non_exhaustive()
    }
}

/// Writes parts until there are no more.
async fn write(writer: Writer, key: Key, mut parts: mpsc::UnboundedReceiver<Part>) -> Written {
    let mut written = Written { writer, byte_len: 0, failed: false };
    while let Some((part, answer)) = parts.recv().await {
        let part_len = part.len() as u64;
        let outcome = match written.failed {
            true => Err(refused(StorageErrorKind::Other, StorageOp::Upload, &key)
                .with_message("an earlier part was not written")),
            false => written.writer.write(part).await.map_err(|error| {
                written.failed = true;
                storage_error(StorageOp::Upload, Some(&key), error)
            }),
        };
        written.byte_len += part_len;
        // A caller that went away needs no answer.
        let _ = answer.send(outcome);
    }
    written
}

impl OpendalUpload {
    /// Starts the task that writes.
    pub(crate) fn start(storage: OpendalStorage, key: Key, mode: PutMode, writer: Writer) -> Self {
        let (parts, received) = mpsc::unbounded_channel();
        let writing = tokio::spawn(write(writer, key.clone(), received));
        Self { storage, key, mode, parts, writing }
    }
}

#[async_trait]
impl Upload for OpendalUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let (answer, written) = oneshot::channel();
        let sent = self.parts.send((OpendalStorage::copied(&part), answer));
        drop(part);
        let ended = || refused(StorageErrorKind::Other, StorageOp::Upload, &self.key);
        let ended = ended().with_message("the upload has ended");
        Box::pin(async move {
            match sent {
                Ok(()) => written.await.unwrap_or(Err(ended)),
                Err(_) => Err(ended),
            }
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let Self { storage, key, mode, parts, writing } = *self;
        drop(parts);
        let failed = || refused(StorageErrorKind::Other, StorageOp::Upload, &key);
        let written = writing.await.map_err(|error| failed().with_source(error))?;
        let Written { mut writer, byte_len, failed: part_failed } = written;
        let allowed = match part_failed {
            true => Err(failed().with_message("a part was not written")),
            false => storage.check(StorageOp::Upload, &key, &mode).await,
        };
        if let Err(error) = allowed {
            discard(&mut writer).await;
            return Err(error);
        }
        let closed = writer.close().await;
        closed.map_err(|error| storage_error(StorageOp::Upload, Some(&key), error))?;
        Ok(ObjectMeta::new(key, byte_len))
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        let Self { parts, writing, .. } = *self;
        drop(parts);
        if let Ok(mut written) = writing.await {
            discard(&mut written.writer).await;
        }
        Ok(())
    }
}

/// Not every service discards parts; they are under no key.
async fn discard(writer: &mut Writer) {
    let _ = writer.abort().await;
}
