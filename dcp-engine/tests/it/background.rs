//! Saves beside training, from every kind of program.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dcp_conformance::{FaultStorage, SlowStorage, StallStorage};
use dcp_core::error::FailureKind;
use dcp_core::{CheckpointError, Storage, StorageWriter};
use dcp_engine::{BackgroundSaver, PendingSave, Saver};
use dcp_formats::dcp::DcpWriter;

use crate::harness::{block_on, holds_sample, memory, on_ranks, sample};

fn writer(storage: &Arc<dyn Storage>) -> Arc<dyn StorageWriter> {
    Arc::new(DcpWriter::new(Arc::clone(storage)))
}

/// A writer to a storage that takes nothing.
fn broken() -> Arc<dyn StorageWriter> {
    Arc::new(DcpWriter::new(Arc::new(FaultStorage::new(memory()).dying_after(0))))
}

/// Waits without any runtime.
fn wait(pending: PendingSave) -> Result<dcp_engine::SaveSummary, CheckpointError> {
    let mut wait = Box::pin(pending.wait());
    loop {
        match wait.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => return result,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

#[test]
fn a_program_without_a_runtime_saves_in_the_background() {
    let storage = memory();
    // It needs a timer, so the runtime that it runs on has one.
    let slow: Arc<dyn Storage> =
        Arc::new(SlowStorage::new(Arc::clone(&storage), Duration::from_millis(1)));
    let saver = BackgroundSaver::new(Saver::new());
    let pending = saver.start(&sample(0, 1, 3), writer(&slow)).unwrap();
    wait(pending).unwrap();
    assert!(holds_sample(&storage, 3));
}

#[test]
fn dropping_everything_loses_no_save() {
    let storage = memory();
    let saver = BackgroundSaver::new(Saver::new());
    for step in 0..5 {
        drop(saver.clone().start(&sample(0, 1, step), writer(&storage)).unwrap());
    }
    drop(saver);
    assert!(holds_sample(&storage, 4));
    // The handle alone keeps it going, too.
    let pending = BackgroundSaver::new(Saver::new()).start(&sample(0, 1, 7), writer(&storage));
    drop(pending.unwrap());
    assert!(holds_sample(&storage, 7));
}

#[test]
fn a_save_outlives_the_runtime_in_which_it_was_started() {
    let current = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let many = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    for (step, runtime) in [(1, current()), (2, many())] {
        let storage = memory();
        let saver = BackgroundSaver::new(Saver::new());
        let pending =
            runtime.block_on(async { saver.start(&sample(0, 1, step), writer(&storage)) });
        drop(runtime);
        block_on(pending.unwrap().wait()).unwrap();
        assert!(holds_sample(&storage, step));
    }
}

#[test]
fn what_a_save_failed_with_unheard_the_next_start_returns_once() {
    let storage = memory();
    let saver = BackgroundSaver::new(Saver::new());
    drop(saver.start(&sample(0, 1, 1), broken()).unwrap());
    // It may have ended by now; after another one it has.
    let told = match saver.start(&sample(0, 1, 2), writer(&storage)) {
        Err(error) => error,
        Ok(pending) => {
            wait(pending).unwrap();
            saver.start(&sample(0, 1, 3), writer(&storage)).unwrap_err()
        }
    };
    let text = dcp_core::error::error_chain(&told);
    assert!(matches!(told, CheckpointError::Background { .. }), "{text}");
    assert!(text.contains("the process is gone") && text.contains("not started"), "{text}");
    assert!(matches!(told.kind(), FailureKind::Storage(_)), "{:?}", told.kind());
    wait(saver.start(&sample(0, 1, 4), writer(&storage)).unwrap()).unwrap();
    assert!(holds_sample(&storage, 4));
    // Of a failure that was heard nothing is left.
    assert!(wait(saver.start(&sample(0, 1, 5), broken()).unwrap()).is_err());
    wait(saver.start(&sample(0, 1, 6), writer(&storage)).unwrap()).unwrap();
}

#[test]
fn ranks_that_heard_of_a_failure_do_not_wait_for_those_that_did_not() {
    let storage = memory();
    let results = on_ranks(2, |rank, group| {
        let saver = BackgroundSaver::new(Saver::new().group(group));
        let failing = saver.start(&sample(rank, 2, 1), broken()).unwrap();
        // Rank 0 hears of it; rank 1 begins the next save when it has ended, without asking.
        if rank == 0 {
            assert!(wait(failing).is_err());
        } else {
            while !failing.is_finished() {
                std::thread::yield_now();
            }
            drop(failing);
        }
        let second = saver.start(&sample(rank, 2, 2), writer(&storage)).and_then(wait);
        wait(saver.start(&sample(rank, 2, 3), writer(&storage)).unwrap()).unwrap();
        second.map(drop)
    });
    let [heard, unheard] = <[_; 2]>::try_from(results).unwrap();
    let text = heard.unwrap_err().to_string();
    assert!(
        text.contains("rank 1") && text.contains("an earlier background save failed"),
        "{text}"
    );
    assert!(unheard.unwrap_err().to_string().contains("an earlier background save failed"));
    assert!(holds_sample(&storage, 3));
}

#[test]
fn a_save_that_is_aborted_before_its_turn_lets_nobody_jump_the_queue() {
    let storage = memory();
    let stalled = StallStorage::new(Arc::clone(&storage), 3);
    let place: Arc<dyn Storage> = Arc::new(stalled.clone());
    let saver = BackgroundSaver::new(Saver::new());
    let first = saver.start(&sample(0, 1, 1), writer(&place)).unwrap();
    let aborted = saver.start(&sample(0, 1, 2), writer(&storage)).unwrap();
    let third = saver.start(&sample(0, 1, 3), writer(&storage)).unwrap();
    aborted.abort();
    // While the first one holds the place, the third would fail there.
    while stalled.operations() < 3 {
        std::thread::yield_now();
    }
    assert!(!third.is_finished());
    stalled.resume();
    wait(first).unwrap();
    assert!(matches!(wait(aborted), Err(CheckpointError::Canceled)));
    wait(third).unwrap();
    assert!(holds_sample(&storage, 3));
}
