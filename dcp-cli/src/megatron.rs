//! Checkpoints of Megatron-Core, and the runs of Megatron-LM that they lie in.

use std::sync::Arc;

use dcp::core::{Key, Storage, StorageError, StorageExt};
use dcp::megatron::{
    CheckpointingConfig, METADATA_JSON, MegatronCheckpoint, MegatronError, MegatronRun,
    OpenOptions, TRACKER_FILE,
};

use crate::failure::{Exit, Failure};
use crate::open::Need;

/// An iteration of a run.
pub(crate) struct Iteration {
    /// The folder in that of the run.
    pub(crate) folder: String,
    /// Why this one is taken.
    pub(crate) note: String,
}

/// The iteration that stands for a run: the one that the tracker names, or the last complete one
/// where that is not whole. `None` where there is no tracker.
pub(crate) async fn iteration(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<Iteration>, Failure> {
    let tracker = Key::new(TRACKER_FILE).map_err(StorageError::from)?;
    if !storage.contains(&tracker).await? {
        return Ok(None);
    }
    let run = MegatronRun::new(Arc::clone(storage));
    let tracked = run.tracked().await;
    let checkpoints = run.checkpoints().await?;
    let complete = || checkpoints.iter().filter(|checkpoint| checkpoint.is_complete());
    let found = |checkpoint: &dcp::megatron::RunCheckpoint, why: String| {
        let folder = checkpoint.iteration.to_string();
        let note = format!("{uri:?} is a run of Megatron-LM; {folder} is taken, {why}");
        Ok(Some(Iteration { folder, note }))
    };
    let wrong = match &tracked {
        Ok(Some(tracked)) => {
            if let Some(named) = complete().find(|checkpoint| checkpoint.iteration == *tracked) {
                return found(named, "which its tracker names".to_owned());
            }
            match checkpoints.iter().find(|checkpoint| checkpoint.iteration == *tracked) {
                Some(named) => {
                    let problem = named.entry.problem.as_deref().unwrap_or("it is not whole");
                    format!("{tracked}, which its tracker names, is not complete: {problem}")
                }
                None => format!("{tracked}, which its tracker names, is not there"),
            }
        }
        Ok(None) => return Ok(None),
        Err(error) => error.to_string(),
    };
    match complete().last() {
        Some(last) => found(last, format!("the last complete one: {wrong}")),
        None => {
            let message = format!("no checkpoint of the run {uri:?} is complete: {wrong}");
            Err(Failure::new(Exit::Bad, message)
                .hint("`dcp ls` says of every iteration what is missing"))
        }
    }
}

/// Opens the checkpoint of Megatron-Core in a folder; `None` where there is none.
pub(crate) async fn open(
    uri: &str,
    storage: &Arc<dyn Storage>,
    need: Need,
) -> Result<Option<MegatronCheckpoint>, Failure> {
    if !is_one(&**storage).await? {
        return Ok(None);
    }
    let options = OpenOptions::default().with_tolerant(need == Need::Readable);
    match MegatronCheckpoint::open(storage, &options).await {
        Ok(checkpoint) => Ok(Some(checkpoint)),
        Err(error) => Err(cannot_read(uri, error)),
    }
}

fn cannot_read(uri: &str, error: MegatronError) -> Failure {
    Failure::from(error).context(format!("cannot read {uri:?}")).without_hint()
}

/// Whether a folder is meant as a checkpoint of Megatron-Core: it has the folder of a rank, or a
/// `metadata.json` that speaks of backends, or none that speaks of anything.
async fn is_one(storage: &dyn Storage) -> Result<bool, Failure> {
    /// More than any `metadata.json` of Megatron-Core has, in bytes.
    const BYTES_MAX: u64 = 1 << 16;
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    for rank in ["mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"] {
        if contains(&format!("{rank}/model_optim_rng.pt")).await? {
            return Ok(true);
        }
    }
    let key = Key::new(METADATA_JSON).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Ok(false);
    }
    let len = storage.stat(&key).await?.byte_len;
    if len > BYTES_MAX {
        return Ok(false);
    }
    let json = storage.read_range(&key, 0..len).await?;
    // Other programs have files of this name, too.
    let others = serde_json::from_slice::<serde_json::Value>(&json)
        .is_ok_and(|json| json.get("sharded_backend").is_none());
    Ok(!others || CheckpointingConfig::parse(&json).is_ok())
}
