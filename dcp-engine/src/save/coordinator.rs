//! The coordinator's part of a save.

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use dcp_cast::CastCounts;
use dcp_core::checkpoint::WriteReport;
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::save_run::{RankWrite, SaveRun};
use dcp_core::wire::{PlanRequest, PlanSummary};
use dcp_core::{CheckpointError, Key, Rank, StorageErrorKind, StorageWriter};

use super::{Saver, no_plan};
use crate::messages::{Decision, Offer, RankReport, Totals, plan_id, same_save};
use crate::small_values::{self, Request};
use crate::summary::WriteTimes;

/// The coordinator's state until the commit.
#[derive(Debug)]
pub(super) struct Lead<'a> {
    run: Option<SaveRun<'a>>,
    /// The fingerprints and the layout that the plan depends on.
    key: Vec<u128>,
    /// Of the plans that ranks offer.
    summaries: Vec<PlanSummary>,
    /// The reason for which reports have the hashes of single small values.
    compares: Option<Request>,
    /// The plan with its places.
    pub(super) plan: Option<Arc<GlobalPlan>>,
}

impl Saver {
    /// On the coordinator: looks at the place, and at how much of the last plan serves again.
    pub(super) async fn open<'a>(
        &self,
        offers: &[Offer],
        writer: &'a dyn StorageWriter,
    ) -> Result<(Decision, Lead<'a>), CheckpointError> {
        same_save(offers)?;
        let run = SaveRun::begin(writer).await?;
        let session = run.session();
        let summaries: Vec<PlanSummary> = offers.iter().map(|offer| offer.summary).collect();
        let fingerprints = summaries.iter().map(|summary| summary.fingerprint);
        let key: Vec<u128> = fingerprints.chain([session.layout.into()]).collect();
        let plan_id = plan_id(&key);
        let plan = self
            .memory
            .as_ref()
            .filter(|_| offers.iter().all(|offer| offer.remembers == Some(plan_id)))
            .and_then(|memory| memory.plans.get(&key));
        let generation = session.generation;
        let own = self.memory.as_ref().and_then(|memory| memory.own_names());
        let digests = offers.iter().map(|offer| offer.values);
        let compares = small_values::request(digests, plan.is_some(), own.as_deref());
        let compare = compares.is_some();
        let Some(plan) = plan else {
            let request = PlanRequest::of(&summaries);
            let lead = Lead { run: Some(run), key, summaries, compares, plan: None };
            return Ok((Decision::Plan { plan_id, request, compare }, lead));
        };
        let mut plan = GlobalPlan::clone(&plan);
        plan.metadata.rename_files(|file| writer.renamed(file, generation))?;
        let plan = Some(Arc::new(plan));
        let lead = Lead { run: Some(run), key, summaries, compares, plan };
        Ok((Decision::Repeat { generation, compare }, lead))
    }

    /// On the coordinator: one plan for all, with a place for every byte.
    pub(super) fn place_items<'a>(
        &self,
        mut lead: Lead<'a>,
        answers: &[Bytes],
    ) -> Result<(Vec<Bytes>, Lead<'a>), CheckpointError> {
        let locals = SavePlan::from_answers(&lead.summaries, answers)?;
        let mut global = self.settings.save_planner.global_plan(&locals)?;
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

/// The session and its claim end before any rank receives the outcome.
pub(super) async fn commit(
    lead: &mut Lead<'_>,
    mine: RankWrite<'_>,
    reused: bool,
    mut reports: Vec<RankReport>,
    coordinator: Rank,
    place: Option<&str>,
) -> Result<(Totals, ()), CheckpointError> {
    let plan = lead.plan.as_ref().ok_or_else(no_plan)?;
    let mut cast = CastCounts::default();
    reports.iter().for_each(|report| cast.add(&report.cast));
    let compared = lead.compares.map(|request| {
        let values: Vec<_> = reports.iter_mut().map(|rank| mem::take(&mut rank.values)).collect();
        let names = plan.metadata.iter().map(|(fqn, _)| &**fqn);
        let compared = small_values::compare(&values, names);
        small_values::warn(&compared.differing, request);
        compared
    });
    let totals = Totals {
        entries: plan.metadata.len() as u64,
        bytes_written: reports.iter().map(RankReport::bytes).sum(),
        files: reports.iter().map(|rank| rank.report.files.len() as u64).sum(),
        reused_plan: reused,
        write_times: WriteTimes::of(
            reports.iter().map(|report| (report.duration, report.bytes())),
            reports.iter().map(|report| report.slowest_file.clone()),
        ),
        cast,
        compared,
    };
    let reports: Vec<WriteReport> = reports.into_iter().map(|rank| rank.report).collect();
    let files = |report: &WriteReport| report.files.iter().map(|(key, _)| key.clone()).collect();
    let written: Vec<Vec<Key>> = reports.iter().map(files).collect();
    let run = lead.run.take().ok_or_else(no_plan)?;
    let committed = run.commit(vec![mine], &plan.metadata, reports).await;
    let stored = committed.map_err(|error| not_shared(error, &written, coordinator, place))?;
    if let Cow::Owned(metadata) = stored {
        // The remembered plan keeps the planned places.
        let left_out = plan.left_out.clone();
        lead.plan = Some(Arc::new(GlobalPlan { metadata, selections: Vec::new(), left_out }));
    }
    Ok((totals, ()))
}

/// The error of a commit, with the rank that wrote the file which is not there. Ranks with storages of their
/// own, such as a local disk on each node, notice that only now.
fn not_shared(
    error: CheckpointError,
    written: &[Vec<Key>],
    coordinator: Rank,
    place: Option<&str>,
) -> CheckpointError {
    let CheckpointError::Storage(source) = error else { return error };
    let file = source.key().filter(|_| source.kind() == StorageErrorKind::NotFound);
    let found = file.and_then(|file| {
        let rank = (0..).zip(written).find(|(_, files)| files.contains(file))?.0;
        (rank != coordinator).then(|| (file.to_string(), rank))
    });
    match found {
        None => source.into(),
        Some((file, rank)) => {
            let place = place.map(str::to_owned);
            CheckpointError::NotShared { file, rank, coordinator, place, source }
        }
    }
}
