//! Which iteration stands for a run of Megatron-LM.

use std::sync::Arc;

use dcp::core::{Key, Storage, StorageError, StorageExt, error_chain};
use dcp::megatron::{METADATA_JSON, MegatronRun, RunCheckpoint, TRACKER};

use crate::failure::{Exit, Failure};

/// An iteration of a run.
pub(crate) struct Iteration {
    /// The folder in that of the run.
    pub(crate) folder: String,
    /// Why this one is taken.
    pub(crate) note: String,
    /// What is wrong with the tracker.
    pub(crate) wrong: Option<String>,
}

/// The iteration that stands for a run: the one that the tracker names, or the last complete one
/// where that is not whole. `None` where there is no tracker.
pub(crate) async fn of_run(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<Iteration>, Failure> {
    let tracker = Key::new(TRACKER).map_err(StorageError::from)?;
    if !storage.contains(&tracker).await? {
        return Ok(None);
    }
    let run = MegatronRun::new(Arc::clone(storage));
    let tracked = run.tracked().await;
    let checkpoints = run.checkpoints().await?;
    let complete = || checkpoints.iter().filter(|checkpoint| checkpoint.is_complete());
    let found = |checkpoint: &RunCheckpoint, why: String, wrong: Option<String>| {
        let folder = checkpoint.which.folder()?.to_string();
        let note = format!("{uri:?} is a run of Megatron-LM; {folder} is taken, {why}");
        Ok(Some(Iteration { folder, note, wrong }))
    };
    let wrong = match &tracked {
        Ok(Some(tracked)) => {
            if let Some(named) = complete().find(|checkpoint| checkpoint.which == *tracked) {
                return found(named, "which its tracker names".to_owned(), None);
            }
            match checkpoints.iter().find(|checkpoint| checkpoint.which == *tracked) {
                Some(named) => {
                    let problem = named.entry.problem.as_deref().unwrap_or("it is not whole");
                    format!(
                        "{}, which its tracker names, is not complete: {problem}",
                        tracked.folder()?
                    )
                }
                None => {
                    let folder = tracked.folder()?;
                    // A link that leads out is not listed, but says so when it is gone through.
                    let inside = Key::new(format!("{folder}/{METADATA_JSON}"));
                    storage.contains(&inside.map_err(StorageError::from)?).await?;
                    format!("{folder}, which its tracker names, is not there")
                }
            }
        }
        Ok(None) => return Ok(None),
        Err(error) => error_chain(error),
    };
    match complete().next_back() {
        Some(last) => found(last, format!("the last complete one: {wrong}"), Some(wrong)),
        None => {
            let message = format!("no checkpoint of the run {uri:?} is complete: {wrong}");
            Err(Failure::new(Exit::Bad, message)
                .hint("`dcp ls` says of every iteration what is missing"))
        }
    }
}

/// The last complete iteration, or the release, of a run without a tracker; `None` where there is
/// none.
pub(crate) async fn untracked(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<Iteration>, Failure> {
    let Some(last) = MegatronRun::new(Arc::clone(storage)).latest().await? else {
        return Ok(None);
    };
    let folder = last.which.folder()?.to_string();
    let note =
        format!("there is no {TRACKER} in {uri:?}; {folder} is taken, the last complete one");
    Ok(Some(Iteration { folder, note, wrong: None }))
}
