//! The state of a folder before a commit, so that a failed commit can restore it.

use bytes::Bytes;
use dcp_core::storage::{Claim, PutMode, StorageExt as _};
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::Staged;
use futures_util::StreamExt as _;

use super::form::{COMMON_FILE, METADATA_JSON};
use super::put;
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::recovery::{self, Fixed};
use crate::disk::small_file::read_small;

const METADATA: &str = ".metadata";
/// The files of fixed names, as they were.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) metadata_json: Option<Bytes>,
    pub(super) common: Option<Bytes>,
    integrity: Option<Bytes>,
    metadata: Option<Bytes>,
}

/// Files that must belong to one `metadata.json`: a mix of two saves would be a third checkpoint.
const COMMITTED_FILES: [&str; 2] = [METADATA, COMMON_FILE];

impl Before {
    pub(super) async fn look(storage: &dyn Storage) -> Result<Self, StorageError> {
        Ok(Self {
            metadata_json: read_small(storage, METADATA_JSON).await?,
            common: read_small(storage, COMMON_FILE).await?,
            integrity: read_small(storage, INTEGRITY_FILE).await?,
            metadata: read_small(storage, METADATA).await?,
        })
    }

    /// Stages the files of the earlier checkpoint again. A restore then only renames them, which
    /// works on a full storage too.
    pub(super) async fn stage(&self, storage: &dyn Storage) -> Result<Staged, StorageError> {
        let mut staged = Staged::new();
        for name in [METADATA, COMMON_FILE, INTEGRITY_FILE, METADATA_JSON] {
            let Some(bytes) = self.get(name).cloned() else { continue };
            let key = Key::new(name)?;
            if let Err(error) = staged.add(storage, &key, bytes, PutMode::Overwrite).await {
                staged.abort().await;
                return Err(error);
            }
        }
        Ok(staged)
    }

    /// Whether there was a checkpoint with this `metadata.json`.
    pub(super) fn is_described_as(&self, json: &str) -> bool {
        self.metadata.is_some() && self.metadata_json.as_deref() == Some(json.as_bytes())
    }

    /// The files of fixed names of the checkpoint that was there.
    pub(super) fn fixed(&self) -> Option<Fixed> {
        Some(Fixed {
            metadata: recovery::digest(self.metadata.as_ref()?),
            json: self.metadata_json.clone()?,
            common: self.common.clone(),
            integrity: self.integrity.clone(),
        })
    }

    pub(super) fn has_integrity(&self) -> bool {
        self.integrity.is_some()
    }

    fn get(&self, name: &str) -> Option<&Bytes> {
        match name {
            METADATA_JSON => self.metadata_json.as_ref(),
            COMMON_FILE => self.common.as_ref(),
            INTEGRITY_FILE => self.integrity.as_ref(),
            _ => self.metadata.as_ref(),
        }
    }

    /// Removes one of the files, if it was there.
    pub(super) async fn remove(
        &self,
        storage: &dyn Storage,
        name: &str,
    ) -> Result<(), StorageError> {
        match self.get(name) {
            Some(_) => delete(storage, name).await,
            None => Ok(()),
        }
    }

    /// Puts back what was there before a commit that may have put `ours` into `.metadata`; not
    /// where there is a third one's by now. While it is not all there, there is no
    /// `metadata.json`. Whether it is.
    pub(super) async fn restore(
        &self,
        storage: &dyn Storage,
        (claim, staged): (Option<&dyn Claim>, &mut Staged),
        ours: Option<&Bytes>,
    ) -> bool {
        if let Err(error) = self.try_restore(storage, (claim, staged), ours).await {
            tracing::warn!(
                %error,
                "what a failed commit replaced cannot be put back; without metadata.json this \
                 folder is not a checkpoint to Megatron-Core"
            );
            return false;
        }
        true
    }

    async fn try_restore(
        &self,
        storage: &dyn Storage,
        (claim, staged): (Option<&dyn Claim>, &mut Staged),
        ours: Option<&Bytes>,
    ) -> Result<(), StorageError> {
        let now = read_small(storage, METADATA).await?;
        let known = now == self.metadata || (now.is_some() && now.as_ref() == ours);
        if !known {
            return Ok(());
        }
        // Of a mix, metadata.json is removed first; of an unchanged checkpoint it stays.
        if !self.is_as_it_was(storage, &COMMITTED_FILES).await? {
            delete(storage, METADATA_JSON).await?;
            for name in &COMMITTED_FILES {
                self.put_back(storage, (claim, staged), name).await?;
            }
        }
        // Without a manifest of its files the checkpoint is whole nonetheless.
        if let Err(error) = self.put_back(storage, (None, staged), INTEGRITY_FILE).await {
            tracing::warn!(%error, "{INTEGRITY_FILE} cannot be put back");
        }
        self.put_back(storage, (None, staged), METADATA_JSON).await
    }

    async fn put_back(
        &self,
        storage: &dyn Storage,
        (claim, staged): (Option<&dyn Claim>, &mut Staged),
        name: &str,
    ) -> Result<(), StorageError> {
        let Some(bytes) = self.get(name).cloned() else { return delete(storage, name).await };
        if read_small(storage, name).await?.as_ref() == Some(&bytes) {
            return Ok(());
        }
        if let (Some(claim), METADATA) = (claim, name) {
            match claim.replace(bytes.clone().into()).await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == StorageErrorKind::Conflict => return Err(error),
                // A full storage has no room for the bytes once more; what is staged needs none.
                Err(_) => {}
            }
        }
        let key = Key::new(name)?;
        match staged.publish(storage, &key).await {
            Ok(()) => Ok(()),
            Err(_) => put(storage, &key, &bytes, PutMode::Overwrite).await,
        }
    }

    /// Whether these files are as they were.
    async fn is_as_it_was(
        &self,
        storage: &dyn Storage,
        names: &[&str],
    ) -> Result<bool, StorageError> {
        for name in names {
            if read_small(storage, name).await?.as_ref() != self.get(name) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

async fn delete(storage: &dyn Storage, name: &str) -> Result<(), StorageError> {
    storage.delete(&[Key::new(name)?]).await
}

/// Whether a `metadata.json` names a backend whose files this writer cannot write.
pub(super) fn names_other_backend(json: &[u8]) -> bool {
    let parsed: Result<serde_json::Value, _> = serde_json::from_slice(json);
    let backend = parsed.as_ref().ok().and_then(|members| members.get("sharded_backend"));
    backend.and_then(|name| name.as_str()).is_some_and(|name| name != "torch_dist")
}

/// Data files that Megatron-Core wrote with a `separation_hint`: `{hint}__{rank}_{n}.distcp`.
pub(super) async fn hinted_files(storage: &dyn Storage) -> Result<Vec<Key>, CheckpointError> {
    let Some(bytes) = read_small(storage, METADATA).await? else { return Ok(Vec::new()) };
    // A damaged index names nothing; what it named then stays where it is.
    let Ok(metadata) = dcp_formats::metadata::decode(&bytes) else { return Ok(Vec::new()) };
    let mut there = Vec::new();
    let mut objects = storage.list_files(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        let name = key.as_str();
        let hinted = name.ends_with(".distcp") && !name.starts_with("__");
        if hinted && metadata.files().contains(&key) {
            there.push(key);
        }
    }
    Ok(there)
}
