//! What a job wrote, or would write.

use std::sync::Arc;

use dcp_core::{CheckpointMetadata, Entry};
use dcp_formats::pickle::ReplacedObject;
use indexmap::IndexMap;
use serde::Serialize;

use crate::cast::CastReport;
use crate::foreign_callable::ForeignCallable;
use crate::keys::unmatched::UnmatchedPattern;

/// What became of a checkpoint. Serialized, it is the output of `dcp convert --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WriteReport {
    /// Whether this is only what would have been written.
    pub dry_run: bool,
    /// Tensors written.
    pub tensors: usize,
    /// Objects written.
    pub objects: usize,
    /// Chunks that the tensors lie in now.
    pub chunks: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Each file and its bytes.
    pub files: IndexMap<String, u64>,
    /// Objects that the format cannot hold, by FQN.
    pub left_out: Vec<Arc<str>>,
    /// Keys of the checkpoint that were not taken because the target usually gets the model alone.
    pub not_taken: usize,
    /// Patterns that were given for keys and match none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<UnmatchedPattern>,
    /// Tensors of a dtype that the format has no name for; stored as bytes and described in the
    /// header under [`RAW`](crate::RAW).
    pub raw: Vec<Arc<str>>,
    /// Quantized tensors of which the format has no place for what makes real numbers of them:
    /// their stored integers were written, without scale and zero point.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_scale: Vec<Arc<str>>,
    /// Tensors that are the same memory as another one, whose bytes were not written again: FQN →
    /// FQN of that one. In a file of `torch.save` both names are there and share a storage; of
    /// safetensors files only the other name is among the tensors, and the header tells of this
    /// one.
    pub tied: IndexMap<Arc<str>, Arc<str>>,
    /// What was admitted into the copy, though Python would run it when it loads that and it is
    /// not known to be harmless.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub callables: Vec<ForeignCallable>,
    /// Objects that were written as plain values, because some readers of the target lack their
    /// class.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<ReplacedClass>,
    /// The oldest version of the target's program that loads what was written, where it is newer
    /// than the form of the target asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_version: Option<&'static str>,
    /// What was lost in casts, when tensors were cast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cast: Option<CastReport>,
    /// Of an average, how many numbers exceeded the dtype they were summed in, though all that
    /// went into them were finite, by FQN.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub overflowed: IndexMap<Arc<str>, u64>,
    /// Of a dry run, the tensors: FQN → what would be written.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub keys: IndexMap<Arc<str>, PlannedTensor>,
}

/// An object that was written as a plain value, because some readers of the target lack its class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReplacedClass {
    /// Keys and positions on the way to the object, joined by dots.
    pub path: String,
    /// Its class: `module.Name`.
    pub class: String,
    /// Whether it has no plain form and was left out.
    pub left_out: bool,
}

impl From<ReplacedObject> for ReplacedClass {
    fn from(object: ReplacedObject) -> Self {
        Self { path: object.path, class: object.class, left_out: !object.is_plain }
    }
}

/// A tensor that would be written.
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

impl WriteReport {
    /// Says of a dry run what there is to write.
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
