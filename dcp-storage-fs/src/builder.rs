//! How a storage is opened.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_core::{StorageError, StorageOp};

use crate::folder::Settled;
use crate::leftovers;
use crate::root::Root;
use crate::storage::{FsStorage, Shared};

/// Options of a [`FsStorage`]; from [`FsStorage::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `open`"]
pub struct Builder {
    root: PathBuf,
    sync: bool,
    parallelism: u16,
    create: bool,
    follow_links: bool,
    clean: bool,
}

impl Builder {
    pub(crate) fn new(root: PathBuf) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parallelism = u16::try_from(cores.clamp(4, 32)).unwrap_or(32);
        Self { root, sync: true, parallelism, create: false, follow_links: false, clean: false }
    }

    /// Whether a write returns only when its bytes and names would survive a crash of the
    /// machine. By default it does; without, writes are still atomic while the machine runs.
    pub fn sync(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// How many threads a large read may use, and how many requests callers are told are worth
    /// having in flight. By default the number of cores, at least 4 and at most 32.
    pub fn parallelism(mut self, threads: u16) -> Self {
        self.parallelism = threads.max(1);
        self
    }

    /// Whether to make the root folder, and those above it, if it is not there. By default its
    /// absence is an error.
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Whether a symbolic link below the root may lead out of it, as in the cache of the Hugging
    /// Face hub. By default it may not, and a key that needs it is refused as
    /// [`Invalid`](dcp_core::StorageErrorKind::Invalid). Only allow it in folders that you trust.
    pub fn follow_links(mut self, follow: bool) -> Self {
        self.follow_links = follow;
        self
    }

    /// Whether to remove, on opening, temporary files in the root folder that killed writers of
    /// this machine left behind, and those of other machines that are a day old. By default they
    /// stay, as they do where they cannot be removed; they are never listed.
    pub fn clean(mut self, clean: bool) -> Self {
        self.clean = clean;
        self
    }

    /// Opens the root folder.
    ///
    /// # Errors
    ///
    /// When the root is not there, is no folder, or may not be read.
    pub fn open(self) -> Result<FsStorage, StorageError> {
        let failed = |error| {
            StorageError::from_io(StorageOp::Open, None, error)
                .with_message(self.root.display().to_string())
        };
        if self.create {
            create_folders(&self.root, self.sync).map_err(failed)?;
        }
        let root = Root::open(self.root.clone(), self.follow_links).map_err(failed)?;
        if self.clean
            && let Err(error) = leftovers::clean_root(&root, self.sync)
        {
            tracing::warn!(root = %self.root.display(), %error, "cannot remove leftovers");
        }
        Ok(FsStorage::new(Shared {
            root: Arc::new(root),
            sync: self.sync,
            parallelism: self.parallelism,
            settled: Settled::default(),
        }))
    }
}

/// Makes a folder and those above it; with `sync`, durably.
fn create_folders(path: &Path, sync: bool) -> io::Result<()> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    create_folders(parent, sync)?;
    match fs::create_dir(path) {
        Err(error) if !path.is_dir() => return Err(error),
        // Another rank may make the same folder at the same time.
        _ => {}
    }
    if sync {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        crate::folder::sync(&File::open(parent)?.into())?;
    }
    Ok(())
}
