//! The `integrity.json` manifest: parsed, verified and written (Megatron-Core 0.17.1 and later).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{CheckpointError, FormatError, Key, Rank, Storage, StorageError, StorageErrorKind};
use dcp_jobs::JobOptions;
use dcp_jobs::integrity::{Problem, ProblemKind};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value as Json;

use crate::disk::config::METADATA_JSON;
use crate::disk::file_hashes::{INTEGRITY_FILE, hash, manifest};
use dcp_core::digest::hex;
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};

/// A longer manifest than any: a million files, in bytes.
const BYTES_MAX: u64 = 256 << 20;
/// Hexadecimal digits of a SHA-256.
const DIGITS: usize = 64;
/// Hexadecimal digits of a hash that a message shows.
const SHOWN: usize = 16;

/// The parsed content of a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Manifest {
    /// The hash algorithm; `sha256` is the only one there ever was.
    pub algorithm: String,
    /// Hashes by the names of files, in lower-case hexadecimal.
    pub files: BTreeMap<String, String>,
}

impl Manifest {
    /// Takes a manifest apart.
    ///
    /// # Errors
    ///
    /// When it is no JSON object of an algorithm and hashes by name.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::new("integrity manifest", problem);
        if is_lfs_pointer(json) {
            return Err(bad(format!("it {LFS_PROBLEM}")));
        }
        let json: Json = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        let algorithm = json.get("algorithm").and_then(Json::as_str);
        let algorithm = algorithm.ok_or_else(|| bad("it has no \"algorithm\"".to_owned()))?;
        let files = json.get("files").and_then(Json::as_object);
        let files = files.ok_or_else(|| bad("it has no \"files\"".to_owned()))?;
        let hash = |(name, hash): (&String, &Json)| {
            let hash = hash.as_str().map(str::to_ascii_lowercase);
            let hash = hash.ok_or_else(|| bad(format!("the hash of {name:?} is not text")))?;
            Ok((name.clone(), hash))
        };
        let files = files.iter().map(hash).collect::<Result<_, FormatError>>()?;
        Ok(Self { algorithm: algorithm.to_owned(), files })
    }
}

/// Reads every file that the manifest of a checkpoint names and compares its SHA-256; `None` when
/// there is no manifest. A manifest that is damaged or of an unknown algorithm is a problem, too;
/// files that it does not name are none.
///
/// # Errors
///
/// When the storage fails for reasons of its own.
pub async fn verify_integrity(
    storage: &Arc<dyn Storage>,
    job: &JobOptions,
) -> Result<Option<Vec<Problem>>, CheckpointError> {
    verify_manifest(storage, true, job).await
}

/// Verifies files as [`verify_integrity`] does; unless `deep`, only the manifest itself and whether
/// the files are there.
pub(crate) async fn verify_manifest(
    storage: &Arc<dyn Storage>,
    deep: bool,
    job: &JobOptions,
) -> Result<Option<Vec<Problem>>, CheckpointError> {
    verify_files(storage, deep, (0, 1), job).await
}

/// Verifies the files of one rank of those that share them; `share` is the rank and the number of
/// ranks.
pub(crate) async fn verify_share(
    storage: &Arc<dyn Storage>,
    share: (Rank, u32),
    job: &JobOptions,
) -> Result<Option<Vec<Problem>>, CheckpointError> {
    verify_files(storage, true, share, job).await
}

async fn verify_files(
    storage: &Arc<dyn Storage>,
    deep: bool,
    (rank, ranks): (Rank, u32),
    job: &JobOptions,
) -> Result<Option<Vec<Problem>>, CheckpointError> {
    let key = Key::new(INTEGRITY_FILE).map_err(StorageError::from)?;
    let byte_len = match storage.stat(&key).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let damaged = |error: FormatError| {
        let message = error.in_file(INTEGRITY_FILE, 0).to_string();
        Ok(Some(vec![problem(ProblemKind::Corrupt, INTEGRITY_FILE, message)]))
    };
    if byte_len > BYTES_MAX {
        let says = format!("it has {byte_len} bytes, more than it can have");
        return damaged(FormatError::new("integrity manifest", says));
    }
    let manifest = match Manifest::parse(&storage.read_range(&key, 0..byte_len).await?) {
        Ok(manifest) => manifest,
        Err(error) => return damaged(error),
    };
    if manifest.algorithm != "sha256" {
        let message = format!(
            "files were hashed by {:?}, which is not known: \"sha256\" is",
            manifest.algorithm.chars().take(DIGITS).collect::<String>()
        );
        return Ok(Some(vec![problem(ProblemKind::Index, INTEGRITY_FILE, message)]));
    }
    let checks: Vec<_> = manifest
        .files
        .into_iter()
        .skip(rank as usize)
        .step_by(ranks.max(1) as usize)
        .map(|(name, hash)| async move { check(&**storage, name, deep.then_some(&*hash)).await })
        .collect();
    let checks = stream::iter(checks).buffered(job.parallelism.max(1));
    let problems: Vec<Option<Problem>> = checks.try_collect().await?;
    Ok(Some(problems.into_iter().flatten().collect()))
}

async fn check(
    storage: &dyn Storage,
    name: String,
    expected: Option<&str>,
) -> Result<Option<Problem>, CheckpointError> {
    let Ok(key) = Key::new(&name) else {
        let message = format!("{name:?} is not a name of a file in the checkpoint");
        return Ok(Some(problem(ProblemKind::Index, INTEGRITY_FILE, message)));
    };
    let found = async {
        let byte_len = storage.stat(&key).await?.byte_len;
        match expected {
            Some(_) => hash(storage, &key, byte_len).await.map(|digest| Some(hex(&digest))),
            None => Ok(None),
        }
    };
    let found = match found.await {
        Ok(found) => found,
        Err(CheckpointError::Storage(error)) if error.kind() == StorageErrorKind::NotFound => {
            let message = format!("{INTEGRITY_FILE} names it, but it does not exist");
            return Ok(Some(problem(ProblemKind::MissingFile, &name, message)));
        }
        Err(error) => {
            let message = format!("it cannot be read: {}", error_chain(&error));
            return Ok(Some(problem(ProblemKind::Corrupt, &name, message)));
        }
    };
    let (Some(found), Some(expected)) = (found, expected) else { return Ok(None) };
    if found == expected {
        return Ok(None);
    }
    let start = |hash: &str| hash.chars().take(SHOWN).collect::<String>();
    let message = format!(
        "its SHA-256 begins with {}, {INTEGRITY_FILE} says {}",
        start(&found),
        start(expected)
    );
    Ok(Some(problem(ProblemKind::Corrupt, &name, message)))
}

pub(crate) fn problem(kind: ProblemKind, file: &str, message: String) -> Problem {
    let mut problem = Problem::default();
    problem.kind = kind;
    problem.file = Some(file.to_owned());
    problem.message = message;
    problem
}

/// Writes the manifest of a checkpoint that has none, or another one in place of what it has: of
/// every file directly in the folder, as it is now.
///
/// # Errors
///
/// When there is no `metadata.json`, and when the storage fails.
pub async fn write_integrity(storage: &Arc<dyn Storage>) -> Result<(), CheckpointError> {
    let config = Key::new(METADATA_JSON).map_err(StorageError::from)?;
    let config = storage.read_all(&config).await?;
    let config = String::from_utf8_lossy(&config);
    let manifest = manifest(&**storage, &HashSet::new(), BTreeMap::new(), &config).await?;
    let key = Key::new(INTEGRITY_FILE).map_err(StorageError::from)?;
    storage.put(&key, manifest.into(), PutMode::Overwrite).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_that_is_none_is_refused() {
        for (json, said) in [
            ("", "EOF"),
            ("[]", "algorithm"),
            (r#"{"algorithm": 3, "files": {}}"#, "algorithm"),
            (r#"{"algorithm": "sha256"}"#, "files"),
            (r#"{"algorithm": "sha256", "files": []}"#, "files"),
            (r#"{"algorithm": "sha256", "files": {"a": null}}"#, "\"a\""),
        ] {
            let error = Manifest::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(said), "{json}: {error}");
        }
    }
}
