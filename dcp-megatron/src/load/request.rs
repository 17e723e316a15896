//! A rank's load request as the engine's state dict, and the loaded values back in the tree.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::error::TensorError;
use dcp_core::text::Quoted;
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointMetadata, DType, Dims, HostMemory, Region, Shard, StateDict, Tensor, TensorView,
    Value,
};
use dcp_formats::torch_save::decode_only_item;

use crate::error::{MegatronError, PlanRefusal};
use crate::save::prepare::{boxes_of_range, one_name};
use crate::sharded::{
    ShardError, ShardedLeaf, ShardedStateDict, ShardedTensor, ShardedValue, sharded_leaves,
    to_values,
};

/// A rank's tensors and objects by stored name.
#[derive(Debug)]
pub(crate) struct Request {
    /// Tensors with the memory to fill, and `None` for objects.
    pub(crate) flat: StateDict,
    tensors: Vec<Wanted>,
    /// The memory of each tensor leaf, in the order of the state dict.
    views: Vec<TensorView>,
    /// The number of leaves that request an object.
    objects: HashMap<String, usize>,
}

/// A tensor, requested in one or more shards.
#[derive(Debug)]
struct Wanted {
    key: Arc<str>,
    dtype: DType,
    shape: Dims,
    allow_shape_mismatch: bool,
    shards: Vec<Shard>,
    /// Positions of its leaves.
    views: Vec<usize>,
}

impl Request {
    pub(crate) fn new(sharded: &ShardedStateDict) -> Result<Self, MegatronError> {
        let mut tensors: Vec<Wanted> = Vec::new();
        let mut known: HashMap<Arc<str>, usize> = HashMap::new();
        let (mut views, mut objects) = (Vec::new(), HashMap::new());
        let mut flat = StateDict::new();
        for leaf in sharded_leaves(sharded) {
            match leaf {
                ShardedLeaf::Object(object) => {
                    *objects.entry(object.unique_key()).or_insert(0) += 1;
                    flat.insert(object.unique_key(), Value::None);
                }
                ShardedLeaf::Tensor(tensor) => {
                    let key = tensor.key();
                    let at = *known.entry(Arc::clone(key)).or_insert_with(|| {
                        tensors.push(Wanted::new(tensor));
                        tensors.len() - 1
                    });
                    let view = memory(tensor)?;
                    if let Some(wanted) = tensors.get_mut(at) {
                        wanted.agree(tensor)?;
                        wanted.views.push(views.len());
                        wanted.shards.extend(shards(tensor, &view)?);
                    }
                    views.push(view);
                }
            }
        }
        for wanted in &tensors {
            let tensor = Tensor::sharded(wanted.dtype, wanted.shape.clone(), wanted.shards.clone());
            let tensor = tensor.map_err(|error| error.with_fqn(&*wanted.key))?;
            if flat.insert(Arc::clone(&wanted.key), tensor).is_some() {
                return Err(one_name(&wanted.key).into());
            }
        }
        Ok(Self { flat, tensors, views, objects })
    }

    /// Tensors that are stored with another element type: key, stored, requested.
    pub(crate) fn casts(&self, stored: &CheckpointMetadata) -> Vec<(Arc<str>, DType, DType)> {
        let casts = self.tensors.iter().filter_map(|wanted| {
            let found = stored.get(&wanted.key)?.as_tensor()?.dtype;
            (found != wanted.dtype).then(|| (Arc::clone(&wanted.key), found, wanted.dtype))
        });
        casts.collect()
    }

    /// The requested dtypes of tensors.
    pub(crate) fn dtypes(&self) -> impl Iterator<Item = (&Arc<str>, DType)> {
        self.tensors.iter().map(|wanted| (&wanted.key, wanted.dtype))
    }

    /// Tensors that are stored in another shape with as many axes, where that is allowed: key,
    /// stored, requested.
    pub(crate) fn reshaped(&self, stored: &CheckpointMetadata) -> Vec<(Arc<str>, Dims, Dims)> {
        let reshaped = self.tensors.iter().filter_map(|wanted| {
            let found = &stored.get(&wanted.key)?.as_tensor()?.shape;
            let differs = *found != wanted.shape && found.ndim() == wanted.shape.ndim();
            (differs && wanted.allow_shape_mismatch)
                .then(|| (Arc::clone(&wanted.key), found.clone(), wanted.shape.clone()))
        });
        reshaped.collect()
    }

    /// The memory of those tensors, with their keys.
    pub(crate) fn views_of(
        &self,
        reshaped: &[(Arc<str>, Dims, Dims)],
    ) -> Vec<(Arc<str>, TensorView)> {
        let keys: HashSet<&str> = reshaped.iter().map(|(key, ..)| &**key).collect();
        let wanted = self.tensors.iter().filter(|wanted| keys.contains(&*wanted.key));
        wanted
            .flat_map(|wanted| wanted.views.iter().map(|at| (&wanted.key, *at)))
            .filter_map(|(key, at)| Some((Arc::clone(key), self.views.get(at)?.clone())))
            .collect()
    }

    /// The tree with the loaded values.
    pub(crate) fn into_values(self, sharded: &ShardedStateDict) -> Result<Dict, MegatronError> {
        let Self { flat, views, objects, .. } = self;
        let mut items = HashMap::with_capacity(objects.len());
        for (key, count) in objects {
            let value = flat.get(&key).cloned().unwrap_or(Value::None);
            items.insert(key.clone(), elements(&key, value, count)?.into_iter());
        }
        let mut views = views.into_iter();
        let lost = |key: &str| ShardError::Object {
            key: key.to_owned(),
            problem: "it was not loaded".to_owned(),
        };
        Ok(to_values(sharded, &mut |leaf| match leaf {
            ShardedValue::Tensor(tensor) => {
                let view = views.next().ok_or_else(|| lost(tensor.key()))?;
                Tensor::from_view(view).map(Value::from).map_err(|_| lost(tensor.key()))
            }
            ShardedValue::Object(object) => {
                let key = object.unique_key();
                items.get_mut(&key).and_then(Iterator::next).ok_or_else(|| lost(&key))
            }
            ShardedValue::Local(object) => Ok(object.0.clone()),
            _ => Ok(Value::None),
        })?)
    }
}

impl Wanted {
    fn new(tensor: &ShardedTensor) -> Self {
        Self {
            key: Arc::clone(tensor.key()),
            dtype: tensor.dtype(),
            shape: tensor.global_shape().clone(),
            allow_shape_mismatch: tensor.allow_shape_mismatch(),
            shards: Vec::new(),
            views: Vec::new(),
        }
    }

    fn agree(&self, tensor: &ShardedTensor) -> Result<(), PlanRefusal> {
        if self.dtype == tensor.dtype() && self.shape == *tensor.global_shape() {
            return Ok(());
        }
        let (dtype, shape) = (tensor.dtype(), tensor.global_shape());
        Err(PlanRefusal::RequestedTwice {
            key: self.key.to_string(),
            first: format!("{} of shape {}", self.dtype, self.shape),
            second: format!("{dtype} of shape {shape}"),
        })
    }
}

/// The memory that a tensor is loaded into: its own, or new one.
fn memory(tensor: &ShardedTensor) -> Result<TensorView, MegatronError> {
    if let Some(data) = tensor.data() {
        return Ok(data.clone());
    }
    let shape = match tensor.flattened_range() {
        Some(range) => Dims::from([range.end.saturating_sub(range.start)]),
        None => tensor.local_shape().clone(),
    };
    // The volume of all of the tensor was counted when it was built.
    let bytes = shape.checked_volume().unwrap_or(0).checked_mul(tensor.dtype().size() as u64);
    let memory = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let memory =
        memory.and_then(HostMemory::try_zeroed).ok_or_else(|| TensorError::OutOfMemory {
            what: format!("a shard of {}", Quoted(tensor.key())),
            byte_len: bytes.unwrap_or(u64::MAX),
        })?;
    let view = TensorView::contiguous(memory, tensor.dtype(), shape, 0);
    Ok(view.map_err(|error: TensorError| error.with_fqn(&**tensor.key()))?)
}

/// The regions of the whole tensor to read into `view`.
fn shards(tensor: &ShardedTensor, view: &TensorView) -> Result<Vec<Shard>, MegatronError> {
    let named = |error: TensorError| error.with_fqn(&**tensor.key());
    let Some(range) = tensor.flattened_range() else {
        let data = tensor.clone().with_data(view.clone())?.global_data();
        let data = data.ok_or_else(|| TensorError::Invalid {
            fqn: Some(tensor.key().to_string()),
            problem: "its memory is not a part of the whole tensor".to_owned(),
        })?;
        return Ok(vec![Shard::with_view(tensor.region().clone(), data).map_err(named)?]);
    };
    let boxes = boxes_of_range(tensor.region(), range.start, range.end);
    let shards = boxes.into_iter().map(|(first, region)| {
        let part = Region::new([first], [region.volume()]);
        let part = part.map_err(|error| named(error.into()))?;
        let data = view.narrow(&part).and_then(|part| part.reshape(region.sizes().clone()));
        Shard::with_view(region, data.map_err(named)?).map_err(named)
    });
    Ok(shards.collect::<Result<_, TensorError>>()?)
}

/// The elements of a stored list for the leaves that request it: one for each of them, or one for
/// all.
fn elements(key: &str, value: Value, count: usize) -> Result<Vec<Value>, MegatronError> {
    let mut items = match value {
        Value::List(items) => items,
        Value::Opaque(opaque) => vec![decode_only_item(&opaque.encoded)?],
        other => {
            let problem = format!("it is stored as a {}, not as a list", other.kind());
            return Err(ShardError::Object { key: key.to_owned(), problem }.into());
        }
    };
    if let [only] = &*items {
        items = vec![only.clone(); count];
    }
    if items.len() != count {
        let problem = format!("{} are stored, {count} are requested", items.len());
        return Err(ShardError::Object { key: key.to_owned(), problem }.into());
    }
    Ok(items)
}
