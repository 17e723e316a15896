//! Reads the needed bytes of large chunks straight into their destinations.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dcp_core::metadata::Layout;
use dcp_core::storage::ReadInto;
use dcp_core::text::Quoted;
use dcp_core::{Buffer, CheckpointError, FormatError, Key, PlanError, TensorView};
use futures_util::future::join;

use super::blobs::{Blob, Content, Target};
use super::pieces::{Fetch, Fetches, Piece, Span, scatter};
use super::{Context, compare_saved};
use crate::crc_parts::CrcParts;
use crate::torch_tensor::TensorBlob;
use crate::torch_zip::{PartialBlob, Record};

/// Bytes at the beginning and end of an archive that describe its tensor.
const HEADER_BYTES: u64 = 1024;
/// The maximum number of bytes to read for a description at once.
const NEED_MAX: u64 = 1 << 20;

/// A request that is ready to send.
pub(super) struct Request {
    chunk: Arc<Chunk>,
    target: usize,
    fetch: Fetch,
}

/// The requests of one blob, created when they are sent.
#[derive(Default)]
pub(super) struct Requests(Option<Box<dyn Iterator<Item = Request> + Send>>);

impl Iterator for Requests {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.0.as_mut()?.next()
    }
}

/// A blob whose elements are stored unencoded.
struct Chunk {
    blob: Blob,
    targets: Vec<Destination>,
    /// The offset of the elements in the file.
    start: u64,
    /// Bytes that no request has read yet.
    left: AtomicU64,
    check: Option<Check>,
}

struct Destination {
    view: TensorView,
    left: AtomicU64,
}

/// The checksums of what was read from a record, if all of it is read.
struct Check {
    record: Record,
    /// Offset, length and CRC-32 of each range that was read.
    seen: Mutex<Vec<(u64, u64, u32)>>,
    /// The parts that earlier reads of the record found, if this one reads a part.
    earlier: Option<SharedParts>,
}

/// The checksums of a record that several reads share.
type SharedParts = Arc<Mutex<CrcParts>>;

/// The most parts of a record that are remembered.
const PARTS_MAX: usize = 4096;

/// Locates the elements of a blob. Returns the blob if they must be decoded.
pub(super) async fn prepare(
    ctx: &Context,
    blob: Blob,
) -> Result<Result<Requests, Blob>, CheckpointError> {
    let blob_start = blob.placement.byte_offset;
    let wanted = blob.wanted_bytes();
    let mut earlier = None;
    let (elements, record) = if blob.encoding.layout == Layout::Raw {
        (0..blob.placement.byte_len, ctx.record(&blob.placement))
    } else {
        let (located, saved) = join(located(ctx, &blob, wanted), ctx.saved()).await;
        let ((tensor, parts), saved) = (located?, saved?);
        earlier = parts;
        blob.check_layout(tensor.layout()).map_err(|error| blob.locate(error))?;
        match tensor.element_range() {
            None => return Ok(Err(blob)),
            Some(range) => {
                let record = Some(tensor.storage().clone()).filter(|record| record.data == range);
                let mut record = record;
                if let Some(record) = &mut record {
                    compare_saved(&saved, &blob, record).map_err(|error| blob.locate(error))?;
                }
                (range, record)
            }
        }
    };
    if elements.end - elements.start != blob.raw_len() || elements.end > blob.placement.byte_len {
        let problem = format!("{} bytes are stored", elements.end - elements.start);
        return Err(blob.locate(FormatError::new("tensor", problem)));
    }
    let Content::Tensor { targets, .. } = &blob.content else { return Ok(Err(blob)) };
    let mut destinations = Vec::with_capacity(targets.len());
    for target in targets {
        let view = ctx.sink.destination(&target.item)?;
        target.check_view(&view, &blob.fqn)?;
        if target.byte_len == 0 {
            ctx.sink.commit(&target.item)?;
        }
        destinations.push(Destination { view, left: AtomicU64::new(target.byte_len) });
    }
    let is_whole = wanted >= blob.raw_len();
    // More parts would not be remembered, so they are not hashed either.
    let rememberable = blob.runs() <= PARTS_MAX as u64;
    let earlier = earlier.filter(|_| ctx.verify_parts && !is_whole && rememberable);
    let check = record
        .filter(|record| ctx.verify && record.crc32.is_some() && (is_whole || earlier.is_some()))
        .map(|record| Check { record, seen: Mutex::default(), earlier });
    let chunk = Arc::new(Chunk {
        start: blob_start.saturating_add(elements.start),
        targets: destinations,
        left: AtomicU64::new(wanted),
        check,
        blob,
    });
    let (gap, scratch) = (ctx.coalesce_gap, ctx.scratch_per_request);
    let requests = (0..chunk.targets.len()).flat_map(move |target| {
        let fetches = chunk.fetches(target, gap, scratch);
        let chunk = Arc::clone(&chunk);
        fetches.into_iter().flatten().map(move |fetch| Request {
            chunk: Arc::clone(&chunk),
            target,
            fetch,
        })
    });
    Ok(Ok(Requests(Some(Box::new(requests)))))
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
    let Some(known) = ctx.archives.as_ref().filter(|_| wanted < blob.raw_len()) else {
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

/// Sends a request and copies its bytes to their destinations.
pub(super) async fn execute(ctx: &Context, request: Request) -> Result<(), CheckpointError> {
    let Request { chunk, target, fetch } = request;
    let brought = match fetch {
        Fetch::Direct(pieces) => chunk.fill(ctx, target, pieces).await?,
        Fetch::Scatter(spans) => chunk.scatter(ctx, target, spans).await?,
    };
    ctx.report(brought);
    chunk.account(ctx, target, brought)
}

impl Chunk {
    fn key(&self) -> &Key {
        &self.blob.key
    }

    fn wanted(&self) -> &[Target] {
        match &self.blob.content {
            Content::Tensor { targets, .. } => targets,
            Content::Object { .. } => &[],
        }
    }

    fn fetches(&self, target: usize, gap: u64, scratch: u64) -> Option<Fetches> {
        let Content::Tensor { sizes, targets, .. } = &self.blob.content else { return None };
        let (target, destination) = (targets.get(target)?, self.targets.get(target)?);
        Some(Fetches::new(&target.region, sizes, &destination.view, gap, scratch))
    }

    fn view(&self, target: usize) -> Result<&TensorView, CheckpointError> {
        let destination = self.targets.get(target);
        destination.map(|destination| &destination.view).ok_or_else(|| {
            self.blob.locate(FormatError::new("tensor", "it has no such destination"))
        })
    }

    async fn fill(
        &self,
        ctx: &Context,
        target: usize,
        pieces: Vec<Piece>,
    ) -> Result<u64, CheckpointError> {
        let memory = self.view(target)?.memory();
        let mut reads = Vec::with_capacity(pieces.len());
        for run in pieces.chunk_by(|a, b| a.dst.end == b.dst.start) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let whole = memory.lend(first.dst.start..last.dst.end).map_err(|source| {
                CheckpointError::Memory { fqn: self.blob.fqn.to_string(), source }
            })?;
            let buffers = whole.divide(run.iter().map(|piece| piece.dst.len()));
            reads.extend(run.iter().zip(buffers).map(|(piece, buffer)| ReadInto {
                byte_offset: self.start.saturating_add(piece.src),
                buffer,
            }));
        }
        let buffers = self.read(ctx, reads).await?;
        let mut brought = 0;
        for (piece, buffer) in pieces.iter().zip(&buffers) {
            self.see(piece.src, buffer);
            brought += buffer.len() as u64;
        }
        Ok(brought)
    }

    async fn scatter(
        &self,
        ctx: &Context,
        target: usize,
        spans: Vec<Span>,
    ) -> Result<u64, CheckpointError> {
        let span_len =
            |span: &Span| usize::try_from(span.src.end - span.src.start).unwrap_or(usize::MAX);
        let len = spans.iter().map(span_len).fold(0, usize::saturating_add);
        let scratch = Buffer::try_zeroed(len).ok_or_else(|| PlanError::OutOfMemory {
            what: format!("parts of {}", Quoted(&self.blob.fqn)),
            byte_len: len as u64,
        })?;
        let reads = spans
            .iter()
            .zip(scratch.divide(spans.iter().map(span_len)))
            .map(|(span, buffer)| ReadInto {
                byte_offset: self.start.saturating_add(span.src.start),
                buffer,
            })
            .collect();
        let buffers = self.read(ctx, reads).await?;
        let view = self.view(target)?;
        let mut brought = 0;
        for (span, buffer) in spans.into_iter().zip(&buffers) {
            self.see(span.src.start, buffer);
            brought += span.pieces.iter().map(|piece| piece.dst.len() as u64).sum::<u64>();
            scatter(view, span.pieces, buffer, span.src.start)
                .map_err(|error| self.blob.scatter_error(error))?;
        }
        Ok(brought)
    }

    async fn read(
        &self,
        ctx: &Context,
        reads: Vec<ReadInto>,
    ) -> Result<Vec<Buffer>, CheckpointError> {
        ctx.read(self.key(), reads).await.map_err(|error| self.blob.storage_error(error))
    }

    fn see(&self, start: u64, bytes: &[u8]) {
        if let Some(check) = &self.check {
            let crc32 = crc32fast::hash(bytes);
            let mut seen = check.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.push((start, bytes.len() as u64, crc32));
        }
    }

    /// Records what a request read. Commits destinations when they are full; if the CRC is checked,
    /// when all are full and it matches.
    fn account(&self, ctx: &Context, target: usize, brought: u64) -> Result<(), CheckpointError> {
        let (Some(destination), Some(wanted)) =
            (self.targets.get(target), self.wanted().get(target))
        else {
            return Ok(());
        };
        let target_done = destination.left.fetch_sub(brought, Ordering::AcqRel) == brought;
        let all_done = self.left.fetch_sub(brought, Ordering::AcqRel) == brought;
        match &self.check {
            None if target_done => ctx.sink.commit(&wanted.item),
            Some(check) if all_done => {
                check.verify().map_err(|error| self.blob.locate(error))?;
                let mut filled = self.wanted().iter().filter(|wanted| wanted.byte_len > 0);
                filled.try_for_each(|wanted| ctx.sink.commit(&wanted.item))
            }
            _ => Ok(()),
        }
    }
}

impl Check {
    /// Compares the CRC when the ranges cover the record, with those of earlier reads where this one
    /// reads a part. Ranges that repeat some bytes and omit others cannot be compared.
    fn verify(&self) -> Result<(), FormatError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.sort_unstable();
        seen.dedup();
        let mut own = CrcParts::new();
        let mut earlier =
            self.earlier.as_ref().map(|parts| parts.lock().unwrap_or_else(PoisonError::into_inner));
        let parts = earlier.as_deref_mut().unwrap_or(&mut own);
        for (start, len, part) in seen.drain(..) {
            let hasher = crc32fast::Hasher::new_with_initial_len(part, len);
            if !parts.add(start, start.saturating_add(len), hasher) || parts.len() > PARTS_MAX {
                *parts = CrcParts::new();
                return Ok(());
            }
        }
        let Some(crc32) = parts.whole(self.record.byte_len) else { return Ok(()) };
        *parts = CrcParts::new();
        self.record.check_crc32(crc32)
    }
}
