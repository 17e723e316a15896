//! The result of writing a checkpoint.

use std::sync::Arc;

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::Entry;
use dcp_formats::pickle::ReplacedObject;
use indexmap::IndexMap;
use serde::Serialize;

use crate::cast::CastReport;
use crate::error::ForeignCallable;
use crate::keys::unmatched::UnmatchedPattern;

/// The result of a writing job. Serialized, it is the output of `dcp convert --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ConversionReport {
    /// Whether this was a dry run, which writes nothing.
    pub dry_run: bool,
    /// Tensors written.
    pub tensors: usize,
    /// Objects written.
    pub objects: usize,
    /// Chunks of the written tensors.
    pub chunks: usize,
    /// The total size of all files in bytes.
    pub bytes: u64,
    /// The files, with their sizes in bytes.
    pub files: IndexMap<String, u64>,
    /// Objects that the format cannot store, by FQN.
    pub left_out: Vec<Arc<str>>,
    /// Keys that were left out because the target stores the model alone by default.
    pub not_taken: usize,
    /// Key patterns that match no key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<UnmatchedPattern>,
    /// Tensors of a dtype that the format has no name for. They are stored as bytes and described
    /// in the header under [`RAW`](crate::write::RAW).
    pub raw: Vec<Arc<str>>,
    /// Quantized tensors written as their stored integers, because the format stores no scale and
    /// zero point.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_scale: Vec<Arc<str>>,
    /// Tied tensors, whose bytes were written once: FQN → FQN of the written one. A `torch.save`
    /// file has both names, which share a storage. Safetensors files have the other name among
    /// their tensors and this one in the header.
    pub tied: IndexMap<Arc<str>, Arc<str>>,
    /// Python callables in the written objects that are not known to be harmless, all of them
    /// allowed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub callables: Vec<ForeignCallable>,
    /// Objects written as plain values, because some readers of the target lack their class.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<ReplacedClass>,
    /// The oldest version of the target's program that loads the result, if it is newer than the
    /// one the requested form is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_version: Option<&'static str>,
    /// The losses of casting, if tensors were cast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cast: Option<CastReport>,
    /// Of an average, the number of finite inputs per tensor whose sums overflowed, by FQN.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub overflowed: IndexMap<Arc<str>, u64>,
    /// The tensors that a dry run would write, by FQN.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub keys: IndexMap<Arc<str>, PlannedTensor>,
}

/// An object written as a plain value, because some readers of the target lack its class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReplacedClass {
    /// The path of the object: keys and positions, joined by dots.
    pub path: String,
    /// Its class, as `module.Name`.
    pub class: String,
    /// Whether it has no plain form and was left out.
    pub left_out: bool,
}

impl From<ReplacedObject> for ReplacedClass {
    fn from(object: ReplacedObject) -> Self {
        Self { path: object.path, class: object.class, left_out: !object.is_plain }
    }
}

/// A tensor that a dry run would write.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlannedTensor {
    /// The element type, by PyTorch's name without `torch.`.
    pub dtype: &'static str,
    /// Elements per axis.
    pub shape: Vec<u64>,
    /// Bytes of all elements.
    pub bytes: u64,
}

impl ConversionReport {
    /// Adds the tensors that a dry run would write.
    pub(crate) fn planned(mut self, metadata: &CheckpointMetadata) -> Self {
        self.dry_run = true;
        self.keys = metadata
            .iter()
            .filter_map(|(fqn, entry)| match entry {
                Entry::Tensor(tensor) if !self.tied.contains_key(fqn) => {
                    let planned = PlannedTensor {
                        dtype: tensor.dtype.name(),
                        shape: tensor.shape.to_vec(),
                        bytes: tensor.byte_len().unwrap_or(u64::MAX),
                    };
                    Some((Arc::clone(fqn), planned))
                }
                _ => None,
            })
            .collect();
        self
    }

    pub(crate) fn with_files(mut self, files: impl IntoIterator<Item = (String, u64)>) -> Self {
        self.files = files.into_iter().collect();
        self.bytes = self.files.values().fold(0, |sum, len| sum.saturating_add(*len));
        self
    }
}
