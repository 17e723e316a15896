//! Removes tensors from a checkpoint, such as the optimizer state.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::metadata::{Entry, Placement};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{CheckpointMetadata, FormatError, Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::dcp::{claim, remove_unreferenced, replace_metadata};
use dcp_formats::metadata::{Profile, decode_all, encode};

use crate::disk::common_state::COMMON_OBJECT;
use crate::disk::config::CheckpointingConfig;
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::manifest::write_integrity;
use crate::disk::recovery::{HALF_REPLACED, recovered};
use crate::disk::tracker::Tracked;
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, StoredFormat};
use crate::open::run::MegatronRun;

const METADATA: &str = ".metadata";

/// The entries and files that were removed from a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// Tensors and objects, by their keys.
    pub entries: Vec<Arc<str>>,
    /// Files in which nothing else was.
    pub files: Vec<Key>,
    /// Warnings of steps that failed after the removal; the checkpoint is whole all the same.
    pub warnings: Vec<String>,
}

/// Removes the tensors and objects whose keys begin with `prefix`, and the files in which nothing
/// else is: with `separation_hint`, all that they took. The `chained_0.` and so on that Megatron-Core
/// puts in front of the keys of several optimizers does not count as part of a key, unless `prefix`
/// has it, too.
///
/// The replacement of `.metadata` is the one step in which they go. A process that dies before
/// leaves the checkpoint as it was, one that dies after it at most files that nothing refers to.
/// An `integrity.json` is removed first and written again last, or put back when nothing was removed.
/// Where it cannot be written again, the removal is done all the same, and
/// [`Removed::warnings`] say so. Megatron-Core itself (0.16) leaves
/// a broken checkpoint on current PyTorch.
///
/// `storage` is the folder of the checkpoint itself. What is removed from is never looked for: not by
/// the tracker of a run, which may move meanwhile, nor among its iterations.
/// [`MegatronRun::checkpoint`] is the folder of one of them.
///
/// # Errors
///
/// [`MegatronError::FolderOfRun`] for the folder of a run; when the checkpoint cannot be opened or is
/// not of `torch_dist`; when tensors would be left that were saved flattened, whose shapes only the
/// old `.metadata` can say; and when the storage fails. Nothing was removed then.
pub async fn remove_sharded_tensors(
    storage: &Arc<dyn Storage>,
    prefix: &str,
) -> Result<Removed, MegatronError> {
    if CheckpointingConfig::read(&**storage).await?.is_none()
        && let Some(which) = latest(storage).await?
    {
        return Err(MegatronError::FolderOfRun { folder: which.folder()?.to_string() });
    }
    let checkpoint =
        MegatronCheckpoint::open_folder(storage, &MegatronOpenOptions::default()).await?;
    let refuse = |problem: String| MegatronError::from(FormatError::new("checkpoint", problem));
    if !Arc::ptr_eq(&recovered(storage).await?, storage) {
        return Err(refuse(HALF_REPLACED.to_owned()));
    }
    if !matches!(checkpoint.format(), StoredFormat::TorchDist { .. }) {
        let problem = "tensors are removed from checkpoints of torch_dist only; convert it first";
        return Err(refuse(problem.to_owned()));
    }
    let key = Key::new(METADATA).map_err(StorageError::from)?;
    let seen = storage.read_all(&key).await?;
    let in_file = |error: FormatError| error.in_file(METADATA, 0);
    let decoded = decode_all(&seen).map_err(in_file)?;
    let goes = |fqn: &str| begins_with(fqn, prefix) && fqn != COMMON_OBJECT;
    let flattened = decoded.original_shapes.keys().find(|fqn| !goes(fqn));
    if let Some(fqn) = flattened {
        let problem = format!(
            "{fqn:?}, which would stay, was saved flattened by Megatron-Core 0.15 or earlier, and \
             its shape would be lost; convert the checkpoint first"
        );
        return Err(refuse(problem));
    }
    let old = decoded.metadata;
    let mut new = CheckpointMetadata::new();
    *new.provenance_mut() = old.provenance().clone();
    let mut removed = Removed::default();
    for (fqn, entry) in old.iter() {
        if goes(fqn) {
            removed.entries.push(Arc::clone(fqn));
        } else {
            let kept = again(&old, entry, &mut new).ok_or_else(|| {
                refuse(format!("{fqn:?} is in a file that the index does not name"))
            })?;
            new.insert(Arc::clone(fqn), kept);
        }
    }
    if removed.entries.is_empty() {
        return Ok(removed);
    }
    let needed: HashSet<&Key> = new.files().iter().collect();
    removed.files = old.files().iter().filter(|key| !needed.contains(key)).cloned().collect();
    let profile = Profile::of(&seen).map_err(in_file)?;
    let bytes = encode(&new, profile).map_err(in_file)?;
    // Held until the files are gone, too.
    let claim = claim(&**storage).await?;
    let integrity = Key::new(INTEGRITY_FILE).map_err(StorageError::from)?;
    let manifest = match storage.read_all(&integrity).await {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == StorageErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    if manifest.is_some() {
        storage.delete(std::slice::from_ref(&integrity)).await?;
    }
    if let Err(error) = replace_metadata(&**storage, claim.as_deref(), &seen, &bytes).await {
        // It is that of the old index, which may have been replaced all the same.
        if let Some(manifest) = manifest
            && storage.read_all(&key).await.is_ok_and(|now| now == seen)
            && let Err(error) = storage.put(&integrity, manifest.into(), PutMode::Create).await
        {
            tracing::warn!(%error, "integrity.json cannot be put back");
        }
        return Err(error.into());
    }
    remove_unreferenced(&**storage, removed.files.clone()).await;
    if manifest.is_some()
        && let Err(error) = write_integrity(storage).await
    {
        removed.warnings.push(format!(
            "{INTEGRITY_FILE} could not be written again, and is not there: {}",
            error_chain(&error)
        ));
    }
    Ok(removed)
}

/// The latest checkpoint of a run; `None` where there is no run.
async fn latest(storage: &Arc<dyn Storage>) -> Result<Option<Tracked>, MegatronError> {
    let run = MegatronRun::new(Arc::clone(storage));
    match run.tracked().await? {
        Some(tracked) => Ok(Some(tracked)),
        None => Ok(run.latest().await?.map(|latest| latest.which)),
    }
}

/// Whether a key begins with `prefix`, as it is or without the number of one of several optimizers.
fn begins_with(fqn: &str, prefix: &str) -> bool {
    let unchained = || {
        let (number, rest) = fqn.strip_prefix("chained_")?.split_once('.')?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then_some(rest)
    };
    fqn.starts_with(prefix) || unchained().is_some_and(|rest| rest.starts_with(prefix))
}

/// An entry of `old` for `new`, with its places.
fn again(old: &CheckpointMetadata, entry: &Entry, new: &mut CheckpointMetadata) -> Option<Entry> {
    let mut place = |placement: Placement| {
        let file = new.intern_file(old.file(placement.file)?)?;
        let encoding = new.intern_encoding(old.encoding(&placement)?)?;
        Some(Placement { file, encoding, ..placement })
    };
    let mut entry = entry.clone();
    match &mut entry {
        Entry::Tensor(tensor) => {
            for at in 0..tensor.chunks.len() {
                if let Some(placement) = tensor.chunks.get(at).and_then(|chunk| chunk.placement) {
                    tensor.chunks.place(at, place(placement)?);
                }
            }
        }
        Entry::Object(object) => {
            if let Some(placement) = object.placement {
                object.placement = Some(place(placement)?);
            }
        }
        _ => {}
    }
    Some(entry)
}

#[cfg(test)]
mod tests {
    use super::begins_with;

    #[test]
    fn numbers_of_optimizers_are_no_part_of_a_key() {
        for key in ["optimizer.state.exp_avg.w", "chained_0.optimizer.state", "optimizer"] {
            assert!(begins_with(key, "optimizer"), "{key}");
        }
        for key in ["chained_.optimizer", "chained_x.optimizer", "chained_0", "w.optimizer"] {
            assert!(!begins_with(key, "optimizer"), "{key}");
        }
        assert!(begins_with("chained_1.optimizer.w", "chained_1."));
        assert!(!begins_with("chained_0.optimizer.w", "chained_1."));
    }
}
