//! The memory of a state dict, as the destination of a load.

use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::checkpoint::DataSink;
use dcp_core::plan::{ReadItem, ReadKind};
use dcp_core::{CheckpointError, PlanError, Tensor, TensorView, Value};

/// A [`DataSink`] over host tensors, filled in place; objects are collected.
#[derive(Debug)]
pub(crate) struct StateSink {
    leaves: Vec<(Arc<str>, Option<Tensor>)>,
    objects: Mutex<Vec<(usize, Value)>>,
}

impl StateSink {
    /// Leaves in the order of the load's state index; `None` for an object.
    pub(crate) fn new(leaves: Vec<(Arc<str>, Option<Tensor>)>) -> Self {
        Self { leaves, objects: Mutex::default() }
    }

    /// The objects that arrived: position of the leaf, and value.
    pub(crate) fn take_objects(&self) -> Vec<(usize, Value)> {
        std::mem::take(&mut *self.objects.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl DataSink for StateSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let nowhere = || PlanError::Wire {
            problem: format!("leaf {} has no memory for {:?}", item.leaf, item.kind),
        };
        let ReadKind::Tensor { shard, region, .. } = &item.kind else {
            return Err(nowhere().into());
        };
        let (_, tensor) = self.leaves.get(item.leaf as usize).ok_or_else(nowhere)?;
        let shard = tensor
            .as_ref()
            .and_then(|tensor| tensor.shards().get(*shard as usize))
            .ok_or_else(nowhere)?;
        let inner = region.relative_to(shard.region().offsets()).ok_or_else(nowhere)?;
        Ok(shard.view().narrow(&inner)?)
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        objects.push((item.leaf as usize, value));
        Ok(())
    }
}
