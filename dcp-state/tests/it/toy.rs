//! A framework with a model and an optimizer.

use std::collections::BTreeMap;

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, DType, Tensor, Value};
use dcp_state::{HiddenModule, Model, ModelEntry, Optimizer, ParamGroup, ParamId};

#[derive(Clone, Debug, Default)]
pub(crate) struct ToyModel {
    pub(crate) entries: Vec<ModelEntry>,
    pub(crate) hidden: Vec<HiddenModule>,
    /// What `load` received.
    pub(crate) loaded: Vec<(String, Value)>,
}

impl Model for ToyModel {
    fn entries(&self) -> Result<Vec<ModelEntry>, CheckpointError> {
        Ok(self.entries.clone())
    }

    fn hidden_modules(&self) -> Vec<HiddenModule> {
        self.hidden.clone()
    }

    fn load(&mut self, loaded: Vec<(String, Value)>) -> Result<(), CheckpointError> {
        self.loaded = loaded;
        Ok(())
    }
}

/// Adam, whose state is created in its first step.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToyAdam {
    pub(crate) groups: Vec<ParamGroup>,
    pub(crate) state: BTreeMap<ParamId, Dict>,
    /// The trained parameters.
    pub(crate) trained: BTreeMap<ParamId, Tensor>,
}

impl ToyAdam {
    /// An optimizer of the trained parameters of a model, in one group.
    pub(crate) fn of(model: &ToyModel) -> Self {
        let (mut ids, mut trained) = (Vec::new(), BTreeMap::new());
        for entry in &model.entries {
            let Some(id) = entry.param.filter(|id| !ids.contains(id)) else { continue };
            ids.push(id);
            if !entry.frozen {
                trained.insert(id, entry.value.as_tensor().unwrap().clone());
            }
        }
        let group = ParamGroup::new(ids).with("lr", 0.1).with("betas", vec![0.9, 0.95]);
        Self { groups: vec![group], state: BTreeMap::new(), trained }
    }
}

impl Optimizer for ToyAdam {
    fn param_groups(&self) -> Result<Vec<ParamGroup>, CheckpointError> {
        Ok(self.groups.clone())
    }

    fn state(&self) -> Result<Vec<(ParamId, Dict)>, CheckpointError> {
        Ok(self.state.clone().into_iter().collect())
    }

    fn init_state(&mut self) -> Result<(), CheckpointError> {
        for (id, tensor) in &self.trained {
            let moment = zeros_like(tensor);
            let step = Tensor::zeros(DType::Float32, [0_u64; 0])?;
            self.state.insert(*id, Dict::from([("step", step), ("exp_avg", moment)]));
        }
        Ok(())
    }

    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        state: Vec<(ParamId, Dict)>,
    ) -> Result<(), CheckpointError> {
        self.groups = groups;
        self.state.extend(state);
        Ok(())
    }
}

pub(crate) fn zeros_like(tensor: &Tensor) -> Tensor {
    let (dtype, shape) = (tensor.dtype(), tensor.shape().clone());
    if !tensor.is_sharded() {
        return Tensor::zeros(dtype, shape).unwrap();
    }
    let regions = tensor.shards().iter().map(|shard| shard.region().clone());
    Tensor::zeros_sharded(dtype, shape, regions).unwrap()
}

/// Elements that count up from `start`.
pub(crate) fn counting(shape: &[u64], start: u64) -> Tensor {
    let count = shape.iter().product::<u64>();
    let elements: Vec<f32> = (start..start + count).map(|n| n as f32).collect();
    Tensor::from_vec(elements, shape).unwrap()
}

pub(crate) fn now<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}
