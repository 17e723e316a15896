//! Finds tensors of subclasses that the index lists as plain tensors.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::metadata::{Entry, Layout, ObjectEntry, Placement, TensorEntry, WrappedTensor};
use dcp_core::storage::StorageExt;
use dcp_core::{CheckpointError, CheckpointMetadata, Storage};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::torch_tensor::{is_too_short, wrapped_in};
use crate::torch_zip::PartialBlob;

/// Bytes at each end of an archive to read first.
const ENDS: u64 = 4 << 10;
/// The maximum number of bytes to read of one archive.
const NEED_MAX: u64 = 1 << 20;

/// Presents single-chunk tensors of subclasses as objects. PyTorch's planner (2.15) records the
/// dtype and shape that such a tensor reports; only archives too short for these are examined.
pub(super) async fn show_as_objects(
    storage: &dyn Storage,
    metadata: &mut CheckpointMetadata,
) -> Result<(), CheckpointError> {
    let suspects: Vec<_> = metadata
        .iter()
        .filter_map(|(fqn, entry)| {
            let placement = suspect(metadata, entry.as_tensor()?)?;
            Some((Arc::clone(fqn), placement))
        })
        .collect();
    let shown = &*metadata;
    let looks: Vec<_> =
        suspects.into_iter().map(|(fqn, placement)| look(storage, shown, fqn, placement)).collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let found: Vec<_> = stream::iter(looks).buffered(parallelism).try_collect().await?;
    for (fqn, placement, tensor) in found.into_iter().flatten() {
        let path = metadata.get(&fqn).and_then(|entry| entry.path().cloned());
        let mut object = ObjectEntry::new(Some(placement)).with_tensor(tensor);
        object.path = path;
        metadata.insert(fqn, Entry::Object(object));
    }
    Ok(())
}

/// The placement of a single-chunk tensor whose archive is too short for its elements.
fn suspect(metadata: &CheckpointMetadata, tensor: &TensorEntry) -> Option<Placement> {
    let chunk = tensor.chunks.get(0).filter(|_| tensor.chunks.len() == 1)?;
    let whole = chunk.sizes == &*tensor.shape && chunk.offsets.iter().all(|offset| *offset == 0);
    let placement = chunk.placement.filter(|_| whole)?;
    let elements = tensor.byte_len().unwrap_or(u64::MAX);
    is_found(metadata, &placement, elements).then_some(placement)
}

/// Whether readers examine an archive that the index lists as a tensor with `elements` bytes.
fn is_found(metadata: &CheckpointMetadata, placement: &Placement, elements: u64) -> bool {
    let Some(encoding) = metadata.encoding(placement) else { return false };
    let plain = encoding.layout == Layout::TorchArchive && encoding.transforms.is_empty();
    plain && is_too_short(placement.byte_len, elements)
}

/// Whether a reader finds this tensor of a subclass, once the index lists it as PyTorch does: as a
/// tensor. Its archive must be shorter than that of a plain tensor, and uncompressed.
#[must_use]
pub fn shows_wrapped(
    metadata: &CheckpointMetadata,
    placement: &Placement,
    tensor: &WrappedTensor,
) -> bool {
    let volume = tensor.shape.checked_volume();
    let elements = volume.and_then(|n| n.checked_mul(tensor.dtype.size() as u64));
    is_found(metadata, placement, elements.unwrap_or(u64::MAX))
}

type Found = (Arc<str>, Placement, WrappedTensor);

/// Reads the archive. An unreadable one is left to the reader that needs it.
async fn look(
    storage: &dyn Storage,
    metadata: &CheckpointMetadata,
    fqn: Arc<str>,
    placement: Placement,
) -> Result<Option<Found>, CheckpointError> {
    let Some(key) = metadata.file(placement.file) else { return Ok(None) };
    let len = placement.byte_len;
    let read = async |range: std::ops::Range<u64>| -> Result<Bytes, CheckpointError> {
        let start = placement.byte_offset.saturating_add(range.start);
        let end = placement.byte_offset.saturating_add(range.end);
        Ok(storage.read_range(key, start..end).await?)
    };
    let mut archive = PartialBlob::new("torch archive", len, NEED_MAX);
    for range in [0..ENDS.min(len), len.saturating_sub(ENDS)..len] {
        let start = range.start;
        let Ok(bytes) = read(range).await else { return Ok(None) };
        archive.add(start, bytes);
    }
    let found = archive.parse(wrapped_in, read, CheckpointError::from).await;
    Ok(found.ok().flatten().map(|tensor| (fqn, placement, tensor)))
}
