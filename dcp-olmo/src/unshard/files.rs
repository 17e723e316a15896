//! The keys of each file, and the names of files.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::path::PathItem;
use dcp_core::{CheckpointMetadata, Key, StorageError};
use dcp_jobs::JobError;

use super::{UnshardFormat, UnshardStrategy};
use crate::rekeyed::{Origin, Shown};
use crate::roots::{MODEL, OPTIM};

/// The longest name that every file system takes, in bytes, less what a file in the making adds.
const NAME_MAX: usize = 200;

/// A file to write.
#[derive(Clone, Debug)]
pub(super) struct UnshardedFile {
    pub(super) key: Key,
    pub(super) shown: Vec<Shown>,
}

impl UnshardedFile {
    /// Bytes of its tensors.
    pub(super) fn byte_len(&self, metadata: &CheckpointMetadata) -> u64 {
        self.shown.iter().map(|one| byte_len(metadata, one)).fold(0, u64::saturating_add)
    }
}

/// The files for a part of a state: those with data, and the name of their index.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) data: Vec<UnshardedFile>,
    pub(super) index: Option<Key>,
}

/// Returns the entries below `root` in the state, each under its name there.
pub(super) fn below(metadata: &CheckpointMetadata, root: &str) -> Vec<Shown> {
    let entries = metadata.iter().enumerate();
    let below = entries.filter_map(|(at, (fqn, entry))| {
        let rest = fqn.strip_prefix(root)?.strip_prefix('.')?;
        let path = match entry.path() {
            None => None,
            Some(path) => match path.split_first() {
                Some((PathItem::Key(first), rest)) if &**first == root => Some(rest.into()),
                _ => return None,
            },
        };
        Some(Shown { fqn: rest.into(), path, origin: Origin::Entry(at) })
    });
    below.collect()
}

/// Divides `shown`, which all lie below `root`, into files.
pub(super) fn divide(
    metadata: &CheckpointMetadata,
    root: &str,
    shown: Vec<Shown>,
    strategy: UnshardStrategy,
    format: UnshardFormat,
) -> Result<Files, JobError> {
    let ending = format.ending();
    let key =
        |name: String| Key::new(name).map_err(|error| JobError::from(StorageError::from(error)));
    if strategy == UnshardStrategy::OneFile {
        let key = key(format!("{root}.{ending}"))?;
        return Ok(Files { data: vec![UnshardedFile { key, shown }], index: None });
    }
    // A part of a nested dict in each file would have to be put together again.
    let flat =
        |one: Shown| Shown { path: Some([PathItem::Key(Arc::clone(&one.fqn))].into()), ..one };
    let shown = shown.into_iter().map(flat);
    let mut data = Vec::new();
    match strategy {
        UnshardStrategy::OneFile => {}
        UnshardStrategy::OneFilePerTensor => {
            let mut names: BTreeMap<String, Arc<str>> = BTreeMap::new();
            let mut clashes = Vec::new();
            for one in shown {
                let name = file_name(root, &one.fqn)?;
                if let Some(other) = names.insert(name.clone(), Arc::clone(&one.fqn)) {
                    clashes.push(format!("{other:?} and {:?}", one.fqn));
                }
                let key = key(format!("{root}/{name}.{ending}"))?;
                data.push(UnshardedFile { key, shown: vec![one] });
            }
            if !clashes.is_empty() {
                let problem = format!(
                    "would give keys the same file: {}; write one file, or chunks",
                    clashes.join(", ")
                );
                return Err(unsupported("a file for each tensor", problem));
            }
        }
        UnshardStrategy::Chunks(most) => {
            let mut bytes = 0_u64;
            let mut chunks: Vec<Vec<Shown>> = Vec::new();
            for one in shown {
                let len = byte_len(metadata, &one);
                match chunks.last_mut() {
                    Some(chunk) if bytes.saturating_add(len) <= most.get() => {
                        bytes += len;
                        chunk.push(one);
                    }
                    _ => {
                        bytes = len;
                        chunks.push(vec![one]);
                    }
                }
            }
            for (number, shown) in chunks.into_iter().enumerate() {
                let key = key(format!("{root}/chunk-{number:05}.{ending}"))?;
                data.push(UnshardedFile { key, shown });
            }
        }
    }
    let index = key(format!("{root}/{}", format.index_name()))?;
    Ok(Files { data, index: Some(index) })
}

fn unsupported(what: &str, problem: String) -> JobError {
    JobError::NoForm { what: what.to_owned(), problem }
}

/// Bytes of a whole tensor; objects count nothing.
fn byte_len(metadata: &CheckpointMetadata, shown: &Shown) -> u64 {
    let (Origin::Entry(at) | Origin::Made(at, _)) = shown.origin;
    match metadata.at(at) {
        Some((_, Entry::Tensor(tensor))) => tensor.byte_len().unwrap_or(u64::MAX),
        _ => 0,
    }
}

/// The name of a tensor's file, without its ending: as OLMo-core (3.0) makes it, dots as dashes.
/// What it takes for folders is escaped like in URLs.
fn file_name(root: &str, fqn: &str) -> Result<String, JobError> {
    let mut name = String::new();
    for c in format!("{root}.{fqn}").chars() {
        match c {
            '.' => name.push('-'),
            '/' | '\\' | '%' | ':' | '\0'..='\x1f' => name.push_str(&format!("%{:02X}", c as u32)),
            c => name.push(c),
        }
    }
    if name.len() > NAME_MAX {
        let problem = format!(
            "would be a file with a name of {} bytes; write one file, or chunks",
            name.len()
        );
        return Err(unsupported(&format!("{fqn:?}"), problem));
    }
    Ok(name)
}

/// The roots that are exported.
pub(super) fn is_exported(root: &str, optim: bool) -> bool {
    root == MODEL || optim && root == OPTIM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_olmos_where_they_can_be() {
        for (fqn, name) in [
            ("blocks.0.w1.weight", "model-blocks-0-w1-weight"),
            ("with/slash", "model-with%2Fslash"),
            ("with%2Fslash", "model-with%252Fslash"),
            ("..\\x", "model---%5Cx"),
            ("é", "model-é"),
        ] {
            assert_eq!(file_name("model", fqn).unwrap(), name);
        }
        assert!(file_name("model", &"x".repeat(300)).is_err());
    }
}
