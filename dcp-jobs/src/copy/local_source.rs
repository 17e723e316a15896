//! The entries of a local folder that a copy leaves out, and the permissions of its files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use dcp_core::Key;
use dcp_core::text::Quoted;

use crate::error::{Error, ErrorKind};
use crate::run::{StepNaming, is_pointer};

/// The beginnings of the names of a storage's own files.
const RESERVED: [&str; 2] = [".dcp-tmp.", ".dcp-lock."];

/// A folder that is to be looked into.
struct Folder {
    path: PathBuf,
    /// Its name below the root, with a separator.
    prefix: String,
    /// The permissions that the folders on the way leave to a file.
    allowed: u32,
    /// Whether a link leads into it, in which no further one is followed.
    by_link: bool,
}

/// The entries below a local folder besides the bytes of its files.
#[derive(Debug, Default)]
pub(super) struct LocalSource {
    /// The permissions of the files that are copied: the bits of each, without those that a folder on its
    /// way takes from the group or from others.
    pub(super) permissions: BTreeMap<Key, u32>,
    /// The permissions of the folders that they are in, by name; that of the root is empty.
    pub(super) folders: BTreeMap<String, u32>,
    /// The entries that are not copied, and need no copy: names below the folder, each with a reason.
    pub(super) left: Vec<String>,
}

/// Looks at everything below `root`, of which `listed` are the files that a copy copies.
///
/// # Errors
///
/// For a link that leads out and was not followed, for what is no file and no folder, and for a name that is
/// no key. What the listing has not because it is newer is no error.
pub(super) fn look(
    root: &Path,
    listed: &dyn Fn(&Key) -> bool,
    has_below: &dyn Fn(&str) -> bool,
) -> Result<LocalSource, Error> {
    let mut found = LocalSource::default();
    let inside = root.canonicalize().ok();
    let inside = inside.as_deref();
    let first = Folder {
        path: root.to_owned(),
        prefix: String::new(),
        allowed: allowed_below(root, 0o777),
        by_link: false,
    };
    let mut folders = vec![first];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder.path) {
            Ok(entries) => entries,
            // It went away since it was listed, or is one file.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                continue;
            }
            Err(error) => return Err(cannot_read(&folder.path, error)),
        };
        for entry in entries {
            let entry = entry.map_err(|error| cannot_read(&folder.path, error))?;
            let path = entry.path();
            let kind = match entry.file_type() {
                Ok(kind) => kind,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(cannot_read(&path, error)),
            };
            let name = entry.file_name();
            let Some(name) = name.to_str() else { return Err(no_key(&path, "it is not UTF-8")) };
            if RESERVED.iter().any(|reserved| name.starts_with(reserved)) {
                continue;
            }
            let below = format!("{}{name}", folder.prefix);
            if !kind.is_symlink() && !kind.is_dir() && !kind.is_file() {
                return Err(no_file(&path, "is no file and no folder"));
            }
            let key = match Key::new(&below) {
                Ok(key) => key,
                Err(error) => return Err(no_key(&path, error.reason)),
            };
            let is_folder = match kind.is_symlink() {
                false => kind.is_dir(),
                true if listed(&key) => false,
                true => match fs::metadata(&path) {
                    Ok(meta) if meta.is_dir() && is_empty(&path) => continue,
                    Ok(meta) if meta.is_dir() && !folder.by_link && has_below(&below) => true,
                    Ok(meta) if !meta.is_dir() && !meta.is_file() => {
                        return Err(no_file(&path, "is a symbolic link to what is no file"));
                    }
                    Ok(meta) if meta.is_dir() && names_checkpoint(name, &path, inside) => {
                        found.left.push(format!(
                            "{} is a link to another folder of the source",
                            Quoted(&below)
                        ));
                        continue;
                    }
                    Ok(_) if folder.by_link => return Err(leads_on(&path)),
                    Ok(_) if leads_inside(&path, inside) => return Err(leads_back(&path)),
                    Ok(_) => return Err(not_followed(&path)),
                    Err(error) => return Err(leads_nowhere(&path, error)),
                },
            };
            if is_folder {
                let allowed = allowed_below(&path, folder.allowed);
                let by_link = folder.by_link || kind.is_symlink();
                folders.push(Folder { path, prefix: format!("{below}/"), allowed, by_link });
            } else if listed(&key)
                && let Ok(meta) = fs::metadata(&path)
            {
                found.permissions.insert(key, meta.permissions().mode() & folder.allowed);
            }
        }
        let name = folder.prefix.trim_end_matches('/');
        if let (true, Ok(meta)) = (name.is_empty() || has_below(name), fs::metadata(&folder.path)) {
            found.folders.insert(name.to_owned(), meta.permissions().mode() & 0o777);
        }
    }
    Ok(found)
}

/// Takes from the folders of a copy what those of its source do not give. The owner keeps access: another
/// copy continues this one.
///
/// # Errors
///
/// When the permissions of a folder cannot be changed.
pub(super) fn restrict(root: &Path, folders: &BTreeMap<String, u32>) -> Result<(), Error> {
    for (name, mode) in folders {
        let path = if name.is_empty() { root.to_owned() } else { root.join(name) };
        let failed = |error| {
            let message =
                format!("cannot change permissions of {}", Quoted(&path.to_string_lossy()));
            Error::new(ErrorKind::Io, message).because(error)
        };
        let is = fs::symlink_metadata(&path).map_err(failed)?.permissions().mode() & 0o7777;
        let to = is & (!0o777 | mode | 0o700);
        if is != to {
            fs::set_permissions(&path, fs::Permissions::from_mode(to)).map_err(failed)?;
        }
    }
    Ok(())
}

/// Whether an entry of a run says which of its checkpoints is the latest or the best one, by a link to
/// it: that is copied under its own name. A link of another name, or to a part of another folder, may be
/// a part of a checkpoint.
fn names_checkpoint(name: &str, link: &Path, root: Option<&Path>) -> bool {
    let (Some(root), Ok(to)) = (root, link.canonicalize()) else { return false };
    let run = link.parent().and_then(|run| run.canonicalize().ok());
    let names_step =
        to.file_name().is_some_and(|to| StepNaming::step_of(&to.to_string_lossy()).is_some());
    is_pointer(name)
        && to.starts_with(root)
        && to != root
        && (names_step || run.is_some_and(|run| to.parent() == Some(&*run)))
}

fn leads_inside(link: &Path, root: Option<&Path>) -> bool {
    let Some(root) = root else { return false };
    link.canonicalize().is_ok_and(|path| path.starts_with(root))
}

/// The permissions of `allowed` that a folder leaves to the files in it.
fn allowed_below(folder: &Path, allowed: u32) -> u32 {
    let Ok(meta) = fs::metadata(folder) else { return allowed };
    let mode = meta.permissions().mode();
    let of = |passes: u32, bits: u32| if mode & passes == 0 { bits } else { 0 };
    allowed & !of(0o010, 0o070) & !of(0o001, 0o007)
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn cannot_read(path: &Path, error: io::Error) -> Error {
    let message = format!("cannot read {}", Quoted(&path.to_string_lossy()));
    Error::new(ErrorKind::Io, message).because(error)
}

/// The error for a link that is not followed, with the end of a sentence about it.
fn refused(link: &Path, what: &str, hint: &str) -> Error {
    let message = format!("{} is a symbolic link {what}", Quoted(&link.to_string_lossy()));
    Error::new(ErrorKind::InvalidOption, message).with_hint(hint)
}

fn no_file(path: &Path, what: &str) -> Error {
    let message = format!("cannot copy {}: it {what}", Quoted(&path.to_string_lossy()));
    Error::new(ErrorKind::InvalidPlace, message).with_hint("move it out of the folder")
}

fn not_followed(link: &Path) -> Error {
    let hint = "`follow_links` copies what it leads to; only do so in folders that you trust";
    refused(link, "that leads out of the folder, and is not followed", hint)
}

fn leads_on(link: &Path) -> Error {
    let hint = "copy the folder that it is in, from where that really is";
    refused(link, "in a folder that a link leads to, and is not followed", hint)
}

fn leads_back(link: &Path) -> Error {
    let what = "to a folder that is copied, too: its files would be copied twice";
    refused(link, what, "remove the link, or put a copy of the folder in its place")
}

fn leads_nowhere(path: &Path, error: io::Error) -> Error {
    let message =
        format!("{} is a symbolic link that leads nowhere", Quoted(&path.to_string_lossy()));
    Error::new(ErrorKind::Damaged, message)
        .because(error)
        .with_hint("remove the link, or put back what it led to")
}

fn no_key(path: &Path, reason: &str) -> Error {
    let message = format!(
        "cannot copy {}: {reason}, which other storages have no name for",
        Quoted(&path.to_string_lossy())
    );
    Error::new(ErrorKind::Unsupported, message).with_hint("rename it, or move it out of the folder")
}
