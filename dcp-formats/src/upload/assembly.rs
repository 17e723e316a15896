//! Makes the parts of a file of the segments of its data, in order.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use dcp_core::error::DataProblem;
use dcp_core::{CheckpointError, FormatError, Payload, PlanError};

use super::{FileItem, FileSpec, Framing, ItemEncoder};

/// Pieces below this length are copied together, so that a part consists of few pieces.
const CRUMB_BYTES: usize = 4096;
/// Bytes that are encoded before other futures of the thread make progress, and the most by which
/// they exceed the length of a part.
const ENCODED_AT_ONCE: u64 = 1 << 20;

/// The segments of a file's items, in order: positions in the data source, and byte ranges.
#[derive(Debug)]
pub(super) struct Segments {
    items: Arc<[FileItem]>,
    segment_bytes: u64,
    /// The item and offset of the next segment.
    next: (usize, u64),
}

impl Segments {
    pub(super) fn new(file: &FileSpec<'_>, segment_bytes: u64) -> Self {
        Self { items: Arc::clone(&file.items), segment_bytes, next: (0, 0) }
    }
}

impl Iterator for Segments {
    type Item = (usize, Range<u64>);

    fn next(&mut self) -> Option<(usize, Range<u64>)> {
        loop {
            let (position, done) = self.next;
            let &FileItem { item, byte_len } = self.items.get(position)?;
            if done >= byte_len {
                self.next = (position + 1, 0);
                continue;
            }
            let end = segment_end(done, byte_len, self.segment_bytes);
            self.next = (position, end);
            return Some((item, done..end));
        }
    }
}

/// The end of a segment that begins at byte `done` of an item.
fn segment_end(done: u64, byte_len: u64, segment_bytes: u64) -> u64 {
    byte_len.min(done.saturating_add(segment_bytes.max(1)))
}

/// The result of [`Assembly::next`]: a part, or what it needs.
pub(super) enum Step {
    /// The next part.
    Part(Payload),
    /// The next of the [`Segments`] is needed.
    Segment,
    /// Encoding takes long: others may run before the next call.
    Pause,
    /// The file has no more parts.
    End,
}

/// Divides the bytes of a file into parts, as segments of its data arrive.
pub(super) struct Assembly {
    items: Arc<[FileItem]>,
    framing: Arc<dyn Framing>,
    segment_bytes: u64,
    position: usize,
    /// The number of bytes of the current item that have arrived; `None` before its head.
    resolved: Option<u64>,
    /// Bytes that have arrived but are in no part.
    rest: Payload,
    /// The part under construction, and what is beyond its end.
    part: Gather,
    crc32: crc32fast::Hasher,
    /// Whether `crc32` contains `rest`, whose checksum was known.
    has_rest: bool,
    encoder: Option<Box<dyn ItemEncoder>>,
    /// Bytes of the file so far, and where the current item begins.
    made: u64,
    item_start: u64,
}

impl Assembly {
    pub(super) fn new(file: &FileSpec<'_>, segment_bytes: u64) -> Self {
        Self {
            items: Arc::clone(&file.items),
            framing: Arc::clone(&file.framing),
            segment_bytes,
            position: 0,
            resolved: None,
            rest: Payload::default(),
            part: Gather::default(),
            crc32: crc32fast::Hasher::new(),
            has_rest: false,
            encoder: file.framing.encoder(),
            made: 0,
            item_start: 0,
        }
    }

    /// Whether the file has exactly the bytes of its items and what is around them.
    pub(super) fn has_exact_len(&self) -> bool {
        self.encoder.is_none()
    }

    /// The next part, of `limit` bytes or of what is left at the end of the file.
    pub(super) fn next(&mut self, limit: u64) -> Result<Step, CheckpointError> {
        while self.part.len < limit {
            let Some(&FileItem { byte_len, .. }) = self.items.get(self.position) else { break };
            match self.resolved {
                None => {
                    self.item_start = self.made;
                    let before = self.framing.before(self.position)?;
                    if let Some(encoder) = &mut self.encoder {
                        encoder.begin(self.position)?;
                    }
                    self.emit(before)?;
                    self.crc32 = crc32fast::Hasher::new();
                    self.resolved = Some(0);
                }
                _ if !self.rest.is_empty() => {
                    self.take(limit)?;
                    if self.encoder.is_some() {
                        return Ok(Step::Pause);
                    }
                }
                Some(done) if done < byte_len => return Ok(Step::Segment),
                Some(_) => {
                    let crc32 = std::mem::take(&mut self.crc32).finalize();
                    let after = self.framing.after(self.position, crc32)?;
                    self.emit(after)?;
                    self.end_item()?;
                    self.resolved = None;
                    self.position += 1;
                }
            }
        }
        let Some(part) = std::mem::take(&mut self.part).finish() else { return Ok(Step::End) };
        if part.len() <= limit {
            return Ok(Step::Part(part));
        }
        let beyond = part.slice(limit..part.len());
        beyond.pieces().iter().for_each(|piece| self.part.push(piece.clone()));
        Ok(Step::Part(part.slice(0..limit)))
    }

    /// Receives the segment that [`next`](Self::next) needs.
    pub(super) fn feed(&mut self, payload: Payload) -> Result<(), CheckpointError> {
        let byte_len = self.items.get(self.position).map_or(0, |item| item.byte_len);
        let done = self.resolved.unwrap_or(0);
        let end = segment_end(done, byte_len, self.segment_bytes);
        if payload.len() != end - done {
            return Err(PlanError::Data(DataProblem::Source {
                fqn: self.framing.name(self.position).to_owned(),
                requested: done..end,
                byte_len,
                returned: payload.len(),
            })
            .into());
        }
        self.resolved = Some(end);
        let known = payload.crc32().filter(|_| self.framing.needs_crc(self.position));
        self.has_rest = known.is_some();
        if let Some(crc32) = known {
            let segment = crc32fast::Hasher::new_with_initial_len(crc32, payload.len());
            self.crc32.combine(&segment);
        }
        self.rest = payload;
        Ok(())
    }

    /// Moves bytes that have arrived to the part, up to its limit.
    fn take(&mut self, limit: u64) -> Result<(), CheckpointError> {
        let at_once = if self.encoder.is_some() { ENCODED_AT_ONCE } else { u64::MAX };
        let room = at_once.min(limit - self.part.len);
        let rest = std::mem::take(&mut self.rest);
        let now = if rest.len() > room {
            self.rest = rest.slice(room..rest.len());
            rest.slice(0..room)
        } else {
            rest
        };
        for piece in now.pieces() {
            if !self.has_rest && self.framing.needs_crc(self.position) {
                self.crc32.update(piece);
            }
            self.emit(piece.clone())?;
        }
        Ok(())
    }

    /// Appends bytes of the current item to the part.
    fn emit(&mut self, bytes: Bytes) -> Result<(), CheckpointError> {
        let before = self.part.len;
        match &mut self.encoder {
            None => self.part.push(bytes),
            Some(encoder) => encoder
                .push(&bytes, &mut |bytes| self.part.push(bytes))
                .map_err(|error| of_item(&*self.framing, self.position, error))?,
        }
        self.made += self.part.len - before;
        Ok(())
    }

    /// Appends what the encoder has of the current item, and reports its place.
    fn end_item(&mut self) -> Result<(), CheckpointError> {
        let Some(encoder) = &mut self.encoder else { return Ok(()) };
        let before = self.part.len;
        encoder
            .finish(&mut |bytes| self.part.push(bytes))
            .map_err(|error| of_item(&*self.framing, self.position, error))?;
        self.made += self.part.len - before;
        self.framing.stored(self.position, self.item_start..self.made);
        Ok(())
    }
}

fn of_item(framing: &dyn Framing, position: usize, error: FormatError) -> CheckpointError {
    let problem = format!("{:?}: {}", framing.name(position), error.problem());
    FormatError::new("item to write", problem).with_source(error).into()
}

/// A payload under construction.
#[derive(Default)]
struct Gather {
    pieces: Vec<Bytes>,
    crumbs: BytesMut,
    len: u64,
}

impl Gather {
    fn push(&mut self, piece: Bytes) {
        self.len += piece.len() as u64;
        if piece.len() < CRUMB_BYTES {
            self.crumbs.extend_from_slice(&piece);
        } else {
            self.flush();
            self.pieces.push(piece);
        }
    }

    fn flush(&mut self) {
        if !self.crumbs.is_empty() {
            self.pieces.push(self.crumbs.split().freeze());
        }
    }

    fn finish(mut self) -> Option<Payload> {
        self.flush();
        if self.pieces.is_empty() { None } else { Some(Payload::from(self.pieces)) }
    }
}
