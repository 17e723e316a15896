//! Checkpoints of Megatron-Core, and the runs of Megatron-LM that they lie in.

use std::sync::Arc;

use dcp::convert::{JobOptions, Problem, ProblemKind, VerifyReport};
use dcp::core::{Key, Storage, StorageError, StorageExt, error_chain};
use dcp::megatron::optimizer::{CheckDepth, OptimizerReport, OptimizerVerdict, check_optimizer};
use dcp::megatron::{
    COMMON_FILE, CheckpointingConfig, METADATA_JSON, MegatronCheckpoint, MegatronError,
    MegatronRun, OpenOptions, RunCheckpoint, TRACKER, verify_opened,
};

use crate::failure::{Exit, Failure};
use crate::open::{Need, Opened};
use crate::style::count;
use crate::tell::list;

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
pub(crate) async fn iteration(
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
                None => format!("{}, which its tracker names, is not there", tracked.folder()?),
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

/// What is said of a folder that would be a checkpoint of Megatron-Core if its save had finished,
/// and is taken for one of PyTorch as it is.
pub(crate) async fn unfinished(storage: &dyn Storage) -> Result<Option<String>, StorageError> {
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    let begun = contains(COMMON_FILE).await? && contains(".metadata").await?;
    Ok((begun && !contains(METADATA_JSON).await?).then(|| {
        format!(
            "there is a {COMMON_FILE} but no {METADATA_JSON}, which Megatron-Core writes last: \
             the save did not finish, or the file was not copied; this is read as a checkpoint of \
             PyTorch, without the common state"
        )
    }))
}

fn cannot_read(uri: &str, error: MegatronError) -> Failure {
    Failure::from(error).context(format!("cannot read {uri:?}")).without_hint()
}

/// Whether a folder is meant as a checkpoint of Megatron-Core: it has the folder of a rank, or a
/// `metadata.json` that speaks of backends, or none that speaks of anything.
pub(crate) async fn is_one(storage: &dyn Storage) -> Result<bool, Failure> {
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
    // Other programs have files of this name, too, but no common state beside it.
    let others = serde_json::from_slice::<serde_json::Value>(&json)
        .is_ok_and(|json| json.get("sharded_backend").is_none());
    Ok(!others || contains(COMMON_FILE).await?)
}

/// Checks a checkpoint: what is stored, and whether the optimizer's state is that of the model.
pub(crate) async fn verify(
    checkpoint: &MegatronCheckpoint,
    deep: bool,
    options: &JobOptions,
) -> Result<VerifyReport, Failure> {
    let mut report = verify_opened(checkpoint, deep, options).await?;
    report.format = format!("megatron_{}", checkpoint.describe().await?.format);
    let depth = if deep { CheckDepth::Full } else { CheckDepth::Sampled };
    // What cannot be read is no evidence of anything else.
    if report.ok {
        let (source, common) = (checkpoint.source(), checkpoint.common());
        add_optimizer(&check_optimizer(source, common, depth, options).await?, &mut report);
    }
    report.ok = report.problems.is_empty();
    Ok(report)
}

/// Refuses to make something that looks whole of a checkpoint whose save did not finish, and whose
/// common state would be gone.
pub(crate) fn refuse_unfinished(opened: &Opened) -> Result<(), Failure> {
    if opened.unfinished.is_none() {
        return Ok(());
    }
    let message = format!(
        "{:?} has a {COMMON_FILE} but no {METADATA_JSON}, which Megatron-Core writes last: the save \
         did not finish, or the file was not copied",
        opened.uri
    );
    let whole = CheckpointingConfig::torch_dist().to_json();
    Err(Failure::new(Exit::Bad, message).hint(format!(
        "take another iteration; if only the file was lost, put it back: {whole}; its tensors alone \
         can be had with --to safetensors"
    )))
}

/// Adds that the save did not finish, and what is wrong with the tracker of the run.
pub(crate) fn add_surroundings(opened: &Opened, report: &mut VerifyReport) {
    let mut add = |kind, file: &str, message: &Option<String>| {
        let Some(message) = message else { return };
        let mut problem = Problem::default();
        problem.kind = kind;
        problem.file = Some(file.to_owned());
        problem.message = message.clone();
        report.problems.push(problem);
        report.ok = false;
    };
    add(ProblemKind::MissingFile, METADATA_JSON, &opened.unfinished);
    add(ProblemKind::Index, TRACKER, &opened.wrong_tracker);
}

/// Adds what was found in the optimizer's state.
fn add_optimizer(found: &OptimizerReport, report: &mut VerifyReport) {
    match found.verdict {
        OptimizerVerdict::ShiftedBuckets | OptimizerVerdict::PossiblyShifted => {}
        OptimizerVerdict::Different => {
            let names: Vec<_> = found.mismatches.iter().map(|m| Arc::clone(&m.param)).collect();
            let differ = count(names.len(), "master parameter");
            report.notes.push(format!(
                "the optimizer has {differ} other than the weights, as when weights were replaced: {}",
                list(&names)
            ));
            return;
        }
        _ => return,
    }
    for mismatch in &found.mismatches {
        let mut problem = Problem::default();
        problem.kind = ProblemKind::Corrupt;
        problem.key = Some(Arc::clone(&mismatch.master));
        problem.message = mismatch.to_string();
        report.problems.push(problem);
    }
    report.notes.push(format!(
        "{}; the model is sound. `dcp convert --to torch-dist --repair-optimizer` takes the master \
         parameters from the weights and resets the moments",
        found.verdict
    ));
}
