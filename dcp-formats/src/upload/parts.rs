//! The parts of a file, whose segments are requested ahead.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use dcp_core::checkpoint::DataSource;
use dcp_core::{CheckpointError, Payload};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};

use super::FileSpec;
use super::assembly::{Assembly, Segments, Step};

/// Requests the segments of a file, several at a time, and makes its parts.
pub(super) struct Parts {
    assembly: Assembly,
    segments: Segments,
    data: Arc<dyn DataSource>,
    /// Requested segments in order, and how many there may be.
    pending: FuturesOrdered<BoxFuture<'static, Result<Payload, CheckpointError>>>,
    in_flight: usize,
}

impl Parts {
    pub(super) fn new(file: &FileSpec<'_>, data: &Arc<dyn DataSource>, in_flight: usize) -> Self {
        let segment_bytes = data.segment_bytes();
        Self {
            assembly: Assembly::new(file, segment_bytes),
            segments: Segments::new(file, segment_bytes),
            data: Arc::clone(data),
            pending: FuturesOrdered::new(),
            in_flight: in_flight.max(1),
        }
    }

    /// Whether the file has exactly the bytes of its items and what is around them.
    pub(super) fn has_exact_len(&self) -> bool {
        self.assembly.has_exact_len()
    }

    /// The next part, of `limit` bytes or of what is left; `None` at the end of the file.
    pub(super) async fn next(&mut self, limit: u64) -> Result<Option<Payload>, CheckpointError> {
        loop {
            match self.assembly.next(limit)? {
                Step::Part(part) => return Ok(Some(part)),
                Step::End => return Ok(None),
                Step::Pause => let_others_run().await,
                Step::Segment => {
                    self.request();
                    let segment = self.pending.next().await.transpose()?.unwrap_or_default();
                    self.assembly.feed(segment)?;
                }
            }
        }
    }

    fn request(&mut self) {
        while self.pending.len() < self.in_flight
            && let Some((item, range)) = self.segments.next()
        {
            let data = Arc::clone(&self.data);
            self.pending.push_back(Box::pin(async move { data.resolve(item, range).await }));
        }
    }
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

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Mutex;

    use async_trait::async_trait;
    use bytes::Bytes;
    use dcp_core::storage::OwnThreads;
    use dcp_core::{FormatError, Key};
    use dcp_testing::block_on;

    use super::super::{FileItem, Framing};
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

        fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
            None
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
        let items: Arc<[FileItem]> =
            lens.map(|byte_len| FileItem { item: 0, byte_len }).into_iter().collect();
        let data: Arc<dyn DataSource> = Arc::new(Known);
        for limit in [3, 10, 1000] {
            let framing = Arc::new(Noting::default());
            let file = FileSpec {
                key: &key,
                byte_len: 52,
                items: Arc::clone(&items),
                framing: Arc::clone(&framing) as _,
            };
            let mut parts = Parts::new(&file, &data, 2);
            while block_on(parts.next(limit)).unwrap().is_some() {}
            let expected = lens.map(|len| crc32fast::hash(&Vec::from_iter(0..len as u8)));
            assert_eq!(*framing.0.lock().unwrap(), expected, "parts of {limit} bytes");
        }
    }
}
