//! Readers and writers behind pointers, so that an `Arc<dyn StorageWriter>` is accepted where a
//! `&dyn StorageWriter` is.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{
    DataSink, DataSource, ReadReport, SaveSession, StorageReader, StorageWriter, WriteReport,
};
use crate::error::CheckpointError;
use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;
use crate::plans::plan::{GlobalPlan, LoadPlan, SavePlan, WritePlan};
use crate::state::value::Value;

macro_rules! pointers {
    ($($pointer:ident),*) => {$(
        #[async_trait]
        impl<T: StorageWriter + ?Sized> StorageWriter for $pointer<T> {
            fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
                (**self).encode_object(fqn, value)
            }

            async fn begin(&self) -> Result<SaveSession, CheckpointError> {
                (**self).begin().await
            }

            fn place(
                &self,
                session: &SaveSession,
                locals: &[SavePlan],
                global: &mut GlobalPlan,
            ) -> Result<Vec<WritePlan>, CheckpointError> {
                (**self).place(session, locals, global)
            }

            fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
                (**self).renamed(file, generation)
            }

            async fn write(
                &self,
                local: &SavePlan,
                plan: &WritePlan,
                data: Arc<dyn DataSource>,
            ) -> Result<WriteReport, CheckpointError> {
                (**self).write(local, plan, data).await
            }

            async fn commit(
                &self,
                session: SaveSession,
                metadata: &CheckpointMetadata,
                reports: Vec<WriteReport>,
            ) -> Result<(), CheckpointError> {
                (**self).commit(session, metadata, reports).await
            }

            async fn abandon(&self, plan: &WritePlan) {
                (**self).abandon(plan).await;
            }
        }

        #[async_trait]
        impl<T: StorageReader + ?Sized> StorageReader for $pointer<T> {
            async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
                (**self).metadata().await
            }

            async fn read(
                &self,
                metadata: &Arc<CheckpointMetadata>,
                plan: &LoadPlan,
                sink: Arc<dyn DataSink>,
            ) -> Result<ReadReport, CheckpointError> {
                (**self).read(metadata, plan, sink).await
            }
        }
    )*};
}

pointers!(Arc, Box);
