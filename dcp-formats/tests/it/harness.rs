//! Storages filled with fixtures, a sink, a source, and plans made by hand.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::checkpoint::{DataSink, DataSource, ReadReport};
use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};
use dcp_core::plan::{
    GlobalPlan, LoadPlan, PlanKey, ReadItem, ReadKind, SavePlan, SelectedItem, TensorSpec,
    WritePlan,
};
use dcp_core::save_run::SaveRun;
use dcp_core::storage::OwnThreads;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Payload, Region, Storage, StorageReader as _,
    StorageWriter as _, Tensor, TensorView, Value,
};
use dcp_formats::dcp::{DcpReader, DcpWriter};
pub(crate) use dcp_testing::{block_on, get, key, names, put};

use crate::support;

/// The files of a checkpoint that PyTorch wrote.
pub(crate) fn fixture(name: &str) -> Arc<MemoryStorage> {
    folder(&support::root().join(name))
}

/// The files of the checkpoint in a folder.
pub(crate) fn folder(path: &Path) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !file.starts_with("expected") {
            put(&storage, &file, std::fs::read(path).unwrap());
        }
    }
    Arc::new(storage)
}

pub(crate) fn delete(storage: &dyn Storage, name: &str) {
    block_on(storage.delete(&[key(name)])).unwrap();
}

/// What a load brought.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) objects: BTreeMap<String, Value>,
    pub(crate) report: ReadReport,
    pub(crate) warnings: Vec<String>,
}

impl Loaded {
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.tensors.len() == other.tensors.len()
            && self.objects.len() == other.objects.len()
            && self.tensors.iter().all(|(k, v)| other.tensors.get(k).is_some_and(|o| v.same(o)))
            && self.objects.iter().all(|(k, v)| other.objects.get(k).is_some_and(|o| v.same(o)))
    }
}

/// Takes items by the leaf they name; views are returned by the shard's region.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) tensors: Vec<Option<Tensor>>,
    pub(crate) objects: Mutex<BTreeMap<u32, Value>>,
    pub(crate) committed: Mutex<Vec<ReadItem>>,
}

impl Sink {
    pub(crate) fn new(tensors: Vec<Option<Tensor>>) -> Arc<Self> {
        Arc::new(Self { tensors, objects: Mutex::default(), committed: Mutex::default() })
    }
}

impl DataSink for Sink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let tensor = self.tensors[item.leaf as usize].as_ref().unwrap();
        let ReadKind::Tensor { shard, region, .. } = &item.kind else { panic!("no tensor") };
        let shard = &tensor.shards()[*shard as usize];
        let inside = region.relative_to(shard.region().offsets()).unwrap();
        Ok(shard.view().unwrap().narrow(&inside)?)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        // Nothing of it may still be lent.
        drop(self.destination(item)?.memory().clone());
        self.committed.lock().unwrap().push(item.clone());
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.objects.lock().unwrap().insert(item.leaf, value);
        Ok(())
    }
}

/// Every stored chunk into whole tensors; leaves are counted as entries.
pub(crate) fn whole_plan(metadata: &CheckpointMetadata) -> (LoadPlan, Arc<Sink>) {
    let mut items = Vec::new();
    let mut tensors = Vec::new();
    for (index, (_, entry)) in metadata.iter().enumerate() {
        let index = u32::try_from(index).unwrap();
        let item = |kind| ReadItem { entry: index, leaf: index, kind };
        match entry {
            Entry::Tensor(tensor) => {
                for (chunk, stored) in (0..).zip(tensor.chunks.iter()) {
                    let region = stored.region().unwrap();
                    items.push(item(ReadKind::Tensor { chunk, shard: 0, region }));
                }
                tensors.push(Some(Tensor::zeros(tensor.dtype, tensor.shape.clone()).unwrap()));
            }
            _ => {
                items.push(item(ReadKind::Object));
                tensors.push(None);
            }
        }
    }
    (LoadPlan { items }, Sink::new(tensors))
}

pub(crate) fn load(storage: Arc<dyn Storage>) -> Result<Loaded, CheckpointError> {
    load_with(&DcpReader::new(storage))
}

pub(crate) fn load_with(reader: &DcpReader) -> Result<Loaded, CheckpointError> {
    block_on(async {
        let metadata = reader.metadata().await?;
        let (plan, sink) = whole_plan(&metadata);
        let report = reader.read(&metadata, &plan, Arc::clone(&sink) as _).await?;
        let tensor_items = plan.items.iter().filter(|item| item.kind != ReadKind::Object).count();
        assert_eq!(sink.committed.lock().unwrap().len(), tensor_items);
        let mut loaded =
            Loaded { report, warnings: reader.warnings().await?.to_vec(), ..Loaded::default() };
        for (index, (fqn, _)) in metadata.iter().enumerate() {
            match &sink.tensors[index] {
                Some(tensor) => {
                    loaded.tensors.insert(fqn.to_string(), tensor.clone());
                }
                None => {
                    let value = sink.objects.lock().unwrap().remove(&(index as u32)).unwrap();
                    loaded.objects.insert(fqn.to_string(), value);
                }
            }
        }
        Ok(loaded)
    })
}

/// Something to save: tensors cut into chunks, each on a rank, and objects.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub(crate) world: usize,
    pub(crate) leaves: Vec<(String, Leaf)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Leaf {
    Tensor { dtype: DType, shape: Vec<u64>, bytes: Vec<u8>, chunks: Vec<(usize, Region)> },
    Object { rank: usize, value: Value },
}

impl State {
    pub(crate) fn new(world: usize) -> Self {
        Self { world, leaves: Vec::new() }
    }

    /// A tensor in row blocks over all ranks, of bytes that depend on `seed`.
    pub(crate) fn rows(mut self, fqn: &str, dtype: DType, shape: &[u64], seed: u8) -> Self {
        let len = shape.iter().product::<u64>() as usize * dtype.size();
        // A prime period, so that no row looks like the next.
        let period: Vec<u8> = (0..251).map(|n: u8| n.wrapping_mul(31) ^ seed).collect();
        let mut bytes = period.repeat(len / 251 + 1);
        bytes.truncate(len);
        let per_rank = shape[0].div_ceil(self.world as u64).max(1);
        let chunks = (0..self.world)
            .filter_map(|rank| {
                let start = per_rank * rank as u64;
                let mut offsets = vec![0; shape.len()];
                let mut sizes = shape.to_vec();
                offsets[0] = start;
                sizes[0] = per_rank.min(shape[0].checked_sub(start).filter(|n| *n > 0)?);
                Some((rank, Region::new(offsets, sizes).unwrap()))
            })
            .collect();
        let leaf = Leaf::Tensor { dtype, shape: shape.to_vec(), bytes, chunks };
        self.leaves.push((fqn.into(), leaf));
        self
    }

    pub(crate) fn object(mut self, fqn: &str, value: impl Into<Value>) -> Self {
        self.leaves.push((fqn.into(), Leaf::Object { rank: 0, value: value.into() }));
        self
    }

    /// What a load of it has to bring.
    pub(crate) fn loaded(&self) -> Loaded {
        let mut loaded = Loaded::default();
        for (fqn, leaf) in &self.leaves {
            match leaf {
                Leaf::Tensor { dtype, shape, bytes, .. } => {
                    let tensor = Tensor::replicated(*dtype, shape.clone(), bytes.clone()).unwrap();
                    loaded.tensors.insert(fqn.clone(), tensor);
                }
                Leaf::Object { value, .. } => {
                    loaded.objects.insert(fqn.clone(), value.clone());
                }
            }
        }
        loaded
    }

    pub(crate) fn plan(&self, writer: &DcpWriter) -> (Vec<SavePlan>, GlobalPlan, Vec<Vec<Bytes>>) {
        let mut locals = vec![SavePlan::new(); self.world];
        let mut data = vec![Vec::new(); self.world];
        let mut global =
            GlobalPlan { selections: vec![Vec::new(); self.world], ..GlobalPlan::default() };
        for (fqn, leaf) in &self.leaves {
            let fqn: Arc<str> = fqn.as_str().into();
            let plan_key = |tensor| PlanKey { fqn: Arc::clone(&fqn), path: None, tensor };
            match leaf {
                Leaf::Tensor { dtype, shape, bytes, chunks } => {
                    let mut entry = TensorEntry::new(*dtype, shape.clone());
                    let spec = TensorSpec {
                        dtype: *dtype,
                        shape: shape.clone().into(),
                        sharded: chunks.len() > 1,
                    };
                    let index = global.metadata.len() as u32;
                    for (rank, region) in chunks {
                        let local = &mut locals[*rank];
                        let key = local.push_key(plan_key(Some(spec.clone())));
                        local.push_chunk(key, region).unwrap();
                        let chunk =
                            entry.chunks.push(region.offsets(), region.sizes(), None).unwrap();
                        data[*rank].push(cut(bytes, *dtype, shape, region).into());
                        global.selections[*rank].push(SelectedItem {
                            item: local.len() as u32 - 1,
                            entry: index,
                            chunk: chunk as u32,
                        });
                    }
                    global.metadata.insert(fqn, Entry::Tensor(entry));
                }
                Leaf::Object { rank, value } => {
                    let encoded = writer.encode_object(&fqn, value).unwrap();
                    let local = &mut locals[*rank];
                    let key = local.push_key(plan_key(None));
                    local.push_object(key, encoded.len() as u64).unwrap();
                    global.selections[*rank].push(SelectedItem {
                        item: local.len() as u32 - 1,
                        entry: global.metadata.len() as u32,
                        chunk: 0,
                    });
                    data[*rank].push(encoded);
                    global.metadata.insert(fqn, Entry::Object(ObjectEntry::new(None)));
                }
            }
        }
        (locals, global, data)
    }
}

/// A box of a row-major array.
pub(crate) fn cut(bytes: &[u8], dtype: DType, shape: &[u64], region: &Region) -> Vec<u8> {
    let size = dtype.size() as u64;
    let runs = region.runs_in(shape);
    runs.flat_map(|(at, n)| bytes[(at * size) as usize..((at + n) * size) as usize].to_vec())
        .collect()
}

/// Encoded items, given out in segments.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) items: Vec<Bytes>,
    pub(crate) segment: u64,
}

#[async_trait]
impl DataSource for Source {
    async fn resolve(&self, item: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
        assert!(range.end - range.start <= self.segment);
        Ok(Payload::from(self.items[item].clone()).slice(range))
    }

    fn segment_bytes(&self) -> u64 {
        self.segment
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

pub(crate) fn save(writer: &DcpWriter, state: &State) -> Result<(), CheckpointError> {
    block_on(save_in_segments(writer, state, u64::MAX))
}

/// As the engine does it, one rank after the other.
pub(crate) async fn save_in_segments(
    writer: &DcpWriter,
    state: &State,
    segment: u64,
) -> Result<(), CheckpointError> {
    let run = SaveRun::begin(writer).await?;
    let (locals, mut global, data) = state.plan(writer);
    let plans = run.place(&locals, &mut global)?;
    let written = write_all(writer, &locals, &plans, data, segment).await;
    let committed = match written {
        Ok(reports) => run.commit(Vec::new(), &global.metadata, reports).await.map(drop),
        Err(error) => Err(error),
    };
    if committed.is_err() {
        for plan in &plans {
            writer.abandon(plan).await;
        }
    }
    committed
}

pub(crate) async fn write_all(
    writer: &DcpWriter,
    locals: &[SavePlan],
    plans: &[WritePlan],
    data: Vec<Vec<Bytes>>,
    segment: u64,
) -> Result<Vec<dcp_core::checkpoint::WriteReport>, CheckpointError> {
    let mut reports = Vec::new();
    for ((local, plan), items) in locals.iter().zip(plans).zip(data) {
        reports.push(writer.write(local, plan, Arc::new(Source { items, segment })).await?);
    }
    Ok(reports)
}
