//! A checkpoint as a report: one value, and the HTML page that renders it.
//!
//! [`report`] reads a checkpoint's index and objects; [`Report::of`] builds the same from a
//! [`Summary`]. A [`Report`] serializes to JSON. [`render_html`] renders it as one self-contained
//! HTML page, which loads nothing from the network or from other files.

mod build;
mod kind;
mod numbers;
mod of_checkpoint;
mod page;

use std::sync::Arc;

use dcp_core::CheckpointError;
use serde::Serialize;
use serde_json::Value as Json;

use crate::inspect::{SidecarSummary, Summary, inspect};
use crate::options::JobOptions;
use crate::source::Source;

pub use numbers::{NonFinite, Numbers};
pub use page::render_html;

/// The contents of a report. Totals cover everything stored, including what the lists omit.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The checkpoint's name on the page.
    pub name: String,
    /// The format, such as `torch_dcp`.
    pub format: String,
    /// Facts about the save, as pairs of a label and a text.
    pub provenance: Vec<(&'static str, String)>,
    /// Counts and sizes.
    pub totals: Totals,
    /// Dtypes, largest first.
    pub dtypes: Vec<DtypeShare>,
    /// Tensors of the model, of the optimizer, and others; parts without tensors are absent.
    pub parts: Vec<PartShare>,
    /// Layers by number, one stack for each list of layers.
    pub stacks: Vec<Stack>,
    /// The files, in natural order.
    pub files: Vec<FileShare>,
    /// The bytes of each rank, where file names contain the rank.
    pub ranks: Vec<RankShare>,
    /// The ratio of the largest file to the mean; `None` with fewer than two files.
    pub file_imbalance: Option<f64>,
    /// The ratio of the largest rank to the mean; `None` with fewer than two ranks.
    pub rank_imbalance: Option<f64>,
    /// NaNs and infinities, if statistics were computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub non_finite: Option<NonFinite>,
    /// The entries, in the order of the checkpoint.
    pub keys: Vec<KeyReport>,
    /// The number of items that the lists omit.
    pub cut: Truncation,
}

/// Totals of a whole checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Totals {
    /// Tensors.
    pub tensors: u64,
    /// Values that are no tensors.
    pub objects: u64,
    /// Chunks of tensors.
    pub chunks: u64,
    /// Elements of the model's tensors.
    pub parameters: u64,
    /// Elements of all tensors.
    pub elements: u64,
    /// Bytes of the elements of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files that exist.
    pub file_bytes: u64,
    /// Files.
    pub files: u64,
    /// Missing files.
    pub missing_files: u64,
}

/// The tensors of one dtype.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DtypeShare {
    /// PyTorch's name without `torch.`.
    pub dtype: &'static str,
    /// Tensors.
    pub tensors: u64,
    /// Their elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The part of a training state, inferred from the tensor's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Part {
    /// Parameters and buffers.
    Model,
    /// Optimizer state.
    Optimizer,
}

/// The tensors of one part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartShare {
    /// The part.
    pub part: Part,
    /// Its tensors.
    pub tensors: u64,
    /// Their elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A list of layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stack {
    /// The name before the number, such as `model.layers`.
    pub name: String,
    /// The layers, by number.
    pub layers: Vec<LayerShare>,
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LayerShare {
    /// Its number.
    pub layer: u64,
    /// Tensors of the model and of the optimizer.
    pub tensors: u64,
    /// Bytes of the model's tensors.
    pub model_bytes: u64,
    /// Bytes of the optimizer's tensors.
    pub optimizer_bytes: u64,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileShare {
    /// Its name.
    pub name: String,
    /// Its length in bytes; `None` when it is missing.
    pub bytes: Option<u64>,
    /// The rank that wrote it, if its name contains the rank.
    pub rank: Option<u64>,
    /// The number of chunks in it.
    pub chunks: u64,
}

/// The files of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RankShare {
    /// The rank.
    pub rank: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of the files that exist.
    pub bytes: u64,
    /// The number of chunks in them.
    pub chunks: u64,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum KeyReport {
    /// A tensor.
    Tensor {
        /// Its FQN; `…` replaces the middle of a very long one.
        name: String,
        /// The element type, by PyTorch's name without `torch.`.
        dtype: &'static str,
        /// Elements per axis.
        shape: Vec<u64>,
        /// Bytes of its elements.
        bytes: u64,
        /// The part to which it belongs.
        part: Part,
        /// The number of its chunks.
        chunk_count: u64,
        /// Its first chunks, up to the limit.
        chunks: Chunks,
        /// Statistics of its elements, if computed.
        #[serde(skip_serializing_if = "Option::is_none")]
        numbers: Option<Box<Numbers>>,
    },
    /// Any other value.
    Object {
        /// Its FQN; `…` replaces the middle of a very long one.
        name: String,
        /// The value, as [`value_json`](crate::element::value_json()) writes it; `None` if it is
        /// too long.
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<Json>,
        /// Characters of its JSON.
        value_len: u64,
    },
}

/// The chunks of a tensor as columns. `offsets` and `sizes` have one number per axis for each
/// chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Chunks {
    /// Offsets in the tensor, per axis.
    pub offsets: Vec<u64>,
    /// Elements per axis.
    pub sizes: Vec<u64>,
    /// The position of the file in [`Report::files`], where known.
    pub files: Vec<Option<u32>>,
    /// First stored byte in the file.
    pub byte_offsets: Vec<Option<u64>>,
    /// Stored bytes.
    pub byte_lens: Vec<Option<u64>>,
}

/// The number of items that the lists of a report omit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Truncation {
    /// Keys.
    pub keys: u64,
    /// Chunks of listed keys.
    pub chunks: u64,
    /// Values of objects.
    pub values: u64,
    /// Files.
    pub files: u64,
    /// Histograms of tensors.
    pub histograms: u64,
}

/// Limits on the lists of a report, so that a browser opens the page of any checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReportLimits {
    /// Keys.
    pub keys: usize,
    /// Files.
    pub files: usize,
    /// Numbers that describe chunks: two for each axis, and three more, per chunk.
    pub chunk_numbers: usize,
    /// Characters of the JSON of one value.
    pub value_len: usize,
    /// Characters of the JSON of all values.
    pub values_len: usize,
    /// Characters of one name.
    pub name_len: usize,
    /// Bytes of the names and shapes of all keys, and of the names of all files.
    pub names_len: usize,
    /// Bins of all histograms.
    pub histogram_bins: usize,
}

impl Default for ReportLimits {
    /// 100 000 keys, 70 000 files, 200 000 chunks of two axes, 64 KiB per value, 4 MiB of values,
    /// 500 characters per name, 16 MiB of key names and 16 MiB of file names, 500 000 histogram
    /// bins. A page is then about 40 MB, and at most twice that for a checkpoint that is built to
    /// make it large.
    fn default() -> Self {
        Self {
            keys: 100_000,
            files: 70_000,
            chunk_numbers: 1_400_000,
            value_len: 64 << 10,
            values_len: 4 << 20,
            name_len: 500,
            names_len: 16 << 20,
            histogram_bins: 500_000,
        }
    }
}

/// Reports on a checkpoint: reads its index, its objects, and the sizes of its files, but no
/// tensors. `name` is its name on the page.
///
/// # Errors
///
/// As [`inspect`].
pub async fn report(
    source: &Source,
    name: &str,
    options: &JobOptions,
    limits: &ReportLimits,
) -> Result<Report, CheckpointError> {
    let summary = inspect(source, options, |_| true).await?;
    let mut report = Report::of(name, &summary, limits);
    let metadata = source.metadata().await?;
    let mut known = |label, text: Option<String>| {
        if let Some(text) = text {
            report.provenance.push((label, build::shortened(&text, 4 * limits.name_len)));
        }
    };
    let text = |text: &Option<Arc<str>>| text.as_ref().map(ToString::to_string);
    known("Version", text(&metadata.provenance().version));
    known("First saved to", text(&metadata.provenance().checkpoint_id));
    known("Save id", text(&metadata.provenance().save_id));
    for (label, text) in summary.sidecar.iter().flat_map(SidecarSummary::labelled) {
        known(label, Some(text));
    }
    Ok(report)
}

impl Report {
    /// Builds a report from a summary, with lists of at most `limits`.
    #[must_use]
    pub fn of(name: &str, summary: &Summary, limits: &ReportLimits) -> Self {
        build::build(name, summary, limits)
    }
}
