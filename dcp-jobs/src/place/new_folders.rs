//! Folders that a job makes for its target, which a failure must not leave behind.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::uri::local_path;
use crate::rollback::Rollback;

/// The folders that were missing when this was made. Those of them that are there, and empty,
/// are removed when it is dropped without [`keep`](Self::keep).
#[derive(Debug)]
pub(crate) struct NewFolders {
    /// The innermost first.
    missing: Vec<PathBuf>,
    rollback: Rollback,
}

impl NewFolders {
    /// Looks at `uri` before anything is made there. One that is no path has no folders.
    pub(crate) fn before(uri: &str, rollback: &Rollback) -> Self {
        let missing = local_path(uri)
            .unwrap_or(Path::new(""))
            .ancestors()
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .map(Path::to_owned)
            .collect();
        Self { missing, rollback: rollback.clone() }
    }

    /// The innermost `count` folders of `uri`, which another rank found missing. The last rank that leaves
    /// removes them.
    pub(crate) fn found_missing(uri: &str, count: usize, rollback: &Rollback) -> Self {
        let path = local_path(uri).unwrap_or(Path::new(""));
        let missing = path.ancestors().filter(|folder| !folder.as_os_str().is_empty());
        let missing = missing.take(count).map(Path::to_owned).collect();
        Self { missing, rollback: rollback.clone() }
    }

    /// The number of folders that were missing.
    pub(crate) fn count(&self) -> usize {
        self.missing.len()
    }

    /// There is something in them now.
    pub(crate) fn keep(mut self) {
        self.missing.clear();
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        for (index, folder) in self.missing.iter().enumerate() {
            match fs::remove_dir(folder) {
                Ok(()) => {}
                // The innermost is no folder when the target is a file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // It has something in it: what a cancelled job wrote is removed later.
                Err(_) => {
                    self.rollback
                        .remove_folders_later(self.missing.get(index..).unwrap_or_default());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn before(uri: &str) -> NewFolders {
        NewFolders::before(uri, &Rollback::new())
    }

    #[test]
    fn only_new_and_empty_folders_go() {
        let place = tempfile::tempdir().unwrap();
        let inner = place.path().join("a/b");
        let uri = inner.display().to_string();
        let folders = before(&uri);
        fs::create_dir_all(&inner).unwrap();
        drop(folders);
        assert!(!place.path().join("a").exists());

        let folders = before(&format!("file://{uri}"));
        fs::create_dir_all(&inner).unwrap();
        fs::write(place.path().join("a/other"), "x").unwrap();
        drop(folders);
        assert!(!inner.exists() && place.path().join("a/other").exists());

        fs::create_dir_all(&inner).unwrap();
        drop(before(&uri));
        assert!(inner.exists(), "it was there before");
        drop(before("s3://bucket/path"));

        let folders = before(&place.path().join("x/y/file").display().to_string());
        fs::create_dir_all(place.path().join("x/y")).unwrap();
        drop(folders);
        assert!(!place.path().join("x").exists(), "a file has folders, too");
    }

    /// Of two ranks, the one that ends first leaves the files of the other.
    #[test]
    fn the_last_rank_removes_what_the_first_found_missing() {
        let place = tempfile::tempdir().unwrap();
        let inner = place.path().join("a/b");
        let uri = inner.display().to_string();
        let first = before(&uri);
        fs::create_dir_all(&inner).unwrap();
        let other = NewFolders::found_missing(&uri, first.count(), &Rollback::new());
        fs::write(inner.join("of_other"), "x").unwrap();
        drop(first);
        assert!(inner.exists());
        fs::remove_file(inner.join("of_other")).unwrap();
        drop(other);
        assert!(!place.path().join("a").exists() && place.path().exists());
        // It was there before.
        fs::create_dir_all(&inner).unwrap();
        drop(NewFolders::found_missing(&uri, before(&uri).count(), &Rollback::new()));
        assert!(inner.exists());
    }

    #[test]
    fn what_was_written_stays() {
        let place = tempfile::tempdir().unwrap();
        let inner = place.path().join("new");
        let folders = before(&inner.display().to_string());
        fs::create_dir(&inner).unwrap();
        folders.keep();
        assert!(inner.exists());
    }
}
