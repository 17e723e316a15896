//! Taking back what a cancelled job has put under final names.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dcp_core::storage::{
    Claim, ObjectMeta, PartFuture, PutMode, StorageExt, Upload, UploadOptions,
};
use dcp_core::{Key, Payload, Storage, StorageError};
use tokio::sync::{OwnedRwLockWriteGuard, RwLock};

/// Records what jobs create, so that it can be removed when one is cancelled.
///
/// A job that fails cleans up by itself. One whose future is dropped ends its uploads; what has its
/// final name by then stays, unless the job had a `Rollback`:
///
/// ```
/// use dcp_jobs::Rollback;
/// # async fn example(
/// #     work: impl Future<Output = ()>, cancelled: impl Future<Output = ()>, rollback: Rollback,
/// # ) {
/// let guard = tokio::select! {
///     _ = work => return,
///     guard = async { cancelled.await; rollback.quiesce().await } => guard,
/// };
/// println!("{:?}", rollback.undo(guard).await);
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Rollback {
    made: Arc<Mutex<Made>>,
    /// Held shared while an object gets its name, so that it is known which have theirs.
    naming: Arc<RwLock<()>>,
}

#[derive(Debug, Default)]
struct Made {
    /// Whether a storage is watched.
    watching: bool,
    /// Objects that were not there before, in order.
    created: Vec<(Arc<dyn Storage>, Key)>,
    /// The first object that took the place of another, or was removed. From then on nothing can be
    /// taken back: what replaced it may refer to all that was created.
    replaced: Option<Key>,
    /// Folders that could not be removed yet, the innermost first.
    folders: Vec<PathBuf>,
}

/// The result of [`Rollback::undo`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Undone {
    /// The job had not opened anything to write to.
    Nothing,
    /// Everything is as it was.
    All,
    /// An object was replaced already, so what was made stays.
    Replaced(Key),
    /// These are still there, with the reason.
    Left(Vec<String>),
}

/// While it lives, no object gets a name.
#[derive(Debug)]
pub struct Quiet(#[expect(dead_code, reason = "it is held")] OwnedRwLockWriteGuard<()>);

impl Rollback {
    /// Nothing recorded.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the storage with its new objects recorded, so that they can be taken back.
    #[must_use]
    pub fn watch(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        self.made().watching = true;
        Arc::new(Watched { storage, rollback: self.clone() })
    }

    /// From now on, something may have been made.
    pub(crate) fn begin(&self) {
        self.made().watching = true;
    }

    /// Removes these folders, the innermost first, when the files in them are gone.
    pub(crate) fn remove_folders_later(&self, folders: &[PathBuf]) {
        self.made().folders.extend_from_slice(folders);
    }

    /// Waits until no object is getting its name; from the moment of the call, none begins to.
    pub async fn quiesce(&self) -> Quiet {
        Quiet(Arc::clone(&self.naming).write_owned().await)
    }

    /// Removes what was created. The job must have been dropped after [`quiesce`](Self::quiesce)
    /// returned `quiet`.
    pub async fn undo(&self, quiet: Quiet) -> Undone {
        let (created, folders) = {
            let mut made = self.made();
            let created = std::mem::take(&mut made.created);
            if let Some(key) = made.replaced.take() {
                return Undone::Replaced(key);
            }
            if !made.watching {
                return Undone::Nothing;
            }
            (created, std::mem::take(&mut made.folders))
        };
        let mut left = Vec::new();
        // The last is what makes the others count, so it goes first.
        for (storage, key) in created.into_iter().rev() {
            if let Err(error) = storage.delete(&[key]).await {
                left.push(dcp_core::error::error_chain(&error));
            }
        }
        for folder in folders {
            // One that has something in it is not to be removed.
            match std::fs::remove_dir(folder) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(_) => break,
            }
        }
        drop(quiet);
        if left.is_empty() { Undone::All } else { Undone::Left(left) }
    }
}

#[derive(Debug)]
struct Watched {
    storage: Arc<dyn Storage>,
    rollback: Rollback,
}

#[derive(Debug)]
struct WatchedUpload {
    upload: Box<dyn Upload>,
    naming: Naming,
}

#[derive(Debug)]
struct WatchedClaim {
    claim: Arc<dyn Claim>,
    naming: Naming,
}

/// An object that is about to get its name.
#[derive(Clone, Debug)]
struct Naming {
    storage: Arc<dyn Storage>,
    rollback: Rollback,
    key: Key,
    mode: PutMode,
}

impl Naming {
    async fn run(
        self,
        work: impl Future<Output = Result<ObjectMeta, StorageError>> + Send,
    ) -> Result<ObjectMeta, StorageError> {
        let Self { storage, rollback, key, mode } = self;
        let _guard = rollback.naming.read().await;
        let replaces = mode != PutMode::Create && storage.contains(&key).await?;
        let meta = work.await?;
        let mut made = rollback.made();
        if !replaces {
            made.created.push((storage, key));
        } else if made.replaced.is_none() {
            made.replaced = Some(key);
        }
        Ok(meta)
    }
}

impl Watched {
    fn naming(&self, key: &Key, mode: PutMode) -> Naming {
        let (storage, rollback) = (Arc::clone(&self.storage), self.rollback.clone());
        Naming { storage, rollback, key: key.clone(), mode }
    }
}

#[async_trait]
impl Storage for Watched {
    dcp_core::forward_storage!(
        storage: capabilities, stat, read, read_whole, list, list_folder, leftovers, remove_empty_folders
    );

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.naming(key, mode.clone()).run(self.storage.put(key, payload, mode)).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let naming = self.naming(key, options.mode.clone());
        let upload = self.storage.start_upload(key, options).await?;
        Ok(Box::new(WatchedUpload { upload, naming }))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let _guard = self.rollback.naming.read().await;
        let deleted = self.storage.delete(keys).await;
        let mut made = self.rollback.made();
        for key in keys {
            let is_it = |(storage, made): &(Arc<dyn Storage>, Key)| {
                made == key && Arc::ptr_eq(storage, &self.storage)
            };
            match made.created.iter().position(is_it) {
                // After an error it may still be there.
                Some(_) if deleted.is_err() => {}
                Some(at) => drop(made.created.remove(at)),
                // What is gone cannot come back, and what was made may be all that is left. After
                // an error, one of several may be gone.
                None if made.replaced.is_none() && (deleted.is_ok() || keys.len() > 1) => {
                    made.replaced = Some(key.clone());
                }
                None => {}
            }
        }
        deleted
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let claim = self.storage.claim(key).await?;
        Ok(Arc::new(WatchedClaim { claim, naming: self.naming(key, PutMode::Overwrite) }))
    }
}

#[async_trait]
impl Claim for WatchedClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        self.naming.clone().run(self.claim.replace(payload)).await
    }
}

#[async_trait]
impl Upload for WatchedUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        self.upload.put_part(part)
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let Self { upload, naming } = *self;
        naming.run(upload.complete()).await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.upload.abort().await
    }
}
