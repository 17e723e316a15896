//! The files of a folder, listed once.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::time::SystemTime;

use bytes::Bytes;

use crate::error::{StorageError, StorageErrorKind};
use crate::names::key::Key;
use crate::storages::storage::{ObjectMeta, Storage, StorageExt};

/// The files below a folder at one moment, with their lengths and ages, ordered by name.
///
/// It holds about 100 bytes for each file, at most [`OBJECTS_MAX`](Self::OBJECTS_MAX) of them.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    objects: Vec<ObjectMeta>,
    name: Option<String>,
    truncated: bool,
    listed: bool,
    complete: bool,
    peeked: BTreeMap<Key, Bytes>,
}

impl Listing {
    /// The maximum number of files.
    pub const OBJECTS_MAX: usize = 1_000_000;

    /// A listing of exactly these files.
    #[must_use]
    pub fn new(objects: impl IntoIterator<Item = ObjectMeta>) -> Self {
        let mut objects: Vec<_> = objects.into_iter().collect();
        objects.sort_by(|a, b| a.key.cmp(&b.key));
        let peeked = BTreeMap::new();
        Self { objects, name: None, truncated: false, listed: true, complete: true, peeked }
    }

    /// The name of the folder, where it is known.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Sets the name of the folder.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<Option<String>>) -> Self {
        self.name = name.into();
        self
    }

    /// Lists `storage`. One that cannot list looks up `landmarks`, and its listing has only
    /// the existing ones.
    ///
    /// # Errors
    ///
    /// When the storage fails, or cannot list and there are no landmarks.
    pub async fn read(storage: &dyn Storage, landmarks: &[&str]) -> Result<Self, StorageError> {
        if !storage.capabilities().listable && !landmarks.is_empty() {
            return Self::probe(storage, landmarks).await;
        }
        let mut stream = storage.list(None);
        let mut objects = Vec::new();
        let mut truncated = false;
        while let Some(meta) = poll_fn(|context| stream.as_mut().poll_next(context)).await {
            match meta {
                Ok(meta) => objects.push(meta),
                Err(error)
                    if error.kind() == StorageErrorKind::Unsupported && !landmarks.is_empty() =>
                {
                    return Self::probe(storage, landmarks).await;
                }
                Err(error) => return Err(error),
            }
            if objects.len() >= Self::OBJECTS_MAX {
                truncated = true;
                break;
            }
        }
        let complete = !truncated && storage.capabilities().complete_listing;
        if objects.is_empty() && !complete {
            // A file system does not list links out of the root; a `stat` of one fails with the reason.
            return Self::probe(storage, landmarks).await;
        }
        Ok(Self { truncated, complete, ..Self::new(objects) })
    }

    async fn probe(storage: &dyn Storage, landmarks: &[&str]) -> Result<Self, StorageError> {
        let mut objects = Vec::new();
        for name in landmarks {
            match storage.stat(&Key::new(name)?).await {
                Ok(meta) => objects.push(meta),
                Err(error) if error.kind() == StorageErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { listed: false, complete: false, ..Self::new(objects) })
    }

    /// Whether there are more files than were listed.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Whether the storage was listed, and its landmarks not looked up.
    pub(super) fn is_listed(&self) -> bool {
        self.listed
    }

    /// Whether the listing has every object: the storage lists all that can be read, and the listing
    /// was not truncated.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Every file, in order of the names.
    #[must_use]
    pub fn objects(&self) -> &[ObjectMeta] {
        &self.objects
    }

    /// The file of that name.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&ObjectMeta> {
        let at = self.objects.binary_search_by(|meta| meta.key.cmp(key)).ok()?;
        self.objects.get(at)
    }

    /// The folder that was listed.
    #[must_use]
    pub fn root(&self) -> Folder<'_> {
        let name = self.name.as_deref().unwrap_or(".");
        Folder { objects: &self.objects, prefix: "", name, peeked: &self.peeked }
    }

    /// The listing of a folder below, under names relative to it.
    #[must_use]
    pub fn below(&self, folder: &str) -> Self {
        let Some(below) = self.root().folder(folder) else {
            return Self { objects: Vec::new(), name: None, peeked: BTreeMap::new(), ..*self };
        };
        let relative = |key: &Key| Key::new(key.as_str().strip_prefix(below.prefix)?).ok();
        let objects = below.objects.iter().filter_map(|meta| {
            let key = relative(&meta.key)?;
            Some(ObjectMeta { key, ..meta.clone() })
        });
        let peeked = self.peeked.iter();
        Self {
            objects: objects.collect(),
            name: Some(below.name().to_owned()),
            peeked: peeked.filter_map(|(k, bytes)| Some((relative(k)?, bytes.clone()))).collect(),
            ..*self
        }
    }

    /// Reads the ranges of `peeks`, each file once; missing files are skipped.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn peek(
        &mut self,
        storage: &dyn Storage,
        peeks: Vec<Peek>,
    ) -> Result<(), StorageError> {
        let mut lens: BTreeMap<Key, u64> = BTreeMap::new();
        for Peek { key, byte_len } in peeks {
            let len = self.get(&key).map_or(0, |meta| meta.byte_len.min(byte_len));
            if len > 0 && self.peeked.get(&key).is_none_or(|read| (read.len() as u64) < len) {
                let wanted = lens.entry(key).or_default();
                *wanted = len.max(*wanted);
            }
        }
        for (key, len) in lens {
            let bytes = storage.read_range(&key, 0..len).await?;
            self.peeked.insert(key, bytes);
        }
        Ok(())
    }

    /// The bytes of a file that were read to recognize it.
    #[must_use]
    pub fn peeked(&self, key: &Key) -> Option<&Bytes> {
        self.peeked.get(key)
    }
}

/// The beginning of a file that a format needs to recognize a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peek {
    key: Key,
    byte_len: u64,
}

impl Peek {
    /// The maximum bytes of one file that are read to recognize it.
    pub const BYTES_MAX: u64 = 64 << 10;

    /// The first `byte_len` bytes of a file, at most [`BYTES_MAX`](Self::BYTES_MAX); fewer where it
    /// is shorter.
    #[must_use]
    pub fn new(key: Key, byte_len: u64) -> Self {
        Self { key, byte_len: byte_len.min(Self::BYTES_MAX) }
    }
}

/// A folder of a [`Listing`]: the one that was listed, or one below it.
#[derive(Clone, Copy, Debug)]
pub struct Folder<'a> {
    objects: &'a [ObjectMeta],
    /// The prefix of its files: empty, or ending in `/`.
    prefix: &'a str,
    /// The name of the folder that was listed.
    name: &'a str,
    peeked: &'a BTreeMap<Key, Bytes>,
}

/// An entry of a folder.
#[derive(Clone, Copy, Debug)]
pub enum ListingEntry<'a> {
    /// A file, with its name in the folder.
    File(&'a str, &'a ObjectMeta),
    /// A folder, which has at least one file.
    Folder(Folder<'a>),
}

impl<'a> Folder<'a> {
    /// Its own name; for the folder that was listed the name that the listing has, or `.`.
    #[must_use]
    pub fn name(&self) -> &'a str {
        match self.path() {
            "." => self.name,
            path => path.rsplit('/').next().unwrap_or(path),
        }
    }

    /// Its path from the folder that was listed; `.` for that one.
    #[must_use]
    pub fn path(&self) -> &'a str {
        self.prefix.strip_suffix('/').unwrap_or(".")
    }

    /// Whether there is no file in it or below it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The file `name`, a path relative to this folder.
    #[must_use]
    pub fn file(&self, name: &str) -> Option<&'a ObjectMeta> {
        let at = self.objects.binary_search_by(|meta| self.relative(meta).cmp(name)).ok()?;
        self.objects.get(at)
    }

    /// The path of a file from this folder on.
    fn relative<'m>(&self, meta: &'m ObjectMeta) -> &'m str {
        meta.key.as_str().get(self.prefix.len()..).unwrap_or_default()
    }

    /// Whether there is a file `name`, a path relative to this folder.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.file(name).is_some()
    }

    /// The folder `name`, a path relative to this one; `None` where no file is in it.
    #[must_use]
    pub fn folder(&self, name: &str) -> Option<Self> {
        let is_before = |meta: &ObjectMeta| {
            let (rest, end) = (self.relative(meta).as_bytes(), name.len());
            match rest.get(..end.min(rest.len())).unwrap_or(rest).cmp(name.as_bytes()) {
                Ordering::Equal => rest.get(end).is_none_or(|byte| *byte < b'/'),
                order => order.is_lt(),
            }
        };
        let begin = self.objects.partition_point(is_before);
        let below = self.objects.get(begin..)?;
        let inside = |meta: &ObjectMeta| {
            self.relative(meta).strip_prefix(name).is_some_and(|rest| rest.starts_with('/'))
        };
        let objects = below.get(..below.partition_point(inside))?;
        let prefix = objects.first()?.key.as_str().get(..self.prefix.len() + name.len() + 1)?;
        Some(Self { objects, prefix, ..*self })
    }

    /// Its direct entries, ordered by name.
    pub fn entries(&self) -> impl Iterator<Item = ListingEntry<'a>> + use<'a> {
        let folder = *self;
        let mut rest = folder.objects;
        std::iter::from_fn(move || {
            let first = rest.first()?;
            let name = first.key.as_str().get(folder.prefix.len()..)?;
            let Some((below, _)) = name.split_once('/') else {
                rest = rest.get(1..)?;
                return Some(ListingEntry::File(name, first));
            };
            let end = folder.prefix.len() + below.len() + 1;
            let prefix = first.key.as_str().get(..end)?;
            let len = rest.partition_point(|meta| meta.key.as_str().starts_with(prefix));
            let objects = rest.get(..len)?;
            rest = rest.get(len..)?;
            Some(ListingEntry::Folder(Folder { objects, prefix, ..folder }))
        })
    }

    /// The files in it, not those in its folders: name and description.
    pub fn files(&self) -> impl Iterator<Item = (&'a str, &'a ObjectMeta)> + use<'a> {
        self.entries().filter_map(|entry| match entry {
            ListingEntry::File(name, meta) => Some((name, meta)),
            ListingEntry::Folder(_) => None,
        })
    }

    /// The folders in it.
    pub fn folders(&self) -> impl Iterator<Item = Self> + use<'a> {
        self.entries().filter_map(|entry| match entry {
            ListingEntry::Folder(folder) => Some(folder),
            ListingEntry::File(..) => None,
        })
    }

    /// Whether the files in it and below it have the names and lengths of those of another folder.
    #[must_use]
    pub fn has_same_files(&self, other: &Folder<'_>) -> bool {
        let one = self.objects.iter().map(|meta| (self.relative(meta), meta.byte_len));
        let others = other.objects.iter().map(|meta| (other.relative(meta), meta.byte_len));
        self.objects.len() == other.objects.len() && one.eq(others)
    }

    /// Files in it and below it.
    #[must_use]
    pub fn file_count(&self) -> usize {
        self.objects.len()
    }

    /// Bytes of all files in it and below it.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.objects.iter().fold(0, |sum, meta| sum.saturating_add(meta.byte_len))
    }

    /// The time of the last write of any of its files, if the storage has it.
    #[must_use]
    pub fn modified(&self) -> Option<SystemTime> {
        self.objects.iter().filter_map(|meta| meta.modified).max()
    }

    /// The bytes of the file `name`, a path relative to this folder, that were read to recognize the
    /// folder; `None` if none were.
    #[must_use]
    pub fn peeked(&self, name: &str) -> Option<&'a Bytes> {
        self.peeked.get(&self.key(name)?)
    }

    /// The key of the file `name`, a path relative to this folder, in the folder that was listed.
    #[must_use]
    pub fn key(&self, name: &str) -> Option<Key> {
        Key::new(format!("{}{name}", self.prefix)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        Listing::new(names.iter().map(|name| ObjectMeta::new(Key::new(name).unwrap(), 1)))
    }

    #[test]
    fn folders_are_told_apart_from_names_that_sort_between_them() {
        // `.` and `-` sort before `/`, letters and digits after it.
        let all = listing(&["a-1", "a.b", "a/x", "a/y/z", "a0", "ab/c", "b"]);
        let root = all.root();
        let names =
            |folder: Folder<'_>| folder.files().map(|(n, _)| n.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(root), ["a-1", "a.b", "a0", "b"]);
        let folders: Vec<_> = root.folders().map(|folder| folder.name()).collect();
        assert_eq!(folders, ["a", "ab"]);
        let a = root.folder("a").unwrap();
        assert_eq!((a.path(), a.file_count(), names(a)), ("a", 2, vec!["x".to_owned()]));
        assert!(a.has("y/z") && !a.has("y") && root.has("a/y/z"));
        assert!(a.has_same_files(&listing(&["b/x", "b/y/z"]).root().folder("b").unwrap()));
        assert!(!a.has_same_files(&root));
        let y = root.folder("a/y").unwrap();
        assert_eq!((y.name(), y.path(), names(y)), ("y", "a/y", vec!["z".to_owned()]));
        assert_eq!(a.folder("y").unwrap().key("z"), Key::new("a/y/z").ok());
        assert!(root.folder("b").is_none() && root.folder("a0").is_none());
        assert!(root.folder("c").is_none() && root.folder("").is_none());
    }

    #[test]
    fn a_listing_below_has_relative_names() {
        let below = listing(&["a/x", "a/y/z", "b"]).below("a");
        let keys: Vec<_> = below.objects().iter().map(|meta| meta.key.as_str()).collect();
        assert_eq!(keys, ["x", "y/z"]);
        assert!(listing(&["a"]).below("a").root().is_empty());
    }
}
