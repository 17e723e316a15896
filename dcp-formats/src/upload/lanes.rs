//! Sends a file on threads of its own, each of which reads a segment and writes it while it is in the
//! cache of its core.
//!
//! Where requests are system calls, handing bytes from the thread that reads them to one that
//! compares and one that writes costs more than these do. Two lanes read and write one file faster than
//! one reader and one writer: while one writes, the other reads.
//!
//! ```text
//! lane 0   take 0 ─ read ─ append 0 ─ write part ─ take 2 ─ read ──── append 2 ─ write …
//! lane 1   take 1 ─ read ────── waits ─ append 1 ─ write ─ take 3 ─ read ─ …
//!                               turn: 0 ▶ 1 ▶ 2 ▶ 3, in the order of the file
//! ```
//!
//! Reads and writes run side by side; only `append` is in turn. It feeds the segment to the framing of
//! the format and begins the parts that are complete, under the lock of [`State`]. So parts and bytes of a
//! file do not depend on the number of lanes or on which of them is faster.
//!
//! Invariants: segment `n` is appended after all before it, once; `turn` never passes a segment that
//! failed, and then `is_over` wakes every lane that waits for its turn. A lane that panics counts as failed
//! ([`Unfinished`]), and a future that is dropped takes the upload away ([`StopOnDrop`]), so that no
//! lane begins a part afterwards. The error that is kept is that of the earliest segment, so that it does
//! not depend on the lanes either.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crc32fast::Hasher;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::{Lane, OwnThreads, PartFuture, Upload};
use dcp_core::{CheckpointError, Payload, Storage};

use super::assembly::{Assembly, Segments, Step};
use super::{ByteProgress, FileSpec};
use crate::crc_parts::CrcParts;

/// The threads of one file, and the length of its parts.
#[derive(Debug)]
pub(super) struct Lanes {
    threads: Arc<dyn OwnThreads>,
    count: usize,
    pub(super) part_bytes: u64,
}

/// The upload, unless it was taken, and what became of the file.
pub(super) type Ended = (Option<Box<dyn Upload>>, Result<Sent, CheckpointError>);

/// The length and the checksum of a sent file.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) byte_len: u64,
    /// The CRC-32 of all bytes, if requested.
    pub(super) crc32: Option<u32>,
}

impl Lanes {
    /// Lanes for at most `in_flight` segments at once, where these pay: data and storage have blocking
    /// requests, and the storage takes parts as short as segments.
    pub(super) fn of(
        storage: &dyn Storage,
        file: &FileSpec<'_>,
        data: &Arc<dyn DataSource>,
        in_flight: usize,
    ) -> Option<Self> {
        let capabilities = storage.capabilities();
        let limits = capabilities.write_limits;
        let part_bytes = data.segment_bytes();
        let fits = (limits.part_bytes_min..=limits.part_bytes_max).contains(&part_bytes)
            && file.byte_len.div_ceil(part_bytes.max(1)) <= u64::from(limits.parts_max);
        let threads = data.own_threads().filter(|_| capabilities.blocking && fits)?;
        let count = in_flight.clamp(1, threads.count().max(1));
        Some(Self { threads, count, part_bytes })
    }

    /// Sends all parts of the file, and computes its CRC-32 if `hashed`. When it returns, no lane runs
    /// any more; if it is dropped, lanes write nothing that they have not begun.
    pub(super) async fn send(
        self,
        file: &FileSpec<'_>,
        data: &Arc<dyn DataSource>,
        upload: Box<dyn Upload>,
        hashed: bool,
        progress: Option<&ByteProgress>,
    ) -> Ended {
        let segment_bytes = data.segment_bytes();
        let state = State {
            segments: Segments::new(file, segment_bytes),
            taken: 0,
            turn: 0,
            assembly: Assembly::new(file, segment_bytes),
            upload: Some(upload),
            begun: 0,
            sent: 0,
            crc32s: hashed.then(CrcParts::new),
            failed: None,
        };
        let shared = Arc::new(Shared {
            data: Arc::clone(data),
            part_bytes: self.part_bytes,
            hashed,
            progress: progress.cloned(),
            state: Mutex::new(state),
            turns: Condvar::new(),
        });
        let stop = StopOnDrop(Some(&shared));
        // A long header is complete before the first segment.
        let first = shared.parts(&mut shared.state());
        let first = match first {
            Ok(parts) => shared.write(parts).await,
            Err(error) => Err(error),
        };
        if let Err(error) = first {
            return (shared.stop(), Err(error));
        }
        let of_lane = Arc::clone(&shared);
        let lane = move || -> Lane {
            let shared = Arc::clone(&of_lane);
            Box::pin(async move { shared.run_lane().await })
        };
        let lost = self.threads.run(self.count, Arc::new(lane)).await.err();
        stop.disarm();
        let mut state = shared.state();
        let outcome = match (state.failed.take(), lost) {
            (_, Some(error)) | (Some((_, error)), None) => Err(error),
            (None, None) => {
                let crc32 = state.crc32s.take().map(|crc32s| crc32s.whole(state.sent).unwrap_or(0));
                Ok(Sent { byte_len: state.sent, crc32 })
            }
        };
        (state.upload.take(), outcome)
    }
}

/// The state that the lanes of a file share.
struct Shared {
    data: Arc<dyn DataSource>,
    part_bytes: u64,
    hashed: bool,
    progress: Option<ByteProgress>,
    state: Mutex<State>,
    /// Signals each change of the turn, and the end.
    turns: Condvar,
}

struct State {
    segments: Segments,
    /// Segments that lanes have taken.
    taken: u64,
    /// The segment that is appended next.
    turn: u64,
    assembly: Assembly,
    /// None after the end.
    upload: Option<Box<dyn Upload>>,
    /// Bytes of parts that were begun, and of those that were written.
    begun: u64,
    sent: u64,
    crc32s: Option<CrcParts>,
    /// The number of the segment that failed, the earliest of several, and its error.
    failed: Option<(u64, CheckpointError)>,
}

/// A part that is to be written.
struct Part {
    byte_offset: u64,
    byte_len: u64,
    /// For its checksum.
    payload: Option<Payload>,
    writing: PartFuture,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads, appends and writes segments until there are no more. It blocks its thread while it waits
    /// for its turn.
    async fn run_lane(&self) {
        while let Some((number, item, range)) = self.take() {
            let unfinished = Unfinished(Some((self, number)));
            let written = async {
                let segment = self.data.resolve(item, range).await?;
                self.write(self.append(number, segment)?).await
            };
            let written = written.await;
            unfinished.end();
            if let Err(error) = written {
                self.fail(number, error);
            }
        }
    }

    /// The next segment, and its number.
    fn take(&self) -> Option<(u64, usize, Range<u64>)> {
        let mut state = self.state();
        if state.is_over() {
            return None;
        }
        let (item, range) = state.segments.next()?;
        let number = state.taken;
        state.taken += 1;
        Some((number, item, range))
    }

    /// Appends segment `number` after all before it. Returns the parts that are complete by it.
    fn append(&self, number: u64, segment: Payload) -> Result<Vec<Part>, CheckpointError> {
        let waits = |state: &mut State| state.turn != number && !state.is_over();
        let state = self.turns.wait_while(self.state(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.is_over() {
            return Err(CheckpointError::Canceled);
        }
        state.assembly.feed(segment)?;
        let parts = self.parts(&mut state)?;
        state.turn += 1;
        drop(state);
        self.turns.notify_all();
        Ok(parts)
    }

    /// Begins the parts that are complete.
    fn parts(&self, state: &mut State) -> Result<Vec<Part>, CheckpointError> {
        let mut parts = Vec::new();
        loop {
            match state.assembly.next(self.part_bytes)? {
                Step::Part(part) => {
                    let Some(upload) = &mut state.upload else {
                        return Err(CheckpointError::Canceled);
                    };
                    let (byte_offset, byte_len) = (state.begun, part.len());
                    state.begun += byte_len;
                    let payload = self.hashed.then(|| part.clone());
                    let writing = upload.put_part(part);
                    parts.push(Part { byte_offset, byte_len, payload, writing });
                }
                Step::Pause => {}
                Step::Segment | Step::End => return Ok(parts),
            }
        }
    }

    /// Writes the parts, one after the other.
    async fn write(&self, parts: Vec<Part>) -> Result<(), CheckpointError> {
        for Part { byte_offset, byte_len, payload, writing } in parts {
            let hasher = payload.map(|payload| {
                let mut hasher = Hasher::new();
                payload.pieces().iter().for_each(|piece| hasher.update(piece));
                hasher
            });
            writing.await?;
            {
                let mut state = self.state();
                state.sent += byte_len;
                if let (Some(crc32s), Some(hasher)) = (&mut state.crc32s, hasher) {
                    crc32s.add(byte_offset, byte_offset + byte_len, hasher);
                }
            }
            if let Some(progress) = &self.progress {
                progress(byte_len);
            }
        }
        Ok(())
    }

    /// Ends all lanes with the error of segment `number`, unless an earlier one has failed.
    fn fail(&self, number: u64, error: CheckpointError) {
        let is_cause = |error: &CheckpointError| !matches!(error, CheckpointError::Canceled);
        let mut state = self.state();
        let keeps = match &state.failed {
            Some((earlier, known)) => !is_cause(&error) || is_cause(known) && *earlier < number,
            None => false,
        };
        if !keeps {
            state.failed = Some((number, error));
        }
        drop(state);
        self.turns.notify_all();
    }

    /// Ends all lanes.
    fn stop(&self) -> Option<Box<dyn Upload>> {
        let upload = self.state().upload.take();
        self.turns.notify_all();
        upload
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.failed.is_some() || self.upload.is_none()
    }
}

/// Ends the lanes when the future that waits for them is dropped.
struct StopOnDrop<'a>(Option<&'a Shared>);

impl StopOnDrop<'_> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            drop(shared.stop());
        }
    }
}

/// A segment on its way. Ends the other lanes when its own panics: they would wait for its turn for ever.
struct Unfinished<'a>(Option<(&'a Shared, u64)>);

impl Unfinished<'_> {
    fn end(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some((shared, number)) = self.0 {
            shared.fail(number, CheckpointError::Canceled);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use async_trait::async_trait;
    use bytes::Bytes;
    use dcp_core::storage::{ObjectMeta, on_own_thread};
    use dcp_core::{FormatError, Key, StorageError};
    use dcp_testing::block_on;
    use futures_util::FutureExt as _;
    use futures_util::future::BoxFuture;
    use proptest::prelude::*;

    use super::super::{FileItem, Framing};
    use super::*;

    type Run = BoxFuture<'static, Result<(), CheckpointError>>;

    /// One thread for each lane.
    #[derive(Debug)]
    struct Threads;

    impl OwnThreads for Threads {
        fn count(&self) -> usize {
            usize::MAX
        }

        fn run(&self, count: usize, lane: Arc<dyn Fn() -> Lane + Send + Sync>) -> Run {
            Box::pin(async move {
                let run = || {
                    let lane = Arc::clone(&lane);
                    thread::spawn(move || on_own_thread(|| block_on(lane())))
                };
                let threads: Vec<_> = (0..count).map(|_| run()).collect();
                let ended = threads.into_iter().map(thread::JoinHandle::join);
                match ended.filter(Result::is_err).count() {
                    0 => Ok(()),
                    _ => Err(FormatError::new("lane", "it panicked").into()),
                }
            })
        }
    }

    /// Byte `n` of item `i` is `i + n`.
    #[derive(Debug)]
    struct Numbers {
        segment_bytes: u64,
        /// The fault at this byte of item 0.
        bad: Option<(u64, Bad)>,
        /// Calls so far.
        calls: AtomicU64,
    }

    #[derive(Clone, Copy, Debug)]
    enum Bad {
        Fails,
        Panics,
    }

    #[async_trait]
    impl DataSource for Numbers {
        async fn resolve(
            &self,
            item: usize,
            range: Range<u64>,
        ) -> Result<Payload, CheckpointError> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            match self.bad {
                Some((at, Bad::Fails)) if item == 0 && range.contains(&at) => {
                    return Err(FormatError::new("item", format!("byte {at} is damaged")).into());
                }
                Some((at, Bad::Panics)) if item == 0 && range.contains(&at) => panic!("on purpose"),
                _ => {}
            }
            Ok(Payload::from(bytes_of(item, range)))
        }

        fn segment_bytes(&self) -> u64 {
            self.segment_bytes
        }

        fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
            None
        }
    }

    fn bytes_of(item: usize, range: Range<u64>) -> Bytes {
        range.map(|byte| (item as u64 + byte) as u8).collect()
    }

    /// A header, and the CRC-32 of each item after it.
    #[derive(Debug)]
    struct Checksums {
        header: usize,
    }

    impl Framing for Checksums {
        fn before(&self, position: usize) -> Result<Bytes, FormatError> {
            let len = if position == 0 { self.header } else { 0 };
            Ok(vec![9; len].into())
        }

        fn after(&self, _: usize, crc32: u32) -> Result<Bytes, FormatError> {
            Ok(Bytes::copy_from_slice(&crc32.to_le_bytes()))
        }

        fn needs_crc(&self, _: usize) -> bool {
            true
        }

        fn name(&self, _: usize) -> &'static str {
            "numbers"
        }
    }

    /// Collects parts, in whatever order they are written.
    #[derive(Debug, Default)]
    struct Collected {
        parts: Arc<Mutex<Vec<Option<Bytes>>>>,
        begun: usize,
    }

    #[async_trait]
    impl Upload for Collected {
        fn put_part(&mut self, part: Payload) -> PartFuture {
            let (parts, number) = (Arc::clone(&self.parts), self.begun);
            self.begun += 1;
            Box::pin(async move {
                let mut parts = parts.lock().unwrap();
                let len = parts.len().max(number + 1);
                parts.resize(len, None);
                parts[number] = Some(part.to_bytes());
                Ok(())
            })
        }

        async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
            Ok(ObjectMeta::new(Key::new("file").unwrap(), 0))
        }

        async fn abort(self: Box<Self>) -> Result<(), StorageError> {
            Ok(())
        }
    }

    fn spec<'a>(key: &'a Key, lens: &[u64], header: usize) -> FileSpec<'a> {
        let items = (0..).zip(lens).map(|(item, &byte_len)| FileItem { item, byte_len });
        let framing = Arc::new(Checksums { header });
        FileSpec { key, byte_len: 0, items: items.collect(), framing }
    }

    /// Sends a file of these items after a header. Returns its parts as well.
    fn sent(
        lens: &[u64],
        header: usize,
        data: &Arc<Numbers>,
        count: usize,
    ) -> (Vec<Bytes>, Result<Sent, CheckpointError>) {
        let key = Key::new("file").unwrap();
        let upload = Box::<Collected>::default();
        let parts = Arc::clone(&upload.parts);
        let lanes = Lanes { threads: Arc::new(Threads), count, part_bytes: data.segment_bytes };
        let data: Arc<dyn DataSource> = Arc::clone(data) as _;
        let file = spec(&key, lens, header);
        let (upload, outcome) = block_on(lanes.send(&file, &data, upload, true, None));
        assert!(upload.is_some());
        let parts = std::mem::take(&mut *parts.lock().unwrap());
        (parts.into_iter().map(Option::unwrap_or_default).collect(), outcome)
    }

    fn numbers(segment_bytes: u64, bad: Option<(u64, Bad)>) -> Arc<Numbers> {
        Arc::new(Numbers { segment_bytes, bad, calls: AtomicU64::new(0) })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_number_of_lanes_sends_the_file_in_equal_parts(
            lens in prop::collection::vec(0_u64..60, 1..6),
            header in 0_usize..40,
            segment_bytes in 1_u64..25,
            count in 1_usize..5,
        ) {
            let (parts, outcome) = sent(&lens, header, &numbers(segment_bytes, None), count);
            let mut expected = vec![9; header];
            for (item, &len) in lens.iter().enumerate() {
                let bytes = bytes_of(item, 0..len);
                expected.extend_from_slice(&bytes);
                expected.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
            }
            prop_assert_eq!(&parts.concat(), &expected);
            for part in parts.iter().rev().skip(1) {
                prop_assert_eq!(part.len() as u64, segment_bytes);
            }
            let Sent { byte_len, crc32 } = outcome.unwrap();
            prop_assert_eq!(byte_len, expected.len() as u64);
            prop_assert_eq!(crc32, Some(crc32fast::hash(&expected)));
        }
    }

    #[test]
    fn a_failure_ends_all_lanes_and_is_the_error() {
        let data = numbers(10, Some((25, Bad::Fails)));
        let (parts, outcome) = sent(&[10_000], 0, &data, 3);
        let error = dcp_core::error::error_chain(&outcome.unwrap_err());
        assert!(error.contains("byte 25 is damaged"), "{error}");
        // Parts are begun in order, so none follows the segment that failed.
        assert!(parts.len() <= 2, "{}", parts.len());
    }

    #[test]
    fn a_lane_that_panics_leaves_none_waiting() {
        let (_, outcome) = sent(&[10_000], 0, &numbers(10, Some((25, Bad::Panics))), 3);
        assert!(outcome.is_err());
    }

    /// Keeps a lane, which it does not run.
    #[derive(Debug, Default)]
    struct Later(Arc<Kept>);

    #[derive(Default)]
    struct Kept(Mutex<Option<Lane>>);

    impl std::fmt::Debug for Kept {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Kept")
        }
    }

    impl OwnThreads for Later {
        fn count(&self) -> usize {
            1
        }

        fn run(&self, _: usize, lane: Arc<dyn Fn() -> Lane + Send + Sync>) -> Run {
            *self.0.0.lock().unwrap() = Some(lane());
            Box::pin(std::future::pending())
        }
    }

    #[test]
    fn lanes_write_nothing_after_the_future_was_dropped() {
        let key = Key::new("file").unwrap();
        let upload = Box::<Collected>::default();
        let parts = Arc::clone(&upload.parts);
        let later = Later::default();
        let kept = Arc::clone(&later.0);
        let lanes = Lanes { threads: Arc::new(later), count: 1, part_bytes: 10 };
        let numbers = numbers(10, None);
        let data: Arc<dyn DataSource> = Arc::clone(&numbers) as _;
        let file = spec(&key, &[100], 0);
        assert!(lanes.send(&file, &data, upload, false, None).now_or_never().is_none());
        assert_eq!(Arc::strong_count(&parts), 1, "the upload is gone");
        let lane = kept.0.lock().unwrap().take().unwrap();
        block_on(lane);
        assert_eq!(numbers.calls.load(Ordering::Relaxed), 0);
        assert!(parts.lock().unwrap().is_empty());
    }
}
