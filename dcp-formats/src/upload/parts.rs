//! Divides the bytes of a file into parts, from segments of its data.

use std::future::poll_fn;
use std::ops::Range;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use dcp_core::checkpoint::DataSource;
use dcp_core::{CheckpointError, FormatError, Payload, PlanError};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};

use super::{FileItem, FileSpec, Framing, ItemEncoder};

/// Pieces below this length are copied together, so that a part consists of few pieces.
const CRUMB_BYTES: usize = 4096;
/// Bytes that are encoded before other futures of the thread make progress, and the most by which
/// they exceed the length of a part.
const ENCODED_AT_ONCE: u64 = 1 << 20;

/// Builds the parts of a file, in order.
pub(super) struct Parts<'a> {
    items: &'a [FileItem],
    framing: &'a dyn Framing,
    data: &'a dyn DataSource,
    /// Requested segments in order, and how many there may be.
    pending: FuturesOrdered<BoxFuture<'a, Result<Payload, CheckpointError>>>,
    in_flight: usize,
    /// The item and offset of the next segment to request.
    next: (usize, u64),
    position: usize,
    /// The number of bytes of the current item that have arrived; `None` before its head.
    resolved: Option<u64>,
    /// Bytes that have arrived but did not fit into the last part.
    rest: Payload,
    /// Bytes beyond the end of the last part.
    beyond: Payload,
    crc32: crc32fast::Hasher,
    /// Whether `crc32` contains `rest`, whose checksum was known.
    has_rest: bool,
    encoder: Option<Box<dyn ItemEncoder>>,
    /// Bytes of the file so far, and where the current item begins.
    made: u64,
    item_start: u64,
}

impl<'a> Parts<'a> {
    pub(super) fn new(file: &FileSpec<'a>, data: &'a dyn DataSource, in_flight: usize) -> Self {
        Self {
            items: file.items,
            framing: file.framing,
            data,
            pending: FuturesOrdered::new(),
            in_flight: in_flight.max(1),
            next: (0, 0),
            position: 0,
            resolved: None,
            rest: Payload::default(),
            beyond: Payload::default(),
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

    /// The next part, of `limit` bytes or of what is left; `None` at the end of the file.
    pub(super) async fn next(&mut self, limit: u64) -> Result<Option<Payload>, CheckpointError> {
        let mut part = Gather::default();
        for piece in std::mem::take(&mut self.beyond).pieces() {
            part.push(piece.clone());
        }
        while part.len < limit {
            let Some(&FileItem { byte_len, .. }) = self.items.get(self.position) else { break };
            match self.resolved {
                None => {
                    self.item_start = self.made;
                    let before = self.framing.before(self.position)?;
                    if let Some(encoder) = &mut self.encoder {
                        encoder.begin(self.position)?;
                    }
                    self.emit(&mut part, before)?;
                    self.crc32 = crc32fast::Hasher::new();
                    self.resolved = Some(0);
                }
                _ if !self.rest.is_empty() => {
                    self.take(&mut part, limit)?;
                    if self.encoder.is_some() {
                        let_others_run().await;
                    }
                }
                Some(done) if done < byte_len => self.resolve(done, byte_len).await?,
                Some(_) => {
                    let crc32 = std::mem::take(&mut self.crc32).finalize();
                    let after = self.framing.after(self.position, crc32)?;
                    self.emit(&mut part, after)?;
                    self.end_item(&mut part)?;
                    self.resolved = None;
                    self.position += 1;
                }
            }
        }
        let Some(part) = part.finish() else { return Ok(None) };
        if part.len() <= limit {
            return Ok(Some(part));
        }
        self.beyond = part.slice(limit..part.len());
        Ok(Some(part.slice(0..limit)))
    }

    /// The end of a segment that begins at byte `done` of an item.
    fn segment_end(&self, done: u64, byte_len: u64) -> u64 {
        byte_len.min(done.saturating_add(self.data.segment_bytes().max(1)))
    }

    /// The item and range of the next segment to request.
    fn next_segment(&mut self) -> Option<(usize, Range<u64>)> {
        loop {
            let (position, done) = self.next;
            let &FileItem { item, byte_len } = self.items.get(position)?;
            if done >= byte_len {
                self.next = (position + 1, 0);
                continue;
            }
            let end = self.segment_end(done, byte_len);
            self.next = (position, end);
            return Some((item, done..end));
        }
    }

    /// Waits for the next segment, which begins at byte `done` of the item.
    async fn resolve(&mut self, done: u64, byte_len: u64) -> Result<(), CheckpointError> {
        while self.pending.len() < self.in_flight
            && let Some((item, range)) = self.next_segment()
        {
            let data = self.data;
            self.pending.push_back(Box::pin(async move { data.resolve(item, range).await }));
        }
        let end = self.segment_end(done, byte_len);
        let payload = self.pending.next().await.transpose()?.unwrap_or_default();
        if payload.len() != end - done {
            return Err(PlanError::SourceLength {
                fqn: self.framing.name(self.position).to_owned(),
                requested: done..end,
                byte_len,
                returned: payload.len(),
            }
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
    fn take(&mut self, part: &mut Gather, limit: u64) -> Result<(), CheckpointError> {
        let at_once = if self.encoder.is_some() { ENCODED_AT_ONCE } else { u64::MAX };
        let room = at_once.min(limit - part.len);
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
            self.emit(part, piece.clone())?;
        }
        Ok(())
    }

    /// Appends bytes of the current item to the part.
    fn emit(&mut self, part: &mut Gather, bytes: Bytes) -> Result<(), CheckpointError> {
        let before = part.len;
        match &mut self.encoder {
            None => part.push(bytes),
            Some(encoder) => encoder
                .push(&bytes, &mut |bytes| part.push(bytes))
                .map_err(|error| of_item(self.framing, self.position, error))?,
        }
        self.made += part.len - before;
        Ok(())
    }

    /// Appends what the encoder has of the current item, and reports its place.
    fn end_item(&mut self, part: &mut Gather) -> Result<(), CheckpointError> {
        let Some(encoder) = &mut self.encoder else { return Ok(()) };
        let before = part.len;
        encoder
            .finish(&mut |bytes| part.push(bytes))
            .map_err(|error| of_item(self.framing, self.position, error))?;
        self.made += part.len - before;
        self.framing.stored(self.position, self.item_start..self.made);
        Ok(())
    }
}

fn of_item(framing: &dyn Framing, position: usize, error: FormatError) -> CheckpointError {
    let problem = format!("{:?}: {}", framing.name(position), error.problem());
    FormatError::new("item to write", problem).with_source(error).into()
}

/// Returns pending once, so that other futures of the task make progress.
async fn let_others_run() {
    let mut has_run = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_run, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use dcp_core::Key;
    use dcp_testing::block_on;

    use super::*;

    /// Bytes that count up; every other segment comes with a checksum.
    #[derive(Debug)]
    struct Known;

    #[async_trait]
    impl DataSource for Known {
        async fn resolve(&self, _: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
            let bytes: Vec<u8> = range.clone().map(|byte| byte as u8).collect();
            let crc32 = crc32fast::hash(&bytes);
            let payload = Payload::from(bytes);
            let known = (range.start / self.segment_bytes()).is_multiple_of(2);
            Ok(if known { payload.with_crc32(crc32) } else { payload })
        }

        fn segment_bytes(&self) -> u64 {
            7
        }
    }

    /// Notes the checksums of items.
    #[derive(Debug, Default)]
    struct Noting(Mutex<Vec<u32>>);

    impl Framing for Noting {
        fn before(&self, _: usize) -> Result<Bytes, FormatError> {
            Ok(Bytes::new())
        }

        fn after(&self, _: usize, crc32: u32) -> Result<Bytes, FormatError> {
            self.0.lock().unwrap().push(crc32);
            Ok(Bytes::new())
        }

        fn needs_crc(&self, _: usize) -> bool {
            true
        }

        fn name(&self, _: usize) -> &'static str {
            "counting"
        }
    }

    #[test]
    fn checksums_of_segments_make_that_of_the_item() {
        let key = Key::new("file").unwrap();
        let lens = [0, 40, 5, 7];
        let items = lens.map(|byte_len| FileItem { item: 0, byte_len });
        for limit in [3, 10, 1000] {
            let framing = Noting::default();
            let file = FileSpec { key: &key, byte_len: 52, items: &items, framing: &framing };
            let mut parts = Parts::new(&file, &Known, 2);
            while block_on(parts.next(limit)).unwrap().is_some() {}
            let expected = lens.map(|len| crc32fast::hash(&Vec::from_iter(0..len as u8)));
            assert_eq!(*framing.0.lock().unwrap(), expected, "parts of {limit} bytes");
        }
    }
}
