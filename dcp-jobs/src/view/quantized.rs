//! Presents quantized tensors as their stored objects, with scale and zero point.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Entry, Layout, ObjectEntry, Placement, TensorEntry, WrappedTensor};
use dcp_core::plan::LoadPlan;
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Storage, StorageReader};
use dcp_formats::dcp::DcpReader;
use dcp_formats::torch_object::decode_object;
use dcp_formats::torch_zip::check_archive;
use dcp_formats::without_transforms;

use crate::error::JobError;
use crate::integrity::checked_source::CheckedSource;
use crate::source::Source;

/// The maximum size of an archive that is copied, in bytes.
const ARCHIVE_MAX: u64 = 1 << 30;

/// A reader that presents the quantized tensors of another one as objects. Their elements have no
/// meaning without a scale, which only the stored archive contains, so a target that stores scales
/// gets the archive.
struct Quantized {
    inner: Source,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    /// The placements of the archives of these entries.
    archives: HashMap<u32, Placement>,
}

/// Presents the quantized tensors of `source` as objects.
///
/// # Errors
///
/// When a quantized tensor is not stored in one archive, or is not `writable` as an object.
pub(crate) async fn with_quantizers(
    source: CheckedSource,
    writable: impl Fn(&str) -> bool,
) -> Result<CheckedSource, JobError> {
    let inner_metadata = source.metadata().await?;
    let mut metadata = CheckpointMetadata::clone(&inner_metadata);
    let (mut archives, mut refused) = (HashMap::new(), Vec::new());
    for (index, (fqn, entry)) in inner_metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor().filter(|t| t.dtype.is_quantized()) else { continue };
        let (Some(placement), Ok(at)) = (archive(&inner_metadata, tensor), u32::try_from(index))
        else {
            refused.push((fqn, tensor.dtype, "is not stored in one archive of its own"));
            continue;
        };
        if !writable(fqn) {
            refused.push((fqn, tensor.dtype, "has no place in this format"));
            continue;
        }
        let class = format!("torch.Tensor ({})", tensor.dtype);
        let wrapped = WrappedTensor::new(class, tensor.dtype, tensor.shape.clone());
        let mut object = ObjectEntry::new(Some(placement)).with_tensor(wrapped);
        object.path = tensor.path.clone();
        metadata.insert(Arc::clone(fqn), Entry::Object(object));
        archives.insert(at, placement);
    }
    if let Some((fqn, dtype, why)) = refused.first() {
        let problem = format!(
            "cannot be written: it is {dtype} and needs a scale, which {why}; `Keys::exclude` leaves \
             it out"
        );
        return Err(JobError::not_storable(fqn.to_string(), problem));
    }
    if archives.is_empty() {
        return Ok(source);
    }
    let metadata = Arc::new(metadata);
    let inner = Source::clone(&source);
    let reader = Quantized { inner, inner_metadata, metadata, archives };
    Ok(source.shown_by(Arc::new(reader)))
}

/// The placement of a tensor that one archive stores, compressed or not.
pub(crate) fn archive(metadata: &CheckpointMetadata, tensor: &TensorEntry) -> Option<Placement> {
    let chunk = tensor.chunks.get(0).filter(|_| tensor.chunks.len() == 1)?;
    let whole = chunk.sizes == &*tensor.shape && chunk.offsets.iter().all(|offset| *offset == 0);
    let placement = chunk.placement.filter(|at| whole && at.byte_len <= ARCHIVE_MAX)?;
    let is_archive = metadata.encoding(&placement)?.layout == Layout::TorchArchive;
    is_archive.then_some(placement)
}

/// Reads the value of the tensor or object `fqn` from its archive, and compares all bytes of that
/// with their checksums.
pub(crate) async fn archived_value(
    source: &Source,
    metadata: &CheckpointMetadata,
    fqn: &str,
    placement: Placement,
) -> Result<dcp_core::Value, CheckpointError> {
    let place = metadata.file(placement.file).zip(metadata.encoding(&placement));
    let Some((key, encoding)) = place else {
        return Err(FormatError::new("index", format!("{fqn:?} is in no file")).into());
    };
    let end = placement.byte_offset.saturating_add(placement.byte_len);
    let storage: &dyn Storage = &*source.storage;
    let stored = storage.read_range(key, placement.byte_offset..end).await?;
    let decoded = |encoded: Bytes| check_archive(&encoded).and_then(|()| decode_object(&encoded));
    let registered = source.extension::<DcpReader>().map(|reader| reader.transforms().clone());
    let registered = registered.unwrap_or_default();
    let value = without_transforms(stored, encoding, &registered).and_then(decoded);
    Ok(value.map_err(|error| error.of_item(fqn).in_file(key.as_str(), placement.byte_offset))?)
}

impl Quantized {
    async fn read_archive(
        &self,
        entry: u32,
        placement: Placement,
    ) -> Result<dcp_core::Value, CheckpointError> {
        let fqn = &*self.metadata.entry_name(entry as usize);
        archived_value(&self.inner, &self.metadata, fqn, placement).await
    }
}

#[async_trait]
impl StorageReader for Quantized {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let mut others = LoadPlan::default();
        for item in &plan.items {
            let Some(placement) = self.archives.get(&item.entry) else {
                others.items.push(item.clone());
                continue;
            };
            sink.object(item, self.read_archive(item.entry, *placement).await?)?;
            report += ReadReport::new(placement.byte_len, placement.byte_len);
        }
        if !others.items.is_empty() {
            report += self.inner.reader.read(&self.inner_metadata, &others, sink).await?;
        }
        Ok(report)
    }
}

impl fmt::Debug for Quantized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.archives.len();
        f.debug_struct("Quantized").field("tensors", &tensors).finish_non_exhaustive()
    }
}
