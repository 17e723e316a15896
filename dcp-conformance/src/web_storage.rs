//! A storage decorator that only reads, as from a web server.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PutMode,
    Upload, UploadOptions,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::stream;

/// Passes reads to another storage, and refuses to list and to write, as a storage over a web
/// server does.
#[derive(Clone, Debug)]
pub struct WebStorage {
    inner: Arc<dyn Storage>,
}

impl WebStorage {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Self { inner }
    }
}

fn unsupported(op: StorageOp, key: Option<&Key>) -> StorageError {
    StorageError::new(StorageErrorKind::Unsupported, op, key.cloned())
        .with_message("a web server has files by name only")
}

#[async_trait]
impl Storage for WebStorage {
    dcp_core::forward_storage!(inner: stat, read, read_whole);

    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        let mut capabilities = Capabilities::none();
        capabilities.versions = inner.versions;
        capabilities.ranged_reads = inner.ranged_reads;
        capabilities.coalesce_gap = inner.coalesce_gap;
        capabilities.parallelism = inner.parallelism;
        capabilities
    }

    async fn put(&self, key: &Key, _: Payload, _: PutMode) -> Result<ObjectMeta, StorageError> {
        Err(unsupported(StorageOp::Put, Some(key)))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(unsupported(StorageOp::Upload, Some(key)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        Box::pin(stream::iter([Err(unsupported(StorageOp::List, folder))]))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        Box::pin(stream::iter([Err(unsupported(StorageOp::List, folder))]))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        Err(unsupported(StorageOp::Delete, keys.first()))
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(unsupported(StorageOp::Claim, Some(key)))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        _: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Err(unsupported(action.op(), folder))
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        Err(unsupported(StorageOp::RemoveFolders, Some(folder)))
    }
}
