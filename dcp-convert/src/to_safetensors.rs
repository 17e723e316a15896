//! A whole checkpoint as one safetensors file.

use std::sync::Arc;

use dcp_core::{CheckpointMetadata, DType, Dims, Entry, Region, StorageReader, TensorEntry};
use dcp_formats::safetensors::{self, SafetensorsItem};
use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, json};

use crate::check::refuse_unsound;
use crate::data::{CheckpointData, Part};
use crate::error::ConvertError;
use crate::intact::{self, refuse_damaged, unchecked_chunks};
use crate::job::{JobOptions, Source};
use crate::target::Target;
use crate::tensor_read::TensorReader;

/// The entry of the header's `__metadata__` that lists objects which were left out, as a JSON
/// list of FQNs.
pub const LEFT_OUT: &str = "dcp.left_out";

/// The entry of the header's `__metadata__` that describes tensors of a type the format has no
/// name for: a JSON object, FQN → `{"dtype", "shape"}`. Their bytes are stored as `U8`, with an
/// axis more for the bytes of an element.
pub const RAW: &str = "dcp.raw";

/// What became of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SafetensorsReport {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Objects, which the format cannot hold, by FQN.
    pub left_out: Vec<Arc<str>>,
    /// Tensors whose dtype the format has no name for; stored as bytes and described in the
    /// header under [`RAW`].
    pub raw: Vec<Arc<str>>,
}

/// Writes every tensor of a checkpoint, under its FQN, to one safetensors file, piece by piece.
/// The file appears under its name when it is complete. Chunks that are too large to be compared
/// with their checksums on the way are read once before that, so damage is never carried over.
///
/// # Errors
///
/// When the target exists, the checkpoint is unsound or damaged, or a storage fails; then there
/// is no new file.
pub async fn to_safetensors(
    source: &Source,
    target: &Target,
    options: &JobOptions,
) -> Result<SafetensorsReport, ConvertError> {
    target.check().await?;
    let metadata = source.metadata().await?;
    refuse_unsound(&metadata)?;
    let mut report = SafetensorsReport::default();
    let mut items = Vec::new();
    let mut parts = Vec::new();
    let decoded = source.decoded_once(1);
    let mut unchecked = Vec::new();
    let segment_bytes = options.segment_bytes(4);
    let mut raw = Map::new();
    let mut total = 0_u64;
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        let Entry::Tensor(tensor) = entry else {
            report.left_out.push(Arc::clone(fqn));
            continue;
        };
        let (dtype, shape) = match representable(tensor) {
            true => (tensor.dtype, tensor.shape.clone()),
            false => {
                raw.insert(
                    fqn.to_string(),
                    json!({ "dtype": tensor.dtype.name(), "shape": &*tensor.shape }),
                );
                report.raw.push(Arc::clone(fqn));
                (DType::UInt8, with_byte_axis(tensor))
            }
        };
        total = total.saturating_add(tensor.byte_len().unwrap_or(0));
        items.push(SafetensorsItem { name: Arc::clone(fqn), dtype, shape });
        let (reader, region) = whole_tensor(&decoded, &metadata, index, tensor)?;
        let cuts = std::slice::from_ref(&region);
        unchecked.extend(unchecked_chunks(&reader, &region, cuts, segment_bytes)?);
        let element_bytes = tensor.dtype.size() as u64;
        parts.push(Part::Tensor { reader: Arc::new(reader), region, element_bytes });
    }
    report.tensors = items.len();
    options.start(total.saturating_add(intact::byte_len(&unchecked)));
    refuse_damaged(source, &metadata, &unchecked, options).await?;
    let mut header = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
    if !report.left_out.is_empty() {
        header.insert(LEFT_OUT.to_owned(), json!(report.left_out).to_string());
    }
    if !raw.is_empty() {
        header.insert(RAW.to_owned(), serde_json::Value::Object(raw).to_string());
    }
    let data = Arc::new(CheckpointData {
        storage: Arc::clone(&source.storage),
        parts,
        segment_bytes,
        options: options.clone(),
    });
    let creator = target.creator();
    let written = safetensors::write(&*creator, &target.key, &items, &header, data, None).await?;
    report.bytes = written.byte_len;
    Ok(report)
}

/// Whether the format can say what the tensor is.
fn representable(tensor: &TensorEntry) -> bool {
    let packed_scalar = tensor.dtype == DType::Float4E2M1FnX2 && tensor.shape.ndim() == 0;
    safetensors::dtype_name(tensor.dtype).is_some() && !packed_scalar
}

fn with_byte_axis(tensor: &TensorEntry) -> Dims {
    tensor.shape.iter().copied().chain([tensor.dtype.size() as u64]).collect()
}

/// A reader of the tensor at position `index`, and all of it as a box.
fn whole_tensor(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    index: usize,
    tensor: &TensorEntry,
) -> Result<(TensorReader, Region), ConvertError> {
    let reader = TensorReader::new(Arc::clone(reader), Arc::clone(metadata), index)?;
    let region = Region::full(tensor.shape.clone())
        .map_err(|error| ConvertError::unsupported("a tensor", error.to_string()))?;
    Ok((reader, region))
}
