//! Targets of jobs, and the steps that publish them. Each step consumes a [`Verified`]; no other
//! module of the crate writes to a storage.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{CheckpointError, DType, Key, Payload, Storage, StorageError};
use dcp_formats::dcp::prepare_tensor_file;
use dcp_formats::hf::{HfFile, HfPlan, HfWriteOptions, HfWritten, PendingFolder, choose_folder};
use dcp_formats::safetensors::{self, SafetensorsItem};
use dcp_formats::torch_save::TorchSavePlan;
use dcp_formats::{FileOptions, PendingFile, prepare_headed_file};
use indexmap::IndexMap;

use crate::error::JobError;
use crate::group::JobGroup;
use crate::integrity::checked_source::{CheckedSource, Verified};
use crate::write::on_ranks::{gather_files, share_of, was_not_exchanged};
use crate::write::stored_data_source::CheckpointData;

/// A file to write.
#[derive(Clone, Debug)]
pub struct Target {
    storage: Arc<dyn Storage>,
    key: Key,
    mode: PutMode,
}

impl Target {
    /// A file whose name must be free.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { storage, key, mode: PutMode::Create }
    }

    /// Sets whether an existing file of that name is replaced.
    #[must_use]
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.mode = if overwrite { PutMode::Overwrite } else { PutMode::Create };
        self
    }

    /// Its name.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Writes the whole file.
    ///
    /// # Errors
    ///
    /// When the storage fails, or the name is taken and the file may not be replaced.
    pub async fn put(&self, bytes: Bytes, _: Verified) -> Result<(), JobError> {
        self.storage.put(&self.key, Payload::from(bytes), self.mode.clone()).await?;
        Ok(())
    }

    /// Writes a file that contains no checkpoint data, such as a report page.
    ///
    /// # Errors
    ///
    /// As [`put`](Self::put).
    pub async fn put_report(&self, text: Vec<u8>) -> Result<(), StorageError> {
        self.storage.put(&self.key, Payload::from(text), self.mode.clone()).await.map(drop)
    }

    /// Refuses a name that is taken, before any work.
    pub(crate) async fn check(&self) -> Result<(), JobError> {
        if self.mode == PutMode::Create && self.storage.contains(&self.key).await? {
            return Err(JobError::TargetExists { target: self.key.to_string() });
        }
        Ok(())
    }

    /// The options of writing this data.
    fn options(&self, data: &CheckpointData) -> FileOptions {
        FileOptions::new(self.mode.clone())
            .with_in_flight(data.in_flight())
            .with_upload_bytes(data.upload_bytes())
    }

    /// Writes a safetensors file.
    pub(crate) async fn safetensors(
        &self,
        items: &[SafetensorsItem],
        header: &IndexMap<String, String>,
        data: Arc<CheckpointData>,
    ) -> Result<Unpublished<'_>, CheckpointError> {
        let name = (&self.key, self.options(&data));
        safetensors::prepare(&*self.storage, name, items, header, data, None).await.map(Unpublished)
    }

    /// Writes a `torch.save` file.
    pub(crate) async fn torch_save(
        &self,
        plan: TorchSavePlan,
        data: Arc<CheckpointData>,
    ) -> Result<Unpublished<'_>, CheckpointError> {
        let options = self.options(&data);
        plan.prepare(&*self.storage, options, data, None).await.map(Unpublished)
    }

    /// Writes a `torch.save` file of one tensor alone.
    pub(crate) async fn tensor(
        &self,
        tensor: (&Arc<str>, DType, &[u64]),
        data: Arc<CheckpointData>,
    ) -> Result<Unpublished<'_>, CheckpointError> {
        let name = (&self.key, self.options(&data));
        prepare_tensor_file(&*self.storage, name, tensor, data).await.map(Unpublished)
    }

    /// Writes a file of a header and the `byte_len` bytes of item 0.
    pub(crate) async fn headed(
        &self,
        header: Bytes,
        byte_len: u64,
        data: Arc<CheckpointData>,
    ) -> Result<Unpublished<'_>, CheckpointError> {
        let name = (&self.key, self.options(&data));
        prepare_headed_file(&*self.storage, name, header, byte_len, data).await.map(Unpublished)
    }
}

/// A complete file that has no name yet.
#[must_use = "it is not a file until it is published"]
pub(crate) struct Unpublished<'a>(PendingFile<'a>);

impl Unpublished<'_> {
    /// Gives the file its name, if everything read from `source` is undamaged.
    pub(crate) async fn publish(self, source: CheckedSource) -> Result<u64, CheckpointError> {
        match source.finish().await {
            Ok(verified) => self.publish_verified(verified).await,
            Err(error) => {
                self.0.abort().await;
                Err(error)
            }
        }
    }

    async fn publish_verified(self, _: Verified) -> Result<u64, CheckpointError> {
        let byte_len = self.0.byte_len();
        self.0.publish().await?;
        Ok(byte_len)
    }
}

/// A folder for a model of safetensors files.
pub(crate) struct HfTarget<'a>(pub(crate) &'a Arc<dyn Storage>);

impl<'a> HfTarget<'a> {
    /// Writes the files of a plan, without the index that makes them a model. The ranks of a group
    /// write a part each.
    pub(crate) async fn write(
        self,
        plan: &HfPlan,
        data: Arc<dyn DataSource>,
        how: &'a HfWriteOptions,
        group: Option<&JobGroup>,
    ) -> Result<UnpublishedFolder<'a>, CheckpointError> {
        let folder = choose_folder(self.0, plan, how).await?;
        let plan = folder.plan();
        if let Some(group) = group {
            group.same_files(plan.files.iter().map(|file| &file.name)).await?;
        }
        let byte_len = |file: &HfFile| {
            let parts = file.parts.iter().filter_map(|at| plan.parts.get(*at));
            let lens = parts.map(|part| {
                part.shape
                    .checked_volume()
                    .unwrap_or(u64::MAX)
                    .saturating_mul(part.dtype.size() as u64)
            });
            lens.fold(0, u64::saturating_add)
        };
        let byte_lens: Vec<_> = plan.files.iter().map(byte_len).collect();
        let share = match group {
            // It gets its name last, from rank 0.
            Some(group) if folder.is_single_file() => 0..usize::from(group.is_coordinator()),
            group => share_of(group, &byte_lens),
        };
        let is_first = group.is_some_and(JobGroup::is_coordinator) && !folder.is_single_file();
        let names = plan.files.iter().map(|file| file.name.clone());
        let all: Vec<Key> = if is_first { names.collect() } else { Vec::new() };
        match folder.write(data, share, None).await {
            Ok(pending) => Ok(UnpublishedFolder { pending, group: group.cloned() }),
            Err(error) => {
                // A rank that fails removes its files, and rank 0 those of a lost one. All of these
                // names were free.
                let lost = matches!(error, CheckpointError::Collective(_));
                if lost
                    && is_first
                    && !was_not_exchanged(&error)
                    && let Err(error) = self.0.delete(&all).await
                {
                    tracing::warn!(%error, "cannot remove the files of a lost rank");
                }
                Err(error)
            }
        }
    }
}

/// Complete files of a model that has no index yet.
#[must_use = "it is not a model until it is published"]
pub(crate) struct UnpublishedFolder<'a> {
    pending: PendingFolder<'a>,
    group: Option<JobGroup>,
}

impl UnpublishedFolder<'_> {
    /// Publishes the model, if everything read from `source` is undamaged. In a group, rank 0 does.
    pub(crate) async fn publish(self, source: CheckedSource) -> Result<HfWritten, CheckpointError> {
        match source.finish().await {
            Ok(verified) => self.publish_verified(verified).await,
            Err(error) => {
                self.abort().await;
                Err(error)
            }
        }
    }

    async fn publish_verified(mut self, _: Verified) -> Result<HfWritten, CheckpointError> {
        let Some(group) = self.group.clone() else { return self.pending.publish().await };
        let handed_over = async {
            let all = gather_files(&group, self.pending.files()).await?;
            group.hand_over().await.map(|()| all)
        };
        match handed_over.await {
            Ok(Some(all)) => {
                let own: Vec<_> = self.pending.files().iter().map(|(key, _)| key.clone()).collect();
                self.pending.add(all.into_iter().filter(|(key, _)| !own.contains(key)));
                self.pending.publish().await
            }
            Ok(None) => Ok(HfWritten::default()),
            Err(error) => {
                if !group.has_handed_over() {
                    self.abort().await;
                }
                Err(error)
            }
        }
    }

    /// Removes what was written; rank 0 also removes what lost ranks wrote.
    async fn abort(self) {
        match &self.group {
            Some(group) if group.is_coordinator() => self.pending.abort_all().await,
            _ => self.pending.abort().await,
        }
    }
}
