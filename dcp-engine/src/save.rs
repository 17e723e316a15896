//! The save protocol: plan, merge, write, commit.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dcp_cast::{CastCounts, CastReport};
use dcp_core::checkpoint::DataSource;
use dcp_core::error::{Phase, Standing};
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::planner::SavePlanner;
use dcp_core::save_run::{RankWrite, SaveRun};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, PlanError, Rank, StateDict, StorageWriter,
    Value,
};
use dcp_planner::{DefaultSavePlanner, FlattenRule, flatten, index_of};

use crate::cast::Casts;
use crate::group::Group;
use crate::memory::{Memory, Remembered};
use crate::messages::{Decision, Line, Offer, Totals, lines, plan_id, report, same_save};
use crate::source::{Leaf, StateSource};

/// Saves state dicts, one after the other.
///
/// Every rank of the group makes one with the same settings and calls [`save`](Self::save) with
/// its own state dict and a writer to the same place. Without a group, this process saves alone.
///
/// A saver remembers the plan of its last save. When no rank's structure changed, the next save
/// exchanges a few bytes per rank instead of plans. Dtypes, shapes, placements, nesting and the
/// length of encoded objects all count as structure, so a remembered plan is never stale
/// (PyTorch 2.15's plan cache ignores dtypes).
#[derive(Clone, Debug)]
pub struct Saver {
    planner: Arc<dyn SavePlanner>,
    group: Option<Arc<dyn Collective>>,
    coordinator: Rank,
    rule: FlattenRule,
    casts: Option<Casts>,
    memory: Option<Arc<Memory>>,
    /// How many saves have begun, so that ranks notice when they are at different ones.
    begun: Arc<AtomicU64>,
}

/// The outcome of a save: the same on every rank, except the metadata and what was cast.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SaveSummary {
    /// Tensors and objects in the checkpoint.
    pub entries: u64,
    /// Bytes that all ranks wrote to data files.
    pub bytes_written: u64,
    /// Data files of all ranks.
    pub files: u64,
    /// Whether the save reused the plan of an earlier one.
    pub reused_plan: bool,
    /// What [`Saver::cast`] did to the tensors of which this rank wrote anything.
    pub cast: CastReport,
    /// The same of all ranks together.
    pub cast_total: CastCounts,
    plan: Option<Arc<GlobalPlan>>,
}

impl SaveSummary {
    /// The index of the new checkpoint; on the coordinator only.
    #[must_use]
    pub fn metadata(&self) -> Option<&CheckpointMetadata> {
        self.plan.as_ref().map(|plan| &plan.metadata)
    }
}

/// This rank's state, ready to be planned and written.
#[derive(Debug)]
struct Prepared {
    plan: SavePlan,
    fingerprint: u128,
    source: Arc<StateSource>,
}

/// What this rank is to write, and on the coordinator what is to be committed.
#[derive(Debug)]
struct Planned<'a> {
    prepared: Prepared,
    plan: Arc<WritePlan>,
    lead: Option<Lead<'a>>,
    /// Whether no plan had to be sent.
    reused: bool,
}

/// What the coordinator knows until the commit.
#[derive(Debug)]
struct Lead<'a> {
    run: Option<SaveRun<'a>>,
    /// What the plan depends on: fingerprints and layout.
    key: Vec<u128>,
    /// The plan with its places.
    plan: Option<Arc<GlobalPlan>>,
}

impl Default for Saver {
    fn default() -> Self {
        Self::new()
    }
}

impl Saver {
    /// A saver for this process alone, with the default planner.
    #[must_use]
    pub fn new() -> Self {
        Self {
            planner: Arc::new(DefaultSavePlanner::default()),
            group: None,
            coordinator: 0,
            rule: FlattenRule::default(),
            casts: None,
            memory: Some(Arc::default()),
            begun: Arc::default(),
        }
    }

    /// Saves together with the other ranks of `group`.
    #[must_use]
    pub fn group(mut self, group: Arc<dyn Collective>) -> Self {
        self.group = Some(group);
        self.afresh()
    }

    /// Lets `rank` merge the plans and commit; rank 0 by default.
    #[must_use]
    pub fn coordinator(mut self, rank: Rank) -> Self {
        self.coordinator = rank;
        self.afresh()
    }

    /// Plans with another policy.
    #[must_use]
    pub fn planner(mut self, planner: Arc<dyn SavePlanner>) -> Self {
        self.planner = planner;
        self.afresh()
    }

    /// Flattens nested state by another rule; by default as PyTorch does since 2.4.
    #[must_use]
    pub fn flatten_rule(mut self, rule: FlattenRule) -> Self {
        self.rule = rule;
        self.afresh()
    }

    /// Saves tensors in another dtype than they have in memory, in segments on the way to the file;
    /// the state is not changed. A dtype casts all wide floats; [`Casts`] chooses among them.
    /// [`SaveSummary::cast`] counts what was lost.
    #[must_use]
    pub fn cast(mut self, casts: impl Into<Casts>) -> Self {
        self.casts = Some(casts.into());
        self.afresh()
    }

    /// Whether to remember plans between saves. On by default; may differ between ranks.
    #[must_use]
    pub fn remember_plans(mut self, remember: bool) -> Self {
        self.memory = remember.then(Arc::default);
        self
    }

    /// Forgets what was remembered under other settings, which a clone may still have.
    fn afresh(mut self) -> Self {
        self.memory = self.memory.map(|_| Arc::default());
        self.begun = Arc::default();
        self
    }

    /// Saves `state` through `writer`.
    ///
    /// When this returns, the checkpoint is durable and visible as a whole. After an error the
    /// place holds what it held before, and at most files that nothing refers to, which the next
    /// save removes; only when the commit itself failed ([`Phase::Commit`]), or the group was lost
    /// during it, may the new checkpoint be there all the same, whole. Failures that ranks report
    /// reach all ranks alike. Dropping the future aborts the group, so that the other
    /// ranks return too.
    ///
    /// # Errors
    ///
    /// Without a group, the first error as it is. In a group, [`CheckpointError::Ranks`] on every
    /// rank, listing all that failed, or [`CheckpointError::Lost`] when a rank was lost, with the
    /// step and whether the checkpoint may have been committed.
    pub async fn save(
        &self,
        state: &StateDict,
        writer: &dyn StorageWriter,
    ) -> Result<SaveSummary, CheckpointError> {
        let group = Group::new(self.group.clone(), self.coordinator)?;
        let saved = group.run(async |group| {
            let prepared = self.prepare(state, writer, group);
            self.run(group, prepared, writer).await
        });
        saved.await
    }

    /// Takes part in a save with an error in place of a state: one that occurred before
    /// [`save`](Self::save) could be called, such as a storage that does not open. Every rank of
    /// the group returns it.
    ///
    /// Returns what `save` would: without a group, `error` itself.
    pub async fn fail(&self, error: CheckpointError) -> CheckpointError {
        let failed = async |group: &Group| -> Result<Infallible, CheckpointError> {
            // This rank was at this save, too.
            self.begun.fetch_add(1, Ordering::Relaxed);
            let offers = group.gather_results::<Offer>(Phase::Plan, Err(error)).await?;
            let refused = offers.map(|offers| offers.and(Err(no_plan())));
            group.broadcast_result::<Decision, ()>(Phase::Plan, refused).await?;
            Err(group.unanswered())
        };
        let result = match Group::new(self.group.clone(), self.coordinator) {
            Ok(group) => group.run(failed).await,
            Err(error) => Err(error),
        };
        let Err(error) = result;
        error
    }

    /// This process in the group.
    pub(crate) fn rank(&self) -> Rank {
        self.group.as_ref().map_or(0, |group| group.rank())
    }

    /// Aborts the group of a save that this rank does not take part in.
    pub(crate) fn leave(&self, why: &str) {
        if let Some(group) = &self.group {
            group.abort(why);
        }
    }

    async fn run(
        &self,
        group: &Group,
        prepared: Result<Prepared, CheckpointError>,
        writer: &dyn StorageWriter,
    ) -> Result<SaveSummary, CheckpointError> {
        let Planned { prepared, plan, mut lead, reused } = self
            .plan(group, prepared, writer)
            .await
            .map_err(|error| standing_at(error, Standing::NotCommitted))?;
        // The coordinator has not begun to commit while it waits for the others to write.
        let written_at = match group.context().is_coordinator() {
            true => Standing::NotCommitted,
            false => Standing::MayBeCommitted,
        };
        tracing::debug!(items = plan.orders.len(), "planned");

        let mine = RankWrite::new(writer, plan);
        let written = {
            let source: Arc<dyn DataSource> = Arc::clone(&prepared.source) as _;
            mine.write(&prepared.plan, source).await
        };
        let cast = prepared.source.cast_report();
        let reports = group
            .gather_results(Phase::Write, written.map(|report| (lines(&report), cast.total())))
            .await
            .map_err(|error| standing_at(error, written_at))?;
        let reports = reports.map(|reports| reports.map(|reports| ((), reports)));
        let reports = match group.broadcast_result(Phase::Write, reports).await {
            Ok(((), reports)) => reports,
            Err(error) => {
                // Only when all know that nothing will be committed: a rank that merely lost the
                // coordinator cannot tell whether the commit is under way.
                if group.is_agreed(&error) {
                    mine.abandon().await;
                }
                return Err(standing_at(error, written_at));
            }
        };

        // From here on nothing is removed after a failure: the commit may have become visible
        // although it could not say so.
        let committed = match (&mut lead, reports) {
            (Some(lead), Some(reports)) => Some(commit(lead, mine, reused, reports).await),
            _ => None,
        };
        let standing = match &committed {
            Some(Ok(_)) => Standing::Committed,
            Some(Err(_)) | None => Standing::MayBeCommitted,
        };
        let sent = group.broadcast_result(Phase::Commit, committed).await;
        let (totals, _): (Totals, _) = sent.map_err(|error| standing_at(error, standing))?;
        Ok(SaveSummary {
            entries: totals.entries,
            bytes_written: totals.bytes_written,
            files: totals.files,
            reused_plan: totals.reused_plan,
            cast,
            cast_total: totals.cast,
            plan: lead.and_then(|lead| lead.plan),
        })
    }

    /// Flattens the state and encodes its objects, whose lengths the plan needs.
    fn prepare(
        &self,
        state: &StateDict,
        writer: &dyn StorageWriter,
        group: &Group,
    ) -> Result<Prepared, CheckpointError> {
        let flat = flatten(state, self.rule)?;
        let mut objects = HashMap::new();
        let mut index = index_of(&flat, |fqn, object| {
            let bytes = writer.encode_object(fqn, object)?;
            let len = bytes.len() as u64;
            objects.insert(fqn.to_owned(), bytes);
            Ok::<_, CheckpointError>(len)
        })?;
        let casts = self.casts.as_ref().map(|casts| casts.apply(&mut index)).transpose()?;
        let mut casts = casts.unwrap_or_default().into_iter();
        let mut leaves = HashMap::with_capacity(flat.len());
        for entry in &flat {
            let cast = casts.next().flatten();
            let leaf = match entry.value {
                Value::Tensor(tensor) => Leaf::Tensor(tensor.clone(), cast),
                _ => Leaf::Object(objects.remove(&*entry.fqn).unwrap_or_default()),
            };
            leaves.insert(&*entry.fqn, leaf);
        }
        let mut plan = self.planner.local_plan(&index, &group.context())?;
        plan.check_against(&index, &self.planner_name())?;
        let source = Arc::new(StateSource::new(&plan, &leaves)?);
        Ok(Prepared { fingerprint: plan.fingerprint(), plan, source })
    }

    /// Agrees on the items that each rank writes, and their places.
    async fn plan<'a>(
        &self,
        group: &Group,
        prepared: Result<Prepared, CheckpointError>,
        writer: &'a dyn StorageWriter,
    ) -> Result<Planned<'a>, CheckpointError> {
        let remembered =
            prepared.as_ref().ok().and_then(|mine| self.memory.as_ref()?.recall(mine.fingerprint));
        // A rank that has nothing to offer was at this save all the same.
        let sequence = self.begun.fetch_add(1, Ordering::Relaxed);
        let (offer, prepared) = match prepared {
            Err(error) => (Err(error), None),
            Ok(mine) => {
                let fingerprint = ((mine.fingerprint >> 64) as u64, mine.fingerprint as u64);
                let remembers = remembered.as_ref().map(|last| last.plan_id);
                (Ok(Offer { sequence, fingerprint, remembers }), Some(mine))
            }
        };
        let opened = match group.gather_results(Phase::Plan, offer).await? {
            None => None,
            Some(Err(error)) => Some(Err(error)),
            Some(Ok(offers)) => Some(self.open(&offers, writer).await),
        };
        let (decision, lead) = group.broadcast_result(Phase::Plan, opened).await?;
        let prepared = prepared.ok_or_else(no_plan)?;

        let plan_id = match decision {
            Decision::Repeat { generation } => {
                let mut plan = WritePlan::clone(&*remembered.ok_or_else(no_plan)?.plan);
                for file in &mut plan.files {
                    *file = writer.renamed(file, generation)?;
                }
                let plan = Arc::new(plan);
                return Ok(Planned { prepared, plan, lead, reused: true });
            }
            Decision::Plan { plan_id } => plan_id,
        };
        let plans = group.gather(Phase::Plan, prepared.plan.to_wire()).await?;
        let placed = lead.zip(plans).map(|(lead, plans)| self.place(lead, &plans));
        let (mine, lead) = group.scatter(Phase::Plan, placed).await?;
        let plan = Arc::new(WritePlan::from_wire(&mine)?);
        if let Some(memory) = &self.memory {
            memory.keep(Remembered {
                fingerprint: prepared.fingerprint,
                plan_id,
                plan: Arc::clone(&plan),
            });
        }
        Ok(Planned { prepared, plan, lead, reused: false })
    }

    /// What errors call the planner: the name of its type, as it shows itself.
    fn planner_name(&self) -> String {
        let shown = format!("{:?}", self.planner);
        let name = shown.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
        if name.is_empty() { "without a name".into() } else { name.into() }
    }

    /// On the coordinator: looks at the place, and at how much of the last plan serves again.
    async fn open<'a>(
        &self,
        offers: &[Offer],
        writer: &'a dyn StorageWriter,
    ) -> Result<(Decision, Lead<'a>), CheckpointError> {
        same_save(offers)?;
        let run = SaveRun::begin(writer).await?;
        let session = run.session();
        let fingerprints = offers
            .iter()
            .map(|offer| u128::from(offer.fingerprint.0) << 64 | u128::from(offer.fingerprint.1));
        let key: Vec<u128> = fingerprints.chain([session.layout.into()]).collect();
        let plan_id = plan_id(&key);
        let plan = self
            .memory
            .as_ref()
            .filter(|_| offers.iter().all(|offer| offer.remembers == Some(plan_id)))
            .and_then(|memory| memory.plans.get(&key));
        let generation = session.generation;
        let Some(plan) = plan else {
            return Ok((Decision::Plan { plan_id }, Lead { run: Some(run), key, plan: None }));
        };
        let mut plan = GlobalPlan::clone(&plan);
        plan.metadata.rename_files(|file| writer.renamed(file, generation))?;
        let plan = Some(Arc::new(plan));
        Ok((Decision::Repeat { generation }, Lead { run: Some(run), key, plan }))
    }

    /// On the coordinator: one plan for all, with a place for every byte.
    fn place<'a>(
        &self,
        mut lead: Lead<'a>,
        plans: &[Bytes],
    ) -> Result<(Vec<Bytes>, Lead<'a>), CheckpointError> {
        let locals = plans
            .iter()
            .map(|plan| SavePlan::from_wire(plan))
            .collect::<Result<Vec<_>, PlanError>>()?;
        let mut global = self.planner.global_plan(&locals)?;
        global.check_against(&locals, &self.planner_name())?;
        let run = lead.run.as_ref().ok_or_else(no_plan)?;
        let write_plans = run.place(&locals, &mut global)?;
        // What each rank writes is in its write plan; later only the index is needed.
        global.selections = Vec::new();
        let global = Arc::new(global);
        if let Some(memory) = &self.memory {
            memory.plans.insert(lead.key.clone(), Arc::clone(&global));
        }
        lead.plan = Some(global);
        Ok((write_plans.iter().map(WritePlan::to_wire).collect(), lead))
    }
}

/// A loss of the group in a save, with what became of the checkpoint, unless that was said before.
fn standing_at(mut error: CheckpointError, what: Standing) -> CheckpointError {
    if let CheckpointError::Lost { standing, .. } = &mut error
        && *standing == Standing::NoSave
    {
        *standing = what;
    }
    error
}

fn no_plan() -> CheckpointError {
    PlanError::Wire {
        problem: "the coordinator refers to a plan that this rank does not have".into(),
    }
    .into()
}

/// The session and its claim end before any rank receives the outcome.
async fn commit(
    lead: &mut Lead<'_>,
    mine: RankWrite<'_>,
    reused: bool,
    reports: Vec<(Vec<Line>, CastCounts)>,
) -> Result<(Totals, ()), CheckpointError> {
    let plan = lead.plan.as_ref().ok_or_else(no_plan)?;
    let mut cast = CastCounts::default();
    reports.iter().for_each(|(_, counts)| cast.add(counts));
    let all = reports.iter().flat_map(|(lines, _)| lines);
    let totals = Totals {
        entries: plan.metadata.len() as u64,
        bytes_written: all.clone().map(|(_, len, _)| *len).sum(),
        files: all.count() as u64,
        reused_plan: reused,
        cast,
    };
    let reports =
        reports.into_iter().map(|(lines, _)| report(lines)).collect::<Result<Vec<_>, _>>()?;
    let run = lead.run.take().ok_or_else(no_plan)?;
    run.commit(vec![mine], &plan.metadata, reports).await?;
    Ok((totals, ()))
}
