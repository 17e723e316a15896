//! Files whose length is not the one that their own contents require.
//!
//! A killed save, a full disk and a copy that broke off leave a file under its final name. Each kind
//! of file states its length in one place: the header at the front of safetensors, the directory at the
//! end of a zip archive, the pickles at the front of the stream from before PyTorch 1.6. Reading that
//! place takes two or three small requests, so every file of a checkpoint is compared, also those that
//! no index names: a resume needs `optimizer.pt` as much as the model.
//!
//! A file of another kind passes. To call it damaged would have a deletion of what is incomplete delete it.

use std::collections::HashSet;
use std::fmt;

use dcp_core::format::Place;
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::header_claims::HeaderClaims;
use crate::indexed_tensors::IndexedTensors;
use crate::safetensors::{ENDING, PREFIX_LEN, header_len};
use crate::torch_save::{FILE_ENDINGS, check_stream, is_torch_save};
use crate::torch_zip::{ParseStep, Sparse, check_end};

/// The maximum number of files that are read to find a pointer of Git LFS.
const SMALL_FILES_MAX: usize = 64;
/// Bytes at the start of a file that show its kind.
const HEAD_BYTES: u64 = 512;
/// Bytes at the end of an archive that hold its end records: 22 bytes and a comment of 64 KiB, 76 of
/// zip64 before them.
const TAIL_BYTES: u64 = (64 << 10) + 98;
/// The first line of a pointer of Git LFS, which stands where the file was not fetched.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A file that is shorter or longer than its own contents require.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IncompleteFile {
    /// The file, relative to the folder of the checkpoint.
    pub file: Key,
    /// The reason, as the predicate of a sentence about the file.
    pub problem: String,
}

impl fmt::Display for IncompleteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file, self.problem)
    }
}

/// A sentence about incomplete files; `None` where there are none.
#[must_use]
pub fn describe(files: &[IncompleteFile]) -> Option<String> {
    let first = files.first()?;
    Some(match files.len() - 1 {
        0 => first.to_string(),
        more => format!("{first}; {more} more files are incomplete"),
    })
}

/// The first of these files that is incomplete, as a sentence.
pub(crate) async fn first_incomplete(
    storage: &dyn Storage,
    files: &[ObjectMeta],
    tensors: &IndexedTensors,
) -> Result<Option<String>, StorageError> {
    Ok(incomplete_among(storage, files, false, tensors).await?.first().map(ToString::to_string))
}

/// Compares these files; `by_content`: a single file is opened by its contents, whatever its name ends in.
pub(crate) async fn incomplete_among(
    storage: &dyn Storage,
    files: &[ObjectMeta],
    by_content: bool,
    tensors: &IndexedTensors,
) -> Result<Vec<IncompleteFile>, StorageError> {
    let looks: Vec<_> = files.iter().map(|meta| look(storage, meta, by_content, tensors)).collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let found: Vec<_> = stream::iter(looks).buffered(parallelism).try_collect().await?;
    Ok(found.into_iter().flatten().collect())
}

/// The first pointer of Git LFS among the files at `place` and below; at most 64 small files are read.
///
/// # Errors
///
/// When the storage fails.
pub async fn lfs_pointer(place: &Place) -> Result<Option<Key>, StorageError> {
    let storage = &**place.storage();
    let files: Vec<ObjectMeta> = match place.file() {
        Some(file) => vec![storage.stat(file).await?],
        None => place.listing().objects().to_vec(),
    };
    let range = LFS_POINTER.len() as u64..=LFS_POINTER_MAX;
    let small = files.into_iter().filter(|meta| range.contains(&meta.byte_len));
    for meta in small.take(SMALL_FILES_MAX) {
        if is_lfs_pointer(&storage.read_range(&meta.key, 0..LFS_POINTER.len() as u64).await?) {
            return Ok(Some(meta.key));
        }
    }
    Ok(None)
}

/// Whether a file is a pointer of Git LFS; a missing file is none. A longer file than a pointer is not read.
///
/// # Errors
///
/// When the storage fails.
pub async fn is_pointer_file(storage: &dyn Storage, file: &Key) -> Result<bool, StorageError> {
    let byte_len = match storage.stat(file).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let is_small = (LFS_POINTER.len() as u64..=LFS_POINTER_MAX).contains(&byte_len);
    Ok(is_small && is_lfs_pointer(&storage.read_range(file, 0..LFS_POINTER.len() as u64).await?))
}

/// Whether the first bytes of a file are those of a pointer of Git LFS.
#[must_use]
pub fn is_lfs_pointer(head: &[u8]) -> bool {
    head.starts_with(LFS_POINTER)
}

/// The maximum length of such a pointer, in bytes.
pub(crate) const LFS_POINTER_MAX: u64 = 1024;
/// The predicate of a sentence about a pointer.
pub const LFS_PROBLEM: &str = "is a pointer of Git LFS, not the file: fetch it with `git lfs pull`";

/// The predicate of a sentence about a file whose first bytes `head` are zeros, as a machine that lost
/// its power leaves them.
#[must_use]
pub fn unwritten(head: &[u8]) -> Option<&'static str> {
    let is_zero = head.len() >= 8 && head.iter().all(|byte| *byte == 0);
    is_zero.then_some("begins with zeros: its contents were never written")
}

/// Whether a file has the name of a kind that is compared.
pub(crate) fn is_named(key: &Key) -> bool {
    let name = key.file_name();
    name.ends_with(ENDING) || FILE_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

async fn look(
    storage: &dyn Storage,
    meta: &ObjectMeta,
    by_content: bool,
    tensors: &IndexedTensors,
) -> Result<Option<IncompleteFile>, StorageError> {
    let problem = problem(storage, meta, by_content, tensors).await?;
    Ok(problem.map(|problem| IncompleteFile { file: meta.key.clone(), problem }))
}

async fn problem(
    storage: &dyn Storage,
    meta: &ObjectMeta,
    by_content: bool,
    tensors: &IndexedTensors,
) -> Result<Option<String>, StorageError> {
    let (key, byte_len) = (&meta.key, meta.byte_len);
    if byte_len == 0 {
        return Ok(Some("is empty".to_owned()));
    }
    let head = storage.read_range(key, 0..byte_len.min(HEAD_BYTES)).await?;
    if is_lfs_pointer(&head) {
        return Ok(Some(LFS_PROBLEM.to_owned()));
    }
    if let Some(problem) = unwritten(&head) {
        return Ok(Some(problem.to_owned()));
    }
    let is_safetensors = key.file_name().ends_with(ENDING) || tensors.has_file(key);
    if is_safetensors && !(by_content && is_torch_save(&head)) {
        return safetensors_problem(storage, meta, &head, tensors).await;
    }
    if head.starts_with(b"PK\x03\x04") {
        let start = byte_len.saturating_sub(TAIL_BYTES);
        let tail = storage.read_range(key, start..byte_len).await?;
        // A zip64 record may be further in front; the end record is not.
        return Ok(match check_end(&Sparse::tail(byte_len, &tail)) {
            Ok(ParseStep::Ready(()) | ParseStep::Need(_)) => None,
            Err(error) => Some(format!("was cut short, or is damaged: {}", error.problem())),
        });
    }
    match check_stream(storage, key, &head).await {
        Ok(()) => Ok(None),
        Err(CheckpointError::Storage(error)) => Err(error),
        Err(error) => Ok(Some(format!("was cut short, or is damaged: {error}"))),
    }
}

async fn safetensors_problem(
    storage: &dyn Storage,
    meta: &ObjectMeta,
    head: &[u8],
    tensors: &IndexedTensors,
) -> Result<Option<String>, StorageError> {
    let prefix = head.get(..PREFIX_LEN as usize).unwrap_or(head);
    let json_len = match header_len(prefix, meta.byte_len) {
        Ok(len) => len,
        Err(error) => return Ok(Some(format!("has no whole header: {}", error.problem()))),
    };
    let json = storage.read_range(&meta.key, PREFIX_LEN..PREFIX_LEN + json_len).await?;
    let mut placed = tensors.of_file(&meta.key);
    let claims = match HeaderClaims::read(&json, &mut |name| placed.see(name)) {
        Ok(claims) => claims,
        Err(error) => return Ok(Some(format!("has no whole header: {error}"))),
    };
    let needed = PREFIX_LEN.saturating_add(json_len).saturating_add(claims.end);
    let found = meta.byte_len;
    if needed != found {
        return Ok(Some(format!("has {found} bytes, its header needs {needed}")));
    }
    if claims.problem.is_some() || !placed.lacks_any() {
        return Ok(claims.problem);
    }
    let mut names = HashSet::new();
    // It was read before.
    let again = HeaderClaims::read(&json, &mut |name| _ = names.insert(name.to_owned()));
    Ok(again.ok().and_then(|_| placed.problem(&names)))
}
