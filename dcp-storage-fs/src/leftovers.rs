//! Finds and removes the temporary files and lock files of killed writers.

use std::io;
use std::time::{Duration, SystemTime};

use dcp_core::storage::{Leftover, LeftoverAction, LeftoverKind};
use rustix::fs::{AtFlags, unlinkat};
use rustix::io::Errno;

use crate::folder;
use crate::folder_listing::look_into;
use crate::lock;
use crate::owner::Owner;
use crate::root::Root;

/// The age at which a temporary file of another machine counts as dead, because the processes of
/// that machine are unknown.
const DISTANT_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Temporary files that are older than `min_age` and whose writer is not known to run, in the folder
/// at `path` and those below it. Whether a writer on another machine runs is unknown.
pub(crate) fn find(
    root: &Root,
    path: &str,
    min_age: Duration,
    action: LeftoverAction,
    sync: bool,
) -> io::Result<Vec<Leftover>> {
    let is_dead = |owner: Owner, age: Option<Duration>| age >= Some(min_age) && !owner.is_alive();
    let mut all = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(path) = folders.pop() {
        let (some, below) = find_in(root, &path, is_dead, action, sync)?;
        all.extend(some);
        all.extend(locks_in(root, &path, min_age, action, sync)?);
        folders.extend(below);
    }
    Ok(all)
}

/// Removes those of the root folder alone: files of dead processes of this machine, and files that
/// are a day old.
pub(crate) fn clean_root(root: &Root, sync: bool) -> io::Result<()> {
    let is_dead = |owner: Owner, age: Option<Duration>| {
        !owner.is_alive() && (owner.is_here() || age >= Some(DISTANT_AGE))
    };
    find_in(root, "", is_dead, LeftoverAction::Remove, sync).map(drop)
}

/// Lock files that no running process of this machine holds and that are older than `min_age`. One that
/// is locked, by a process of any machine, is not removed.
fn locks_in(
    root: &Root,
    path: &str,
    min_age: Duration,
    action: LeftoverAction,
    sync: bool,
) -> io::Result<Vec<Leftover>> {
    let Some((fd, found)) = look_into(root, path)? else { return Ok(Vec::new()) };
    let now = SystemTime::now();
    let mut dead = Vec::new();
    for file in found.locks {
        let age = file.modified.map(|modified| now.duration_since(modified).unwrap_or_default());
        if age < Some(min_age) || !lock::is_abandoned(&fd, &file.name) {
            continue;
        }
        if action == LeftoverAction::Remove && !lock::remove_abandoned(&fd, &file.name)? {
            continue;
        }
        let name = if path.is_empty() { file.name } else { format!("{path}/{}", file.name) };
        let leftover = Leftover::new(LeftoverKind::TemporaryFile, name);
        dead.push(leftover.with_byte_len(Some(file.byte_len)).with_modified(file.modified));
    }
    if action == LeftoverAction::Remove && !dead.is_empty() && sync {
        folder::sync(&fd)?;
    }
    Ok(dead)
}

/// Returns the dead files, and the folders in this one.
fn find_in(
    root: &Root,
    path: &str,
    is_dead: impl Fn(Owner, Option<Duration>) -> bool,
    action: LeftoverAction,
    sync: bool,
) -> io::Result<(Vec<Leftover>, Vec<String>)> {
    let Some((fd, found)) = look_into(root, path)? else { return Ok(Default::default()) };
    let now = SystemTime::now();
    let mut dead = Vec::new();
    for temp in found.temps {
        // A time in the future comes from another machine's clock, or this one's was set back: the
        // file is new.
        let age = temp.modified.map(|modified| now.duration_since(modified).unwrap_or_default());
        if !Owner::of_temp(&temp.name).is_some_and(|owner| is_dead(owner, age)) {
            continue;
        }
        if action == LeftoverAction::Remove {
            match unlinkat(&fd, &temp.name, AtFlags::empty()) {
                Ok(()) => {
                    #[cfg(feature = "disk-log")]
                    crate::disk_log::unlinked(&fd, &temp.name);
                    tracing::info!(folder = %path, name = %temp.name, "removed a leftover");
                }
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            }
        }
        let name = if path.is_empty() { temp.name } else { format!("{path}/{}", temp.name) };
        let leftover = Leftover::new(LeftoverKind::TemporaryFile, name);
        dead.push(leftover.with_byte_len(Some(temp.byte_len)).with_modified(temp.modified));
    }
    if action == LeftoverAction::Remove && !dead.is_empty() && sync {
        folder::sync(&fd)?;
    }
    Ok((dead, found.folders))
}
