//! Distributes the shards of a replica group for a save.
//!
//! Each rank sends an offer of fingerprints to the coordinator, which broadcasts a decision. With
//! `Repeat`, every rank uses the distribution that it remembers. Otherwise the coordinator takes the
//! distribution from its file or has ranks send their inventories, of equal lists of shards only the
//! first, and scatters to each rank the bits of its shards. Invariant: a distribution is used again
//! only when its fingerprint, of the rule, the world ranks and all that each rank holds, is the same.
//! No rank can decide that alone: a change on another rank may change its own share.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::Phase;
use dcp_core::plan::SavePlan;
use dcp_core::{CheckpointError, Collective, PlanError, Rank, Storage};
use dcp_engine::Group;
use dcp_planner::ShareRule;
use serde::{Deserialize, Serialize};

use super::cache::DiskCache;
use super::distribution::{Distribution, Purpose, distribute_different};
use super::inventory::{Fingerprint, Inventory, digest, pack, unpack};
use crate::error::MegatronError;
use crate::save::SaveDistribution;
use crate::sharded::ShardedTensor;

/// Shares the writing of a save among the ranks of a parallelization group: Megatron-Core's
/// `FullyParallelSaveStrategyWrapper`.
///
/// Every rank of the group makes one, keeps it for all its saves, and gives it to
/// [`MegatronSaveOptions::distribution`](crate::MegatronSaveOptions::distribution): one rank's copy of every shard
/// becomes the main replica. Objects keep their replica ids. For saves of another kind there is
/// [`redistribute`](Self::redistribute).
///
/// What ranks exchanged once is remembered and holds while nothing changes: before every save they
/// compare fingerprints of 16 bytes of all that they hold. (Megatron-Core with
/// `do_cache_distribution` takes the first distribution for all later saves, whatever became of
/// the state: a shard that is new then has no writer.) With [`cache_in`](Self::cache_in) it outlives
/// the process, under the same condition.
///
/// A shard with several main replicas in the group is refused. Other errors of the sharding are
/// not found here, and the original replica ids are needed to find them, so validate before this.
/// [`save`](crate::save) does, and validates again with the new ids, which decide what is written.
#[doc(alias = "FullyParallelSaveStrategyWrapper")]
#[derive(Debug)]
pub struct ParallelSave {
    collective: Arc<dyn Collective>,
    world_rank: Rank,
    rule: ShareRule,
    disk: Option<DiskCache>,
    /// The latest last.
    remembered: Mutex<Vec<Remembered>>,
}

/// The result of [`ParallelSave::redistribute`] on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Redistribution {
    /// The source of the distribution.
    pub origin: DistributionOrigin,
    /// Shards that this rank writes.
    pub shards: u64,
    /// Their bytes.
    pub byte_len: u64,
}

/// The source of a distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DistributionOrigin {
    /// The group is one rank; its shards stay as they are.
    Alone,
    /// The ranks exchanged what they hold.
    Exchange,
    /// Nothing has changed since an earlier save of this process.
    Memory,
    /// Nothing has changed since a save of an earlier process.
    Disk,
}

#[derive(Clone, Debug)]
struct Remembered {
    mine: Fingerprint,
    group: Fingerprint,
    owned: Vec<bool>,
}

/// Distributions to remember: a trainer has one or two kinds of save.
const KINDS_KEPT: usize = 2;

/// The first message of a rank to the others.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    world_rank: Rank,
    shards: u64,
    /// Of its shards alone.
    list: Fingerprint,
    /// Of everything.
    mine: Fingerprint,
    /// The group whose distribution it remembers for exactly this.
    remembers: Option<Fingerprint>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Decision {
    /// As it was.
    Repeat,
    /// It is in the cache of the coordinator.
    Known,
    /// Every rank sends which shards are main replicas, and these ranks also the shards.
    Send { lists: Vec<Rank> },
}

impl ParallelSave {
    /// Shares the work among the ranks of `collective`: the data-parallel group, with its
    /// context-parallel ranks, that this rank is in.
    #[must_use]
    pub fn new(collective: Arc<dyn Collective>) -> Self {
        Self {
            world_rank: collective.rank(),
            collective,
            rule: ShareRule::default(),
            disk: None,
            remembered: Mutex::default(),
        }
    }

    /// This rank among all ranks; by default its rank in the group. Failures call it so.
    #[must_use]
    pub fn world_rank(mut self, rank: Rank) -> Self {
        self.world_rank = rank;
        self
    }

    /// By which rule; the same on all ranks. [`ShareRule::Balanced`] by default;
    /// [`ShareRule::Megatron`] for files like Megatron-Core's.
    #[must_use]
    pub fn rule(mut self, rule: ShareRule) -> Self {
        self.rule = rule;
        self
    }

    /// Keeps the distribution in a file for each group, `distribution_<lowest rank>.dcp`, for later
    /// processes. Only the first rank of each group reads and writes it. (Megatron-Core's
    /// `pg_dist_<lowest rank>.pkl` is a pickle and never checked; this one holds bits, and counts
    /// only when it is whole and of exactly these shards.)
    ///
    /// `world_rank` is this rank among all ranks, as of [`world_rank`](Self::world_rank): by their
    /// ranks in themselves, all groups would have the same file.
    #[must_use]
    pub fn cache_in(mut self, storage: Arc<dyn Storage>, world_rank: Rank) -> Self {
        self.world_rank = world_rank;
        self.disk = Some(DiskCache::new(storage));
        self
    }

    /// Makes one copy in the group of each shard that has its main replica in it the main replica,
    /// and all others not.
    ///
    /// Called by all ranks of the group together, each with all its shards. The replica ids it
    /// leaves are 0 and 1, as Megatron-Core's. A group of one is left alone.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Ranks`] on every rank when ranks disagree about a shard, several claim
    /// its main replica, or one has a flattened shard; [`CheckpointError::Lost`] when a rank is lost. The ids are then as
    /// they were.
    pub async fn redistribute(
        &self,
        mut tensors: Vec<&mut ShardedTensor>,
    ) -> Result<Redistribution, MegatronError> {
        let inventory = Inventory::of(tensors.iter().map(|tensor| &**tensor));
        let (done, owned) = self.distribute(inventory).await?;
        if done.origin != DistributionOrigin::Alone {
            for (tensor, owned) in tensors.iter_mut().zip(&owned) {
                **tensor = tensor.clone().with_replica_id(u64::from(!owned));
            }
        }
        Ok(done)
    }

    /// Decides which of its shards this rank writes, by their positions in the inventory.
    async fn distribute(
        &self,
        inventory: Result<Inventory, MegatronError>,
    ) -> Result<(Redistribution, Vec<bool>), MegatronError> {
        let (origin, inventory, owned) = match self.collective.world_size() {
            1 => {
                let inventory = inventory?;
                let main = inventory.main.clone();
                (DistributionOrigin::Alone, inventory, main)
            }
            _ => {
                let group =
                    Group::new(Some(Arc::clone(&self.collective)), 0)?.called(self.world_rank);
                let inventory = inventory.map_err(|error| match error {
                    MegatronError::Checkpoint(error) => error,
                    other => CheckpointError::Plugin(Box::new(other)),
                });
                group.run(async |group| self.agree(group, inventory).await).await?
            }
        };
        let shards = owned.iter().filter(|owned| **owned).count() as u64;
        let byte_len = inventory.byte_len(&owned);
        tracing::debug!(?origin, shards, byte_len, "work of a save shared out");
        Ok((Redistribution { origin, shards, byte_len }, owned))
    }

    async fn agree(
        &self,
        group: &Group,
        inventory: Result<Inventory, CheckpointError>,
    ) -> Result<(DistributionOrigin, Inventory, Vec<bool>), CheckpointError> {
        let offer = inventory.as_ref().map(|inventory| self.offer(inventory)).ok();
        let (offer, inventory) = match (offer, inventory) {
            (Some(offer), Ok(inventory)) => (Ok(offer), Some(inventory)),
            (_, Err(error)) => (Err(error), None),
            (None, Ok(_)) => (Err(out_of_step()), None),
        };
        let known = offer.as_ref().ok().and_then(|offer| offer.remembers.zip(Some(offer.mine)));
        let opened = match group.gather_results(Phase::Plan, offer).await? {
            None => None,
            Some(Err(error)) => Some(Err(error)),
            Some(Ok(offers)) => Some(Ok(self.decide(offers).await)),
        };
        let (decision, lead) = group.broadcast_result(Phase::Plan, opened).await?;
        let inventory = inventory.ok_or_else(out_of_step)?;

        let lists = match decision {
            Decision::Repeat => {
                let (.., mine) = known.ok_or_else(out_of_step)?;
                let last = self.recall(&mine).ok_or_else(out_of_step)?;
                return Ok((DistributionOrigin::Memory, inventory, last.owned));
            }
            Decision::Known => None,
            Decision::Send { lists } => Some(lists),
        };
        let (origin, gathered) = match &lists {
            None => (DistributionOrigin::Disk, None),
            Some(lists) => {
                let with_shards = lists.contains(&self.collective.rank());
                let gathered = group.gather(Phase::Plan, inventory.to_wire(with_shards)).await?;
                (DistributionOrigin::Exchange, gathered)
            }
        };
        let made = match lead {
            None => None,
            Some(lead) => Some(self.make(lead, gathered).await),
        };
        let (mine, _) = group.scatter(Phase::Plan, made).await?;
        let (id, bits) = mine.split_first_chunk().ok_or_else(out_of_step)?;
        let owned = unpack(bits, inventory.len()).ok_or_else(out_of_step)?;
        self.remember(Remembered {
            mine: inventory.fingerprint(),
            group: *id,
            owned: owned.clone(),
        });
        Ok((origin, inventory, owned))
    }

    fn offer(&self, inventory: &Inventory) -> Offer {
        let mine = inventory.fingerprint();
        Offer {
            world_rank: self.world_rank,
            shards: inventory.len() as u64,
            list: inventory.shards_fingerprint(),
            mine,
            remembers: self.recall(&mine).map(|known| known.group),
        }
    }

    fn recall(&self, mine: &Fingerprint) -> Option<Remembered> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.iter().find(|known| known.mine == *mine).cloned()
    }

    fn remember(&self, new: Remembered) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.retain(|known| known.mine != new.mine);
        if remembered.len() == KINDS_KEPT {
            remembered.remove(0);
        }
        remembered.push(new);
    }

    /// On the coordinator: how much of what was known before serves again.
    async fn decide(&self, offers: Vec<Offer>) -> (Decision, Lead) {
        let rule = format!("{:?}", self.rule);
        let ranks: Vec<[u8; 4]> = offers.iter().map(|o| o.world_rank.to_le_bytes()).collect();
        let parts = offers.iter().map(|offer| &offer.mine[..]);
        let id = digest([rule.as_bytes(), ranks.as_flattened()].into_iter().chain(parts));
        let mut lead = Lead { id, offers, known: None };
        if lead.offers.iter().all(|offer| offer.remembers == Some(id)) {
            return (Decision::Repeat, lead);
        }
        if let Some(disk) = &self.disk {
            lead.known = disk.read(lead.first_rank(), &id, &lead.lens()).await;
        }
        let decision = match &lead.known {
            Some(_) => Decision::Known,
            None => Decision::Send { lists: lead.lists() },
        };
        (decision, lead)
    }

    /// On the coordinator: the shards of each rank, as sent to it.
    async fn make(
        &self,
        mut lead: Lead,
        gathered: Option<Vec<Bytes>>,
    ) -> Result<(Vec<Bytes>, ()), CheckpointError> {
        let owned = match (lead.known.take(), gathered) {
            (Some(known), _) => Distribution::from_owned(known),
            (None, Some(gathered)) => {
                let made = lead.distribute(&gathered, self.rule)?;
                if let Some(disk) = &self.disk {
                    disk.write(lead.first_rank(), &lead.id, made.all()).await;
                }
                made
            }
            (None, None) => return Err(out_of_step()),
        };
        let message = |owned: &Vec<bool>| [&lead.id[..], &pack(owned)].concat().into();
        Ok((owned.all().iter().map(message).collect(), ()))
    }
}

#[async_trait]
impl SaveDistribution for ParallelSave {
    async fn owned(&self, shards: &[&ShardedTensor]) -> Result<Vec<bool>, MegatronError> {
        let inventory = Inventory::of(shards.iter().copied());
        self.distribute(inventory).await.map(|(_, owned)| owned)
    }
}

/// The other ranks' messages, on the coordinator.
#[derive(Debug)]
struct Lead {
    /// Of all that the distribution depends on.
    id: Fingerprint,
    offers: Vec<Offer>,
    known: Option<Vec<Vec<bool>>>,
}

impl Lead {
    fn first_rank(&self) -> Rank {
        self.offers.iter().map(|offer| offer.world_rank).min().unwrap_or(0)
    }

    fn lens(&self) -> Vec<usize> {
        let len = |offer: &Offer| usize::try_from(offer.shards).unwrap_or(usize::MAX);
        self.offers.iter().map(len).collect()
    }

    /// Of the ranks that hold the same shards, the first one.
    fn lists(&self) -> Vec<Rank> {
        let mut seen = std::collections::HashSet::new();
        let firsts = (0..).zip(&self.offers).filter(|(_, offer)| seen.insert(offer.list));
        firsts.map(|(rank, _)| rank).collect()
    }

    fn distribute(
        &self,
        gathered: &[Bytes],
        rule: ShareRule,
    ) -> Result<Distribution, CheckpointError> {
        let mut lists: Vec<(Fingerprint, SavePlan)> = Vec::new();
        let mut known = std::collections::HashMap::new();
        let mut ranks = Vec::with_capacity(gathered.len());
        for ((offer, len), bytes) in self.offers.iter().zip(self.lens()).zip(gathered) {
            let (main, list) = Inventory::from_wire(bytes, len)?;
            if let Some(list) = list {
                known.insert(offer.list, lists.len());
                lists.push((offer.list, list));
            }
            let at = *known.get(&offer.list).ok_or_else(out_of_step)?;
            ranks.push((at, main));
        }
        let lists: Vec<&SavePlan> = lists.iter().map(|(_, list)| list).collect();
        let ranks: Vec<(usize, &[bool])> =
            ranks.iter().map(|(list, main)| (*list, &main[..])).collect();
        Ok(distribute_different(&lists, &ranks, rule, Purpose::Save)?)
    }
}

fn out_of_step() -> CheckpointError {
    PlanError::out_of_step("ranks of one parallelization group differ").into()
}
