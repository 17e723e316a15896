//! Ranks as threads of one process.

mod group;
mod shared;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

pub use self::group::LocalGroup;
use self::shared::{Deposit, Leaving, Output, Shared};
use crate::call::{Call, Op, Passed};

/// One rank of a group whose ranks are threads of this process.
///
/// A call returns when every rank of the group has made it. A rank that drops its handle, also
/// while it panics, is gone: a rank that waits for it gets [`CollectiveError::PeerLost`].
///
/// ```
/// use dcp_collectives::LocalCollective;
/// use dcp_core::{Collective, CollectiveError};
///
/// let sums = LocalCollective::run(4, |ranks| {
///     let all = ranks.all_gather(vec![ranks.rank() as u8].into())?;
///     Ok::<_, CollectiveError>(all.iter().map(|message| u32::from(message[0])).sum::<u32>())
/// });
/// assert_eq!(sums, vec![Ok(6); 4]);
/// ```
pub struct LocalCollective {
    shared: Arc<Shared>,
    rank: Rank,
    /// Held during a call: one rank makes its calls one after the other.
    calling: Mutex<()>,
}

impl LocalCollective {
    /// The handles of a new group of `world_size` ranks, in rank order, with
    /// [`DEFAULT_DEADLINE`](crate::DEFAULT_DEADLINE).
    #[must_use]
    pub fn group(world_size: u32) -> Vec<Self> {
        LocalGroup::new(world_size).build()
    }

    /// Runs `rank_main` on `world_size` threads, one a rank; see [`LocalGroup::run`].
    pub fn run<T, E, F>(world_size: u32, rank_main: F) -> Vec<Result<T, E>>
    where
        T: Send,
        E: From<CollectiveError> + Send,
        F: Fn(Self) -> Result<T, E> + Sync,
    {
        LocalGroup::new(world_size).run(rank_main)
    }

    /// A group of some ranks of this one, numbered as they stand in `ranks`.
    ///
    /// Every rank in `ranks`, and no other, calls this with the same `ranks`; it does not wait for
    /// the others. Calls and failures of the two groups are independent.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Rendezvous`] when `ranks` is empty, names a rank twice or one that does
    /// not exist, or leaves out this rank.
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Self, CollectiveError> {
        let rank = crate::call::position_in(ranks, self.rank, self.shared.world_size())?;
        Ok(Self::of(self.shared.subgroup(ranks, rank)?, rank))
    }

    fn of(shared: Arc<Shared>, rank: Rank) -> Self {
        Self { shared, rank, calling: Mutex::new(()) }
    }

    fn call(&self, call: Call, passed: Passed<'_>) -> Result<Entry<'_>, CollectiveError> {
        let turn = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.check(self.rank, call, passed)?;
        Ok(Entry { owner: self, call, _turn: turn })
    }
}

/// A checked call that can be made.
struct Entry<'a> {
    owner: &'a LocalCollective,
    call: Call,
    _turn: std::sync::MutexGuard<'a, ()>,
}

impl Entry<'_> {
    fn make(self, deposit: Deposit) -> Result<Output, CollectiveError> {
        self.owner.shared.exchange(self.owner.rank, self.call, deposit)
    }
}

impl Collective for LocalCollective {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world_size()
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let call = self.call(Call::new(Op::Gather, root), Passed::Mine)?;
        let output = call.make(Deposit::One(mine))?;
        Ok((self.rank == root).then(|| output.into_all()))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        let call = self.call(Call::new(Op::Scatter, root), Passed::All(all.as_deref()))?;
        Ok(call.make(all.map_or(Deposit::Nothing, Deposit::All))?.into_one())
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let call = self.call(Call::new(Op::Broadcast, root), Passed::Maybe(from_root.is_some()))?;
        Ok(call.make(from_root.map_or(Deposit::Nothing, Deposit::One))?.into_one())
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        let call = self.call(Call::new(Op::AllGather, 0), Passed::Mine)?;
        Ok(call.make(Deposit::One(mine))?.into_all())
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        let call = self.call(Call::new(Op::Barrier, 0), Passed::Mine)?;
        call.make(Deposit::Nothing).map(drop)
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(self.rank, reason);
    }
}

impl Drop for LocalCollective {
    fn drop(&mut self) {
        let leaving = if std::thread::panicking() { Leaving::Panicking } else { Leaving::Dropped };
        self.shared.leave(self.rank, leaving);
    }
}

impl fmt::Debug for LocalCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalCollective")
            .field("rank", &self.rank)
            .field("world_size", &self.shared.world_size())
            .finish_non_exhaustive()
    }
}
