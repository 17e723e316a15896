//! A checkpoint as a report: one value with everything worth seeing, and the page that shows it.
//!
//! [`report`] reads a checkpoint's index and objects; [`Report::of`] makes the same of a
//! [`Summary`] at hand. A [`Report`] serializes to JSON, and [`render_html`] makes it one HTML page
//! that needs nothing else: no network, no file beside it.

mod build;
mod kind;
mod numbers;
mod page;

use std::sync::Arc;

use dcp_core::CheckpointError;
use serde::Serialize;
use serde_json::Value as Json;

use crate::job::JobOptions;
use crate::jobs::inspect::{Summary, inspect};
use crate::source::Source;

pub use numbers::{NonFinite, Numbers};
pub use page::render_html;

/// Everything that a report shows. Sums are of all that is stored, also of what was cut from the
/// lists.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// What the checkpoint was asked for by.
    pub name: String,
    /// The format, such as `torch_dcp`.
    pub format: String,
    /// What is known of the save that made it, as pairs of a label and a text.
    pub provenance: Vec<(&'static str, String)>,
    /// Counts and sizes.
    pub totals: Totals,
    /// Element types, the one with the most bytes first.
    pub dtypes: Vec<DtypeShare>,
    /// Tensors of the model, of the optimizer, and others; only those there are.
    pub parts: Vec<PartShare>,
    /// Layers by their number, one stack for each list of layers.
    pub stacks: Vec<Stack>,
    /// The files, in natural order.
    pub files: Vec<FileShare>,
    /// What each rank wrote, where names of files tell.
    pub ranks: Vec<RankShare>,
    /// The largest file over the mean file; `None` with fewer than two.
    pub file_imbalance: Option<f64>,
    /// The same of ranks.
    pub rank_imbalance: Option<f64>,
    /// What is NaN or infinite, if statistics were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub non_finite: Option<NonFinite>,
    /// What is stored, in the order of the checkpoint.
    pub keys: Vec<KeyReport>,
    /// What is not listed.
    pub cut: Cut,
}

/// Counts and sizes of a whole checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Totals {
    /// Tensors.
    pub tensors: u64,
    /// Values that are no tensors.
    pub objects: u64,
    /// Parts of tensors.
    pub chunks: u64,
    /// Elements of the model's tensors.
    pub parameters: u64,
    /// Elements of all tensors.
    pub elements: u64,
    /// Bytes of the elements of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files that are there.
    pub file_bytes: u64,
    /// Files.
    pub files: u64,
    /// Files that are not there.
    pub missing_files: u64,
}

/// What is stored in one element type.
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

/// To what a tensor belongs, as its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Part {
    /// Parameters and buffers.
    Model,
    /// What an optimizer keeps for them.
    Optimizer,
}

/// What belongs to one part.
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

/// Layers that follow each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stack {
    /// What stands before the number, such as `model.layers`.
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
    /// Its length; `None` when it is not there.
    pub bytes: Option<u64>,
    /// The rank that wrote it, where its name tells.
    pub rank: Option<u64>,
    /// Chunks that lie in it.
    pub chunks: u64,
}

/// What one rank wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RankShare {
    /// The rank.
    pub rank: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of those that are there.
    pub bytes: u64,
    /// Chunks that lie in them.
    pub chunks: u64,
}

/// One key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum KeyReport {
    /// A tensor.
    Tensor {
        /// Its FQN; the middle of a very long one is replaced by `…`.
        name: String,
        /// The element type, by PyTorch's name without `torch.`.
        dtype: &'static str,
        /// Elements per axis.
        shape: Vec<u64>,
        /// Bytes of its elements.
        bytes: u64,
        /// To what it belongs.
        part: Part,
        /// How many chunks it has.
        chunk_count: u64,
        /// Its first chunks, if not all.
        chunks: Chunks,
        /// Statistics of its elements, if they were taken.
        #[serde(skip_serializing_if = "Option::is_none")]
        numbers: Option<Box<Numbers>>,
    },
    /// Any other value.
    Object {
        /// Its FQN, likewise.
        name: String,
        /// It, as [`value_json`](crate::value_json()) writes it; missing if it is too long.
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<Json>,
        /// Characters of its JSON.
        value_len: u64,
    },
}

/// The chunks of a tensor, as columns of one row each. `offsets` and `sizes` have as many numbers a
/// row as the tensor has axes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Chunks {
    /// Where each begins, per axis.
    pub offsets: Vec<u64>,
    /// Elements per axis.
    pub sizes: Vec<u64>,
    /// The position of its file in [`Report::files`], where known.
    pub files: Vec<Option<u32>>,
    /// First stored byte in the file.
    pub byte_offsets: Vec<Option<u64>>,
    /// Stored bytes.
    pub byte_lens: Vec<Option<u64>>,
}

/// How much of long lists is not in a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Cut {
    /// Keys.
    pub keys: u64,
    /// Chunks of keys that are listed.
    pub chunks: u64,
    /// Values of objects.
    pub values: u64,
    /// Files.
    pub files: u64,
    /// Histograms of tensors.
    pub histograms: u64,
}

/// How long the lists of a report may be, so that a page of any checkpoint can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReportLimits {
    /// Keys.
    pub keys: usize,
    /// Files.
    pub files: usize,
    /// Numbers that describe chunks; a chunk has two for each axis, and three more.
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
    /// 100 000 keys, 70 000 files, 200 000 chunks of two axes, 64 KiB of a value, 4 MiB of all
    /// values, 500 characters of a name, 16 MiB of all names of keys and as much of files, 500 000 bins of
    /// histograms: some 40 MB for a checkpoint of such a size, and no more than twice that for one
    /// that was made to be large.
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
/// tensor. `name` is what it is called on the page.
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
    if let Some(dcp) = source.dcp_reader()
        && let Ok(Some(sidecar)) = dcp.sidecar().await
    {
        known("Written by", Some(sidecar.tool));
        known("World size", Some(sidecar.world_size.to_string()));
    }
    Ok(report)
}

impl Report {
    /// The report of what a summary says, its lists no longer than `limits`.
    #[must_use]
    pub fn of(name: &str, summary: &Summary, limits: &ReportLimits) -> Self {
        build::build(name, summary, limits)
    }
}
