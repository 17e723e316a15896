//! What a folder is, by the names in it: whose checkpoint, which of a run, whether its save
//! finished.

use std::sync::Arc;

use dcp_convert::Source;
use dcp_core::format::{CheckpointFormat, Folder, FolderMatch, FormatInfo, FormatRegistry, Place};
use dcp_core::{Key, Storage, StorageError, StorageExt, error_chain};
use dcp_formats::hf::INDEX_ENDING;
use dcp_megatron::disk::{
    COMMON_FILE, COMMON_OBJECT, CheckpointingConfig, INTEGRITY_FILE, METADATA_JSON, TRACKER,
};
use dcp_megatron::{MegatronRun, RunCheckpoint};

use crate::error::{Error, ErrorKind};

/// Whether a folder is a checkpoint of PyTorch's format.
pub(crate) fn is_dcp(folder: &Folder<'_>) -> bool {
    folder.has(".metadata") || folder.has("__0.metadata")
}

/// A file that makes a folder a Hugging Face model, whatever else is there: an index, or one under
/// a name that loaders look for. Other safetensors files may be in any folder.
pub(crate) fn model_file<'a>(folder: &Folder<'a>) -> Option<&'a str> {
    let mut files = folder.files().map(|(name, _)| name);
    files.find(|name| {
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        is_weights || name.ends_with(INDEX_ENDING)
    })
}

/// The format that opens a folder, if that is one of this name, and what it says of the folder.
pub(crate) fn checkpoint_of(
    formats: &FormatRegistry,
    folder: &Folder<'_>,
    format: &str,
) -> Option<FolderMatch> {
    let mut found = formats.recognize(folder).into_iter();
    found.find(|one| one.format.info().name == format && one.found.is_checkpoint())
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
pub(crate) async fn tracked_iteration(
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

/// What an unfinished save left in a folder: the name and title of its format, and what shows it.
pub(crate) async fn unfinished(
    formats: &FormatRegistry,
    place: &Place,
) -> Result<Option<(FormatInfo, String)>, Error> {
    let folder = place.listing().root();
    let own = formats.classify(&folder).filter(|own| own.found.inner.is_none());
    if let Some(FolderMatch { format, found, .. }) = own
        && let Some(problem) = found.problem
    {
        return Ok(Some((format.info(), problem)));
    }
    // Since Megatron-Core 0.19 only the index shows it.
    let source = Source::dcp(Arc::clone(place.storage()), true);
    if !is_dcp(&folder) || source.metadata().await.is_err() {
        return Ok(None);
    }
    let found = IncompleteSave::find(&**place.storage(), &source).await?;
    let info = dcp_megatron::MegatronCoreFormat.info();
    Ok(found.map(|found| (info, found.problem("the folder"))))
}

/// The tracker or an iteration that makes a folder that of a run of Megatron-LM.
pub(crate) fn run_file(folder: &Folder<'_>) -> Option<String> {
    if folder.has(TRACKER) {
        return Some(TRACKER.to_owned());
    }
    let is_iteration = |name: &str| {
        let number = name.strip_prefix("iter_");
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let iteration = folder.folders().find(|below| is_iteration(below.name()))?;
    Some(iteration.path().to_owned())
}
