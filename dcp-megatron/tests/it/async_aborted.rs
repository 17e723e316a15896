//! A save that was begun and that the queue does not take.

use std::sync::Arc;

use dcp_conformance::{MemoryStorage, StallStorage};
use dcp_core::{CheckpointError, StateDict, Storage};
use dcp_engine::{BackgroundSaver, Saver};
use dcp_megatron::{AsyncCallsQueue, AsyncRequest, MegatronError, MegatronWriter};

use crate::ranks::on_boxed_ranks;
use crate::support::{block_on, names};

#[test]
fn a_save_that_was_begun_and_cannot_be_scheduled_is_aborted() {
    on_boxed_ranks(2, |rank, group| {
        let folder: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            let error = match rank {
                0 => {
                    // It is not complete before it is known that it cannot be scheduled.
                    let stalled = StallStorage::new(Arc::clone(&folder), 2);
                    let writer = Arc::new(MegatronWriter::builder(Arc::new(stalled)).build());
                    let ended = Arc::downgrade(&writer);
                    let saver = BackgroundSaver::new(Saver::new());
                    let state = StateDict::from_iter([("step", 10)]);
                    let begun = AsyncRequest::started(saver.start(&state, writer).unwrap());
                    let error = queue.schedule_async_request(begun).await.unwrap_err();
                    // A save that goes on keeps its writer.
                    while ended.strong_count() > 0 {
                        tokio::task::yield_now().await;
                    }
                    error
                }
                _ => queue.schedule_async_request(failing_preload()).await.unwrap_err(),
            };
            assert!(matches!(error, MegatronError::AsyncCall { .. }), "{error}");
            assert_eq!(queue.unfinalized_calls(), 0);
        });
        assert!(!names(&*folder).contains(&"metadata.json".to_owned()));
    });
}

/// A request whose state cannot be copied.
fn failing_preload() -> AsyncRequest {
    let error = CheckpointError::NotACheckpoint { message: "no memory for a copy".into() };
    AsyncRequest::task(|| Err::<std::future::Ready<_>, _>(error))
}
