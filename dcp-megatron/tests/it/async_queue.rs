//! Saves beside training: their order, and what remains when they fail.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dcp_conformance::{
    CollectiveFault, FaultCollective, FaultStorage, MemoryStorage, SlowStorage, StallStorage,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{
    CheckpointError, Collective, CollectiveError, DType, Key, Region, Shard, StateDict, Storage,
    Tensor, Value,
};
use dcp_engine::{BackgroundSaver, Loader, Saver, Settings};
use dcp_megatron::disk::TRACKER;
use dcp_megatron::{
    AsyncCallsQueue, AsyncRequest, MegatronCheckpoint, MegatronError, MegatronOpenOptions,
    MegatronRun, MegatronWriter, Tracked, write_tracker,
};
use tokio::sync::Notify;

use crate::ranks::{Mesh, on_boxed_ranks, on_mesh};
use crate::support::{block_on, copy, names};

/// One task for each rank, that of rank 1 with the requested delay.
fn task(wait: Option<Arc<Notify>>) -> AsyncRequest {
    AsyncRequest::task(move || {
        Ok(async move {
            if let Some(wait) = wait {
                wait.notified().await;
            }
            Ok(())
        })
    })
}

fn failing(problem: &'static str) -> CheckpointError {
    CheckpointError::NotACheckpoint { message: problem.into() }
}

/// What happened where: call, function and rank.
type Log = Arc<Mutex<Vec<(u64, u32, u32)>>>;

fn logged(
    mut request: AsyncRequest,
    log: &Log,
    call: u64,
    functions: u32,
    rank: u32,
) -> AsyncRequest {
    for function in 0..functions {
        let log = Arc::clone(log);
        request.add_finalize_fn(async move || {
            log.lock().unwrap().push((call, function, rank));
            Ok(())
        });
    }
    request
}

#[test]
fn calls_are_finalized_in_order_and_only_when_all_ranks_are_done() {
    let log = Log::default();
    let polled = on_boxed_ranks(2, |rank, group| {
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            let release = Arc::new(Notify::new());
            let wait = (rank == 1).then(|| Arc::clone(&release));
            // Rank 0 has one finalizer more.
            let slow = logged(task(wait), &log, 1, 3 - rank, rank);
            let done = Arc::new(Notify::new());
            let notified = Arc::clone(&done);
            let quick = AsyncRequest::task(move || {
                Ok(async move {
                    notified.notify_one();
                    Ok(())
                })
            });
            let quick = logged(quick, &log, 2, 1, rank);
            assert_eq!(queue.schedule_async_request(slow).await.unwrap(), 1);
            assert_eq!(queue.schedule_async_request(quick).await.unwrap(), 2);
            done.notified().await;
            // The second one is done everywhere, but it waits for the first.
            assert_eq!(queue.maybe_finalize(false).await.unwrap(), [0; 0]);
            assert_eq!(queue.maybe_finalize(false).await.unwrap(), [0; 0]);
            assert_eq!(queue.unfinalized_calls(), 2);
            release.notify_one();
            let finalized = queue.maybe_finalize(true).await.unwrap();
            assert_eq!(queue.unfinalized_calls(), 0);
            assert_eq!(queue.maybe_finalize(true).await.unwrap(), [0; 0]);
            finalized
        })
    });
    assert_eq!(polled, [[1, 2], [1, 2]]);
    // Each function is done on all ranks before the next one begins.
    let mut log = log.lock().unwrap().clone();
    log[0..2].sort_unstable();
    log[2..4].sort_unstable();
    log[5..7].sort_unstable();
    let expected = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 0, 0), (2, 0, 1)];
    assert_eq!(log, expected);
}

/// One tensor, cut over the ranks of a group, and a number.
fn state(group: &dyn Collective, iteration: i64) -> StateDict {
    let (rank, world) = (u64::from(group.rank()), u64::from(group.world_size()));
    let region = Region::new([rank * 3], [3]).unwrap();
    let bytes: Vec<u8> = (0..3).flat_map(|at| (iteration + at).to_le_bytes()).collect();
    let shard = Shard::new(DType::Int64, region, bytes).unwrap();
    let tensor = Tensor::sharded(DType::Int64, [3 * world], vec![shard]).unwrap();
    StateDict::from_iter([("weight", Value::Tensor(tensor))])
}

/// To save `iteration` into its folder, and then make it the latest.
fn request(
    saver: &BackgroundSaver,
    state: StateDict,
    run: &Arc<dyn Storage>,
    iteration: u64,
    rank: u32,
) -> AsyncRequest {
    let tracked = Tracked::Iteration(iteration);
    let folder = MegatronRun::new(Arc::clone(run)).checkpoint(tracked).unwrap();
    let common = StateDict::from_iter([("iteration", i64::try_from(iteration).unwrap())]);
    let writer = MegatronWriter::builder(folder).common(common).integrity(true).build();
    let mut request = AsyncRequest::save(saver, state, Arc::new(writer));
    if rank == 0 {
        let run = Arc::clone(run);
        request.add_finalize_fn(async move || write_tracker(&*run, tracked).await);
    }
    request
}

/// Which checkpoint a run is at, and what is in it.
fn latest(run: &Arc<dyn Storage>) -> (Tracked, i64) {
    let opened = block_on(MegatronCheckpoint::open(run, &MegatronOpenOptions::default())).unwrap();
    let iteration = opened.common().get("iteration").and_then(Value::as_int).unwrap();
    (opened.which().unwrap(), iteration)
}

#[test]
fn a_save_is_of_the_state_when_it_was_scheduled_and_the_tracker_comes_last() {
    let run: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    // No save is complete before all ranks have looked.
    let stalled = StallStorage::new(Arc::clone(&run), 1);
    let slow: Arc<dyn Storage> = Arc::new(stalled.clone());
    on_mesh(1, 2, |Mesh { rank, world, replicas, .. }| {
        block_on(async {
            let state = state(&*world, 10);
            let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(world)));
            let mut queue = AsyncCallsQueue::new(Some(replicas));
            let save = request(&saver, state.clone(), &slow, 10, rank);
            queue.schedule_async_request(save).await.unwrap();
            // Training goes on.
            let weight = state.get("weight").unwrap().as_tensor().unwrap();
            weight.shards()[0].view().unwrap().fill_from(&[9; 24]).unwrap();
            assert_eq!(queue.maybe_finalize(false).await.unwrap(), [0; 0]);
            assert!(!run.contains(&Key::new(TRACKER).unwrap()).await.unwrap());
            stalled.resume();
            assert_eq!(queue.close().await.unwrap(), [1]);
        });
    });
    assert_eq!(latest(&run), (Tracked::Iteration(10), 10));
    let opened = block_on(MegatronCheckpoint::open(&run, &MegatronOpenOptions::default())).unwrap();
    let weight = Tensor::zeros(DType::Int64, [6]).unwrap();
    let mut state = StateDict::from_iter([("weight", Value::Tensor(weight.clone()))]);
    block_on(Loader::new().load(&mut state, &*opened.source().reader)).unwrap();
    let expected: Vec<u8> =
        [10, 11, 12, 10, 11, 12_i64].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert_eq!(weight.shards()[0].view().unwrap().memory().read().unwrap(), expected);
    let files = names(&*run);
    for file in [".metadata", "metadata.json", "integrity.json", "common.pt"] {
        assert!(files.contains(&format!("iter_0000010/{file}")), "{files:?}");
    }
}

fn save_first(run: &Arc<dyn Storage>) {
    on_mesh(1, 2, |Mesh { rank, world, replicas, .. }| {
        block_on(async {
            let state = state(&*world, 10);
            let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(world)));
            let mut queue = AsyncCallsQueue::new(Some(replicas));
            let save = request(&saver, state, run, 10, rank);
            queue.schedule_async_request(save).await.unwrap();
            queue.close().await.unwrap();
        });
    });
}

/// The storage dies at any of its operations, the tracker's included.
#[test]
fn trap_18_a_save_that_fails_in_the_background_leaves_the_previous_checkpoint_the_latest() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save_first(&memory);
    let (mut failed, mut operations) = (0, 0);
    loop {
        let run: Arc<dyn Storage> = copy(&*memory);
        let dying = FaultStorage::new(Arc::clone(&run)).dying_after(operations);
        let storage: Arc<dyn Storage> = Arc::new(dying.clone());
        let results = on_mesh(1, 2, |Mesh { rank, world, replicas, .. }| {
            block_on(async {
                let state = state(&*world, 20);
                let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(world)));
                let mut queue = AsyncCallsQueue::new(Some(replicas));
                let save = request(&saver, state, &storage, 20, rank);
                queue.schedule_async_request(save).await.unwrap();
                queue.close().await
            })
        });
        let texts: Vec<_> = results.iter().map(|result| format!("{result:?}")).collect();
        assert_eq!(texts[0], texts[1], "all ranks learn the same");
        match &results[0] {
            Ok(finalized) => {
                assert_eq!(finalized, &[1]);
                assert_eq!(latest(&run), (Tracked::Iteration(20), 20));
                break;
            }
            Err(MegatronError::AsyncCall { call: 1, failures, .. }) => {
                assert!(!failures.is_empty());
                assert_eq!(latest(&run), (Tracked::Iteration(10), 10), "{operations} operations");
                failed += 1;
            }
            Err(other) => panic!("{other}"),
        }
        operations += 1;
    }
    assert!(failed > 10, "{failed}");
}

#[test]
fn trap_18_a_worker_that_dies_is_an_error_of_the_save_and_later_ones_go_on() {
    let results = on_boxed_ranks(3, |rank, group| {
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            let log = Log::default();
            let dying = AsyncRequest::task(move || {
                Ok(async move {
                    assert_ne!(rank, 2, "the worker of rank 2 dies");
                    Ok(())
                })
            });
            let dying = logged(dying, &log, 1, 1, rank);
            let good = logged(task(None), &log, 2, 1, rank);
            queue.schedule_async_request(dying).await.unwrap();
            queue.schedule_async_request(good).await.unwrap();
            let error = queue.maybe_finalize(true).await.unwrap_err();
            let MegatronError::AsyncCall { call: 1, failures, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [2]);
            assert_eq!(queue.maybe_finalize(true).await.unwrap(), [2]);
            let log = log.lock().unwrap().clone();
            assert_eq!(log, [(2, 0, rank)], "the first one is not finalized");
            error.to_string()
        })
    });
    assert!(results[0].contains("panic"), "{results:?}");
    assert!(results.iter().all(|error| *error == results[0]), "{results:?}");
}

#[test]
fn a_finalizer_that_fails_stops_those_after_it_on_all_ranks() {
    on_boxed_ranks(2, |rank, group| {
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            let log = Log::default();
            let mut save = logged(task(None), &log, 1, 1, rank);
            save.add_finalize_fn(async move || match rank {
                1 => Err(failing("no space for the log").into()),
                _ => Ok(()),
            });
            let save = logged(save, &log, 2, 1, rank);
            queue.schedule_async_request(save).await.unwrap();
            let error = queue.close().await.unwrap_err();
            assert_eq!(
                error.to_string(),
                "asynchronous save 1 failed and is not marked complete: rank 1: no space for the log"
            );
            assert_eq!(*log.lock().unwrap(), [(1, 0, rank)]);
        });
    });
}

/// A complete save is marked so, whatever the result of later ones.
#[test]
fn calls_that_were_finalized_before_one_that_failed_are_reported() {
    on_boxed_ranks(2, |rank, group| {
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            for call in 1..=6 {
                let bad = call % 3 == 0 && rank == 1;
                let request = AsyncRequest::task(move || {
                    Ok(async move { if bad { Err(failing("no space")) } else { Ok(()) } })
                });
                queue.schedule_async_request(request).await.unwrap();
            }
            let error = queue.maybe_finalize(true).await.unwrap_err();
            let MegatronError::AsyncCall { call: 3, finalized, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(finalized, [1, 2]);
            queue.schedule_async_request(task(None)).await.unwrap();
            let error = queue.close().await.unwrap_err();
            let MegatronError::AsyncCall { call: 6, finalized, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(finalized, [4, 5, 7]);
        });
    });
}

/// Counts the calls and bytes that come to a rank, and on how many threads.
#[derive(Debug)]
struct Metered {
    inner: Box<dyn Collective>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    calls: usize,
    received: usize,
    threads: HashSet<std::thread::ThreadId>,
}

impl Metered {
    fn count<T>(&self, received: T, len: impl Fn(&T) -> usize) -> T {
        let mut seen = self.seen.lock().unwrap();
        seen.calls += 1;
        seen.received += len(&received);
        seen.threads.insert(std::thread::current().id());
        received
    }
}

impl Collective for Metered {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: u32, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let all = self.inner.gather(root, mine)?;
        Ok(self.count(all, |all| all.iter().flatten().map(Bytes::len).sum()))
    }

    fn scatter(&self, root: u32, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        Ok(self.count(self.inner.scatter(root, all)?, Bytes::len))
    }

    fn broadcast(&self, root: u32, from: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        Ok(self.count(self.inner.broadcast(root, from)?, Bytes::len))
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        Ok(self.count(self.inner.all_gather(mine)?, |all| all.iter().map(Bytes::len).sum()))
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner.barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// It is done once an iteration, on thousands of ranks.
#[test]
fn to_look_whether_a_save_is_complete_costs_a_few_bytes_of_each_rank() {
    const RANKS: u32 = 16;
    const LOOKS: usize = 20;
    let seen = on_boxed_ranks(RANKS, |_, group| {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let metered = Metered { inner: group, seen: Arc::clone(&seen) };
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(Arc::new(metered)));
            let wait = Arc::new(Notify::new());
            queue.schedule_async_request(task(Some(Arc::clone(&wait)))).await.unwrap();
            *seen.lock().unwrap() = Seen::default();
            for _ in 0..LOOKS {
                assert!(queue.maybe_finalize(false).await.unwrap().is_empty());
            }
            let looked = std::mem::take(&mut *seen.lock().unwrap());
            wait.notify_one();
            assert_eq!(queue.close().await.unwrap(), [1]);
            looked
        })
    });
    for (rank, seen) in seen.iter().enumerate() {
        let senders = if rank == 0 { RANKS as usize } else { 1 };
        assert!(seen.received <= LOOKS * (senders * 32 + 32), "rank {rank}: {seen:?}");
        assert_eq!(seen.threads.len(), 1, "rank {rank}: {seen:?}");
        assert!(seen.calls <= LOOKS * 2, "rank {rank}: {seen:?}");
    }
}

#[test]
fn calls_that_do_not_match_are_refused_on_all_ranks() {
    let results = on_boxed_ranks(2, |rank, group| {
        block_on(async {
            let mut queue = AsyncCallsQueue::new(Some(group.into()));
            let wait = Arc::new(Notify::new());
            queue.schedule_async_request(task(Some(Arc::clone(&wait)))).await.unwrap();
            let error = match rank {
                0 => queue.schedule_async_request(task(None)).await.unwrap_err(),
                _ => queue.maybe_finalize(false).await.unwrap_err(),
            };
            // They may go on together.
            wait.notify_one();
            assert_eq!(queue.close().await.unwrap(), [1]);
            error
        })
    });
    for error in results {
        assert!(matches!(error, MegatronError::UnmatchedCalls { right_rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("rank 0 is scheduling call 2"), "{error}");
    }
}

/// Nothing is begun when one rank cannot copy its state; the others need not wait for it.
#[test]
fn a_rank_that_cannot_copy_its_state_fails_the_call_on_all() {
    let run: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    on_mesh(1, 2, |Mesh { rank, world, replicas, .. }| {
        block_on(async {
            let state = state(&*world, 10);
            let weight = state.get("weight").unwrap().as_tensor().unwrap().clone();
            let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(world)));
            let mut queue = AsyncCallsQueue::new(Some(replicas));
            let memory = weight.shards()[0].view().unwrap().memory().clone();
            let lent = (rank == 1).then(|| memory.lend(0..24).unwrap());
            let save = request(&saver, state.clone(), &run, 10, rank);
            let error = queue.schedule_async_request(save).await.unwrap_err();
            let MegatronError::AsyncCall { failures, .. } = error else { panic!("{error}") };
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [1]);
            assert_eq!(queue.unfinalized_calls(), 0);
            drop(lent);
            let save = request(&saver, state, &run, 10, rank);
            queue.schedule_async_request(save).await.unwrap();
            queue.close().await.unwrap();
        });
    });
    assert_eq!(latest(&run).0, Tracked::Iteration(10));
}

#[test]
fn what_is_aborted_is_not_finalized() {
    let run: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save_first(&run);
    let slow: Arc<dyn Storage> =
        Arc::new(SlowStorage::new(Arc::clone(&run), Duration::from_secs(3600)));
    on_mesh(1, 2, |Mesh { rank, world, replicas, .. }| {
        block_on(async {
            let state = state(&*world, 20);
            let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(world)));
            let mut queue = AsyncCallsQueue::new(Some(replicas));
            for iteration in [20, 30] {
                let save = request(&saver, state.clone(), &slow, iteration, rank);
                queue.schedule_async_request(save).await.unwrap();
            }
            queue.abort();
        });
    });
    assert_eq!(latest(&run), (Tracked::Iteration(10), 10));
}

#[test]
fn nobody_waits_for_a_dead_rank() {
    for operation in 1..5 {
        let results = on_boxed_ranks(3, |rank, group| {
            let group: Arc<dyn Collective> = match rank {
                1 => Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die)),
                _ => group.into(),
            };
            block_on(async {
                let mut queue = AsyncCallsQueue::new(Some(group));
                let log = Log::default();
                for call in 1..3 {
                    let save = logged(task(None), &log, call, 1, rank);
                    queue.schedule_async_request(save).await?;
                }
                queue.close().await
            })
        });
        assert!(results.iter().all(Result::is_err), "at {operation}: {results:?}");
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            let text = dcp_core::error::error_chain(error);
            assert!(!text.contains("did not answer"), "a rank waited for its deadline: {text}");
        }
    }
}
