//! Clauses on groups in which a rank dies, stalls, gives up or errs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError};

use super::Subject;
use super::group::{DEAD, PATIENT, SILENT, message, until_error};
use crate::case::{Failure, Outcome, ensure};

super::clauses![
    abort_reaches_every_waiting_rank_with_its_rank_and_reason,
    abort_reaches_the_next_call_of_every_rank,
    abort_is_seen_even_when_the_rank_then_leaves,
    abort_poisons_the_rank_that_aborts,
    abort_does_not_block,
    a_rank_that_dies_is_named_by_the_others_within_the_deadline,
    a_rank_that_dies_between_operations_is_named,
    a_silent_rank_is_named_within_the_deadline,
    ranks_at_different_operations_are_a_mismatch,
    different_roots_are_noticed,
    a_root_outside_of_the_group_is_an_error,
    scatter_of_too_few_messages_is_an_error,
    broadcast_of_nothing_is_an_error,
    an_error_poisons_every_later_call,
];

const WORLD_SIZE: u32 = 4;

/// Ranks whose failure is reported differently in a star, a tree or a ring.
const CULPRITS: [u32; 3] = [0, 1, WORLD_SIZE - 1];

/// A barrier of all ranks of a clause, whatever the group under test does.
struct Meeting(Barrier);

impl Meeting {
    fn new() -> Self {
        Self(Barrier::new(WORLD_SIZE as usize))
    }

    fn wait(&self) {
        self.0.wait();
    }
}

const REASON: &str = "disk full at step 7, é";

fn is_abort_of(error: &CollectiveError, culprit: u32) -> Outcome {
    match error {
        CollectiveError::Aborted { rank, reason } if *rank == culprit && reason == REASON => Ok(()),
        error => Err(Failure::new(format!(
            "it should have seen that rank {culprit} aborted with {REASON:?}, but got: {error:?}"
        ))),
    }
}

/// The calls of the rank that aborted, as many as the others make until one fails. After an abort they fail. Where
/// it did nothing they go through, on all ranks, so that none waits for a deadline to notice it.
fn call_after_abort(collective: &dyn Collective) {
    drop(until_error(PATIENT, || collective.barrier()));
}

fn abort_reaches_every_waiting_rank_with_its_rank_and_reason(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        let (here, seen) = (Meeting::new(), Meeting::new());
        subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
            here.wait();
            if member.rank == culprit {
                // The others most likely wait by then; if not, the outcome is the same.
                (0..100).for_each(|_| thread::yield_now());
                member.collective.abort(REASON);
                call_after_abort(&*member.collective);
                seen.wait();
                return Ok(());
            }
            let error = until_error(PATIENT, || member.collective.barrier());
            seen.wait();
            is_abort_of(&error?, culprit)
        })?;
    }
    Ok(())
}

fn abort_reaches_the_next_call_of_every_rank(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        let (aborted, seen) = (Meeting::new(), Meeting::new());
        subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
            member.collective.barrier()?;
            if member.rank == culprit {
                member.collective.abort(REASON);
                aborted.wait();
                call_after_abort(&*member.collective);
                seen.wait();
                return Ok(());
            }
            aborted.wait();
            let error = until_error(PATIENT, || member.collective.barrier());
            seen.wait();
            is_abort_of(&error?, culprit)
        })?;
    }
    Ok(())
}

fn abort_is_seen_even_when_the_rank_then_leaves(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
            member.collective.barrier()?;
            if member.rank == culprit {
                member.collective.abort(REASON);
                return Ok(());
            }
            let error = until_error(PATIENT, || member.collective.barrier())?;
            is_abort_of(&error, culprit)
        })?;
    }
    Ok(())
}

fn abort_poisons_the_rank_that_aborts(subject: &Subject) -> Outcome {
    for world_size in [1, 3] {
        subject.on_ranks(world_size, DEAD, |member| {
            member.collective.barrier()?;
            if member.rank == 0 {
                member.collective.abort(REASON);
                let outcome = member.collective.barrier();
                ensure!(outcome.is_err(), "it goes on after its own abort");
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn abort_does_not_block(subject: &Subject) -> Outcome {
    let aborted = Meeting::new();
    subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
        if member.rank == 1 {
            member.collective.abort(REASON);
        }
        // The others call nothing until the abort has returned.
        aborted.wait();
        Ok(())
    })?;
    Ok(())
}

fn a_rank_that_dies_is_named_by_the_others_within_the_deadline(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        subject.on_ranks(WORLD_SIZE, DEAD, |member| {
            if member.rank == culprit {
                return Ok(());
            }
            let error = until_error(DEAD, || member.collective.barrier())?;
            ensure!(error.rank() == Some(culprit), "rank {culprit} died, but it got: {error}");
            Ok(())
        })?;
    }
    Ok(())
}

fn a_rank_that_dies_between_operations_is_named(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        subject.on_ranks(WORLD_SIZE, DEAD, |member| {
            member.collective.barrier()?;
            member.collective.all_gather(message(0, member.rank, 0))?;
            if member.rank == culprit {
                return Ok(());
            }
            let mine = || message(1, member.rank, 0);
            let error = until_error(DEAD, || member.collective.all_gather(mine()))?;
            ensure!(error.rank() == Some(culprit), "rank {culprit} died, but it got: {error}");
            Ok(())
        })?;
    }
    Ok(())
}

/// The number of deadlines that may pass, one after the other, until a call must have ended.
const OVERDUE: u32 = 8;

/// The ranks that have returned from a call, for one that stays silent meanwhile.
#[derive(Default)]
struct Returned {
    ranks: Mutex<u32>,
    changed: Condvar,
}

impl Returned {
    fn note(&self) {
        *self.ranks.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Waits for all other ranks, for at most [`OVERDUE`] deadlines; whether they have returned.
    ///
    /// It waits for one deadline after the other, as the ranks do. So a machine that is too busy to wake a thread in
    /// time delays both, and the limit need not be so long that a deadline that is ignored passes.
    fn all_within(&self, deadline: Duration) -> bool {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..OVERDUE {
            let others = |ranks: &mut u32| *ranks + 1 < WORLD_SIZE;
            let waited = self.changed.wait_timeout_while(ranks, deadline, others);
            ranks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *ranks + 1 == WORLD_SIZE
    }
}

/// The reason that ranks do not name a silent one.
enum Unnamed {
    /// Their calls last many times as long as their deadline.
    Overdue(Failure),
    /// They name another one, as ranks that are late themselves do.
    Other(Failure),
}

fn silence_of(subject: &Subject, culprit: u32, deadline: Duration) -> Result<(), Unnamed> {
    let (here, returned, overdue) = (Meeting::new(), Returned::default(), AtomicBool::new(false));
    let ended = subject.on_ranks(WORLD_SIZE, deadline, |member| {
        here.wait();
        if member.rank == culprit {
            // When it leaves then, calls that know no deadline end.
            overdue.store(!returned.all_within(deadline), Ordering::SeqCst);
            return Ok(());
        }
        let error = until_error(deadline, || member.collective.barrier());
        returned.note();
        let error = error?;
        ensure!(error.rank() == Some(culprit), "rank {culprit} is silent, but it got: {error}");
        Ok(())
    });
    if overdue.load(Ordering::SeqCst) {
        let message = format!("calls with a deadline of {deadline:?} last {OVERDUE} times as long");
        return Err(Unnamed::Overdue(Failure::new(message)));
    }
    ended.map(drop).map_err(Unnamed::Other)
}

fn silences(subject: &Subject, deadline: Duration) -> Result<(), Unnamed> {
    thread::scope(|scope| {
        let groups =
            CULPRITS.map(|culprit| scope.spawn(move || silence_of(subject, culprit, deadline)));
        for group in groups {
            let panicked = |_| Err(Unnamed::Other(Failure::new("a group panicked")));
            group.join().unwrap_or_else(panicked)?;
        }
        Ok(())
    })
}

fn a_silent_rank_is_named_within_the_deadline(subject: &Subject) -> Outcome {
    let [short, long, longest] = SILENT;
    // A group may need some time whatever the deadline, so one that is overdue gets a longer one, too.
    let outcome = match silences(subject, short).or_else(|_| silences(subject, long)) {
        Err(Unnamed::Other(_)) => silences(subject, longest),
        outcome => outcome,
    };
    outcome.map_err(|(Unnamed::Overdue(failure) | Unnamed::Other(failure))| failure)
}

fn ranks_at_different_operations_are_a_mismatch(subject: &Subject) -> Outcome {
    for culprit in CULPRITS {
        let errors = subject.on_ranks(WORLD_SIZE, DEAD, |member| {
            let first = if member.rank == culprit {
                member.collective.all_gather(Bytes::from_static(b"early")).map(drop)
            } else {
                member.collective.barrier()
            };
            match first {
                Err(error) => Ok(error),
                Ok(()) => until_error(DEAD, || member.collective.barrier()),
            }
        })?;
        ensure!(
            errors.iter().any(|error| matches!(error, CollectiveError::Mismatch { .. })),
            "no rank saw that rank {culprit} is at another operation: {errors:?}"
        );
    }
    Ok(())
}

fn different_roots_are_noticed(subject: &Subject) -> Outcome {
    subject.on_ranks(3, DEAD, |member| {
        let root = u32::from(member.rank == 1);
        if member.collective.gather(root, message(0, member.rank, root)).is_ok() {
            until_error(DEAD, || member.collective.barrier())?;
        }
        Ok(())
    })?;
    Ok(())
}

fn a_root_outside_of_the_group_is_an_error(subject: &Subject) -> Outcome {
    for world_size in [1, 3] {
        subject.on_ranks(world_size, DEAD, |member| {
            let collective = &member.collective;
            for root in [world_size, u32::MAX] {
                ensure!(
                    collective.gather(root, Bytes::new()).is_err(),
                    "a gather to rank {root} of {world_size} succeeded"
                );
                ensure!(
                    collective.broadcast(root, None).is_err(),
                    "a broadcast from rank {root} of {world_size} succeeded"
                );
                ensure!(
                    collective.scatter(root, None).is_err(),
                    "a scatter from rank {root} of {world_size} succeeded"
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn scatter_of_too_few_messages_is_an_error(subject: &Subject) -> Outcome {
    fails_on_every_rank(subject, |collective| {
        let is_root = collective.rank() == 1;
        let all = is_root.then(|| vec![Bytes::new(); WORLD_SIZE as usize - 1]);
        collective.scatter(1, all).map(drop)
    })?;
    fails_on_every_rank(subject, |collective| collective.scatter(1, None).map(drop))
}

fn broadcast_of_nothing_is_an_error(subject: &Subject) -> Outcome {
    fails_on_every_rank(subject, |collective| collective.broadcast(1, None).map(drop))
}

fn fails_on_every_rank(
    subject: &Subject,
    op: fn(&dyn Collective) -> Result<(), CollectiveError>,
) -> Outcome {
    subject.on_ranks(WORLD_SIZE, DEAD, |member| {
        let error = until_error(DEAD, || op(&*member.collective))?;
        let is_culprit = member.rank == 1;
        ensure!(is_culprit || error.rank() == Some(1), "rank 1 erred, but it got: {error}");
        Ok(())
    })?;
    Ok(())
}

fn an_error_poisons_every_later_call(subject: &Subject) -> Outcome {
    subject.on_ranks(WORLD_SIZE, DEAD, |member| {
        let collective = &member.collective;
        let first = if member.rank == 2 {
            collective.abort(REASON);
            call_after_abort(&**collective);
            None
        } else {
            Some(until_error(DEAD, || collective.barrier()))
        };
        let first = first.transpose()?;
        let is_root = member.rank == 0;
        let later = [
            ("barrier", collective.barrier()),
            ("gather", collective.gather(0, Bytes::new()).map(drop)),
            ("scatter", {
                let all = is_root.then(|| vec![Bytes::new(); WORLD_SIZE as usize]);
                collective.scatter(0, all).map(drop)
            }),
            ("broadcast", collective.broadcast(0, is_root.then(Bytes::new)).map(drop)),
            ("all_gather", collective.all_gather(Bytes::new()).map(drop)),
        ];
        for (op, outcome) in later {
            ensure!(outcome.is_err(), "after {first:?}, {op} succeeded");
        }
        Ok(())
    })?;
    Ok(())
}
