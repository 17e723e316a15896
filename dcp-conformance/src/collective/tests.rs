//! The suite on groups that are sound, flawed, slow, or broken by a fault.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Instant;

use bytes::Bytes;
use dcp_core::{CollectiveError, Rank};

use super::*;
use crate::case::Failure;
use crate::{CollectiveFault, FaultCollective, SlowCollective};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    None,
    GathersBackwards,
    ScattersToTheWrongRank,
    BarrierIsOpen,
    ForgetsTheReason,
    AbortOnlyHere,
    BlamesTheWrongRank,
    SeesNoDeath,
    MixesOperations,
    Recovers,
    CutsLargeMessages,
    LeavingBreaks,
}

/// A group that meets in one place: every operation waits for every rank.
#[derive(Debug)]
struct Hub {
    flaw: Flaw,
    world_size: u32,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What each rank brought, by turn.
    turns: BTreeMap<u64, BTreeMap<Rank, Call>>,
    gone: BTreeMap<Rank, u64>,
    broken: Option<CollectiveError>,
}

#[derive(Clone, Debug)]
struct Call {
    op: &'static str,
    root: Option<Rank>,
    messages: Vec<Bytes>,
}

#[derive(Debug)]
struct Spoke {
    hub: Arc<Hub>,
    rank: Rank,
    turn: Mutex<u64>,
}

fn group(flaw: Flaw, world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let state = Mutex::default();
    let hub = Arc::new(Hub { flaw, world_size, deadline, state, changed: Condvar::new() });
    (0..world_size)
        .map(|rank| Box::new(Spoke { hub: Arc::clone(&hub), rank, turn: Mutex::new(0) }) as _)
        .collect()
}

impl Spoke {
    /// Brings a call, waits for those of all ranks, and returns them in rank order.
    fn meet(&self, call: Call) -> Result<Vec<Call>, CollectiveError> {
        let hub = &*self.hub;
        let mut turn = self.turn.lock().unwrap();
        let mut state = hub.state.lock().unwrap();
        if let Some(error) = &state.broken
            && hub.flaw != Flaw::Recovers
        {
            return Err(error.clone());
        }
        let op = call.op;
        let out_of_step = |rank, message: &str| CollectiveError::Mismatch {
            rank,
            op,
            message: message.to_owned(),
        };
        let bad_count = match (op, call.root == Some(self.rank)) {
            ("scatter", true) => call.messages.len() != hub.world_size as usize,
            ("broadcast", true) => call.messages.len() != 1,
            _ => false,
        };
        if bad_count || call.root.is_some_and(|root| root >= hub.world_size) {
            return Err(self.fail(&mut state, out_of_step(self.rank, "bad root or messages")));
        }
        *turn += 1;
        state.turns.entry(*turn).or_default().insert(self.rank, call);
        hub.changed.notify_all();
        let begun = Instant::now();
        loop {
            let hostile = hub.flaw == Flaw::LeavingBreaks && !state.gone.is_empty();
            if let Some(calls) = state.turns.get(&turn)
                && !hostile
                && (calls.len() == hub.world_size as usize
                    || op == "barrier" && hub.flaw == Flaw::BarrierIsOpen)
            {
                let calls = calls.values().cloned().collect::<Vec<_>>();
                let key = |call: &Call| (call.op, call.root);
                let odd = calls.iter().position(|call| key(call) != key(&calls[0]));
                if let Some(odd) = odd
                    && hub.flaw != Flaw::MixesOperations
                {
                    let error = out_of_step(odd as Rank, "it is at another operation");
                    return Err(self.fail(&mut state, error));
                }
                return Ok(calls);
            }
            if let Some(error) = &state.broken
                && hub.flaw != Flaw::Recovers
            {
                return Err(error.clone());
            }
            let here = |rank: &Rank| state.turns[&turn].contains_key(rank);
            let lost = state
                .gone
                .iter()
                .find(|(rank, last)| (**last < *turn || hostile) && **rank != self.rank);
            if let Some((&rank, _)) = lost
                && hub.flaw != Flaw::SeesNoDeath
            {
                let rank = if hub.flaw == Flaw::BlamesTheWrongRank { self.rank } else { rank };
                let error = CollectiveError::PeerLost { rank, op, message: "left".to_owned() };
                return Err(self.fail(&mut state, error));
            }
            let left = hub.deadline.saturating_sub(begun.elapsed());
            if left.is_zero() && hub.flaw != Flaw::SeesNoDeath {
                let rank = (0..hub.world_size).find(|rank| !here(rank)).unwrap_or(0);
                let deadline = hub.deadline;
                let error = CollectiveError::Timeout { rank, op, deadline };
                return Err(self.fail(&mut state, error));
            }
            let nap = left.clamp(Duration::from_millis(1), Duration::from_millis(100));
            state = hub.changed.wait_timeout(state, nap).unwrap().0;
        }
    }

    fn fail(&self, state: &mut State, error: CollectiveError) -> CollectiveError {
        let error = state.broken.get_or_insert(error).clone();
        self.hub.changed.notify_all();
        error
    }
}

impl Collective for Spoke {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.hub.world_size
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let messages = vec![mine];
        let calls = self.meet(Call { op: "gather", root: Some(root), messages })?;
        let mut all = calls.into_iter().flat_map(|call| call.messages).collect::<Vec<_>>();
        if self.hub.flaw == Flaw::GathersBackwards {
            all.reverse();
        }
        Ok((self.rank == root).then_some(all))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        let messages = all.unwrap_or_default();
        let calls = self.meet(Call { op: "scatter", root: Some(root), messages })?;
        let to = match self.hub.flaw {
            Flaw::ScattersToTheWrongRank => (self.rank + 1) % self.hub.world_size,
            _ => self.rank,
        };
        Ok(calls[root as usize].messages[to as usize].clone())
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let messages = from_root.into_iter().collect();
        let calls = self.meet(Call { op: "broadcast", root: Some(root), messages })?;
        let message = &calls[root as usize].messages[0];
        let cut = self.hub.flaw == Flaw::CutsLargeMessages;
        Ok(message.slice(..if cut { message.len().min(1 << 20) } else { message.len() }))
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        let messages = vec![mine];
        let calls = self.meet(Call { op: "all_gather", root: None, messages })?;
        Ok(calls.into_iter().flat_map(|call| call.messages).collect())
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.meet(Call { op: "barrier", root: None, messages: vec![] }).map(drop)
    }

    fn abort(&self, reason: &str) {
        if self.hub.flaw == Flaw::AbortOnlyHere {
            return;
        }
        let forgets = self.hub.flaw == Flaw::ForgetsTheReason;
        let reason = if forgets { String::new() } else { reason.to_owned() };
        let error = CollectiveError::Aborted { rank: self.rank, reason };
        self.fail(&mut self.hub.state.lock().unwrap(), error);
    }
}

impl Drop for Spoke {
    fn drop(&mut self) {
        let turn = *self.turn.lock().unwrap();
        self.hub.state.lock().unwrap().gone.insert(self.rank, turn);
        self.hub.changed.notify_all();
    }
}

fn check(clause: &str, timeout: Duration, build: Arc<Build>) -> Outcome {
    let case = cases().find(|case| case.name == clause).unwrap();
    let subject = Subject { build };
    run_thread(timeout, move || (case.run)(&subject))
}

/// A flawed group that makes a clause hang is found when this is over; a sound one is not tried so.
const HANGS: Duration = Duration::from_secs(4);

fn hub(flaw: Flaw) -> Arc<Build> {
    Arc::new(move |world_size, deadline| group(flaw, world_size, deadline))
}

/// Checks all the clauses at the same time, because most of them only wait.
fn check_all(
    timeout: Duration,
    checks: Vec<(&'static str, Arc<Build>)>,
) -> Vec<(&'static str, Outcome)> {
    let threads = checks
        .into_iter()
        .map(|(clause, build)| (clause, std::thread::spawn(move || check(clause, timeout, build))));
    let threads = threads.collect::<Vec<_>>();
    threads.into_iter().map(|(clause, thread)| (clause, thread.join().unwrap())).collect()
}

#[test]
fn a_sound_group_keeps_every_clause() {
    let clauses = cases().map(|case| (case.name, hub(Flaw::None))).collect();
    for (clause, outcome) in check_all(CASE_TIMEOUT, clauses) {
        outcome.unwrap_or_else(|failure| panic!("{clause}: {}", failure.message()));
    }
}

#[test]
fn a_slow_rank_breaks_nothing() {
    let slow: Arc<Build> = Arc::new(|world_size, deadline| {
        let delay = Duration::from_millis(2);
        let mut members = group(Flaw::None, world_size, deadline);
        let last = members.pop().unwrap();
        members.push(Box::new(SlowCollective::new(last, delay)));
        members
    });
    let clauses = cases().map(|case| (case.name, Arc::clone(&slow))).collect();
    for (clause, outcome) in check_all(CASE_TIMEOUT, clauses) {
        outcome.unwrap_or_else(|failure| panic!("{clause}: {}", failure.message()));
    }
}

#[test]
fn each_broken_promise_breaks_its_clause() {
    let expected = [
        (Flaw::GathersBackwards, "gather_brings_every_message_to_the_root_in_rank_order"),
        (Flaw::ScattersToTheWrongRank, "scatter_hands_each_rank_its_message"),
        (Flaw::BarrierIsOpen, "barrier_waits_until_every_rank_is_here"),
        (Flaw::ForgetsTheReason, "abort_reaches_every_waiting_rank_with_its_rank_and_reason"),
        (Flaw::AbortOnlyHere, "abort_poisons_the_rank_that_aborts"),
        (Flaw::BlamesTheWrongRank, "a_rank_that_dies_is_named_by_the_others_within_the_deadline"),
        (Flaw::SeesNoDeath, "a_rank_that_dies_between_operations_is_named"),
        (Flaw::MixesOperations, "ranks_at_different_operations_are_a_mismatch"),
        (Flaw::Recovers, "an_error_poisons_every_later_call"),
        (Flaw::CutsLargeMessages, "messages_may_be_large"),
        (Flaw::LeavingBreaks, "a_rank_may_leave_after_the_last_operation"),
    ];
    let checks = expected.iter().map(|&(flaw, clause)| (clause, hub(flaw))).collect();
    for ((flaw, _), (clause, outcome)) in expected.iter().zip(check_all(HANGS, checks)) {
        assert!(outcome.is_err(), "{flaw:?} is not found by {clause}");
    }
}

/// Runs barriers on three ranks, of which rank 1 has a fault in its second, until one fails.
fn broken_by(fault: &CollectiveFault) -> Vec<(u32, CollectiveError)> {
    let fault = fault.clone();
    let build: Arc<Build> = Arc::new(move |world_size, deadline| {
        let mut members = group(Flaw::None, world_size, deadline);
        let inner = members.remove(1);
        members.insert(1, Box::new(FaultCollective::new(inner, 2, fault.clone())));
        members
    });
    // A rank that has nothing more to say is still there.
    let over = Barrier::new(3);
    let run = |member: group::Member| -> Result<_, Failure> {
        for done in 0..5 {
            if let Err(error) = member.collective.barrier() {
                assert!(member.collective.barrier().is_err(), "it goes on after {error}");
                over.wait();
                return Ok((done, error));
            }
        }
        Err(Failure::new("nothing failed"))
    };
    Subject { build }.on_ranks(3, Duration::from_secs(3), run).unwrap()
}

#[test]
fn a_fault_is_seen_by_the_other_ranks_as_what_it_is() {
    let lost = |error: &CollectiveError| matches!(error, CollectiveError::PeerLost { rank: 1, .. });
    let late = |error: &CollectiveError| matches!(error, CollectiveError::Timeout { rank: 1, .. });
    for (done, error) in broken_by(&CollectiveFault::Die) {
        assert!(done == 1 && lost(&error), "{done}: {error:?}");
    }
    let aborted = CollectiveError::Aborted { rank: 1, reason: "enough".to_owned() };
    for (done, error) in broken_by(&CollectiveFault::Abort("enough".to_owned())) {
        assert_eq!((done, &error), (1, &aborted));
    }
    let failure = CollectiveError::Rendezvous { message: "cable".to_owned() };
    let seen = broken_by(&CollectiveFault::Fail(failure.clone()));
    assert_eq!(seen[1], (1, failure));
    for (done, error) in [&seen[0], &seen[2]] {
        assert!(*done == 1 && late(error), "{done}: {error:?}");
    }
    for (done, error) in broken_by(&CollectiveFault::Stall(Duration::from_secs(8))) {
        assert!(done == 1 && late(&error), "{done}: {error:?}");
    }
}
