//! Symbolic links and empty folders of a run on a local file system, which storages do not list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry, FileType};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use dcp_core::error::StorageOp;
use dcp_core::{Key, StorageError};
use tokio::sync::oneshot;

use super::StepNaming;
use super::lightning::LIGHTNING_STATE;
use super::look::{POINTER_BYTES_MAX, is_last, is_pointer};
use super::recorded::TRAINER_STATE;
use super::sidecar::{METRICS, PIN};

/// Entries of a run that are looked at.
const ENTRIES_MAX: usize = 1_000_000;
/// The beginning of the names of lock files, which are no files of a checkpoint.
const LOCK: &str = ".dcp-lock.";

/// Entries of a run that only a file system has.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// Links in the folder of the run: name and target.
    pub(super) run: Vec<(String, String)>,
    /// The text of small files that these links lead to.
    pub(super) texts: Vec<(String, String)>,
    /// Names of steps on the targets of links in the folder of each step.
    pub(super) steps: BTreeMap<String, BTreeSet<String>>,
    /// Folders of steps without files, with the time of their last change.
    pub(super) empty: BTreeMap<String, Option<SystemTime>>,
    /// Entries with the name of a file that decides what is kept, which are no regular files.
    pub(super) special: Vec<Special>,
}

/// An entry with the name of a file that decides what is kept, which is no regular file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Special {
    /// Its path, in the folder of the run.
    pub(super) path: String,
    /// What it is, as the end of a sentence: `is a folder`.
    pub(super) what: &'static str,
}

impl Special {
    /// The entry `name` in the folder at `parent`, if it is one.
    fn new(parent: &str, name: &str, kind: io::Result<FileType>) -> Option<Self> {
        if ![PIN, METRICS, LIGHTNING_STATE, TRAINER_STATE].contains(&name) {
            return None;
        }
        let what = match kind {
            Ok(kind) if kind.is_file() => return None,
            Ok(kind) if kind.is_symlink() => "is a link that is not followed",
            Ok(kind) if kind.is_dir() => "is a folder",
            _ => "is no file",
        };
        let path = if parent.is_empty() { name.to_owned() } else { format!("{parent}/{name}") };
        Some(Self { path, what })
    }
}

/// Looks at the run in the folder of a URL; there is nothing to see where it is on no local file system.
///
/// # Errors
///
/// When a folder cannot be read, or there are too many entries: a link that was not seen could lead into
/// a checkpoint that is then deleted.
pub(super) async fn links(url: &str) -> Result<Links, StorageError> {
    let path = url.strip_prefix("file://").unwrap_or(url);
    if path.contains("://") {
        return Ok(Links::default());
    }
    let root = PathBuf::from(path);
    let (send, received) = oneshot::channel();
    let for_thread = root.clone();
    let thread = thread::Builder::new().spawn(move || drop(send.send(scan(&for_thread))));
    match thread {
        Ok(_) => received.await.unwrap_or_else(|_| scan(&root)),
        Err(_) => scan(&root),
    }
}

fn scan(root: &Path) -> Result<Links, StorageError> {
    let mut found = Links::default();
    let mut left = ENTRIES_MAX;
    for entry in entries(root, &mut left)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        found.special.extend(Special::new("", &name, entry.file_type()));
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => {
                if is_pointer(&name) {
                    found.texts.extend(text(&entry).map(|text| (name.clone(), text)));
                    found.special.extend(state_elsewhere(root, &name, &entry.path()));
                }
                found.run.push((name, target(&entry)));
            }
            Ok(kind) if kind.is_dir() && StepNaming::step_of(&name).is_some() => {
                scan_step(&mut found, name, entry.path(), &mut left)?;
            }
            Ok(kind) if kind.is_dir() && is_pointer(&name) => {
                let state = entry.path().join(LIGHTNING_STATE);
                if let Ok(meta) = fs::symlink_metadata(state) {
                    let special = Special::new(&name, LIGHTNING_STATE, Ok(meta.file_type()));
                    found.special.extend(special);
                }
            }
            Ok(kind) if !kind.is_file() && !kind.is_dir() && is_last(&name) => {
                found.special.push(Special { path: name, what: "is no file" });
            }
            _ => {}
        }
    }
    Ok(found)
}

fn scan_step(
    found: &mut Links,
    name: String,
    folder: PathBuf,
    left: &mut usize,
) -> Result<(), StorageError> {
    let (mut folders, mut changed, mut is_empty) = (vec![(folder, name.clone())], None, true);
    while let Some((folder, path)) = folders.pop() {
        changed = changed.max(modified(&folder));
        for entry in entries(&folder, left)? {
            let own = entry.file_name().to_string_lossy().into_owned();
            found.special.extend(Special::new(&path, &own, entry.file_type()));
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push((entry.path(), format!("{path}/{own}"))),
                Ok(kind) if kind.is_symlink() => {
                    is_empty = false;
                    let target = target(&entry);
                    let parts = Path::new(&target).components();
                    let parts = parts.map(|part| part.as_os_str().to_string_lossy());
                    let steps = parts.filter(|part| StepNaming::step_of(part).is_some());
                    let steps = steps.map(|step| step.into_owned()).filter(|step| *step != name);
                    found.steps.entry(name.clone()).or_default().extend(steps);
                }
                Ok(kind) if kind.is_file() && own.starts_with(LOCK) => {
                    changed = changed.max(modified(&entry.path()));
                }
                _ => is_empty = false,
            }
        }
    }
    if is_empty {
        found.empty.insert(name, changed);
    }
    Ok(())
}

fn entries(folder: &Path, left: &mut usize) -> Result<Vec<DirEntry>, StorageError> {
    let failed = |error: io::Error| {
        let key = folder.file_name().and_then(|name| Key::new(name.to_string_lossy()).ok());
        StorageError::from_io(StorageOp::List, key, error)
    };
    let mut all = Vec::new();
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed,
        // Another process has removed it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(all),
        Err(error) => return Err(failed(error)),
    };
    for entry in listed {
        *left = left.checked_sub(1).ok_or_else(|| {
            failed(io::Error::other(format!("the run has more than {ENTRIES_MAX} entries")))
        })?;
        all.push(entry.map_err(failed)?);
    }
    Ok(all)
}

/// The state of Lightning in a folder that a link of the run leads to, outside of the run.
fn state_elsewhere(root: &Path, name: &str, link: &Path) -> Option<Special> {
    fs::symlink_metadata(link.join(LIGHTNING_STATE)).ok()?;
    let is_inside = link.canonicalize().ok()?.starts_with(root.canonicalize().ok()?);
    let path = format!("{name}/{LIGHTNING_STATE}");
    (!is_inside).then_some(Special { path, what: "is behind a link that is not followed" })
}

/// The text of the small file that a link leads to, which may be outside of the run.
fn text(entry: &DirEntry) -> Option<String> {
    let meta = fs::metadata(entry.path()).ok()?;
    let is_small = meta.is_file() && meta.len() <= POINTER_BYTES_MAX;
    is_small.then(|| fs::read_to_string(entry.path()).ok())?
}

fn target(entry: &DirEntry) -> String {
    fs::read_link(entry.path())
        .map_or_else(|_| String::new(), |to| to.to_string_lossy().into_owned())
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::symlink_metadata(path).ok()?.modified().ok()
}
