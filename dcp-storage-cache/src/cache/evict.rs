//! Keeping the folder below its limit.
//!
//! A scan reads the metadata of every block, so each process counts the bytes of the blocks that it adds, and
//! scans after a 32nd of the limit. A scan that finds the folder above its limit removes the blocks
//! that were not used for longest, until an eighth of the limit is free. One process scans at a time, under
//! the lock `locks/evict`; another one skips its scan and begins to count again.

use std::fs::{self, DirEntry, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// An unfinished block that is older than this belongs to a process that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// The bytes that may still be added before the folder is scanned again.
#[derive(Debug)]
pub(crate) struct Room {
    path: PathBuf,
    max_bytes: u64,
    left: Mutex<u64>,
}

impl Room {
    pub(crate) fn new(path: PathBuf, max_bytes: u64) -> Self {
        // Blocks of earlier processes are there already: the first block begins a scan.
        Self { path, max_bytes, left: Mutex::new(0) }
    }

    /// Counts a block that was added, and makes room when it is time.
    pub(crate) fn added(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        match left.checked_sub(bytes) {
            Some(rest) => *left = rest,
            None => {
                *left = self.max_bytes / 32;
                drop(left);
                if let Err(error) = self.make_room() {
                    tracing::warn!(path = %self.path.display(), %error, "cannot trim the cache");
                }
            }
        }
    }

    /// Removes the blocks that were not used for longest until an eighth of the limit is free.
    fn make_room(&self) -> io::Result<()> {
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.path.join("locks").join("evict"))?;
        if lock.try_lock().is_err() {
            // Another process is at it.
            return Ok(());
        }
        remove_abandoned(&self.path.join("new"))?;
        let mut blocks = Vec::new();
        for folder in fs::read_dir(self.path.join("blocks"))? {
            let folder = folder?;
            // Nothing is deleted behind a link.
            if !folder.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(folder.path())? {
                blocks.extend(found(&entry?));
            }
        }
        let mut total = blocks.iter().map(|(_, len, _)| *len).sum::<u64>();
        if total <= self.max_bytes {
            return Ok(());
        }
        blocks.sort_unstable();
        for (_, len, path) in blocks {
            if total <= self.max_bytes - self.max_bytes / 8 {
                break;
            }
            removed(&path)?;
            total -= len;
        }
        Ok(())
    }
}

/// The time of the last use, the length and the path of a block; `None` if it is gone by now.
fn found(entry: &DirEntry) -> Option<(SystemTime, u64, PathBuf)> {
    let metadata = entry.metadata().ok()?;
    Some((metadata.modified().ok()?, metadata.len(), entry.path()))
}

fn remove_abandoned(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let Some((then, _, path)) = found(&entry?) else { continue };
        if then.elapsed().is_ok_and(|age| age > ABANDONED) {
            removed(&path)?;
        }
    }
    Ok(())
}

/// Removes a file, which another process may have removed by now.
fn removed(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
