//! Reads a checkpoint into memory and compares it.

use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::checkpoint::DataSink;
use dcp_core::metadata::Entry;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, FormatError, HostMemory, Region, StorageReader,
    TensorView, Value,
};

use super::sample::{Sample, SampleTensor};
use crate::case::{Failure, Outcome, ensure};

/// The call of a sink that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    Destination,
    Commit,
    Object,
}

/// The boxes and objects of a read, and their memory.
#[derive(Debug, Default)]
pub(super) struct Load {
    boxes: Vec<BoxMemory>,
    items: Vec<ReadItem>,
    arrived: Mutex<Arrived>,
    pub(super) broken: Option<Broken>,
}

#[derive(Debug)]
struct BoxMemory {
    dtype: DType,
    region: Region,
    memory: HostMemory,
    expected: Vec<u8>,
    fqn: String,
}

#[derive(Debug, Default)]
struct Arrived {
    /// Items with a filled destination, by position in the plan.
    commits: Vec<ReadItem>,
    objects: Vec<(u32, Value)>,
}

impl Load {
    /// Adds a box of a tensor.
    pub(super) fn add_box(
        &mut self,
        metadata: &CheckpointMetadata,
        tensor: &SampleTensor,
        region: Region,
    ) -> Outcome {
        let leaf = u32::try_from(self.boxes.len())?;
        let at = metadata.index_of(&tensor.fqn);
        let entry = at.and_then(|at| metadata.at(at)).and_then(|(_, entry)| entry.as_tensor());
        let (Some(at), Some(entry)) = (at, entry) else {
            return Err(Failure::new(format!("the index has no tensor {:?}", tensor.fqn)));
        };
        let mut volume = 0;
        for (n, chunk) in entry.chunks.iter().enumerate() {
            let Some(part) = chunk.region()?.intersect(&region) else { continue };
            volume += part.volume();
            let kind = ReadKind::Tensor { chunk: u32::try_from(n)?, shard: 0, region: part };
            self.items.push(ReadItem { entry: u32::try_from(at)?, leaf, kind });
        }
        let wanted = region.volume();
        ensure!(
            volume == wanted,
            "the chunks of {:?} have {volume} of {wanted} elements of {region}",
            tensor.fqn
        );
        let expected = tensor.elements(&region)?;
        let memory = HostMemory::zeroed(expected.len());
        let (dtype, fqn) = (tensor.dtype, tensor.fqn.clone());
        self.boxes.push(BoxMemory { dtype, region, memory, expected, fqn });
        Ok(())
    }

    /// Adds an object.
    pub(super) fn add_object(&mut self, metadata: &CheckpointMetadata, fqn: &str) -> Outcome {
        let Some(at) = metadata.index_of(fqn) else {
            return Err(Failure::new(format!("the index has no object {fqn:?}")));
        };
        let (entry, leaf) = (u32::try_from(at)?, u32::MAX);
        self.items.push(ReadItem { entry, leaf, kind: ReadKind::Object });
        Ok(())
    }

    /// Adds everything in `sample`.
    pub(super) fn whole(metadata: &CheckpointMetadata, sample: &Sample) -> Result<Self, Failure> {
        let mut load = Self::default();
        for tensor in &sample.tensors {
            load.add_box(metadata, tensor, Region::full(tensor.shape.clone())?)?;
        }
        for (fqn, _) in &sample.objects {
            load.add_object(metadata, fqn)?;
        }
        Ok(load)
    }

    /// Reads. The inner error is the reader's; the outer one is a violation of its contract, such
    /// as wrong data without an error.
    pub(super) async fn run(
        self,
        reader: &dyn StorageReader,
        metadata: &Arc<CheckpointMetadata>,
        sample: &Sample,
    ) -> Result<Result<(), Failure>, Failure> {
        let load = Arc::new(self);
        let plan = LoadPlan { items: load.items.clone() };
        let read = reader.read(metadata, &plan, Arc::clone(&load) as _).await;
        for one in &load.boxes {
            let loan = one.memory.lend(0..one.memory.len());
            ensure!(loan.is_ok(), "memory of {:?} is still lent after the read", one.fqn);
        }
        if let Err(error) = read {
            return Ok(Err(error.into()));
        }
        load.compare(metadata, sample)?;
        Ok(Ok(()))
    }

    fn compare(&self, metadata: &CheckpointMetadata, sample: &Sample) -> Outcome {
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        for item in self.items.iter().filter(|item| item.kind != ReadKind::Object) {
            let commits = arrived.commits.iter().filter(|one| *one == item).count();
            ensure!(commits == 1, "{item:?} was committed {commits} times");
        }
        for one in &self.boxes {
            let found = one.memory.to_vec()?;
            ensure!(found == one.expected, "{} of {:?} has other bytes", one.region, one.fqn);
        }
        for item in self.items.iter().filter(|item| item.kind == ReadKind::Object) {
            let fqn = &*metadata.entry_name(item.entry as usize);
            let found: Vec<_> =
                arrived.objects.iter().filter(|(entry, _)| *entry == item.entry).collect();
            ensure!(found.len() == 1, "the object {fqn:?} came {} times", found.len());
            let saved = sample.objects.iter().find(|(name, _)| name == fqn);
            let same = saved.zip(found.first()).is_some_and(|((_, a), (_, b))| a.same(b));
            ensure!(same, "the object {fqn:?} is {found:?}, saved was {saved:?}");
        }
        Ok(())
    }

    fn broken(&self, call: Broken) -> Result<(), CheckpointError> {
        if self.broken == Some(call) {
            return Err(FormatError::new("sink of the suite", "it is broken").into());
        }
        Ok(())
    }
}

impl DataSink for Load {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.broken(Broken::Destination)?;
        let unknown = || FormatError::new("read item", "it is not of the plan");
        let one = self.boxes.get(item.leaf as usize).ok_or_else(unknown)?;
        let ReadKind::Tensor { region, .. } = &item.kind else { return Err(unknown().into()) };
        let inside = region.relative_to(one.region.offsets()).ok_or_else(unknown)?;
        let shape = one.region.sizes().clone();
        let whole = TensorView::contiguous(one.memory.clone(), one.dtype, shape, 0)?;
        Ok(whole.narrow(&inside)?)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        self.broken(Broken::Commit)?;
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        arrived.commits.push(item.clone());
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.broken(Broken::Object)?;
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        arrived.objects.push((item.entry, value));
        Ok(())
    }
}

/// Reads all of `sample` and compares it.
pub(super) async fn read_whole(reader: &dyn StorageReader, sample: &Sample) -> Outcome {
    let metadata = reader.metadata().await?;
    for tensor in &sample.tensors {
        let stored = metadata.get(&tensor.fqn).and_then(Entry::as_tensor);
        let Some(stored) = stored else {
            return Err(Failure::new(format!("the index has no tensor {:?}", tensor.fqn)));
        };
        ensure!(
            stored.dtype == tensor.dtype && stored.shape == tensor.shape,
            "the index says {} {} of {:?}, saved was {} {}",
            stored.dtype.name(),
            stored.shape,
            tensor.fqn,
            tensor.dtype.name(),
            tensor.shape
        );
    }
    Load::whole(&metadata, sample)?.run(reader, &metadata, sample).await?
}
