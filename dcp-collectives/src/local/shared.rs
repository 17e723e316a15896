//! The state in which the threads of a local group meet.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use dcp_core::{CollectiveError, Rank};

use crate::call::{Call, Op, Passed};
use crate::deadline::Deadline;
use crate::poison::Poison;

/// The messages that a rank brings to a call.
#[derive(Debug)]
pub(super) enum Deposit {
    Nothing,
    One(Bytes),
    All(Vec<Bytes>),
}

/// The messages that a rank takes from a call.
#[derive(Clone, Debug)]
pub(super) enum Output {
    Nothing,
    One(Bytes),
    All(Arc<[Bytes]>),
}

impl Output {
    pub(super) fn into_one(self) -> Bytes {
        match self {
            Self::One(message) => message,
            Self::Nothing | Self::All(_) => Bytes::new(),
        }
    }

    pub(super) fn into_all(self) -> Vec<Bytes> {
        match self {
            Self::Nothing => Vec::new(),
            Self::One(message) => vec![message],
            Self::All(messages) => messages.to_vec(),
        }
    }
}

/// The way in which a rank drops its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    Dropped,
    Panicking,
}

impl Leaving {
    fn message(self) -> String {
        match self {
            Self::Dropped => "it dropped its handle",
            Self::Panicking => "its thread panicked",
        }
        .to_owned()
    }
}

/// One group.
#[derive(Debug)]
pub(super) struct Shared {
    world_size: u32,
    deadline: Duration,
    /// Whether a supervisor reports panics of the threads with their messages.
    supervised: bool,
    state: Mutex<State>,
    changed: Condvar,
}

/// The call that is going on. A rank cannot make the next call before it took what it gets from
/// this one, so there is never more than one.
#[derive(Debug)]
struct State {
    poison: Option<Poison>,
    /// The call, and the rank that made it first.
    call: Option<(Rank, Call)>,
    deposits: Vec<Option<Deposit>>,
    entered: u32,
    outputs: Vec<Option<Output>>,
    left: Vec<Option<Leaving>>,
    subgroups: HashMap<(Box<[Rank]>, u64), Subgroup>,
    /// The number of subgroups that a rank made so far, by their ranks and that rank.
    made: HashMap<(Box<[Rank]>, Rank), u64>,
}

/// A subgroup that some of its ranks have not joined yet.
#[derive(Debug)]
struct Subgroup {
    shared: Arc<Shared>,
    joined: Vec<bool>,
}

impl Shared {
    pub(super) fn new(world_size: u32, deadline: Duration, supervised: bool) -> Arc<Self> {
        let state = State {
            poison: None,
            call: None,
            deposits: (0..world_size).map(|_| None).collect(),
            entered: 0,
            outputs: (0..world_size).map(|_| None).collect(),
            left: vec![None; world_size as usize],
            subgroups: HashMap::new(),
            made: HashMap::new(),
        };
        let state = Mutex::new(state);
        Arc::new(Self { world_size, deadline, supervised, state, changed: Condvar::new() })
    }

    pub(super) fn world_size(&self) -> u32 {
        self.world_size
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Poisons the group unless it is, and returns the error that `rank` gets.
    fn poison(&self, state: &mut State, rank: Rank, poison: Poison) -> CollectiveError {
        let poison = state.poison.get_or_insert(poison);
        self.changed.notify_all();
        poison.seen_by(rank)
    }

    /// Checks the call that `rank` is about to make.
    pub(super) fn check(
        &self,
        rank: Rank,
        call: Call,
        passed: Passed<'_>,
    ) -> Result<(), CollectiveError> {
        Poison::check(call, rank, self.world_size, passed)
            .map_err(|poison| self.poison(&mut self.lock(), rank, poison))
    }

    /// Makes a call: waits for every rank, then returns this one's share.
    pub(super) fn exchange(
        &self,
        rank: Rank,
        call: Call,
        deposit: Deposit,
    ) -> Result<Output, CollectiveError> {
        let deadline = Deadline::after(self.deadline);
        let op = call.op;
        let mut state = self.lock();
        if let Some(poison) = &state.poison {
            return Err(poison.seen_by(rank));
        }
        if let Some((gone, leaving)) = state.first_that_left() {
            let message = leaving.message();
            return Err(self.poison(&mut state, rank, Poison::Lost { rank: gone, op, message }));
        }
        let first = *state.call.get_or_insert((rank, call));
        if first.1 != call {
            let differ = Poison::Differ { one: first, other: (rank, call) };
            return Err(self.poison(&mut state, rank, differ));
        }
        state.enter(rank, deposit);
        if state.entered == self.world_size {
            state.distribute(call);
            self.changed.notify_all();
        }
        loop {
            if let Some(output) = state.take_output(rank) {
                return Ok(output);
            }
            if let Some(poison) = &state.poison {
                return Err(poison.seen_by(rank));
            }
            let Some(left) = deadline.left() else {
                let late = Poison::Timeout { rank: state.late(), op, deadline: self.deadline };
                return Err(self.poison(&mut state, rank, late));
            };
            (state, _) =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn abort(&self, rank: Rank, reason: &str) {
        let mut state = self.lock();
        state.for_each_unjoined(rank, |subgroup, position| subgroup.abort(position, reason));
        let reason = reason.to_owned();
        self.poison(&mut state, rank, Poison::Aborted { rank, reason });
    }

    /// Notes that `rank` will make no more calls.
    pub(super) fn leave(&self, rank: Rank, leaving: Leaving) {
        if self.supervised && leaving == Leaving::Panicking {
            return;
        }
        let mut state = self.lock();
        if let Some(left) = state.left.get_mut(rank as usize) {
            *left = Some(leaving);
        }
        state.for_each_unjoined(rank, |subgroup, position| subgroup.leave(position, leaving));
        if let Some((_, call)) = state.call {
            let (op, message) = (call.op, leaving.message());
            self.poison(&mut state, rank, Poison::Lost { rank, op, message });
        }
    }

    /// The place of a rank in the next subgroup of `ranks` that it has not joined; it stands at
    /// `position` in `ranks`.
    pub(super) fn subgroup(
        &self,
        ranks: &[Rank],
        position: Rank,
    ) -> Result<Arc<Self>, CollectiveError> {
        let me = ranks.get(position as usize).copied().unwrap_or_default();
        let mut state = self.lock();
        if let Some(poison) = &state.poison {
            return Err(poison.seen_by(me));
        }
        let made = state.made.entry((ranks.into(), me)).or_default();
        let key = (Box::from(ranks), *made);
        *made += 1;
        let State { subgroups, left, .. } = &mut *state;
        let subgroup = subgroups.entry(key.clone()).or_insert_with(|| {
            let size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
            let shared = Self::new(size, self.deadline, false);
            for (position, member) in (0..).zip(ranks) {
                if let Some(Some(leaving)) = left.get(*member as usize) {
                    shared.leave(position, *leaving);
                }
            }
            Subgroup { shared, joined: vec![false; ranks.len()] }
        });
        if let Some(joined) = subgroup.joined.get_mut(position as usize) {
            *joined = true;
        }
        let shared = Arc::clone(&subgroup.shared);
        if subgroup.joined.iter().all(|joined| *joined) {
            subgroups.remove(&key);
        }
        Ok(shared)
    }
}

impl State {
    /// The subgroups that wait for `rank` to join, each with its position there.
    fn for_each_unjoined(&self, rank: Rank, act: impl Fn(&Shared, Rank)) {
        for ((ranks, _), subgroup) in &self.subgroups {
            for ((position, member), joined) in (0..).zip(ranks).zip(&subgroup.joined) {
                if *member == rank && !joined {
                    act(&subgroup.shared, position);
                }
            }
        }
    }

    fn first_that_left(&self) -> Option<(Rank, Leaving)> {
        (0..).zip(&self.left).find_map(|(rank, left)| left.map(|leaving| (rank, leaving)))
    }

    fn enter(&mut self, rank: Rank, deposit: Deposit) {
        if let Some(slot) = self.deposits.get_mut(rank as usize) {
            *slot = Some(deposit);
            self.entered += 1;
        }
    }

    /// The first rank that has not made the call.
    fn late(&self) -> Rank {
        (0..).zip(&self.deposits).find(|(_, slot)| slot.is_none()).map_or(0, |(rank, _)| rank)
    }

    fn take_output(&mut self, rank: Rank) -> Option<Output> {
        self.outputs.get_mut(rank as usize)?.take()
    }

    /// Turns the deposits of the ranks into their outputs.
    fn distribute(&mut self, call: Call) {
        self.call = None;
        self.entered = 0;
        let root = call.root as usize;
        let mut deposits = self.deposits.iter_mut().map(Option::take).collect::<Vec<_>>();
        let one = |deposit: Option<Deposit>| match deposit {
            Some(Deposit::One(message)) => message,
            _ => Bytes::new(),
        };
        let outputs = self.outputs.iter_mut();
        match call.op {
            Op::Barrier | Op::Idle | Op::Rendezvous => {
                outputs.for_each(|slot| *slot = Some(Output::Nothing))
            }
            Op::Broadcast => {
                let message = one(deposits.get_mut(root).and_then(Option::take));
                outputs.for_each(|slot| *slot = Some(Output::One(message.clone())));
            }
            Op::Scatter => {
                let messages = match deposits.get_mut(root).and_then(Option::take) {
                    Some(Deposit::All(messages)) => messages,
                    _ => Vec::new(),
                };
                for (slot, message) in outputs.zip(messages) {
                    *slot = Some(Output::One(message));
                }
            }
            Op::AllGather => {
                let messages = deposits.into_iter().map(one).collect::<Arc<[Bytes]>>();
                outputs.for_each(|slot| *slot = Some(Output::All(Arc::clone(&messages))));
            }
            Op::Gather => {
                let messages = deposits.into_iter().map(one).collect::<Arc<[Bytes]>>();
                for (rank, slot) in outputs.enumerate() {
                    *slot = Some(if rank == root {
                        Output::All(Arc::clone(&messages))
                    } else {
                        Output::Nothing
                    });
                }
            }
        }
    }
}
