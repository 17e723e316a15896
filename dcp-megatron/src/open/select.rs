//! The choice of the checkpoint of a run that is opened.

use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::format::{Folder, Place, RunSelection};
use dcp_core::storage::StorageExt as _;
use dcp_core::{Key, StorageError};

use crate::disk::config::METADATA_JSON;
use crate::disk::tracker::{TRACKER, Tracked};
use crate::open::format::{formats, is_other_run};
use crate::open::run::{MegatronRun, RunCheckpoint};

/// The checkpoint of a run that Megatron-LM loads: the one that the tracker names, or the last
/// complete one where that is not whole.
pub(crate) async fn select(place: &Place) -> Result<Option<RunSelection>, StorageError> {
    const RUN: &str = "is a run of Megatron-LM";
    const LAST: &str = "the last complete one";
    let run = MegatronRun::new(Arc::clone(place.storage()));
    if is_other_run(&place.listing().root()) {
        return Ok(None);
    }
    if !place.storage().contains(&Key::new(TRACKER)?).await? {
        let mut folders = place.listing().root().folders();
        if !folders.any(|below| Tracked::of_folder(below.name()).is_some()) {
            return Ok(None);
        }
        let Some(last) = run.latest().await? else { return Ok(None) };
        let folder = last.which.folder()?.to_string();
        let reason = format!("{LAST}: there is no {TRACKER}");
        return Ok(Some(RunSelection::new(RUN, Ok(folder), reason)));
    }
    if is_beside_another(&place.listing().root()) {
        return Ok(None);
    }
    let tracked = run.tracked().await;
    let checkpoints = run.checkpoints().await?;
    let complete = || checkpoints.iter().filter(|checkpoint| checkpoint.is_complete());
    let found = |checkpoint: &RunCheckpoint, reason: String, problem: Option<String>| {
        let folder = checkpoint.which.folder()?.to_string();
        let selection = RunSelection::new(RUN, Ok(folder), reason);
        Ok(Some(selection.with_tracker(TRACKER, problem)))
    };
    let problem = match &tracked {
        Ok(Some(tracked)) => {
            if let Some(named) = complete().find(|checkpoint| checkpoint.which == *tracked) {
                return found(named, "which the tracker names".to_owned(), None);
            }
            let folder = tracked.folder()?;
            match checkpoints.iter().find(|checkpoint| checkpoint.which == *tracked) {
                Some(named) => {
                    let problem = named.entry.problem.as_deref().unwrap_or("it is not whole");
                    format!("{folder}, which the tracker names, is not complete: {problem}")
                }
                None => {
                    // A link that leads out is not listed, but refused when it is followed.
                    place.storage().contains(&folder.join(METADATA_JSON)?).await?;
                    format!("{folder}, which the tracker names, does not exist")
                }
            }
        }
        Ok(None) => return Ok(None),
        Err(error) => error_chain(error),
    };
    match complete().next_back() {
        Some(last) => found(last, format!("{LAST}: {problem}"), Some(problem)),
        None => Ok(Some(RunSelection::new(RUN, Err(problem), "").with_tracker(TRACKER, None))),
    }
}

/// Whether a folder with a tracker is a checkpoint of another format, and has no iteration that the tracker could name.
fn is_beside_another(folder: &Folder<'_>) -> bool {
    let is_iteration = |below: Folder<'_>| Tracked::of_folder(below.name()).is_some();
    let found = || formats().classify(folder).map(|found| found.found);
    !folder.folders().any(is_iteration) && found().is_some_and(|found| found.problem.is_none())
}
