//! Hugging Face files that ranks save, each its own shards.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::error::{PlanProblem, StateProblem, StorageOp};
use dcp_core::metadata::{Encoding, Entry, FileId, Layout, Placement};
use dcp_core::plan::{GlobalPlan, SavePlan, SelectedItem, WriteOrder, WritePlan};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, PlanError, Storage, StorageError,
    StorageErrorKind, StorageWriter, Value,
};
use futures_util::StreamExt as _;

use super::ENDING;
use super::consolidate::StoredTensors;
use super::index_file::INDEX_NAME;
use super::layout::{HfFile, HfLayout, HfPart, HfPlan};
use super::write::{HfWriteOptions, OneFile, contents, write_folder};
use crate::safetensors::{EncodedHeader, encode_header, prepare};
use crate::stop::Stop;
use crate::upload::{ByteProgress, FileOptions};

/// The folder of the ranks' files where they are consolidated, as in PyTorch.
const SHARDED: &str = "sharded";

/// Writes the shards of each rank as PyTorch's `HuggingFaceStorageWriter` does with
/// `save_distributed`: files `shard-00001-model-00001-of-00002.safetensors` with
/// `DCP_SHARDING_INFO`, without an index, which PyTorch's reader and [`HfReader`](super::HfReader)
/// load.
///
/// With [`consolidate`](HfRankWriterBuilder::consolidate) these files are in the folder `sharded`,
/// and the coordinator then writes the whole tensors and their index, which transformers loads.
///
/// A folder has one save, because readers take all of its files: a save into one with files of
/// safetensors is refused. Objects are refused, too; files of safetensors have tensors only.
pub struct HfRankWriter {
    storage: Arc<dyn Storage>,
    layout: HfLayout,
    consolidates: bool,
    files_at_once: usize,
    options: HfWriteOptions,
    progress: Option<ByteProgress>,
    /// Files that this writer created and may remove.
    created: Mutex<HashSet<Key>>,
}

/// Options of an [`HfRankWriter`].
#[must_use = "call `build`"]
pub struct HfRankWriterBuilder(HfRankWriter);

impl HfRankWriter {
    /// A writer with PyTorch's defaults, but files of at most 5 GB of tensors.
    pub fn builder(storage: Arc<dyn Storage>) -> HfRankWriterBuilder {
        HfRankWriterBuilder(Self {
            storage,
            layout: HfLayout::default(),
            consolidates: false,
            files_at_once: 1,
            options: HfWriteOptions::default(),
            progress: None,
            created: Mutex::default(),
        })
    }

    fn created(&self) -> std::sync::MutexGuard<'_, HashSet<Key>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, file: &HfFile) -> Result<Key, StorageError> {
        Ok(match self.consolidates {
            true => Key::new(SHARDED)?.join(file.name.as_str())?,
            false => file.name.clone(),
        })
    }

    async fn write_one(
        &self,
        file: ShardFile,
        data: Arc<dyn DataSource>,
    ) -> Result<(Key, u64), CheckpointError> {
        let ShardFile { key, plan, items } = file;
        let (tensors, metadata) = contents(&plan, first(&plan)?, &self.options);
        let data = Arc::new(OneFile { data, parts: items, stop: Arc::<AtomicBool>::default() });
        let (storage, name) = (&*self.storage, (&key, FileOptions::new(PutMode::Create)));
        let progress = self.progress.as_ref();
        let pending = prepare(storage, name, &tensors, &metadata, data, progress).await?;
        let byte_len = pending.byte_len();
        pending.publish().await?;
        self.created().insert(key.clone());
        Ok((key, byte_len))
    }

    /// The files of a rank's plan.
    fn files(&self, local: &SavePlan, plan: &WritePlan) -> Result<Vec<ShardFile>, CheckpointError> {
        let mut files = Vec::new();
        for (number, key) in plan.files.iter().enumerate() {
            let (mut items, mut parts, mut places) = (Vec::new(), Vec::new(), Vec::new());
            let orders = plan.orders.iter();
            for order in orders.filter(|order| order.placement.file.index() == number) {
                parts.push(part(local, order.item, 0)?);
                items.push(order.item as usize);
                places.push((order.placement.byte_offset, order.placement.byte_len));
            }
            let plan = one_file(key.clone(), parts);
            let encoded = self.header(&plan, first(&plan)?)?;
            let encoded = ranges(&plan, first(&plan)?, &encoded)?;
            if !encoded.iter().map(|place| (place.byte_offset, place.byte_len)).eq(places) {
                let problem = format!("the header of {key:?} has its tensors at other places");
                let fqn = plan.parts.first().map_or_else(String::new, |part| part.fqn.to_string());
                return Err(PlanError::Plan(PlanProblem::Misplaced { fqn, problem }).into());
            }
            files.push(ShardFile { key: key.clone(), plan, items });
        }
        Ok(files)
    }

    fn header(&self, plan: &HfPlan, file: &HfFile) -> Result<EncodedHeader, FormatError> {
        let (items, metadata) = contents(plan, file, &self.options);
        encode_header(&items, &metadata)
    }

    /// Fails unless each file has the length that its rank reported.
    async fn check(&self, files: &[(Key, u64)]) -> Result<(), CheckpointError> {
        for (key, byte_len) in files {
            let stored = self.storage.stat(key).await?.byte_len;
            if stored != *byte_len {
                let problem = format!("it has {stored} bytes, {byte_len} were written");
                let error = FormatError::new("data file", problem);
                return Err(error.in_file(key.as_str(), stored.min(*byte_len)).into());
            }
        }
        Ok(())
    }

    async fn consolidate(&self, metadata: &CheckpointMetadata) -> Result<(), CheckpointError> {
        let (stored, parts) = StoredTensors::of(Arc::clone(&self.storage), metadata)?;
        let plan = self.layout.plan(parts)?;
        let (data, progress) = (Arc::new(stored), self.progress.as_ref());
        write_folder(&self.storage, &plan, data, &self.options, progress).await?;
        Ok(())
    }
}

impl HfRankWriterBuilder {
    /// The division of tensors into files: [`HfLayout::Mapping`] is PyTorch's
    /// `fqn_to_index_mapping`.
    pub fn layout(mut self, layout: HfLayout) -> Self {
        self.0.layout = layout;
        self
    }

    /// Whether the coordinator writes whole tensors after all ranks have written their shards:
    /// PyTorch's `enable_consolidation`. It reads them in segments of at most 8 MiB.
    pub fn consolidate(mut self, consolidate: bool) -> Self {
        self.0.consolidates = consolidate;
        self
    }

    /// The number of files that a rank writes concurrently: PyTorch's `thread_count`. One by
    /// default.
    pub fn files_at_once(mut self, files: usize) -> Self {
        self.0.files_at_once = files.max(1);
        self
    }

    /// The number of files that the coordinator consolidates concurrently: PyTorch's
    /// `thread_count_consolidation`. One by default.
    pub fn consolidated_at_once(mut self, files: usize) -> Self {
        self.0.options.parallelism = files.max(1);
        self
    }

    /// Receives the number of bytes written, part by part.
    pub fn progress(mut self, progress: ByteProgress) -> Self {
        self.0.progress = Some(progress);
        self
    }

    /// Builds the writer.
    #[must_use]
    pub fn build(self) -> HfRankWriter {
        self.0
    }
}

#[async_trait]
impl StorageWriter for HfRankWriter {
    fn encode_object(&self, fqn: &str, _: &Value) -> Result<Bytes, CheckpointError> {
        let problem = "files of safetensors have tensors only; save it in another checkpoint";
        Err(StateProblem::NotStorable { problem: problem.to_owned() }.of(fqn).into())
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        let sharded = Key::new(SHARDED).map_err(StorageError::from)?;
        for folder in [None, Some(&sharded)] {
            let mut files = self.storage.list_files(folder);
            while let Some(meta) = files.next().await {
                let key = meta?.key;
                if key.as_str().ends_with(ENDING) || key.as_str() == INDEX_NAME {
                    let (kind, op) = (StorageErrorKind::AlreadyExists, StorageOp::Put);
                    let message = "there are files of safetensors here, which readers load as \
                                   a part of this checkpoint; save to an empty folder";
                    return Err(StorageError::new(kind, op, Some(key))
                        .with_message(message)
                        .into());
                }
            }
        }
        Ok(SaveSession::new(0, Vec::new()))
    }

    fn place(
        &self,
        _: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        let GlobalPlan { metadata, selections, .. } = global;
        let raw = Encoding::new(Layout::Raw);
        let encoding = metadata.intern_encoding(&raw).ok_or_else(too_many)?;
        let (mut parts, mut origins) = (Vec::new(), Vec::new());
        for ((rank, local), selected) in (0..).zip(locals).zip(&*selections) {
            for selected in selected {
                parts.push(part(local, selected.item, rank)?);
                origins.push(*selected);
            }
        }
        let empty = || WritePlan { encodings: vec![raw.clone()], ..WritePlan::default() };
        let mut plans: Vec<_> = locals.iter().map(|_| empty()).collect();
        let plan = self.layout.plan(parts)?;
        for file in &plan.files {
            once_each(&plan, file)?;
            let key = self.key(file)?;
            let rank = rank_of(&plan, file);
            let Some(write) = plans.get_mut(rank as usize) else { continue };
            let own = FileId::from_index(write.files.len()).ok_or_else(too_many)?;
            let shared = metadata.intern_file(&key).ok_or_else(too_many)?;
            let encoded = self.header(&plan, file)?;
            let places = ranges(&plan, file, &encoded)?;
            // Orders are in the order of the plan's parts, from which `write` encodes the same
            // header.
            for (position, placement) in file.parts.iter().zip(places) {
                let Some(selected) = origins.get(*position) else { continue };
                let placement = Placement { file: own, encoding: 0, ..placement };
                write.orders.push(WriteOrder { item: selected.item, placement });
                record(metadata, selected, Placement { file: shared, encoding, ..placement })?;
            }
            write.files.push(key);
        }
        Ok(plans)
    }

    fn renamed(&self, file: &Key, _: u64) -> Result<Key, CheckpointError> {
        Ok(file.clone())
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        let files = self.files(local, plan)?;
        self.created().clear();
        let stop = Stop::new();
        let data = stop.guard(data);
        let writes = files.into_iter().map(|file| self.write_one(file, Arc::clone(&data)));
        Ok(WriteReport::new(stop.run(writes, self.files_at_once).await?))
    }

    async fn commit(
        &self,
        _: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        let files: Vec<_> = reports.into_iter().flat_map(|report| report.files).collect();
        let done = match self.check(&files).await {
            Ok(()) if self.consolidates => self.consolidate(metadata).await,
            done => done,
        };
        if done.is_err() {
            remove(&*self.storage, files.into_iter().map(|(key, _)| key).collect()).await;
        }
        self.created().clear();
        done
    }

    async fn abandon(&self, plan: &WritePlan) {
        let own: Vec<Key> = {
            let mut created = self.created();
            plan.files.iter().filter(|key| created.remove(*key)).cloned().collect()
        };
        remove(&*self.storage, own).await;
    }
}

/// A file of this rank.
struct ShardFile {
    key: Key,
    /// A plan of this file alone.
    plan: HfPlan,
    /// The item of each part.
    items: Vec<usize>,
}

fn one_file(name: Key, parts: Vec<HfPart>) -> HfPlan {
    let tensor_bytes = parts.iter().filter_map(HfPart::byte_len).sum();
    let file = HfFile { name, parts: (0..parts.len()).collect(), tensor_bytes };
    HfPlan { parts, files: vec![file], total_size: tensor_bytes, distributed: true }
}

fn first(plan: &HfPlan) -> Result<&HfFile, PlanError> {
    plan.files.first().ok_or_else(too_many)
}

fn part(local: &SavePlan, item: u32, rank: u32) -> Result<HfPart, PlanError> {
    let found =
        local.item(item as usize).ok_or(PlanError::no_item(item.into(), local.len() as u64))?;
    let fqn = &found.key.fqn;
    let Some(spec) = &found.key.tensor else {
        let problem = "files of safetensors have tensors only".to_owned();
        return Err(StateProblem::NotStorable { problem }.of(fqn.to_string()));
    };
    Ok(HfPart::part_of(Arc::clone(fqn), spec.dtype, found.sizes, found.offsets, rank))
}

fn rank_of(plan: &HfPlan, file: &HfFile) -> u32 {
    let first = file.parts.first().and_then(|index| plan.parts.get(*index)?.part.as_ref());
    first.map_or(0, |(_, rank)| *rank)
}

/// Refuses two parts of a tensor in one file, which has one tensor of a name.
fn once_each(plan: &HfPlan, file: &HfFile) -> Result<(), PlanError> {
    let mut seen = HashSet::new();
    for part in file.parts.iter().filter_map(|index| plan.parts.get(*index)) {
        if !seen.insert(&part.fqn) {
            let rank = rank_of(plan, file);
            let problem = format!(
                "rank {rank} holds several shards of it, and a file of safetensors has one tensor \
                 of a name"
            );
            return Err(StateProblem::NotStorable { problem }.of(part.fqn.to_string()));
        }
    }
    Ok(())
}

/// The places of a file's parts, in their order.
fn ranges(
    plan: &HfPlan,
    file: &HfFile,
    encoded: &EncodedHeader,
) -> Result<Vec<Placement>, PlanError> {
    let start = encoded.bytes.len() as u64;
    let placed = file.parts.iter().map(|index| {
        let part = plan.parts.get(*index).ok_or_else(too_many)?;
        let range = &encoded.header.get(&part.fqn).ok_or_else(too_many)?.byte_range;
        let file = FileId::from_index(0).ok_or_else(too_many)?;
        let (byte_offset, byte_len) = (start + range.start, range.end - range.start);
        Ok(Placement { file, encoding: 0, byte_offset, byte_len })
    });
    placed.collect()
}

/// Records an item's placement in the metadata.
fn record(
    metadata: &mut CheckpointMetadata,
    selected: &SelectedItem,
    placement: Placement,
) -> Result<(), PlanError> {
    match metadata.at_mut(selected.entry as usize) {
        Some((_, Entry::Tensor(tensor))) if (selected.chunk as usize) < tensor.chunks.len() => {
            tensor.chunks.place(selected.chunk as usize, placement);
            Ok(())
        }
        _ => Err(PlanError::no_entry(selected.entry.into(), Some(selected.chunk.into()))),
    }
}

/// Removes files; best effort.
async fn remove(storage: &dyn Storage, keys: Vec<Key>) {
    if !keys.is_empty()
        && let Err(error) = storage.delete(&keys).await
    {
        tracing::warn!(%error, "cannot remove all files of a failed save");
    }
}

fn too_many() -> PlanError {
    PlanError::TooLarge { what: "the number of files or encodings".into(), limit: u32::MAX.into() }
}

impl fmt::Debug for HfRankWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HfRankWriter")
            .field("storage", &self.storage)
            .field("layout", &self.layout)
            .field("consolidates", &self.consolidates)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for HfRankWriterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HfRankWriterBuilder").field(&self.0).finish()
    }
}
