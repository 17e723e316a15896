//! What a disk may hold after the machine crashed, computed from a [`DiskLog`].
//!
//! A file system promises little for what no sync covered: a file may have its bytes, some of them,
//! zeros, or none; a new name, a rename and a removal may have reached the disk or not, in any
//! order. [`Crashes`] replays a log up to an event and applies such a loss to everything that was not
//! synced before it.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use dcp_storage_fs::disk_log::{DiskEvent, DiskId, DiskLog, DiskNode};

/// The files and empty folders below a root, by their paths.
pub type Disk = BTreeMap<PathBuf, OnDisk>;

/// A file or an empty folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OnDisk {
    /// A folder without files.
    Folder,
    /// A file.
    File {
        /// Its content.
        bytes: Vec<u8>,
        /// Its place in the order in which files were created.
        age: usize,
    },
}

/// Which of the changes that no sync covered reached the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// All reached the disk, as when the process dies and the machine goes on.
    Nothing,
    /// None did.
    Unsynced,
    /// Names did; files lack the bytes that were not synced.
    Bytes,
    /// Names and lengths did; the bytes are zeros.
    Zeros,
    /// Only removals of names did.
    Additions,
    /// Everything but removals of names did.
    Removals,
    /// Each change did or did not, and writes are torn, as this seed decides.
    Some(u64),
}

impl Loss {
    /// The six extremes, and `seeds` subsets.
    pub fn all(seeds: u64) -> impl Iterator<Item = Self> {
        let extremes = [
            Self::Nothing,
            Self::Unsynced,
            Self::Bytes,
            Self::Zeros,
            Self::Additions,
            Self::Removals,
        ];
        extremes.into_iter().chain((0..seeds).map(Self::Some))
    }
}

/// The possible states of a disk after a crash at any event of a log.
#[derive(Debug)]
pub struct Crashes {
    start: Vec<DiskNode>,
    events: Vec<DiskEvent>,
    seen: HashSet<u64>,
}

impl Crashes {
    /// Of what was recorded so far.
    #[must_use]
    pub fn of(log: &DiskLog) -> Self {
        Self { start: log.at_start(), events: log.events(), seen: HashSet::new() }
    }

    /// How many points there are: before each event, and after the last.
    #[must_use]
    pub fn points(&self) -> usize {
        self.events.len() + 1
    }

    /// What happened at a point, for messages.
    #[must_use]
    pub fn event(&self, point: usize) -> String {
        match self.events.get(point) {
            Some(DiskEvent::Write { node, byte_offset, bytes }) => {
                format!("write of {} bytes at {byte_offset} to file {node}", bytes.len())
            }
            Some(event) => format!("{event:?}"),
            None => "the end".to_owned(),
        }
    }

    /// The disk after a crash before event number `point`.
    #[must_use]
    pub fn disk(&self, point: usize, loss: Loss) -> Disk {
        let mut nodes: Vec<State> = self.start.iter().map(State::durable).collect();
        for (number, event) in self.events.iter().take(point).enumerate() {
            apply(&mut nodes, number, event);
        }
        let mut chance = Chance(match loss {
            Loss::Some(seed) => seed.wrapping_mul(0x9e37_79b9).wrapping_add(point as u64),
            _ => 0,
        });
        for state in &mut nodes {
            state.lose(loss, &mut chance);
        }
        let mut disk = Disk::new();
        fill(&mut disk, &nodes, 0, Path::new(""));
        disk
    }

    /// The same, or `None` if an earlier call returned it already.
    pub fn new_disk(&mut self, point: usize, loss: Loss) -> Option<Disk> {
        let disk = self.disk(point, loss);
        let mut hasher = DefaultHasher::new();
        disk.hash(&mut hasher);
        self.seen.insert(hasher.finish()).then_some(disk)
    }
}

/// Writes the files of `disk` into a folder, which it replaces.
#[track_caller]
pub fn put_disk(disk: &Disk, root: &Path) {
    if root.exists() {
        fs::remove_dir_all(root).unwrap();
    }
    fs::create_dir_all(root).unwrap();
    let begin = SystemTime::now() - Duration::from_secs(60 * 60);
    for (path, node) in disk {
        let path = root.join(path);
        match node {
            OnDisk::Folder => fs::create_dir_all(path).unwrap(),
            OnDisk::File { bytes, age } => {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                let mut file = File::create(path).unwrap();
                file.write_all(bytes).unwrap();
                file.set_modified(begin + Duration::from_secs(*age as u64)).unwrap();
            }
        }
    }
}

/// A change that no sync covers yet, with the number of its event.
#[derive(Debug)]
enum Change {
    Name { name: String, node: DiskId },
    NoName { name: String },
    Rename { from: String, to: String, node: DiskId },
    Write { byte_offset: u64, bytes: Vec<u8> },
    Truncate,
}

#[derive(Debug)]
struct State {
    durable: DiskNode,
    pending: Vec<(usize, Change)>,
}

impl State {
    fn durable(node: &DiskNode) -> Self {
        Self { durable: node.clone(), pending: Vec::new() }
    }

    fn sync(&mut self, begun: usize) {
        let (synced, pending) =
            std::mem::take(&mut self.pending).into_iter().partition(|(number, _)| *number < begun);
        self.pending = pending;
        let synced: Vec<_> = synced;
        synced.iter().for_each(|(_, change)| change.apply(&mut self.durable));
    }

    /// Decides what of the pending changes reached the disk.
    fn lose(&mut self, loss: Loss, chance: &mut Chance) {
        for (_, change) in std::mem::take(&mut self.pending) {
            let content = matches!(change, Change::Write { .. } | Change::Truncate);
            match (loss, content) {
                (Loss::Nothing | Loss::Removals, true)
                | (Loss::Nothing | Loss::Bytes | Loss::Zeros, false) => {
                    change.apply(&mut self.durable);
                }
                (Loss::Unsynced, _) | (Loss::Bytes | Loss::Additions, true) => {}
                (Loss::Zeros, true) => change.zeros().apply(&mut self.durable),
                (Loss::Additions, false) => {
                    if let Change::NoName { .. } = change {
                        change.apply(&mut self.durable);
                    }
                }
                (Loss::Removals, false) => {
                    if let Some(change) = change.without_removal() {
                        change.apply(&mut self.durable);
                    }
                }
                (Loss::Some(_), _) => {
                    if let Some(change) = change.torn(chance) {
                        change.apply(&mut self.durable);
                    }
                }
            }
        }
    }
}

impl Change {
    fn apply(&self, to: &mut DiskNode) {
        match (self, to) {
            (Self::Name { name, node }, DiskNode::Folder(names)) => {
                names.insert(name.clone(), *node);
            }
            (Self::NoName { name }, DiskNode::Folder(names)) => {
                names.remove(name);
            }
            (Self::Rename { from, to, node }, DiskNode::Folder(names)) => {
                names.remove(from);
                names.insert(to.clone(), *node);
            }
            (Self::Truncate, DiskNode::File(content)) => content.clear(),
            (Self::Write { byte_offset, bytes }, DiskNode::File(content)) => {
                let start = *byte_offset as usize;
                let end = start + bytes.len();
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[start..end].copy_from_slice(bytes);
            }
            (change, node) => panic!("{change:?} of {node:?}"),
        }
    }

    fn zeros(self) -> Self {
        match self {
            Self::Write { byte_offset, bytes } => {
                Self::Write { byte_offset, bytes: vec![0; bytes.len()] }
            }
            other => other,
        }
    }

    /// A rename whose old name stays is another name.
    fn without_removal(self) -> Option<Self> {
        match self {
            Self::Rename { to, node, .. } => Some(Self::Name { name: to, node }),
            Self::NoName { .. } => None,
            other => Some(other),
        }
    }

    fn torn(self, chance: &mut Chance) -> Option<Self> {
        let kind = chance.below(4);
        match self {
            Self::Write { byte_offset, mut bytes } => match kind {
                0 => None,
                1 => {
                    let len = chance.below(bytes.len() as u64 + 1) as usize;
                    bytes.truncate(len);
                    Some(Self::Write { byte_offset, bytes })
                }
                2 => {
                    // Some pages reached the disk, the length did.
                    for page in bytes.chunks_mut(64) {
                        if chance.below(2) == 0 {
                            page.fill(0);
                        }
                    }
                    Some(Self::Write { byte_offset, bytes })
                }
                _ => Some(Self::Write { byte_offset, bytes }),
            },
            other if kind < 2 => Some(other),
            other @ Self::Rename { .. } if kind == 2 => other.without_removal(),
            _ => None,
        }
    }
}

fn apply(nodes: &mut Vec<State>, number: usize, event: &DiskEvent) {
    let add = |nodes: &mut Vec<State>, node: DiskId, content: DiskNode| {
        assert_eq!(node, nodes.len(), "nodes are numbered in the order of their events");
        nodes.push(State::durable(&content));
    };
    let (node, change) = match event.clone() {
        DiskEvent::MakeFolder { within, name, node } => {
            add(nodes, node, DiskNode::Folder(BTreeMap::new()));
            (within, Change::Name { name, node })
        }
        DiskEvent::Create { within, name, node } => {
            add(nodes, node, DiskNode::File(Vec::new()));
            (within, Change::Name { name, node })
        }
        DiskEvent::Write { node, byte_offset, bytes } => {
            (node, Change::Write { byte_offset, bytes })
        }
        DiskEvent::Truncate { node } => (node, Change::Truncate),
        DiskEvent::Rename { within, from, to, node } => (within, Change::Rename { from, to, node }),
        DiskEvent::Link { within, name, node } => (within, Change::Name { name, node }),
        DiskEvent::Unlink { within, name } => (within, Change::NoName { name }),
        DiskEvent::Sync { node, begun } => return nodes[node].sync(begun),
        other => panic!("{other:?} is not known here"),
    };
    nodes[node].pending.push((number, change));
}

fn fill(disk: &mut Disk, nodes: &[State], node: DiskId, at: &Path) {
    match &nodes[node].durable {
        DiskNode::File(bytes) => {
            disk.insert(at.to_owned(), OnDisk::File { bytes: bytes.clone(), age: node });
        }
        DiskNode::Folder(names) => {
            if names.is_empty() && at != Path::new("") {
                disk.insert(at.to_owned(), OnDisk::Folder);
            }
            for (name, node) in names {
                fill(disk, nodes, *node, &at.join(name));
            }
        }
    }
}

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}
