//! The writes of a save that one process makes for all ranks, or several processes together.

use std::ops::Range;
use std::sync::Arc;

use dcp_core::checkpoint::{DataSource, WriteReport};
use dcp_core::plan::{GlobalPlan, SavePlan, SelectedItem, WritePlan};
use dcp_core::save_run::{RankWrite, SaveRun};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageWriter};
use dcp_formats::Stop;

use crate::error::JobError;
use crate::integrity::checked_source::{CheckedSource, Verified};
use crate::options::JobOptions;
use crate::write::on_ranks::{gather_reports, share_plans};

/// Bytes of memory per rank besides its segments: the upload part that the format fills, and the
/// one in flight.
const RANK_OVERHEAD: u64 = 40 << 20;

/// Makes the checkpoint visible.
pub(crate) async fn commit(
    save: SaveRun<'_>,
    writes: Vec<RankWrite<'_>>,
    metadata: &CheckpointMetadata,
    reports: Vec<WriteReport>,
    _: Verified,
) -> Result<(), CheckpointError> {
    save.commit(writes, metadata, reports).await.map(drop)
}

/// Begins the save, and assigns a placement to every item. In a group, rank 0 does, and all get the
/// plans. `listed` changes the index of the placed items before any rank writes.
pub(crate) async fn begin<'a>(
    writer: &'a dyn StorageWriter,
    locals: &[SavePlan],
    global: &mut GlobalPlan,
    listed: impl FnOnce(&mut CheckpointMetadata) -> Result<(), JobError>,
    options: &JobOptions,
) -> Result<(Option<SaveRun<'a>>, Vec<WritePlan>), JobError> {
    let (mut save, mut plans) = (None, None);
    if options.is_coordinator() {
        let begun = SaveRun::begin(writer).await?;
        plans = Some(begun.place(locals, global).map_err(JobError::unwritable)?);
        listed(&mut global.metadata)?;
        save = Some(begun);
    }
    let plans = match &options.group {
        Some(group) if !options.dry_run => share_plans(group, locals, plans).await?,
        _ => plans.unwrap_or_default(),
    };
    Ok((save, plans))
}

/// The reason that there is nothing to commit, and whether the files of this process go: rank 0 may be
/// committing it.
pub(crate) struct NotWritten {
    pub(crate) error: CheckpointError,
    pub(crate) abandon: bool,
}

/// Writes the data of the ranks `own`, and checks that none of it is damaged. Returns what all
/// processes of a group wrote on rank 0. When it fails, this process does not write any more.
pub(crate) async fn write(
    source: CheckedSource,
    own: Range<usize>,
    locals: &[SavePlan],
    writes: &[RankWrite<'_>],
    data: Vec<Arc<dyn DataSource>>,
    options: &JobOptions,
) -> Result<(Vec<WriteReport>, Verified), NotWritten> {
    let at_once = usize::try_from(options.max_memory / RANK_OVERHEAD).unwrap_or(usize::MAX);
    let at_once = at_once.clamp(1, options.parallelism.max(1));
    let stop = Stop::new();
    let of_ranks = locals.iter().zip(writes).zip(data).take(own.end).skip(own.start);
    let of_ranks = of_ranks.map(|((local, rank), data)| rank.write(local, stop.guard(data)));
    let written = async { Ok((stop.run(of_ranks, at_once).await?, source.finish().await?)) };
    let (reports, verified) = written.await.map_err(|error| NotWritten { error, abandon: true })?;
    let Some(group) = &options.group else { return Ok((reports, verified)) };
    let handed_over = async {
        let all = gather_reports(group, &reports).await?;
        group.hand_over().await.map(|()| all.unwrap_or_default())
    };
    match handed_over.await {
        Ok(all) => Ok((all, verified)),
        Err(error) => Err(NotWritten { error, abandon: !group.has_handed_over() }),
    }
}

/// The bytes that each rank writes.
pub(crate) fn byte_lens(global: &GlobalPlan, locals: &[SavePlan]) -> Vec<u64> {
    let of_rank = |(selected, local): (&Vec<SelectedItem>, &SavePlan)| {
        let items = selected.iter().filter_map(|one| local.item(one.item as usize));
        items.map(|item| item.byte_len).fold(0, u64::saturating_add)
    };
    global.selections.iter().zip(locals).map(of_rank).collect()
}
