//! Removing what killed writers left behind.

use std::io;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, unlinkat};
use rustix::io::Errno;

use crate::folder;
use crate::owner::Owner;
use crate::root::Root;
use crate::walk::look_into;

/// Removes temporary files that nobody has written to for `min_age` and whose writer is not known
/// to run, in all folders, and returns how many.
pub(crate) fn clean(root: &Root, min_age: Duration, sync: bool) -> io::Result<u64> {
    let now = SystemTime::now();
    let is_dead = |name: &str, modified: Option<SystemTime>| {
        // A time in the future is that of another machine's clock: it is young.
        let age = modified.and_then(|modified| now.duration_since(modified).ok());
        age.is_some_and(|age| age >= min_age)
            && Owner::of_temp(name).is_some_and(|owner| !owner.is_alive())
    };
    let mut removed = 0;
    let mut folders = vec![String::new()];
    while let Some(path) = folders.pop() {
        let Some((fd, found)) = look_into(root, &path)? else { continue };
        folders.extend(found.folders);
        let mut changed = false;
        for temp in found.temps.iter().filter(|temp| is_dead(&temp.name, temp.modified)) {
            match unlinkat(&fd, &temp.name, AtFlags::empty()) {
                Ok(()) => {
                    tracing::info!(folder = %path, name = %temp.name, "removed a leftover");
                    removed += 1;
                    changed = true;
                }
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if changed && sync {
            folder::sync(&fd)?;
        }
    }
    Ok(removed)
}
