//! Examination of a checkpoint of Megatron-Core: its index and its common state against its files.

use dcp_core::error::error_chain;
use dcp_core::format::{CheckpointFormat as _, Examined, Folder, Peek, Place};
use dcp_core::path::StatePath;
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError};
use dcp_formats::dcp::{DcpFiles, DcpFormat, EXAMINED_INDEX_MAX};
use dcp_formats::find_incomplete_files_where;
use dcp_formats::incomplete_files::{LFS_PROBLEM, describe, is_lfs_pointer, lfs_pointer};
use dcp_jobs::JobOptions;

use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT};
use crate::disk::config::{CheckpointingConfig, METADATA_JSON};
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::manifest::verify_manifest;
use crate::disk::recovery::{RECORD, recovered};
use crate::error::MegatronError;
use crate::object_grids::object_grids;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, is_machine};
use crate::open::common_state;
use crate::open::legacy::folders::is_rank_folder;
use crate::open::legacy::is_rank_file;
use crate::sharded::ObjectKey;

/// The folder of a checkpoint of NeMo that holds Megatron-Core's.
pub(crate) const NEMO_WEIGHTS: &str = "weights";

/// Whether there is a folder of a rank with a file that Megatron-LM writes, as `--ckpt-format torch` does. Others may
/// have folders of such names.
pub(crate) fn has_rank_folders(folder: &Folder<'_>) -> bool {
    folder.folders().any(|below| is_rank(&below))
}

fn is_rank(folder: &Folder<'_>) -> bool {
    is_rank_folder(folder.name()) && folder.files().any(|(name, _)| is_rank_file(name))
}

/// Whether there are files of PyTorch's format, or arrays of zarr.
pub(crate) fn has_data(folder: &Folder<'_>) -> bool {
    DcpFiles::of(folder).is_any() || has_arrays(folder)
}

pub(crate) fn has_arrays(folder: &Folder<'_>) -> bool {
    folder.folders().any(|below| below.has(".zarray"))
}

/// Whether `weights` in a folder holds the checkpoint, as NeMo has it; the index in a folder itself comes first.
pub(crate) fn is_nemo(folder: &Folder<'_>) -> bool {
    !is_committed(folder) && folder.folder(NEMO_WEIGHTS).is_some_and(|below| below.has(".metadata"))
}

pub(crate) fn is_committed(folder: &Folder<'_>) -> bool {
    DcpFiles::of(folder).is_committed()
}

/// Whether a file or folder in the folder of a checkpoint is a part of it.
pub(crate) fn owns(folder: &Folder<'_>, name: &str) -> bool {
    let own = [METADATA_JSON, COMMON_FILE, INTEGRITY_FILE, RECORD];
    if own.contains(&name) || DcpFormat.owns(folder, name) {
        return true;
    }
    let Some(below) = folder.folder(name) else { return false };
    // Arrays of zarr, and objects of sharded state dicts.
    let is_objects = || below.files().next().is_some_and(|(file, _)| file.starts_with("shard_"));
    let is_weights = name == NEMO_WEIGHTS && is_nemo(folder);
    is_rank(&below) || is_weights || below.has(".zarray") || is_objects()
}

/// Whose save an index of PyTorch's format is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexOwner {
    /// It has objects of a sharded state dict, which only Megatron-Core names by their place in a grid.
    MegatronCore,
    /// It has the paths of values in nested dicts. Megatron-Core's planner leaves paths out, and before 0.12 had one
    /// item in each: the key itself.
    PyTorch,
    /// Nothing in it shows that.
    Unknown,
}

/// Whose save an index is: by what is in it, since files of the user may have any name.
pub(crate) fn index_owner(index: &CheckpointMetadata) -> IndexOwner {
    let is_object = |fqn: &str| ObjectKey::parse(fqn).is_some();
    if index.iter().any(|(fqn, entry)| entry.as_object().is_some() && is_object(fqn)) {
        return IndexOwner::MegatronCore;
    }
    let is_nested = |path: &StatePath| path.len() > 1;
    match index.iter().any(|(_, entry)| entry.path().is_some_and(is_nested)) {
        true => IndexOwner::PyTorch,
        false => IndexOwner::Unknown,
    }
}

/// Compares the index and the common state of one checkpoint with its files.
pub(crate) async fn examine_one(place: &Place) -> Result<Examined, StorageError> {
    let mut examined = examine_stored(place).await?;
    if examined.unsupported.is_some() || examined.format.is_some() {
        return Ok(examined);
    }
    if examined.problem.is_some() {
        examined.opens = examined.opens || is_whole_of_others(place).await?;
        return Ok(examined);
    }
    // A file of another name concerns a resume alone.
    let folder = place.listing().root();
    let is_legacy = is_legacy(&folder);
    let is_read = |key: &Key| match key.as_str().rsplit_once('/') {
        Some((rank, name)) if is_legacy => is_rank_folder(rank) && is_rank_file(name),
        Some((_, name)) => name.starts_with("shard_"),
        None => !is_legacy && key.as_str() == COMMON_FILE,
    };
    let mut examined = examined.with_all_compared(true);
    examined.problem = describe(&find_incomplete_files_where(place, is_read).await?);
    if examined.problem.is_none() && !is_legacy && !place.has_known_files() {
        examined.problem = problem_of_common(place).await?;
    }
    let has_inside = |index: &CheckpointMetadata| index.get(COMMON_OBJECT).is_some();
    if let Some(problem) = &examined.problem
        && examined.index.as_deref().is_some_and(has_inside)
    {
        // Readers take the file where there is one. The save wrote none.
        let remedy = format!("the checkpoint has its common state in the object {COMMON_OBJECT:?}");
        examined.problem = Some(format!("{problem}; {remedy}: move the file away to read it"));
        examined.opens = true;
    }
    Ok(examined)
}

/// Whether a folder is of ranks alone: a `metadata.json` in it describes nothing.
fn is_legacy(folder: &Folder<'_>) -> bool {
    has_rank_folders(folder) && !has_data(folder)
}

/// Whether PyTorch's reader finds a whole checkpoint whose index is not Megatron-Core's: what is wrong is then wrong
/// with files that only have Megatron-Core's names.
async fn is_whole_of_others(place: &Place) -> Result<bool, StorageError> {
    if !is_committed(&place.listing().root()) {
        return Ok(false);
    }
    let stored = DcpFormat.examine(place).await?;
    let is_whole = stored.problem.is_none() && stored.unsupported.is_none();
    let is_ours = |index: &CheckpointMetadata| index_owner(index) == IndexOwner::MegatronCore;
    Ok(is_whole && !stored.index.as_deref().is_some_and(is_ours))
}

/// The problem of a `common.pt` that is not a common state, whatever its length.
async fn problem_of_common(place: &Place) -> Result<Option<String>, StorageError> {
    let root = place.listing().root();
    let file = root.file(COMMON_FILE);
    if file.is_none_or(|file| file.byte_len > EXAMINED_INDEX_MAX) {
        return Ok(None);
    }
    match common_state::from_file(&recovered(place.storage()).await?).await {
        Ok(_) => Ok(None),
        Err(MegatronError::Checkpoint(CheckpointError::Storage(error))) if is_machine(&error) => {
            Err(error)
        }
        Err(error) => Ok(Some(error_chain(&error))),
    }
}

async fn examine_stored(place: &Place) -> Result<Examined, StorageError> {
    let folder = place.listing().root();
    if place.has_known_files() {
        return Ok(Examined::default());
    }
    let Some(file) = folder.file(METADATA_JSON) else {
        if folder.has(RECORD) && is_committed(&folder) {
            return examine_recorded(place).await;
        }
        return match has_rank_folders(&folder) {
            true => Ok(Examined::new(problem_of_opening(place).await?)),
            false => Ok(Examined::default()),
        };
    };
    if is_legacy(&folder) {
        return Ok(Examined::new(problem_of_opening(place).await?));
    }
    let config = match described(place, file).await? {
        Ok(config) => config,
        Err(Undescribed { problem, names_backend }) => {
            let problem = format!("the {METADATA_JSON} {problem}");
            return match names_backend || !is_committed(&folder) {
                true => Ok(Examined::new(Some(problem))),
                false => examine_undescribed(place, problem).await,
            };
        }
    };
    let is_zarr = config.sharded.is("zarr");
    let is_read = is_zarr || config.sharded.is("torch_dist");
    let common = config.common.filter(|common| !common.is("torch"));
    if let Some(backend) = common.or((!is_read).then_some(config.sharded)) {
        return Ok(Examined::of_other_program(format!(
            "was written by the backend {backend} of Megatron-Core, which is not read"
        )));
    }
    if is_zarr || !DcpFiles::of(&folder).is_any() {
        // Each array of zarr has a description of its own. Their versions wrote no manifest.
        return Ok(Examined::new(problem_of_opening(place).await?));
    }
    if let Some(problem) = DcpFiles::of(&folder).problem() {
        return Ok(Examined::new(Some(problem)));
    }
    let mut stored = DcpFormat.examine(place).await?;
    if stored.problem.is_some() {
        return Ok(stored);
    }
    if let Some(missing) = stored.index.as_deref().and_then(missing_object) {
        return Ok(Examined::new(Some(missing)));
    }
    let inside = match &stored.index {
        Some(metadata) => metadata.get(COMMON_OBJECT).is_some(),
        None => folder.has(".metadata"),
    };
    if !folder.has(COMMON_FILE) && !inside {
        return Ok(Examined::new(Some(format!("there is no {COMMON_FILE}"))));
    }
    if let Some(problem) = problem_of_manifest(place).await? {
        // No reader needs the manifest, which is written before the last file: no dead save is to blame.
        stored.problem = Some(problem);
        stored.opens = true;
    }
    Ok(stored)
}

/// Examines a committed checkpoint beside the record of an overwrite. Where the record is damaged, or is of another
/// index, the folder is as PyTorch's format has it.
async fn examine_recorded(place: &Place) -> Result<Examined, StorageError> {
    match std::sync::Arc::ptr_eq(&recovered(place.storage()).await?, place.storage()) {
        true => Ok(DcpFormat.examine(place).await?.with_format(Some(DcpFormat.info().name))),
        false => Ok(Examined::default()),
    }
}

/// Examines a committed checkpoint of PyTorch's format beside a `metadata.json` that is not Megatron-Core's. By its
/// index it is one of Megatron-Core, whose file has this problem, or PyTorch's.
async fn examine_undescribed(place: &Place, problem: String) -> Result<Examined, StorageError> {
    let stored = DcpFormat.examine(place).await?;
    let folder = place.listing().root();
    let owner = match stored.index.as_deref() {
        Some(index) => index_owner(index),
        None if folder.has(".metadata") => IndexOwner::Unknown,
        // Megatron-Core does not save the index of each rank.
        None => IndexOwner::PyTorch,
    };
    let is_sound = stored.problem.is_none() && stored.unsupported.is_none();
    Ok(match owner {
        IndexOwner::MegatronCore => Examined::new(Some(problem)),
        // The index is too long to be read here, or the common state is beside it.
        IndexOwner::Unknown if is_sound && (stored.index.is_none() || folder.has(COMMON_FILE)) => {
            Examined::new(Some(problem)).with_opens(true)
        }
        _ => stored.with_format(Some(DcpFormat.info().name)),
    })
}

/// A `metadata.json` that does not describe a checkpoint.
struct Undescribed {
    /// The predicate of a sentence about the file.
    problem: String,
    /// Whether it is Megatron-Core's all the same.
    names_backend: bool,
}

/// Reads the description of a checkpoint.
async fn described(
    place: &Place,
    file: &ObjectMeta,
) -> Result<Result<CheckpointingConfig, Undescribed>, StorageError> {
    if file.byte_len > Peek::BYTES_MAX {
        let problem = format!("has {} bytes, more than it can have", file.byte_len);
        return Ok(Err(Undescribed { problem, names_backend: false }));
    }
    let json = place.storage().read_range(&file.key, 0..file.byte_len).await?;
    Ok(CheckpointingConfig::parse(&json).map_err(|error| Undescribed {
        problem: match is_lfs_pointer(&json) {
            true => LFS_PROBLEM.to_owned(),
            false => format!("cannot be read: {}", error.problem()),
        },
        names_backend: names_backend(&json).unwrap_or_default(),
    }))
}

/// Whether the text of a `metadata.json` names a backend; `None` if it cannot be parsed.
pub(crate) fn names_backend(json: &[u8]) -> Option<bool> {
    let json = serde_json::from_slice::<serde_json::Value>(json).ok()?;
    Some(json.get("sharded_backend").is_some())
}

/// Returns the problem that keeps a checkpoint from being opened whole. Descriptions of arrays and
/// pickles are read.
async fn problem_of_opening(place: &Place) -> Result<Option<String>, StorageError> {
    let options = MegatronOpenOptions::default().with_tolerant(true);
    let problem = match MegatronCheckpoint::open_folder(place.storage(), &options).await {
        Ok(opened) => {
            let metadata = opened.stored().metadata().await;
            let missing = || metadata.ok().and_then(|metadata| missing_object(&metadata));
            opened.damage().first().cloned().or_else(missing)
        }
        Err(MegatronError::Checkpoint(CheckpointError::Storage(error))) if is_machine(&error) => {
            return Err(error);
        }
        Err(error) => Some(error_chain(&error)),
    };
    if problem.is_some()
        && let Some(pointer) = lfs_pointer(place).await?
    {
        return Ok(Some(format!("{pointer} {LFS_PROBLEM}")));
    }
    Ok(problem)
}

/// The problem of a grid of objects that is not complete.
fn missing_object(metadata: &CheckpointMetadata) -> Option<String> {
    let problem = object_grids(metadata).into_iter().next()?;
    let key = problem.key.map_or_else(String::new, |key| format!("{}: ", Quoted(&key)));
    Some(format!("{key}{}", problem.message))
}

/// Returns the problem of the `integrity.json`, if there is one: it cannot be read, or names a file
/// that is missing.
async fn problem_of_manifest(place: &Place) -> Result<Option<String>, StorageError> {
    match verify_manifest(place.storage(), false, &JobOptions::default()).await {
        Ok(problems) => Ok(problems.into_iter().flatten().next().map(|problem| {
            let file = problem.file.unwrap_or_else(|| INTEGRITY_FILE.to_owned());
            format!("{file}: {}", problem.message)
        })),
        Err(CheckpointError::Storage(error)) => Err(error),
        Err(error) => Ok(Some(error_chain(&error))),
    }
}
