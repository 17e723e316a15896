//! Decides whether a checkpoint is complete.

use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, Examined, Folder, FolderMatch, FormatRegistry, OpenOptions, Place, Recognized,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError};
use dcp_formats::dcp::{DcpFormat, is_part_folder};
use dcp_formats::find_incomplete_files;
use dcp_formats::hf::{HuggingFaceFormat, INDEX_ENDING, Weights, has_variants, model_is_whole};
use dcp_formats::incomplete_files::{describe, unwritten};
use dcp_planner::validate_metadata;

use crate::read::stored_items::{placed_items, shared_bytes};

/// The index of PyTorch's format, and the ending of those of ranks.
const METADATA: &str = ".metadata";
/// Bytes at the start of an index that a power failure would have left as zeros.
const HEAD_BYTES: u64 = 64;

/// Examines a checkpoint that its names call whole: its index against its files, and every file of
/// safetensors or `torch.save` against its own header. No tensor is read.
///
/// This is the one answer of `ls`, `prune`, `copy`, `inspect` and `verify`; RELIABILITY.md lists what each
/// format needs. Of files that are [known](Place::known_files), because another checkpoint with files of the same
/// names and lengths was examined, only the beginning of the index is read.
///
/// # Errors
///
/// When the storage fails. What is wrong with the checkpoint is [`Examined::problem`].
pub async fn examine_checkpoint(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Examined, StorageError> {
    let examined = examine(formats, format, place).await?;
    let is_model = format.info().name == HuggingFaceFormat.info().name && place.file().is_none();
    // What is wrong is wrong with a variant, and loaders open the model.
    let is_variants = examined.problem.is_some()
        && is_model
        && has_variants(place)
        && model_is_whole(place, Weights::Main).await?;
    let opens = examined.opens || is_variants;
    Ok(examined.with_opens(opens))
}

async fn examine(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Examined, StorageError> {
    let mut examined = format.examine(place).await?;
    if examined.problem.is_some() || examined.unsupported.is_some() {
        return Ok(examined);
    }
    let other = examined.format.and_then(|name| formats.by_name(name));
    let format = other.map_or(format, |other| &**other);
    if place.has_any_known() {
        examined.problem = unwritten_index(format, place).await?;
        if examined.problem.is_some() {
            return Ok(examined);
        }
    }
    let files = find_incomplete_files(place).await?;
    examined.problem = describe(&files);
    if examined.problem.is_some() {
        // A stray file is no reason to lose what the format reads without it.
        examined.opens = examined.all_compared
            && !files.iter().any(|one| is_indexed(examined.index.as_deref(), &one.file))
            && (place.has_any_known()
                || contradiction(formats, format, place, &mut examined.index).await?.is_none());
        return Ok(examined);
    }
    if !place.has_any_known() {
        examined.problem = problem_of_part(formats, format, place).await?;
    }
    if examined.problem.is_none() && !place.has_any_known() {
        examined.problem = contradiction(formats, format, place, &mut examined.index).await?;
    }
    Ok(examined)
}

/// Whether an index, or one that was not read, may place tensors in a file.
fn is_indexed(index: Option<&CheckpointMetadata>, file: &Key) -> bool {
    // The index may be of a folder below.
    let is_of = |named: &Key| {
        let rest = file.as_str().strip_suffix(named.as_str());
        rest.is_some_and(|folder| folder.is_empty() || folder.ends_with('/'))
    };
    match index {
        Some(index) => index.files().iter().any(is_of),
        None => file.file_name().ends_with(".safetensors"),
    }
}

/// The problem of a checkpoint in a folder below a model that belongs to the same step, such as its optimizer. Other
/// folders may be other checkpoints, as where a run has its last model beside its steps.
async fn problem_of_part(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Option<String>, StorageError> {
    if !format.info().model_folders || place.file().is_some() {
        return Ok(None);
    }
    let root = place.listing().root();
    for part in root.folders().filter(|folder| is_part_folder(folder.name())) {
        let Some(found) = formats.classify(&part) else { continue };
        let problem = match found.found.problem {
            Some(problem) => Some(problem),
            None if !found.found.is_checkpoint() => None,
            None => {
                let part = place.below(part.path())?;
                Box::pin(examine(formats, &*found.format, &part)).await?.problem
            }
        };
        if let Some(problem) = problem {
            return Ok(Some(format!("{}: {problem}", part.name())));
        }
    }
    Ok(None)
}

/// Finds what shows that the save did not finish, or elements of a tensor that no chunk holds: the files of a rank
/// that are missing. The indexes and headers of ranks are read again, as one.
async fn contradiction(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
    index: &mut Option<Arc<CheckpointMetadata>>,
) -> Result<Option<String>, StorageError> {
    let folder = place.listing().root();
    // Those of ranks are of several indexes, or of headers.
    let items = index.as_deref().map(placed_items).unwrap_or_default();
    if let Some((item, problem)) = shared_bytes(&items).first() {
        return Ok(Some(format!("{:?}: {problem}", item.fqn)));
    }
    if index.is_none() && is_by_ranks(&folder) {
        let options = OpenOptions::default().with_tolerant(true);
        let opened = async { format.open(place, &options).await?.reader.metadata().await };
        match opened.await {
            Ok(merged) => *index = Some(merged),
            Err(CheckpointError::Storage(error)) => return Err(error),
            Err(error) => return Ok(Some(error_chain(&error))),
        }
    }
    let Some(index) = index else { return Ok(None) };
    if format.info().name == DcpFormat.info().name
        && let Some((_, unfinished)) = formats.unfinished(&folder, index)
    {
        return Ok(Some(format!("it {}", unfinished.description)));
    }
    Ok(validate_metadata(index).first().map(ToString::to_string))
}

/// Whether each rank has written an index or headers of its own, which only together show what is missing.
fn is_by_ranks(folder: &Folder<'_>) -> bool {
    let has_index = |name: &str| name == METADATA || name.ends_with(INDEX_ENDING);
    let is_rank = |name: &str| {
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let rank = name.strip_prefix("__").and_then(|name| name.strip_suffix(METADATA));
        rank.is_some_and(digits) || name.starts_with("shard-") && name.ends_with(".safetensors")
    };
    !folder.files().any(|(name, _)| has_index(name))
        && folder.files().any(|(name, _)| is_rank(name))
}

/// Returns why the checkpoint in a folder, or the one file of `place`, is not complete: the problem of
/// [`examined`].
///
/// # Errors
///
/// When the storage fails.
pub async fn incomplete(
    formats: &FormatRegistry,
    place: &Place,
) -> Result<Option<String>, StorageError> {
    Ok(examined(formats, place).await?.problem)
}

/// Examines the checkpoint in a folder, or the one file of `place`: by its names, and by
/// [`examine_checkpoint`]. A folder without a checkpoint has no problem.
///
/// # Errors
///
/// When the storage fails.
pub async fn examined(formats: &FormatRegistry, place: &Place) -> Result<Examined, StorageError> {
    let Some(file) = place.file() else {
        return match formats.classify(&place.listing().root()) {
            // A storage that cannot list does not show which names there are.
            Some(FolderMatch { found: Recognized { problem: Some(problem), .. }, .. })
                if place.storage().capabilities().listable =>
            {
                Ok(Examined::new(Some(problem)))
            }
            Some(found) => examine_checkpoint(formats, &*found.format, place).await,
            None => Ok(Examined::default()),
        };
    };
    match formats.recognize_file(place.storage(), file).await {
        Ok(format) => examine_checkpoint(formats, &**format, place).await,
        Err(CheckpointError::Storage(error)) => Err(error),
        Err(_) => Ok(Examined::default()),
    }
}

/// The problem of an index that begins with zeros. One file is read: that of PyTorch's format where there
/// is one, since frameworks build on it.
async fn unwritten_index(
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Option<String>, StorageError> {
    let folder = place.listing().root();
    let mut landmarks = DcpFormat.info().landmarks.iter().chain(format.info().landmarks);
    let Some(file) = landmarks.find_map(|landmark| folder.file(landmark)) else { return Ok(None) };
    let head = place.storage().read_range(&file.key, 0..file.byte_len.min(HEAD_BYTES)).await?;
    Ok(unwritten(&head).map(|problem| format!("{} {problem}", file.key)))
}
