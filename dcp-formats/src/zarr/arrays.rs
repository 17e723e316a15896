//! The arrays of a folder, and the files of their chunks.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::Key;
use dcp_core::storage::ObjectMeta;

use super::header::HEADER_FILE;

/// The contents of a folder, by names.
#[derive(Debug, Default)]
pub(super) struct Names {
    arrays: BTreeMap<String, ArrayFiles>,
    others: Vec<ObjectMeta>,
}

/// The files of one array.
#[derive(Debug, Default)]
pub(super) struct ArrayFiles {
    /// The length of the header.
    pub(super) header_len: u64,
    /// The files of its chunks: their names in its folder, and their lengths.
    pub(super) parts: BTreeMap<String, u64>,
}

impl Names {
    /// Adds a file. Ignores lock folders, `{array}.sync`, whose files have the names of chunks.
    pub(super) fn add(&mut self, meta: ObjectMeta) {
        let key = meta.key.as_str();
        let folders = key.rsplit_once('/').map_or("", |(folders, _)| folders);
        if folders.split('/').any(|folder| folder.ends_with(".sync")) {
            return;
        }
        if meta.key.file_name() == HEADER_FILE && !folders.is_empty() {
            self.arrays.entry(folders.to_owned()).or_default().header_len = meta.byte_len;
        } else {
            self.others.push(meta);
        }
    }

    /// Assigns files to arrays by folder, in order. Also returns the files of no array.
    pub(super) fn assign(self) -> (BTreeMap<String, ArrayFiles>, Vec<ObjectMeta>) {
        let mut arrays = self.arrays;
        let mut others = Vec::new();
        for meta in self.others {
            match part_of(&mut arrays, &meta.key) {
                Some((array, name)) => {
                    array.parts.insert(name, meta.byte_len);
                }
                None => others.push(meta),
            }
        }
        (arrays, others)
    }
}

/// Whether a name is that of a chunk: numbers.
fn is_part(name: &str) -> bool {
    name.split(['.', '/']).all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// The folders with chunks but without a header, in order.
pub(super) fn without_header(others: &[ObjectMeta]) -> BTreeSet<&str> {
    let folders = others.iter().filter_map(|meta| {
        let (folder, name) = meta.key.as_str().rsplit_once('/')?;
        is_part(name).then_some(folder)
    });
    folders.collect()
}

/// The array that contains a file of numbers, and the file's name in it.
fn part_of<'a>(
    arrays: &'a mut BTreeMap<String, ArrayFiles>,
    key: &Key,
) -> Option<(&'a mut ArrayFiles, String)> {
    let text = key.as_str();
    let mut at = text.len();
    while let Some(slash) = text.get(..at)?.rfind('/') {
        let (folder, name) = (text.get(..slash)?, text.get(slash + 1..)?);
        if !is_part(name) {
            return None;
        }
        if arrays.contains_key(folder) {
            return Some((arrays.get_mut(folder)?, name.to_owned()));
        }
        at = slash;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_belong_to_the_array_in_whose_folder_they_are() {
        let mut names = Names::default();
        for name in [
            "w.x/.zarray",
            "w.x/0.0",
            "w.x/1.0",
            "w.x/.zattrs",
            "w.x.sync/.zarray",
            "w.x.sync/0.0",
            "n/.zarray",
            "n/0/1",
            "o/shard_0_1.pt",
            "common.pt",
            ".zarray",
        ] {
            names.add(ObjectMeta::new(Key::new(name).unwrap(), 7));
        }
        let (arrays, others) = names.assign();
        let files = |array: &str| arrays[array].parts.keys().cloned().collect::<Vec<_>>();
        assert_eq!(arrays.keys().collect::<Vec<_>>(), ["n", "w.x"]);
        assert_eq!(files("w.x"), ["0.0", "1.0"]);
        assert_eq!(files("n"), ["0/1"]);
        let others: Vec<_> = others.iter().map(|meta| meta.key.as_str()).collect();
        assert_eq!(others, ["w.x/.zattrs", "o/shard_0_1.pt", "common.pt", ".zarray"]);
    }
}
