//! Reads whole blobs: objects, small tensors, and those that need decoding.

use std::borrow::Cow;

use bytes::Bytes;
use dcp_core::metadata::Layout;
use dcp_core::{CheckpointError, FormatError};
use futures_util::future::join;

use super::blobs::{Blob, Content};
use super::pieces::{Pieces, ScatterError, fill, scatter};
use super::transform::undo;
use super::{Context, SavedCrcs, compare_saved, compare_saved_object};
use crate::expansion::ItemKind;
use crate::torch_object::decode_object;
use crate::torch_tensor::{ByteOrder, TensorBlob, TensorLayout};
use crate::torch_zip::{Method, Sparse};

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
            let bytes = match undo(&stored, transforms, limit) {
                Ok(Cow::Borrowed(_)) => stored.clone(),
                Ok(Cow::Owned(bytes)) => bytes.into(),
                Err(error) => return Err(blob.locate(error)),
            };
            compare_saved_object(saved, blob, &bytes).map_err(|error| blob.locate(error))?;
            let value = decode_object(&bytes).map_err(|error| blob.locate(error))?;
            for item in items {
                ctx.sink.object(item, value.clone())?;
                ctx.report(stored.len() as u64);
            }
        }
        Content::Tensor { sizes, targets, .. } => {
            let limit = chunk_limit(ctx, blob).map_err(|error| blob.locate(error))?;
            let bytes = undo(&stored, transforms, limit).map_err(|error| blob.locate(error))?;
            let elements =
                elements(ctx, saved, blob, &bytes, limit).map_err(|error| blob.locate(error))?;
            for target in targets {
                let view = ctx.sink.destination(&target.item)?;
                target.check_view(&view, &blob.fqn)?;
                let pieces = Pieces::new(&target.region, sizes, &view, u64::MAX);
                let filled = match &elements {
                    Elements::InOrder(bytes) => scatter(&view, pieces, bytes, 0),
                    Elements::Strided { layout, byte_order, storage } => {
                        fill(&view, pieces, |start, out| {
                            layout
                                .gather_part(storage, *byte_order, start, out)
                                .map_err(ScatterError::Source)
                        })
                    }
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

/// The elements of a chunk.
enum Elements<'a> {
    /// Row-major, little-endian.
    InOrder(Cow<'a, [u8]>),
    /// Elements to gather from a storage.
    Strided { layout: TensorLayout, byte_order: ByteOrder, storage: Cow<'a, [u8]> },
}

fn elements<'a>(
    ctx: &Context,
    saved: &SavedCrcs,
    blob: &Blob,
    bytes: &'a [u8],
    limit: u64,
) -> Result<Elements<'a>, FormatError> {
    if blob.encoding.layout == Layout::Raw {
        if let Some(record) = ctx.record(&blob.placement) {
            record.check_crc32(crc32fast::hash(bytes))?;
        }
        return Ok(Elements::InOrder(Cow::Borrowed(bytes)));
    }
    if blob.is_quantized() {
        compare_saved_object(saved, blob, bytes)?;
    }
    let tensor = TensorBlob::parse(&Sparse::whole(bytes))?.ready()?;
    blob.check_layout(tensor.layout())?;
    let mut record = tensor.storage().clone();
    if tensor.element_range().is_some_and(|range| range == record.data) {
        compare_saved(saved, blob, &mut record)?;
    }
    if !ctx.verify {
        record.crc32 = None;
    }
    if record.method == Method::Deflated && record.byte_len > limit {
        let problem = format!("{} bytes to inflate for {}", record.byte_len, blob.raw_len());
        return Err(FormatError::new("archive record", problem).at(record.data.start));
    }
    let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
    let kept = bytes.get(at(record.data.start)..at(record.data.end)).unwrap_or_default();
    let storage = record.decode(kept, limit)?;
    Ok(match tensor.element_range() {
        Some(range) => Elements::InOrder(Cow::Borrowed(
            bytes.get(at(range.start)..at(range.end)).unwrap_or_default(),
        )),
        None => Elements::Strided {
            layout: tensor.layout().clone(),
            byte_order: tensor.byte_order(),
            storage,
        },
    })
}
