//! Symbolic links and empty folders of a run on a local file system, which storages do not list.
//!
//! A link protects the steps that it leads into: those that its text names, and those that its path goes through
//! when every link on it is followed. The text alone misses chains (`best -> hub/snap -> ../checkpoint-10`);
//! the end of the path alone misses links of a run that was moved, and steps in the middle of a chain.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry, FileType};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use dcp_core::error::StorageOp;
use dcp_core::{Key, StorageError};
use tokio::sync::oneshot;

use super::StepNaming;
use super::lightning::LIGHTNING_STATE;
use super::look::{POINTER_BYTES_MAX, is_last, is_pointer, is_text};
use super::recorded::TRAINER_STATE;
use super::sidecar::{METRICS, PIN, names_folder};

/// Entries of a run that are looked at.
const ENTRIES_MAX: usize = 1_000_000;
/// Links that are followed from one link, as many as Linux follows.
const HOPS_MAX: usize = 40;
/// The beginning of the names of lock files, which are no files of a checkpoint.
const LOCK: &str = ".dcp-lock.";

/// Entries of a run that only a file system has.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// Links in the folder of the run: name and target.
    pub(super) run: Vec<(String, String)>,
    /// The text of small files that these links lead to.
    pub(super) texts: Vec<(String, String)>,
    /// Steps that links outside of the folders of steps lead into, each with the first such link.
    pub(super) leading: BTreeMap<String, String>,
    /// Steps that links in the folder of each step lead into.
    pub(super) steps: BTreeMap<String, BTreeSet<String>>,
    /// The first link in the folder of each step that leads out of it, or nowhere.
    pub(super) outward: BTreeMap<String, String>,
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
    /// The kind of the entry, as the end of a sentence: `is a folder`.
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
    // Where it is missing, listing it says so.
    let real = root.canonicalize().unwrap_or_else(|_| root.to_path_buf());
    for entry in entries(root, &mut left)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        found.special.extend(Special::new("", &name, entry.file_type()));
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => {
                if is_pointer(&name) {
                    match text(&real, &name, &entry) {
                        Ok(text) => found.texts.extend(text.map(|text| (name.clone(), text))),
                        Err(what) => found.special.push(Special { path: name.clone(), what }),
                    }
                    found.special.extend(state_elsewhere(&real, &name, &entry.path()));
                }
                let text = target(&entry);
                let leads_to = steps_on_path(&real, &real.join(&name));
                let leads_to = leads_to.into_iter().filter(|step| !names_folder(&text, step));
                for step in leads_to {
                    found.leading.entry(step).or_insert_with(|| name.clone());
                }
                found.run.push((name, text));
            }
            Ok(kind) if kind.is_dir() && StepNaming::step_of(&name).is_some() => {
                let folder = (name, real.join(entry.file_name()));
                scan_step(&mut found, &real, folder, &mut left)?;
            }
            Ok(kind) if kind.is_dir() => {
                if is_pointer(&name)
                    && let Ok(meta) = fs::symlink_metadata(entry.path().join(LIGHTNING_STATE))
                {
                    let special = Special::new(&name, LIGHTNING_STATE, Ok(meta.file_type()));
                    found.special.extend(special);
                }
                let folder = (name, real.join(entry.file_name()));
                scan_other(&mut found, &real, folder, &mut left)?;
            }
            Ok(kind) if !kind.is_file() && is_last(&name) => {
                found.special.push(Special { path: name, what: "is no file" });
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Looks for links in a folder that is no step, and below it. The name of the folder may be an approximation of its path:
/// not every name is text.
fn scan_other(
    found: &mut Links,
    root: &Path,
    folder: (String, PathBuf),
    left: &mut usize,
) -> Result<(), StorageError> {
    let mut folders = vec![folder];
    while let Some((name, path)) = folders.pop() {
        for entry in entries(&path, left)? {
            let name = format!("{name}/{}", entry.file_name().to_string_lossy());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push((name, entry.path())),
                Ok(kind) if kind.is_symlink() => {
                    for step in leads_to(root, &entry) {
                        found.leading.entry(step).or_insert_with(|| name.clone());
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Looks at the folder of a step, and below it.
fn scan_step(
    found: &mut Links,
    root: &Path,
    (step, own_folder): (String, PathBuf),
    left: &mut usize,
) -> Result<(), StorageError> {
    let (mut changed, mut is_empty) = (None, true);
    let mut folders = vec![(step.clone(), own_folder.clone())];
    while let Some((name, folder)) = folders.pop() {
        changed = changed.max(modified(&folder));
        for entry in entries(&folder, left)? {
            let own = entry.file_name().to_string_lossy().into_owned();
            found.special.extend(Special::new(&name, &own, entry.file_type()));
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push((format!("{name}/{own}"), entry.path())),
                Ok(kind) if kind.is_symlink() => {
                    is_empty = false;
                    let steps = leads_to(root, &entry).into_iter().filter(|to| *to != step);
                    found.steps.entry(step.clone()).or_default().extend(steps);
                    let is_inside =
                        entry.path().canonicalize().is_ok_and(|to| to.starts_with(&own_folder));
                    if !is_inside {
                        let link = format!("{name}/{own}");
                        found.outward.entry(step.clone()).or_insert(link);
                    }
                }
                Ok(kind) if kind.is_file() && own.starts_with(LOCK) => {
                    changed = changed.max(modified(&entry.path()));
                }
                _ => is_empty = false,
            }
        }
    }
    if is_empty {
        found.empty.insert(step, changed);
    }
    Ok(())
}

/// The steps that a link leads into, by its text and by its path.
fn leads_to(root: &Path, link: &DirEntry) -> BTreeSet<String> {
    let text = target(link);
    let parts = Path::new(&text).components();
    let parts = parts.map(|part| part.as_os_str().to_string_lossy().into_owned());
    let mut steps: BTreeSet<_> = parts.filter(|part| StepNaming::step_of(part).is_some()).collect();
    steps.extend(steps_on_path(root, &link.path()));
    steps
}

/// The steps of the run at `root` whose folders a path goes through, with every link on it followed, one
/// component at a time as the kernel does. `root` is without links. A path that does not end after 40 links ends
/// for no reader.
fn steps_on_path(root: &Path, path: &Path) -> BTreeSet<String> {
    let mut steps = BTreeSet::new();
    let (mut at, mut hops) = (PathBuf::new(), 0);
    let owned = |path: &Path| -> Vec<PathBuf> {
        path.components().rev().map(|part| Path::new(part.as_os_str()).to_path_buf()).collect()
    };
    let mut rest = owned(path);
    while let Some(part) = rest.pop() {
        match part.components().next() {
            Some(Component::ParentDir) => drop(at.pop()),
            Some(Component::CurDir) | None => {}
            _ => {
                // An absolute part replaces the path.
                let next = at.join(&part);
                let below =
                    next.strip_prefix(root).ok().and_then(|below| below.components().next());
                if let Some(first) = below.map(|first| first.as_os_str().to_string_lossy())
                    && StepNaming::step_of(&first).is_some()
                {
                    steps.insert(first.into_owned());
                }
                match fs::read_link(&next) {
                    Ok(target) => {
                        hops += 1;
                        if hops > HOPS_MAX {
                            return steps;
                        }
                        rest.extend(owned(&target));
                    }
                    Err(_) => at = next,
                }
            }
        }
    }
    steps
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
    let is_inside = link.canonicalize().ok()?.starts_with(root);
    let path = format!("{name}/{LIGHTNING_STATE}");
    (!is_inside).then_some(Special { path, what: "is behind a link that is not followed" })
}

/// The text of the small file that a link leads to, which may be outside of the run. What is wrong with a file
/// outside of it that may name a checkpoint is the end of a sentence; those inside are read as files.
fn text(root: &Path, name: &str, link: &DirEntry) -> Result<Option<String>, &'static str> {
    let Ok(meta) = fs::metadata(link.path()) else { return Ok(None) };
    if !meta.is_file() {
        return Ok(None);
    }
    let is_inside = link.path().canonicalize().is_ok_and(|to| to.starts_with(root));
    let is_small = meta.len() <= POINTER_BYTES_MAX;
    let text = is_small.then(|| fs::read_to_string(link.path()).ok()).flatten();
    match text {
        None if !is_inside && (is_last(name) || is_text(name)) => {
            Err("is a link to a file outside of the run that dcp does not read")
        }
        text => Ok(text),
    }
}

fn target(entry: &DirEntry) -> String {
    fs::read_link(entry.path())
        .map_or_else(|_| String::new(), |to| to.to_string_lossy().into_owned())
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::symlink_metadata(path).ok()?.modified().ok()
}
