//! Groups of processes over any channels: the calls, the news of failures, and subgroups.

pub(crate) mod channel;
mod edge;
mod exchange;
mod form;
pub(crate) mod frame;
mod group;
pub(crate) mod inbox;
mod link;
pub(crate) mod socket;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use dcp_core::digest::fnv1a_64;
use dcp_core::{Collective, CollectiveError, Rank};

pub use self::channel::{Channel, Kind, OpenError, Opening, Patience, Transport};
use self::exchange::Links;
use self::form::{Plan, form};
use self::group::Group;
pub use self::inbox::{Arrivals, TurnedAway};
use self::link::Turn;
use crate::call::{Call, Op, Passed, position_in};
use crate::deadline::Deadline;
use crate::poison::Poison;
use crate::tree::Tree;

/// The time that a blocked thread sleeps before it looks whether the group still stands.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// The group of all ranks.
const WORLD: u64 = 0;

/// The longest reason of an abort, in bytes; a longer one is cut.
const MAX_REASON: usize = 8 << 10;

/// The longest times and the longest message that calls may take.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// The longest that a call may take.
    pub deadline: Duration,
    /// The longest that forming the group, or a subgroup, may take.
    pub connect_timeout: Duration,
    /// The longest message to accept from a peer, in bytes.
    pub max_message: u64,
}

/// One rank of a group whose processes reach each other over channels of a [`Transport`].
///
/// Messages travel along binomial trees, in pieces, so that neither the time nor the memory of any
/// rank but the root grows with the number of ranks. A rank that only sends (in a gather, or as
/// the root of a broadcast) may return before the others have everything; a barrier waits for all.
///
/// Drop the handle when done. A process that ends without that counts as dead, and the others'
/// calls then fail.
pub struct Mesh {
    transport: Option<Arc<dyn Transport>>,
    group: Arc<Group>,
    members: Box<[Rank]>,
    limits: CallLimits,
    /// Held during a call: one rank makes its calls one after the other.
    links: Mutex<Links>,
    /// The number of subgroups that were made so far, by their ranks.
    made: Mutex<HashMap<Box<[Rank]>, u64>>,
}

impl Mesh {
    /// The group of all processes of a job, formed once every rank has called this.
    ///
    /// A group of one rank needs no transport.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Rendezvous`] when there is no such rank; any other error when a rank is
    /// lost or late.
    pub fn connect(
        transport: Option<Arc<dyn Transport>>,
        rank: Rank,
        world_size: u32,
        limits: CallLimits,
    ) -> Result<Self, CollectiveError> {
        if rank >= world_size || (world_size > 1 && transport.is_none()) {
            let message = format!("there is no rank {rank} of {world_size}");
            return Err(CollectiveError::Rendezvous { message });
        }
        let plan = Plan { id: WORLD, rank, limits, broken: &|| None };
        Self::form(transport, &plan, (0..world_size).collect())
    }

    /// A group of some ranks of this one, numbered as they stand in `ranks`.
    ///
    /// Every rank in `ranks`, and no other, calls this with the same `ranks`; it waits for all of
    /// them. Calls of the two groups are independent; so are failures, but that the end of a
    /// process is one in each of its groups.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Rendezvous`] when `ranks` is empty, names a rank twice or one that does
    /// not exist, or leaves out this rank; any other error when a rank is lost or late.
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Self, CollectiveError> {
        self.subgroup_within(ranks, self.limits.deadline)
    }

    /// As [`subgroup`](Self::subgroup), with another deadline for its calls.
    ///
    /// # Errors
    ///
    /// As [`subgroup`](Self::subgroup).
    pub fn subgroup_within(
        &self,
        ranks: &[Rank],
        deadline: Duration,
    ) -> Result<Self, CollectiveError> {
        let rank = position_in(ranks, self.group.rank, self.group.world_size)?;
        let made = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let made = made.entry(ranks.into()).or_default();
            *made += 1;
            *made
        };
        let id = subgroup_id(self.group.id, ranks, made);
        let member = |rank: &Rank| self.members.get(*rank as usize).copied();
        let members = ranks.iter().filter_map(member).collect();
        let broken = || self.group.poison();
        if let Some(poison) = broken() {
            return Err(poison.seen_by(self.group.rank));
        }
        let plan =
            Plan { id, rank, limits: CallLimits { deadline, ..self.limits }, broken: &broken };
        Self::form(self.transport.clone(), &plan, members).map_err(|error| {
            // A rank that did not come in time is no sign of news.
            let poison = match &error {
                CollectiveError::Timeout { .. } => self.group.poison(),
                _ => self.group.poison_within_grace(),
            };
            match poison {
                Some(poison) => poison.seen_by(self.group.rank),
                None => renumbered(error, ranks),
            }
        })
    }

    /// Forms a group, in which every rank is then known to be there.
    fn form(
        transport: Option<Arc<dyn Transport>>,
        plan: &Plan<'_>,
        members: Box<[Rank]>,
    ) -> Result<Self, CollectiveError> {
        let group = form(transport.as_deref(), &members, plan)?;
        let limits = plan.limits;
        let links = Mutex::new(Links::new(transport.clone(), members.clone()));
        let formed = Self { transport, group, members, limits, links, made: Mutex::default() };
        formed.barrier()?;
        Ok(formed)
    }

    /// Makes one call: checks it, counts it, and lets `exchange` move the messages.
    fn call<T>(
        &self,
        call: Call,
        passed: Passed<'_>,
        exchange: impl FnOnce(&mut Links, &Turn<'_>, Tree) -> Result<T, Poison>,
    ) -> Result<T, CollectiveError> {
        let group = &*self.group;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Deadline::after(self.limits.deadline);
        let done = Poison::check(call, group.rank, group.world_size, passed)
            .map_err(|poison| group.fail(poison))
            .and_then(|()| group.enter(call))
            .and_then(|seq| {
                let max_message = self.limits.max_message;
                let turn = Turn { group, call, seq, deadline, max_message };
                exchange(&mut links, &turn, Tree::new(group.world_size, call.root, group.rank))
            });
        group.exit();
        done.map_err(|poison| poison.seen_by(group.rank))
    }
}

/// The number of a subgroup, the same on all its ranks: FNV-1a of what they agree on.
fn subgroup_id(parent: u64, ranks: &[Rank], made: u64) -> u64 {
    let numbers = [parent, made].into_iter().chain(ranks.iter().copied().map(u64::from));
    fnv1a_64(numbers.flat_map(u64::to_le_bytes)).max(WORLD + 1)
}

/// An error in forming a subgroup, with the rank as the group counts from which it is made.
fn renumbered(mut error: CollectiveError, ranks: &[Rank]) -> CollectiveError {
    if let CollectiveError::PeerLost { rank, .. }
    | CollectiveError::Timeout { rank, .. }
    | CollectiveError::Aborted { rank, .. }
    | CollectiveError::Mismatch { rank, .. } = &mut error
    {
        *rank = ranks.get(*rank as usize).copied().unwrap_or(*rank);
    }
    error
}

/// Puts messages that are in order of place into rank order.
fn by_rank(mut messages: Vec<Bytes>, root: Rank) -> Vec<Bytes> {
    let ranks = messages.len();
    messages.rotate_right((root as usize).min(ranks));
    messages
}

impl Collective for Mesh {
    fn rank(&self) -> Rank {
        self.group.rank
    }

    fn world_size(&self) -> u32 {
        self.group.world_size
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let call = Call::new(Op::Gather, root);
        let messages =
            self.call(call, Passed::Mine, |links, turn, tree| links.up(turn, tree, Some(mine)))?;
        Ok((self.group.rank == root).then(|| by_rank(messages, root)))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        let call = Call::new(Op::Scatter, root);
        self.call(call, Passed::All(all.as_deref()), |links, turn, tree| {
            let mut messages = all.clone().unwrap_or_default();
            let ranks = messages.len();
            messages.rotate_left((root as usize).min(ranks));
            links.down_each(turn, tree, &messages)
        })
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let call = Call::new(Op::Broadcast, root);
        let mut messages =
            self.call(call, Passed::Maybe(from_root.is_some()), |links, turn, tree| {
                links.down_all(turn, tree, 1, Vec::from_iter(from_root.clone()))
            })?;
        Ok(messages.pop().unwrap_or_default())
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.call(Call::new(Op::AllGather, 0), Passed::Mine, |links, turn, tree| {
            let messages = links.up(turn, tree, Some(mine))?;
            links.down_all(turn, tree, turn.group.world_size, messages)
        })
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.call(Call::new(Op::Barrier, 0), Passed::Mine, |links, turn, tree| {
            links.up(turn, tree, None)?;
            links.down_all(turn, tree, 0, Vec::new()).map(drop)
        })
    }

    fn abort(&self, reason: &str) {
        let fits = |(at, char): (usize, char)| at + char.len_utf8() <= MAX_REASON;
        let reason = reason.char_indices().take_while(|next| fits(*next)).map(|(_, char)| char);
        self.group.fail(Poison::Aborted { rank: self.group.rank, reason: reason.collect() });
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if thread::panicking() {
            let (rank, message) = (self.group.rank, "its thread panicked".to_owned());
            self.group.fail(Poison::Lost { rank, op: Op::Idle, message });
        }
        self.group.close();
        if let Some(transport) = &self.transport {
            transport.arrivals().forget(self.group.id);
        }
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("rank", &self.group.rank)
            .field("world_size", &self.group.world_size)
            .finish_non_exhaustive()
    }
}
