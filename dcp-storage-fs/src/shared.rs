//! Operations on one file, which the storage, its uploads and its claims share.

use std::collections::BTreeMap;
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
use crate::version::object;

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
                .with_message("such names are reserved for temporary files and locks"));
        }
        Ok(())
    }

    /// A temporary file in the folder of `key`, which is created if it is missing.
    pub(crate) fn create_temp(&self, op: StorageOp, key: &Key) -> Result<Temp, StorageError> {
        self.create_temp_with(op, key, None)
    }

    /// Creates a temporary file in the folder of `key`, with at most these permissions.
    pub(crate) fn create_temp_with(
        &self,
        op: StorageOp,
        key: &Key,
        permissions: Option<u32>,
    ) -> Result<Temp, StorageError> {
        self.refuse_reserved(op, key)?;
        let (path, name) = parts(key);
        let create = || {
            let folder = open_or_create(&self.root, path)?;
            refuse_special(&folder, name)?;
            if self.sync {
                settle(&self.root, path)?;
            }
            Temp::create(folder, permissions.unwrap_or(0o666))
        };
        create().map_err(on_key(op, key))
    }

    /// Makes the temporary file the object.
    pub(crate) fn publish(
        &self,
        op: StorageOp,
        key: &Key,
        temp: Temp,
        mode: &PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let (path, name) = parts(key);
        let published = temp.publish(name, mode, self.sync);
        published.map(|meta| object(key, &meta)).map_err(|error| {
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
            Ok(meta) if meta.is_file() => Ok(object(key, &meta)),
            Ok(_) => Err(absent().with_message("it is not a regular file")),
            Err(error) if is_absence(&error) => Err(absent().with_source(error)),
            Err(error) => Err(on_key(op, key)(error)),
        }
    }

    /// Removes objects, and makes that durable once in each folder. Continues after an error, and
    /// returns the first.
    pub(crate) fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let mut folders: BTreeMap<&str, Vec<(&Key, &str)>> = BTreeMap::new();
        for key in keys {
            let (path, name) = parts(key);
            folders.entry(path).or_default().push((key, name));
        }
        let mut first = Ok(());
        for (path, objects) in folders {
            first = first.and(self.delete_in(path, &objects));
        }
        first
    }

    fn delete_in(&self, path: &str, objects: &[(&Key, &str)]) -> Result<(), StorageError> {
        let on = |key| on_key(StorageOp::Delete, key);
        let Some((some, _)) = objects.first() else { return Ok(()) };
        let folder: OwnedFd = match self.root.open_below(path, FOLDER) {
            Err(error) if is_absence(&error) => return Ok(()),
            outcome => outcome.map_err(on(some))?,
        };
        let (mut removed, mut first) = (None, Ok(()));
        for (key, name) in objects {
            match remove_file(&folder, name) {
                Ok(true) => removed = Some(*key),
                Ok(false) => {}
                Err(error) => first = first.and(Err(on(key)(error))),
            }
        }
        #[cfg(test)]
        crate::kills::step();
        if let (true, Some(key)) = (self.sync, removed) {
            first = first.and(folder::sync(&folder).map_err(on(key)));
        }
        first
    }
}

/// Removes a file or a link, and nothing else; whether there was one.
fn remove_file(folder: &OwnedFd, name: &str) -> io::Result<bool> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            let kind = FileType::from_raw_mode(stat.st_mode);
            if !matches!(kind, FileType::RegularFile | FileType::Symlink) {
                return Ok(false);
            }
        }
        Err(Errno::NOENT) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    #[cfg(test)]
    crate::kills::step();
    match unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(false),
        outcome => {
            outcome?;
            #[cfg(feature = "disk-log")]
            crate::disk_log::unlinked(folder, name);
            Ok(true)
        }
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
