//! Operations on one file, which the storage, its uploads and its claims share.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PutMode};
use dcp_core::{Key, StorageError, StorageErrorKind};
use rustix::fs::{AtFlags, FileType, statat, unlinkat};
use rustix::io::Errno;

use crate::error::{is_absence, is_folder, on_key};
use crate::folder::{self, holds_folder, open_or_create, refuse_special, settle};
use crate::owner;
use crate::root::{FOLDER, LOOK, Root, split};
use crate::temp::Temp;

/// The root folder and the options of a storage.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) root: Arc<Root>,
    pub(crate) sync: bool,
    pub(crate) parallelism: u16,
}

impl Shared {
    /// Fails for a key whose file would not count as an object.
    pub(crate) fn refuse_reserved(&self, op: StorageOp, key: &Key) -> Result<(), StorageError> {
        if is_reserved(key) {
            return Err(StorageError::new(StorageErrorKind::Invalid, op, Some(key.clone()))
                .with_message("names of that form are kept for temporary files and locks"));
        }
        Ok(())
    }

    /// A temporary file in the folder of `key`, which is made if it is missing.
    pub(crate) fn create_temp(&self, op: StorageOp, key: &Key) -> Result<Temp, StorageError> {
        self.refuse_reserved(op, key)?;
        let (path, name) = parts(key);
        let create = || {
            let folder = open_or_create(&self.root, path)?;
            refuse_special(&folder, name)?;
            if self.sync {
                settle(&self.root, path)?;
            }
            Temp::create(folder)
        };
        create().map_err(on_key(op, key))
    }

    /// Makes the temporary file the object.
    pub(crate) fn publish(
        &self,
        op: StorageOp,
        key: &Key,
        temp: Temp,
        mode: PutMode,
    ) -> Result<(), StorageError> {
        let (path, name) = parts(key);
        temp.publish(name, mode, self.sync).map_err(|error| {
            let taken = error.kind() == io::ErrorKind::AlreadyExists;
            let open = || self.root.open_below(path, FOLDER);
            if taken && open().is_ok_and(|folder| holds_folder(&folder, name)) {
                is_folder(op, Some(key)).with_source(error)
            } else {
                on_key(op, key)(error)
            }
        })
    }

    pub(crate) fn stat(&self, op: StorageOp, key: &Key) -> Result<ObjectMeta, StorageError> {
        let absent = || StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()));
        if is_reserved(key) {
            return Err(absent());
        }
        let look = || File::from(self.root.open_below(key.as_str(), LOOK)?).metadata();
        match look() {
            Ok(meta) if meta.is_file() => {
                Ok(ObjectMeta::new(key.clone(), meta.len()).with_modified(meta.modified().ok()))
            }
            Ok(_) => Err(absent().with_message("it is no regular file")),
            Err(error) if is_absence(&error) => Err(absent().with_source(error)),
            Err(error) => Err(on_key(op, key)(error)),
        }
    }

    pub(crate) fn delete(&self, key: &Key) -> io::Result<()> {
        let (path, name) = parts(key);
        let folder: OwnedFd = match self.root.open_below(path, FOLDER) {
            Err(error) if is_absence(&error) => return Ok(()),
            outcome => outcome?,
        };
        match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                let kind = FileType::from_raw_mode(stat.st_mode);
                if !matches!(kind, FileType::RegularFile | FileType::Symlink) {
                    return Ok(());
                }
            }
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        #[cfg(test)]
        crate::kills::step();
        match unlinkat(&folder, name, AtFlags::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            outcome => outcome?,
        }
        #[cfg(test)]
        crate::kills::step();
        if self.sync { folder::sync(&folder) } else { Ok(()) }
    }
}

/// The folder and the name of an object.
pub(crate) fn parts(key: &Key) -> (&str, &str) {
    split(key.as_str()).unwrap_or(("", key.as_str()))
}

/// Whether the key names one of the storage's own files.
pub(crate) fn is_reserved(key: &Key) -> bool {
    owner::is_reserved(key.file_name())
}
