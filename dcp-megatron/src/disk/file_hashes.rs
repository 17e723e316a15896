//! SHA-256 hashes of the files of a checkpoint, for `integrity.json`.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use dcp_core::digest::{Sha256, hex, sha256};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, FormatError, Key, Storage};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use indexmap::IndexMap;
use serde::Serialize;
use tokio::runtime::Handle;

use crate::disk::config::METADATA_JSON;
use crate::disk::recovery::RECORD;

/// The name of the manifest of file hashes (Megatron-Core 0.17.1 and later).
pub const INTEGRITY_FILE: &str = "integrity.json";
/// Bytes of a file to hold at once.
const SEGMENT_BYTES: u64 = 4 << 20;
/// Files to read at once.
const FILES_AT_ONCE: usize = 4;

/// A SHA-256.
pub(crate) type Digest = [u8; 32];

#[derive(Serialize)]
struct Manifest {
    algorithm: &'static str,
    files: IndexMap<String, String>,
}

/// The manifest of all files directly in the folder but those in `stale`, which are about to be
/// removed, with a `metadata.json` of these contents, whatever is there now. The hashes that are
/// `known` are not made again.
///
/// Every file is read from the storage, so the manifest describes the stored bytes, not the sent ones.
pub(crate) async fn manifest(
    storage: &dyn Storage,
    stale: &HashSet<Key>,
    known: BTreeMap<Key, Digest>,
    metadata_json: &str,
) -> Result<Bytes, CheckpointError> {
    let mut keys = Vec::new();
    let mut objects = storage.list_files(None);
    while let Some(meta) = objects.next().await {
        let meta = meta?;
        let name = meta.key.as_str();
        let other = [INTEGRITY_FILE, METADATA_JSON, RECORD].contains(&name);
        if !other && !stale.contains(&meta.key) {
            keys.push((meta.key, meta.byte_len));
        }
    }
    let there: HashSet<Key> = keys.iter().map(|(key, _)| key.clone()).collect();
    keys.retain(|(key, _)| !known.contains_key(key));
    let known = known.into_iter().filter(|(key, _)| there.contains(key));
    let hashed = hashes(storage, keys).await?.into_iter().chain(known);
    let mut files: Vec<_> = hashed.map(|(key, hash)| (key.to_string(), hex(&hash))).collect();
    files.push((METADATA_JSON.to_owned(), hex(&sha256(metadata_json))));
    files.sort_unstable();
    let manifest = Manifest { algorithm: "sha256", files: files.into_iter().collect() };
    let json = serde_json::to_vec_pretty(&manifest)
        .map_err(|error| FormatError::new("integrity manifest", error.to_string()))?;
    Ok(json.into())
}

/// The SHA-256 of files of these lengths, several at a time.
pub(crate) async fn hashes(
    storage: &dyn Storage,
    files: Vec<(Key, u64)>,
) -> Result<BTreeMap<Key, Digest>, CheckpointError> {
    let hashes = files.into_iter().map(|(key, byte_len)| async move {
        let digest = hash(storage, &key, byte_len).await?;
        Ok::<_, CheckpointError>((key, digest))
    });
    stream::iter(hashes).buffer_unordered(FILES_AT_ONCE).try_collect().await
}

/// The SHA-256 of a file. A part is hashed, on another thread, while the next one is read.
pub(crate) async fn hash(
    storage: &dyn Storage,
    key: &Key,
    byte_len: u64,
) -> Result<Digest, CheckpointError> {
    let starts = (0..byte_len.div_ceil(SEGMENT_BYTES)).map(|part| part * SEGMENT_BYTES);
    let parts = starts.map(|at| storage.read_range(key, at..byte_len.min(at + SEGMENT_BYTES)));
    let mut parts = stream::iter(parts).buffered(2);
    let mut hasher = Sha256::new();
    while let Some(part) = parts.next().await {
        hasher = update(hasher, part?).await?;
    }
    Ok(hasher.finish())
}

/// Hashes some more bytes where other tasks need not wait for it.
async fn update(mut hasher: Sha256, bytes: Bytes) -> Result<Sha256, CheckpointError> {
    let work = move || {
        hasher.update(&bytes);
        hasher
    };
    match Handle::try_current() {
        // It is lost only when the runtime shuts down.
        Ok(runtime) => runtime
            .spawn_blocking(work)
            .await
            .map_err(|error| CheckpointError::Plugin(Box::new(error))),
        Err(_) => Ok(work()),
    }
}
