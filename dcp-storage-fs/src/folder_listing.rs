//! Lists folders.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_core::Key;
use dcp_core::storage::ObjectMeta;
use rustix::fs::{AtFlags, Dir, FileType, Stat, statat};
use rustix::io::Errno;

use crate::error::is_absence;
use crate::owner::{is_reserved, is_temp};
use crate::root::{FOLDER, LOOK, Root, split};
use crate::version::{object, version_of_stat};

/// The entries of one folder.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) objects: Vec<ObjectMeta>,
    /// Paths below the root.
    pub(crate) folders: Vec<String>,
    /// Links to folders, where links are followed.
    pub(crate) linked_folders: Vec<String>,
    pub(crate) temps: Vec<FoundTemp>,
    /// Lock files of claims.
    pub(crate) locks: Vec<FoundTemp>,
}

/// A temporary file.
#[derive(Debug)]
pub(crate) struct FoundTemp {
    pub(crate) name: String,
    pub(crate) byte_len: u64,
    pub(crate) modified: Option<SystemTime>,
}

/// Lists the folder at `path`; `None` if it does not exist.
///
/// Omits files that disappear meanwhile, names that are no keys, and anything but regular files. A symbolic link to a regular file that may be opened
/// counts as that file; one to a folder could lead in a circle and is skipped.
pub(crate) fn look_into(root: &Root, path: &str) -> io::Result<Option<(OwnedFd, Found)>> {
    let folder = match root.open_below(path, FOLDER) {
        Ok(folder) => folder,
        Err(error) if is_absence(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut found = Found::default();
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        if matches!(name, "." | "..") {
            continue;
        }
        let below = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        let stat = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if is_reserved(name) => {
                let byte_len = u64::try_from(stat.st_size).unwrap_or(0);
                let file = FoundTemp { name: name.to_owned(), byte_len, modified: modified(&stat) };
                match is_temp(name) {
                    true => found.temps.push(file),
                    false => found.locks.push(file),
                }
            }
            FileType::RegularFile => {
                if let Ok(key) = Key::new(&below) {
                    let byte_len = u64::try_from(stat.st_size).unwrap_or(0);
                    let meta = ObjectMeta::new(key, byte_len)
                        .with_modified(modified(&stat))
                        .with_version(Some(version_of_stat(&stat)));
                    found.objects.push(meta);
                }
            }
            FileType::Symlink if !is_reserved(name) => match linked(root, &below) {
                Some(Linked::File(meta)) => found.objects.push(meta),
                Some(Linked::Folder) if root.follows_links() => found.linked_folders.push(below),
                _ => {}
            },
            FileType::Directory if Key::new(&below).is_ok() => found.folders.push(below),
            _ => {}
        }
    }
    Ok(Some((folder, found)))
}

/// The target of a symbolic link.
enum Linked {
    File(ObjectMeta),
    Folder,
}

/// The regular file or folder that a symbolic link leads to, if that is allowed.
fn linked(root: &Root, path: &str) -> Option<Linked> {
    let key = Key::new(path).ok()?;
    let meta = File::from(root.open_below(path, LOOK).ok()?).metadata().ok()?;
    if meta.is_dir() {
        return Some(Linked::Folder);
    }
    meta.is_file().then(|| Linked::File(object(&key, &meta)))
}

/// Whether the path of a folder goes through a link, where links to folders are followed.
pub(crate) fn is_linked(root: &Root, path: &str) -> io::Result<bool> {
    if !root.follows_links() {
        return Ok(false);
    }
    let mut path = path;
    while let Some((above, name)) = split(path) {
        let folder = root.open_below(above, FOLDER)?;
        let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Ok(true);
        }
        path = above;
    }
    Ok(false)
}

fn modified(stat: &Stat) -> Option<SystemTime> {
    #[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
    let (seconds, nanos) = (stat.st_mtime as i64, stat.st_mtime_nsec as u32);
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let second =
        if seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    second?.checked_add(Duration::from_nanos(nanos.into()))
}
