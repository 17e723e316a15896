//! Blobs that are read whole: objects, small tensors, and those that have to be decoded.

use std::borrow::Cow;

use bytes::Bytes;
use dcp_core::{CheckpointError, FormatError, Layout};

use super::blobs::{Blob, Content};
use super::pieces::{Pieces, scatter};
use super::read::Context;
use super::transform::undo;
use crate::torch_object::decode_object;
use crate::torch_tensor::TensorBlob;
use crate::torch_zip::{Method, Sparse};

/// What a compressed object may become.
const OBJECT_MAX: u64 = 1 << 30;
/// What an archive may have besides the elements of its tensor.
const ARCHIVE_EXTRA: u64 = 1 << 20;

/// Reads blobs of one file that lie close together, in one request.
pub(super) async fn read_span(ctx: &Context, blobs: Vec<Blob>) -> Result<(), CheckpointError> {
    let Some(first) = blobs.first() else { return Ok(()) };
    let start = first.placement.byte_offset;
    let end = blobs.iter().map(Blob::end).max().unwrap_or(start);
    let bytes = ctx.read_range(&first.key, start..end).await;
    let bytes = bytes.map_err(|error| first.storage_error(error))?;
    for blob in blobs {
        let from = usize::try_from(blob.placement.byte_offset - start).unwrap_or(usize::MAX);
        let to = usize::try_from(blob.end() - start).unwrap_or(usize::MAX);
        if from > to || to > bytes.len() {
            return Err(blob.locate(FormatError::new("checkpoint", "its bytes are missing")));
        }
        deliver(ctx, &blob, bytes.slice(from..to))?;
    }
    Ok(())
}

/// Decodes a blob and gives it to the sink.
fn deliver(ctx: &Context, blob: &Blob, stored: Bytes) -> Result<(), CheckpointError> {
    let transforms = &blob.encoding.transforms;
    match &blob.content {
        Content::Object { items } => {
            let bytes = match undo(&stored, transforms, OBJECT_MAX) {
                Ok(Cow::Borrowed(_)) => stored.clone(),
                Ok(Cow::Owned(bytes)) => bytes.into(),
                Err(error) => return Err(blob.locate(error)),
            };
            let value = decode_object(&bytes).map_err(|error| blob.locate(error))?;
            for item in items {
                ctx.sink.object(item, value.clone())?;
                ctx.report(stored.len() as u64);
            }
        }
        Content::Tensor { sizes, targets, .. } => {
            let limit = blob.raw_len().saturating_mul(2).saturating_add(ARCHIVE_EXTRA);
            let bytes = undo(&stored, transforms, limit).map_err(|error| blob.locate(error))?;
            let elements =
                elements(ctx, blob, &bytes, limit).map_err(|error| blob.locate(error))?;
            for target in targets {
                let view = ctx.sink.destination(&target.item)?;
                target.check_view(&view, &blob.fqn)?;
                let pieces = Pieces::new(&target.region, sizes, &view, u64::MAX);
                scatter(&view, pieces, &elements, 0).map_err(|error| blob.scatter_error(error))?;
                ctx.sink.commit(&target.item)?;
                ctx.report(target.byte_len);
            }
        }
    }
    Ok(())
}

/// The elements of a chunk in row-major order, little-endian.
fn elements<'a>(
    ctx: &Context,
    blob: &Blob,
    bytes: &'a [u8],
    limit: u64,
) -> Result<Cow<'a, [u8]>, FormatError> {
    if blob.encoding.layout == Layout::Raw {
        return Ok(Cow::Borrowed(bytes));
    }
    let tensor = TensorBlob::parse(&Sparse::whole(bytes))?.ready()?;
    blob.check_layout(tensor.layout())?;
    let mut record = tensor.storage().clone();
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
    match tensor.element_range() {
        Some(range) => {
            Ok(Cow::Borrowed(bytes.get(at(range.start)..at(range.end)).unwrap_or_default()))
        }
        None => {
            tensor.layout().gather(&storage, tensor.byte_order(), blob.raw_len()).map(Cow::Owned)
        }
    }
}
