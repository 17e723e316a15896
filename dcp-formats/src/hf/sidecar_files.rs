//! Writes files next to a model's weights, such as its configuration, at the right time.

use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

use crate::staged::Staged;

/// The configuration, without which transformers does not recognize a model.
pub const CONFIG_NAME: &str = "config.json";
/// The name under which a replaced model's configuration is kept until the new one is in place.
pub const CONFIG_ASIDE: &str = "config.json.replaced";

/// The files to write next to the weights.
///
/// Without a model to replace, the files precede the index. Otherwise they would pair with another
/// model's weights, so `config.json` is removed before the index changes and written last: no
/// loader ever combines the weights of one model with the configuration of another. Meanwhile the
/// old configuration is in [`CONFIG_ASIDE`].
pub(super) struct SidecarFiles<'a> {
    storage: &'a dyn Storage,
    /// The files to write, and whether each exists.
    files: Vec<(Key, Bytes, bool)>,
    /// The existing configuration, if it changes.
    old_config: Option<Bytes>,
    /// Whether a configuration is set aside.
    aside: bool,
    /// Whether a model or a file is replaced.
    late: bool,
    /// The new files, staged.
    staged: Staged,
    /// The old configuration, staged for a rollback.
    back: Staged,
    /// Files created before the index.
    made: Vec<Key>,
}

impl<'a> SidecarFiles<'a> {
    /// Examines the existing files. `replaces` says whether there is a model.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) for an existing file that may not be
    /// overwritten, and when the storage fails.
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

    /// The steps before the index is in place.
    pub(super) async fn prepare(&mut self) -> Result<(), StorageError> {
        if !self.late {
            for (key, bytes, _) in &self.files {
                let payload = Payload::from(bytes.clone());
                let put = self.storage.put(key, payload, PutMode::Create).await;
                let is_others =
                    |error: &StorageError| error.kind() == StorageErrorKind::AlreadyExists;
                // A failed request may have created the file.
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
        self.storage.delete(&[config]).await
    }

    /// Reverts [`prepare`](Self::prepare) when the index did not change.
    pub(super) async fn undo(&mut self) {
        self.staged.abort().await;
        let made = std::mem::take(&mut self.made);
        if let Err(error) = self.storage.delete(&made).await {
            tracing::warn!(%error, "cannot remove all files that were written");
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
        self.storage.delete(&[aside()?]).await
    }

    /// The steps after the new index is in place and the old weights are removed.
    pub(super) async fn finish(&mut self) -> Result<(), StorageError> {
        let mut waiting: Vec<Key> = self.staged.keys().cloned().collect();
        // The configuration comes last.
        waiting.sort_by_key(|key| key.as_str() == CONFIG_NAME);
        for key in waiting {
            let bytes =
                self.files.iter().find(|(file, ..)| *file == key).map(|(_, b, _)| b.clone());
            let published = self.staged.publish(self.storage, &key).await;
            // The new weights are in place already, so another try is worthwhile.
            if let (Err(_), Some(bytes)) = (published, bytes) {
                self.storage.put(&key, Payload::from(bytes), PutMode::Overwrite).await?;
            }
        }
        self.back.abort().await;
        if self.aside
            && let Err(error) = self.storage.delete(&[aside()?]).await
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
