//! All ranks read, each a share of what any of them needs.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::Phase;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, CollectiveError, Rank, StorageReader,
};
use dcp_planner::ShareRule;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;

use crate::broadcast::spread_metadata;
use crate::disjoint::cut;
use crate::division::{Assignment, Division};
use crate::exchange_message::{Collector, Message, Piece, Wanted};
use crate::group::Group;
use crate::machine::{machine, machines};
use crate::measured_speeds::measure;
use crate::needs::Speeds;
use crate::planned::{out_of_step, tensor_dtype};
use crate::read_sharing::{Exchange, ReadSharing};
use crate::receiver::Receiver;

/// Default of [`ParallelReader::in_flight`].
const IN_FLIGHT: u64 = 32 << 20;
/// No message is cut into smaller ones.
const MESSAGE_MIN: u64 = 64 << 10;

/// A reader for ranks that need much the same, as the replicas of a model do: what any of them
/// needs is read once in the group, by one of the ranks that need it, and sent to the others.
/// Loads in which every rank is faster when it reads by itself do that instead, unless
/// [`sharing`](Self::sharing) is [`ReadSharing::Always`].
///
/// This is Megatron-Core's fully parallel load, beneath the planner: a [`Loader`](crate::Loader)
/// in any group, also one of more ranks, uses it as any other reader. What is
/// shared is not the requested shard but the stored element, so that ranks with different layouts
/// share, too. What only one rank needs, it reads straight into its own memory. Objects are
/// shared as tensors are. The index is read by one rank for all. A group of one reads as its
/// reader does.
///
/// Memory is bounded whatever the sizes of tensors: what is sent goes in messages, of which a rank
/// reads one ahead, and together they take about [`in_flight`](Self::in_flight) bytes. Only an
/// object is not cut.
///
/// Every rank calls [`metadata`](StorageReader::metadata) and [`read`](StorageReader::read) as
/// often and in the same order as all others in its group, also with an empty plan. When one fails
/// to read, every rank gets the same error; when one is lost, every call ends.
#[doc(alias = "FullyParallelLoadStrategyWrapper")]
pub struct ParallelReader {
    inner: Arc<dyn StorageReader>,
    collective: Arc<dyn Collective>,
    world_rank: Rank,
    rule: ShareRule,
    exchange: Exchange,
    in_flight: u64,
    sharing: ReadSharing,
    speeds: Option<Speeds>,
    known: OnceCell<Known>,
}

#[derive(Clone, Debug)]
struct Known {
    metadata: Arc<CheckpointMetadata>,
    /// What the ranks of the group call themselves.
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
            speeds: None,
            known: OnceCell::new(),
        }
    }

    /// What errors call this rank, where the group is a part of a larger one; by default its rank
    /// in the group.
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

    /// How ranks exchange data; the same on all ranks.
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

    /// The bytes per second that a rank reads while all read, and receives while all send. With
    /// [`ReadSharing::Auto`], loads decide by them and measure nothing, however small they are. They
    /// count on no cache in which a rank finds what another one has read. The slowest rank decides.
    #[must_use]
    pub fn speeds(mut self, read: u64, exchange: u64) -> Self {
        self.speeds = Some(Speeds { read, again: None, exchange });
        self
    }

    fn group(&self) -> Result<Group, CheckpointError> {
        Ok(Group::new(Some(Arc::clone(&self.collective)), 0)?.called(self.world_rank))
    }

    fn message_bytes(&self) -> u64 {
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
            0 => Some(self.inner.metadata().await),
            _ => None,
        };
        let metadata = spread_metadata(group, 0, mine).await?;
        Ok(Known { metadata, world_ranks })
    }

    async fn share(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        if self.sharing == ReadSharing::Never {
            return self.read_alone(group, metadata, plan, sink).await;
        }
        let assignment = self.divide(group, metadata, plan).await?;
        let mut report = ReadReport::default();
        if self.sharing == ReadSharing::Auto
            && !self.pays(group, metadata, &assignment, &mut report).await?
        {
            report += self.read_alone(group, metadata, plan, sink).await?;
            return Ok(report);
        }
        let mut taker = Receiver::new(metadata, plan, sink);
        let mut ahead = Ahead::new(self, metadata, &assignment.send);
        let rounds = assignment.turns.iter().copied().max().unwrap_or(0);
        for round in 0..rounds {
            let sends = |rank: Rank| round < assignment.turns_of(rank);
            match self.exchange {
                Exchange::Broadcast => {
                    for root in (0..self.collective.world_size()).filter(|rank| sends(*rank)) {
                        let mine = match root == self.collective.rank() {
                            true => Some(ahead.next(&mut report).await),
                            false => None,
                        };
                        taker.take(&group.broadcast(Phase::Read, root, mine).await?);
                    }
                }
                Exchange::GatherRounds => {
                    let mine = match sends(self.collective.rank()) {
                        true => ahead.next(&mut report).await,
                        false => Ok(Bytes::new()),
                    };
                    let all = group.exchange(Phase::Read, mine).await?;
                    all.iter().filter(|bytes| !bytes.is_empty()).for_each(|all| taker.take(all));
                }
            }
        }
        let kept = self.keep(metadata, &assignment.keep, &mut taker, &mut report).await;
        // A rank that failed to store a message receives the others, so that no rank hangs.
        let outcome = kept.and_then(|()| taker.finish(&mut report));
        group.all_gather_results(Phase::Read, outcome).await?;
        Ok(report)
    }

    /// Whether sharing is expected to be faster; the same on all ranks, which know the same.
    async fn pays(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        assignment: &Assignment,
        report: &mut ReadReport,
    ) -> Result<bool, CheckpointError> {
        let needs = assignment.needs;
        let speeds = match self.speeds {
            Some(speeds) => group.all_gather_results(Phase::Plan, Ok(speeds)).await?,
            // Reading once is what cannot take much longer.
            None if !needs.are_worth_measuring() => return Ok(true),
            None => {
                let (send, exchange) = (&assignment.send, self.exchange);
                let again = assignment.reads_again.then_some(&assignment.again);
                let measured = measure(group, &self.inner, metadata, send, again, exchange);
                let (speeds, cost) = measured.await?;
                *report += cost;
                speeds
            }
        };
        let shares = needs.should_share(&speeds);
        tracing::debug!(?needs, ?speeds, shares, "chose how ranks read");
        Ok(shares)
    }

    /// Reads all that this rank needs.
    async fn read_alone(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let read = self.inner.read(metadata, plan, Arc::clone(sink)).await;
        group.all_succeed(Phase::Read, read).await
    }

    /// Agrees on the reads of each rank.
    async fn divide(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
    ) -> Result<Assignment, CheckpointError> {
        let world_size = self.collective.world_size();
        let fingerprint = plan.fingerprint();
        let halves = ((fingerprint >> 64) as u64, fingerprint as u64);
        let measures = self.sharing == ReadSharing::Auto && self.speeds.is_none();
        let mine = (halves, measures.then(machine).flatten());
        let all = group.all_gather_results(Phase::Plan, Ok(mine)).await?;
        let (all, machine_names): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        // Of ranks that need the same, the first one names it.
        let plan_of: Vec<usize> =
            all.iter().map(|one| all.iter().position(|other| other == one).unwrap_or(0)).collect();
        let rank = self.collective.rank() as usize;
        let says = plan_of.get(rank) == Some(&rank);
        let plans =
            group.gather(Phase::Read, if says { plan.to_wire() } else { Bytes::new() }).await?;
        let divided = plans.map(|plans| {
            let decode = |plan: &Bytes| match plan.is_empty() {
                true => Ok(LoadPlan::default()),
                false => LoadPlan::from_wire(plan),
            };
            let plans = plans.iter().map(decode).collect::<Result<Vec<_>, _>>()?;
            let (rule, message_bytes) = (self.rule, self.message_bytes());
            let machines = machines(machine_names);
            let division = Division { world_size, machines, rule, message_bytes };
            let all = division.divide(metadata, &plans, &plan_of)?;
            Ok((all.iter().map(Assignment::to_wire).collect(), ()))
        });
        let (mine, _) = group.scatter(Phase::Plan, divided).await?;
        Ok(Assignment::from_wire(&mine, world_size)?)
    }

    /// Reads what only this rank needs.
    async fn keep(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        keep: &LoadPlan,
        taker: &mut Receiver<'_>,
        report: &mut ReadReport,
    ) -> Result<(), CheckpointError> {
        let mut direct = LoadPlan::default();
        let mut views = Vec::new();
        let mut rest = Vec::new();
        for item in &keep.items {
            let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
            match taker.place(item.entry, *chunk, region)? {
                Some(view) => {
                    let leaf = u32::try_from(views.len()).unwrap_or(u32::MAX);
                    views.push(view);
                    direct.items.push(ReadItem { leaf, ..item.clone() });
                }
                // Two of this rank's items need it.
                None => rest.push(item),
            }
        }
        let objects = keep.items.iter().filter(|item| item.kind == ReadKind::Object);
        // Their leaves say which entry they are of.
        direct.items.extend(objects.map(|item| ReadItem { leaf: item.entry, ..item.clone() }));
        if !direct.items.is_empty() {
            let sink = Arc::new(Collector::new(views));
            let cost = self.inner.read(metadata, &direct, Arc::clone(&sink) as _).await?;
            *report += ReadReport::new(0, cost.bytes_read);
            for item in &direct.items {
                if let ReadKind::Tensor { chunk, region, .. } = &item.kind {
                    taker.arrived(item.entry, *chunk, region)?;
                }
            }
            for (entry, value) in sink.take_objects() {
                taker.value(entry, value)?;
            }
        }
        for item in rest {
            let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
            let dtype = tensor_dtype(metadata, item.entry)?;
            for region in cut(region.clone(), (self.message_bytes() / dtype.size() as u64).max(1)) {
                let mut wanted = Wanted::default();
                wanted.push(Piece::tensor(item.entry, *chunk, region), dtype);
                let (bytes, cost) = wanted.read(&self.inner, metadata).await?;
                *report += ReadReport::new(0, cost.bytes_read);
                taker.take(&bytes);
            }
        }
        Ok(())
    }
}

#[async_trait]
impl StorageReader for ParallelReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let look = || async { self.group()?.run(async |group| self.look(group).await).await };
        Ok(Arc::clone(&self.known.get_or_try_init(look).await?.metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        if self.collective.world_size() == 1 {
            return self.inner.read(metadata, plan, sink).await;
        }
        let share = async |group: &Group| self.share(group, metadata, plan, &sink).await;
        let result = self.group()?.run(share).await;
        let names = self.known.get().map_or(&[][..], |known| &known.world_ranks);
        result.map_err(|error| in_the_world(error, names))
    }
}

impl fmt::Debug for ParallelReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelReader")
            .field("inner", &self.inner)
            .field("collective", &self.collective)
            .field("exchange", &self.exchange)
            .finish_non_exhaustive()
    }
}

/// A rank that was lost, by the number by which it calls itself.
fn in_the_world(mut error: CheckpointError, names: &[Rank]) -> CheckpointError {
    if let CheckpointError::Lost {
        source:
            CollectiveError::PeerLost { rank, .. }
            | CollectiveError::Timeout { rank, .. }
            | CollectiveError::Aborted { rank, .. }
            | CollectiveError::Mismatch { rank, .. },
        ..
    } = &mut error
    {
        *rank = names.get(*rank as usize).copied().unwrap_or(*rank);
    }
    error
}

type Reading = JoinHandle<Result<(Bytes, ReadReport), CheckpointError>>;

/// The messages of this rank, of which the next one is read while the others talk.
struct Ahead {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    waiting: VecDeque<Message>,
    reading: Option<Reading>,
    /// Why there are no messages.
    problem: Option<CheckpointError>,
}

impl Ahead {
    fn new(reader: &ParallelReader, metadata: &Arc<CheckpointMetadata>, plan: &LoadPlan) -> Self {
        let (waiting, problem) = match Message::all_of(plan, metadata) {
            Ok(messages) => (messages, None),
            Err(error) => (VecDeque::new(), Some(error)),
        };
        let (reader, metadata) = (Arc::clone(&reader.inner), Arc::clone(metadata));
        let mut ahead = Self { reader, metadata, waiting, reading: None, problem };
        ahead.begin();
        ahead
    }

    fn begin(&mut self) {
        self.reading = self.waiting.pop_front().map(|message| {
            let (reader, metadata) = (Arc::clone(&self.reader), Arc::clone(&self.metadata));
            tokio::spawn(async move { message.read(&reader, &metadata).await })
        });
    }

    async fn next(&mut self, report: &mut ReadReport) -> Result<Bytes, CheckpointError> {
        if let Some(problem) = self.problem.take() {
            return Err(problem);
        }
        let reading = self.reading.as_mut();
        let reading =
            reading.ok_or_else(|| out_of_step("this rank has no message left to send"))?;
        let (bytes, cost) = reading.await.map_err(CheckpointError::application)??;
        *report += ReadReport::new(0, cost.bytes_read);
        self.begin();
        Ok(bytes)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some(reading) = &self.reading {
            reading.abort();
        }
    }
}
