//! Saving.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::error::{PlanProblem, StorageOp};
use dcp_core::metadata::{Encoding, Entry, FileId, Layout, Placement};
use dcp_core::plan::{GlobalPlan, SavePlan, WriteOrder, WritePlan};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Payload, PlanError, Storage,
    StorageError, StorageErrorKind, StorageReader as _, StorageWriter, Value,
};
use futures_util::TryStreamExt as _;

use crate::names::{CRC_BYTES, data_file, index, parse};
use crate::reader::ToyReader;

/// Writes toy checkpoints. An overwrite has data files of new names; the index replaces the old one
/// in one step, and then the files of the old one are removed.
#[derive(Debug)]
pub struct ToyWriter {
    storage: Arc<dyn Storage>,
    overwrite: bool,
    /// Files that this writer made, and so may remove.
    created: Mutex<Vec<Key>>,
}

impl ToyWriter {
    /// A writer into `storage`, which replaces an existing checkpoint or refuses to.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, overwrite: bool) -> Self {
        Self { storage, overwrite, created: Mutex::default() }
    }

    /// The index that is there.
    async fn current(&self) -> Result<Option<Bytes>, StorageError> {
        match self.storage.read_all(&index()?).await {
            Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
            bytes => bytes.map(Some),
        }
    }

    /// Removes those of `files` that the index does not name; none where it cannot be read.
    async fn remove(&self, files: impl IntoIterator<Item = Key>) {
        let used = match ToyReader::new(Arc::clone(&self.storage)).metadata().await {
            Ok(metadata) => metadata.files().to_vec(),
            Err(CheckpointError::NotACheckpoint { .. }) => Vec::new(),
            Err(_) => return,
        };
        let files: Vec<_> = files.into_iter().filter(|file| !used.contains(file)).collect();
        // What cannot be removed is stale in the next save.
        let _ = self.storage.delete(&files).await;
    }

    async fn publish(
        &self,
        session: &SaveSession,
        metadata: &CheckpointMetadata,
    ) -> Result<(), CheckpointError> {
        let seen = session.state::<Option<Bytes>>();
        if seen.is_some_and(|_| session.claim.is_none()) && Some(&self.current().await?) != seen {
            let error =
                StorageError::new(StorageErrorKind::Conflict, StorageOp::Put, Some(index()?));
            return Err(error.with_message("another save was committed meanwhile").into());
        }
        let wire = metadata.to_wire();
        let bytes = [&crc32fast::hash(&wire).to_le_bytes()[..], &wire].concat();
        let payload = Payload::from(bytes);
        match &session.claim {
            Some(claim) => claim.replace(payload).await?,
            None => self.storage.put(&index()?, payload, PutMode::Overwrite).await?,
        };
        Ok(())
    }
}

fn no_item(number: u32, plan: &SavePlan) -> CheckpointError {
    PlanError::no_item(number.into(), plan.len() as u64).into()
}

fn too_many_files() -> CheckpointError {
    let what = "the number of files".to_owned();
    PlanError::TooLarge { what, limit: u32::MAX.into() }.into()
}

#[async_trait]
impl StorageWriter for ToyWriter {
    fn encode_object(&self, _fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        Ok(value.to_wire()?)
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        let claims = self.storage.capabilities().claims;
        let claim = if claims { Some(self.storage.claim(&index()?).await?) } else { None };
        let seen = self.current().await?;
        if seen.is_some() && !self.overwrite {
            let kind = StorageErrorKind::AlreadyExists;
            let error = StorageError::new(kind, StorageOp::Put, Some(index()?));
            return Err(error.with_message("there is a checkpoint; overwriting is off").into());
        }
        let all: Vec<_> = self.storage.list_files(None).try_collect().await?;
        let found: BTreeMap<Key, u64> =
            all.into_iter().filter_map(|m| Some((m.key.clone(), parse(&m.key)?.1))).collect();
        let generation = found.values().max().map_or(0, |highest| highest.saturating_add(1));
        let session = SaveSession::new(generation, found.into_keys().collect());
        Ok(session.with_claim(claim).with_state(seen))
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        let encoding = Encoding::new(Layout::Computed);
        let GlobalPlan { metadata, selections, .. } = global;
        let mut plans = Vec::new();
        for (rank, (local, selected)) in locals.iter().zip(&*selections).enumerate() {
            let file = data_file(rank, session.generation)?;
            let mut plan = WritePlan { encodings: vec![encoding.clone()], ..WritePlan::default() };
            let mut byte_offset = 0_u64;
            for item in selected {
                let planned = local.item(item.item as usize);
                let planned = planned.ok_or_else(|| no_item(item.item, local))?;
                let own = FileId::from_index(0).ok_or_else(|| too_many_files())?;
                let byte_len = planned.byte_len.saturating_add(CRC_BYTES);
                let placement = Placement { file: own, encoding: 0, byte_offset, byte_len };
                plan.orders.push(WriteOrder { item: item.item, placement });
                // The index counts the files and encodings of all ranks.
                let stored = metadata.intern_file(&file).zip(metadata.intern_encoding(&encoding));
                let (file, encoding) = stored.ok_or_else(|| too_many_files())?;
                let placement = Placement { file, encoding, ..placement };
                match metadata.at_mut(item.entry as usize) {
                    Some((_, Entry::Tensor(t))) => t.chunks.place(item.chunk as usize, placement),
                    Some((_, Entry::Object(object))) => object.placement = Some(placement),
                    _ => {
                        let (entry, chunk) = (item.entry.into(), None);
                        return Err(PlanError::no_entry(entry, chunk).into());
                    }
                }
                byte_offset = byte_offset.saturating_add(byte_len);
            }
            plan.files.extend((!plan.orders.is_empty()).then_some(file));
            plans.push(plan);
        }
        Ok(plans)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        let (rank, _) = parse(file)
            .ok_or_else(|| PlanError::Plan(PlanProblem::FileName { file: file.to_string() }))?;
        Ok(data_file(rank, generation)?)
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        let Some(file) = plan.files.first() else { return Ok(WriteReport::default()) };
        let mut bytes = Vec::new();
        for order in &plan.orders {
            let item = local.item(order.item as usize);
            let item = item.ok_or_else(|| no_item(order.item, local))?;
            let (begin, mut at) = (bytes.len(), 0);
            while at < item.byte_len {
                let end = item.byte_len.min(at.saturating_add(data.segment_bytes()));
                let part = data.resolve(order.item as usize, at..end).await?;
                if part.len() != end - at {
                    let error = FormatError::new("data to save", "it has another length");
                    return Err(error.into());
                }
                part.pieces().iter().for_each(|piece| bytes.extend_from_slice(piece));
                at = end;
            }
            let crc32 = crc32fast::hash(bytes.get(begin..).unwrap_or_default());
            bytes.extend_from_slice(&crc32.to_le_bytes());
        }
        let len = bytes.len() as u64;
        self.storage.put(file, bytes.into(), PutMode::Create).await?;
        self.created.lock().unwrap_or_else(PoisonError::into_inner).push(file.clone());
        Ok(WriteReport::new(vec![(file.clone(), len)]))
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        let written: Vec<_> = reports.into_iter().flat_map(|report| report.files).collect();
        for (file, len) in &written {
            if self.storage.stat(file).await.map(|meta| meta.byte_len).ok() != Some(*len) {
                self.remove(written.into_iter().map(|(file, _)| file)).await;
                return Err(FormatError::new("data file", "it is not as written").into());
            }
        }
        match self.publish(&session, metadata).await {
            Ok(()) => self.remove(session.stale.clone()).await,
            // The request may still take effect: its outcome is unknown.
            Err(CheckpointError::Storage(error)) if error.is_retryable() => {
                return Err(error.into());
            }
            Err(error) => {
                self.remove(written.into_iter().map(|(file, _)| file)).await;
                return Err(error);
            }
        }
        Ok(())
    }

    async fn abandon(&self, plan: &WritePlan) {
        let own: Vec<_> = {
            let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
            let (own, others) = created.drain(..).partition(|file| plan.files.contains(file));
            *created = others;
            own
        };
        self.remove(own).await;
    }
}
