//! The channels that other processes open, until the group they are for takes them.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use dcp_core::Rank;

use super::TICK;
use super::channel::{Channel, Kind, Opening};

/// Groups that others may request before this rank does.
const MAX_GROUPS: usize = 1024;

/// The channels of one group that were not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    channels: Mutex<HashMap<(Rank, Kind), Arc<dyn Channel>>>,
    arrived: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, HashMap<(Rank, Kind), Arc<dyn Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the channel that `rank` opens, and checks every [`TICK`] whether to continue.
    pub(crate) fn take<E>(
        &self,
        rank: Rank,
        kind: Kind,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<Arc<dyn Channel>, E> {
        loop {
            let mut channels = self.lock();
            if !channels.contains_key(&(rank, kind)) {
                let wait = self.arrived.wait_timeout(channels, TICK);
                channels = wait.unwrap_or_else(PoisonError::into_inner).0;
            }
            if let Some(channel) = channels.remove(&(rank, kind)) {
                return Ok(channel);
            }
            drop(channels);
            go_on()?;
        }
    }
}

/// The channels that the other processes of a job open to this one. Of a group, each rank may open
/// one channel of each kind.
#[derive(Debug)]
pub struct Arrivals {
    world_size: u32,
    groups: Mutex<HashMap<u64, Arc<Inbox>>>,
}

/// The reason why a channel is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// The problem, in words.
    pub reason: &'static str,
    /// Whether another attempt may succeed.
    pub retry: bool,
}

impl Arrivals {
    /// For a job of so many processes.
    #[must_use]
    pub fn new(world_size: u32) -> Self {
        Self { world_size, groups: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Inbox>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a channel in, or returns why it is turned away. `welcome` answers the peer and makes the
    /// channel; it is called once the channel is certain to be taken.
    ///
    /// # Errors
    ///
    /// The error of `welcome`.
    pub fn put(
        &self,
        opening: Opening,
        welcome: impl FnOnce() -> io::Result<Arc<dyn Channel>>,
    ) -> io::Result<Option<TurnedAway>> {
        let away = |reason, retry| Ok(Some(TurnedAway { reason, retry }));
        if opening.rank >= opening.world_size || opening.world_size > self.world_size {
            return away("there is no such rank", false);
        }
        let inbox = {
            let mut groups = self.lock();
            if groups.len() >= MAX_GROUPS && !groups.contains_key(&opening.group) {
                return away("too many groups", true);
            }
            Arc::clone(groups.entry(opening.group).or_default())
        };
        let key = (opening.rank, opening.kind);
        let mut channels = inbox.lock();
        if channels.contains_key(&key) || channels.len() >= 2 * self.world_size as usize {
            return away("there is such a connection already", false);
        }
        channels.insert(key, welcome()?);
        inbox.arrived.notify_all();
        Ok(None)
    }

    pub(crate) fn inbox(&self, group: u64) -> Arc<Inbox> {
        Arc::clone(self.lock().entry(group).or_default())
    }

    pub(crate) fn forget(&self, group: u64) {
        self.lock().remove(&group);
    }
}
