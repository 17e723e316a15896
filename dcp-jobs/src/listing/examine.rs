//! Decides whether a checkpoint is complete.

use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, Evidence, Examined, Folder, FolderMatch, FormatRegistry, OpenOptions, Place,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError};
use dcp_formats::dcp::{DcpFormat, is_part_folder};
use dcp_formats::find_incomplete_files_where;
use dcp_formats::hf::{HuggingFaceFormat, INDEX_ENDING, Weights, has_variants, model_is_whole};
use dcp_formats::incomplete_files::{IncompleteFile, describe, unwritten};
use dcp_planner::validate_metadata;

use crate::read::stored_items::{placed_items, shared_bytes};

/// The index of PyTorch's format, and the ending of those of ranks.
const METADATA: &str = ".metadata";
/// The folder beside the files of ranks in which NeMo Automodel has the whole model.
const CONSOLIDATED: &str = "consolidated";
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
    let is_read = !place.has_any_known();
    let is_open = |key: &Key| !examined.compared.contains(key);
    let files = find_incomplete_files_where(place, is_open).await?;
    examined.problem = describe(&files);
    if examined.problem.is_some() {
        // What the format reads was compared, so that a file which no index names is no reason to lose it.
        let contradiction = match examined.all_compared && is_read {
            true => contradiction(formats, format, place, &mut examined).await?,
            false => None,
        };
        let is_named = |one: &IncompleteFile| is_indexed(examined.index.as_deref(), &one.file);
        if !examined.all_compared || contradiction.is_some() || files.iter().any(is_named) {
            return Ok(examined);
        }
        examined.opens = true;
        let folder = place.listing().root();
        let is_owned = |one: &IncompleteFile| {
            let name = one.file.as_str().split('/').next().unwrap_or_default();
            format.owns(&folder, name)
        };
        if place.file().is_none() && !files.iter().any(is_owned) {
            examined.strays = files.into_iter().map(|one| one.file).collect();
        }
        return Ok(examined);
    }
    if is_read {
        (examined.problem, examined.opens) = problem_of_part(formats, format, place).await?;
        if examined.problem.is_none() {
            examined.problem = contradiction(formats, format, place, &mut examined).await?;
        }
    }
    Ok(examined)
}

/// Whether an index places tensors in a file.
fn is_indexed(index: Option<&CheckpointMetadata>, file: &Key) -> bool {
    // The index may be of a folder below.
    let is_of = |named: &Key| {
        let rest = file.as_str().strip_suffix(named.as_str());
        rest.is_some_and(|folder| folder.is_empty() || folder.ends_with('/'))
    };
    index.is_some_and(|index| index.files().iter().any(is_of))
}

/// Examines the checkpoint in a folder that `found` recognizes by its names, whatever it lacks by them.
///
/// Names alone do not say whose save a folder is: any of them may be that of a file of the user. So where `found` has a
/// problem, and another format finds a whole checkpoint with an index of its own, the index decides. It is the
/// checkpoint of the other format, [named](Examined::format), unless `found` builds on that and the index shows its
/// save, which then did not finish. Where the index shows neither, the other format still
/// [opens](Examined::opens) the folder, and nobody can say that it is what a dead save left.
///
/// # Errors
///
/// When the storage fails.
pub async fn examine_match(
    formats: &FormatRegistry,
    found: &FolderMatch,
    place: &Place,
) -> Result<Examined, StorageError> {
    let mut own = examine_checkpoint(formats, &*found.format, place).await?;
    if let Some(problem) = &found.found.problem {
        own.problem = Some(problem.clone());
        (own.opens, own.strays) = (false, Vec::new());
    }
    if own.problem.is_none() || own.opens || own.unsupported.is_some() || own.format.is_some() {
        return Ok(own);
    }
    for other in formats.others(&place.listing().root(), found) {
        let is_part = found.has_part(&*other.format);
        if is_part && found.found.evidence == Evidence::Index {
            // What it says of its own checkpoint, it says of the part.
            continue;
        }
        let examined = examine(formats, &*other.format, place).await?;
        if examined.unsupported.is_some() || examined.problem.is_some() && !examined.opens {
            continue;
        }
        let is_decided = is_part && examined.is_complete() && examined.index.is_some();
        if is_decided {
            return Ok(examined.with_format(Some(other.format.info().name)));
        }
        let problem = examined.problem.or(own.problem).unwrap_or_default();
        let remedy = "a file that is none of this checkpoint can be moved away";
        own.problem = Some(format!("{problem}; {remedy}"));
        return Ok(own.with_opens(true));
    }
    Ok(own)
}

/// The problem of a checkpoint in a folder below a model that belongs to the same step, such as its optimizer, and
/// whether the model opens all the same: the folder has only another form of it. Other folders may be other checkpoints,
/// as where a run has its last model beside its steps.
async fn problem_of_part(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<(Option<String>, bool), StorageError> {
    if !format.info().model_folders || place.file().is_some() {
        return Ok((None, false));
    }
    let root = place.listing().root();
    let is_part = |name: &str| is_part_folder(name) || name == CONSOLIDATED;
    for part in root.folders().filter(|folder| is_part(folder.name())) {
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
            let opens = part.name() == CONSOLIDATED;
            return Ok((Some(format!("{}: {problem}", part.name())), opens));
        }
    }
    Ok((None, false))
}

/// Finds what shows that the save did not finish, or elements of a tensor that no chunk holds: the files of a rank
/// that are missing. The indexes and headers of ranks are read again, as one.
async fn contradiction(
    formats: &FormatRegistry,
    format: &dyn CheckpointFormat,
    place: &Place,
    examined: &mut Examined,
) -> Result<Option<String>, StorageError> {
    let folder = place.listing().root();
    let index = &mut examined.index;
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
        examined.opens = !unfinished.certain;
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
            Some(mut found) if !place.storage().capabilities().listable => {
                found.found.problem = None;
                examine_match(formats, &found, place).await
            }
            Some(found) => examine_match(formats, &found, place).await,
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
