//! The storages of saves and loads.

use std::sync::Arc;

use dcp_core::format::{FormatRegistry, OpenOptions};
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::text::without_secrets;
use dcp_core::{CheckpointError, Storage, StorageReader, StorageWriter};
use dcp_engine::{ParallelReader, ReadSharing};

use super::Checkpointer;

/// The reader of a load.
pub(super) enum Opened {
    Any(Arc<dyn StorageReader>),
    Shared(ParallelReader),
}

impl Checkpointer {
    /// The formats that loads recognize; those of [`default_formats`](crate::plugins::default_formats) by
    /// default. Saves write PyTorch's format, or that of a [`writer`](Self::writer).
    #[must_use]
    pub fn formats(self, formats: FormatRegistry) -> Self {
        Self { formats, ..self }
    }

    /// Reads through another [`StorageReader`], such as a [`ParallelReader`] with options, which then
    /// replaces [`read_sharing`](Self::read_sharing) and [`formats`](Self::formats).
    #[must_use]
    #[doc(alias = "storage_reader")]
    pub fn reader<R, F>(mut self, make: F) -> Self
    where
        R: StorageReader + 'static,
        F: Fn(Arc<dyn Storage>) -> R + Send + Sync + 'static,
    {
        self.reader = Some(Arc::new(move |storage| Arc::new(make(storage))));
        self
    }

    /// Whether the ranks of the group share their reads; [`ReadSharing::Auto`] by default. The same on
    /// all ranks; without effect on a [`reader`](Self::reader) of the caller.
    ///
    /// - `Auto`: ranks that need the same tensors, as the replicas of data parallelism do, share them where
    ///   that is expected to be faster ([`ParallelReader::replicas_only`]). Each rank sends 40 bytes to
    ///   find its replicas; where there are none, every rank reads what it needs.
    /// - `Always`: of tensors and objects, what any two ranks need is read once, as by a [`ParallelReader`].
    /// - `Never`: every rank reads what it needs, and sends nothing for that.
    ///
    /// Every rank reads the index. The ranks of several groups of replicas receive what all groups share. For
    /// many groups, give each a [`ParallelReader`] in a collective of its own, by [`reader`](Self::reader).
    #[must_use]
    pub fn read_sharing(self, sharing: ReadSharing) -> Self {
        Self { sharing, ..self }
    }

    pub(super) async fn open_writer(
        &self,
        url: &str,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError> {
        Ok((self.writer)(self.target_storages().open(url, Access::Write).await?))
    }

    /// The storages, whose requests are in the trace if there is one.
    pub(super) fn traced_storages(&self) -> StorageRegistry {
        let storages = self.storages.clone();
        #[cfg(feature = "trace")]
        if let Some(trace) = &self.trace {
            return storages.layer(trace.layer(self.settings().rank()));
        }
        storages
    }

    /// The storages of saves.
    fn target_storages(&self) -> StorageRegistry {
        let storages = self.traced_storages();
        #[cfg(all(feature = "cache", unix))]
        if let Some(slots) = self.upload_slots.clone() {
            return storages.layer(move |storage, _| {
                Arc::new(dcp_storage_cache::ThrottledStorage::new(storage, slots.clone()))
            });
        }
        storages
    }

    /// Opens the writer, without keeping the background saver that runs this alive.
    pub(super) fn open_later(
        self,
        url: String,
    ) -> impl Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send + 'static
    {
        let (storages, writer) = (self.target_storages(), self.writer);
        async move { Ok(writer(storages.open(&url, Access::Write).await?)) }
    }

    pub(super) async fn open_reader(&self, url: &str) -> Result<Opened, CheckpointError> {
        let storages = self.traced_storages();
        if let Some(make) = &self.reader {
            return Ok(Opened::Any(make(storages.open(url, Access::Read).await?)));
        }
        let group = self.settings().collective();
        let options = OpenOptions::default().with_for_load(true).with_in_group(group.is_some());
        let opened = self.formats.open_url(&storages, url, &options).await?;
        for note in &opened.notes {
            tracing::warn!(url = %without_secrets(url), "{note}");
        }
        let shares = self.sharing != ReadSharing::Never;
        Ok(match group {
            Some(group) if group.world_size() > 1 && shares => Opened::Shared(
                ParallelReader::new(opened.reader, Arc::clone(group))
                    .sharing(self.sharing)
                    .replicas_only(self.sharing == ReadSharing::Auto)
                    .index_per_rank(true),
            ),
            _ => Opened::Any(opened.reader),
        })
    }
}
