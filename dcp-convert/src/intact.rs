//! Comparing stored chunks with their checksums before anything is written from them.
//!
//! A reader compares the CRC-32 of a chunk when one read takes all of it. Jobs read large
//! tensors in segments, and along other cuts than the chunks': then nobody would notice damage,
//! and the new file would seal it under a fresh checksum. Such chunks are read once before the
//! job begins to write, so their bytes are read twice; what a single read takes whole is not.

use std::sync::Arc;

use dcp_core::{
    CheckpointError, CheckpointMetadata, Encoding, FormatError, Key, Layout, Region,
    StorageErrorKind,
};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::deep;
use crate::job::{JobOptions, Source};
use crate::placed::Placed;
use crate::tensor_read::TensorReader;

/// Chunks up to this many bytes are always read, and checked, as a whole.
const ALWAYS_WHOLE: u64 = 64 << 10;
/// What an archive holds besides its tensor, rounded up. In a longer one the tensor is a view of
/// a larger storage, whose CRC-32 no read of the tensor can check.
const ARCHIVE_EXTRA: u64 = 4096;

/// The chunks of a tensor that lie in `taken`, but that no read of a job takes whole: it reads
/// `taken` as `cuts`, each in segments of `segment_bytes`.
pub(crate) fn unchecked_chunks(
    reader: &TensorReader,
    taken: &Region,
    cuts: &[Region],
    segment_bytes: u64,
) -> Result<Vec<Placed>, CheckpointError> {
    let (metadata, tensor) = (reader.metadata(), reader.tensor()?);
    let element = tensor.dtype.size() as u64;
    let bytes = |region: &Region| region.volume().saturating_mul(element);
    let at_once: Vec<_> = cuts.iter().filter(|cut| bytes(cut) <= segment_bytes).collect();
    let archive = Encoding::new(Layout::TorchArchive);
    let mut found = Vec::new();
    for (chunk, region) in reader.chunks() {
        let placement = tensor.chunks.get(*chunk as usize).and_then(|chunk| chunk.placement);
        let Some(placement) = placement else { continue };
        let plain = metadata.encoding(&placement) == Some(&archive);
        if !plain || placement.byte_len <= ALWAYS_WHOLE || !taken.contains(region) {
            continue;
        }
        let is_view = placement.byte_len > bytes(region).saturating_add(ARCHIVE_EXTRA);
        if is_view || !at_once.iter().any(|cut| cut.contains(region)) {
            found.push(Placed {
                fqn: Arc::clone(reader.fqn()),
                entry: reader.entry(),
                chunk: Some(*chunk),
                placement,
            });
        }
    }
    Ok(found)
}

/// Bytes that reading `items` takes.
pub(crate) fn byte_len(items: &[Placed]) -> u64 {
    items.iter().map(|item| item.placement.byte_len).fold(0, u64::saturating_add)
}

/// Reads `items` and fails with the first that differs from its checksum or the index. The
/// caller has told the progress of [`byte_len`] bytes more.
pub(crate) async fn refuse_damaged(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    items: &[Placed],
    options: &JobOptions,
) -> Result<(), CheckpointError> {
    let job = &deep::Job::new(source, metadata, options);
    let checks: Vec<_> =
        items
            .iter()
            .map(|item| async move {
                job.item(item).await.map_err(|error| named(error, item, metadata))
            })
            .collect();
    stream::iter(checks).buffered(options.parallelism.max(1)).try_collect().await
}

/// An error that names the tensor and its file, as those of the reader do.
fn named(error: CheckpointError, item: &Placed, metadata: &CheckpointMetadata) -> CheckpointError {
    let fqn = &item.fqn;
    let file = metadata.file(item.placement.file).map_or("", Key::as_str);
    match error {
        CheckpointError::Format(error) => {
            FormatError::new(error.what(), format!("{fqn:?}: {}", error.problem()))
                .in_file(file, error.byte_offset().unwrap_or(item.placement.byte_offset))
                .into()
        }
        CheckpointError::Storage(error)
            if matches!(error.kind(), StorageErrorKind::Truncated | StorageErrorKind::NotFound) =>
        {
            FormatError::new("checkpoint", format!("{fqn:?}: its bytes are missing"))
                .in_file(file, item.placement.byte_offset)
                .with_source(error)
                .into()
        }
        other => other,
    }
}
