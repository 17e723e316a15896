//! A load plan in rounds, between which what goes to devices leaves host memory.

use std::borrow::Cow;
use std::sync::Arc;

use dcp_core::checkpoint::ReadReport;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader};
use futures_util::future::join;

use crate::device::piece_bytes;
use crate::disjoint::cut;
use crate::sink::{Staged, StateSink};

/// Divides a plan so that the pieces of one round that go to devices have at most half of
/// `staging_bytes`: one round is read while those of the one before are copied. What goes into host
/// memory is in the first round.
pub(crate) fn rounds(plan: LoadPlan, sink: &StateSink, staging_bytes: u64) -> Vec<LoadPlan> {
    let most = (staging_bytes / 2).max(1);
    let mut first = LoadPlan::default();
    let mut later: Vec<(u64, LoadPlan)> = Vec::new();
    for item in plan.items {
        let (Some(element), ReadKind::Tensor { chunk, shard, region }) =
            (sink.element_on_device(&item), &item.kind)
        else {
            first.items.push(item);
            continue;
        };
        let len = region.volume().saturating_mul(element);
        // What fits into a round is read at once, so that its checksum is compared.
        let full = |(bytes, _): &(u64, LoadPlan)| len <= most && bytes + len > most;
        if later.last().is_none_or(full) {
            later.push((0, LoadPlan::default()));
        }
        for piece in cut(region.clone(), piece_bytes(staging_bytes) / element) {
            let len = piece.volume() * element;
            if later.last().is_some_and(|(bytes, _)| *bytes > 0 && bytes + len > most) {
                later.push((0, LoadPlan::default()));
            }
            let kind = ReadKind::Tensor { chunk: *chunk, shard: *shard, region: piece };
            if let Some((bytes, round)) = later.last_mut() {
                *bytes += len;
                round.items.push(ReadItem { entry: item.entry, leaf: item.leaf, kind });
            }
        }
    }
    let mut later = later.into_iter().map(|(_, plan)| plan).filter(|plan| !plan.items.is_empty());
    first.items.extend(later.next().unwrap_or_default().items);
    std::iter::once(first).chain(later).collect()
}

/// The plan of all rounds.
pub(crate) fn whole(rounds: &[LoadPlan]) -> Cow<'_, LoadPlan> {
    match rounds {
        [one] => Cow::Borrowed(one),
        some => {
            let items = some.iter().flat_map(|round| round.items.iter().cloned());
            Cow::Owned(LoadPlan { items: items.collect() })
        }
    }
}

/// Reads `count` rounds, which is the same on all ranks because a reader may involve all of them;
/// those beyond this rank's own are empty.
pub(crate) async fn read(
    reader: &dyn StorageReader,
    metadata: &Arc<CheckpointMetadata>,
    rounds: &[LoadPlan],
    count: u64,
    sink: &Arc<StateSink>,
) -> Result<ReadReport, CheckpointError> {
    let mut report = ReadReport::default();
    let mut staged: Result<Vec<Staged>, CheckpointError> = Ok(Vec::new());
    let (mut rounds, nothing) = (rounds.iter(), LoadPlan::default());
    for _ in 0..count {
        // After a failed copy the other ranks still expect this one's calls.
        let plan = rounds.next().filter(|_| staged.is_ok()).unwrap_or(&nothing);
        let (read, stored) =
            join(reader.read(metadata, plan, Arc::clone(sink) as _), store(staged)).await;
        report += read?;
        staged = stored.and_then(|()| sink.take_staged());
    }
    store(staged).await?;
    Ok(report)
}

async fn store(staged: Result<Vec<Staged>, CheckpointError>) -> Result<(), CheckpointError> {
    for piece in staged? {
        piece.store().await?;
    }
    Ok(())
}
