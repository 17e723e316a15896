//! Folders with a file for each rank as a format that plugs in.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker, Subfolder,
    UnfinishedSave,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError};
use dcp_formats::find_incomplete_files_where;
use dcp_formats::incomplete_files::describe;
use dcp_jobs::framework::ModelFolder;

use crate::checkpoint::{NAME, open_folder};
use crate::folder::{
    MODEL_FOLDER, RankFolder, STEP, WORLD_FILE, WORLD_FILE_MAX, roles_in, step_of,
};
use crate::names::{Program, RankName};

/// The tracker of a run of verl. Megatron-LM and ByteCheckpoint have one of the same name.
const TRACKER: &str = "latest_checkpointed_iteration.txt";
/// The most bytes of it that are read.
const TRACKER_MAX: u64 = 64;
/// Bytes at the beginning of a file that show whether it has tensors of several ranks.
const HEAD: u64 = Peek::BYTES_MAX;

/// Folders in which each rank saved a `torch.save` file of its own: verl, SkyRL, accelerate, torch's `_experimental`.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankFilesFormat;

/// The files of ranks in a folder. Names such as `checkpoint_0.pt` are those of many programs: without tensors of
/// several ranks at its beginning such a file is none of these.
fn found_in(folder: &Folder<'_>) -> Option<RankFolder> {
    let found = RankFolder::find(folder)?;
    if found.program != Program::Torch {
        return Some(found);
    }
    let has = |head: &[u8], name: &str| head.windows(name.len()).any(|at| at == name.as_bytes());
    let is_it = match found.files().next().and_then(|name| folder.peeked(name)) {
        Some(head) => has(head, "DTensor") || has(head, "ShardedTensor"),
        // Where no file was read, an examination does it.
        None => found.world > 1 && found.problem.is_none(),
    };
    is_it.then_some(found)
}

/// The files of ranks in the folder of a place, by the world size that its configuration has.
async fn read_folder(place: &Place) -> Result<Option<RankFolder>, StorageError> {
    let root = place.listing().root();
    let config = match root.file(WORLD_FILE) {
        Some(file) => {
            let len = file.byte_len.min(WORLD_FILE_MAX);
            Some(place.storage().read_range(&file.key, 0..len).await?)
        }
        None => None,
    };
    Ok(RankFolder::with_config(&root, config.as_deref()))
}

/// Whether a folder is a step with rank files in it or in the folder of a role.
fn is_step(folder: &Folder<'_>) -> bool {
    let is_rank = |(name, _): (&str, _)| matches!(RankName::parse(name), Some(Ok(_)));
    step_of(folder.name()).is_some()
        && (folder.files().any(is_rank) || !roles_in(folder).is_empty())
}

#[async_trait]
impl CheckpointFormat for RankFilesFormat {
    fn info(&self) -> FormatInfo {
        const LANDMARKS: [&str; 2] = [WORLD_FILE, TRACKER];
        FormatInfo::new(NAME, "rank files").with_landmarks(&LANDMARKS)
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        let mut peeks = Vec::new();
        let roles = roles_in(folder).into_iter().filter_map(|role| folder.folder(&role));
        for at in std::iter::once(*folder).chain(roles) {
            if let Some(key) = at.has(WORLD_FILE).then(|| at.key(WORLD_FILE)).flatten() {
                peeks.push(Peek::new(key, WORLD_FILE_MAX));
            }
        }
        let found = RankFolder::find(folder).filter(|found| found.program == Program::Torch);
        let first = found.as_ref().and_then(|found| folder.key(found.files().next()?));
        peeks.extend(first.map(|key| Peek::new(key, HEAD)));
        peeks
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if let Some(found) = found_in(folder) {
            let title = found.program.title();
            let description = format!("has a file of each rank, as {title} writes them");
            return Some(Recognized::new(Evidence::Index, description).with_problem(found.problem));
        }
        let roles = roles_in(folder);
        if let Some(first) = roles.first() {
            let problem = roles.iter().find_map(|role| {
                let below = found_in(&folder.folder(role)?)?;
                Some(format!("{role}: {}", below.problem?))
            });
            let found = Recognized::new(Evidence::Index, "is a step of verl");
            return Some(found.with_problem(problem).with_inner(Some(first.clone())));
        }
        folder
            .folders()
            .any(|below| is_step(&below))
            .then(|| Recognized::new(Evidence::Run, "is the directory of a run of verl"))
    }

    /// A file of one rank is a `torch.save` file on its own.
    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let root = place.listing().root();
        if found_in(&root).is_none() {
            // A step is whole when each of its roles is.
            let mut whole = Examined::default();
            for role in roles_in(&root) {
                whole = self.examine(&place.below(&role)?).await?;
                whole.problem = whole.problem.map(|problem| format!("{role}: {problem}"));
                if whole.problem.is_some() || whole.unsupported.is_some() {
                    break;
                }
            }
            return Ok(whole);
        }
        if place.has_known_files() {
            return Ok(Examined::default());
        }
        let Some(found) = read_folder(place).await? else { return Ok(Examined::default()) };
        if found.problem.is_some() {
            return Ok(Examined::new(found.problem));
        }
        let is_ours = |key: &Key| found.files().any(|name| key.as_str() == name);
        let incomplete = find_incomplete_files_where(place, is_ours).await?;
        if let Some(problem) = describe(&incomplete) {
            return Ok(Examined::new(Some(problem)));
        }
        match open_folder(place.storage(), found).await {
            Ok(opened) if opened.is_of_ranks_alone() => {
                Ok(Examined::default().with_all_compared(true))
            }
            Ok(_) => Ok(Examined::of_other_program(
                "holds numbered files of torch.save without a tensor of several ranks",
            )),
            Err(CheckpointError::Storage(error)) => Err(error),
            Err(error) => Ok(Examined::new(Some(error_chain(&error)))),
        }
    }

    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError> {
        let folder = run.listing().root();
        let Some(file) = folder.file(TRACKER) else { return Ok(None) };
        if !folder.folders().any(|below| is_step(&below)) {
            return Ok(None);
        }
        let len = file.byte_len.min(TRACKER_MAX);
        let text = run.storage().read_range(&file.key, 0..len).await?;
        let text = String::from_utf8_lossy(&text);
        let text = text.trim();
        let Some(last) = text.parse::<u64>().ok() else {
            let problem = format!("{}, which is not a step", Quoted(text));
            return Ok(Some(RunTracker::new(TRACKER, Err(problem))));
        };
        // verl writes it when a save is complete.
        let unfinished = folder.folders().filter_map(|below| {
            let step = step_of(below.name())?;
            let reason = format!("{TRACKER} is at {last}: it was not finished");
            (step > last).then(|| (below.name().to_owned(), reason))
        });
        let tracker = RunTracker::new(TRACKER, Ok(format!("{STEP}{last}")));
        Ok(Some(tracker.with_unfinished(unfinished.collect())))
    }

    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        const RUN: &str = "is a run of verl";
        let folder = run.listing().root();
        let steps: Vec<_> = folder.folders().filter(is_step).collect();
        let Some(last) = steps.iter().max_by_key(|below| step_of(below.name())) else {
            return Ok(None);
        };
        let Some(tracker) = self.tracker(run).await? else {
            let reason = format!("the last one: there is no {TRACKER}");
            return Ok(Some(RunSelection::new(RUN, Ok(last.name().to_owned()), reason)));
        };
        let named = tracker.folder.and_then(|named| {
            let is_there = steps.iter().any(|below| below.name() == named);
            let problem = format!("{named}, which the tracker names, does not exist");
            if is_there { Ok(named) } else { Err(problem) }
        });
        let selection = RunSelection::new(RUN, named, "which the tracker names");
        Ok(Some(selection.with_tracker(TRACKER, None)))
    }

    fn unfinished(
        &self,
        _folder: &Folder<'_>,
        _metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        None
    }

    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        let found = found_in(folder);
        found.is_some_and(|found| name == WORLD_FILE || found.files().any(|file| file == name))
            || roles_in(folder).iter().any(|role| role == name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        let found = self.recognize(folder).filter(Recognized::is_checkpoint)?;
        Some(Occupant::Checkpoint(format!("it {}", found.description)))
    }

    /// The programs write them.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    async fn open(
        &self,
        place: &Place,
        _options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let root = place.listing().root();
        let found = read_folder(place).await?.ok_or_else(|| CheckpointError::NotACheckpoint {
            message: "there is no file of a rank in the folder".to_owned(),
        })?;
        let storage = place.storage();
        let opened = open_folder(storage, found).await?;
        let source = opened.source().clone();
        let model = match root.folder(MODEL_FOLDER) {
            Some(_) => {
                let folder = Key::new(MODEL_FOLDER).map_err(StorageError::from)?;
                Some(Subfolder::new(Arc::clone(storage), folder))
            }
            None => None,
        };
        let result = OpenedCheckpoint::new(Arc::clone(&source.storage), Arc::clone(&source.reader))
            .with_notes(opened.notes().iter().cloned())
            .with_extension(Arc::new(opened));
        Ok(match model {
            Some(model) => result.with_extension(Arc::new(ModelFolder::new(Arc::new(model)))),
            None => result,
        })
    }
}
