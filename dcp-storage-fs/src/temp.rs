//! Temporary files, and the rename that makes one an object.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use dcp_core::Payload;
use dcp_core::storage::PutMode;
use rustix::fs::{AtFlags, Mode, OFlags, linkat, openat, renameat, unlinkat};
use rustix::io::Errno;

#[cfg(feature = "disk-log")]
use crate::disk_log;
use crate::folder;
use crate::owner::Owner;
use crate::write::write_payload;

/// A temporary file, removed on drop unless it was published.
#[derive(Debug)]
pub(crate) struct Temp {
    folder: OwnedFd,
    name: String,
    file: Arc<File>,
    /// Whether the file still has its temporary name.
    named: bool,
}

impl Temp {
    /// A new empty file in `folder`, with at most these permissions.
    pub(crate) fn create(folder: OwnedFd, permissions: u32) -> io::Result<Self> {
        #[cfg(test)]
        crate::kills::step();
        let owner = Owner::current();
        let mode = Mode::from_raw_mode(permissions & 0o777);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        loop {
            let name = owner.temp_name();
            match openat(&folder, &name, flags, mode) {
                Ok(file) => {
                    let file = Arc::new(File::from(file));
                    #[cfg(feature = "disk-log")]
                    disk_log::created(&folder, &name);
                    return Ok(Self { folder, name, file, named: true });
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Writes all bytes, to an empty file.
    pub(crate) fn write(&self, payload: &Payload) -> io::Result<()> {
        write_payload(&mut &*self.file, payload)?;
        #[cfg(feature = "disk-log")]
        disk_log::wrote(&self.file, 0, payload);
        Ok(())
    }

    /// Gives the file its name in the same folder, in one step; with `sync`, its bytes are durable
    /// before and its name after. Returns the published object.
    pub(crate) fn publish(
        mut self,
        name: &str,
        mode: &PutMode,
        sync: bool,
    ) -> io::Result<Metadata> {
        #[cfg(test)]
        crate::kills::step();
        if sync {
            #[cfg(feature = "disk-log")]
            let begun = disk_log::begin_sync();
            self.file.sync_data()?;
            #[cfg(feature = "disk-log")]
            disk_log::synced(&self.file, begun);
        }
        let meta = self.file.metadata()?;
        #[cfg(test)]
        crate::kills::step();
        match mode {
            PutMode::Overwrite => {
                folder::refuse_special(&self.folder, name)?;
                renameat(&self.folder, &self.name, &self.folder, name)?;
                #[cfg(feature = "disk-log")]
                disk_log::renamed(&self.folder, &self.name, name, &self.file);
            }
            _ => self.rename_to_free(name)?,
        }
        self.named = false;
        #[cfg(test)]
        crate::kills::step();
        if sync && let Err(error) = folder::sync(&self.folder) {
            // A failed creation is removed. A replaced file cannot be restored.
            if *mode == PutMode::Create
                && let Err(left) = unlinkat(&self.folder, name, AtFlags::empty())
            {
                tracing::warn!(%name, error = %left, "cannot remove a file that is not durable");
            }
            return Err(error);
        }
        Ok(meta)
    }

    /// Renames, and fails with `EEXIST` if the name is taken.
    fn rename_to_free(&self, name: &str) -> io::Result<()> {
        #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
        {
            use rustix::fs::{RenameFlags, renameat_with};

            let (folder, flags) = (&self.folder, RenameFlags::NOREPLACE);
            match renameat_with(folder, &self.name, folder, name, flags) {
                // The file system, or the kernel, cannot do it.
                Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP | Errno::PERM) => {}
                outcome => {
                    outcome?;
                    #[cfg(feature = "disk-log")]
                    disk_log::renamed(&self.folder, &self.name, name, &self.file);
                    return Ok(());
                }
            }
        }
        self.link_to_free(name)
    }

    fn link_to_free(&self, name: &str) -> io::Result<()> {
        let folder = &self.folder;
        match linkat(folder, &self.name, folder, name, AtFlags::empty()) {
            Ok(()) => {}
            // NFS may lose the reply, repeat the request and find its own link.
            Err(Errno::EXIST) if self.file.metadata()?.nlink() == 2 => {}
            Err(error) => return Err(error.into()),
        }
        #[cfg(feature = "disk-log")]
        disk_log::linked(folder, name, &self.file);
        #[cfg(test)]
        crate::kills::step();
        unlinkat(folder, &self.name, AtFlags::empty())?;
        #[cfg(feature = "disk-log")]
        disk_log::unlinked(folder, &self.name);
        Ok(())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.named {
            return;
        }
        match unlinkat(&self.folder, &self.name, AtFlags::empty()) {
            #[cfg(feature = "disk-log")]
            Ok(()) => disk_log::unlinked(&self.folder, &self.name),
            #[cfg(not(feature = "disk-log"))]
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(name = %self.name, %error, "cannot remove a temporary file");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;
    use crate::root::Links;
    use crate::root::{FOLDER, Root};

    fn temp(root: &std::path::Path, bytes: &[u8]) -> Temp {
        let root = Root::open(root.to_owned(), &Links::Below).unwrap();
        let temp = Temp::create(root.open_below("", FOLDER).unwrap(), 0o666).unwrap();
        (&**temp.file()).write_all(bytes).unwrap();
        temp
    }

    #[test]
    fn an_unpublished_file_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let temp = temp(root.path(), b"x");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        drop(temp);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_link_takes_a_free_name_only() {
        let root = tempfile::tempdir().unwrap();
        let mut first = temp(root.path(), b"first");
        first.link_to_free("a").unwrap();
        first.named = false;
        let second = temp(root.path(), b"second");
        let error = second.link_to_free("a").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        drop((first, second));
        assert_eq!(fs::read(root.path().join("a")).unwrap(), b"first");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
