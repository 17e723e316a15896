//! Examination of a checkpoint of Megatron-Core: its index and its common state against its files.

use dcp_core::error::error_chain;
use dcp_core::format::{CheckpointFormat as _, Examined, Folder, Peek, Place};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError};
use dcp_formats::dcp::{DcpFiles, DcpFormat};
use dcp_formats::find_incomplete_files_where;
use dcp_formats::incomplete_files::{LFS_PROBLEM, describe, is_lfs_pointer, lfs_pointer};
use dcp_formats::torch_save::FILE_ENDINGS;
use dcp_jobs::JobOptions;

use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT};
use crate::disk::config::{CheckpointingConfig, METADATA_JSON};
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::manifest::verify_manifest;
use crate::disk::recovery::RECORD;
use crate::error::MegatronError;
use crate::object_grids::object_grids;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, is_machine};

/// The folder of a checkpoint of NeMo that holds Megatron-Core's.
pub(crate) const NEMO_WEIGHTS: &str = "weights";

/// Whether there is a folder of a rank, as `--ckpt-format torch` writes them.
pub(crate) fn has_rank_folders(folder: &Folder<'_>) -> bool {
    folder.folders().any(|below| {
        let is_torch = |name: &str| FILE_ENDINGS.iter().any(|ending| name.ends_with(ending));
        below.name().starts_with("mp_rank_") && below.files().any(|(name, _)| is_torch(name))
    })
}

/// Whether there are files of PyTorch's format, or arrays of zarr.
pub(crate) fn has_data(folder: &Folder<'_>) -> bool {
    DcpFiles::of(folder).is_any() || folder.folders().any(|below| below.has(".zarray"))
}

pub(crate) fn is_committed(folder: &Folder<'_>) -> bool {
    DcpFiles::of(folder).is_committed()
}

/// Whether a file or folder in the folder of a checkpoint is a part of it.
pub(crate) fn owns(folder: &Folder<'_>, name: &str) -> bool {
    let own = [METADATA_JSON, COMMON_FILE, INTEGRITY_FILE, RECORD, NEMO_WEIGHTS];
    if own.contains(&name) || DcpFormat.owns(folder, name) {
        return true;
    }
    let Some(below) = folder.folder(name) else { return false };
    // Arrays of zarr, and objects of sharded state dicts.
    let is_objects = || below.files().next().is_some_and(|(file, _)| file.starts_with("shard_"));
    name.starts_with("mp_rank_") || below.has(".zarray") || is_objects()
}

/// Compares the index and the common state of one checkpoint with its files.
pub(crate) async fn examine_one(place: &Place) -> Result<Examined, StorageError> {
    let examined = examine_stored(place).await?;
    if examined.problem.is_some() || examined.unsupported.is_some() || examined.format.is_some() {
        return Ok(examined);
    }
    // A file of another name concerns a resume alone.
    let folder = place.listing().root();
    let is_own = |key: &Key| {
        let name = key.as_str().split('/').next().unwrap_or_default();
        owns(&folder, name)
    };
    let mut examined = examined.with_all_compared(true);
    examined.problem = describe(&find_incomplete_files_where(place, is_own).await?);
    Ok(examined)
}

async fn examine_stored(place: &Place) -> Result<Examined, StorageError> {
    let folder = place.listing().root();
    if place.has_known_files() {
        return Ok(Examined::default());
    }
    let Some(file) = folder.file(METADATA_JSON) else {
        return match has_rank_folders(&folder) {
            true => Ok(Examined::new(problem_of_opening(place).await?)),
            false => Ok(Examined::default()),
        };
    };
    let config = match described(place, file).await? {
        Ok(config) => config,
        Err(Undescribed { problem, names_backend }) => {
            let problem = format!("the {METADATA_JSON} {problem}");
            return match names_backend || folder.has(COMMON_FILE) || !is_committed(&folder) {
                true => Ok(Examined::new(Some(problem))),
                false => examine_undescribed(place, problem).await,
            };
        }
    };
    let is_zarr = config.sharded.is("zarr");
    if !is_zarr && !config.sharded.is("torch_dist") {
        let backend = config.sharded;
        return Ok(Examined::of_other_program(format!(
            "was written by the backend {backend} of Megatron-Core, which is not read"
        )));
    }
    if let Some(problem) = problem_of_manifest(place).await? {
        return Ok(Examined::new(Some(problem)));
    }
    if is_zarr || !DcpFiles::of(&folder).is_any() {
        // Each array of zarr has a description of its own.
        return Ok(Examined::new(problem_of_opening(place).await?));
    }
    let stored = DcpFormat.examine(place).await?;
    if stored.problem.is_some() {
        return Ok(stored);
    }
    if let Some(missing) = stored.index.as_deref().and_then(missing_object) {
        return Ok(Examined::new(Some(missing)));
    }
    if folder.has(COMMON_FILE) {
        return Ok(stored);
    }
    let inside = match &stored.index {
        Some(metadata) => metadata.get(COMMON_OBJECT).is_some(),
        None => folder.has(".metadata"),
    };
    match inside {
        true => Ok(stored),
        false => Ok(Examined::new(Some(format!("there is no {COMMON_FILE}")))),
    }
}

/// Examines a committed checkpoint of PyTorch's format beside a `metadata.json` that is not Megatron-Core's. With a
/// common state in its index it is one of Megatron-Core, whose file has this problem; else it is PyTorch's.
async fn examine_undescribed(place: &Place, problem: String) -> Result<Examined, StorageError> {
    let stored = DcpFormat.examine(place).await?;
    if stored.index.as_ref().is_some_and(|index| index.get(COMMON_OBJECT).is_some()) {
        return Ok(Examined::new(Some(problem)));
    }
    let is_sound = stored.problem.is_none() && stored.unsupported.is_none();
    Ok(match is_sound && stored.index.is_none() && place.listing().root().has(".metadata") {
        // The index is too long to be read here.
        true => Examined::new(Some(problem)).with_opens(true),
        false => stored.with_format(Some(DcpFormat.info().name)),
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
