//! The commit record of an overwrite: with it, a checkpoint whose overwriting process died is
//! readable.
//!
//! `metadata.json`, `common.pt` and `integrity.json` have one name each, and `.metadata` another:
//! no storage replaces four files at once. The record holds the first three as they belong to the
//! old `.metadata` and to the new one. Whichever is there says which of the two counts, so the
//! replacement of `.metadata` is the commit.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::digest::sha256;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    FolderEntry, FolderStream, ObjectMeta, ObjectStream, ReadInto, ReadOutcome, ReadRequest,
    WholeObject,
};
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{Key, PlanError, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, stream};

use crate::disk::common_state::COMMON_FILE;
use crate::disk::config::METADATA_JSON;
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::small_file::read_small;

/// The record's name. Neither PyTorch nor Megatron-Core looks at it.
pub(crate) const RECORD: &str = ".dcp-commit";
/// The reason why a half-replaced folder is only read.
pub const HALF_REPLACED: &str = "the process that replaced this checkpoint died before it was done; \
                                 save it again with overwriting on, or convert it to another place";
/// The first bytes of a record.
pub(crate) const MAGIC: [u8; 4] = *b"dmc1";
const METADATA: &str = ".metadata";

/// The files of fixed names that belong to one `.metadata`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fixed {
    /// SHA-256 of the `.metadata`.
    pub(crate) metadata: [u8; 32],
    pub(crate) json: Bytes,
    /// `None` where there is no `common.pt`.
    pub(crate) common: Option<Bytes>,
    /// `None` where it is the one in the folder, if any.
    pub(crate) integrity: Option<Bytes>,
}

pub(crate) fn digest(metadata: &[u8]) -> [u8; 32] {
    sha256(metadata)
}

/// The record of these.
pub(crate) fn encode(all: &[Fixed]) -> Bytes {
    let mut out = MessageWriter::new(MAGIC);
    out.number(all.len() as u64);
    for one in all {
        out.bytes(&one.metadata);
        out.bytes(&one.json);
        for file in [&one.common, &one.integrity] {
            out.number(file.is_some().into());
            out.bytes(file.as_deref().unwrap_or_default());
        }
    }
    out.finish()
}

fn decode(bytes: &[u8]) -> Result<Vec<Fixed>, PlanError> {
    let mut input = MessageReader::new(bytes, MAGIC)?;
    let mut all = Vec::new();
    for _ in 0..input.count()? {
        let metadata = <[u8; 32]>::try_from(input.bytes()?).map_err(|_| {
            PlanError::message("the record of an overwrite", "a SHA-256 is not 32 bytes long")
        })?;
        let json = Bytes::copy_from_slice(input.bytes()?);
        let mut file = || {
            let is_there = input.number()? != 0;
            let bytes = Bytes::copy_from_slice(input.bytes()?);
            Ok::<_, PlanError>(is_there.then_some(bytes))
        };
        let (common, integrity) = (file()?, file()?);
        all.push(Fixed { metadata, json, common, integrity });
    }
    input.finish()?;
    Ok(all)
}

/// The folder as it is to be read: where a process died while it overwrote a checkpoint there, with
/// the `metadata.json`, `common.pt` and `integrity.json` that belong to the `.metadata` that is
/// there; the folder itself otherwise.
///
/// # Errors
///
/// When the storage fails.
pub async fn recovered(storage: &Arc<dyn Storage>) -> Result<Arc<dyn Storage>, StorageError> {
    let record = match read_small(&**storage, RECORD).await {
        // A record is written as a file. A link that is not followed is the user's.
        Err(error) if error.kind() == StorageErrorKind::Link => None,
        record => record?,
    };
    let Some(record) = record else { return Ok(Arc::clone(storage)) };
    let all = match decode(&record) {
        Ok(all) => all,
        Err(error) => {
            tracing::warn!(%error, "{RECORD} is damaged, and the folder is read without it");
            return Ok(Arc::clone(storage));
        }
    };
    let Some(metadata) = read_small(&**storage, METADATA).await? else {
        return Ok(Arc::clone(storage));
    };
    let digest = digest(&metadata);
    Ok(match all.into_iter().find(|one| one.metadata == digest) {
        Some(fixed) => Arc::new(Recovered { inner: Arc::clone(storage), fixed }),
        // Another program has replaced it since.
        None => Arc::clone(storage),
    })
}

#[derive(Debug)]
struct Recovered {
    inner: Arc<dyn Storage>,
    fixed: Fixed,
}

/// The source of the file under a name.
enum Found<'a> {
    Inner,
    Kept(&'a Bytes),
    Absent,
}

impl Recovered {
    fn find(&self, name: &str) -> Found<'_> {
        match name {
            METADATA_JSON => Found::Kept(&self.fixed.json),
            COMMON_FILE => self.fixed.common.as_ref().map_or(Found::Absent, Found::Kept),
            INTEGRITY_FILE => self.fixed.integrity.as_ref().map_or(Found::Inner, Found::Kept),
            RECORD => Found::Absent,
            _ => Found::Inner,
        }
    }
}

/// The files that the record may hold.
const NAMES: [&str; 3] = [METADATA_JSON, COMMON_FILE, INTEGRITY_FILE];

impl Recovered {
    /// The files that are read from the record.
    fn kept(&self) -> Vec<Result<ObjectMeta, StorageError>> {
        let kept = NAMES.into_iter().filter_map(|name| match self.find(name) {
            Found::Kept(bytes) => Some((name, bytes.len() as u64)),
            _ => None,
        });
        kept.map(|(name, len)| Ok(ObjectMeta::new(Key::new(name)?, len))).collect()
    }

    /// The files that are not read from the folder.
    fn hidden(&self) -> Vec<&'static str> {
        let all = NAMES.into_iter().chain([RECORD]);
        all.filter(|name| !matches!(self.find(name), Found::Inner)).collect()
    }
}

fn absent(op: StorageOp, key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))
}

#[async_trait]
impl Storage for Recovered {
    dcp_core::forward_storage!(
        inner: capabilities, put, start_upload, delete, claim, leftovers, remove_empty_folders
    );

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        match self.find(key.as_str()) {
            Found::Inner => self.inner.stat(key).await,
            Found::Kept(bytes) => Ok(ObjectMeta::new(key.clone(), bytes.len() as u64)),
            Found::Absent => Err(absent(StorageOp::Stat, key)),
        }
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let bytes = match self.find(key.as_str()) {
            Found::Inner => return self.inner.read(key, request).await,
            Found::Kept(bytes) => bytes,
            Found::Absent => return Err(absent(StorageOp::Read, key)),
        };
        let fill = |read: ReadInto| {
            let mut buffer = read.buffer;
            let part = usize::try_from(read.byte_offset).ok().and_then(|start| {
                let end = start.checked_add(buffer.len())?;
                bytes.get(start..end)
            });
            let part = part.ok_or_else(|| {
                StorageError::new(StorageErrorKind::Truncated, StorageOp::Read, Some(key.clone()))
            })?;
            buffer.copy_from_slice(part);
            Ok(buffer)
        };
        let buffers = request.ranges.into_iter().map(fill).collect::<Result<_, StorageError>>()?;
        Ok(ReadOutcome::new(buffers))
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        match self.find(key.as_str()) {
            Found::Inner => self.inner.read_whole(key, max_bytes).await,
            Found::Kept(bytes) if bytes.len() as u64 > max_bytes => {
                let kind = StorageErrorKind::TooLarge;
                Err(StorageError::new(kind, StorageOp::Read, Some(key.clone())))
            }
            Found::Kept(bytes) => {
                let meta = ObjectMeta::new(key.clone(), bytes.len() as u64);
                Ok(WholeObject::new(meta, bytes.clone()))
            }
            Found::Absent => Err(absent(StorageOp::Read, key)),
        }
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let inner = self.inner.list(folder);
        if folder.is_some() {
            // All of them lie directly in the folder.
            return inner;
        }
        let hidden = self.hidden();
        let others = inner.filter(move |meta| {
            let is_hidden = meta.as_ref().is_ok_and(|meta| hidden.contains(&meta.key.as_str()));
            async move { !is_hidden }
        });
        Box::pin(stream::iter(self.kept()).chain(others))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let inner = self.inner.list_folder(folder);
        if folder.is_some() {
            return inner;
        }
        let hidden = self.hidden();
        let others = inner.filter(move |entry| {
            let is_hidden = match entry {
                Ok(FolderEntry::Object(meta)) => hidden.contains(&meta.key.as_str()),
                _ => false,
            };
            async move { !is_hidden }
        });
        let kept = self.kept().into_iter().map(|meta| meta.map(FolderEntry::Object));
        Box::pin(stream::iter(kept).chain(others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_a_damaged_one_is_refused() {
        let file = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
        let all = [
            Fixed { metadata: digest(b"a"), json: "{}".into(), common: file("c"), integrity: None },
            Fixed { metadata: digest(b"b"), json: "".into(), common: None, integrity: file("") },
        ];
        let record = encode(&all);
        assert_eq!(decode(&record).unwrap(), all);
        for len in 0..record.len() {
            assert!(decode(&record[..len]).is_err(), "{len}");
        }
    }
}
