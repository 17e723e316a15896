//! Removing tensors from a checkpoint, such as the optimizer's state of one that is kept for its
//! weights.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::{
    CheckpointMetadata, Entry, FormatError, Key, Placement, Storage, StorageError,
    StorageErrorKind, StorageExt as _,
};
use dcp_formats::dcp::{remove_unreferenced, replace_metadata};
use dcp_formats::metadata::{Profile, decode_all, encode};

use crate::checkpoint::{MegatronCheckpoint, MegatronFormat, OpenOptions};
use crate::common::COMMON_OBJECT;
use crate::error::MegatronError;
use crate::integrity::write_integrity;
use crate::writer::integrity::INTEGRITY;

const METADATA: &str = ".metadata";

/// What was removed from a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// Tensors and objects, by their keys.
    pub entries: Vec<Arc<str>>,
    /// Files in which nothing else was.
    pub files: Vec<Key>,
}

/// Removes the tensors and objects whose keys begin with `prefix`, and the files in which nothing
/// else is: with `separation_hint`, all that they took.
///
/// The replacement of `.metadata` is the one step in which they go. A process that dies before
/// leaves the checkpoint as it was, one that dies after it at most files that nothing refers to.
/// An `integrity.json` is removed first and written again last. Megatron-Core itself (0.16) leaves
/// a broken checkpoint on current PyTorch.
///
/// # Errors
///
/// When the checkpoint cannot be opened or is not of `torch_dist`; when tensors would be left that
/// were saved flattened, whose shapes only the old `.metadata` can say; and when the storage fails.
pub async fn remove_sharded_tensors(
    storage: &Arc<dyn Storage>,
    prefix: &str,
) -> Result<Removed, MegatronError> {
    let checkpoint = MegatronCheckpoint::open(storage, &OpenOptions::default()).await?;
    let storage = checkpoint.storage();
    let refuse = |problem: String| MegatronError::from(FormatError::new("checkpoint", problem));
    if !matches!(checkpoint.format(), MegatronFormat::TorchDist { .. }) {
        let problem = "tensors are removed from checkpoints of torch_dist only; convert it first";
        return Err(refuse(problem.to_owned()));
    }
    let key = Key::new(METADATA).map_err(StorageError::from)?;
    let seen = storage.read_all(&key).await?;
    let in_file = |error: FormatError| error.in_file(METADATA, 0);
    let decoded = decode_all(&seen).map_err(in_file)?;
    let goes = |fqn: &str| fqn.starts_with(prefix) && fqn != COMMON_OBJECT;
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
                refuse(format!("{fqn:?} lies in a file that the index does not name"))
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
    let integrity = Key::new(INTEGRITY).map_err(StorageError::from)?;
    let had_integrity = match storage.stat(&integrity).await {
        Ok(_) => true,
        Err(error) if error.kind() == StorageErrorKind::NotFound => false,
        Err(error) => return Err(error.into()),
    };
    if had_integrity {
        storage.delete(&integrity).await?;
    }
    replace_metadata(&**storage, &seen, &bytes).await?;
    remove_unreferenced(&**storage, removed.files.clone()).await;
    if had_integrity {
        write_integrity(storage).await?;
    }
    Ok(removed)
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
