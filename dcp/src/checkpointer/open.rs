//! The storages of saves and loads.

use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::{CheckpointError, StorageReader, StorageWriter};
use dcp_formats::dcp::DcpReader;

use super::Checkpointer;

impl Checkpointer {
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
            let rank = self.group.as_ref().map_or(0, |group| group.rank());
            return storages.layer(trace.layer(rank));
        }
        storages
    }

    /// The storages of saves.
    fn target_storages(&self) -> StorageRegistry {
        let storages = self.traced_storages();
        #[cfg(all(feature = "node", unix))]
        if let Some(slots) = self.upload_slots.clone() {
            return storages.layer(move |storage, _| {
                Arc::new(dcp_storage_node::ThrottledStorage::new(storage, slots.clone()))
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

    pub(super) async fn open_reader(
        &self,
        url: &str,
    ) -> Result<Arc<dyn StorageReader>, CheckpointError> {
        let storage = self.traced_storages().open(url, Access::Read).await?;
        Ok(match &self.reader {
            Some(make) => make(storage),
            // The ranks of a group would each read the sidecar.
            None => {
                Arc::new(DcpReader::builder(storage).compare_saved(self.group.is_none()).build())
            }
        })
    }
}
