//! Rewrites the `.metadata` of a checkpoint in the form that other programs read.

use std::sync::Arc;

use dcp_core::metadata::{Entry, Placement};
use dcp_core::storage::StorageExt;
use dcp_core::text::counted;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageError, StorageErrorKind,
};
use dcp_formats::dcp::{claim, replace_metadata};
use dcp_formats::metadata::{Profile, ProfileChoice, decode, encode};
use serde::Serialize;

use crate::error::JobError;
use crate::listing::formats::explain;

const METADATA: &str = ".metadata";

/// The result of rewriting a `.metadata`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MetadataRewrite {
    /// The old form: the name of a [`Profile`].
    pub from: &'static str,
    /// The new form.
    pub to: &'static str,
    /// Whether the form changed; if not, nothing was written.
    pub changed: bool,
    /// Whether this was a dry run, which writes nothing.
    pub dry_run: bool,
    /// Tensors and objects in it.
    pub entries: usize,
    /// Its old size in bytes.
    pub bytes_before: u64,
    /// Its new size in bytes.
    pub bytes_after: u64,
    /// The contents that the new form cannot express. No load needs any of them.
    pub dropped: Vec<String>,
    /// The oldest PyTorch that reads the data, if it is newer than the one that the form is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_torch: Option<&'static str>,
    /// Whether dcp's sidecar was rewritten too; PyTorch's own checkpoints have none.
    pub sidecar: bool,
}

/// Rewrites the `.metadata` of the checkpoint in `storage` atomically. Tensors, objects and their
/// placements stay the same, which is checked before anything is written.
///
/// A `dry_run` does everything but write.
///
/// # Errors
///
/// When there is no `.metadata`, it cannot be read, or the new form cannot express it, such as
/// compressed chunks for OLMo-core; when a save replaces it meanwhile; when the storage fails. The
/// old one is then unchanged.
pub async fn rewrite_metadata(
    storage: &Arc<dyn Storage>,
    choice: ProfileChoice,
    dry_run: bool,
) -> Result<MetadataRewrite, JobError> {
    let key = Key::new(METADATA).map_err(StorageError::from)?;
    let bytes = match storage.read_all(&key).await {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == StorageErrorKind::NotFound => {
            let message = explain(storage).await?;
            return Err(CheckpointError::NotACheckpoint { message }.into());
        }
        Err(error) => return Err(error.into()),
    };
    let in_file = |error: FormatError| error.in_file(METADATA, 0);
    let from = Profile::of(&bytes).map_err(in_file)?;
    let to = choice.for_index_of(from);
    let metadata = decode(&bytes).map_err(in_file)?;
    let mut report = MetadataRewrite {
        from: from.name(),
        to: to.name(),
        changed: from != to,
        dry_run,
        entries: metadata.len(),
        bytes_before: bytes.len() as u64,
        bytes_after: bytes.len() as u64,
        dropped: Vec::new(),
        oldest_torch: oldest_torch(&metadata, to),
        sidecar: false,
    };
    if from == to {
        return Ok(report);
    }
    let new = encode(&metadata, to).map_err(|error| {
        JobError::no_form("the metadata", format!("has no {to} form: {}", error.problem()))
    })?;
    let again = decode(&new)?;
    refuse_changes(&metadata, &again)?;
    report.bytes_after = new.len() as u64;
    report.dropped = dropped(&metadata, &again);
    if !dry_run {
        let claim = claim(&**storage).await?;
        report.sidecar = replace_metadata(&**storage, claim.as_deref(), &bytes, &new).await?;
    }
    Ok(report)
}

/// PyTorch reads stream extensions, such as compression, since 2.7.
fn oldest_torch(metadata: &CheckpointMetadata, to: Profile) -> Option<&'static str> {
    let is_transformed = metadata.encodings().iter().any(|one| !one.transforms.is_empty());
    let is_older = matches!(to, Profile::Compat | Profile::Torch2_3);
    (is_transformed && is_older).then_some("2.7")
}

/// Fails when `new` differs in anything that a load depends on.
fn refuse_changes(old: &CheckpointMetadata, new: &CheckpointMetadata) -> Result<(), JobError> {
    let differs = old
        .iter()
        .zip(new.iter())
        .find(|((fqn, a), (other, b))| fqn != other || !same_entry(old, a, new, b));
    match differs {
        None if old.len() == new.len() => Ok(()),
        None => Err(lost("the number of names")),
        Some(((fqn, _), _)) => Err(lost(&format!("{fqn:?}"))),
    }
}

fn lost(what: &str) -> JobError {
    JobError::no_form(what, "would be another one in the new form; nothing was written")
}

fn same_entry(old: &CheckpointMetadata, a: &Entry, new: &CheckpointMetadata, b: &Entry) -> bool {
    let same_place = |a: Option<Placement>, b: Option<Placement>| match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => {
            old.file(a.file) == new.file(b.file)
                && old.encoding(&a) == new.encoding(&b)
                && (a.byte_offset, a.byte_len) == (b.byte_offset, b.byte_len)
        }
        _ => false,
    };
    // An entry without a path is written under its name.
    let same_path = a.path().is_none_or(|path| b.path() == Some(path));
    same_path
        && match (a, b) {
            (Entry::Object(a), Entry::Object(b)) => same_place(a.placement, b.placement),
            (Entry::Tensor(a), Entry::Tensor(b)) => {
                a.dtype == b.dtype
                    && a.shape == b.shape
                    && a.chunks.len() == b.chunks.len()
                    && a.chunks.iter().zip(b.chunks.iter()).all(|(a, b)| {
                        (a.offsets, a.sizes) == (b.offsets, b.sizes)
                            && same_place(a.placement, b.placement)
                    })
            }
            _ => false,
        }
}

/// Lists the contents of `old` that `new` lacks.
fn dropped(old: &CheckpointMetadata, new: &CheckpointMetadata) -> Vec<String> {
    let strides = |metadata: &CheckpointMetadata| {
        let tensors = metadata.iter().filter_map(|(_, entry)| entry.as_tensor());
        tensors.filter(|tensor| tensor.properties.strides.is_some()).count()
    };
    let mut dropped = Vec::new();
    let lost = strides(old).saturating_sub(strides(new));
    if lost > 0 {
        let tensors = counted(lost as u64, "tensor");
        dropped.push(format!("the strides that {tensors} had in the memory of a rank"));
    }
    let (before, after) = (old.provenance(), new.provenance());
    let parts = [
        ("the version", &before.version, &after.version),
        ("the place of the first save", &before.checkpoint_id, &after.checkpoint_id),
        ("the id of the save", &before.save_id, &after.save_id),
    ];
    for (what, before, after) in parts {
        if let (Some(text), None) = (before, after) {
            dropped.push(format!("{what}, {text:?}"));
        }
    }
    dropped
}
