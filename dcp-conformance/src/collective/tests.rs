//! The suite on groups that are sound, flawed, slow, or broken by a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Barrier, Condvar, Mutex};

use bytes::Bytes;
use dcp_core::{CollectiveError, Rank};

use super::group::{PATIENT, SILENT};
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
    AbortDoesNothing,
    BlamesTheWrongRank,
    SeesNoDeath,
    MixesOperations,
    Recovers,
    CutsLargeMessages,
    LeavingBreaks,
    IgnoresItsDeadline,
}

/// A group that meets in one place: every operation waits for every rank.
#[derive(Debug)]
struct Hub {
    flaw: Flaw,
    world_size: u32,
    deadline: Duration,
    /// The turn from which a call times out as soon as all ranks but one wait in it. So time passes
    /// when a test says so, and no machine is too busy.
    overdue_from: Option<u64>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The call of each rank, by turn.
    turns: BTreeMap<u64, BTreeMap<Rank, Call>>,
    gone: BTreeMap<Rank, u64>,
    broken: Option<CollectiveError>,
    /// The ranks that have seen that it is broken.
    seen_by: BTreeSet<Rank>,
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

impl Hub {
    fn new(flaw: Flaw, world_size: u32, deadline: Duration) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { flaw, world_size, deadline, overdue_from: None, state, changed }
    }

    fn members(self: &Arc<Self>) -> Vec<Box<dyn Collective>> {
        (0..self.world_size)
            .map(|rank| Box::new(Spoke { hub: Arc::clone(self), rank, turn: Mutex::new(0) }) as _)
            .collect()
    }

    /// Returns when a call of a rank has failed.
    fn wait_until_broken(&self) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| state.broken.is_none()).unwrap());
    }
}

fn group(flaw: Flaw, world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let waits = SILENT.contains(&deadline) && flaw != Flaw::IgnoresItsDeadline;
    let overdue_from = waits.then_some(1);
    Arc::new(Hub { overdue_from, ..Hub::new(flaw, world_size, deadline) }).members()
}

impl Spoke {
    /// Brings a call, waits for those of all ranks, and returns them in rank order.
    fn meet(&self, call: Call) -> Result<Vec<Call>, CollectiveError> {
        let hub = &*self.hub;
        let mut turn = self.turn.lock().unwrap();
        let mut state = hub.state.lock().unwrap();
        if let Some(error) = self.broken(&mut state) {
            return Err(error);
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
        loop {
            let hostile = hub.flaw == Flaw::LeavingBreaks && !state.gone.is_empty();
            if let Some(calls) = state.turns.get(&turn)
                && !hostile
                && (calls.len() == hub.world_size as usize
                    || hub.flaw == Flaw::SeesNoDeath
                        && (0..hub.world_size).all(|rank| {
                            calls.contains_key(&rank) || state.gone.contains_key(&rank)
                        })
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
            if let Some(error) = self.broken(&mut state) {
                state.turns.entry(*turn).or_default().remove(&self.rank);
                *turn -= 1;
                return Err(error);
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
            let missing = (0..hub.world_size).filter(|rank| !here(rank)).collect::<Vec<_>>();
            if let [rank] = *missing
                && hub.overdue_from.is_some_and(|first| first <= *turn)
            {
                let error = CollectiveError::Timeout { rank, op, deadline: hub.deadline };
                return Err(self.fail(&mut state, error));
            }
            state = hub.changed.wait(state).unwrap();
        }
    }

    /// The reason that the group is broken; a group that recovers says so once to each rank.
    fn broken(&self, state: &mut State) -> Option<CollectiveError> {
        let is_new = state.broken.is_some() && state.seen_by.insert(self.rank);
        state.broken.clone().filter(|_| is_new || self.hub.flaw != Flaw::Recovers)
    }

    fn fail(&self, state: &mut State, error: CollectiveError) -> CollectiveError {
        let error = state.broken.get_or_insert(error).clone();
        state.seen_by.insert(self.rank);
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
        if self.hub.flaw == Flaw::AbortDoesNothing {
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

fn check(clause: &str, build: Arc<Build>) -> Outcome {
    let case = cases().find(|case| case.name == clause).unwrap();
    let subject = Subject { build };
    run_thread(CASE_TIMEOUT, move || (case.run)(&subject))
}

fn hub(flaw: Flaw) -> Arc<Build> {
    Arc::new(move |world_size, deadline| group(flaw, world_size, deadline))
}

/// Checks all the clauses at the same time, because most of them only wait.
fn check_all(checks: Vec<(&'static str, Arc<Build>)>) -> Vec<(&'static str, Outcome)> {
    let threads = checks
        .into_iter()
        .map(|(clause, build)| (clause, std::thread::spawn(move || check(clause, build))));
    let threads = threads.collect::<Vec<_>>();
    threads.into_iter().map(|(clause, thread)| (clause, thread.join().unwrap())).collect()
}

#[test]
fn a_sound_group_keeps_every_clause() {
    let clauses = cases().map(|case| (case.name, hub(Flaw::None))).collect();
    for (clause, outcome) in check_all(clauses) {
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
    for (clause, outcome) in check_all(clauses) {
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
        (Flaw::AbortDoesNothing, "abort_poisons_the_rank_that_aborts"),
        (Flaw::AbortDoesNothing, "abort_reaches_every_waiting_rank_with_its_rank_and_reason"),
        (Flaw::AbortDoesNothing, "abort_reaches_the_next_call_of_every_rank"),
        (Flaw::AbortDoesNothing, "abort_is_seen_even_when_the_rank_then_leaves"),
        (Flaw::AbortDoesNothing, "an_error_poisons_every_later_call"),
        // The calls last until the silent rank leaves.
        (Flaw::IgnoresItsDeadline, "a_silent_rank_is_named_within_the_deadline"),
        (Flaw::BlamesTheWrongRank, "a_rank_that_dies_is_named_by_the_others_within_the_deadline"),
        (Flaw::SeesNoDeath, "a_rank_that_dies_between_operations_is_named"),
        (Flaw::MixesOperations, "ranks_at_different_operations_are_a_mismatch"),
        (Flaw::Recovers, "an_error_poisons_every_later_call"),
        (Flaw::CutsLargeMessages, "messages_may_be_large"),
        (Flaw::LeavingBreaks, "a_rank_may_leave_after_the_last_operation"),
    ];
    let checks = expected.iter().map(|&(flaw, clause)| (clause, hub(flaw))).collect();
    for ((flaw, _), (clause, outcome)) in expected.iter().zip(check_all(checks)) {
        let failure = outcome.expect_err(&format!("{flaw:?} is not found by {clause}"));
        let hung = failure.message().contains("did not end");
        assert!(!hung, "{clause} waits for {flaw:?} until it counts as hung");
    }
}

/// Runs barriers on three ranks, of which rank 1 has a fault in its second, until one fails.
fn broken_by(fault: &CollectiveFault) -> Vec<(u32, CollectiveError)> {
    let fault = fault.clone();
    let waits = matches!(fault, CollectiveFault::Fail(_) | CollectiveFault::Stall(_));
    let build: Arc<Build> = Arc::new(move |world_size, deadline| {
        let overdue_from = waits.then_some(2);
        let hub = Arc::new(Hub { overdue_from, ..Hub::new(Flaw::None, world_size, deadline) });
        let mut members = hub.members();
        let broken = FaultCollective::new(members.remove(1), 2, fault.clone());
        let broken = broken.with_sleep(move |_| hub.wait_until_broken());
        members.insert(1, Box::new(broken));
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
    Subject { build }.on_ranks(3, PATIENT, run).unwrap()
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
    for (done, error) in broken_by(&CollectiveFault::Stall(2 * PATIENT)) {
        assert!(done == 1 && late(&error), "{done}: {error:?}");
    }
}
