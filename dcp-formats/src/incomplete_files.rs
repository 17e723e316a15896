//! Files whose length is not the one that their own contents require.
//!
//! A killed save, a full disk and a copy that broke off leave a file under its final name. Each kind
//! of file states its length in one place: the header at the front of safetensors, the directory at the
//! end of a zip archive, the pickles at the front of the stream from before PyTorch 1.6. Reading that
//! place takes two or three small requests, so every file of a checkpoint is compared, also those that
//! no index names: a resume needs `optimizer.pt` as much as the model.
//!
//! A file of another kind passes, or of a format that this build does not have. To call it damaged would have a
//! deletion of what is incomplete delete it.

#[cfg(feature = "safetensors")]
mod safetensors;
#[cfg(feature = "torch-save")]
mod torch_save;

use std::fmt;

use dcp_core::format::Place;
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::indexed_tensors::IndexedTensors;

pub(crate) use torch_save::is_torch_save;

/// The maximum number of files that are read to find a pointer of Git LFS.
const SMALL_FILES_MAX: usize = 64;
/// Bytes at the start of a file that show its kind.
const HEAD_BYTES: u64 = 512;
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
    safetensors::is_named(name) || torch_save::is_named(name)
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
    let is_safetensors = safetensors::is_named(key.file_name()) || tensors.has_file(key);
    if is_safetensors && !(by_content && is_torch_save(&head)) {
        return safetensors::problem(storage, meta, &head, tensors).await;
    }
    torch_save::problem(storage, meta, &head).await
}

#[cfg(not(feature = "safetensors"))]
mod safetensors {
    use super::{IndexedTensors, ObjectMeta, Storage, StorageError};

    pub(super) fn is_named(_: &str) -> bool {
        false
    }

    pub(super) async fn problem(
        _: &dyn Storage,
        _: &ObjectMeta,
        _: &[u8],
        _: &IndexedTensors,
    ) -> Result<Option<String>, StorageError> {
        Ok(None)
    }
}

#[cfg(not(feature = "torch-save"))]
mod torch_save {
    use super::{ObjectMeta, Storage, StorageError};

    pub(crate) fn is_torch_save(_: &[u8]) -> bool {
        false
    }

    pub(super) fn is_named(_: &str) -> bool {
        false
    }

    pub(super) async fn problem(
        _: &dyn Storage,
        _: &ObjectMeta,
        _: &[u8],
    ) -> Result<Option<String>, StorageError> {
        Ok(None)
    }
}
