//! The plug-in format of Megatron-Core checkpoints.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Existing, Folder, FormatInfo,
    FormatRegistry, Occupant, OccupantRun, OpenOptions, OpenedCheckpoint, Peek, Place, Recognized,
    RunSelection, RunTracker, UnfinishedSave, WriterOptions,
};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, Storage, StorageError, StorageWriter};
use dcp_formats::dcp::{DcpFiles, DcpFormat};
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};

use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT};
use crate::disk::config::{CheckpointingConfig, METADATA_JSON};
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::recovery::{HALF_REPLACED, MAGIC as RECORD_MAGIC, RECORD, recovered};
use crate::disk::tracker::{TRACKER, Tracked};
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions};
use crate::open::examine::{
    IndexOwner, NEMO_WEIGHTS, examine_one, has_arrays, has_data, has_rank_folders, index_owner,
    is_committed, is_nemo, names_backend, owns,
};
use crate::open::legacy::folders::missing_folder;
use crate::open::select::select;
use crate::writer::MegatronWriter;

/// The name of the format.
const NAME: &str = "megatron";
/// Bytes of a tracker that are read.
const TRACKER_BYTES: u64 = 64;

/// Checkpoints of Megatron-Core of any age, and of Megatron-LM before it, in `mp_rank_*` folders.
#[derive(Clone, Copy, Debug, Default)]
pub struct MegatronCoreFormat;

/// The formats that the folder of a run of Megatron-LM may hold.
pub(crate) fn formats() -> FormatRegistry {
    dcp_jobs::listing::formats().with(Arc::new(MegatronCoreFormat))
}

/// Whether a folder is of a run of veRL or ByteCheckpoint, which have a tracker of the same name.
pub(crate) fn is_other_run(folder: &Folder<'_>) -> bool {
    let is_other = |name: &str| name.starts_with("global_step_");
    folder.folders().any(|below| is_other(below.name()))
        && !folder.folders().any(|below| Tracked::of_folder(below.name()).is_some())
}

/// Whether the `metadata.json` in a folder is Megatron-Core's, where it was read. Other programs write files of that
/// name, too; without data of Megatron-Core it describes nothing, whatever it says. One that cannot be parsed is
/// Megatron-Core's beside its files, if no other format is committed there without a common state.
fn is_ours(folder: &Folder<'_>) -> Option<bool> {
    let byte_len = folder.file(METADATA_JSON)?.byte_len;
    let json = match byte_len {
        0 => &[],
        _ => &**folder.peeked(METADATA_JSON)?,
    };
    let data = has_data(folder);
    let common = folder.has(COMMON_FILE);
    let is_damaged = || byte_len <= Peek::BYTES_MAX && data && (common || !is_committed(folder));
    Some((data || common) && names_backend(json).unwrap_or_else(is_damaged))
}

/// Whether the record of an overwrite may be in a folder: a file that is shorter, or was read and begins otherwise, is
/// none.
fn has_record(folder: &Folder<'_>) -> bool {
    let is_it = |head: &bytes::Bytes| head.starts_with(&RECORD_MAGIC);
    let is_long = |file: &ObjectMeta| file.byte_len > RECORD_MAGIC.len() as u64;
    folder.file(RECORD).is_some_and(is_long) && folder.peeked(RECORD).is_none_or(is_it)
}

/// Recognizes a checkpoint by the names of its files, with what it lacks; `None` for a folder
/// without one. Since Megatron-Core 0.19 there is no `common.pt`, and a save that did not finish
/// looks as one of PyTorch does, but for an `integrity.json`.
fn checkpoint(folder: &Folder<'_>) -> Option<Recognized> {
    let dcp = DcpFiles::of(folder);
    let has_json = folder.has(METADATA_JSON);
    // With the record, the folder is read as it was or as it will be.
    let index = has_json || has_record(folder) && dcp.is_committed();
    let (common, data) = (folder.has(COMMON_FILE), has_data(folder));
    let is_index = match is_ours(folder) {
        Some(ours) => ours,
        None => index && (common || data),
    };
    if is_index {
        let unfinished = dcp.is_any() && !dcp.is_committed() && !has_arrays(folder);
        let problem = dcp.problem().filter(|_| unfinished);
        let found = Recognized::new(Evidence::Index, "is a checkpoint of Megatron-Core");
        return Some(found.with_problem(problem));
    }
    if !has_json && (common && data || folder.has(INTEGRITY_FILE) && dcp.is_any()) {
        let problem = format!("there is no {METADATA_JSON}: the save did not finish");
        let found = Recognized::new(
            Evidence::Remains,
            format!("has files of a checkpoint of Megatron-Core but no {METADATA_JSON}"),
        );
        return Some(found.with_problem(Some(problem)));
    }
    has_rank_folders(folder).then(|| {
        let description = "is a checkpoint of Megatron-LM, by ranks in mp_rank_* folders";
        let missing = missing_folder(folder.folders().map(|below| below.name()));
        let problem = missing.map(|missing| format!("{missing} is missing"));
        Recognized::new(Evidence::Index, description).with_problem(problem)
    })
}

#[async_trait]
impl CheckpointFormat for MegatronCoreFormat {
    fn info(&self) -> FormatInfo {
        const LANDMARKS: [&str; 5] =
            [METADATA_JSON, COMMON_FILE, INTEGRITY_FILE, TRACKER, "weights/.metadata"];
        FormatInfo::new(NAME, "Megatron").with_landmarks(&LANDMARKS)
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        let named = [(METADATA_JSON, Peek::BYTES_MAX), (RECORD, RECORD_MAGIC.len() as u64)];
        let there = named.into_iter().filter(|(name, _)| folder.has(name));
        there.filter_map(|(name, len)| Some(Peek::new(folder.key(name)?, len))).collect()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if let Some(found) = checkpoint(folder) {
            return Some(found);
        }
        if is_nemo(folder) {
            let weights = folder.folder(NEMO_WEIGHTS);
            let problem = weights.and_then(|weights| checkpoint(&weights)?.problem);
            let problem = problem.map(|problem| format!("{NEMO_WEIGHTS}: {problem}"));
            let found = Recognized::new(Evidence::Index, "is a checkpoint of NeMo");
            return Some(found.with_problem(problem).with_inner(Some(NEMO_WEIGHTS.to_owned())));
        }
        let numbered = |name: &str| {
            let rest = name.strip_prefix("iter_");
            rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let has_tracker = folder.has(TRACKER) && !is_other_run(folder);
        if has_tracker || folder.folders().any(|below| numbered(below.name())) {
            return Some(Recognized::new(Evidence::Run, "is the directory of a Megatron-LM run"));
        }
        let json = folder.peeked(METADATA_JSON)?;
        (names_backend(json) == Some(true)).then(|| {
            let description = format!(
                "has the {METADATA_JSON} of Megatron-Core, and neither a .metadata nor arrays of zarr: \
                 they were removed, or never copied here"
            );
            Recognized::new(Evidence::Trace, description)
        })
    }

    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let folder = place.listing().root();
        if self.recognize(&folder).is_some_and(|found| found.inner.is_some()) {
            let weights = place.below(NEMO_WEIGHTS)?;
            let mut found = match weights.listing().root().has(METADATA_JSON) {
                true => examine_one(&weights).await?,
                false => DcpFormat.examine(&weights).await?,
            };
            found.problem = found.problem.map(|problem| format!("{NEMO_WEIGHTS}: {problem}"));
            // The folder around it is NeMo's.
            return Ok(found.with_format(None));
        }
        examine_one(place).await
    }

    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError> {
        let folder = run.listing().root();
        let Some(tracker) = folder.file(TRACKER) else { return Ok(None) };
        if is_other_run(&folder) {
            return Ok(None);
        }
        let len = tracker.byte_len.min(TRACKER_BYTES + 1);
        let text = run.storage().read_range(&tracker.key, 0..len).await?;
        let Some(tracked) = (len <= TRACKER_BYTES).then(|| Tracked::parse(&text).ok()).flatten()
        else {
            let text = String::from_utf8_lossy(&text);
            let text = Quoted(text.trim()).to_string();
            return Ok(Some(RunTracker::new(
                TRACKER,
                Err(format!("{text}, which is not an iteration")),
            )));
        };
        // The tracker is written when a save is complete, so what is beyond it is not.
        let unfinished = tracked.iteration().into_iter().flat_map(|last| {
            folder.folders().filter_map(move |below| {
                let iteration = Tracked::of_folder(below.name())?.iteration()?;
                let reason = format!("{TRACKER} is at {last}: it was not finished");
                (iteration > last).then(|| (below.name().to_owned(), reason))
            })
        });
        let tracked = tracked.folder()?.to_string();
        Ok(Some(RunTracker::new(TRACKER, Ok(tracked)).with_unfinished(unfinished.collect())))
    }

    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        select(run).await
    }

    fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        let is_foreign = is_ours(folder) == Some(false);
        if !folder.has(".metadata") || folder.has(METADATA_JSON) && !is_foreign {
            return None;
        }
        let inside = CheckpointingConfig::torch_dist_with_common_inside();
        let owner = index_owner(metadata);
        let (evidence, config) = match (folder.has(COMMON_FILE), owner) {
            // Any program may write a file of that name.
            (_, IndexOwner::PyTorch) => return None,
            (true, _) => ("a common.pt", CheckpointingConfig::torch_dist()),
            (false, _) if metadata.get(COMMON_OBJECT).is_some() => ("a common_state", inside),
            (false, _) => return None,
        };
        let lost = match (is_foreign, folder.peeked(METADATA_JSON)) {
            (true, Some(json)) if is_lfs_pointer(json) => {
                format!("its {METADATA_JSON} {LFS_PROBLEM}")
            }
            (true, _) => format!(
                "its {METADATA_JSON} cannot be read as Megatron-Core's: the file was damaged, or replaced"
            ),
            (false, _) => format!(
                "no {METADATA_JSON}, which Megatron-Core writes last: the save did not finish, or \
                 the file was not copied"
            ),
        };
        let description = format!("has {evidence} but {lost}");
        let remedy = format!(
            "take another iteration; if only the file was lost, put it back: {}; its tensors alone \
             can be had with `Destination::to` safetensors",
            config.to_json()
        );
        let found = UnfinishedSave::new(METADATA_JSON, description, remedy);
        Some(found.with_certain(owner == IndexOwner::MegatronCore))
    }

    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        owns(folder, name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        if let Some(file) = run_file(folder) {
            const FOLDERS: &[&str] = &["release", "iter_0000001"];
            const RUN: &str = "the folder of a run of Megatron-LM";
            return Some(Occupant::Run(OccupantRun::new(RUN, file, FOLDERS)));
        }
        let found = self.recognize(folder).filter(Recognized::is_checkpoint)?;
        Some(match (found.inner, found.evidence, found.problem) {
            (Some(inner), ..) => Occupant::Checkpoint(format!("it has a checkpoint in {inner}")),
            (None, Evidence::Remains, Some(problem)) => Occupant::Unfinished(problem),
            (None, ..) => Occupant::Checkpoint("it is one of Megatron-Core".to_owned()),
        })
    }

    fn target(&self) -> Option<&dyn CheckpointTarget> {
        Some(self)
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let how = MegatronOpenOptions::default().with_tolerant(options.tolerant);
        let opened = MegatronCheckpoint::open_folder(place.storage(), &how).await?;
        let is_recovered = !Arc::ptr_eq(&recovered(place.storage()).await?, place.storage());
        let notes = is_recovered.then(|| HALF_REPLACED.to_owned()).into_iter();
        let notes: Vec<_> =
            notes.chain(opened.damage().iter().chain(opened.warnings()).cloned()).collect();
        let source = Arc::new(opened.source().clone());
        Ok(OpenedCheckpoint::new(Arc::clone(opened.storage()), Arc::clone(&source.reader))
            .with_notes(notes)
            .with_extension(source)
            .with_extension(Arc::new(opened)))
    }
}

/// The tracker of a run, or the folder of an iteration: readers open an iteration instead of a
/// checkpoint in the folder itself.
fn run_file(folder: &Folder<'_>) -> Option<String> {
    if folder.has(TRACKER) && !is_other_run(folder) {
        return Some(TRACKER.to_owned());
    }
    let iteration = |name: &str| Tracked::of_folder(name)?.iteration();
    let found = folder.folders().find(|below| iteration(below.name()).is_some())?;
    Some(found.path().to_owned())
}

impl CheckpointTarget for MegatronCoreFormat {
    fn parts(&self) -> &'static [&'static str] {
        const PARTS: &[&str] = &[NAME, "dcp"];
        PARTS
    }

    fn existing(&self, folder: &Folder<'_>, metadata: Option<&CheckpointMetadata>) -> Existing {
        let files = DcpFiles::of(folder);
        let found = checkpoint(folder);
        let is_ours = found.as_ref().is_some_and(|found| found.evidence == Evidence::Index);
        let is_unfinished = || {
            let by_index = metadata.and_then(|metadata| self.unfinished(folder, metadata));
            by_index.is_some() || files.problem().is_some()
        };
        match (is_ours, files.is_committed()) {
            (true, true) => Existing::Checkpoint,
            (true, false) => Existing::Other("it is one of an older Megatron-Core".to_owned()),
            (false, true) if !is_unfinished() => {
                Existing::Other("it is one of PyTorch's format".to_owned())
            }
            (false, _) if found.is_some() || files.is_any() => Existing::Remains,
            (false, _) => Existing::Nothing,
        }
    }

    fn compresses(&self) -> bool {
        true
    }

    /// The writer of a checkpoint with an empty common state; [`to_torch_dist`] fills it.
    ///
    /// [`to_torch_dist`]: crate::jobs::to_torch_dist
    fn writer(
        &self,
        storage: Arc<dyn Storage>,
        options: &WriterOptions,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError> {
        // A conversion has no memory to lend: two parts of each file are in flight.
        let writer = MegatronWriter::builder(storage).overwrite(options.overwrite).upload_bytes(0);
        Ok(Arc::new(writer.compression(options.compression.clone())?.build()))
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Key;
    use dcp_core::format::Listing;
    use dcp_core::storage::ObjectMeta;

    use super::*;

    #[test]
    fn a_checkpoint_of_megatron_is_committed_by_its_metadata_json() {
        let found = |names: &[&str]| {
            let key = |name: &&str| Key::new(format!("iter_0000010/{name}")).unwrap();
            let listing = Listing::new(names.iter().map(|name| ObjectMeta::new(key(name), 1)));
            let found = formats().classify(&listing.root().folder("iter_0000010")?)?;
            Some((found.format.info().name, found.found.problem.is_none()))
        };
        let data = ["__0_0.distcp", ".metadata"];
        let with = |more: &[&'static str]| [&data, more].concat();
        let megatron = |whole| Some(("megatron", whole));
        assert_eq!(found(&with(&["common.pt", "metadata.json"])), megatron(true));
        assert_eq!(found(&with(&["metadata.json"])), megatron(true));
        assert_eq!(found(&with(&["common.pt"])), megatron(false));
        assert_eq!(found(&with(&["integrity.json"])), megatron(false));
        assert_eq!(found(&["common.pt", "metadata.json", "__0_0.distcp"]), megatron(false));
        assert_eq!(found(&["common.pt", "metadata.json", "w/.zarray"]), megatron(true));
        assert_eq!(found(&["common.pt", "w/.zarray", "w/0"]), megatron(false));
        assert_eq!(found(&["mp_rank_00_000/model_optim_rng.pt"]), megatron(true));
        assert_eq!(found(&["mp_rank_00/model_optim_rng.pt"]), megatron(true));
        assert_eq!(found(&data), Some(("dcp", true)));
    }
}
