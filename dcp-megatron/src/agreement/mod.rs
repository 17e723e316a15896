//! Collective outcomes: all ranks succeed, or all fail with the same typed error.

pub(crate) mod common_check;

use bytes::Bytes;
use dcp_core::CheckpointError;
use dcp_core::error::{Phase, RankFailure};
use dcp_engine::Group;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::MegatronError;

/// The error as other ranks get it: of this rank, as text.
pub(crate) fn reported(group: &Group, phase: Phase, error: MegatronError) -> CheckpointError {
    match error {
        MegatronError::Checkpoint(error) => error,
        error => {
            let failure = RankFailure::of(group.context().rank, &error);
            CheckpointError::Ranks { phase, failures: vec![failure] }
        }
    }
}

/// Goes on when every rank does. Alone, an error stays what it is.
pub(crate) async fn all<T>(
    group: &Group,
    phase: Phase,
    mine: Result<T, MegatronError>,
) -> Result<T, MegatronError> {
    if group.context().world_size == 1 {
        return mine;
    }
    let mine = mine.map_err(|error| reported(group, phase, error));
    Ok(group.all_succeed(phase, mine).await?)
}

/// Brings what every rank has to say to the coordinator, which alone gets `Some`, and fails on all
/// ranks when one of them fails. Each rank keeps the second half of its own.
pub(crate) async fn offers<K>(
    group: &Group,
    phase: Phase,
    mine: Result<(Bytes, K), MegatronError>,
) -> Result<(Option<Vec<Bytes>>, K), MegatronError> {
    let (mine, kept) = all(group, phase, mine).await?;
    Ok((group.gather(phase, mine).await?, kept))
}

/// Broadcasts the result of the coordinator, which alone passes `Some`.
pub(crate) async fn verdict<T: Serialize + DeserializeOwned>(
    group: &Group,
    phase: Phase,
    found: Option<Result<T, MegatronError>>,
) -> Result<T, MegatronError> {
    let found = match found {
        Some(found) if group.context().world_size == 1 => return found,
        Some(Err(error)) => Some(Err(reported(group, phase, error))),
        Some(Ok(found)) => Some(Ok((found, ()))),
        None => None,
    };
    Ok(group.broadcast_result(phase, found).await?.0)
}

/// The ranks part in peace where all of them have the same outcome; otherwise the group ends.
pub(crate) fn conclude<T>(group: Group, outcome: &Result<T, MegatronError>) {
    match outcome {
        Err(MegatronError::Checkpoint(error)) if !group.is_agreed(error) => drop(group),
        _ => group.conclude(&Ok(())),
    }
}
