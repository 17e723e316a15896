//! The folder of an object's file: created, and its names made durable.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Mode, fsync, mkdirat, statat, unlinkat};
use rustix::io::Errno;

use crate::error::is_absence;
use crate::folder_listing::look_into;
use crate::root::{FOLDER, Root, split};

/// Opens the folder at `path`; creates it and those above it if they are missing.
pub(crate) fn open_or_create(root: &Root, path: &str) -> io::Result<OwnedFd> {
    match root.open_below(path, FOLDER) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
        outcome => return outcome,
    }
    let Some((above, name)) = split(path) else {
        return Err(Errno::NOENT.into());
    };
    let parent = open_or_create(root, above)?;
    #[cfg(test)]
    crate::kills::step();
    match mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
        #[cfg(feature = "disk-log")]
        Ok(()) => crate::disk_log::made_folder(&parent, name),
        // Another writer may create the same folder at the same time.
        #[cfg(not(feature = "disk-log"))]
        Ok(()) => {}
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    root.open_below(path, FOLDER)
}

/// Makes the names of the folder at `path` and of those above it durable.
///
/// Every write does so, even into folders of earlier writes: the creator of a folder may have died
/// before its sync, and a recreated folder can have the inode of the old one. Syncing an unchanged
/// folder costs little.
pub(crate) fn settle(root: &Root, path: &str) -> io::Result<()> {
    let mut path = path;
    while let Some((above, _)) = split(path) {
        sync(&root.open_below(above, FOLDER)?)?;
        path = above;
    }
    Ok(())
}

/// Makes creations, renames and removals in the folder durable.
pub(crate) fn sync(folder: &OwnedFd) -> io::Result<()> {
    #[cfg(test)]
    tests::note(folder)?;
    #[cfg(feature = "disk-log")]
    let begun = crate::disk_log::begin_sync();
    match fsync(folder) {
        // Some network and user-space file systems have no such call on folders; there, names are
        // as durable as the server makes them.
        Err(Errno::INVAL | Errno::NOTSUP) => Ok(()),
        outcome => {
            outcome?;
            #[cfg(feature = "disk-log")]
            crate::disk_log::synced(folder, begun);
            Ok(())
        }
    }
}

/// Removes the folder at `path` and those in it that are empty. Links are not followed.
pub(crate) fn remove_empty(root: &Root, path: &str, sync: bool) -> io::Result<()> {
    // Each folder after the one that it is in.
    let (mut folders, mut next) = (vec![path.to_owned()], 0);
    while let Some(path) = folders.get(next) {
        if let Some((_, found)) = look_into(root, path)? {
            folders.extend(found.folders);
        }
        next += 1;
    }
    for path in folders.iter().rev() {
        let Some((above, name)) = split(path) else { continue };
        let parent = match root.open_below(above, FOLDER) {
            Ok(parent) => parent,
            Err(error) if is_absence(&error) => continue,
            Err(error) => return Err(error),
        };
        match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
            Ok(()) => {
                #[cfg(feature = "disk-log")]
                crate::disk_log::unlinked(&parent, name);
                if sync {
                    self::sync(&parent)?;
                }
            }
            // `NOTDIR` is that of a link.
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether there is a folder of that name.
pub(crate) fn holds_folder(folder: &OwnedFd, name: &str) -> bool {
    statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Fails if `name` is, or links to, anything but a regular file or a folder: an object never
/// replaces a device, a pipe or a socket.
pub(crate) fn refuse_special(folder: &OwnedFd, name: &str) -> io::Result<()> {
    let Ok(stat) = statat(folder, name, AtFlags::empty()) else { return Ok(()) };
    let what = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => return Ok(()),
    };
    let problem = format!("{what} has this name, and only regular files are replaced");
    Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::{Cell, RefCell};
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use dcp_core::storage::PutMode;
    use dcp_core::{Key, Storage};
    use futures_util::FutureExt;
    use rustix::fs::fstat;

    use super::*;
    use crate::FsStorage;

    thread_local! {
        static SYNCED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
        /// The number of syncs that pass before one fails; `None` where none fails.
        static FAILS_AFTER: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Records that this thread synced a folder, which has no visible effect.
    pub(super) fn note(folder: &OwnedFd) -> io::Result<()> {
        let inode = fstat(folder).unwrap().st_ino;
        SYNCED.with_borrow_mut(|synced| synced.push(inode));
        let left = FAILS_AFTER.get();
        FAILS_AFTER.set(left.and_then(|left| left.checked_sub(1)));
        if left == Some(0) { Err(Errno::IO.into()) } else { Ok(()) }
    }

    #[test]
    fn a_creation_whose_name_is_not_durable_is_taken_back_and_a_replacement_is_not() {
        let root = tempfile::tempdir().unwrap();
        let storage = FsStorage::open(root.path()).unwrap();
        let put = |name, bytes: &'static str, mode| {
            FAILS_AFTER.set(Some(0));
            let key = Key::new(name).unwrap();
            let put = storage.put(&key, bytes.into(), mode);
            put.now_or_never().unwrap().unwrap_err();
        };
        put("new", "x", PutMode::Create);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        fs::write(root.path().join("old"), "old").unwrap();
        put("old", "new", PutMode::Overwrite);
        assert_eq!(fs::read(root.path().join("old")).unwrap(), b"new");
    }

    /// Whether this thread synced the folder during `work`.
    pub(crate) fn syncs(folder: &Path, work: impl FnOnce()) -> bool {
        SYNCED.take();
        work();
        SYNCED.take().contains(&fs::metadata(folder).unwrap().ino())
    }

    fn put(storage: &FsStorage, key: &str) {
        let key = Key::new(key).unwrap();
        // Without a runtime, a write happens on this thread.
        storage.put(&key, "x".into(), PutMode::Overwrite).now_or_never().unwrap().unwrap();
    }

    #[test]
    fn a_folder_that_somebody_made_anew_is_durable_too() {
        let root = tempfile::tempdir().unwrap();
        let storage = FsStorage::open(root.path()).unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        let above = [root.path().to_owned(), root.path().join("a")];
        for _ in 0..3 {
            // The system is free to give a new folder the number of the old one.
            fs::create_dir(root.path().join("a/b")).unwrap();
            for folder in &above {
                assert!(syncs(folder, || put(&storage, "a/b/x")));
                assert!(syncs(folder, || put(&storage, "a/b/x")));
            }
            fs::remove_dir_all(root.path().join("a/b")).unwrap();
        }
    }

    #[test]
    fn without_sync_nothing_is_synced() {
        let root = tempfile::tempdir().unwrap();
        let made = root.path().join("made");
        for folder in [root.path(), &made] {
            assert!(!syncs(folder, || {
                let storage = FsStorage::builder(&made).create(true).sync(false).open().unwrap();
                put(&storage, "a/x");
            }));
            fs::remove_dir_all(&made).unwrap();
            fs::create_dir(&made).unwrap();
        }
    }
}
