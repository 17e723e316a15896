//! Turns to upload.
//!
//! A node has one network, and processes that all upload at once each get a share of it: every file
//! takes as long as all together, and the commit waits for the last one. With turns, `count` processes upload at
//! full speed, and the next begins when one is done, without a barrier.
//!
//! A turn is an exclusive lock on one of `count` files in a folder of the node, which the kernel
//! releases when a process dies, so no turn is lost and nothing has to be cleaned up. A process holds one
//! turn for all its uploads: counting the uploads, and not the files, would let one process with many
//! tensors take all turns. Taking part is a courtesy: whoever waits longer than `patience`, or finds no
//! locks, uploads without a turn, so turns never fail a save. Polling with a growing pause is used
//! because `flock` has no wait for one of several files.
//!
//! Invariant: `held.lock` is there from the first upload of this process to its last.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dcp_core::storage::{ObjectMeta, PartFuture, PutMode, Upload, UploadOptions};
use dcp_core::{Key, Payload, Storage, StorageError};
use tokio::sync::Mutex as AsyncMutex;

use crate::blocking::blocking;
use crate::private_folder;

/// Writes below this size need no turn.
const SMALL: u64 = 1 << 20;

/// The longest wait for a turn. Another process may be stopped, and turns are a courtesy.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(600);

/// The turns of the processes of a node; clones share them.
#[derive(Clone, Debug)]
pub struct UploadSlots(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    files: Vec<PathBuf>,
    patience: Duration,
    /// One task of this process waits for a slot; the others wait for that task.
    waiting: AsyncMutex<()>,
    held: Mutex<Held>,
}

/// The slot of this process, while it uploads.
#[derive(Debug, Default)]
struct Held {
    uploads: usize,
    lock: Option<File>,
}

impl UploadSlots {
    /// The turns in `folder`, which is created if needed: `count` processes upload at a time. All
    /// processes of a node name the same folder and count.
    ///
    /// # Errors
    ///
    /// [`Denied`](dcp_core::StorageErrorKind::Denied) when another user owns the folder or can
    /// write to it; errors of the file system.
    pub fn open(folder: impl AsRef<Path>, count: u32) -> Result<Self, StorageError> {
        let folder = folder.as_ref();
        private_folder::open(folder)?;
        let files = (0..count.max(1)).map(|number| folder.join(format!("slot-{number}"))).collect();
        let slots = Slots {
            files,
            patience: DEFAULT_PATIENCE,
            waiting: AsyncMutex::new(()),
            held: Mutex::default(),
        };
        Ok(Self(Arc::new(slots)))
    }

    /// Waits until this process may upload.
    async fn turn(&self) -> Turn {
        let _waiting = self.0.waiting.lock().await;
        if self.0.held().uploads == 0 {
            let slots = Arc::clone(&self.0);
            let lock = blocking(move || slots.wait()).await.flatten();
            self.0.held().lock = lock;
        }
        self.0.held().uploads += 1;
        Turn(Arc::clone(&self.0))
    }
}

impl Slots {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a slot; `None` after the longest wait, or where there are no locks.
    fn wait(&self) -> Option<File> {
        let open = |path: &PathBuf| {
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
        };
        let files: Vec<_> = self.files.iter().filter_map(|path| open(path).ok()).collect();
        if files.is_empty() {
            tracing::warn!(folder = ?self.files.first(), "uploading without a turn: no slots");
            return None;
        }
        let deadline = Instant::now() + self.patience;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(at) = files.iter().position(|file| file.try_lock().is_ok()) {
                return files.into_iter().nth(at);
            }
            if Instant::now() >= deadline {
                tracing::warn!(waited = ?self.patience, "uploading without a turn");
                return None;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(100));
        }
    }
}

/// The right to upload, which all uploads of a process share.
#[derive(Debug)]
struct Turn(Arc<Slots>);

impl Drop for Turn {
    fn drop(&mut self) {
        let mut held = self.0.held();
        held.uploads -= 1;
        if held.uploads == 0 {
            // Explicitly: a forked child may hold the same lock by a descriptor of its own.
            drop(held.lock.take().map(|lock| lock.unlock()));
        }
    }
}

/// A storage whose uploads take turns with those of the other processes of a node; clones share it.
/// See the [crate](crate) documentation.
#[derive(Clone, Debug)]
pub struct ThrottledStorage {
    inner: Arc<dyn Storage>,
    slots: UploadSlots,
}

impl ThrottledStorage {
    /// Lets the uploads of `inner` take turns.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, slots: UploadSlots) -> Self {
        Self { inner, slots }
    }
}

#[async_trait]
impl Storage for ThrottledStorage {
    dcp_core::forward_storage!(
        inner: capabilities, stat, read, read_whole, list, list_folder, delete, claim,
        leftovers, remove_empty_folders
    );

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let _turn = if payload.len() < SMALL { None } else { Some(self.slots.turn().await) };
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let turn = self.slots.turn().await;
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(ThrottledUpload { inner, _turn: turn }))
    }
}

/// An upload that holds a turn until it ends.
#[derive(Debug)]
struct ThrottledUpload {
    inner: Box<dyn Upload>,
    _turn: Turn,
}

#[async_trait]
impl Upload for ThrottledUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        self.inner.put_part(part)
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let Self { inner, _turn } = *self;
        inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        let Self { inner, _turn } = *self;
        inner.abort().await
    }
}

#[cfg(test)]
mod tests {
    use dcp_testing::block_on;

    use super::*;

    #[test]
    fn a_child_that_was_forked_during_an_upload_does_not_go_on_holding_the_turn() {
        let folder = tempfile::tempdir().unwrap();
        let open = || {
            let mut slots = UploadSlots::open(folder.path().join("slots"), 1).unwrap();
            Arc::get_mut(&mut slots.0).unwrap().patience = Duration::ZERO;
            slots
        };
        let mine = block_on(open().turn());
        // What a child has that is forked now.
        let inherited = mine.0.held().lock.as_ref().unwrap().try_clone().unwrap();
        assert!(open().0.wait().is_none());
        drop(mine);
        assert!(open().0.wait().is_some());
        drop(inherited);
    }
}
