//! Replacing files that are there, so that old and new ones never look like one model.
//!
//! No storage replaces several files at once. So an earlier export is first broken up: its indexes
//! and JSON of objects are removed, or without an index all files but the one that is replaced first.
//! Then the new files are written, and files that only the old indexes named are removed last. Before
//! all that, the export is written to [`Nowhere`]: a checkpoint that cannot be read leaves the old
//! export whole.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream,
    PartFuture, PutMode, ReadOutcome, ReadRequest, StorageExt, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use dcp_formats::hf::IndexFile;
use futures_util::{StreamExt, stream};

use super::files::Files;

/// The largest index that is read for the names in it, in bytes.
const INDEX_MAX: u64 = 256 << 20;

/// The files of an earlier export that are removed before and after files of the same names are
/// written.
#[derive(Debug, Default)]
pub(super) struct Old {
    /// The files that make others a whole: indexes; where there are none, all files but the one
    /// that is replaced first.
    first: Vec<Key>,
    /// The files that the indexes name.
    named: BTreeSet<Key>,
}

impl Old {
    /// Finds the files that `parts` would replace; `None` where none of them is there, and where it
    /// is one file, which is replaced at once.
    pub(super) async fn look(
        storage: &dyn Storage,
        parts: &[(&Files, Option<Key>)],
    ) -> Result<Option<Self>, StorageError> {
        let mut old = Self::default();
        let (mut there, mut count) = (false, 0_usize);
        for (files, objects) in parts {
            let data = files.data.iter().map(|file| &file.key);
            match &files.index {
                Some(index) => {
                    old.named.extend(named_files(storage, index).await?);
                    old.first.push(index.clone());
                }
                // What the very first file holds is whole, old or new.
                None => old.first.extend(data.clone().skip(usize::from(count == 0)).cloned()),
            }
            old.first.extend(objects.clone());
            for key in data.chain(&files.index).chain(objects) {
                count += 1;
                there = there || storage.contains(key).await?;
            }
        }
        Ok((there && count > 1).then_some(old))
    }

    /// Removes what would make new files and old ones a whole.
    pub(super) async fn break_up(&self, storage: &dyn Storage) -> Result<(), StorageError> {
        for key in &self.first {
            storage.delete(std::slice::from_ref(key)).await?;
        }
        Ok(())
    }

    /// Whether what [`break_up`](Self::break_up) removes first is there still.
    pub(super) async fn is_whole(&self, storage: &dyn Storage) -> bool {
        match self.first.first() {
            Some(key) => storage.contains(key).await.unwrap_or(false),
            None => true,
        }
    }

    /// Removes the files that only the old indexes named, and returns those that are gone.
    pub(super) async fn remove_stale(
        self,
        storage: &dyn Storage,
        is_new: impl Fn(&Key) -> bool,
    ) -> Vec<String> {
        let mut removed = Vec::new();
        for key in self.named.iter().filter(|key| !is_new(key)) {
            // The new files are whole whether or not an old one stays beside them.
            let was_there = storage.contains(key).await.unwrap_or(false);
            if was_there && storage.delete(std::slice::from_ref(key)).await.is_ok() {
                removed.push(key.to_string());
            }
        }
        removed
    }
}

/// The files that an index names, of those names that an export has. An index that makes no sense
/// names none.
async fn named_files(storage: &dyn Storage, index: &Key) -> Result<Vec<Key>, StorageError> {
    let bytes = match storage.read_whole(index, INDEX_MAX).await {
        Ok(whole) => whole.bytes,
        Err(error) => {
            return match error.kind() {
                StorageErrorKind::NotFound | StorageErrorKind::TooLarge => Ok(Vec::new()),
                _ => Err(error),
            };
        }
    };
    let Some((root, _)) = index.as_str().split_once('/') else { return Ok(Vec::new()) };
    let is_own = |name: &str| {
        let ours = name.starts_with("chunk-") || name.starts_with(&format!("{root}-"));
        ours && !name.contains('/') && (name.ends_with(".safetensors") || name.ends_with(".pt"))
    };
    let index = IndexFile::parse(&bytes).unwrap_or_default();
    let names = index.files().filter(|name| is_own(name.as_str()));
    Ok(names.filter_map(|name| Key::new(format!("{root}/{name}")).ok()).collect())
}

/// A storage that takes everything and keeps nothing: what can be written to it can be read from
/// the checkpoint, undamaged.
#[derive(Debug)]
pub(super) struct Nowhere;

fn nothing(operation: StorageOp, key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::NotFound, operation, Some(key.clone()))
}

#[async_trait]
impl Storage for Nowhere {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::none();
        capabilities.writable = true;
        capabilities.listable = true;
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        Err(nothing(StorageOp::Stat, key))
    }

    async fn read(&self, key: &Key, _: ReadRequest) -> Result<ReadOutcome, StorageError> {
        Err(nothing(StorageOp::Read, key))
    }

    async fn read_whole(&self, key: &Key, _: u64) -> Result<WholeObject, StorageError> {
        Err(nothing(StorageOp::Read, key))
    }

    async fn put(
        &self,
        key: &Key,
        content: Payload,
        _mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        Ok(ObjectMeta::new(key.clone(), content.len()))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Ok(Box::new(NowhereUpload { key: key.clone(), byte_len: 0 }))
    }

    fn list(&self, _folder: Option<&Key>) -> ObjectStream {
        stream::empty().boxed()
    }

    fn list_folder(&self, _folder: Option<&Key>) -> FolderStream {
        stream::empty().boxed()
    }

    async fn delete(&self, _keys: &[Key]) -> Result<(), StorageError> {
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Ok(Arc::new(NowhereClaim(key.clone())))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        _: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Ok(Vec::new())
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}

#[derive(Debug)]
struct NowhereClaim(Key);

#[async_trait]
impl Claim for NowhereClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        Ok(ObjectMeta::new(self.0.clone(), payload.len()))
    }
}

#[derive(Debug)]
struct NowhereUpload {
    key: Key,
    byte_len: u64,
}

#[async_trait]
impl Upload for NowhereUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        self.byte_len = self.byte_len.saturating_add(part.len());
        Box::pin(async { Ok(()) })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        Ok(ObjectMeta::new(self.key, self.byte_len))
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
    }
}
