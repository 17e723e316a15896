//! Whatever fails, every rank returns, nobody is blamed wrongly, and no checkpoint is lost.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use bytes::Bytes;
use dcp_conformance::{
    CollectiveFault, Fault, FaultCollective, FaultStorage, FaultWriter, SlowStorage,
};
use dcp_core::error::FailureKind;
use dcp_core::error::{Phase, Standing};
use dcp_core::{
    CheckpointError, Collective, CollectiveError, StateDict, Storage, StorageErrorKind, Value,
};
use dcp_engine::{Saver, Settings};
use dcp_formats::dcp::DcpWriter;
use futures_util::FutureExt as _;

use crate::harness::{
    block_on, holds_sample, memory, on_boxed_ranks, on_ranks, on_tcp_ranks, sample, save,
    save_sample,
};

/// T1: PyTorch 2.15 loses errors of writer threads and commits a checkpoint with holes.
#[test]
fn t01_one_failing_rank_fails_the_save_on_all() {
    for failing in 0..3 {
        let storage = memory();
        save_sample(2, &storage, 1);
        let results = on_ranks(3, |rank, group| {
            let mut mine = Arc::clone(&storage);
            if rank == failing {
                // The first operations of the coordinator look at the place; fail the writing.
                let full = Fault::Fail(StorageErrorKind::Full);
                let faulty = (0..20).fold(FaultStorage::new(mine), |s, n| match n {
                    0..=3 if rank == 0 => s,
                    n => s.fault(n, full),
                });
                mine = Arc::new(faulty);
            }
            save(group, &sample(rank, 3, 2), &mine)
        });
        for result in results {
            let error = result.unwrap_err();
            let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
            assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [failing], "{error}");
            assert_eq!(error.kind(), FailureKind::Storage(StorageErrorKind::Full), "{error}");
            assert!(!error.is_retryable() && error.to_string().contains("full"), "{error}");
        }
        assert!(holds_sample(&storage, 1), "the old checkpoint is untouched");
    }
}

/// A supervisor sees the same on every rank of real sockets, and whether to try again.
#[test]
fn the_kind_of_a_failure_travels_over_tcp() {
    for (kind, retryable) in [(StorageErrorKind::Full, false), (StorageErrorKind::Transient, true)]
    {
        let storage = memory();
        let results = on_tcp_ranks(4, |rank, group| {
            let mut mine = Arc::clone(&storage);
            if rank == 3 {
                let faulty = FaultStorage::new(mine);
                mine = Arc::new((0..20).fold(faulty, |s, n| s.fault(n, Fault::Fail(kind))));
            }
            save(group, &sample(rank, 4, 2), &mine).map(drop)
        });
        for result in results {
            let error = result.unwrap_err();
            let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
            assert_eq!((failures.len(), failures[0].rank), (1, 3), "{error}");
            assert_eq!(failures[0].kind, FailureKind::Storage(kind), "{error}");
            assert_eq!(error.is_retryable(), retryable, "{error}");
        }
    }
}

#[test]
fn a_save_whose_commit_takes_effect_and_fails_keeps_the_checkpoint() {
    let storage = memory();
    let writer = FaultWriter::new(DcpWriter::new(Arc::clone(&storage)), Arc::clone(&storage));
    let saves = on_ranks(2, |rank, group| {
        block_on(Saver::with_settings(Settings::in_group(group)).save(&sample(rank, 2, 1), &writer))
            .map(drop)
    });
    assert!(saves.iter().all(Result::is_err) && writer.is_committed());
    assert!(holds_sample(&storage, 1));
}

/// T2, T3: PyTorch 2.15 truncates the old files first, and unlinks the old metadata before it
/// renames the new one into place.
#[test]
fn t02_t03_a_death_at_any_operation_keeps_one_whole_checkpoint() {
    let count = {
        let storage = memory();
        save_sample(1, &storage, 1);
        let counted = Arc::new(FaultStorage::new(storage));
        let place: Arc<dyn Storage> = Arc::clone(&counted) as _;
        block_on(Saver::new().save(&sample(0, 1, 2), &DcpWriter::new(place))).unwrap();
        counted.operations()
    };
    assert!(count > 5, "{count}");
    let (mut kept_old, mut has_new) = (0, 0);
    for alive in 0..=count {
        let storage = memory();
        save_sample(1, &storage, 1);
        let dying: Arc<dyn Storage> =
            Arc::new(FaultStorage::new(Arc::clone(&storage)).dying_after(alive));
        let result = block_on(Saver::new().save(&sample(0, 1, 2), &DcpWriter::new(dying)));
        // The storage still holds what the dead process left.
        if result.is_ok() || !holds_sample(&storage, 1) {
            assert!(holds_sample(&storage, 2), "after {alive} operations");
            has_new += 1;
        } else {
            kept_old += 1;
        }
        save_sample(1, &storage, 3);
        assert!(holds_sample(&storage, 3), "the next save works after {alive} operations");
    }
    assert!(kept_old > 0 && has_new > 0, "{kept_old} {has_new}");
}

#[test]
fn leftovers_of_a_dead_save_are_gone_after_the_next_one() {
    use futures_util::StreamExt;
    let storage = memory();
    let dying: Arc<dyn Storage> = Arc::new(FaultStorage::new(Arc::clone(&storage)).dying_after(4));
    assert!(block_on(Saver::new().save(&sample(0, 1, 2), &DcpWriter::new(dying))).is_err());
    save_sample(1, &storage, 3);
    save_sample(1, &storage, 4);
    let files = block_on(async { storage.list(None).count().await });
    let fresh = memory();
    save_sample(1, &fresh, 4);
    assert_eq!(files, block_on(async { fresh.list(None).count().await }));
}

#[test]
fn a_value_that_cannot_be_saved_names_rank_and_key() {
    let storage = memory();
    let results = on_ranks(2, |rank, group| {
        let mut state = sample(rank, 2, 0);
        if rank == 1 {
            state.insert("model.bias", 1);
        }
        save(group, &state, &storage)
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CheckpointError::Ranks { phase: Phase::Plan, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("model.bias"), "{text}");
    }
}

/// T8: PyTorch 2.15 silently picks one of several differing replicas.
#[test]
fn t08_ranks_that_contradict_each_other_are_refused() {
    let storage = memory();
    let results = on_ranks(2, |rank, group| {
        let value: Value = if rank == 0 {
            crate::harness::counting_whole(&[3], 0).into()
        } else {
            crate::harness::counting_whole(&[4], 0).into()
        };
        save(group, &StateDict::from([("t", value)]), &storage)
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("\"t\"") && text.contains("rank 1"), "{text}");
    }
}

#[test]
fn a_panicking_rank_does_not_leave_the_others_waiting() {
    let storage = memory();
    let results = on_ranks(3, |rank, group| {
        if rank == 2 {
            let thread = std::thread::spawn(move || {
                let _group = group;
                std::panic::panic_any("rank 2 has a bug");
            });
            assert!(thread.join().is_err());
            return None;
        }
        Some(save(group, &sample(rank, 3, 0), &storage))
    });
    for result in results.into_iter().flatten() {
        let text = dcp_core::error::error_chain(&result.unwrap_err());
        assert!(text.contains("rank 2"), "{text}");
    }
}

#[test]
fn a_canceled_save_releases_the_other_ranks() {
    let storage = memory();
    // Outside of the group, which breaks.
    let given_up = Barrier::new(2);
    let results = on_ranks(2, |rank, group| {
        if rank == 1 {
            // Rank 1 gives up before rank 0 even begins.
            drop_a_save(group, &storage);
            given_up.wait();
            return None;
        }
        given_up.wait();
        Some(save(group, &sample(rank, 2, 0), &storage))
    });
    let text = dcp_core::error::error_chain(results[0].as_ref().unwrap().as_ref().unwrap_err());
    assert!(text.contains("rank 1"), "{text}");
}

fn drop_a_save(group: Arc<dyn Collective>, storage: &Arc<dyn Storage>) {
    block_on(async {
        let (state, writer) = (sample(1, 2, 0), DcpWriter::new(Arc::clone(storage)));
        let saver = Saver::with_settings(Settings::in_group(group));
        let save = saver.save(&state, &writer);
        assert!(save.now_or_never().is_none());
    });
}

/// A rank that loses the group between the last write and the commit must not take its files
/// with it: the coordinator may be committing them.
#[test]
fn a_rank_that_loses_the_group_at_any_step_leaves_a_whole_checkpoint() {
    let (mut failed, mut committed) = (0, 0);
    let mut seen = HashSet::new();
    for failing in 0..3 {
        for operation in 1..=8 {
            let storage = memory();
            save_sample(3, &storage, 1);
            let results = on_boxed_ranks(3, |rank, group| {
                let group: Arc<dyn Collective> = if rank == failing {
                    Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die))
                } else {
                    group.into()
                };
                save(group, &sample(rank, 3, 2), &storage)
            });
            failed += results.iter().filter(|result| result.is_err()).count();
            // Panics when what is visible is not whole.
            let has_new = holds_sample(&storage, 2);
            for error in results.iter().filter_map(|result| result.as_ref().err()) {
                let CheckpointError::Lost { phase, standing, .. } = error else { continue };
                seen.insert((*phase, standing.to_string()));
                let text = error.to_string();
                match standing {
                    Standing::NotCommitted => assert!(!has_new, "{text}"),
                    Standing::Committed => assert!(has_new, "{text}"),
                    Standing::MayBeCommitted => {}
                    other => panic!("{other:?}: {text}"),
                }
            }
            if has_new {
                committed += 1;
            } else {
                assert!(results.iter().all(Result::is_err));
                assert!(holds_sample(&storage, 1), "rank {failing}, operation {operation}");
            }
        }
    }
    assert!(failed > 0 && committed > 0, "{failed} {committed}");
    for (phase, standing) in [
        (Phase::Plan, Standing::NotCommitted),
        (Phase::Write, Standing::NotCommitted),
        (Phase::Write, Standing::MayBeCommitted),
        (Phase::Commit, Standing::MayBeCommitted),
        (Phase::Commit, Standing::Committed),
    ] {
        assert!(seen.contains(&(phase, standing.to_string())), "{phase} {standing}: {seen:?}");
    }
}

/// A group whose second broadcast, the one that says that all ranks have written, arrives and is
/// lost all the same.
#[derive(Debug)]
struct LosesTheVerdict {
    inner: Box<dyn Collective>,
    broadcasts: AtomicU32,
}

impl Collective for LosesTheVerdict {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: u32, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.inner.gather(root, mine)
    }

    fn scatter(&self, root: u32, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.inner.scatter(root, all)
    }

    fn broadcast(&self, root: u32, from: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let message = self.inner.broadcast(root, from)?;
        if self.broadcasts.fetch_add(1, Ordering::SeqCst) == 1 {
            let message = "its answer was lost".into();
            return Err(CollectiveError::PeerLost { rank: root, op: "broadcast", message });
        }
        Ok(message)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.inner.all_gather(mine)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner.barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

#[test]
fn a_rank_that_does_not_hear_the_verdict_leaves_its_files_to_the_commit() {
    let storage = memory();
    save_sample(2, &storage, 1);
    let results = on_boxed_ranks(2, |rank, inner| {
        if rank == 1 {
            let group = LosesTheVerdict { inner, broadcasts: AtomicU32::new(0) };
            return save(Arc::new(group), &sample(rank, 2, 2), &storage);
        }
        // The commit takes its time, so that the other rank could do harm meanwhile.
        let slow: Arc<dyn Storage> =
            Arc::new(SlowStorage::new(Arc::clone(&storage), Duration::from_millis(10)));
        save(inner.into(), &sample(rank, 2, 2), &slow)
    });
    assert!(results[1].is_err());
    assert!(holds_sample(&storage, 2), "what was committed is whole");
}
