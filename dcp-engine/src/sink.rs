//! The memory of a state dict, as the destination of a load.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_core::checkpoint::DataSink;
use dcp_core::error::{ChunksProblem, TensorError};
use dcp_core::plan::{ReadItem, ReadKind};
use dcp_core::tensor::ShardData;
use dcp_core::text::Quoted;
use dcp_core::{
    CheckpointError, Dims, HostMemory, PlanError, Region, Shard, Tensor, TensorView, Value,
};

use crate::device::DeviceElements;

/// A [`DataSink`] over tensors: those in host memory are filled in place, those on devices through
/// staged pieces. Objects are collected.
#[derive(Debug)]
pub(crate) struct StateSink {
    leaves: Vec<(Arc<str>, Option<Tensor>)>,
    objects: Mutex<Vec<(usize, Value)>>,
    staged: Mutex<HashMap<Place, Staged>>,
    piece_bytes: u64,
}

/// Leaf, shard, and the region's offsets and sizes.
type Place = (u32, u32, Dims, Dims);

/// Elements in host memory that go to a device.
#[derive(Debug)]
pub(crate) struct Staged {
    fqn: Arc<str>,
    elements: DeviceElements,
    memory: HostMemory,
    view: TensorView,
    /// The reader has filled the memory.
    filled: bool,
}

impl StateSink {
    /// Leaves in the order of the load's state index; `None` for an object. Copies to devices have
    /// at most `piece_bytes`.
    pub(crate) fn new(leaves: Vec<(Arc<str>, Option<Tensor>)>, piece_bytes: u64) -> Self {
        let (objects, staged) = Default::default();
        Self { leaves, objects, staged, piece_bytes }
    }

    /// The objects that arrived: position of the leaf, and value.
    pub(crate) fn take_objects(&self) -> Vec<(usize, Value)> {
        std::mem::take(&mut *self.objects.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The size of an element of the item, if it goes to a device.
    pub(crate) fn element_on_device(&self, item: &ReadItem) -> Option<u64> {
        let (_, shard, _) = self.shard(item).ok()?;
        let element = shard.dtype().size() as u64;
        matches!(shard.data(), ShardData::Device(_)).then_some(element)
    }

    /// The pieces that the reader has filled.
    ///
    /// # Errors
    ///
    /// When memory of a request is left unfilled.
    pub(crate) fn take_staged(&self) -> Result<Vec<Staged>, CheckpointError> {
        let staged: Vec<Staged> = self.staged().drain().map(|(_, staged)| staged).collect();
        match staged.iter().find(|staged| !staged.filled) {
            Some(staged) => {
                let part = format!("a part of shape {}", staged.view.shape());
                Err(PlanError::unread(staged.fqn.to_string(), part).into())
            }
            None => Ok(staged),
        }
    }

    fn shard<'a>(
        &'a self,
        item: &'a ReadItem,
    ) -> Result<(&'a Arc<str>, &'a Shard, &'a Region), CheckpointError> {
        let nowhere = || item.unrequested();
        let ReadKind::Tensor { shard, region, .. } = &item.kind else {
            return Err(nowhere().into());
        };
        let (fqn, tensor) = self.leaves.get(item.leaf as usize).ok_or_else(nowhere)?;
        let shard = tensor.as_ref().and_then(|tensor| tensor.shards().get(*shard as usize));
        Ok((fqn, shard.ok_or_else(nowhere)?, region))
    }

    fn staged(&self) -> MutexGuard<'_, HashMap<Place, Staged>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of an item: the same for every request of it.
fn place(item: &ReadItem) -> Option<Place> {
    let ReadKind::Tensor { shard, region, .. } = &item.kind else { return None };
    Some((item.leaf, *shard, region.offsets().clone(), region.sizes().clone()))
}

impl Staged {
    fn new(
        fqn: &Arc<str>,
        elements: DeviceElements,
        shard: &Shard,
        region: &Region,
    ) -> Result<Self, CheckpointError> {
        let byte_len = elements.byte_len();
        let memory = usize::try_from(byte_len).ok().and_then(|len| {
            let staging = elements.staging(len).filter(|memory| memory.len() == len);
            staging.or_else(|| HostMemory::try_zeroed(len))
        });
        let memory = memory.ok_or_else(|| TensorError::OutOfMemory {
            what: format!("a piece of {}", Quoted(fqn)),
            byte_len,
        })?;
        let sizes = region.sizes().clone();
        let view = TensorView::contiguous(memory.clone(), shard.dtype(), sizes, 0)?;
        Ok(Self { fqn: Arc::clone(fqn), elements, memory, view, filled: false })
    }

    /// Copies the elements to the device.
    pub(crate) async fn store(self) -> Result<(), CheckpointError> {
        let failed = |source| CheckpointError::Memory { fqn: self.fqn.to_string(), source };
        let bytes = self.memory.read().map_err(failed)?;
        self.elements.write(&self.fqn, bytes).await
    }
}

impl DataSink for StateSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let (fqn, shard, region) = self.shard(item)?;
        let outside = || {
            ChunksProblem::Outside {
                region: region.to_string(),
                bounds: format!("shard {}", shard.region()),
                rank: None,
            }
            .of(fqn.to_string())
        };
        let inner = region.relative_to(shard.region().offsets()).ok_or_else(outside)?;
        let memory = match shard.data() {
            ShardData::Device(memory) => memory,
            _ => return Ok(shard.host_view(fqn)?.narrow(&inner)?),
        };
        let Some(place) = place(item) else { return Err(outside().into()) };
        let mut staged = self.staged();
        if let Some(staged) = staged.get(&place) {
            return Ok(staged.view.clone());
        }
        let sizes = shard.region().sizes();
        if !shard.region().contains(region) {
            return Err(outside().into());
        }
        let memory = Arc::clone(memory);
        let elements = DeviceElements::new(memory, shard.dtype(), &inner, sizes, self.piece_bytes);
        let new = Staged::new(fqn, elements, shard, region)?;
        let view = new.view.clone();
        staged.insert(place, new);
        Ok(view)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        if let Some(place) = place(item)
            && let Some(staged) = self.staged().get_mut(&place)
        {
            staged.filled = true;
        }
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        objects.push((item.leaf as usize, value));
        Ok(())
    }
}
