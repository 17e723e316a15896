//! Opens a storage: its options.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_core::StorageError;
use dcp_core::error::StorageOp;

use crate::folder;
use crate::leftovers;
use crate::root::{Links, Root};
use crate::shared::Shared;
use crate::storage::FsStorage;

/// Options of a [`FsStorage`]; from [`FsStorage::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `open`"]
pub struct FsStorageBuilder {
    root: PathBuf,
    sync: bool,
    parallelism: u16,
    create: bool,
    links: Links,
    clean: bool,
}

impl FsStorage {
    /// Opens an existing root folder, with the default options.
    ///
    /// # Errors
    ///
    /// When the root does not exist, is no folder, or cannot be read.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StorageError> {
        Self::builder(root).open()
    }

    /// Options to open a root folder with.
    pub fn builder(root: impl Into<PathBuf>) -> FsStorageBuilder {
        FsStorageBuilder::new(root.into())
    }
}

impl FsStorageBuilder {
    fn new(root: PathBuf) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parallelism = u16::try_from(cores.clamp(4, 32)).unwrap_or(32);
        Self { root, sync: true, parallelism, create: false, links: Links::Below, clean: false }
    }

    /// Whether a write returns only when its bytes and names would survive a crash of the
    /// machine. By default it does; without, writes are still atomic while the machine runs.
    pub fn sync(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// The number of threads of a large read, and of concurrent requests that callers should make.
    /// By default the number of cores, at least 4 and at most 32.
    pub fn parallelism(mut self, threads: u16) -> Self {
        self.parallelism = threads.max(1);
        self
    }

    /// Whether to create the root folder, and those above it, if it does not exist. Its name is
    /// durable after `open`, unless [`sync`](Self::sync) is off. By default a missing root is an
    /// error.
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Whether a symbolic link below the root may lead out of it, as in the cache of the Hugging
    /// Face hub. By default it may not, and a key through such a link fails with
    /// [`Link`](dcp_core::StorageErrorKind::Link). Only allow it in folders that you trust.
    ///
    /// Listings then follow links to folders: at most one on the path of each object, so that
    /// circles of links end.
    pub fn follow_links(mut self, follow: bool) -> Self {
        self.links = if follow { Links::Anywhere } else { Links::Below };
        self
    }

    /// Lets symbolic links below the root lead to what is below `folder`, which the root is in,
    /// and no further. This reads snapshots in the cache of the Hugging Face hub, whose files are
    /// links to blobs of the same repository.
    pub fn links_within(mut self, folder: impl Into<PathBuf>) -> Self {
        self.links = Links::Within(folder.into());
        self
    }

    /// Whether to remove, on opening, temporary files in the root folder that killed writers of
    /// this machine left behind, and those of other machines that are a day old. By default they
    /// stay, as do files that cannot be removed. They are never listed.
    pub fn clean(mut self, clean: bool) -> Self {
        self.clean = clean;
        self
    }

    /// Opens the root folder.
    ///
    /// # Errors
    ///
    /// When the root does not exist, is no folder, or cannot be read.
    pub fn open(self) -> Result<FsStorage, StorageError> {
        let failed = |error| {
            StorageError::from_io(StorageOp::Open, None, error)
                .with_message(self.root.display().to_string())
        };
        if self.create {
            create_folders(&self.root, self.sync).map_err(failed)?;
        }
        let root = Root::open(self.root.clone(), &self.links).map_err(failed)?;
        if self.clean
            && let Err(error) = leftovers::clean_root(&root, self.sync)
        {
            tracing::warn!(root = %self.root.display(), %error, "cannot remove leftovers");
        }
        Ok(FsStorage::new(Shared {
            root: Arc::new(root),
            sync: self.sync,
            parallelism: self.parallelism,
        }))
    }
}

/// Creates a folder and those above it. With `sync`, their names are durable, also those that another
/// rank created: it may have died before its sync.
fn create_folders(path: &Path, sync: bool) -> io::Result<()> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let was_there = path.is_dir();
    if !was_there {
        create_folders(path.parent().unwrap_or(Path::new("")), sync)?;
        match fs::create_dir(path) {
            Err(error) if !path.is_dir() => return Err(error),
            #[cfg(feature = "disk-log")]
            Ok(()) => note_folder(path),
            // Another rank may create the same folder at the same time.
            _ => {}
        }
    }
    if !sync {
        return Ok(());
    }
    // Not the path's parent: the path may be a link to a folder elsewhere.
    match File::open(path.join("..")).and_then(|above| folder::sync(&above.into())) {
        // No rank of this user created the folder: it existed before.
        Err(error) if was_there && is_foreign(&error) => Ok(()),
        outcome => outcome,
    }
}

#[cfg(feature = "disk-log")]
fn note_folder(path: &Path) {
    let name = path.file_name().and_then(|name| name.to_str());
    if let (Ok(above), Some(name)) = (File::open(path.join("..")), name) {
        crate::disk_log::made_folder(&above, name);
    }
}

/// Whether the folder above belongs to another user, or to a file system that does not change.
fn is_foreign(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::folder::tests::syncs;

    #[test]
    fn the_name_of_a_root_that_somebody_else_made_is_durable_too() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        symlink("root", folder.path().join("link")).unwrap();
        let open = |name: &str, create| {
            FsStorageBuilder::new(folder.path().join(name)).create(create).open().unwrap();
        };
        assert!(syncs(folder.path(), || open("root", true)));
        assert!(syncs(folder.path(), || open("link", true)));
        assert!(syncs(folder.path(), || open("root/a/b", true)));
        assert!(syncs(&root, || open("root/c/d", true)));
        assert!(!syncs(folder.path(), || open("root", false)), "readers change nothing");
    }

    #[test]
    fn a_root_in_a_folder_that_may_not_be_read_opens() {
        let folder = tempfile::tempdir().unwrap();
        let above = folder.path().join("above");
        fs::create_dir_all(above.join("root")).unwrap();
        let allow = |mode| fs::set_permissions(&above, fs::Permissions::from_mode(mode)).unwrap();
        allow(0o311);
        let outcome = FsStorageBuilder::new(above.join("root")).create(true).open();
        allow(0o700);
        outcome.unwrap();
    }
}
