//! All ranks read, each a share of what any of them needs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::digest::fnv1a_64;
use dcp_core::error::Phase;
use dcp_core::plan::LoadPlan;
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, CollectiveError, Rank, StorageReader,
};
use dcp_planner::ShareRule;
use tokio::sync::OnceCell;

use super::broadcast_reader::spread_metadata;
use super::cost_model::Speeds;
use super::decision::{Request, Way};
use super::machines::machine;
use super::{Exchange, ReadSharing};
use crate::group::Group;

/// Default of [`ParallelReader::in_flight`].
const IN_FLIGHT: u64 = 32 << 20;
/// No message is cut into smaller ones.
const MESSAGE_MIN: u64 = 64 << 10;
/// The rank of the group that reads the index and divides reads.
pub(super) const COORDINATOR: Rank = 0;

/// A reader for ranks that need much the same, as the replicas of a model do: what any of them
/// needs is read once in the group, by one of the ranks that need it, and sent to the others.
/// Loads in which every rank is faster when it reads by itself do that instead, unless
/// [`sharing`](Self::sharing) is [`ReadSharing::Always`].
///
/// This is Megatron-Core's fully parallel load, beneath the planner: a [`Loader`](crate::Loader)
/// in any group, also one of more ranks, uses it as any other reader. What is
/// shared is not the requested shard but the stored element, so that ranks with different layouts
/// share, too. What only one rank needs, it reads straight into its own memory. Objects are
/// shared as tensors are. The index is read by one rank for all, or by
/// [each](Self::index_per_rank). A group of one reads as its
/// reader does.
///
/// Memory is bounded whatever the sizes of tensors: what is sent goes in messages, of which a rank
/// reads one ahead, and together they take about [`in_flight`](Self::in_flight) bytes. Only an
/// object is not cut.
///
/// Every rank calls [`metadata`](StorageReader::metadata) and [`read`](StorageReader::read) as
/// often and in the same order as all others in its group, also with an empty plan. When one fails
/// to read, every rank gets the same error; when one is lost, every call ends.
///
/// [`replicas_only`](Self::replicas_only) is for groups in which perhaps no rank has a replica.
/// [`Loader::load_shared`](crate::Loader::load_shared) decides once for all rounds of a load to devices.
#[doc(alias = "FullyParallelLoadStrategyWrapper")]
pub struct ParallelReader {
    pub(super) inner: Arc<dyn StorageReader>,
    pub(super) collective: Arc<dyn Collective>,
    world_rank: Rank,
    pub(super) rule: ShareRule,
    pub(super) exchange: Exchange,
    in_flight: u64,
    pub(super) sharing: ReadSharing,
    pub(super) replicas_only: bool,
    index_per_rank: bool,
    pub(super) machine: Option<u64>,
    pub(super) speeds: Option<Speeds>,
    known: OnceCell<Known>,
    /// The decision for the load under way.
    way: Mutex<Option<Way>>,
}

#[derive(Clone, Debug)]
struct Known {
    metadata: Arc<CheckpointMetadata>,
    /// The world rank of each rank of the group.
    world_ranks: Vec<Rank>,
}

impl ParallelReader {
    /// Reads with `inner`, in shares, on all ranks of `collective`.
    #[must_use]
    pub fn new(inner: Arc<dyn StorageReader>, collective: Arc<dyn Collective>) -> Self {
        Self {
            world_rank: collective.rank(),
            inner,
            collective,
            rule: ShareRule::Balanced,
            exchange: Exchange::Broadcast,
            in_flight: IN_FLIGHT,
            sharing: ReadSharing::default(),
            replicas_only: false,
            index_per_rank: false,
            machine: machine(),
            speeds: None,
            known: OnceCell::new(),
            way: Mutex::default(),
        }
    }

    /// Sets the number of this rank in errors, where the group is a part of a larger one; by default its
    /// rank in the group.
    #[must_use]
    pub fn world_rank(mut self, rank: Rank) -> Self {
        self.world_rank = rank;
        self
    }

    /// The rule that divides reads among ranks; the same on all ranks.
    #[must_use]
    pub fn rule(mut self, rule: ShareRule) -> Self {
        self.rule = rule;
        self
    }

    /// The way in which ranks exchange data; the same on all ranks.
    #[must_use]
    pub fn exchange(mut self, exchange: Exchange) -> Self {
        self.exchange = exchange;
        self
    }

    /// About how many bytes of messages a rank holds at once; 32 MiB by default, and never less
    /// than 64 KiB a message. The same on all ranks.
    #[must_use]
    pub fn in_flight(mut self, bytes: u64) -> Self {
        self.in_flight = bytes;
        self
    }

    /// Whether ranks share their reads; by default where that is expected to be faster
    /// ([`ReadSharing::Auto`]). The same on all ranks.
    #[must_use]
    pub fn sharing(mut self, sharing: ReadSharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Shares only what ranks with the same tensors read, as data-parallel replicas do, and not what
    /// layouts have in common; by default not. The same on all ranks.
    ///
    /// A load in which no two ranks need the same tensors then costs one message of 40 bytes for each rank, and
    /// no plan is sent. What replicas share goes to all ranks of the collective. So with
    /// [`ReadSharing::Auto`], many groups of replicas send no plans either: the tensors of all groups
    /// have at most 16 times the bytes that one rank needs. Ranks with the same tensors and different
    /// objects share the tensors.
    #[must_use]
    pub fn replicas_only(mut self, replicas_only: bool) -> Self {
        self.replicas_only = replicas_only;
        self
    }

    /// Whether every rank reads the index, as without this reader; by default rank 0 reads it and sends it to
    /// all. The same on all ranks. Ranks that read it can take part in a load by
    /// [`Loader::fail`](crate::Loader::fail) where their storage does not open, and the loader compares
    /// what they see.
    #[must_use]
    pub fn index_per_rank(mut self, index_per_rank: bool) -> Self {
        self.index_per_rank = index_per_rank;
        self
    }

    /// A name of the machine on which this rank runs; by default from Linux's boot id, which machines that
    /// were started from one snapshot have in common. [`ReadSharing::Auto`] compares the names.
    #[must_use]
    pub fn machine(mut self, name: impl AsRef<str>) -> Self {
        self.machine = Some(fnv1a_64(name.as_ref().bytes()));
        self
    }

    /// The bytes per second that a rank reads while all read, and receives while all send. With
    /// [`ReadSharing::Auto`], loads decide by them and measure nothing, however small they are. They
    /// count on no cache in which a rank finds what another one has read. The slowest rank decides.
    #[must_use]
    pub fn speeds(mut self, read: u64, exchange: u64) -> Self {
        self.speeds = Some(Speeds { read, again: None, exchange });
        self
    }

    fn group(&self) -> Result<Group, CheckpointError> {
        Ok(Group::new(Some(Arc::clone(&self.collective)), COORDINATOR)?.called(self.world_rank))
    }

    pub(super) fn message_bytes(&self) -> u64 {
        let at_once = match self.exchange {
            // One that is sent or taken in, with a copy in the collective, and one read ahead.
            Exchange::Broadcast => 4,
            Exchange::GatherRounds => 2 * u64::from(self.collective.world_size()),
        };
        (self.in_flight / at_once).max(MESSAGE_MIN)
    }

    async fn look(&self, group: &Group) -> Result<Known, CheckpointError> {
        let world_ranks = group.all_gather_results(Phase::Open, Ok(self.world_rank)).await?;
        let mine = match self.collective.rank() {
            COORDINATOR => Some(self.inner.metadata().await),
            _ => None,
        };
        let metadata = spread_metadata(group, COORDINATOR, mine).await?;
        Ok(Known { metadata, world_ranks })
    }

    /// Decides for the reads of a load, until [`forget`](Self::forget). Every rank calls it with all that it
    /// is going to read. Where ranks do not share, its reads then send nothing.
    pub(crate) async fn prepare(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
    ) -> Result<ReadReport, CheckpointError> {
        *self.way() = None;
        if self.collective.world_size() == 1 || self.sharing == ReadSharing::Never {
            return Ok(ReadReport::default());
        }
        let decide =
            async |group: &Group| self.decide(&Request { group, metadata, plan }, None).await;
        let (way, report) = self.group()?.run(decide).await.map_err(|e| self.in_the_world(e))?;
        *self.way() = Some(way);
        Ok(report)
    }

    /// The load has ended: the next read is decided for itself.
    pub(crate) fn forget(&self) {
        *self.way() = None;
    }

    /// A rank that was lost, by the number by which it calls itself.
    fn in_the_world(&self, mut error: CheckpointError) -> CheckpointError {
        if let CheckpointError::Lost {
            source:
                CollectiveError::PeerLost { rank, .. }
                | CollectiveError::Timeout { rank, .. }
                | CollectiveError::Aborted { rank, .. }
                | CollectiveError::Mismatch { rank, .. },
            ..
        } = &mut error
        {
            let names = self.known.get().map_or(&[][..], |known| &known.world_ranks);
            *rank = names.get(*rank as usize).copied().unwrap_or(*rank);
        }
        error
    }

    pub(super) fn way(&self) -> MutexGuard<'_, Option<Way>> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl StorageReader for ParallelReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        if self.index_per_rank {
            return self.inner.metadata().await;
        }
        let look = || async { self.group()?.run(async |group| self.look(group).await).await };
        Ok(Arc::clone(&self.known.get_or_try_init(look).await?.metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let is_alone = matches!(*self.way(), Some(Way::Alone));
        if is_alone || self.collective.world_size() == 1 {
            return self.inner.read(metadata, plan, sink).await;
        }
        let read = async |group: &Group| {
            self.read_together(&Request { group, metadata, plan }, &sink).await
        };
        self.group()?.run(read).await.map_err(|error| self.in_the_world(error))
    }
}

impl fmt::Debug for ParallelReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelReader")
            .field("inner", &self.inner)
            .field("collective", &self.collective)
            .field("exchange", &self.exchange)
            .field("sharing", &self.sharing)
            .field("replicas_only", &self.replicas_only)
            .finish_non_exhaustive()
    }
}
