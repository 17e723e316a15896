//! `integrity.json`: the SHA-256 of every file of a checkpoint (Megatron-Core 0.17.1 and later).

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use bytes::Bytes;
use dcp_core::{CheckpointError, FormatError, Key, Storage, StorageExt as _};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use indexmap::IndexMap;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::form::METADATA_JSON;

/// The name of the manifest of file hashes (Megatron-Core 0.17.1 and later).
pub const INTEGRITY_FILE: &str = "integrity.json";
/// Bytes of a file to hold at once.
const SEGMENT_BYTES: u64 = 4 << 20;
/// Files to read at once.
const FILES_AT_ONCE: usize = 4;

#[derive(Serialize)]
struct Manifest {
    algorithm: &'static str,
    files: IndexMap<String, String>,
}

/// The manifest of all files directly in the folder but those in `stale`, which are about to be
/// removed, with a `metadata.json` of these contents, whatever is there now. The hashes that are
/// `known` are not made again.
///
/// Every file is read from the storage, so the manifest tells what is stored, not what was sent.
pub(crate) async fn manifest(
    storage: &dyn Storage,
    stale: &HashSet<Key>,
    known: HashMap<Key, String>,
    metadata_json: &str,
) -> Result<Bytes, CheckpointError> {
    let mut keys = Vec::new();
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let meta = meta?;
        let name = meta.key.as_str();
        let other = name.contains('/') || name == INTEGRITY_FILE || name == METADATA_JSON;
        if !other && !stale.contains(&meta.key) {
            keys.push((meta.key, meta.byte_len));
        }
    }
    let there: HashSet<Key> = keys.iter().map(|(key, _)| key.clone()).collect();
    keys.retain(|(key, _)| !known.contains_key(key));
    let known = known.into_iter().filter(|(key, _)| there.contains(key));
    let hashed = hashes(storage, keys).await?.into_iter().chain(known);
    let mut files: Vec<_> = hashed.map(|(key, hash)| (key.to_string(), hash)).collect();
    files.push((METADATA_JSON.to_owned(), hex(&Sha256::digest(metadata_json))));
    files.sort_unstable();
    let manifest = Manifest { algorithm: "sha256", files: files.into_iter().collect() };
    let json = serde_json::to_vec_pretty(&manifest)
        .map_err(|error| FormatError::new("integrity manifest", error.to_string()))?;
    Ok(json.into())
}

/// The SHA-256 of files of these lengths, each in lower-case hexadecimal.
pub(crate) async fn hashes(
    storage: &dyn Storage,
    files: Vec<(Key, u64)>,
) -> Result<HashMap<Key, String>, CheckpointError> {
    let hashes = files.into_iter().map(|(key, byte_len)| async move {
        let digest = hash(storage, &key, byte_len).await?;
        Ok::<_, CheckpointError>((key, digest))
    });
    stream::iter(hashes).buffer_unordered(FILES_AT_ONCE).try_collect().await
}

/// The SHA-256 of a file, in lower-case hexadecimal.
pub(crate) async fn hash(
    storage: &dyn Storage,
    key: &Key,
    byte_len: u64,
) -> Result<String, CheckpointError> {
    let mut hasher = Sha256::new();
    let mut at = 0;
    while at < byte_len {
        let end = byte_len.min(at + SEGMENT_BYTES);
        hasher.update(&storage.read_range(key, at..end).await?);
        at = end;
    }
    Ok(hex(&hasher.finalize()))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().fold(String::new(), |mut text, byte| {
        // Writing to a `String` does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
