//! The folder of a cache: block files, locks, and a limit.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use dcp_core::StorageError;
use dcp_core::error::StorageOp;

use super::block::{self, BlockName};
use super::evict::Room;
use crate::private_folder;

/// Locks that processes share; two blocks with one lock wait for each other.
const LOCKS: u32 = 1024;

/// The longest wait for another process that fetches a block, before this one fetches it too.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(60);

/// A used block is marked as used again after this time.
const MARK_AFTER: Duration = Duration::from_secs(60);

/// A folder on local disk that holds cached blocks; clones share it.
///
/// Several processes of one user may use one folder, for several storages. Its file system has
/// locks (`flock`); without them, processes may fetch the same block.
#[derive(Clone, Debug)]
pub struct CacheFolder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    block_bytes: u64,
    patience: Duration,
    room: Room,
    temporary: AtomicU64,
}

/// Settings of a [`CacheFolder`].
#[derive(Clone, Debug)]
pub struct CacheFolderBuilder {
    path: PathBuf,
    max_bytes: u64,
    block_bytes: u64,
    patience: Duration,
}

impl CacheFolderBuilder {
    /// Limits the bytes in the folder. Default: 64 GiB.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: u64) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// Sets the bytes of a block, which is what is fetched at least. Default: 8 MiB; at most 1 GiB.
    #[must_use]
    pub fn block_bytes(mut self, block_bytes: u64) -> Self {
        self.block_bytes = block_bytes.clamp(1, 1 << 30);
        self
    }

    /// Sets the longest wait for another process that fetches the same block; after it, this
    /// process fetches the block too. Default: one minute.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Opens the folder, and creates it if needed.
    ///
    /// # Errors
    ///
    /// [`Denied`](dcp_core::StorageErrorKind::Denied) when another user owns the folder or can write to it;
    /// errors of the file system.
    pub fn open(self) -> Result<CacheFolder, StorageError> {
        let Self { path, max_bytes, block_bytes, patience } = self;
        private_folder::open(&path)?;
        for name in ["blocks", "locks", "new"] {
            let below = path.join(name);
            private_folder::create_within(&below).map_err(|error| {
                StorageError::from_io(StorageOp::Open, None, error)
                    .with_message(format!("the folder {}", below.display()))
            })?;
        }
        let room = Room::new(path.clone(), max_bytes);
        let temporary = AtomicU64::new(0);
        Ok(CacheFolder(Arc::new(Inner { path, block_bytes, patience, room, temporary })))
    }
}

impl CacheFolder {
    /// The folder at `path`, with default settings.
    #[must_use]
    #[allow(clippy::new_ret_no_self, reason = "the builder opens the folder")]
    pub fn new(path: impl Into<PathBuf>) -> CacheFolderBuilder {
        CacheFolderBuilder {
            path: path.into(),
            max_bytes: 64 << 30,
            block_bytes: 8 << 20,
            patience: DEFAULT_PATIENCE,
        }
    }

    /// The path, unresolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The bytes of each block but the last of an object.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.0.block_bytes
    }

    fn block(&self, name: &BlockName) -> PathBuf {
        let name = name.as_str();
        self.0.path.join("blocks").join(name.get(..2).unwrap_or_default()).join(name)
    }

    /// The bytes of a block of `len` bytes, if it is in the folder. A damaged one is removed.
    pub(crate) fn get(&self, name: &BlockName, len: usize) -> Option<Bytes> {
        let path = self.block(name);
        let folder = fs::symlink_metadata(path.parent()?).ok()?;
        let is_file = fs::symlink_metadata(&path).ok()?.is_file();
        if !folder.is_dir() || !is_file {
            tracing::warn!(path = %path.display(), "no block is read through a link, a pipe or a device");
            return None;
        }
        let mut file = File::open(&path).ok()?;
        match block::read(&mut file, len) {
            Ok(bytes) => {
                let age = file.metadata().and_then(|metadata| metadata.modified());
                if age.is_ok_and(|then| then.elapsed().is_ok_and(|age| age > MARK_AFTER)) {
                    // The time of its last use: eviction begins with the oldest.
                    drop(file.set_modified(SystemTime::now()));
                }
                Some(bytes)
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "removing a cached block");
                drop(fs::remove_file(&path));
                None
            }
        }
    }

    /// Adds a block.
    pub(crate) fn put(&self, name: &BlockName, bytes: &[u8]) -> io::Result<()> {
        let Inner { path, temporary, room, .. } = &*self.0;
        let number = temporary.fetch_add(1, Ordering::Relaxed);
        let unfinished = path.join("new").join(format!("{}-{number}", std::process::id()));
        let to = self.block(name);
        if let Some(folder) = to.parent() {
            private_folder::create_within(folder)?;
        }
        block::write(&unfinished, bytes)?;
        fs::rename(&unfinished, to).inspect_err(|_| drop(fs::remove_file(&unfinished)))?;
        room.added(bytes.len() as u64);
        Ok(())
    }

    /// Waits until no other process fetches the block. Without a lock after the longest wait, or on
    /// a file system without locks, the caller fetches it all the same.
    pub(crate) fn lock(&self, name: &BlockName) -> FetchLock {
        let path = self.0.path.join("locks").join(name.slot(LOCKS).to_string());
        let open =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
        let Ok(file) = open else { return FetchLock(None) };
        let deadline = Instant::now() + self.0.patience;
        let mut pause = Duration::from_millis(1);
        loop {
            match file.try_lock() {
                Ok(()) => return FetchLock(Some(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(Duration::from_millis(50));
                }
                Err(_) => return FetchLock(None),
            }
        }
    }
}

/// The right to fetch a block. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct FetchLock(Option<File>);

impl Drop for FetchLock {
    fn drop(&mut self) {
        // Explicitly: a forked child may hold the same lock by a descriptor of its own.
        drop(self.0.take().map(|file| file.unlock()));
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Key;
    use dcp_core::storage::Version;

    use super::*;

    #[test]
    fn a_child_that_was_forked_during_a_fetch_does_not_go_on_holding_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let open = || CacheFolder::new(folder.path()).patience(Duration::ZERO).open().unwrap();
        let (key, version) = (Key::new("object").unwrap(), Version::new("1"));
        let name = BlockName::new("memory://bucket", &key, &version, 100, 0);
        let mine = open().lock(&name);
        // What a child has that is forked now.
        let inherited = mine.0.as_ref().unwrap().try_clone().unwrap();
        assert!(open().lock(&name).0.is_none());
        drop(mine);
        assert!(open().lock(&name).0.is_some());
        drop(inherited);
    }
}
