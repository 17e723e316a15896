//! The archives of `.distcp` files: the bytes of a tensor in one, objects, and the checksums that a save
//! noted of them.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::storage::ReadInto;
use dcp_core::{Buffer, CheckpointError, FormatError, Key, TensorView, Value};
use futures_util::future::join;

use super::blobs::{Blob, Content};
use super::direct::SharedParts;
use super::pieces::{Pieces, ScatterError, fill, scatter};
use super::{Context, ExpectedCrc};
use crate::chunk_crcs::ChunkCrcs;
use crate::torch_object::decode_object;
use crate::torch_tensor::{ByteOrder, TensorBlob, TensorLayout};
use crate::torch_zip::{Method, PartialBlob, Record, Sparse};

/// Bytes at the beginning and end of an archive that describe its tensor.
const HEADER_BYTES: u64 = 1024;
/// The maximum number of bytes to read for a description at once.
const NEED_MAX: u64 = 1 << 20;

/// The CRC-32s that a save noted, by file.
pub(crate) type SavedCrcs = HashMap<Key, ChunkCrcs>;

/// Reads the CRC-32s that a save noted, once, when the first chunk is located.
#[async_trait]
pub(crate) trait SavedSource: Send + Sync {
    /// The CRC-32s; none where there are none.
    async fn saved(&self) -> Result<Arc<SavedCrcs>, CheckpointError>;
}

/// The state of a load of archives: checksums of the save, archives that are located.
#[derive(Default)]
pub(crate) struct Archives {
    /// The CRC-32s that the save noted, if they are compared.
    pub(crate) saved: Option<Arc<dyn SavedSource>>,
    /// Archives that earlier reads located, if the reader caches them.
    pub(crate) known: Option<Arc<KnownArchives>>,
    /// Whether checksums of chunks that are read in parts are compared.
    pub(crate) verify_parts: bool,
}

impl Context {
    /// The CRC-32s that the save noted; none if they are not compared.
    pub(super) async fn saved(&self) -> Result<Arc<SavedCrcs>, CheckpointError> {
        match &self.archives.saved {
            Some(source) if self.verify => source.saved().await,
            _ => Ok(Arc::default()),
        }
    }
}

/// The elements of a tensor in an archive.
pub(super) struct Located {
    /// Their bytes, from the start of the archive.
    pub(super) elements: Range<u64>,
    /// Their CRC-32, if the archive or the save has one.
    pub(super) crc: Option<ExpectedCrc>,
    /// The parts that earlier reads found, if parts are compared.
    pub(super) earlier: Option<SharedParts>,
}

/// Locates the elements of a tensor, of which `wanted` bytes are read; `None` if they must be decoded.
pub(super) async fn locate(
    ctx: &Context,
    blob: &Blob,
    wanted: u64,
) -> Result<Option<Located>, CheckpointError> {
    let (tensor, saved) = join(located(ctx, blob, wanted), ctx.saved()).await;
    let ((tensor, earlier), saved) = (tensor?, saved?);
    check_layout(blob, tensor.layout()).map_err(|error| blob.locate(error))?;
    let Some(elements) = tensor.element_range() else { return Ok(None) };
    let record = Some(tensor.storage().clone()).filter(|record| record.data == elements);
    let mut record = record;
    if let Some(record) = &mut record {
        compare_saved(&saved, blob, record).map_err(|error| blob.locate(error))?;
    }
    let crc = record.and_then(|record| {
        let Record { data, byte_len, crc32, .. } = record;
        Some(ExpectedCrc { start: data.start, byte_len, crc32: crc32? })
    });
    let earlier = earlier.filter(|_| ctx.archives.verify_parts);
    Ok(Some(Located { elements, crc, earlier }))
}

/// Reads as much of an archive as locating its tensor takes.
async fn describe(ctx: &Context, blob: &Blob) -> Result<TensorBlob, CheckpointError> {
    let len = blob.placement.byte_len;
    let mut archive = PartialBlob::new("torch archive", len, NEED_MAX);
    let head = 0..HEADER_BYTES.min(len);
    let tail = len.saturating_sub(HEADER_BYTES)..len;
    let starts = [head.start, tail.start];
    let ends = read_parts(ctx, blob, vec![head, tail]).await?;
    for (start, bytes) in starts.into_iter().zip(ends) {
        archive.add(start, bytes);
    }
    let read = async |range| {
        let mut parts = read_parts(ctx, blob, vec![range]).await?;
        Ok(parts.pop().unwrap_or_default())
    };
    archive.parse(TensorBlob::parse, read, |error| blob.locate(error)).await
}

async fn read_parts(
    ctx: &Context,
    blob: &Blob,
    ranges: Vec<Range<u64>>,
) -> Result<Vec<Bytes>, CheckpointError> {
    let reads = ranges.into_iter().map(|range| ReadInto {
        byte_offset: blob.placement.byte_offset.saturating_add(range.start),
        // At most NEED_MAX or HEADER_BYTES.
        buffer: Buffer::zeroed((range.end - range.start) as usize),
    });
    let read = ctx.read(&blob.key, reads.collect()).await;
    let buffers = read.map_err(|error| blob.storage_error(error))?;
    Ok(buffers.into_iter().map(Buffer::freeze).collect())
}

/// Archives whose tensors are located, so that a chunk that is read in parts is located once.
#[derive(Debug, Default)]
pub(crate) struct KnownArchives(Mutex<VecDeque<(Place, TensorBlob, SharedParts)>>);

/// File, offset and length.
type Place = (Key, u64, u64);

impl KnownArchives {
    /// The number of archives to keep; a job reads a few chunks at a time.
    const KEPT: usize = 64;

    fn get(&self, place: &Place) -> Option<(TensorBlob, SharedParts)> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.iter().find(|(at, ..)| at == place);
        found.map(|(_, tensor, parts)| (tensor.clone(), Arc::clone(parts)))
    }

    fn put(&self, place: Place, tensor: TensorBlob, parts: SharedParts) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= Self::KEPT {
            known.pop_front();
        }
        known.push_back((place, tensor, parts));
    }
}

/// The tensor of an archive of which `wanted` bytes of elements are read, and the checksums of what
/// earlier reads of parts found.
async fn located(
    ctx: &Context,
    blob: &Blob,
    wanted: u64,
) -> Result<(TensorBlob, Option<SharedParts>), CheckpointError> {
    let Some(known) = ctx.archives.known.as_ref().filter(|_| wanted < blob.raw_len()) else {
        return Ok((describe(ctx, blob).await?, None));
    };
    let place = (blob.key.clone(), blob.placement.byte_offset, blob.placement.byte_len);
    if let Some((tensor, parts)) = known.get(&place) {
        return Ok((tensor, Some(parts)));
    }
    let (tensor, parts) = (describe(ctx, blob).await?, SharedParts::default());
    known.put(place, tensor.clone(), Arc::clone(&parts));
    Ok((tensor, Some(parts)))
}

/// The CRC-32 that the save noted of a chunk or an object.
fn saved_crc(saved: &SavedCrcs, blob: &Blob) -> Option<u32> {
    saved.get(&blob.key)?.at(blob.placement.byte_offset)
}

/// Compares an encoded object with the checksum of the save.
fn compare_saved_object(saved: &SavedCrcs, blob: &Blob, bytes: &[u8]) -> Result<(), FormatError> {
    let Some(saved) = saved_crc(saved, blob) else { return Ok(()) };
    let found = crc32fast::hash(bytes);
    if found == saved {
        return Ok(());
    }
    let problem = format!(
        "its CRC-32 is {found:08x}, the save noted {saved:08x}: these are not the bytes of this save"
    );
    Err(FormatError::new("object", problem))
}

/// Compares the checksum in an archive with that of the save: an archive of another save is sound in
/// itself. An archive without one gets that of the save. A quantized tensor is saved as an object, whose
/// checksum is that of all of its archive.
fn compare_saved(saved: &SavedCrcs, blob: &Blob, record: &mut Record) -> Result<(), FormatError> {
    if blob.is_quantized() {
        return Ok(());
    }
    match (record.crc32, saved_crc(saved, blob)) {
        (_, None) => Ok(()),
        (Some(stored), Some(saved)) if stored != saved => {
            let problem = format!(
                "its CRC-32 is {stored:08x}, the save noted {saved:08x}: these are not the bytes of \
                 this save"
            );
            Err(FormatError::new("archive record", problem).at(record.data.start))
        }
        (_, Some(saved)) => {
            record.crc32 = Some(saved);
            Ok(())
        }
    }
}

/// Fails if the metadata and the blob disagree on dtype or shape. Bugs of PyTorch (2.15) write
/// such checkpoints and load wrong data from them.
fn check_layout(blob: &Blob, found: &TensorLayout) -> Result<(), FormatError> {
    match &blob.content {
        Content::Tensor { dtype, sizes, .. }
            if (found.dtype(), found.sizes()) != (*dtype, sizes) =>
        {
            Err(FormatError::new(
                "tensor",
                format!(
                    "it is {} of shape {}, the metadata says {dtype} of {sizes}",
                    found.dtype(),
                    found.sizes()
                ),
            ))
        }
        _ => Ok(()),
    }
}

/// The object in an archive.
pub(super) fn object(saved: &SavedCrcs, blob: &Blob, bytes: &Bytes) -> Result<Value, FormatError> {
    compare_saved_object(saved, blob, bytes)?;
    decode_object(bytes)
}

/// The elements of a chunk, decoded from its archive.
pub(super) enum Elements<'a> {
    /// Row-major, little-endian.
    InOrder(Cow<'a, [u8]>),
    /// Elements to gather from a storage.
    Strided { layout: TensorLayout, byte_order: ByteOrder, storage: Cow<'a, [u8]> },
}

impl Elements<'_> {
    /// Copies `pieces` of the chunk to `view`.
    pub(super) fn copy(&self, view: &TensorView, pieces: Pieces) -> Result<(), ScatterError> {
        match self {
            Self::InOrder(bytes) => scatter(view, pieces, bytes, 0),
            Self::Strided { layout, byte_order, storage } => fill(view, pieces, |start, out| {
                let gathered = layout.gather_part(storage, *byte_order, start, out);
                gathered.map_err(ScatterError::Source)
            }),
        }
    }
}

/// Decodes the elements of a chunk from its archive; at most `limit` bytes.
pub(super) fn elements<'a>(
    ctx: &Context,
    saved: &SavedCrcs,
    blob: &Blob,
    bytes: &'a [u8],
    limit: u64,
) -> Result<Elements<'a>, FormatError> {
    if blob.is_quantized() {
        compare_saved_object(saved, blob, bytes)?;
    }
    let tensor = TensorBlob::parse(&Sparse::whole(bytes))?.ready()?;
    check_layout(blob, tensor.layout())?;
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
