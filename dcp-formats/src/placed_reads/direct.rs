//! Reads the needed bytes of large chunks straight into their destinations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::error::TensorError;
use dcp_core::metadata::Layout;
use dcp_core::storage::ReadInto;
use dcp_core::text::Quoted;
use dcp_core::{Buffer, CheckpointError, FormatError, Key, TensorView};

use super::archives::Located;
use super::blobs::{Blob, Content, Target};
use super::pieces::{Fetch, Fetches, Piece, Span, scatter};
use super::{Context, ExpectedCrc, archives};
use crate::crc_parts::CrcParts;

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
    crc: ExpectedCrc,
    /// Offset, length and CRC-32 of each range that was read.
    seen: Mutex<Vec<(u64, u64, u32)>>,
    /// The parts that earlier reads of the record found, if this one reads a part.
    earlier: Option<SharedParts>,
}

/// The checksums of a record that several reads share.
pub(super) type SharedParts = Arc<Mutex<CrcParts>>;

/// The most parts of a record that are remembered.
const PARTS_MAX: usize = 4096;

/// Locates the elements of a blob. Returns the blob if they must be decoded.
pub(super) async fn prepare(
    ctx: &Context,
    blob: Blob,
) -> Result<Result<Requests, Blob>, CheckpointError> {
    let blob_start = blob.placement.byte_offset;
    let wanted = blob.wanted_bytes();
    let located = match blob.encoding.layout {
        Layout::Raw => Located {
            elements: 0..blob.placement.byte_len,
            crc: ctx.expected_crc(&blob.placement),
            earlier: None,
        },
        _ => match archives::locate(ctx, &blob, wanted).await? {
            Some(located) => located,
            None => return Ok(Err(blob)),
        },
    };
    let Located { elements, crc, earlier } = located;
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
    let earlier = earlier.filter(|_| !is_whole && rememberable);
    let check = crc.filter(|_| ctx.verify && (is_whole || earlier.is_some())).map(|crc| Check {
        crc,
        seen: Mutex::default(),
        earlier,
    });
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
        let scratch = Buffer::try_zeroed(len).ok_or_else(|| TensorError::OutOfMemory {
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
        let Some(crc32) = parts.whole(self.crc.byte_len) else { return Ok(()) };
        *parts = CrcParts::new();
        self.crc.compare(crc32)
    }
}
