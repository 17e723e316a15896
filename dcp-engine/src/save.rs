//! The save protocol: plan, merge, write, commit.

mod coordinator;
mod restart;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dcp_core::checkpoint::DataSource;
use dcp_core::error::{Phase, Standing, StateProblem};
use dcp_core::plan::{SavePlan, WritePlan};
use dcp_core::save_run::RankWrite;
use dcp_core::wire::PlanParts;
use dcp_core::{CheckpointError, PlanError, StateDict, StorageWriter, Tensor, Value};
use dcp_planner::{flatten, index_of};
use tracing::Instrument;

use self::coordinator::{Lead, commit};
use crate::event::{CheckpointEvent, CheckpointObserver, Observers, Operation};
use crate::group::Group;
use crate::memory::{Memory, Remembered};
use crate::messages::{Decision, Offer, RankReport, Totals};
use crate::settings::Settings;
use crate::small_values::{Compared, SmallValues};
use crate::source::{Leaf, StateSource};
use crate::summary::{SaveSummary, SaveTimings};

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
    settings: Settings,
    memory: Option<Arc<Memory>>,
    /// The name of the place in errors.
    place: Option<Arc<str>>,
    /// The number of saves that have begun, so that ranks notice when they are at different ones.
    begun: Arc<AtomicU64>,
}

/// This rank's state, ready to be planned and written.
#[derive(Debug)]
struct Prepared {
    plan: SavePlan,
    parts: PlanParts,
    source: Arc<StateSource>,
    values: SmallValues,
}

/// This rank's part of the write, and on the coordinator the data of the commit.
#[derive(Debug)]
struct Planned<'a> {
    prepared: Prepared,
    plan: Arc<WritePlan>,
    lead: Option<Lead<'a>>,
    /// Whether no plan had to be sent.
    reused: bool,
    /// Whether ranks compare the hashes of single small values.
    compares: bool,
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
        Self::with_settings(Settings::new())
    }

    /// A saver with these settings, which remembers no plan yet.
    #[must_use]
    pub fn with_settings(settings: Settings) -> Self {
        let memory = settings.remember_plans.then(Arc::default);
        Self { settings, memory, place: None, begun: Arc::default() }
    }

    /// The settings of its saves.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sets the name of the place of the saves in errors, such as its URL.
    #[must_use]
    pub fn place(mut self, name: &str) -> Self {
        self.place = Some(name.into());
        self
    }

    /// Reports the steps of its saves to `observer` too.
    pub(crate) fn watched_by(mut self, observer: Arc<dyn CheckpointObserver>) -> Self {
        self.settings.observers.add(observer);
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
        let group = self.settings.enter_group()?;
        let rank = group.context().rank;
        let observers = self.settings.observers.of_rank(rank);
        let saved = group.run(async |group| {
            let started = Instant::now();
            let prepared = self.prepare(state, writer, group, &observers);
            self.run(group, prepared, writer, &observers, started.elapsed()).await
        });
        let span = tracing::info_span!("dcp_save", rank);
        observers.watch(Operation::Save, saved.instrument(span).await)
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
        let result = match self.settings.enter_group() {
            Ok(group) => group.run(failed).await,
            Err(error) => Err(error),
        };
        let Err(error) =
            self.settings.observers.of_rank(self.settings.rank()).watch(Operation::Save, result);
        error
    }

    /// Reports an event of this process to the observers.
    pub(crate) fn observe(&self, event: &CheckpointEvent) {
        self.settings.observers.of_rank(self.settings.rank()).send(event);
    }

    /// Aborts the group of a save that this rank does not take part in.
    pub(crate) fn leave(&self, why: &str) {
        if let Some(group) = self.settings.collective() {
            group.abort(why);
        }
    }

    async fn run(
        &self,
        group: &Group,
        prepared: Result<Prepared, CheckpointError>,
        writer: &dyn StorageWriter,
        observers: &Observers,
        prepare: Duration,
    ) -> Result<SaveSummary, CheckpointError> {
        let mut timings = SaveTimings { prepare, ..SaveTimings::default() };
        let started = Instant::now();
        let Planned { prepared, plan, mut lead, reused, compares } = self
            .plan(group, prepared, writer)
            .instrument(tracing::info_span!("plan"))
            .await
            .map_err(|error| standing_at(error, Standing::NotCommitted))?;
        // The coordinator has not begun to commit while it waits for the others to write.
        let written_at = match group.context().is_coordinator() {
            true => Standing::NotCommitted,
            false => Standing::MayBeCommitted,
        };
        timings.plan = started.elapsed();
        let mine = plan.orders.iter().filter_map(|order| prepared.plan.item(order.item as usize));
        let bytes = mine.map(|item| item.byte_len).sum();
        observers.send(&CheckpointEvent::Planned {
            operation: Operation::Save,
            items: plan.orders.len() as u64,
            bytes,
            reused,
            duration: timings.plan,
        });

        let started = Instant::now();
        let mine = RankWrite::new(writer, plan);
        let written = {
            let source: Arc<dyn DataSource> = Arc::clone(&prepared.source) as _;
            let span = tracing::info_span!("write", bytes);
            mine.write(&prepared.plan, source).instrument(span).await
        };
        let duration = started.elapsed();
        let cast = prepared.source.cast_report();
        let values = if compares { prepared.values.sample() } else { Vec::new() };
        let reported = written
            .map(|report| RankReport::new(report, cast.total(), duration).with_values(values));
        let bytes = reported.as_ref().map_or(0, RankReport::bytes);
        let reports = group
            .gather_results(Phase::Write, reported)
            .await
            .map_err(|error| standing_at(error, written_at))?;
        let reports = reports.map(|reports| reports.map(|reports| ((), reports)));
        let reports = match group.broadcast_result(Phase::Write, reports).await {
            Ok(((), reports)) => reports,
            Err(error) => {
                // Only when all know that nothing will be committed: a rank that merely lost the
                // coordinator cannot know whether the commit is under way.
                if group.is_agreed(&error) {
                    mine.abandon().await;
                }
                return Err(standing_at(error, written_at));
            }
        };
        timings.write = started.elapsed();
        observers.send(&CheckpointEvent::Written { bytes, duration, all_ranks: timings.write });

        // From here on nothing is removed after a failure: the commit may have become visible
        // although it could not say so.
        let started = Instant::now();
        let committed = match (&mut lead, reports) {
            (Some(lead), Some(reports)) => {
                let span = tracing::info_span!("commit");
                let (at, place) = (group.context().rank, self.place.as_deref());
                Some(commit(lead, mine, reused, reports, at, place).instrument(span).await)
            }
            _ => None,
        };
        let standing = match &committed {
            Some(Ok(_)) => Standing::Committed,
            Some(Err(_)) | None => Standing::MayBeCommitted,
        };
        let sent = group.broadcast_result(Phase::Commit, committed).await;
        let (totals, _): (Totals, _) = sent.map_err(|error| standing_at(error, standing))?;
        timings.commit = started.elapsed();
        let Compared { differing, own } = totals.compared.unwrap_or_default();
        if let Some(memory) = self.memory.as_ref().filter(|_| compares) {
            memory.keep_own_names(own);
        }
        observers.send(&CheckpointEvent::Committed { duration: timings.commit });
        Ok(SaveSummary {
            entries: totals.entries,
            bytes_written: totals.bytes_written,
            files: totals.files,
            reused_plan: totals.reused_plan,
            timings,
            write_times: totals.write_times,
            cast,
            cast_total: totals.cast,
            differing,
            plan: lead.and_then(|lead| lead.plan),
        })
    }

    /// Flattens the state and encodes its objects, whose lengths the plan needs.
    fn prepare(
        &self,
        state: &StateDict,
        writer: &dyn StorageWriter,
        group: &Group,
        observers: &Observers,
    ) -> Result<Prepared, CheckpointError> {
        let flat = flatten(state, self.settings.flatten_rule.unwrap_or_default())?;
        let mut objects = HashMap::new();
        let mut index = index_of(&flat, |fqn, object| {
            let bytes = writer.encode_object(fqn, object)?;
            let len = bytes.len() as u64;
            objects.insert(fqn.to_owned(), bytes);
            Ok::<_, CheckpointError>(len)
        })?;
        let casts =
            self.settings.casts.as_ref().map(|casts| casts.apply(&mut index)).transpose()?;
        let mut casts = casts.unwrap_or_default().into_iter();
        let mut leaves = HashMap::with_capacity(flat.len());
        let (alone, mut values) = (group.context().world_size == 1, SmallValues::default());
        for entry in &flat {
            let cast = casts.next().flatten();
            let leaf = match entry.value {
                Value::Tensor(tensor) => Leaf::Tensor(tensor.clone(), cast),
                _ => Leaf::Object(objects.remove(&*entry.fqn).unwrap_or_default()),
            };
            match (alone, &leaf) {
                (false, _) => values.add(&entry.fqn, &leaf),
                (true, Leaf::Tensor(tensor, _)) if !self.settings.allow_parts => {
                    check_whole(&entry.fqn, tensor)?;
                }
                _ => {}
            }
            leaves.insert(&*entry.fqn, leaf);
        }
        let mut plan = self.settings.save_planner.local_plan(&index, &group.context())?;
        plan.check_against(&index, &self.planner_name())?;
        let staging = self.settings.staging_bytes;
        let source = Arc::new(StateSource::new(&plan, &leaves, staging, observers.clone())?);
        Ok(Prepared { parts: plan.to_parts(), plan, source, values })
    }

    /// Agrees on the items that each rank writes, and their places.
    async fn plan<'a>(
        &self,
        group: &Group,
        prepared: Result<Prepared, CheckpointError>,
        writer: &'a dyn StorageWriter,
    ) -> Result<Planned<'a>, CheckpointError> {
        let remembered = prepared
            .as_ref()
            .ok()
            .and_then(|mine| self.memory.as_ref()?.recall(mine.parts.summary().fingerprint));
        // A rank that has nothing to offer was at this save all the same.
        let sequence = self.begun.fetch_add(1, Ordering::Relaxed);
        let (offer, prepared) = match prepared {
            Err(error) => (Err(error), None),
            Ok(mine) => {
                let remembers = remembered.as_ref().map(|last| last.plan_id);
                let own = self.memory.as_ref().and_then(|memory| memory.own_names());
                let values = mine.values.digest(own.as_deref().unwrap_or_default());
                let summary = mine.parts.summary();
                (Ok(Offer { sequence, summary, remembers, values }), Some(mine))
            }
        };
        let opened = match group.gather_results(Phase::Plan, offer).await? {
            None => None,
            Some(Err(error)) => Some(Err(error)),
            Some(Ok(offers)) => Some(self.open(&offers, writer).await),
        };
        let (decision, lead) = group.broadcast_result(Phase::Plan, opened).await?;
        let prepared = prepared.ok_or_else(no_plan)?;

        let (plan_id, request, compares) = match decision {
            Decision::Repeat { generation, compare } => {
                let mut plan = WritePlan::clone(&*remembered.ok_or_else(no_plan)?.plan);
                for file in &mut plan.files {
                    *file = writer.renamed(file, generation)?;
                }
                let plan = Arc::new(plan);
                return Ok(Planned { prepared, plan, lead, reused: true, compares: compare });
            }
            Decision::Plan { plan_id, request, compare } => (plan_id, request, compare),
        };
        let answer = request.answer(group.context().rank, &prepared.parts);
        let plans = group.gather(Phase::Plan, answer).await?;
        let placed = lead.zip(plans).map(|(lead, plans)| self.place_items(lead, &plans));
        let (mine, lead) = group.scatter(Phase::Plan, placed).await?;
        let plan = Arc::new(WritePlan::from_wire(&mine)?);
        if let Some(memory) = &self.memory {
            memory.keep(Remembered {
                fingerprint: prepared.parts.summary().fingerprint,
                plan_id,
                plan: Arc::clone(&plan),
            });
        }
        Ok(Planned { prepared, plan, lead, reused: false, compares })
    }

    /// The name of the planner in errors: that of its type, as it shows itself.
    fn planner_name(&self) -> String {
        let shown = format!("{:?}", self.settings.save_planner);
        let name = shown.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
        if name.is_empty() { "without a name".into() } else { name.into() }
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
    PlanError::out_of_step("the coordinator refers to a plan that this rank does not have").into()
}

/// Refuses a tensor of which this process holds a part, where no other rank can hold the rest.
fn check_whole(fqn: &str, tensor: &Tensor) -> Result<(), PlanError> {
    let expected = tensor.shape().checked_volume().unwrap_or(u64::MAX);
    let volumes = tensor.shards().iter().map(|shard| shard.region().volume());
    let found = volumes.fold(0, u64::saturating_add);
    if found < expected {
        return Err(StateProblem::Part { expected, found }.of(fqn));
    }
    Ok(())
}
