//! Taking back what an interrupted command has put under final names.
//!
//! Every storage that a command writes to is watched. A process runs one command, so what it has
//! made is kept in one place, where the end of that command finds it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dcp::core::{
    Buffer, Capabilities, Claim, Key, ObjectMeta, ObjectStream, Payload, PutMode, ReadInto,
    Storage, StorageError, StorageExt, Upload,
};
use tokio::sync::{RwLock, RwLockWriteGuard};

static MADE: Mutex<Made> =
    Mutex::new(Made { watching: false, created: Vec::new(), replaced: None, folders: Vec::new() });

/// Held shared while an object gets its name, so that it is always known which have theirs.
static NAMING: RwLock<()> = RwLock::const_new(());

#[derive(Debug)]
struct Made {
    /// Whether anything was opened to be written to.
    watching: bool,
    /// Objects that were not there before, in order.
    created: Vec<(Arc<dyn Storage>, Key)>,
    /// The first object that took the place of another, or was removed. From then on nothing can be
    /// taken back: what replaced it may refer to all that was created.
    replaced: Option<Key>,
    /// Folders that could not be removed yet, the innermost first.
    folders: Vec<PathBuf>,
}

fn made() -> MutexGuard<'static, Made> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What became of what an interrupted command had made.
#[derive(Debug)]
pub(crate) enum Undone {
    /// The command had nothing to write to.
    Nothing,
    /// Everything is as it was.
    All,
    /// An object was replaced already, so what was made stays.
    Replaced(Key),
    /// These are still there, with the reason.
    Left(Vec<String>),
}

/// The same storage; what is created in it can be taken back.
pub(crate) fn watch(storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
    made().watching = true;
    Arc::new(Watched(storage))
}

/// Removes these folders, the innermost first, when the files in them are gone.
pub(crate) fn remove_folders_later(folders: &[PathBuf]) {
    made().folders.extend_from_slice(folders);
}

/// While it is held no object gets a name.
pub(crate) type Still = RwLockWriteGuard<'static, ()>;

/// Waits until no object is getting its name; from the moment of asking, none begins to.
pub(crate) async fn quiesce() -> Still {
    NAMING.write().await
}

/// Removes what was created. No work may be going on any more.
pub(crate) fn undo() -> Undone {
    let mut made = made();
    let created = std::mem::take(&mut made.created);
    if let Some(key) = made.replaced.take() {
        return Undone::Replaced(key);
    }
    if !made.watching {
        return Undone::Nothing;
    }
    let mut left = Vec::new();
    match tokio::runtime::Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => {
            // The last is what makes the others count, so it goes first.
            for (storage, key) in created.into_iter().rev() {
                if let Err(error) = runtime.block_on(storage.delete(&key)) {
                    left.push(dcp::core::error_chain(&error));
                }
            }
        }
        Err(error) => left.extend(created.iter().map(|(_, key)| format!("{key:?}: {error}"))),
    }
    for folder in std::mem::take(&mut made.folders) {
        // One that has something in it is not to be removed.
        match std::fs::remove_dir(folder) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => break,
        }
    }
    if left.is_empty() { Undone::All } else { Undone::Left(left) }
}

#[derive(Debug)]
struct Watched(Arc<dyn Storage>);

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
    key: Key,
    mode: PutMode,
}

impl Naming {
    async fn run(
        self,
        work: impl Future<Output = Result<(), StorageError>> + Send,
    ) -> Result<(), StorageError> {
        let _guard = NAMING.read().await;
        let Self { storage, key, mode } = self;
        let replaces = mode == PutMode::Overwrite && storage.contains(&key).await?;
        work.await?;
        let mut made = made();
        if !replaces {
            made.created.push((storage, key));
        } else if made.replaced.is_none() {
            made.replaced = Some(key);
        }
        Ok(())
    }
}

impl Watched {
    fn naming(&self, key: &Key, mode: PutMode) -> Naming {
        Naming { storage: Arc::clone(&self.0), key: key.clone(), mode }
    }
}

#[async_trait]
impl Storage for Watched {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.0.stat(key).await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.0.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        self.naming(key, mode).run(self.0.put(key, payload, mode)).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let upload = self.0.start_upload(key, mode).await?;
        Ok(Box::new(WatchedUpload { upload, naming: self.naming(key, mode) }))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        self.0.list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        let _guard = NAMING.read().await;
        self.0.delete(key).await?;
        let mut made = made();
        let is_it = |(storage, made): &(Arc<dyn Storage>, Key)| {
            made == key && Arc::ptr_eq(storage, &self.0)
        };
        if let Some(at) = made.created.iter().position(is_it) {
            made.created.remove(at);
        } else if made.replaced.is_none() {
            // What is gone cannot come back, and what was made may be all that is left.
            made.replaced = Some(key.clone());
        }
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let claim = self.0.claim(key).await?;
        Ok(Arc::new(WatchedClaim { claim, naming: self.naming(key, PutMode::Overwrite) }))
    }
}

#[async_trait]
impl Claim for WatchedClaim {
    async fn replace(&self, payload: Payload) -> Result<(), StorageError> {
        self.naming.clone().run(self.claim.replace(payload)).await
    }
}

#[async_trait]
impl Upload for WatchedUpload {
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError> {
        self.upload.put_part(part).await
    }

    async fn complete(self: Box<Self>) -> Result<(), StorageError> {
        let Self { upload, naming } = *self;
        naming.run(upload.complete()).await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.upload.abort().await
    }
}
