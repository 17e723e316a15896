//! Files beside the weights of a model, such as its configuration, and when each of them changes.

use bytes::Bytes;
use dcp_core::{
    Key, Payload, PutMode, Storage, StorageError, StorageErrorKind, StorageExt as _, StorageOp,
};

use crate::staged::Staged;

/// The configuration, without which transformers takes no folder for a model.
pub const CONFIG_NAME: &str = "config.json";
/// Where the configuration of a replaced model is kept until the new one is in its place.
pub const CONFIG_ASIDE: &str = "config.json.replaced";

/// What is to change beside the weights.
///
/// Where no model is replaced, the files come before the index. Otherwise they would be beside the
/// weights of another model for a while, so `config.json` goes before the index changes and comes
/// back as the last of all: in between there is none, and no loader takes weights of one model with
/// the configuration of another. The old one is in [`CONFIG_ASIDE`] as long as it is needed.
pub(super) struct SidecarFiles<'a> {
    storage: &'a dyn Storage,
    /// What is to be written, and whether a file of that name is there.
    files: Vec<(Key, Bytes, bool)>,
    /// The configuration that is there, where it is to change.
    old_config: Option<Bytes>,
    /// Whether there is a configuration aside.
    aside: bool,
    /// Whether a model or a file is replaced.
    late: bool,
    /// The new files, while they wait.
    staged: Staged,
    /// The old configuration, in case it has to come back.
    back: Staged,
    /// Files that were made before the index.
    made: Vec<Key>,
}

impl<'a> SidecarFiles<'a> {
    /// Looks at what is there. `replaces` says whether there is a model.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) for a file that is there when nothing is
    /// to be overwritten, and when the storage fails.
    pub(super) async fn look(
        storage: &'a dyn Storage,
        wanted: &[(Key, Bytes)],
        (replaces, overwrite): (bool, bool),
    ) -> Result<Self, StorageError> {
        let mut beside = Self {
            storage,
            files: Vec::new(),
            old_config: None,
            aside: false,
            late: replaces,
            staged: Staged::new(),
            back: Staged::new(),
            made: Vec::new(),
        };
        for (key, bytes) in wanted {
            let there = match storage.stat(key).await {
                Ok(meta) => Some(meta.byte_len),
                Err(error) if error.kind() == StorageErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            let is_config = key.as_str() == CONFIG_NAME;
            if is_config {
                beside.aside = storage.contains(&aside()?).await?;
            }
            let Some(byte_len) = there else {
                beside.files.push((key.clone(), bytes.clone(), false));
                continue;
            };
            if !overwrite {
                let kind = StorageErrorKind::AlreadyExists;
                return Err(StorageError::new(kind, StorageOp::Put, Some(key.clone())));
            }
            if byte_len == bytes.len() as u64 || is_config {
                let old = storage.read_range(key, 0..byte_len).await?;
                if old == *bytes {
                    continue;
                }
                beside.old_config = is_config.then_some(old).or(beside.old_config);
            }
            beside.files.push((key.clone(), bytes.clone(), true));
            beside.late = true;
        }
        Ok(beside)
    }

    /// What is to be done before the index is put into place.
    pub(super) async fn prepare(&mut self) -> Result<(), StorageError> {
        if !self.late {
            for (key, bytes, _) in &self.files {
                let payload = Payload::from(bytes.clone());
                let put = self.storage.put(key, payload, PutMode::Create).await;
                let is_others =
                    |error: &StorageError| error.kind() == StorageErrorKind::AlreadyExists;
                // One that failed may be there all the same.
                if !put.as_ref().is_err_and(is_others) {
                    self.made.push(key.clone());
                }
                put?;
            }
            return Ok(());
        }
        for (key, bytes, there) in &self.files {
            let mode = if *there { PutMode::Overwrite } else { PutMode::Create };
            self.staged.add(self.storage, key, bytes.clone(), mode).await?;
        }
        let Some(old) = self.old_config.clone() else { return Ok(()) };
        let config = config()?;
        self.back.add(self.storage, &config, old.clone(), PutMode::Overwrite).await?;
        self.storage.put(&aside()?, Payload::from(old), PutMode::Overwrite).await?;
        self.aside = true;
        self.storage.delete(&config).await
    }

    /// Puts back what [`prepare`](Self::prepare) did, when the index did not change.
    pub(super) async fn undo(&mut self) {
        self.staged.abort().await;
        for key in std::mem::take(&mut self.made) {
            if let Err(error) = self.storage.delete(&key).await {
                tracing::warn!(file = %key, %error, "cannot remove a file");
            }
        }
        if self.old_config.is_some()
            && let Err(error) = self.put_config_back().await
        {
            tracing::warn!(
                %error,
                "the configuration cannot be put back; it is in {CONFIG_ASIDE}"
            );
        }
        self.back.abort().await;
    }

    async fn put_config_back(&mut self) -> Result<(), StorageError> {
        let config = config()?;
        let staged = self.back.keys().next().is_some();
        if staged && !self.storage.contains(&config).await? {
            self.back.publish(self.storage, &config).await?;
        }
        self.storage.delete(&aside()?).await
    }

    /// What is to be done when the new index is in place and the old weights are gone.
    pub(super) async fn finish(&mut self) -> Result<(), StorageError> {
        let mut waiting: Vec<Key> = self.staged.keys().cloned().collect();
        // The configuration last.
        waiting.sort_by_key(|key| key.as_str() == CONFIG_NAME);
        for key in waiting {
            let bytes =
                self.files.iter().find(|(file, ..)| *file == key).map(|(_, b, _)| b.clone());
            let published = self.staged.publish(self.storage, &key).await;
            // The weights are the new ones already, so it is worth another try.
            if let (Err(_), Some(bytes)) = (published, bytes) {
                self.storage.put(&key, Payload::from(bytes), PutMode::Overwrite).await?;
            }
        }
        self.back.abort().await;
        if self.aside
            && let Err(error) = self.storage.delete(&aside()?).await
        {
            tracing::warn!(%error, "{CONFIG_ASIDE} is no longer needed and cannot be removed");
        }
        Ok(())
    }
}

fn config() -> Result<Key, StorageError> {
    Ok(Key::new(CONFIG_NAME)?)
}

fn aside() -> Result<Key, StorageError> {
    Ok(Key::new(CONFIG_ASIDE)?)
}
