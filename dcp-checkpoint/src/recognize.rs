//! What a folder is, by the names in it: whose checkpoint, which of a run, whether its save
//! finished.

use std::sync::Arc;

use dcp_convert::Source;
use dcp_core::{Key, Storage, StorageError, StorageExt, error_chain};
use dcp_formats::folder::{FolderKind, FolderNames, OLMO_MODEL};
use dcp_formats::hf::INDEX_ENDING;
use dcp_megatron::{
    COMMON_FILE, COMMON_OBJECT, CheckpointingConfig, INTEGRITY_FILE, METADATA_JSON, MegatronRun,
    RunCheckpoint, TRACKER,
};
use futures_util::StreamExt;

use crate::error::{Error, ErrorKind};
use crate::uri::{below, split};

/// The folder of NeMo's checkpoints that has the checkpoint.
pub(crate) const NEMO_WEIGHTS: &str = "weights";

/// Whether a folder is a checkpoint of PyTorch's format.
pub(crate) async fn is_dcp(storage: &dyn Storage) -> Result<bool, StorageError> {
    for name in [".metadata", "__0.metadata"] {
        if storage.contains(&Key::new(name)?).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A file that makes a folder a Hugging Face model, whatever else is there: an index, or one under
/// a name that loaders look for. Other safetensors files may be in any folder.
pub(crate) async fn model_file(storage: &dyn Storage) -> Result<Option<Key>, StorageError> {
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        let name = key.as_str();
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        if !name.contains('/') && (is_weights || name.ends_with(INDEX_ENDING)) {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Whether a folder is meant as a checkpoint of Megatron-Core: it has the folder of a rank, a
/// `metadata.json` that names backends, or one that is not JSON.
pub(crate) async fn is_megatron(storage: &dyn Storage) -> Result<bool, StorageError> {
    /// More than any `metadata.json` of Megatron-Core has, in bytes.
    const BYTES_MAX: u64 = 1 << 16;
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    for rank in ["mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"] {
        if contains(&format!("{rank}/model_optim_rng.pt")).await? {
            return Ok(true);
        }
    }
    let key = Key::new(METADATA_JSON)?;
    if !storage.contains(&key).await? {
        return Ok(false);
    }
    let len = storage.stat(&key).await?.byte_len;
    if len > BYTES_MAX {
        return Ok(false);
    }
    let json = storage.read_range(&key, 0..len).await?;
    // Other programs have files of this name, too, but no common state.
    let others = serde_json::from_slice::<serde_json::Value>(&json)
        .is_ok_and(|json| json.get("sharded_backend").is_none());
    Ok(!others || contains(COMMON_FILE).await?)
}

/// Where the checkpoint in a folder is.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) uri: String,
    /// Which of several it is.
    pub(crate) note: Option<String>,
    /// What is wrong with the tracker of the run.
    pub(crate) tracker_problem: Option<String>,
}

/// The place of the checkpoint in a folder: `model_and_optim` in a step of OLMo-core, `weights` in
/// a checkpoint of NeMo, the latest iteration in a run of Megatron-LM, otherwise the folder itself.
pub(crate) async fn place(uri: &str, storage: &Arc<dyn Storage>) -> Result<Place, Error> {
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    let at = |uri: String| Place { uri, note: None, tracker_problem: None };
    if !contains(".metadata").await? {
        for folder in [OLMO_MODEL, NEMO_WEIGHTS] {
            if contains(&format!("{folder}/.metadata")).await? {
                return Ok(at(below(uri, folder)));
            }
        }
        if !contains(METADATA_JSON).await?
            && let Some(iteration) = tracked_iteration(uri, storage).await?
        {
            let (note, tracker_problem) = (Some(iteration.note), iteration.tracker_problem);
            return Ok(Place { uri: below(uri, &iteration.folder), note, tracker_problem });
        }
    }
    Ok(at(uri.to_owned()))
}

/// An iteration of a run of Megatron-LM.
#[derive(Debug)]
pub(crate) struct Iteration {
    /// Its folder in that of the run.
    pub(crate) folder: String,
    /// Why it is this one.
    pub(crate) note: String,
    /// What is wrong with the tracker.
    pub(crate) tracker_problem: Option<String>,
}

/// The iteration that the tracker names, or the last complete one where that is not whole. `None`
/// where there is no tracker.
async fn tracked_iteration(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<Iteration>, Error> {
    let tracker = Key::new(TRACKER).map_err(StorageError::from)?;
    if !storage.contains(&tracker).await? {
        return Ok(None);
    }
    let run = MegatronRun::new(Arc::clone(storage));
    let tracked = run.tracked().await;
    let checkpoints = run.checkpoints().await?;
    let complete = || checkpoints.iter().filter(|checkpoint| checkpoint.is_complete());
    let found = |checkpoint: &RunCheckpoint, why: String, tracker_problem: Option<String>| {
        let folder = checkpoint.which.folder()?.to_string();
        let note = format!("{uri:?} is a run of Megatron-LM; opening {folder}, {why}");
        Ok(Some(Iteration { folder, note, tracker_problem }))
    };
    let problem = match &tracked {
        Ok(Some(tracked)) => {
            if let Some(named) = complete().find(|checkpoint| checkpoint.which == *tracked) {
                return found(named, "which the tracker names".to_owned(), None);
            }
            match checkpoints.iter().find(|checkpoint| checkpoint.which == *tracked) {
                Some(named) => {
                    let problem = named.entry.problem.as_deref().unwrap_or("it is not whole");
                    format!(
                        "{}, which the tracker names, is not complete: {problem}",
                        tracked.folder()?
                    )
                }
                None => {
                    let folder = tracked.folder()?;
                    // A link that leads out is not listed, but refused when it is followed.
                    let inside = Key::new(format!("{folder}/{METADATA_JSON}"));
                    storage.contains(&inside.map_err(StorageError::from)?).await?;
                    format!("{folder}, which the tracker names, does not exist")
                }
            }
        }
        Ok(None) => return Ok(None),
        Err(error) => error_chain(error),
    };
    match complete().next_back() {
        Some(last) => found(last, format!("the last complete one: {problem}"), Some(problem)),
        None => {
            let message = format!("no checkpoint of the run {uri:?} is complete: {problem}");
            Err(Error::new(ErrorKind::Unfinished, message)
                .with_hint("`dcp ls` says of every iteration what is missing"))
        }
    }
}

/// The last complete iteration, or the release, of a run without a tracker; `None` where there is
/// none.
pub(crate) async fn untracked_iteration(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<Iteration>, Error> {
    let Some(last) = MegatronRun::new(Arc::clone(storage)).latest().await? else {
        return Ok(None);
    };
    let folder = last.which.folder()?.to_string();
    let note = format!("there is no {TRACKER} in {uri:?}; opening {folder}, the last complete one");
    Ok(Some(Iteration { folder, note, tracker_problem: None }))
}

/// A folder that would be a checkpoint of Megatron-Core if its save had finished, and is read as
/// one of PyTorch.
#[derive(Clone, Debug)]
pub struct IncompleteSave {
    /// The file or object that shows whose it is.
    evidence: &'static str,
    /// What its `metadata.json` would say.
    config: CheckpointingConfig,
}

impl IncompleteSave {
    /// Inspects a folder that can be read as a checkpoint of PyTorch. Since Megatron-Core 0.19 only
    /// the index shows what it is.
    pub(crate) async fn find(
        storage: &dyn Storage,
        source: &Source,
    ) -> Result<Option<Self>, Error> {
        let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
        if contains(METADATA_JSON).await? || !contains(".metadata").await? {
            return Ok(None);
        }
        let inside = source.metadata().await?.get(COMMON_OBJECT).is_some();
        let (evidence, config) = if contains(COMMON_FILE).await? {
            ("a common.pt", CheckpointingConfig::torch_dist())
        } else if inside {
            ("a common_state", CheckpointingConfig::torch_dist_with_common_inside())
        } else if contains(INTEGRITY_FILE).await? {
            ("an integrity.json", CheckpointingConfig::torch_dist_with_common_inside())
        } else {
            return Ok(None);
        };
        Ok(Some(Self { evidence, config }))
    }

    /// What is wrong with the folder that a sentence calls `subject`.
    #[must_use]
    pub fn problem(&self, subject: &str) -> String {
        format!(
            "{subject} has {} but no {METADATA_JSON}, which Megatron-Core writes last: the save did \
             not finish, or the file was not copied",
            self.evidence
        )
    }

    /// What to say where it is read all the same.
    pub(crate) fn note(&self) -> String {
        format!("{}; this is read as a checkpoint of PyTorch", self.problem("the folder"))
    }

    /// The refusal to make something that looks whole of it, without its common state.
    pub(crate) fn refusal(&self, uri: &str) -> Error {
        let message = self.problem(&format!("{uri:?}"));
        let whole = self.config.to_json();
        Error::new(ErrorKind::Unfinished, message).with_hint(format!(
            "take another iteration; if only the file was lost, put it back: {whole}; its tensors \
             alone can be had with --to safetensors"
        ))
    }
}

/// What an unfinished save left in a folder: of which format, and what shows it.
pub(crate) async fn unfinished(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<(FolderKind, String)>, Error> {
    let mut names = FolderNames::new();
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        names.add(meta?.key.as_str());
    }
    let name = split(uri).map_or_else(String::new, |(_, name)| name);
    let own = names.verdict(&name).filter(|verdict| verdict.inner.is_none());
    if let Some(verdict) = own
        && let Some(problem) = verdict.problem
    {
        return Ok(Some((verdict.kind, problem)));
    }
    // Since Megatron-Core 0.19 only the index shows it.
    let source = Source::dcp(Arc::clone(storage), true);
    if !is_dcp(&**storage).await? || source.metadata().await.is_err() {
        return Ok(None);
    }
    let found = IncompleteSave::find(&**storage, &source).await?;
    Ok(found.map(|found| (FolderKind::Megatron, found.problem("the folder"))))
}

/// The tracker or an iteration that makes a folder that of a run of Megatron-LM.
pub(crate) async fn run_file(storage: &dyn Storage) -> Result<Option<Key>, StorageError> {
    let is_run = |key: &str| {
        let iteration = key.strip_prefix("iter_").and_then(|rest| rest.split_once('/'));
        key == TRACKER
            || iteration.is_some_and(|(number, _)| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
    };
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        if is_run(key.as_str()) {
            return Ok(Some(key));
        }
    }
    Ok(None)
}
