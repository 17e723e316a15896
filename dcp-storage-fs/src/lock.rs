//! Claims by lock files.
//!
//! A claim of `folder/name` is a lock (`flock`) on `folder/.dcp-lock.name`, which the kernel
//! releases with the last descriptor, so at the latest with the process. The file is deleted with the
//! claim. The file of a killed process is not locked, and the next claim takes it over.
//!
//! Invariant: a lock counts only while the name leads to the locked file. Between the opening of a file and
//! its lock, the holder may remove it; then a lock of the removed file excludes no claim of the next
//! one. So the name is compared after the lock, and the file is opened again if it has changed.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Claim, ObjectMeta, PutMode};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::blocking::blocking;
use crate::error::on_key;
use crate::folder::open_or_create;
use crate::owner::{Owner, lock_name};
use crate::shared::{Shared, parts};

/// The number of times that a lock file is reopened because its holder just removed it, or is dead.
const TRIES: u32 = 100;
/// The maximum bytes of the record of a holder.
const RECORD_MAX: u64 = 4096;

/// A held lock.
#[derive(Debug)]
struct Lock {
    folder: OwnedFd,
    name: String,
    /// `None` if the file system has no locks.
    file: Option<File>,
}

/// The reason for a missing lock.
enum Refusal {
    Held { by: String },
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

impl Lock {
    fn take(folder: OwnedFd, object: &str) -> Result<Self, Refusal> {
        let name = lock_name(object);
        for _ in 0..TRIES {
            let mut file = open(&folder, &name)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => {
                    let record = read_record(&mut file);
                    // A child that was forked without `exec` keeps the lock of a dead parent.
                    if record.is_of_the_dead() && is_at(&folder, &name, &file) {
                        remove(&folder, &name)?;
                        continue;
                    }
                    return Err(Refusal::Held { by: record.holder() });
                }
                Err(Errno::NOSYS | Errno::NOTSUP | Errno::INVAL | Errno::NOLCK) => {
                    tracing::warn!(
                        "this file system has no locks: two savers in one folder notice each other only \
                         by the files that they find in it"
                    );
                    remove(&folder, &name)?;
                    return Ok(Self { folder, name, file: None });
                }
                Err(error) => return Err(error.into()),
            }
            // The holder before may have removed the file between the two calls.
            if is_at(&folder, &name, &file) {
                // Without a record the next saver cannot name the holder.
                let _ = write_record(&mut file);
                return Ok(Self { folder, name, file: Some(file) });
            }
        }
        Err(Refusal::Held { by: "others, one after the other".into() })
    }

    /// Whether the locked file still has its name, so that others lock the same one.
    fn is_held(&self) -> bool {
        self.file.as_ref().is_none_or(|file| is_at(&self.folder, &self.name, file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        if is_at(&self.folder, &self.name, file)
            && let Err(error) = remove(&self.folder, &self.name)
        {
            tracing::warn!(name = %self.name, %error, "cannot remove a lock file");
        }
        // Explicitly: a forked child may hold the same lock by a descriptor of its own.
        let _ = flock(file, FlockOperation::Unlock);
    }
}

fn open(folder: &OwnedFd, name: &str) -> io::Result<File> {
    let guarded = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mode = Mode::from_raw_mode(0o666);
    #[cfg(feature = "disk-log")]
    let was_there = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
    match openat(folder, name, OFlags::RDWR | OFlags::CREATE | guarded, mode) {
        // Another user's file: except on NFS, a lock needs no write permission.
        Err(Errno::ACCESS) => {
            match openat(folder, name, OFlags::RDONLY | guarded, Mode::empty()) {
                // There is none, and it cannot be created.
                Err(Errno::NOENT) => Err(Errno::ACCESS.into()),
                outcome => Ok(outcome?.into()),
            }
        }
        outcome => {
            let file = outcome?;
            #[cfg(feature = "disk-log")]
            if !was_there {
                crate::disk_log::created(folder, name);
            }
            Ok(file.into())
        }
    }
}

/// Whether the file of that name is this one.
fn is_at(folder: &OwnedFd, name: &str, file: &File) -> bool {
    let Ok(meta) = file.metadata() else { return false };
    statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|there| {
        #[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
        let there = (there.st_dev as u64, there.st_ino as u64);
        there == (meta.dev(), meta.ino())
    })
}

fn remove(folder: &OwnedFd, name: &str) -> io::Result<()> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        outcome => {
            outcome?;
            #[cfg(feature = "disk-log")]
            crate::disk_log::unlinked(folder, name);
            Ok(())
        }
    }
}

/// Opens a lock file that is there.
fn open_existing(folder: &OwnedFd, name: &str) -> io::Result<File> {
    let guarded = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(openat(folder, name, OFlags::RDONLY | guarded, Mode::empty())?.into())
}

/// Whether the holder that a lock file names does not run on this machine.
pub(crate) fn is_abandoned(folder: &OwnedFd, name: &str) -> bool {
    let record = open_existing(folder, name).map(|mut file| read_record(&mut file));
    record.is_ok_and(|record| record.owner.is_none_or(|owner| !owner.is_alive()))
}

/// Removes a lock file that nobody has locked, and returns whether it is gone.
pub(crate) fn remove_abandoned(folder: &OwnedFd, name: &str) -> io::Result<bool> {
    let file = match open_existing(folder, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        outcome => outcome?,
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) if is_at(folder, name, &file) => remove(folder, name).map(|()| true),
        Ok(()) | Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The holder that a lock file names.
#[derive(Debug, Default)]
struct Record {
    owner: Option<Owner>,
    host: Option<String>,
}

impl Record {
    fn is_of_the_dead(&self) -> bool {
        self.owner.is_some_and(|owner| owner.is_here() && !owner.is_alive())
    }

    fn holder(&self) -> String {
        match (&self.owner, &self.host) {
            (Some(owner), Some(host)) => format!("process {} on {host}", owner.pid()),
            (Some(owner), None) => format!("process {}", owner.pid()),
            _ => "another process".into(),
        }
    }
}

fn write_record(file: &mut File) -> io::Result<()> {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().into_owned();
    file.set_len(0)?;
    file.rewind()?;
    #[cfg(feature = "disk-log")]
    crate::disk_log::truncated(file);
    let record = format!("{}\n{host}\n", Owner::current());
    file.write_all(record.as_bytes())?;
    #[cfg(feature = "disk-log")]
    crate::disk_log::wrote(file, 0, &record.into_bytes().into());
    Ok(())
}

fn read_record(file: &mut File) -> Record {
    let mut bytes = Vec::new();
    if file.take(RECORD_MAX).read_to_end(&mut bytes).is_err() {
        return Record::default();
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    let owner = lines.next().and_then(Owner::parse);
    let is_shown = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let host = lines.next().filter(|host| !host.is_empty() && host.chars().all(is_shown));
    Record { owner, host: host.map(|host| host.chars().take(64).collect()) }
}

/// A claim on a file.
#[derive(Debug)]
pub(crate) struct FsClaim {
    shared: Arc<Shared>,
    key: Key,
    lock: Arc<Lock>,
}

impl FsClaim {
    pub(crate) fn take(shared: Arc<Shared>, key: Key) -> Result<Self, StorageError> {
        let op = StorageOp::Claim;
        shared.refuse_reserved(op, &key)?;
        let (path, name) = parts(&key);
        let folder = open_or_create(&shared.root, path).map_err(on_key(op, &key))?;
        match Lock::take(folder, name) {
            Ok(lock) => Ok(Self { lock: Arc::new(lock), shared, key }),
            Err(Refusal::Io(error)) => Err(on_key(op, &key)(error)),
            Err(Refusal::Held { by }) => {
                let lock = lock_name(name);
                let message = format!(
                    "{by} has it; wait for its end, or end it. If no such process runs on any \
                     machine, remove {lock:?}"
                );
                Err(StorageError::new(StorageErrorKind::Conflict, op, Some(key))
                    .with_message(message))
            }
        }
    }
}

#[async_trait]
impl Claim for FsClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        let op = StorageOp::Put;
        let (shared, lock, key) =
            (Arc::clone(&self.shared), Arc::clone(&self.lock), self.key.clone());
        // The thread has a share of the lock: no other process gets it before the file has its name.
        blocking(op, Some(&self.key), move || {
            let temp = shared.create_temp(op, &key)?;
            temp.write(&payload).map_err(on_key(op, &key))?;
            if !lock.is_held() {
                return Err(StorageError::new(StorageErrorKind::Conflict, op, Some(key))
                    .with_message(format!("the lock file {:?} was removed meanwhile", lock.name)));
            }
            let published = shared.publish(op, &key, temp, &PutMode::Overwrite);
            drop(lock);
            published
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use dcp_core::Storage;
    use futures_util::FutureExt;

    use super::*;
    use crate::FsStorage;

    fn claim(root: &Path) -> Result<Arc<dyn Claim>, StorageError> {
        let storage = FsStorage::open(root).unwrap();
        storage.claim(&Key::new(".metadata").unwrap()).now_or_never().unwrap()
    }

    /// A lock file whose process is dead, while a descriptor of it survives.
    fn locked_by(root: &Path, record: &str) -> File {
        let file = File::create(root.join(".dcp-lock.metadata")).unwrap();
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        (&file).write_all(record.as_bytes()).unwrap();
        file
    }

    fn dead() -> Owner {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        Owner::current().with_pid(pid)
    }

    #[test]
    fn a_second_claim_names_the_holder_and_the_file_goes_with_the_claim() {
        let root = tempfile::tempdir().unwrap();
        let first = claim(root.path()).unwrap();
        let error = claim(root.path()).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Conflict);
        let me = format!("process {}", std::process::id());
        assert!(error.to_string().contains(&me), "{error}");
        assert!(error.to_string().contains(".dcp-lock.metadata"), "{error}");
        drop(first);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        claim(root.path()).unwrap();
    }

    #[test]
    fn a_lock_file_that_a_killed_process_left_is_taken_over() {
        let root = tempfile::tempdir().unwrap();
        drop(locked_by(root.path(), &format!("{}\nhost\n", dead())));
        claim(root.path()).unwrap();
        for record in ["", "garbage", "\u{1b}[31m\n\u{1b}"] {
            let left = locked_by(root.path(), record);
            // A child that another test forks may have the descriptor for a moment after this one.
            flock(&left, FlockOperation::Unlock).unwrap();
            drop(left);
            claim(root.path()).unwrap();
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_descriptor_that_outlives_its_process_holds_nobody_up() {
        let root = tempfile::tempdir().unwrap();
        let orphan = locked_by(root.path(), &format!("{}\nhost\n", dead()));
        let held = claim(root.path()).unwrap();
        assert_eq!(claim(root.path()).unwrap_err().kind(), StorageErrorKind::Conflict);
        drop(orphan);
        assert_eq!(claim(root.path()).unwrap_err().kind(), StorageErrorKind::Conflict);
        drop(held);
    }

    #[test]
    fn holders_of_which_nothing_is_known_are_waited_for() {
        for (record, shown) in [
            ("", "another process"),
            ("garbage\nhost\n", "another process"),
            ("0123456789abcdef.1.1\nnode-17\n", "process 1 on node-17"),
            ("0123456789abcdef.1.1\n\u{1b}[31m\n", "process 1 has"),
        ] {
            // A child that another test forks may keep a lock for a moment, so each has its own.
            let root = tempfile::tempdir().unwrap();
            let held = locked_by(root.path(), record);
            let error = claim(root.path()).unwrap_err();
            assert!(error.to_string().contains(shown), "{error}");
            assert!(!error.to_string().contains('\u{1b}'), "{error}");
            drop(held);
        }
    }

    #[test]
    fn a_holder_whose_lock_file_was_removed_replaces_nothing() {
        let root = tempfile::tempdir().unwrap();
        let first = claim(root.path()).unwrap();
        fs::remove_file(root.path().join(".dcp-lock.metadata")).unwrap();
        let second = claim(root.path()).unwrap();
        let late = first.replace("late".into()).now_or_never().unwrap().unwrap_err();
        assert_eq!(late.kind(), StorageErrorKind::Conflict);
        second.replace("new".into()).now_or_never().unwrap().unwrap();
        drop(first);
        assert_eq!(claim(root.path()).unwrap_err().kind(), StorageErrorKind::Conflict);
        drop(second);
        let left: Vec<_> = fs::read_dir(root.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(fs::read(root.path().join(".metadata")).unwrap(), b"new");
    }

    #[test]
    fn the_lock_lasts_until_a_write_that_nobody_waits_for_is_over() {
        let root = tempfile::tempdir().unwrap();
        let shared = claim(root.path()).unwrap();
        let key = Key::new(".metadata").unwrap();
        let storage = FsStorage::open(root.path()).unwrap();
        let runtime =
            tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        runtime.block_on(async {
            // Keeps the only thread busy, so that the write is handed over and not yet begun.
            let busy = tokio::task::spawn_blocking(move || wait.recv());
            let mut write = shared.replace("new".into());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(write.as_mut().poll(&mut context).is_pending());
            drop(write);
            drop(shared);
            let error = storage_claim(&root).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Conflict);
            go.send(()).unwrap();
            busy.await.unwrap().unwrap();
            let claimed = storage.claim(&key).await;
            // The write was begun before this claim, on the only thread there is.
            claimed.unwrap();
        });
        assert_eq!(fs::read(root.path().join(".metadata")).unwrap(), b"new");
    }

    /// On a thread that has no runtime.
    fn storage_claim(root: &tempfile::TempDir) -> Result<Arc<dyn Claim>, StorageError> {
        let path = root.path().to_owned();
        std::thread::spawn(move || claim(&path)).join().unwrap()
    }
}
