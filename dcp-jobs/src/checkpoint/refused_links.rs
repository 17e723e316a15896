//! Symbolic links to files of a checkpoint that a storage does not follow.
//!
//! A file system lists no link that leads out of the folder: without this look, a model whose weights are
//! such a link seems to have none. Whether a link is refused depends on the folder that is opened, so every
//! folder of a run is opened for its own links: a link from one step to another is inside the run, and outside the
//! step.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use dcp_core::error::error_chain;
use dcp_core::format::Listing;
use dcp_core::registry::Access;
use dcp_core::storage::ObjectMeta;
use dcp_core::{Key, StorageError, StorageErrorKind};

use crate::checkpoint::opener::Opener;
use crate::checkpoint::uri::{below, local_path};
use crate::listing::UnreadFiles;

/// The maximum number of entries of a folder, and of those below it, that are looked at.
const ENTRIES_MAX: usize = 1_000_000;
/// The maximum number of links that are tried.
const LINKS_MAX: usize = 10_000;
/// The endings of files of checkpoints. Links to other files, such as a tokenizer, are in many folders.
const ENDINGS: [&str; 8] =
    [".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".metadata", ".index.json"];
/// The middle of the names of indexes of variants: `model.safetensors.index.fp16.json`.
const INDEX: &str = ".safetensors.index.";

/// The description of an array of zarr.
const ZARRAY: &str = ".zarray";
/// The maximum number of entries of a linked folder that are looked at.
const LINKED_ENTRIES_MAX: usize = 1_000;

impl Opener {
    /// The first file of a checkpoint in the folder at a URL, or below it, that is a link which is refused.
    pub(crate) async fn refused_link(&self, uri: &str) -> Option<StorageError> {
        let links = self.links(local_path(uri)?);
        if links.is_empty() {
            return None;
        }
        let storage = self.storages.open(uri, Access::Read).await.ok()?;
        for link in links {
            let refused = storage.stat(&link).await.err();
            if let Some(error) = refused.filter(|error| error.kind() == StorageErrorKind::Link) {
                return Some(error);
            }
        }
        None
    }

    /// All links of a run that are refused, in its own folder or in those of its steps.
    pub(crate) async fn refused_links(&self, uri: &str) -> UnreadFiles {
        let mut refused = UnreadFiles::new();
        let links = local_path(uri).map(|root| self.links(root)).unwrap_or_default();
        let mut folders: BTreeMap<&str, Vec<(&Key, &str)>> = BTreeMap::new();
        for link in &links {
            let (folder, name) = link.as_str().split_once('/').unwrap_or(("", link.as_str()));
            folders.entry(folder).or_default().push((link, name));
        }
        for (folder, links) in folders {
            let uri = if folder.is_empty() { uri.to_owned() } else { below(uri, folder) };
            let Ok(storage) = self.storages.open(&uri, Access::Read).await else { continue };
            for (link, name) in links {
                let Ok(name) = Key::new(name) else { continue };
                if let Err(error) = storage.stat(&name).await
                    && error.kind() == StorageErrorKind::Link
                {
                    refused.insert(link.clone(), error_chain(&error));
                }
            }
        }
        refused
    }

    /// Whether a format that has files of this name finds its checkpoint in the folder of a link of the name. In other
    /// folders the link is the user's, and nothing reads it.
    fn is_read_as(&self, link: &Path, name: &str) -> bool {
        let Some(folder) = link.parent() else { return false };
        let listing = names_in(folder);
        let mut formats = self.formats.formats().iter();
        formats.any(|format| {
            let found = || format.recognize(&listing.root());
            format.info().landmarks.contains(&name)
                && found().is_some_and(|found| found.is_checkpoint())
        })
    }

    /// The links in a folder and below it whose names are those of files of a checkpoint, or that lead to a
    /// folder of such files, as an array of zarr is. Links to folders are not followed.
    fn links(&self, root: &Path) -> Vec<Key> {
        // Such as the JSON of Megatron-Core and OLMo-core.
        let landmarks = self.formats.formats().iter().flat_map(|one| one.info().landmarks);
        let landmarks: Vec<_> = landmarks.filter(|name| name.ends_with(".json")).collect();
        let is_of_checkpoint = |path: &str| {
            let name = path.rsplit('/').next().unwrap_or(path);
            name.contains(INDEX) || ENDINGS.iter().any(|end| name.ends_with(end))
        };
        let is_landmark = |path: &Path| {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            landmarks.iter().any(|landmark| **landmark == name) && self.is_read_as(path, name)
        };
        let (mut found, mut open, mut left) = (Vec::new(), vec![root.to_path_buf()], ENTRIES_MAX);
        while let Some(folder) = open.pop() {
            // What cannot be listed here cannot be listed by the storage, which says so.
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for entry in entries.flatten() {
                left = match left.checked_sub(1) {
                    Some(left) if found.len() < LINKS_MAX => left,
                    _ => return found,
                };
                let path = entry.path();
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => open.push(path),
                    Ok(kind) if kind.is_symlink() => {
                        let name = path.strip_prefix(root).ok().and_then(Path::to_str);
                        let name = name.filter(|name| {
                            is_of_checkpoint(name)
                                || is_landmark(&path)
                                || holds_checkpoint(&path, &is_of_checkpoint, &mut left)
                        });
                        found.extend(name.and_then(|name| Key::new(name).ok()));
                    }
                    _ => {}
                }
            }
        }
        found.sort();
        found
    }
}

/// The names in a folder and in those in it.
fn names_in(folder: &Path) -> Listing {
    let mut names = Vec::new();
    let mut add = |folder: &Path, prefix: &str| {
        let mut folders = Vec::new();
        let Ok(entries) = fs::read_dir(folder) else { return folders };
        for entry in entries.flatten().take(LINKED_ENTRIES_MAX) {
            let file_name = entry.file_name();
            let Some(name) = file_name.to_str() else { continue };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push((entry.path(), name.to_owned())),
                _ => names.extend(Key::new(format!("{prefix}{name}")).ok()),
            }
        }
        folders
    };
    for (inner, name) in add(folder, "") {
        add(&inner, &format!("{name}/"));
    }
    let name = folder.file_name().and_then(OsStr::to_str).map(ToOwned::to_owned);
    Listing::new(names.into_iter().map(|key| ObjectMeta::new(key, 1))).with_name(name)
}

/// Whether a link leads to a folder with a file of a checkpoint in it. The entries that are looked at count as those
/// of the folder that has the link.
fn holds_checkpoint(
    link: &Path,
    is_of_checkpoint: &impl Fn(&str) -> bool,
    left: &mut usize,
) -> bool {
    let Ok(entries) = fs::read_dir(link) else { return false };
    entries.flatten().take(LINKED_ENTRIES_MAX.min(*left)).any(|entry| {
        *left -= 1;
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name == ZARRAY || is_of_checkpoint(name))
    })
}
