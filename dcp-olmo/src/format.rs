//! Checkpoints of OLMo-core as a format that plugs in.

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, FormatRegistry,
    Occupant, OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, StorageError};
use dcp_formats::dcp::{DcpFiles, DcpFormat};
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};
use dcp_jobs::listing::list_run;
use dcp_jobs::run::StepNaming;
use serde::Deserialize;

/// The folder of a step that contains the DCP checkpoint.
pub(crate) const MODEL_FOLDER: &str = "model_and_optim";
/// The file that is written last.
pub(crate) const COMMIT: &str = ".metadata.json";
/// The trainer's state of rank 0.
pub(crate) const TRAIN: &str = "train/rank0.pt";

/// Steps of OLMo-core runs: `train/`, `model_and_optim/`, `.metadata.json`.
#[derive(Clone, Copy, Debug, Default)]
pub struct OlmoFormat;

/// The formats in the folders of an OLMo-core run.
pub(crate) fn formats() -> FormatRegistry {
    dcp_jobs::listing::formats().with(std::sync::Arc::new(OlmoFormat))
}

/// The rule of OLMo-core's (3.0) `dir_is_checkpoint`, which requires all three files and reads
/// none.
fn problem(folder: &Folder<'_>, model: Option<&DcpFiles>) -> Option<String> {
    let committed = folder.has(COMMIT);
    if !model.is_some_and(|model| model.metadata) {
        let mut problem = format!("there is no {MODEL_FOLDER}/.metadata: the save did not finish");
        if committed {
            // An asynchronous save writes it in any case, even after a failure.
            problem.push_str(&format!(", although there is a {COMMIT}"));
        }
        return Some(problem);
    }
    if !folder.has(TRAIN) {
        return Some(format!("there is no {TRAIN}"));
    }
    if !committed {
        return Some(format!("there is no {COMMIT}: not committed, or being removed"));
    }
    let is_temporary = folder.name().ends_with("-tmp");
    is_temporary.then(|| "it was never renamed to its final name".to_owned())
}

#[async_trait]
impl CheckpointFormat for OlmoFormat {
    fn info(&self) -> FormatInfo {
        const LANDMARKS: [&str; 3] = ["model_and_optim/.metadata", COMMIT, TRAIN];
        FormatInfo::new("olmo", "OLMo step").with_landmarks(&LANDMARKS)
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        let model = folder.folder(MODEL_FOLDER).map(|model| DcpFiles::of(&model));
        let model = model.filter(DcpFiles::is_any);
        let is_step = folder.has(COMMIT) && olmo_step(folder.name()).is_some();
        if model.is_some() || is_step {
            let problem = problem(folder, model.as_ref());
            let inner = model.filter(DcpFiles::is_committed).map(|_| MODEL_FOLDER.to_owned());
            // A folder that is a checkpoint itself is opened as that. An index without a data file is none, beside a
            // step that has all it needs.
            let own = DcpFiles::of(folder);
            let is_checkpoint = own.metadata && (own.data || problem.is_some());
            let evidence = match (is_checkpoint, &inner) {
                (false, Some(_)) => Evidence::Index,
                (false, None) => Evidence::Remains,
                (true, _) => Evidence::Files,
            };
            let found = Recognized::new(evidence, "is a directory of OLMo-core");
            return Some(found.with_problem(problem).with_inner(inner));
        }
        let numbered = |name: &str| {
            let rest = name.strip_prefix("step");
            rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let is_run = folder.folders().any(|below| numbered(below.name()));
        is_run.then(|| Recognized::new(Evidence::Run, "is a directory of OLMo-core"))
    }

    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let folder = place.listing().root();
        let model = folder.folder(MODEL_FOLDER).map(|model| DcpFiles::of(&model));
        if let Some(problem) = problem(&folder, model.as_ref()) {
            return Ok(Examined::new(Some(problem)));
        }
        let mut found = DcpFormat.examine(&place.below(MODEL_FOLDER)?).await?;
        let commit = folder.file(COMMIT);
        if let Some(commit) = commit.filter(|commit| commit.byte_len <= OlmoNote::BYTES_MAX) {
            let json = place.storage().read_range(&commit.key, 0..commit.byte_len).await?;
            match OlmoNote::parse(&json) {
                Ok(note) => {
                    found = found.with_ephemeral(Some(note.ephemeral)).with_version(note.version);
                }
                Err(_) if found.problem.is_some() => {}
                Err(_) if is_lfs_pointer(&json) => {
                    found.problem = Some(format!("the {COMMIT} {LFS_PROBLEM}"));
                }
                Err(error) => {
                    found.problem =
                        Some(format!("the {COMMIT} cannot be read: {}", error.problem()));
                }
            }
        }
        Ok(found)
    }

    async fn tracker(&self, _run: &Place) -> Result<Option<RunTracker>, StorageError> {
        Ok(None)
    }

    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        const RUN: &str = "is a run of OLMo-core";
        let folder = run.listing().root();
        if !folder.folders().any(|below| olmo_step(below.name()).is_some()) {
            return Ok(None);
        }
        let entries = list_run(run.storage(), &formats()).await?.entries;
        let steps = entries.iter().filter(|entry| entry.kind.format() == self.info().name);
        let steps = steps.filter_map(|entry| Some((olmo_step(&entry.name)?, entry)));
        let steps: Vec<_> = steps.collect();
        let complete = steps.iter().filter(|(_, entry)| entry.is_complete());
        let last = complete.max_by_key(|(step, _)| *step);
        if let Some((_, entry)) = last {
            let folder = Ok(entry.name.clone());
            return Ok(Some(RunSelection::new(RUN, folder, "the last complete one")));
        }
        Ok(steps.iter().max_by_key(|(step, _)| *step).map(|(_, entry)| {
            let problem = entry.problem.as_deref().unwrap_or("it is not whole");
            RunSelection::new(RUN, Err(format!("{}: {problem}", entry.name)), "")
        }))
    }

    /// Without the commit, the save of a step did not finish, whatever its model has.
    fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        // What another format has opened is none of the trainer's.
        let format = metadata.provenance().format.as_deref();
        if format.is_some_and(|format| format != "torch_dcp") {
            return None;
        }
        // A folder of the user may have the name.
        folder.folder(MODEL_FOLDER).map(|model| DcpFiles::of(&model)).filter(DcpFiles::is_any)?;
        // A checkpoint in the folder itself is whole without it.
        if DcpFiles::of(folder).is_committed() {
            return None;
        }
        let is_finished = folder.has(COMMIT) && !folder.name().ends_with("-tmp");
        let description = format!("has a {MODEL_FOLDER} and is not committed by a {COMMIT}");
        let remedy = format!("take another step; {MODEL_FOLDER} is read by its own path");
        (!is_finished).then(|| UnfinishedSave::new(COMMIT, description, remedy))
    }

    fn owns(&self, _folder: &Folder<'_>, name: &str) -> bool {
        let train = TRAIN.split('/').next();
        name == MODEL_FOLDER || name == COMMIT || Some(name) == train
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        let found = self.recognize(folder).filter(Recognized::is_checkpoint)?;
        match found.inner {
            Some(inner) => Some(Occupant::Checkpoint(format!("it has a checkpoint in {inner}"))),
            None => found.problem.map(Occupant::Unfinished),
        }
    }

    /// A step consists of a checkpoint of PyTorch's format and of files that only the trainer
    /// writes.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        DcpFormat.open(place, options).await
    }
}

/// The step number in a folder name that OLMo-core (3.0) recognizes, `step{N}`.
#[must_use]
pub fn olmo_step(name: &str) -> Option<u64> {
    match StepNaming::parse(name) {
        Some((StepNaming::Plain, step)) => Some(step),
        _ => None,
    }
}

/// The contents of a checkpoint's `.metadata.json` (OLMo-core 3.0).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct OlmoNote {
    /// Whether the trainer may remove it when a later one exists.
    #[serde(default)]
    pub ephemeral: bool,
    /// The version of OLMo-core that wrote it.
    #[serde(default)]
    pub version: Option<String>,
}

impl OlmoNote {
    /// The maximum size of such a file in bytes; longer ones are not read.
    pub const BYTES_MAX: u64 = 64 << 10;

    /// Parses a `.metadata.json`.
    ///
    /// # Errors
    ///
    /// When it is not a JSON object of this form.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::new(COMMIT, problem);
        // Deserialized from an array, the fields would be its first items.
        let start = json.iter().find(|byte| !byte.is_ascii_whitespace());
        if start.is_some_and(|byte| *byte != b'{') {
            return Err(bad("it is no JSON object".to_owned()));
        }
        serde_json::from_slice(json).map_err(|error| bad(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Key;
    use dcp_core::format::{FolderMatch, Listing};
    use dcp_core::storage::ObjectMeta;

    use super::*;

    /// Classifies the folder `folder` with these files.
    fn found(folder: &str, names: &[&str]) -> Option<FolderMatch> {
        let key = |name: &&str| Key::new(format!("{folder}/{name}")).unwrap();
        let listing = Listing::new(names.iter().map(|name| ObjectMeta::new(key(name), 1)));
        formats().classify(&listing.root().folder(folder)?)
    }

    fn problem(folder: &str, names: &[&str]) -> String {
        found(folder, names).unwrap().found.problem.unwrap()
    }

    const OLMO: [&str; 5] = [
        ".metadata.json",
        "config.json",
        "model_and_optim/.metadata",
        "model_and_optim/__0_0.distcp",
        "train/rank0.pt",
    ];

    #[test]
    fn olmo_steps_need_all_three() {
        let whole = |names: &[&str]| {
            let found = found("step10", names).unwrap();
            assert_eq!(found.format.info().name, "olmo");
            assert_eq!(found.found.inner.as_deref(), Some("model_and_optim"));
            found.found.problem.is_none()
        };
        assert!(whole(&OLMO));
        for (without, said) in [
            ("model_and_optim/.metadata", "although there is a .metadata.json"),
            ("train/rank0.pt", "no train/rank0.pt"),
            (".metadata.json", "not committed"),
        ] {
            let rest: Vec<_> = OLMO.into_iter().filter(|name| *name != without).collect();
            assert!(problem("step10", &rest).contains(said), "{without}");
        }
        // A configuration is written after the commit, and so is no part of it.
        let rest: Vec<_> = OLMO.into_iter().filter(|name| *name != "config.json").collect();
        assert!(whole(&rest));
        assert!(problem("step10-tmp", &OLMO).contains("never renamed"));
        assert!(problem("step10", &[".metadata.json"]).contains("although"));
        assert!(found("logs", &[".metadata.json"]).is_none());
    }

    #[test]
    fn notes_are_read() {
        let json = include_bytes!("../../fixtures/olmo/trainer/step3/.metadata.json");
        let note = OlmoNote::parse(json).unwrap();
        assert_eq!((note.ephemeral, note.version.as_deref()), (true, Some("3.0.0")));
        assert_eq!(OlmoNote::parse(b"{}").unwrap(), OlmoNote::default());
        assert!(OlmoNote::parse(b"[1]").is_err());
        assert!(OlmoNote::parse(&[b'['; 60_000]).is_err());
    }

    #[test]
    fn steps_are_plain_numbers() {
        for (name, step) in [
            ("step0", Some(0)),
            ("step007", Some(7)),
            ("step", None),
            ("step+1", None),
            ("step1-unsharded", None),
            ("astep1", None),
            ("step99999999999999999999", None),
        ] {
            assert_eq!(olmo_step(name), step, "{name}");
        }
    }
}
