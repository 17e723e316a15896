//! The version of a file.

use std::fmt::Write;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use dcp_core::Key;
use dcp_core::storage::{ObjectMeta, Version};
use rustix::fs::Stat;

/// Inode, length and time of the last write. The time of the last change of the inode is not part
/// of it, because a hard link or another mode does not change the contents. Neither is the device, whose
/// number differs among the machines that mount a file system.
fn version(inode: u64, byte_len: u64, seconds: i64, nanos: i64) -> Version {
    let mut text = String::with_capacity(64);
    // Writing to a string does not fail.
    let _ = write!(text, "{inode:x}-{byte_len:x}-{seconds:x}.{nanos:x}");
    Version::new(text)
}

pub(crate) fn version_of(meta: &Metadata) -> Version {
    version(meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

/// The version of a file from its `stat`.
pub(crate) fn version_of_stat(stat: &Stat) -> Version {
    #[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
    let inode = stat.st_ino as u64;
    #[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
    let (seconds, nanos) = (stat.st_mtime as i64, stat.st_mtime_nsec as i64);
    version(inode, u64::try_from(stat.st_size).unwrap_or(0), seconds, nanos)
}

/// The description of a file.
pub(crate) fn object(key: &Key, meta: &Metadata) -> ObjectMeta {
    ObjectMeta::new(key.clone(), meta.len())
        .with_modified(meta.modified().ok())
        .with_version(Some(version_of(meta)))
}

/// Whether the file still has this version.
pub(crate) fn is_unchanged(file: &File, version: &Version) -> io::Result<bool> {
    Ok(version_of(&file.metadata()?) == *version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_asking_name_the_same_version() {
        let file = tempfile::tempfile().unwrap();
        for len in [0, 5, 70_000] {
            file.set_len(len).unwrap();
            let stat = rustix::fs::fstat(&file).unwrap();
            assert_eq!(version_of_stat(&stat), version_of(&file.metadata().unwrap()));
        }
    }

    #[test]
    fn a_hard_link_or_another_mode_keeps_the_version() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "abc").unwrap();
        let file = File::open(&path).unwrap();
        let version = version_of(&file.metadata().unwrap());
        std::fs::hard_link(&path, folder.path().join("b")).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(is_unchanged(&file, &version).unwrap());
        std::fs::write(&path, "abcd").unwrap();
        assert!(!is_unchanged(&file, &version).unwrap());
    }
}
