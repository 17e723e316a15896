//! Folders of DeepSpeed as a format that plugs in.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, FormatRegistry,
    Occupant, OccupantRun, OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection,
    RunTracker, UnfinishedSave, natural,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, StorageError};
use dcp_jobs::listing::list_run;

use crate::checkpoint::{DeepSpeedCheckpoint, NAME};
use crate::file_name::{LATEST, LATEST_UNIVERSAL, UNIVERSAL};
use crate::file_set::FileSet;

/// Bytes of a tracker that are read.
const TRACKER_BYTES: u64 = 512;
/// Files that transformers' trainer writes around the folder of DeepSpeed.
const TRAINER: [&str; 4] =
    ["trainer_state.json", "training_args.bin", "config.json", "scheduler.pt"];

/// Folders of DeepSpeed: a step with the files of its ranks, a universal folder, and the runs of these.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeepSpeedFormat;

/// The formats that the folder of a run may hold.
fn formats() -> FormatRegistry {
    dcp_jobs::listing::formats().with(Arc::new(DeepSpeedFormat))
}

/// Whether the files of a folder are of DeepSpeed.
fn is_checkpoint(folder: &Folder<'_>) -> bool {
    let is_ours = |(name, _): (&str, _)| FileSet::has(name);
    folder.files().any(is_ours) && FileSet::of(folder).is_any()
}

/// The folders of steps in a folder that has a tracker.
fn steps<'a>(folder: &Folder<'a>) -> Vec<&'a str> {
    if !folder.has(LATEST) && !folder.has(LATEST_UNIVERSAL) {
        return Vec::new();
    }
    folder.folders().filter(is_checkpoint).map(|below| below.name()).collect()
}

/// The tracker of a run.
fn tracker_of(folder: &Folder<'_>) -> &'static str {
    if folder.has(LATEST) { LATEST } else { LATEST_UNIVERSAL }
}

/// Reads the name in a tracker.
async fn tracked(run: &Place) -> Result<Option<Result<String, String>>, StorageError> {
    let folder = run.listing().root();
    let Some(file) = folder.file(tracker_of(&folder)) else { return Ok(None) };
    let len = file.byte_len.min(TRACKER_BYTES + 1);
    let text = run.storage().read_range(&file.key, 0..len).await?;
    let text = String::from_utf8_lossy(&text);
    let name = text.trim();
    let is_name = len <= TRACKER_BYTES
        && !name.is_empty()
        && !name.contains(['/', '\\'])
        && !name.chars().any(char::is_control)
        && !matches!(name, "." | "..");
    Ok(Some(match is_name {
        true => Ok(name.to_owned()),
        false => Err(format!("{}, which is not the name of a folder", Quoted(name))),
    }))
}

#[async_trait]
impl CheckpointFormat for DeepSpeedFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new(NAME, "DeepSpeed").with_landmarks(&[
            LATEST,
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        ])
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if is_checkpoint(folder) {
            let files = FileSet::of(folder);
            let description = match files.universal {
                true => "is a universal checkpoint of DeepSpeed",
                false => "is a checkpoint of DeepSpeed",
            };
            let found = Recognized::new(Evidence::Index, description);
            return Some(found.with_problem(files.problem()));
        }
        let steps = steps(folder);
        let first = steps.first()?;
        // The files around the one step are of the same checkpoint: the model in 16 bits, the state of the trainer.
        if steps.len() == 1 && TRAINER.iter().any(|name| folder.has(name)) {
            let step = folder.folder(first)?;
            let problem = FileSet::of(&step).problem();
            let found =
                Recognized::new(Evidence::Index, "is a checkpoint of transformers with DeepSpeed");
            let problem = problem.map(|problem| format!("{first}: {problem}"));
            return Some(found.with_problem(problem).with_inner(Some((*first).to_owned())));
        }
        Some(Recognized::new(Evidence::Run, "is the directory of a DeepSpeed run"))
    }

    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    /// Opens it: what the files say together is as much a part of the set as their names.
    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let folder = place.listing().root();
        if let Some(inner) = self.recognize(&folder).and_then(|found| found.inner) {
            let mut found = self.examine(&place.below(&inner)?).await?;
            found.problem = found.problem.map(|problem| format!("{inner}: {problem}"));
            found.compared = found
                .compared
                .iter()
                .filter_map(|key| dcp_core::Key::new(format!("{inner}/{key}")).ok())
                .collect();
            return Ok(found);
        }
        if place.has_known_files() {
            return Ok(Examined::default());
        }
        match DeepSpeedCheckpoint::open(place.storage(), &folder).await {
            Ok(opened) => {
                let mut found = Examined::default().with_compared(opened.files());
                found.version = opened.description().written_by;
                Ok(found)
            }
            Err(CheckpointError::Storage(error)) => Err(error),
            Err(error) => Ok(Examined::new(Some(error_chain(&error)))),
        }
    }

    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError> {
        let folder = run.listing().root();
        if self.recognize(&folder).is_none_or(|found| found.evidence != Evidence::Run) {
            return Ok(None);
        }
        let tracked = tracked(run).await?;
        Ok(tracked.map(|tracked| RunTracker::new(tracker_of(&folder), tracked)))
    }

    /// Selects the step that the tracker names where that is complete, which the tracker itself does not say, or else
    /// the last one that is.
    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        const RUN: &str = "is a run of DeepSpeed";
        let folder = run.listing().root();
        if self.recognize(&folder).is_none_or(|found| found.evidence != Evidence::Run) {
            return Ok(None);
        }
        let steps = steps(&folder);
        let file = tracker_of(&folder);
        let Some(tracked) = tracked(run).await? else { return Ok(None) };
        let mut entries = list_run(run.storage(), &formats()).await?.entries;
        entries.retain(|entry| steps.contains(&&*entry.name));
        entries.sort_by_cached_key(|entry| (entry.step, natural(&entry.name)));
        let problem = match tracked {
            Err(problem) => format!("{file} says {problem}"),
            Ok(name) => match entries.iter().find(|entry| entry.name == name) {
                Some(entry) if entry.is_complete() => {
                    let found = RunSelection::new(RUN, Ok(name), format!("which {file} names"));
                    return Ok(Some(found.with_tracker(file, None)));
                }
                Some(entry) => {
                    let problem = entry.problem.as_deref().unwrap_or("it is not whole");
                    format!("{name}, which {file} names, is not complete: {problem}")
                }
                None => format!("{}, which {file} names, does not exist", Quoted(&name)),
            },
        };
        let complete = entries.iter().rev().find(|entry| entry.is_complete());
        Ok(Some(match complete {
            Some(last) => {
                let reason = format!("the last complete one: {problem}");
                let found = RunSelection::new(RUN, Ok(last.name.clone()), reason);
                found.with_tracker(file, Some(problem))
            }
            None => RunSelection::new(RUN, Err(problem), "").with_tracker(file, None),
        }))
    }

    fn unfinished(
        &self,
        _folder: &Folder<'_>,
        _metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        None
    }

    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        let is_universal = name == UNIVERSAL && is_checkpoint(folder);
        FileSet::has(name) || is_universal || name == LATEST || steps(folder).contains(&name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        if is_checkpoint(folder) {
            return Some(Occupant::Checkpoint("it is one of DeepSpeed".to_owned()));
        }
        let steps = steps(folder);
        steps.first()?;
        const FOLDERS: &[&str] = &["global_step1"];
        const RUN: &str = "the folder of a run of DeepSpeed";
        Some(Occupant::Run(OccupantRun::new(RUN, tracker_of(folder).to_owned(), FOLDERS)))
    }

    /// DeepSpeed writes them.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    async fn open(
        &self,
        place: &Place,
        _options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let opened = DeepSpeedCheckpoint::open(place.storage(), &place.listing().root()).await?;
        let source = Arc::new(opened.source().clone());
        let notes = opened.notes().to_vec();
        let found = OpenedCheckpoint::new(Arc::clone(place.storage()), Arc::clone(&source.reader));
        Ok(found.with_notes(notes).with_extension(source).with_extension(Arc::new(opened)))
    }
}
