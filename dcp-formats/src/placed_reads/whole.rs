//! Reads whole blobs: objects, small tensors, and those that need decoding.

use std::borrow::Cow;

use bytes::Bytes;
use dcp_core::metadata::Layout;
use dcp_core::{CheckpointError, FormatError};
use futures_util::future::join;

use super::archives::SavedCrcs;
use super::blobs::{Blob, Content};
use super::pieces::{Pieces, scatter};
use super::transform::undo;
use super::{Context, archives};
use crate::expansion::ItemKind;

/// The maximum size of an archive without the elements of its tensor.
const ARCHIVE_EXTRA: u64 = 1 << 20;

/// Reads nearby blobs of one file with one request.
pub(super) async fn read_span(ctx: &Context, blobs: Vec<Blob>) -> Result<(), CheckpointError> {
    let Some(first) = blobs.first() else { return Ok(()) };
    let start = first.placement.byte_offset;
    let end = blobs.iter().map(Blob::end).max().unwrap_or(start);
    let (bytes, saved) = join(ctx.read_range(&first.key, start..end), ctx.saved()).await;
    let bytes = bytes.map_err(|error| first.storage_error(error))?;
    let saved = saved?;
    for blob in blobs {
        let from = usize::try_from(blob.placement.byte_offset - start).unwrap_or(usize::MAX);
        let to = usize::try_from(blob.end() - start).unwrap_or(usize::MAX);
        if from > to || to > bytes.len() {
            return Err(blob.locate(FormatError::new("checkpoint", "its bytes are missing")));
        }
        deliver(ctx, &saved, &blob, bytes.slice(from..to))?;
    }
    Ok(())
}

/// Decodes a blob and passes it to the sink.
fn deliver(
    ctx: &Context,
    saved: &SavedCrcs,
    blob: &Blob,
    stored: Bytes,
) -> Result<(), CheckpointError> {
    let transforms = &blob.encoding.transforms;
    match &blob.content {
        Content::Object { items } => {
            let limit = ItemKind::Object.expanded_max(stored.len() as u64, ctx.scratch);
            let bytes = match undo(&stored, transforms, &ctx.transforms, limit) {
                Ok(Cow::Borrowed(_)) => stored.clone(),
                Ok(Cow::Owned(bytes)) => bytes.into(),
                Err(error) => return Err(blob.locate(error)),
            };
            let value =
                archives::object(saved, blob, &bytes).map_err(|error| blob.locate(error))?;
            for item in items {
                ctx.sink.object(item, value.clone())?;
                ctx.report(stored.len() as u64);
            }
        }
        Content::Tensor { sizes, targets, .. } => {
            let limit = chunk_limit(ctx, blob).map_err(|error| blob.locate(error))?;
            let bytes = undo(&stored, transforms, &ctx.transforms, limit)
                .map_err(|error| blob.locate(error))?;
            let elements = match blob.encoding.layout {
                Layout::Raw => ctx
                    .expected_crc(&blob.placement)
                    .map_or(Ok(()), |crc| crc.compare(crc32fast::hash(&bytes)))
                    .map(|()| None),
                _ => archives::elements(ctx, saved, blob, &bytes, limit).map(Some),
            };
            let elements = elements.map_err(|error| blob.locate(error))?;
            for target in targets {
                let view = ctx.sink.destination(&target.item)?;
                target.check_view(&view, &blob.fqn)?;
                let pieces = Pieces::new(&target.region, sizes, &view, u64::MAX);
                let filled = match &elements {
                    None => scatter(&view, pieces, &bytes, 0),
                    Some(elements) => elements.copy(&view, pieces),
                };
                filled.map_err(|error| blob.scatter_error(error))?;
                ctx.sink.commit(&target.item)?;
                ctx.report(target.byte_len);
            }
        }
    }
    Ok(())
}

/// The maximum size of a decompressed chunk, in bytes: its size in the metadata, if the requested
/// memory or the stored bytes make that plausible.
fn chunk_limit(ctx: &Context, blob: &Blob) -> Result<u64, FormatError> {
    let (raw, stored, wanted) = (blob.raw_len(), blob.placement.byte_len, blob.wanted_bytes());
    let allowed = wanted.saturating_mul(2).max(ctx.scratch);
    let most = ItemKind::Chunk.expanded_max(stored, allowed);
    if raw > most && !blob.encoding.transforms.is_empty() {
        let problem = format!("{stored} bytes to decompress to {raw}, of which {wanted} are used");
        return Err(FormatError::new("stored bytes", problem));
    }
    Ok(raw.saturating_mul(2).min(most).saturating_add(ARCHIVE_EXTRA))
}
