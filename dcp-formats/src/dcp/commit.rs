//! Commits a checkpoint: replaces `.metadata` atomically after everything it refers to exists.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::{SaveSession, WriteReport};
use dcp_core::error::StorageOp;
use dcp_core::metadata::{Entry, Placement};
use dcp_core::storage::{Claim, PutMode, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Payload, Storage, StorageError,
    StorageErrorKind,
};
use futures_util::future::join;
use futures_util::stream;
use futures_util::{StreamExt as _, TryStreamExt as _};

use super::names::{METADATA, sidecar as sidecar_name};
use super::sidecar::{Sidecar, SidecarFile};
use super::writer::Options;

/// The data files of a save.
pub(super) struct Files {
    pub(super) reports: Vec<WriteReport>,
    /// The files that this writer wrote, whose lengths the storage returned.
    pub(super) own: HashSet<Key>,
}

/// `seen` is the CRC-32 of the `.metadata` at the start of the session: the inner `None` when there
/// was none, the outer when it is unknown.
///
/// On failure, removes the files of `reports`, unless the request that replaces `.metadata` may
/// still take effect.
pub(super) async fn commit(
    storage: &dyn Storage,
    options: &Options,
    session: SaveSession,
    seen: Option<Option<u32>>,
    metadata: &CheckpointMetadata,
    files: Files,
) -> Result<(), CheckpointError> {
    // Held to the end, so that the next saver does not list files that are removed here.
    let claim = match &session.claim {
        Some(claim) => Some(Arc::clone(claim)),
        None => claim(storage).await?,
    };
    let reported = files.reports.iter().flat_map(|report| &report.files);
    let written: Vec<Key> = reported.map(|(key, _)| key.clone()).collect();
    let claim = claim.as_deref();
    let committed = try_commit(storage, claim, options, session, seen, metadata, files).await;
    match &committed {
        Err(CheckpointError::Storage(error)) if error.is_retryable() => {}
        Err(_) => remove_unknown(storage, written, &[]).await,
        Ok(()) => {}
    }
    committed
}

async fn try_commit(
    storage: &dyn Storage,
    claim: Option<&dyn Claim>,
    options: &Options,
    session: SaveSession,
    seen: Option<Option<u32>>,
    metadata: &CheckpointMetadata,
    Files { reports, own }: Files,
) -> Result<(), CheckpointError> {
    let world_size = u32::try_from(reports.len()).unwrap_or(u32::MAX);
    let mut noted = noted_files(&reports, &carried_archives(metadata));
    let mut files: Vec<_> = reports.into_iter().flat_map(|report| report.files).collect();
    files.sort_unstable();
    if let Err(error) = check_files(storage, metadata, &files, &own).await {
        // A saver that committed meanwhile has removed these files as stale.
        refuse_overtaken(storage, seen).await?;
        return Err(error);
    }

    let bytes = crate::metadata::encode(metadata, options.profile)?;
    let crc32 = crc32fast::hash(&bytes);
    let mut kept: HashSet<Key> = files.iter().map(|(key, _)| key.clone()).collect();
    let sidecar = sidecar_name(crc32).map_err(StorageError::from)?;
    let mut content_of_sidecar = None;
    if options.sidecar {
        noted.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let content = Sidecar::new(world_size, session.generation, crc32, noted)
            .with_origin(&options.origin)
            .with_completed_by(options.completed_by.as_ref())
            .encode()?;
        content_of_sidecar = Some(content);
        kept.insert(sidecar.clone());
    }
    let replaced = async {
        let noted = async {
            let Some(content) = content_of_sidecar else { return Ok(()) };
            storage.put(&sidecar, Payload::from(content), PutMode::Overwrite).await.map(drop)
        };
        if replaces_by_version(storage) {
            // Both end, so that a sidecar which is not needed can be removed.
            let (noted, unchanged) = join(noted, refuse_overtaken(storage, seen)).await;
            unchanged.and(noted)?;
        } else {
            noted.await?;
            refuse_overtaken(storage, seen).await?;
        }
        put_metadata(storage, claim, &bytes).await
    };
    if let Err(error) = replaced.await {
        if options.sidecar && !error.is_retryable() {
            remove_unknown(storage, vec![sidecar], &[]).await;
        }
        return Err(error.into());
    }

    let stale = session.stale.into_iter().filter(|key| !kept.contains(key)).collect();
    remove_unknown(storage, stale, &bytes).await;
    Ok(())
}

/// Returns the places of archives of quantized tensors. A writer has no place for their scales, so what
/// is listed as one was written as an object: a reader compares its elements, and the checksum of the
/// writer is that of the whole archive.
fn carried_archives(metadata: &CheckpointMetadata) -> HashSet<(&Key, u64)> {
    let tensors = metadata.iter().filter_map(|(_, entry)| entry.as_tensor());
    let chunks = tensors.filter(|tensor| tensor.dtype.is_quantized()).flat_map(|t| t.chunks.iter());
    let place =
        |placement: Placement| Some((metadata.file(placement.file)?, placement.byte_offset));
    chunks.filter_map(|chunk| place(chunk.placement?)).collect()
}

/// Returns the entries of the sidecar for the files of all ranks; no checksum of `carried` archives.
fn noted_files(reports: &[WriteReport], carried: &HashSet<(&Key, u64)>) -> Vec<SidecarFile> {
    let of_rank = |(rank, report): (usize, &WriteReport)| -> Vec<SidecarFile> {
        let noted = |(key, byte_len): &(Key, u64)| {
            let mut checksums = report.checksums.get(key).cloned().unwrap_or_default();
            checksums.retain(|(offset, _)| !carried.contains(&(key, *offset)));
            SidecarFile::new(key, *byte_len)
                .with_rank(u32::try_from(rank).ok())
                .with_sha256(report.sha256.get(key))
                .with_chunks(checksums)
        };
        report.files.iter().map(noted).collect()
    };
    reports.iter().enumerate().flat_map(of_rank).collect()
}

/// Replaces the `.metadata` of a checkpoint whose other files stay, and its [`Sidecar`] with it.
/// Returns whether there was a sidecar.
///
/// `seen` is the `.metadata` from which the new one was made; `claim` comes from [`claim`].
///
/// # Errors
///
/// When another save replaced it since, and when the storage fails. The existing one then stays.
pub async fn replace_metadata(
    storage: &dyn Storage,
    claim: Option<&dyn Claim>,
    seen: &[u8],
    bytes: &Bytes,
) -> Result<bool, CheckpointError> {
    let (old, new) = (crc32fast::hash(seen), crc32fast::hash(bytes));
    let old_name = sidecar_name(old).map_err(StorageError::from)?;
    let new_name = sidecar_name(new).map_err(StorageError::from)?;
    let sidecar = match storage.read_all(&old_name).await {
        // A damaged sidecar has nothing worth keeping.
        Ok(bytes) => Some(Sidecar::decode(&bytes, old).ok()),
        Err(error) if error.kind() == StorageErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let kept = sidecar.clone().flatten();
    let replaced = async {
        if let Some(sidecar) = kept.clone() {
            let content = sidecar.for_metadata(new).encode()?;
            storage.put(&new_name, Payload::from(content), PutMode::Overwrite).await?;
        }
        if current(storage).await?.as_deref() != Some(seen) {
            return Err(CheckpointError::from(overtaken("it was replaced since it was read")?));
        }
        Ok(put_metadata(storage, claim, bytes).await?)
    };
    let replaced = replaced.await;
    if sidecar.is_some() && old != new {
        let stale = if replaced.is_ok() { old_name } else { new_name };
        remove_unknown(storage, vec![stale], &[]).await;
    }
    replaced.map(|()| kept.is_some())
}

/// The name of the [`Sidecar`] of a `.metadata` with these bytes.
///
/// # Errors
///
/// Never; every such name is a key.
pub fn sidecar_of(metadata: &[u8]) -> Result<Key, StorageError> {
    Ok(sidecar_name(crc32fast::hash(metadata))?)
}

/// Fails when `.metadata` changed since the session began.
async fn refuse_overtaken(
    storage: &dyn Storage,
    seen: Option<Option<u32>>,
) -> Result<(), StorageError> {
    let Some(seen) = seen else { return Ok(()) };
    let now = current(storage).await?.map(|bytes| crc32fast::hash(&bytes));
    if now == seen {
        return Ok(());
    }
    Err(overtaken("another save was committed here since this one began")?)
}

fn overtaken(message: &str) -> Result<StorageError, StorageError> {
    let key = Key::new(METADATA)?;
    let error = StorageError::new(StorageErrorKind::Conflict, StorageOp::Put, Some(key));
    Ok(error.with_message(message))
}

/// Keeps other savers from replacing `.metadata` until it is dropped, if the storage supports that.
///
/// # Errors
///
/// [`Conflict`](StorageErrorKind::Conflict) when another saver holds the claim.
pub async fn claim(storage: &dyn Storage) -> Result<Option<Arc<dyn Claim>>, StorageError> {
    if !storage.capabilities().claims {
        return Ok(None);
    }
    storage.claim(&Key::new(METADATA)?).await.map(Some)
}

/// Whether a claim replaces the version of `.metadata` that it noted. Then nothing needs to be read
/// after it, or directly before the replacement: the storage notices every change in between.
pub(super) fn replaces_by_version(storage: &dyn Storage) -> bool {
    let capabilities = storage.capabilities();
    capabilities.claims && capabilities.conditional_put
}

async fn put_metadata(
    storage: &dyn Storage,
    claim: Option<&dyn Claim>,
    bytes: &Bytes,
) -> Result<(), StorageError> {
    let key = Key::new(METADATA)?;
    let replaced = match claim {
        Some(claim) => claim.replace(bytes.clone().into()).await,
        None => storage.put(&key, bytes.clone().into(), PutMode::Overwrite).await,
    };
    let Err(error) = replaced else { return Ok(()) };
    // The request may have succeeded although its reply was lost.
    let found = if error.is_retryable() { storage.read_all(&key).await.ok() } else { None };
    if found.as_ref() == Some(bytes) { Ok(()) } else { Err(error) }
}

/// Reads the current `.metadata`.
pub(super) async fn current(storage: &dyn Storage) -> Result<Option<Bytes>, StorageError> {
    match storage.read_all(&Key::new(METADATA)?).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the checkpoint of this `.metadata` still lacks the file `last` that completes it, as its
/// [`Sidecar`] records.
pub(super) async fn is_unfinished(
    storage: &dyn Storage,
    metadata: &[u8],
    last: &Key,
) -> Result<bool, StorageError> {
    let crc32 = crc32fast::hash(metadata);
    let sidecar = match storage.read_all(&sidecar_name(crc32)?).await {
        Ok(bytes) => Sidecar::decode(&bytes, crc32).ok(),
        Err(error) if error.kind() == StorageErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let waits_for = sidecar.and_then(|sidecar| sidecar.completed_by);
    Ok(waits_for.as_deref() == Some(last.as_str()) && !storage.contains(last).await?)
}

/// Fails unless every file that a placement refers to was written and has its length.
async fn check_files(
    storage: &dyn Storage,
    metadata: &CheckpointMetadata,
    files: &[(Key, u64)],
    own: &HashSet<Key>,
) -> Result<(), CheckpointError> {
    if let Some((fqn, _)) = metadata.iter().find(|(_, entry)| !is_placed(entry)) {
        let problem = format!("{fqn:?} was planned, but not all of it is written by any rank");
        return Err(FormatError::new("checkpoint", problem).into());
    }
    let written: HashMap<&Key, u64> = files.iter().map(|(key, len)| (key, *len)).collect();
    if let Some(missing) = metadata.files().iter().find(|key| !written.contains_key(key)) {
        let problem = "no rank reported that it wrote this file";
        return Err(FormatError::new("checkpoint", problem).in_file(missing.as_str(), 0).into());
    }
    let others: Vec<_> = files.iter().filter(|(key, _)| !own.contains(key)).collect();
    let listed = if others.len() > 1 { lens(storage).await? } else { HashMap::new() };
    let (listed, is_listed) = (&listed, |key: &Key| listed.contains_key(key));
    let (found, unlisted): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|(key, _)| is_listed(key));
    for (key, len) in found {
        check_len(key, *len, listed.get(key).copied().unwrap_or(0))?;
    }
    let stats = unlisted
        .into_iter()
        .map(|(key, len)| async move { storage.stat(key).await.map(|meta| (key, *len, meta)) })
        .collect::<Vec<_>>();
    let mut stats = stream::iter(stats).buffer_unordered(parallelism(storage));
    while let Some(stat) = stats.next().await {
        let (key, len, meta) = stat?;
        check_len(key, len, meta.byte_len)?;
    }
    Ok(())
}

fn check_len(key: &Key, len: u64, stored: u64) -> Result<(), FormatError> {
    if stored == len {
        return Ok(());
    }
    let problem = format!("it has {stored} bytes, {len} were written");
    Err(FormatError::new("data file", problem).in_file(key.as_str(), stored.min(len)))
}

/// The lengths of the files in the folder, with one request; none where the storage cannot list.
async fn lens(storage: &dyn Storage) -> Result<HashMap<Key, u64>, StorageError> {
    if !storage.capabilities().listable {
        return Ok(HashMap::new());
    }
    storage.list_files(None).map_ok(|meta| (meta.key, meta.byte_len)).try_collect().await
}

fn is_placed(entry: &Entry) -> bool {
    match entry {
        Entry::Tensor(tensor) => tensor.chunks.iter().all(|chunk| chunk.placement.is_some()),
        Entry::Object(object) => object.placement.is_some(),
        _ => false,
    }
}

/// Removes those of the files to which the current `.metadata` does not refer, such as the files of
/// a failed save. A commit that reported failure may still have succeeded, so this reads
/// `.metadata` again. Best effort: failures are logged, and nothing is removed when `.metadata`
/// cannot be read.
pub async fn remove_unreferenced(storage: &dyn Storage, keys: Vec<Key>) {
    remove_unknown(storage, keys, &[]).await;
}

/// Removes files to which the current `.metadata` does not refer; none if that cannot be
/// determined. `.metadata` with the checksum `known` refers to none of them.
async fn remove_unknown(storage: &dyn Storage, mut keys: Vec<Key>, known: &[u8]) {
    if keys.is_empty() {
        return;
    }
    let now = match current(storage).await {
        Ok(Some(bytes)) if *bytes == *known => None,
        Ok(now) => now,
        Err(error) => return tracing::warn!(%error, "files that are not needed are left"),
    };
    if let Some(bytes) = now {
        let sidecar = sidecar_name(crc32fast::hash(&bytes)).ok();
        match crate::metadata::decode(&bytes) {
            Ok(metadata) => {
                let needed: HashSet<&Key> = metadata.files().iter().chain(&sidecar).collect();
                keys.retain(|key| !needed.contains(key));
            }
            Err(error) => return tracing::warn!(%error, "files that are not needed are left"),
        }
    }
    if !keys.is_empty() {
        remove(storage, keys).await;
    }
}

/// Removes files. What cannot be removed is logged and stays unreferenced.
async fn remove(storage: &dyn Storage, keys: Vec<Key>) {
    if let Err(error) = storage.delete(&keys).await {
        tracing::warn!(%error, "cannot remove all files that are no longer needed");
    }
}

fn parallelism(storage: &dyn Storage) -> usize {
    usize::from(storage.capabilities().parallelism.max(1))
}
