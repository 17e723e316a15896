//! Objects of which each rank of a save without collectives has its own.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{CheckpointError, CheckpointMetadata, Entry, Placement, Storage, StorageExt as _};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::merge::Merged;

/// Bytes at the end of an archive, in which its directory has the CRC-32 of every record.
const TAIL: u64 = 2 << 10;

/// An object that is not the same on all ranks that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DifferingObject {
    /// Its name.
    pub fqn: Arc<str>,
    /// The ranks that have one, ascending.
    pub ranks: Arc<[u32]>,
}

/// Takes the objects of `rank`, where it has them, and tells which of them other ranks have
/// differently. Objects are compared by the length and the last bytes of their archives.
pub(super) async fn settle(
    storage: &dyn Storage,
    merged: Merged,
    rank: Option<u32>,
) -> Result<(CheckpointMetadata, Vec<DifferingObject>), CheckpointError> {
    let Merged { mut metadata, objects } = merged;
    let shown = &metadata;
    let compared: Vec<_> = objects
        .iter()
        .map(|(fqn, places)| async move {
            let mut ends = HashSet::new();
            for (_, placement) in places {
                ends.insert((placement.byte_len, tail(storage, shown, *placement).await?));
            }
            Ok::<_, CheckpointError>((ends.len() > 1).then(|| DifferingObject {
                fqn: Arc::clone(fqn),
                ranks: places.iter().map(|(rank, _)| *rank).collect(),
            }))
        })
        .collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let differing: Vec<_> = stream::iter(compared).buffered(parallelism).try_collect().await?;
    for (fqn, places) in &objects {
        let own = places.iter().find(|(of, _)| Some(*of) == rank).map(|(_, placement)| *placement);
        let index = metadata.index_of(fqn);
        if let Some(placement) = own
            && let Some((_, Entry::Object(object))) = index.and_then(|at| metadata.at_mut(at))
        {
            object.placement = Some(placement);
        }
    }
    Ok((metadata, differing.into_iter().flatten().collect()))
}

/// What an archive ends in; nothing of one that is not there, which is found elsewhere.
async fn tail(
    storage: &dyn Storage,
    metadata: &CheckpointMetadata,
    placement: Placement,
) -> Result<Bytes, CheckpointError> {
    let Some(key) = metadata.file(placement.file) else { return Ok(Bytes::new()) };
    let end = placement.byte_offset.saturating_add(placement.byte_len);
    let start = end.saturating_sub(TAIL).max(placement.byte_offset);
    Ok(storage.read_range(key, start..end).await.unwrap_or_default())
}
