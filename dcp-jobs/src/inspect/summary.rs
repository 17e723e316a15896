//! The contents of a checkpoint, as one value to look at or to print as JSON.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::metadata::{Entry, Layout, Placement, TensorEntry, WrappedTensor};
use dcp_core::path::PathItem;
use dcp_core::text::counted;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};
use indexmap::IndexMap;
use serde::Serialize;
use serde_json::json;

use crate::element::value_json::{JsonLimits, ValueEncoder};
use crate::error::ForeignCallable;
use crate::integrity::callables;
use crate::options::JobOptions;
use crate::read::objects::{ObjectBatches, object_entries};
use crate::source::Source;

use crate::inspect::sidecar_summary::SidecarSummary;

/// A checkpoint at a glance. Serialized, it is the output of `dcp inspect --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// The format, such as `torch_dcp`.
    pub format: String,
    /// The tensors and objects, by FQN, in the order of the checkpoint.
    pub keys: IndexMap<Arc<str>, KeySummary>,
    /// The files that the checkpoint refers to and their bytes; `None` for one that is missing.
    pub files: IndexMap<String, Option<u64>>,
    /// Python callables in the checkpoint's objects that are not known to be harmless.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub callables: Vec<ForeignCallable>,
    /// Evidence that a Hugging Face model is incomplete or that its writer died.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unfinished: Vec<String>,
    /// The sidecar, for formats that have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sidecar: Option<SidecarSummary>,
    /// The version that the format claims.
    #[serde(skip)]
    pub version: Option<Arc<str>>,
    /// The path of each key in the nested state dict, where known: dict keys and list indices.
    #[serde(skip)]
    pub paths: IndexMap<Arc<str>, Vec<String>>,
}

/// The tensor or object under one FQN.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum KeySummary {
    /// A tensor.
    Tensor(TensorSummary),
    /// Any other value.
    Object {
        /// The value, as [`value_json`](crate::element::value_json()) writes it. A value that
        /// cannot be read
        /// is `{"type": "unreadable", "error": …}`.
        value: serde_json::Value,
    },
}

/// A stored tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TensorSummary {
    /// The element type, by PyTorch's name without `torch.`.
    pub dtype: &'static str,
    /// Elements per axis of the whole tensor.
    pub shape: Vec<u64>,
    /// Bytes of all elements.
    pub bytes: u64,
    /// Its chunks, in the order of the checkpoint.
    pub chunks: Vec<ChunkSummary>,
    /// The device onto which Python loads a tensor of a `torch.save` file, if it is not the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// A chunk of a stored tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChunkSummary {
    /// Its offset in the tensor, per axis.
    pub offsets: Vec<u64>,
    /// Elements per axis.
    pub sizes: Vec<u64>,
    /// The file that holds it; `None` when the checkpoint does not say.
    pub file: Option<String>,
    /// First stored byte in the file.
    pub byte_offset: Option<u64>,
    /// Stored bytes, including what the format adds.
    pub byte_len: Option<u64>,
}

impl Summary {
    /// Bytes of all tensors.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        let tensors = self.keys.values().filter_map(KeySummary::as_tensor);
        tensors.fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }

    /// The number of tensors.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.keys.values().filter_map(KeySummary::as_tensor).count()
    }
}

/// Characters of a value that [`KeySummary`] shows.
const SHOWN_MAX: usize = 60;

/// A line: dtype, shape and number of chunks of a tensor, or the beginning of a value.
impl fmt::Display for KeySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(TensorSummary { dtype, shape, chunks, .. }) => {
                let chunks = counted(chunks.len() as u64, "chunk");
                write!(f, "{dtype:<8} {:<9} in {chunks}", format!("{shape:?}"))
            }
            Self::Object { value } => {
                let text = value.to_string();
                match text.char_indices().nth(SHOWN_MAX) {
                    Some((cut, _)) => write!(f, "= {}…", text.get(..cut).unwrap_or_default()),
                    None => write!(f, "= {text}"),
                }
            }
        }
    }
}

impl KeySummary {
    /// The tensor, if it is one.
    #[must_use]
    pub fn as_tensor(&self) -> Option<&TensorSummary> {
        if let Self::Tensor(tensor) = self { Some(tensor) } else { None }
    }
}

/// Summarizes a checkpoint: reads its index, its objects, and the sizes of its files, but no
/// tensors. `wanted` selects keys, and with them the files. Entries that are bad but readable are
/// listed as they are; [`verify`](crate::verify::verify()) judges them.
///
/// # Errors
///
/// When there is no checkpoint, its index is bad, or the storage fails.
pub async fn inspect(
    source: &Source,
    options: &JobOptions,
    wanted: impl Fn(&str) -> bool,
) -> Result<Summary, CheckpointError> {
    let metadata = source.metadata().await?;
    let provenance = metadata.provenance();
    let format = provenance.format.as_deref().unwrap_or("unknown").to_owned();
    let shown: Vec<bool> = metadata.iter().map(|(fqn, _)| wanted(fqn)).collect();
    let mut entries = object_entries(&metadata);
    entries.retain(|entry| shown.get(*entry) == Some(&true));
    let mut objects = objects(source, &metadata, &entries).await;
    let mut used = vec![false; metadata.files().len()];
    let facts = source.index_facts().await?;
    let mut summary = Summary {
        format,
        keys: IndexMap::new(),
        files: IndexMap::new(),
        unfinished: facts.unfinished,
        callables: Vec::new(),
        sidecar: SidecarSummary::of(source, &shown).await?,
        version: provenance.version.clone(),
        paths: IndexMap::new(),
    };
    summary.callables = facts.callables.into_iter().map(ForeignCallable::from).collect();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if shown.get(at) != Some(&true) {
            continue;
        }
        let mut mark = |file: dcp_core::metadata::FileId| {
            if let Some(used) = used.get_mut(file.index()) {
                *used = true;
            }
        };
        let key = match entry {
            Entry::Tensor(tensor) => {
                let stored =
                    tensor.chunks.iter().filter_map(|chunk| stored(chunk.placement?, &metadata));
                stored.for_each(|placement| mark(placement.file));
                let mut summary = tensor_summary(tensor, &metadata);
                summary.device = facts.devices.get(&at).cloned();
                KeySummary::Tensor(summary)
            }
            Entry::Object(object) => {
                let stored = object.placement.and_then(|placement| stored(placement, &metadata));
                stored.iter().for_each(|placement| mark(placement.file));
                let (value, callables) = objects.remove(&at).unwrap_or_default();
                summary.callables.extend(callables);
                KeySummary::Object { value }
            }
            _ => continue,
        };
        summary.keys.insert(Arc::clone(fqn), key);
        if let Some(path) = entry.path() {
            let steps = path.iter().map(PathItem::to_string);
            summary.paths.insert(Arc::clone(fqn), steps.collect());
        }
    }
    let used = metadata.files().iter().zip(used).filter(|(_, used)| *used);
    let mut files: Vec<Key> = used.map(|(key, _)| key.clone()).collect();
    // The keys in such a file are unknown, so any selection may concern it.
    files.extend(facts.unread_files);
    files.sort_unstable();
    files.dedup();
    let sizes = stream::iter(files.iter().map(|key| async move {
        match source.storage.stat(key).await {
            Ok(meta) => Ok((key.to_string(), Some(meta.byte_len))),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Ok((key.to_string(), None)),
            Err(error) => Err(CheckpointError::from(error)),
        }
    }));
    summary.files = sizes.buffered(options.parallelism.max(1)).try_collect().await?;
    summary.files.sort_by_cached_key(|name, _| natural(name));
    Ok(summary)
}

/// The objects as JSON, and the Python callables in them.
async fn objects(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
) -> HashMap<usize, (serde_json::Value, Vec<ForeignCallable>)> {
    let limits = JsonLimits::default();
    let mut encoder = ValueEncoder::new(&limits);
    let mut shown = HashMap::with_capacity(entries.len());
    let mut batches = ObjectBatches::new(source, metadata, entries);
    while let Some(batch) = batches.next().await {
        for (at, value) in batch {
            let entry = match &value {
                Ok(value) => {
                    // A pickle that holds all objects is examined as a whole.
                    let fqn = metadata.at(at).filter(|_| source.single_pickle().is_none());
                    let found = fqn.map(|(fqn, _)| callables::foreign_callables(fqn, value));
                    let mut json = encoder.json(value);
                    let object = metadata.at(at).and_then(|(_, entry)| entry.as_object());
                    if let Some(tensor) = object.and_then(|object| object.tensor.as_ref()) {
                        json = wrapped_json(tensor, &json);
                    }
                    (json, found.and_then(Result::ok).unwrap_or_default())
                }
                Err(error) => {
                    (json!({ "type": "unreadable", "error": error_chain(error) }), Vec::new())
                }
            };
            shown.insert(at, entry);
        }
    }
    shown
}

/// A sort key that orders `__0_9` before `__0_10`.
pub(super) fn natural(name: &str) -> Vec<(u128, String)> {
    let mut parts = vec![(0_u128, String::new())];
    let mut digits = false;
    for c in name.chars() {
        match (c.to_digit(10), parts.last_mut()) {
            (Some(digit), Some((number, _))) if digits => {
                *number = number.saturating_mul(10).saturating_add(digit.into());
            }
            (Some(digit), _) => {
                parts.push((digit.into(), String::new()));
                digits = true;
            }
            (None, Some((_, text))) => {
                text.push(c);
                digits = false;
            }
            (None, None) => {}
        }
    }
    parts
}

/// The placement of stored data; `None` for data that reading computes.
fn stored(placement: Placement, metadata: &CheckpointMetadata) -> Option<Placement> {
    let encoding = metadata.encoding(&placement);
    let made = placement.byte_len == 0 && encoding.is_some_and(|e| e.layout == Layout::Computed);
    (!made).then_some(placement)
}

/// Encodes a tensor of a subclass by the call that rebuilds it: `rebuild(function, class,
/// arguments, attributes)`.
fn wrapped_json(tensor: &WrappedTensor, call: &serde_json::Value) -> serde_json::Value {
    let dtype = tensor.dtype.name();
    let attributes = call.get("args").and_then(|args| args.get(3));
    json!({
        "type": &*tensor.class,
        "dtype": dtype,
        "shape": tensor.shape.to_vec(),
        "state": attributes.cloned().unwrap_or_default(),
    })
}

fn tensor_summary(tensor: &TensorEntry, metadata: &CheckpointMetadata) -> TensorSummary {
    let chunks = tensor.chunks.iter().map(|chunk| {
        let placement = chunk.placement.and_then(|placement| stored(placement, metadata));
        let file = placement.and_then(|placement| metadata.file(placement.file));
        ChunkSummary {
            offsets: chunk.offsets.to_vec(),
            sizes: chunk.sizes.to_vec(),
            file: file.map(ToString::to_string),
            byte_offset: placement.map(|placement| placement.byte_offset),
            byte_len: placement.map(|placement| placement.byte_len),
        }
    });
    TensorSummary {
        dtype: tensor.dtype.name(),
        shape: tensor.shape.to_vec(),
        bytes: tensor.byte_len().unwrap_or(u64::MAX),
        chunks: chunks.collect(),
        device: None,
    }
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn ranks_sort_as_numbers() {
        let mut names = ["__10_0", "__0_10", "__0_9", "__1_0", "a"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(names, ["__0_9", "__0_10", "__1_0", "__10_0", "a"]);
    }
}
