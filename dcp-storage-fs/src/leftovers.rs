//! Removes the temporary files of killed writers.

use std::io;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, unlinkat};
use rustix::io::Errno;

use crate::folder;
use crate::folder_listing::look_into;
use crate::owner::Owner;
use crate::root::Root;

/// The age at which a temporary file of another machine counts as dead, because the processes of
/// that machine are unknown.
const DISTANT_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Removes temporary files that are older than `min_age` and whose writer is not known to run, in
/// the folder at `path` and those below it, and returns their number. Whether a writer on another
/// machine runs is unknown.
pub(crate) fn clean(root: &Root, path: &str, min_age: Duration, sync: bool) -> io::Result<u64> {
    let is_dead = |owner: Owner, age: Option<Duration>| age >= Some(min_age) && !owner.is_alive();
    let mut removed = 0;
    let mut folders = vec![path.to_owned()];
    while let Some(path) = folders.pop() {
        let (some, below) = clean_folder(root, &path, is_dead, sync)?;
        removed += some;
        folders.extend(below);
    }
    Ok(removed)
}

/// The same for the root folder alone: files of dead processes of this machine, and files that are
/// a day old.
pub(crate) fn clean_root(root: &Root, sync: bool) -> io::Result<u64> {
    let is_dead = |owner: Owner, age: Option<Duration>| {
        !owner.is_alive() && (owner.is_here() || age >= Some(DISTANT_AGE))
    };
    Ok(clean_folder(root, "", is_dead, sync)?.0)
}

/// Returns how many files were removed, and the folders in this one.
fn clean_folder(
    root: &Root,
    path: &str,
    is_dead: impl Fn(Owner, Option<Duration>) -> bool,
    sync: bool,
) -> io::Result<(u64, Vec<String>)> {
    let Some((fd, found)) = look_into(root, path)? else { return Ok((0, Vec::new())) };
    let now = SystemTime::now();
    let mut removed = 0;
    for temp in &found.temps {
        // A time in the future comes from another machine's clock: the file is new.
        let age = temp.modified.and_then(|modified| now.duration_since(modified).ok());
        if !Owner::of_temp(&temp.name).is_some_and(|owner| is_dead(owner, age)) {
            continue;
        }
        match unlinkat(&fd, &temp.name, AtFlags::empty()) {
            Ok(()) => {
                #[cfg(feature = "disk-log")]
                crate::disk_log::unlinked(&fd, &temp.name);
                tracing::info!(folder = %path, name = %temp.name, "removed a leftover");
                removed += 1;
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if removed > 0 && sync {
        folder::sync(&fd)?;
    }
    Ok((removed, found.folders))
}
