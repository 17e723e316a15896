//! Saves beside training, from every kind of program.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dcp_collectives::LocalCollective;
use dcp_conformance::{FaultStorage, SlowStorage, StallStorage};
use dcp_core::error::FailureKind;
use dcp_core::{CheckpointError, Collective, StateDict, Storage, StorageWriter, Value};
use dcp_engine::stage::{BlockingStager, OverlappedStager, Staging};
use dcp_engine::{
    BackgroundSaver, SaveHandle, SaveStage, Saver, Settings, StagedState, Stager, WhenBusy,
};
use dcp_formats::dcp::DcpWriter;

use crate::harness::{block_on, holds_sample, memory, on_ranks, sample};

fn writer(storage: &Arc<dyn Storage>) -> Arc<dyn StorageWriter> {
    Arc::new(DcpWriter::new(Arc::clone(storage)))
}

/// A writer to a storage that takes nothing.
fn broken() -> Arc<dyn StorageWriter> {
    Arc::new(DcpWriter::new(Arc::new(FaultStorage::new(memory()).dying_after(0))))
}

/// Starts a save that waits for its turn in the background.
fn queued(saver: &BackgroundSaver, state: &StateDict, to: Arc<dyn StorageWriter>) -> SaveHandle {
    saver.start_when(WhenBusy::Queue, state, async { Ok(to) }).unwrap().unwrap()
}

/// Waits without any runtime.
fn wait(pending: SaveHandle) -> Result<dcp_engine::SaveSummary, CheckpointError> {
    spin(pending.wait())
}

fn spin<T>(future: impl Future<Output = T>) -> T {
    let mut future = Box::pin(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
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
    let error = match saver.start(&sample(0, 1, 2), writer(&storage)) {
        Err(error) => error,
        Ok(pending) => {
            wait(pending).unwrap();
            saver.start(&sample(0, 1, 3), writer(&storage)).unwrap_err()
        }
    };
    let text = dcp_core::error::error_chain(&error);
    assert!(matches!(error, CheckpointError::Background { .. }), "{text}");
    assert!(text.contains("the process is gone") && text.contains("not started"), "{text}");
    assert!(matches!(error.kind(), FailureKind::Storage(_)), "{:?}", error.kind());
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
        let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(group)));
        let failing = saver.start(&sample(rank, 2, 1), broken()).unwrap();
        // Rank 0 gets its error; rank 1 begins the next save when it has ended, without waiting.
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
    let start = |step, to| queued(&saver, &sample(0, 1, step), writer(to));
    let first = start(1, &place);
    let aborted = start(2, &storage);
    let third = start(3, &storage);
    aborted.cancel();
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

#[test]
fn values_are_those_at_the_call() {
    let storage = memory();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    let saver = BackgroundSaver::new(Saver::new());
    let state = sample(0, 1, 3);
    let handle = saver.start(&state, writer(&(Arc::new(stalled.clone()) as _))).unwrap();
    let model = state.get("model").and_then(Value::as_dict).unwrap();
    for (_, tensor) in model.iter() {
        for shard in tensor.as_tensor().unwrap().shards() {
            shard.view().unwrap().lend().unwrap().fill(0xee);
        }
    }
    stalled.resume();
    wait(handle).unwrap();
    assert!(holds_sample(&storage, 3));
}

#[test]
fn a_handle_shows_each_stage_and_the_bytes() {
    let storage = memory();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    let saver = BackgroundSaver::new(Saver::new());
    let handle = saver.start(&sample(0, 1, 3), writer(&(Arc::new(stalled.clone()) as _))).unwrap();
    assert_eq!(handle.stage(), SaveStage::Staged);
    assert_eq!((handle.progress().done, handle.progress().total), (0, 0));
    stalled.resume();
    for stage in [SaveStage::Planned, SaveStage::Written, SaveStage::Committed] {
        assert!(spin(handle.reached(stage)), "{stage:?}");
    }
    let progress = handle.progress();
    assert!(progress.done == progress.total && progress.total > 26 * 4, "{progress:?}");
    let summary = wait(handle).unwrap();
    assert_eq!(summary.write_times.slowest_bytes, summary.bytes_written);
    // A failed save comes to no further stage, and says so.
    let failed = saver.start(&sample(0, 1, 4), broken()).unwrap();
    assert!(!spin(failed.reached(SaveStage::Committed)));
    assert_eq!(failed.stage(), SaveStage::Staged);
    wait(failed).unwrap_err();
}

/// Records whether the save before had ended when it copied a state.
#[derive(Debug, Default)]
struct Witness {
    before: Mutex<Option<Arc<AtomicU32>>>,
    copies: AtomicU32,
}

impl Stager for Witness {
    fn stage(&self, state: &StateDict) -> Result<Staging, CheckpointError> {
        if let Some(ended) = &*self.before.lock().unwrap() {
            assert_eq!(ended.load(Ordering::SeqCst), 1, "the save before is under way");
        }
        self.copies.fetch_add(1, Ordering::SeqCst);
        BlockingStager::new().stage(state)
    }
}

fn staged_by(stager: Arc<dyn Stager>) -> BackgroundSaver {
    BackgroundSaver::new(Saver::with_settings(Settings::new().stager(stager)))
}

#[test]
fn a_save_waits_for_the_one_before_it_before_it_copies_the_state() {
    let storage = memory();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    let witness = Arc::new(Witness::default());
    let saver = staged_by(witness.clone());
    let first = saver.start(&sample(0, 1, 1), writer(&(Arc::new(stalled.clone()) as _))).unwrap();
    let ended = Arc::new(AtomicU32::new(0));
    *witness.before.lock().unwrap() = Some(Arc::clone(&ended));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let second = saver.start(&sample(0, 1, 2), writer(&storage)).unwrap();
            wait(second).unwrap();
        });
        assert!(!first.is_finished());
        ended.store(1, Ordering::SeqCst);
        stalled.resume();
        second.join().unwrap();
    });
    wait(first).unwrap();
    assert_eq!(witness.copies.load(Ordering::SeqCst), 2);
    assert!(holds_sample(&storage, 2));
}

#[test]
fn a_save_is_skipped_while_another_is_under_way() {
    let storage = memory();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    let saver = BackgroundSaver::new(Saver::new());
    let start = |step, to: Arc<dyn StorageWriter>| {
        saver.start_when(WhenBusy::Skip, &sample(0, 1, step), async { Ok(to) }).unwrap()
    };
    let first = start(1, writer(&(Arc::new(stalled.clone()) as _))).unwrap();
    assert!(start(2, writer(&storage)).is_none());
    stalled.resume();
    wait(first).unwrap();
    wait(start(3, writer(&storage)).unwrap()).unwrap();
    assert!(holds_sample(&storage, 3));
}

#[test]
fn ranks_skip_a_save_together_or_not_at_all() {
    let storage = memory();
    let decisions: Vec<Arc<dyn Collective>> =
        LocalCollective::group(2).into_iter().map(|rank| Arc::new(rank) as _).collect();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    let skipped = on_ranks(2, |rank, group| {
        let place: Arc<dyn Storage> = Arc::new(stalled.clone());
        let settings = Settings::in_group(group);
        let saver = BackgroundSaver::new(Saver::with_settings(settings.clone()));
        let undecided =
            saver.start_when(WhenBusy::Skip, &sample(rank, 2, 0), async { Ok(writer(&memory())) });
        let error = undecided.unwrap_err().to_string();
        assert!(error.contains("decision_group"), "{error}");

        let settings = settings.decision_group(Arc::clone(&decisions[rank as usize]));
        let saver = BackgroundSaver::new(Saver::with_settings(settings));
        let start = |step, to: &Arc<dyn Storage>| {
            let to = writer(to);
            saver.start_when(WhenBusy::Skip, &sample(rank, 2, step), async { Ok(to) }).unwrap()
        };
        let first = start(1, &place).unwrap();
        let second = start(2, &storage);
        stalled.resume();
        wait(first).unwrap();
        // Each rank saw the end of the first save; the third may only be skipped on both.
        let third = start(3, &storage).map(|third| wait(third).unwrap());
        (second.is_none(), third.is_none())
    });
    assert!(skipped[0] == skipped[1], "{skipped:?}");
    assert!(skipped[0].0, "the first save was stalled");
    assert!(!skipped[0].1, "no save was under way");
    assert!(holds_sample(&storage, 3));
}

#[test]
fn a_rank_without_a_state_takes_part_in_the_decision_to_skip() {
    let storage = memory();
    let decisions: Vec<Arc<dyn Collective>> =
        LocalCollective::group(2).into_iter().map(|rank| Arc::new(rank) as _).collect();
    let stalled = StallStorage::new(Arc::clone(&storage), 1);
    on_ranks(2, |rank, group| {
        let decisions = Arc::clone(&decisions[rank as usize]);
        let settings = Settings::in_group(group).decision_group(decisions);
        let saver = BackgroundSaver::new(Saver::with_settings(settings));
        let start = |step, to: &Arc<dyn Storage>| {
            let to = writer(to);
            saver.start_when(WhenBusy::Skip, &sample(rank, 2, step), async { Ok(to) }).unwrap()
        };
        let without_state = || saver.fail_when(WhenBusy::Skip, CheckpointError::Canceled);
        let first = start(1, &(Arc::new(stalled.clone()) as _)).unwrap();
        if rank == 1 {
            assert!(matches!(without_state(), Err(CheckpointError::Canceled)));
        } else {
            assert!(start(2, &storage).is_none());
        }
        stalled.resume();
        wait(first).unwrap();
        let failed = match rank {
            1 => without_state().unwrap(),
            _ => start(3, &storage).unwrap(),
        };
        let error = wait(failed).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
    });
    assert!(holds_sample(&storage, 1));
}

/// Copies when the test sends a permit; a closed channel is a panic.
#[derive(Debug)]
struct OnPermit(Mutex<mpsc::Receiver<Result<(), CheckpointError>>>);

impl Stager for OnPermit {
    fn stage(&self, state: &StateDict) -> Result<Staging, CheckpointError> {
        let (done, copied) = tokio::sync::oneshot::channel();
        let permit = self.0.lock().unwrap().recv();
        let state = state.clone();
        std::thread::spawn(move || {
            let _ = done.send(permit.map(|permit| permit.and_then(|()| StagedState::of(&state))));
        });
        Ok(Staging::running(async move { copied.await.unwrap().unwrap() }))
    }
}

#[test]
fn a_failing_or_panicking_copy_fails_the_save_on_all_ranks_and_blocks_no_other() {
    let storage = memory();
    on_ranks(2, |rank, group| {
        let (permits, permit) = mpsc::channel();
        let stager = Arc::new(OnPermit(Mutex::new(permit)));
        let settings = Settings::in_group(group).stager(stager);
        let saver = BackgroundSaver::new(Saver::with_settings(settings));
        permits.send(if rank == 1 { Err(CheckpointError::Canceled) } else { Ok(()) }).unwrap();
        permits.send(Ok(())).unwrap();
        let failing = saver.start(&sample(rank, 2, 1), writer(&storage)).unwrap();
        spin(failing.staged());
        let error = wait(failing).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
        wait(saver.start(&sample(rank, 2, 2), writer(&storage)).unwrap()).unwrap();
    });
    assert!(holds_sample(&storage, 2));

    let (permits, permit) = mpsc::channel();
    let saver = staged_by(Arc::new(OnPermit(Mutex::new(permit))));
    drop(permits);
    let panicking = saver.start(&sample(0, 1, 3), writer(&storage)).unwrap();
    spin(panicking.staged());
    let error = wait(panicking).unwrap_err();
    assert!(matches!(error, CheckpointError::Background { .. }), "{error}");
    let staged = StagedState::of(&sample(0, 1, 4)).unwrap();
    wait(saver.start_staged(staged, writer(&storage))).unwrap();
    assert!(holds_sample(&storage, 4));
}

#[test]
fn an_overlapped_copy_is_staged_before_it_is_written() {
    let storage = memory();
    let saver = staged_by(Arc::new(OverlappedStager::new()));
    for step in 1..=3 {
        let handle = saver.start(&sample(0, 1, step), writer(&storage)).unwrap();
        spin(handle.staged());
        assert!(handle.stage() >= SaveStage::Staged);
        wait(handle).unwrap();
        assert!(holds_sample(&storage, step));
    }
}
