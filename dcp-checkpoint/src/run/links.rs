//! Symbolic links and empty folders of a run on a local file system, which storages do not list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use tokio::sync::oneshot;

use super::StepNaming;
use super::look::{POINTER_BYTES_MAX, is_pointer};

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
}

/// Looks at the run in the folder of a URL; there is nothing to see where it is on no local file system.
pub(super) async fn links(url: &str) -> Links {
    let path = url.strip_prefix("file://").unwrap_or(url);
    if path.contains("://") {
        return Links::default();
    }
    let root = PathBuf::from(path);
    let (send, received) = oneshot::channel();
    let for_thread = root.clone();
    let thread = thread::Builder::new().spawn(move || drop(send.send(scan(&for_thread))));
    match thread {
        Ok(_) => received.await.unwrap_or_default(),
        Err(_) => scan(&root),
    }
}

fn scan(root: &Path) -> Links {
    let mut found = Links::default();
    let mut left = ENTRIES_MAX;
    for entry in entries(root, &mut left) {
        let name = entry.file_name().to_string_lossy().into_owned();
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => {
                if is_pointer(&name) {
                    found.texts.extend(text(&entry).map(|text| (name.clone(), text)));
                }
                found.run.push((name, target(&entry)));
            }
            Ok(kind) if kind.is_dir() && StepNaming::step_of(&name).is_some() => {
                scan_step(&mut found, name, entry.path(), &mut left);
            }
            _ => {}
        }
    }
    found
}

fn scan_step(found: &mut Links, name: String, folder: PathBuf, left: &mut usize) {
    let (mut folders, mut changed, mut is_empty) = (vec![folder], None, true);
    while let Some(folder) = folders.pop() {
        changed = changed.max(modified(&folder));
        for entry in entries(&folder, left) {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_symlink() => {
                    is_empty = false;
                    let target = target(&entry);
                    let parts = Path::new(&target).components();
                    let parts = parts.map(|part| part.as_os_str().to_string_lossy());
                    let steps = parts.filter(|part| StepNaming::step_of(part).is_some());
                    let steps = steps.map(|step| step.into_owned()).filter(|step| *step != name);
                    found.steps.entry(name.clone()).or_default().extend(steps);
                }
                Ok(kind)
                    if kind.is_file() && entry.file_name().to_string_lossy().starts_with(LOCK) =>
                {
                    changed = changed.max(modified(&entry.path()));
                }
                _ => is_empty = false,
            }
        }
    }
    if is_empty && *left > 0 {
        found.empty.insert(name, changed);
    }
}

fn entries(folder: &Path, left: &mut usize) -> Vec<DirEntry> {
    let Ok(listed) = fs::read_dir(folder) else {
        // Nothing is known of it, so it is not empty.
        *left = 0;
        return Vec::new();
    };
    let all: Vec<_> = listed.take(*left).flatten().collect();
    *left -= all.len().min(*left);
    all
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
