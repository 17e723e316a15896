//! What the fuzz target of whole `torch.save` files does with its input: all of an accepted file
//! is read, written again, and read back.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::checkpoint::{DataSink, DataSource};
use dcp_core::metadata::Entry;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::storage::{OwnThreads, PutMode};
use dcp_core::{
    CheckpointError, Key, Payload, Region, Storage, StorageReader, Tensor, TensorView, Value,
};
use dcp_formats::torch_save::{
    TorchSaveContent, TorchSaveItem, TorchSaveOptions, TorchSavePlan, TorchSaveReader,
};
use futures_util::FutureExt as _;

pub(crate) fn torch_save(bytes: &[u8]) {
    let key = Key::new("f.pt").unwrap();
    let file = |bytes: Bytes| {
        let storage = MemoryStorage::new();
        storage.put(&key, bytes.into(), PutMode::Create).now_or_never().unwrap().unwrap();
        Arc::new(storage)
    };
    let storage = file(Bytes::copy_from_slice(bytes));
    let Some(before) = read_save(&storage, &key) else { return };
    let items: Vec<_> = before
        .0
        .iter()
        .map(|(name, value)| TorchSaveItem {
            name: name.clone(),
            path: None,
            content: TorchSaveContent::Object(value.clone()),
        })
        .collect();
    let Ok(plan) = TorchSavePlan::new(&key, &items, &TorchSaveOptions::default()) else { return };
    let again = Arc::new(MemoryStorage::new());
    plan.write(&*again, Arc::new(NoData), None).now_or_never().unwrap().unwrap();
    let Some(after) = read_save(&again, &key) else { return };
    for (name, value) in &after.0 {
        if let (Value::Tensor(before), Value::Tensor(after)) = (&before.0[name], value) {
            assert!(before.same(after), "{name}");
        }
    }
}

/// What a file holds, unless it is damaged or large.
fn read_save(storage: &Arc<MemoryStorage>, key: &Key) -> Option<Leaves> {
    let reader = TorchSaveReader::new(Arc::clone(storage) as _, key.clone());
    let metadata = reader.metadata().now_or_never().unwrap().ok()?;
    let mut plan = LoadPlan::default();
    let (mut memory, mut total) = (Vec::new(), 0_u64);
    for (at, (_, entry)) in (0_u32..).zip(metadata.iter()) {
        let kind = match entry {
            Entry::Tensor(tensor) => {
                total = total.checked_add(tensor.byte_len()?)?;
                if total > 1 << 21 {
                    return None;
                }
                memory.push(Some(Tensor::zeros(tensor.dtype, tensor.shape.clone()).ok()?));
                let region = Region::full(tensor.shape.clone()).ok()?;
                ReadKind::Tensor { chunk: 0, shard: 0, region }
            }
            _ => {
                memory.push(None);
                ReadKind::Object
            }
        };
        plan.items.push(ReadItem { entry: at, leaf: at, kind });
    }
    let sink = Arc::new(SaveSink { memory, objects: Mutex::default() });
    reader.read(&metadata, &plan, Arc::clone(&sink) as _).now_or_never().unwrap().ok()?;
    let mut objects = sink.objects.lock().unwrap();
    let leaves = (0_u32..).zip(metadata.iter()).map(|(at, (name, _))| {
        let value = match &sink.memory[at as usize] {
            Some(tensor) => tensor.clone().into(),
            None => objects.remove(&at).unwrap(),
        };
        (name.clone(), value)
    });
    Some(Leaves(leaves.collect()))
}

struct Leaves(BTreeMap<Arc<str>, Value>);

#[derive(Debug)]
struct SaveSink {
    memory: Vec<Option<Tensor>>,
    objects: Mutex<BTreeMap<u32, Value>>,
}

impl DataSink for SaveSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        Ok(self.memory[item.leaf as usize].as_ref().unwrap().shards()[0].view().unwrap().clone())
    }

    fn commit(&self, _: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.objects.lock().unwrap().insert(item.leaf, value);
        Ok(())
    }
}

#[derive(Debug)]
struct NoData;

#[async_trait]
impl DataSource for NoData {
    async fn resolve(&self, _: usize, _: Range<u64>) -> Result<Payload, CheckpointError> {
        Ok(Payload::default())
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}
