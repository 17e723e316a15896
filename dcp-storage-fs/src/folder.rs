//! The folder in which an object's file is, and making it durable.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, fstat, fsync, mkdirat, statat};
use rustix::io::Errno;

use crate::root::{FOLDER, Root, split};

/// Folders whose entries in the folders above are known to be durable, by device and inode.
#[derive(Debug, Default)]
pub(crate) struct Settled(Mutex<HashSet<(u64, u64)>>);

/// Opens the folder at `path`, and makes it and those above it where they are missing.
pub(crate) fn open_or_create(root: &Root, path: &str) -> io::Result<OwnedFd> {
    match root.open_below(path, FOLDER) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
        outcome => return outcome,
    }
    let Some((above, name)) = split(path) else {
        return Err(Errno::NOENT.into());
    };
    let parent = open_or_create(root, above)?;
    match mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
        // Another writer may make the same folder at the same time.
        Ok(()) | Err(Errno::EXIST) => root.open_below(path, FOLDER),
        Err(error) => Err(error.into()),
    }
}

/// Makes the names of the folder at `path` and of those above it durable, whoever made them: the
/// one that did may not have come to it yet.
pub(crate) fn settle(
    root: &Root,
    path: &str,
    folder: &OwnedFd,
    settled: &Settled,
) -> io::Result<()> {
    /// Forgetting costs a few syncs; a storage of many folders should not cost memory.
    const REMEMBERED: usize = 1024;
    let stat = fstat(folder)?;
    #[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
    let id = (stat.st_dev as u64, stat.st_ino as u64);
    let Settled(known) = settled;
    if known.lock().unwrap_or_else(PoisonError::into_inner).contains(&id) {
        return Ok(());
    }
    let mut path = path;
    while let Some((above, _)) = split(path) {
        sync(&root.open_below(above, FOLDER)?)?;
        path = above;
    }
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() >= REMEMBERED {
        known.clear();
    }
    known.insert(id);
    Ok(())
}

/// Makes what was created, renamed or removed in the folder durable.
pub(crate) fn sync(folder: &OwnedFd) -> io::Result<()> {
    match fsync(folder) {
        // Some network and user-space file systems have no such call on folders; there, names are
        // as durable as the server makes them.
        Err(Errno::INVAL | Errno::NOTSUP) => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Whether there is a folder of that name.
pub(crate) fn holds_folder(folder: &OwnedFd, name: &str) -> bool {
    statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}
