//! The messages of the ranks of a group about a checkpoint that they write together.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::checkpoint::WriteReport;
use dcp_core::digest::fnv1a_128;
use dcp_core::error::{PlanMaker, PlanProblem};
use dcp_core::plan::{SavePlan, WritePlan};
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, CollectiveError, Key, PlanError};

use crate::group::{JobGroup, other_plan};

const PLANS: [u8; 4] = *b"dwp1";
const REPORTS: [u8; 4] = *b"dwr2";

/// The write plans of rank 0, on all ranks; refused by a rank whose `locals` are others.
pub(crate) async fn share_plans(
    group: &JobGroup,
    locals: &[SavePlan],
    plans: Option<Vec<WritePlan>>,
) -> Result<Vec<WritePlan>, CheckpointError> {
    let mut fingerprints = MessageWriter::new(PLANS);
    locals.iter().for_each(|local| fingerprints.bytes(&local.fingerprint().to_le_bytes()));
    let planned = fnv1a_128(&fingerprints.finish()).to_le_bytes();
    let mut message = MessageWriter::new(PLANS);
    message.bytes(&planned);
    let own = plans.unwrap_or_default();
    message.number(own.len() as u64);
    own.iter().for_each(|plan| message.bytes(&plan.to_wire()));
    let message = group.broadcast(message.finish()).await?;
    if group.is_coordinator() {
        return Ok(own);
    }
    let mut message = MessageReader::new(&message, PLANS)?;
    if message.bytes()? != planned {
        return Err(other_plan().into());
    }
    let mut plans = Vec::new();
    for _ in 0..message.count()? {
        plans.push(WritePlan::from_wire(message.bytes()?)?);
    }
    message.finish()?;
    if plans.len() != locals.len() {
        let (expected, found) = (locals.len(), plans.len());
        return Err(PlanError::Plan(PlanProblem::Count {
            made_by: PlanMaker::Coordinator,
            expected,
            found,
        })
        .into());
    }
    Ok(plans)
}

/// Whether `error` is that of a rank that reported a failure, so that no exchange took place. After
/// another error of the group, rank 0 may have received what this rank sent.
pub(crate) fn was_not_exchanged(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::Collective(CollectiveError::Aborted { .. }))
}

/// Gathers the reports of all ranks, in their order, on rank 0; nothing on others.
pub(crate) async fn gather_reports(
    group: &JobGroup,
    mine: &[WriteReport],
) -> Result<Option<Vec<WriteReport>>, CheckpointError> {
    let Some(all) = group.gather(encode(mine)).await? else { return Ok(None) };
    let mut reports = Vec::new();
    for message in all {
        reports.extend(decode(&message)?);
    }
    Ok(Some(reports))
}

/// The files that all ranks wrote, on rank 0; nothing on others.
pub(crate) async fn gather_files(
    group: &JobGroup,
    mine: &[(Key, u64)],
) -> Result<Option<Vec<(Key, u64)>>, CheckpointError> {
    let reports = gather_reports(group, &[WriteReport::new(mine.to_vec())]).await?;
    Ok(reports.map(|reports| reports.into_iter().flat_map(|report| report.files).collect()))
}

fn encode(reports: &[WriteReport]) -> Bytes {
    let mut out = MessageWriter::new(REPORTS);
    out.number(reports.len() as u64);
    reports.iter().for_each(|report| report.write_to(&mut out));
    out.finish()
}

fn decode(message: &[u8]) -> Result<Vec<WriteReport>, PlanError> {
    let mut input = MessageReader::new(message, REPORTS)?;
    let reports = (0..input.count()?)
        .map(|_| WriteReport::read_from(&mut input))
        .collect::<Result<_, _>>()?;
    input.finish()?;
    Ok(reports)
}

/// The items that this process does, of items with these bytes.
pub(crate) fn share_of(group: Option<&JobGroup>, byte_lens: &[u64]) -> Range<usize> {
    group.map_or(0..byte_lens.len(), |group| group.share(byte_lens))
}
