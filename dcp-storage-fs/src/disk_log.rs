//! Records every change of the files below a folder, and every sync, for tests of crashes.
//!
//! A crash of the machine loses what no sync made durable. [`DiskLog`] records the system calls of
//! every [`FsStorage`](crate::FsStorage) of this process below one folder, from which a test computes
//! what a disk may hold after a crash at any of them. Available with the feature `disk-log`.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dcp_core::Payload;
use rustix::fs::{CWD, Mode, OFlags, Stat, fstat, openat};

/// A file or a folder of a [`DiskLog`]. Each has its own number, whatever its inode.
pub type DiskId = usize;

/// One system call that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are those of the system call")]
pub enum DiskEvent {
    /// An empty folder has this name in the folder `within`.
    MakeFolder { within: DiskId, name: String, node: DiskId },
    /// An empty file has this name in the folder `within`.
    Create { within: DiskId, name: String, node: DiskId },
    /// The file has these bytes from `byte_offset` on.
    Write { node: DiskId, byte_offset: u64, bytes: Vec<u8> },
    /// The file has no bytes.
    Truncate { node: DiskId },
    /// The file has the name `to` and no longer the name `from`, both in the folder `within`.
    Rename { within: DiskId, from: String, to: String, node: DiskId },
    /// The file has one more name.
    Link { within: DiskId, name: String, node: DiskId },
    /// The folder has no such name, which was that of a file or of an empty folder.
    Unlink { within: DiskId, name: String },
    /// The first `begun` events are durable, as far as they concern this file or folder.
    Sync { node: DiskId, begun: usize },
}

/// A file or folder at the start of a [`DiskLog`]: durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskNode {
    /// The bytes of a file.
    File(Vec<u8>),
    /// The names in a folder.
    Folder(BTreeMap<String, DiskId>),
}

/// A record of the changes below one folder. Ends when it is dropped.
#[derive(Debug)]
pub struct DiskLog(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    start: Vec<DiskNode>,
    nodes: DiskId,
    by_inode: HashMap<(u64, u64), DiskId>,
    /// The file system gives the inode of a removed file to a new one, which may be outside the
    /// folder, unless a process has the removed file open.
    open: Vec<OwnedFd>,
    events: Vec<DiskEvent>,
}

static LOGS: Mutex<Vec<Weak<Mutex<State>>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskLog {
    /// Begins to record at `root`, whose present content counts as durable. `root` is node 0.
    ///
    /// # Errors
    ///
    /// When a file below it cannot be read.
    pub fn start(root: &Path) -> io::Result<Self> {
        let mut state = State::default();
        state.look(root)?;
        let state = Arc::new(Mutex::new(state));
        let mut logs = lock(&LOGS);
        logs.retain(|log| log.strong_count() > 0);
        logs.push(Arc::downgrade(&state));
        Ok(Self(state))
    }

    /// The files and folders at the start; the index is the [`DiskId`].
    #[must_use]
    pub fn at_start(&self) -> Vec<DiskNode> {
        lock(&self.0).start.clone()
    }

    /// All changes since, in order.
    #[must_use]
    pub fn events(&self) -> Vec<DiskEvent> {
        lock(&self.0).events.clone()
    }
}

impl State {
    fn look(&mut self, path: &Path) -> io::Result<DiskId> {
        let node = self.add(CWD, path)?;
        self.start.push(DiskNode::Folder(BTreeMap::new()));
        let content = if path.is_dir() {
            let mut names = BTreeMap::new();
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                names.insert(name, self.look(&entry.path())?);
            }
            DiskNode::Folder(names)
        } else {
            DiskNode::File(fs::read(path)?)
        };
        if let Some(place) = self.start.get_mut(node) {
            *place = content;
        }
        Ok(node)
    }

    fn add(&mut self, folder: impl AsFd, path: impl rustix::path::Arg) -> io::Result<DiskId> {
        let fd = openat(folder, path, WITHOUT_ACCESS, Mode::empty())?;
        let node = self.nodes;
        self.nodes += 1;
        self.by_inode.insert(inode(&fstat(&fd)?), node);
        self.open.push(fd);
        Ok(node)
    }
}

/// Flags to open a file of any permission, whose locks stay when the log ends, where the system can.
#[cfg(target_os = "linux")]
const WITHOUT_ACCESS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
#[cfg(not(target_os = "linux"))]
const WITHOUT_ACCESS: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

#[allow(clippy::unnecessary_cast, reason = "the types differ by system")]
fn inode(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// Calls `note` with the log that has this file or folder, and its node there.
fn on(fd: impl AsFd, mut note: impl FnMut(&mut State, DiskId)) {
    let Ok(stat) = fstat(fd) else { return };
    let logs: Vec<_> = lock(&LOGS).iter().filter_map(Weak::upgrade).collect();
    for log in logs {
        let mut state = lock(&log);
        if let Some(&node) = state.by_inode.get(&inode(&stat)) {
            note(&mut state, node);
        }
    }
}

pub(crate) fn made_folder(folder: impl AsFd, name: &str) {
    on(&folder, |state, within| {
        if let Ok(node) = state.add(&folder, name) {
            state.events.push(DiskEvent::MakeFolder { within, name: name.into(), node });
        }
    });
}

pub(crate) fn created(folder: &OwnedFd, name: &str) {
    on(folder, |state, within| {
        if let Ok(node) = state.add(folder, name) {
            state.events.push(DiskEvent::Create { within, name: name.into(), node });
        }
    });
}

pub(crate) fn wrote(file: &File, byte_offset: u64, payload: &Payload) {
    on(file, |state, node| {
        let bytes = payload.to_bytes().to_vec();
        state.events.push(DiskEvent::Write { node, byte_offset, bytes });
    });
}

pub(crate) fn truncated(file: &File) {
    on(file, |state, node| state.events.push(DiskEvent::Truncate { node }));
}

pub(crate) fn renamed(folder: &OwnedFd, from: &str, to: &str, file: &File) {
    named(folder, file, |within, node| DiskEvent::Rename {
        within,
        from: from.into(),
        to: to.into(),
        node,
    });
}

pub(crate) fn linked(folder: &OwnedFd, name: &str, file: &File) {
    named(folder, file, |within, node| DiskEvent::Link { within, name: name.into(), node });
}

fn named(folder: &OwnedFd, file: &File, event: impl Fn(DiskId, DiskId) -> DiskEvent) {
    let Ok(stat) = fstat(file) else { return };
    on(folder, |state, within| {
        if let Some(&node) = state.by_inode.get(&inode(&stat)) {
            state.events.push(event(within, node));
        }
    });
}

pub(crate) fn unlinked(folder: &OwnedFd, name: &str) {
    on(folder, |state, within| {
        state.events.push(DiskEvent::Unlink { within, name: name.into() });
    });
}

/// The events of each log before a sync begins: what happens during it is not durable by it.
#[derive(Debug)]
pub(crate) struct Begun(Vec<(Weak<Mutex<State>>, usize)>);

pub(crate) fn begin_sync() -> Begun {
    let logs = lock(&LOGS).clone();
    let begun = |log: &Weak<Mutex<State>>| log.upgrade().map(|log| lock(&log).events.len());
    Begun(logs.into_iter().filter_map(|log| begun(&log).map(|len| (log, len))).collect())
}

pub(crate) fn synced(fd: impl AsFd, begun: Begun) {
    let Ok(stat) = fstat(fd) else { return };
    for (log, begun) in begun.0 {
        let Some(log) = log.upgrade() else { continue };
        let mut state = lock(&log);
        if let Some(&node) = state.by_inode.get(&inode(&stat)) {
            state.events.push(DiskEvent::Sync { node, begun });
        }
    }
}
