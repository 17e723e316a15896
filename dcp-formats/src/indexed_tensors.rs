//! Compares the tensors that an index places in a file with those in its header.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::Key;
use indexmap::IndexMap;

/// The indexes of a folder, for the headers of the files that they name.
///
/// The rule is that of the reader: every tensor of the index is in the file that the index names. A tensor that
/// is in further files, or in none of the indexes, is no damage. An index is counted by file once, so a header
/// takes one look-up for each of its tensors, and nothing of it is kept.
#[derive(Debug, Default)]
pub(crate) struct IndexedTensors {
    indexes: Vec<Indexed>,
}

#[derive(Debug)]
struct Indexed {
    /// The name of the index.
    name: String,
    /// The folder of the index with a slash, or nothing.
    folder: String,
    /// The file of each tensor.
    weight_map: IndexMap<Arc<str>, Key>,
    /// The number of tensors in each file, by its name in the index.
    counts: HashMap<Key, usize>,
}

impl Indexed {
    /// The file by its name in the index, and how many tensors the index places in it.
    fn home(&self, file: &Key) -> Option<(&Key, &usize)> {
        let name = file.as_str().strip_prefix(&*self.folder)?;
        self.counts.get_key_value(&Key::new(name).ok()?)
    }
}

impl IndexedTensors {
    /// Adds the index at `key`, by its file for each tensor.
    pub(crate) fn add(&mut self, key: &Key, weight_map: IndexMap<Arc<str>, Key>) {
        let mut counts: HashMap<Key, usize> = HashMap::new();
        for file in weight_map.values() {
            *counts.entry(file.clone()).or_default() += 1;
        }
        let name = key.file_name();
        let folder = key.as_str().strip_suffix(name).unwrap_or_default().to_owned();
        self.indexes.push(Indexed { name: name.to_owned(), folder, weight_map, counts });
    }

    /// Whether an index names this file: its shards need not end in `.safetensors`.
    pub(crate) fn has_file(&self, file: &Key) -> bool {
        self.indexes.iter().any(|indexed| indexed.home(file).is_some())
    }

    /// Starts the comparison of one file.
    pub(crate) fn of_file(&self, file: &Key) -> FileTensors<'_> {
        let of = self.indexes.iter().filter_map(|indexed| {
            let (home, count) = indexed.home(file)?;
            Some(InIndex { indexed, home, count: *count, seen: 0 })
        });
        FileTensors { indexes: of.collect() }
    }
}

/// The tensors that the indexes place in one file.
pub(crate) struct FileTensors<'a> {
    indexes: Vec<InIndex<'a>>,
}

struct InIndex<'a> {
    indexed: &'a Indexed,
    home: &'a Key,
    count: usize,
    seen: usize,
}

impl InIndex<'_> {
    fn has(&self, tensor: &str) -> bool {
        self.indexed.weight_map.get(tensor) == Some(self.home)
    }
}

impl FileTensors<'_> {
    /// Counts a tensor of the file's header.
    pub(crate) fn see(&mut self, tensor: &str) {
        for index in &mut self.indexes {
            index.seen += usize::from(index.has(tensor));
        }
    }

    /// Whether an index places more tensors in the file than were seen.
    pub(crate) fn lacks_any(&self) -> bool {
        self.indexes.iter().any(|index| index.seen < index.count)
    }

    /// The problem of a file that lacks tensors, as the predicate of a sentence; `names` are those in it.
    pub(crate) fn problem(&self, names: &HashSet<String>) -> Option<String> {
        let index = self.indexes.iter().find(|index| index.seen < index.count)?;
        let mut placed = index.indexed.weight_map.iter();
        let (missing, _) =
            placed.find(|(fqn, file)| *file == index.home && !names.contains(&***fqn))?;
        let name = &index.indexed.name;
        let more = match index.count - index.seen - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!("does not hold {missing:?}{more}, which {name} places there"))
    }
}
