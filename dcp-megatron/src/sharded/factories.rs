//! Factories of Megatron-Core's models: gated units, named parts of a tensor, grouped experts.

use std::sync::Arc;

use dcp_core::error::TensorError;
use dcp_core::{Dims, HostMemory, Region, Tensor, TensorView, Value};

use super::error::ShardError;
use super::factory::{FactoryParts, ShardedTensorFactory};
use super::local::LocalTensor;
use super::replica::ReplicaId;
use super::tensor::ShardedTensor;
use super::tree::ShardedValue;

/// The gate and up halves of a gated linear unit (`linear_fc1`), which each rank holds one behind
/// the other: stored as shards `r` and `r + t` of `2 t` under the same key, so that the whole
/// tensor is all of the gate, then all of up, whatever the tensor parallelism `t` is.
///
/// `shard` is the tensor as it would be without a factory; its first local axis is the one that
/// is cut.
///
/// # Errors
///
/// When the grid is irregular, the shard is a flattened range, or the axis is odd.
///
/// ```
/// use dcp_core::{DType, Region};
/// use dcp_megatron::sharded::{LocalTensor, ShardedTensor, ShardedValue, swiglu};
///
/// // The second of two tensor-parallel ranks.
/// let fc1 = ShardedTensor::from_rank_offsets("fc1", LocalTensor::described(DType::BFloat16, [12, 4]))
///     .offset(0, 1, 2)
///     .build()?;
/// let ShardedValue::List(halves) = swiglu(&fc1)?.build()? else { panic!() };
/// let [ShardedValue::Tensor(gate), ShardedValue::Tensor(up)] = &halves[..] else { panic!() };
/// assert_eq!(gate.region(), &Region::new([6, 0], [6, 4])?);
/// assert_eq!(up.region(), &Region::new([18, 0], [6, 4])?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "apply_swiglu_sharded_factory")]
pub fn swiglu(shard: &ShardedTensor) -> Result<ShardedTensorFactory, ShardError> {
    let grid = Grid::of(shard)?;
    halves_of(shard.local_shape(), 0, || shard.key().to_string())?;
    let build = move |parts: &FactoryParts| {
        let halves = grid.halves(parts, &parts.key, &parts.local, parts.replica_id.clone())?;
        Ok(ShardedValue::List(halves.map(ShardedValue::from).into()))
    };
    Ok(factory_of(shard, build))
}

/// Parts of one tensor that are stored under keys of their own, `key.name`, each a regular shard
/// of its own global tensor: the `in_proj` and `conv1d` of Mamba. `parts` are the names and the
/// rows that this rank has of each, in order.
///
/// # Errors
///
/// When the rows do not add up to the first axis of `shard`, or its grid is irregular.
pub fn named_split(
    shard: &ShardedTensor,
    parts: &[(&str, u64)],
) -> Result<ShardedTensorFactory, ShardError> {
    let grid = Grid::of(shard)?;
    let rows = parts.iter().try_fold(0_u64, |sum, (_, rows)| sum.checked_add(*rows));
    if rows.is_none() || rows != shard.local_shape().first().copied() {
        return Err(failed(
            shard.key(),
            format!("its parts have {rows:?} rows in all, its shape is {}", shard.local_shape()),
        ));
    }
    let named: Vec<(Arc<str>, u64)> =
        parts.iter().map(|(name, rows)| (Arc::from(*name), *rows)).collect();
    let build = move |parts: &FactoryParts| {
        let mut start = 0;
        let shards = named.iter().map(|(name, rows)| {
            let local = rows_of(parts, start, *rows)?;
            start += rows;
            let key = format!("{}.{name}", parts.key);
            let shard = grid.shard(key.into(), local, 1, 0, parts.replica_id.clone())?;
            Ok(shard.into())
        });
        Ok(ShardedValue::List(shards.collect::<Result<_, ShardError>>()?))
    };
    Ok(factory_of(shard, build))
}

/// The place of a rank's experts, for [`grouped_experts`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ExpertGrid {
    /// The first expert that this rank holds.
    pub first: u64,
    /// Experts of all ranks.
    pub experts: u64,
    /// Position on the layer axis, and layers; `None` where layers are not stacked.
    pub layer: Option<(u64, u64)>,
    /// The axis of an expert's stored weight `[out, in]` that tensor parallelism cuts, the rank's
    /// position, and the ranks.
    pub tensor_parallel: Option<(usize, u64, u64)>,
    /// Whether `out` is the gate and up halves of a gated linear unit.
    pub gated: bool,
}

impl ExpertGrid {
    /// Experts from `first` on, of `experts`; without a layer axis, tensor parallelism and gate.
    #[must_use]
    pub fn new(first: u64, experts: u64) -> Self {
        Self { first, experts, layer: None, tensor_parallel: None, gated: false }
    }

    /// Sets the position on the layer axis, and the number of layers.
    #[must_use]
    pub fn with_layer(mut self, position: u64, layers: u64) -> Self {
        self.layer = Some((position, layers));
        self
    }

    /// Sets the `axis` of each expert's weight `[out, in]` that tensor parallelism cuts, the rank's
    /// position, and the ranks.
    #[must_use]
    pub fn with_tensor_parallel(mut self, axis: usize, position: u64, ranks: u64) -> Self {
        self.tensor_parallel = Some((axis, position, ranks));
        self
    }

    /// Sets whether `out` is the gate and up halves of a gated linear unit.
    #[must_use]
    pub fn with_gated(mut self, gated: bool) -> Self {
        self.gated = gated;
        self
    }
}

/// Experts that a rank holds in one tensor `[experts here, in, out]` (`GroupedMLP`), stored as
/// those of separate experts are: each transposed to `[out, in]`, behind a layer axis and an
/// expert axis.
///
/// # Errors
///
/// When `local` has not three axes, or the halves of a gate are odd.
pub fn grouped_experts(
    key: impl Into<Arc<str>>,
    local: impl Into<LocalTensor>,
    experts: ExpertGrid,
) -> Result<ShardedTensorFactory, ShardError> {
    let (key, local) = (key.into(), local.into());
    let &[_, _, out] = &**local.shape() else {
        let problem = format!("experts have three axes, not shape {}", local.shape());
        return Err(failed(&key, problem));
    };
    if experts.gated {
        halves_of(&[out].into(), 0, || key.to_string())?;
    }
    let build = move |parts: &FactoryParts| {
        let &[here, rows, columns] = &**parts.local.shape() else {
            let problem = format!("experts have three axes, not shape {}", parts.local.shape());
            return Err(failed(&parts.key, problem));
        };
        let each = (0..here).map(|number| {
            let region = Region::new([number, 0, 0], [1, rows, columns]);
            let region = region.map_err(|error| failed(&parts.key, error.to_string()))?;
            let one = parts.local.narrow(&region).and_then(|one| one.permuted(&[0, 2, 1]));
            let one = one.and_then(LocalTensor::without_first_axis);
            let one = one.map_err(|error| planned(&parts.key, &error))?;
            let grid = experts.grid_of(number);
            if experts.gated {
                let halves = grid.halves(parts, &parts.key, &one, parts.replica_id.clone())?;
                return Ok(ShardedValue::List(halves.map(ShardedValue::from).into()));
            }
            let key = Arc::clone(&parts.key);
            grid.shard(key, one, 1, 0, parts.replica_id.clone()).map(Into::into)
        });
        Ok(ShardedValue::List(each.collect::<Result<_, ShardError>>()?))
    };
    Ok(ShardedTensorFactory::new(key, local, build, merge_experts))
}

impl ExpertGrid {
    fn grid_of(&self, number: u64) -> Grid {
        let mut places = Vec::new();
        if let Some((position, layers)) = self.layer {
            places.push((0, position, layers));
        }
        let prepended = places.len() + 1;
        places.push((prepended - 1, self.first.saturating_add(number), self.experts));
        let cut = self.tensor_parallel;
        places.extend(cut.map(|(axis, position, ranks)| (axis + prepended, position, ranks)));
        Grid { prepended, places }
    }
}

/// A place on an even grid, without the shape of its cell.
#[derive(Clone, Debug)]
struct Grid {
    prepended: usize,
    /// Axis, position, fragments.
    places: Vec<(usize, u64, u64)>,
}

impl Grid {
    fn of(shard: &ShardedTensor) -> Result<Self, ShardError> {
        let coordinate = shard.chunk_coordinate().filter(|_| shard.flattened_range().is_none());
        let (Some(coordinate), Some(fragments)) = (coordinate, shard.axis_fragmentations()) else {
            let problem = "only whole shards of a regular grid can be cut".to_owned();
            return Err(failed(shard.key(), problem));
        };
        let places = coordinate.iter().zip(&**fragments).enumerate();
        let places = places.map(|(axis, (at, of))| (axis, *at, *of)).collect();
        Ok(Self { prepended: shard.prepend_axis_num(), places })
    }

    /// The shard here, when the first local axis has `times` as many fragments, of which this is
    /// in part `part`.
    fn shard(
        &self,
        key: Arc<str>,
        local: LocalTensor,
        times: u64,
        part: u64,
        replica_id: ReplicaId,
    ) -> Result<ShardedTensor, ShardError> {
        let mut places = self.places.clone();
        if !places.iter().any(|(axis, ..)| *axis == self.prepended) {
            places.push((self.prepended, 0, 1));
        }
        let mut shard = ShardedTensor::from_rank_offsets(key, local)
            .prepended_axes(self.prepended)
            .replica_id(replica_id);
        for (axis, position, fragments) in places {
            let (position, fragments) = match axis == self.prepended {
                true => (
                    part.saturating_mul(fragments).saturating_add(position),
                    fragments.saturating_mul(times),
                ),
                false => (position, fragments),
            };
            shard = shard.offset(axis, position, fragments);
        }
        shard.build()
    }

    fn halves(
        &self,
        parts: &FactoryParts,
        key: &Arc<str>,
        local: &LocalTensor,
        replica_id: ReplicaId,
    ) -> Result<[ShardedTensor; 2], ShardError> {
        let half = halves_of(local.shape(), 0, || parts.key.to_string())?;
        let shard = |part: u64| {
            let local = rows(key, local, part * half, half)?;
            self.shard(Arc::clone(key), local, 2, part, replica_id.clone())
        };
        Ok([shard(0)?, shard(1)?])
    }
}

fn halves_of(shape: &Dims, axis: usize, key: impl FnOnce() -> String) -> Result<u64, ShardError> {
    match shape.get(axis) {
        Some(size) if size % 2 == 0 => Ok(size / 2),
        _ => Err(ShardError::Factory {
            key: key(),
            problem: format!("axis {axis} of shape {shape} has no two halves"),
        }),
    }
}

fn rows_of(parts: &FactoryParts, start: u64, count: u64) -> Result<LocalTensor, ShardError> {
    rows(&parts.key, &parts.local, start, count)
}

fn rows(
    key: &Arc<str>,
    local: &LocalTensor,
    start: u64,
    count: u64,
) -> Result<LocalTensor, ShardError> {
    let (mut offsets, mut sizes) = (Dims::zeros(local.shape().ndim()), local.shape().clone());
    if let (Some(offset), Some(size)) = (offsets.first_mut(), sizes.first_mut()) {
        (*offset, *size) = (start, count);
    }
    let region = Region::new(offsets, sizes).map_err(|error| failed(key, error.to_string()))?;
    local.narrow(&region).map_err(|error| planned(key, &error))
}

/// A factory of a shard whose parts are concatenated along the first axis.
fn factory_of(
    shard: &ShardedTensor,
    build: impl Fn(&FactoryParts) -> Result<ShardedValue, ShardError> + Send + Sync + 'static,
) -> ShardedTensorFactory {
    let local = match shard.data() {
        Some(data) => data.clone().into(),
        None => LocalTensor::described(shard.dtype(), shard.local_shape().clone()),
    };
    ShardedTensorFactory::new(Arc::clone(shard.key()), local, build, merge_rows)
        .with_replica_id(shard.replica_id().clone())
}

/// Concatenates tensors along the first axis. What was loaded into the factory's own
/// memory is there already.
fn merge_rows(parts: &FactoryParts, loaded: Value) -> Result<Value, ShardError> {
    let views = views(parts, &loaded)?;
    if let Some(there) = in_place(parts, &views)? {
        return Ok(there);
    }
    let mut bytes = Vec::new();
    for view in &views {
        append(parts, view, &mut bytes)?;
    }
    finished(parts, bytes)
}

/// Puts experts of `[out, in]`, perhaps in halves, into one tensor `[experts, in, out]`.
fn merge_experts(parts: &FactoryParts, loaded: Value) -> Result<Value, ShardError> {
    let all = views(parts, &loaded)?;
    if let Some(there) = in_place(parts, &all)? {
        return Ok(there);
    }
    let Value::List(experts) = &loaded else {
        return Err(failed(&parts.key, format!("a {} instead of experts", loaded.kind())));
    };
    let mut bytes = Vec::new();
    for expert in experts {
        let rows = merge_list(parts, expert)?;
        let transposed = rows.with_axes(&[Some(1), Some(0)]);
        let transposed = transposed.map_err(|error| planned(&parts.key, &error))?;
        append(parts, &transposed, &mut bytes)?;
    }
    finished(parts, bytes)
}

/// The tensors of a value one behind the other along the first axis.
fn merge_list(parts: &FactoryParts, value: &Value) -> Result<TensorView, ShardError> {
    let views = views(parts, value)?;
    if let [view] = &*views {
        return Ok(view.clone());
    }
    let (mut bytes, mut shape) = (Vec::new(), Dims::default());
    for view in &views {
        append(parts, view, &mut bytes)?;
        match (shape.first_mut(), view.shape().first()) {
            (Some(rows), Some(more)) => *rows = rows.saturating_add(*more),
            _ => shape = view.shape().clone(),
        }
    }
    TensorView::contiguous(HostMemory::from_vec(bytes), parts.local.dtype(), shape, 0)
        .map_err(|error| planned(&parts.key, &error))
}

/// The local tensors in a loaded value, in order.
fn views(parts: &FactoryParts, loaded: &Value) -> Result<Vec<TensorView>, ShardError> {
    match loaded {
        Value::List(items) => {
            let nested = items.iter().map(|item| views(parts, item));
            Ok(nested.collect::<Result<Vec<_>, _>>()?.concat())
        }
        Value::Tensor(tensor) => match tensor.shards() {
            [shard] if shard.dtype() == parts.local.dtype() => {
                let view = shard.host_view(&parts.key);
                Ok(vec![view.map_err(|error| planned(&parts.key, &error))?.clone()])
            }
            _ => Err(failed(&parts.key, "a part is not one tensor of its dtype".to_owned())),
        },
        other => Err(failed(&parts.key, format!("a part is a {}", other.kind()))),
    }
}

/// The factory's own tensor, when all parts lie in its memory.
fn in_place(parts: &FactoryParts, views: &[TensorView]) -> Result<Option<Value>, ShardError> {
    let Some(data) = parts.local.data() else { return Ok(None) };
    if !views.iter().all(|view| view.memory().is_same(data.memory())) {
        return Ok(None);
    }
    let tensor = Tensor::from_view(data.clone()).map_err(|error| planned(&parts.key, &error))?;
    Ok(Some(tensor.into()))
}

fn append(parts: &FactoryParts, view: &TensorView, bytes: &mut Vec<u8>) -> Result<(), ShardError> {
    let payload = view.payload().map_err(|error| failed(&parts.key, error.to_string()))?;
    payload.pieces().iter().for_each(|piece| bytes.extend_from_slice(piece));
    Ok(())
}

fn finished(parts: &FactoryParts, bytes: Vec<u8>) -> Result<Value, ShardError> {
    let view = match parts.local.data() {
        Some(data) => {
            data.fill_from(&bytes).map_err(|error| failed(&parts.key, error.to_string()))?;
            Ok(data.clone())
        }
        None => {
            let (memory, shape) = (HostMemory::from_vec(bytes), parts.local.shape().clone());
            let exact = memory.len();
            TensorView::contiguous(memory, parts.local.dtype(), shape, 0)
                .map_err(|error| planned(&parts.key, &error))
                .and_then(|view| match view.byte_len() == exact as u64 {
                    true => Ok(view),
                    false => Err(failed(&parts.key, format!("{exact} bytes were loaded"))),
                })
        }
    }?;
    let tensor = Tensor::from_view(view).map_err(|error| planned(&parts.key, &error))?;
    Ok(tensor.into())
}

fn failed(key: &Arc<str>, problem: String) -> ShardError {
    ShardError::Factory { key: key.to_string(), problem }
}

fn planned(key: &Arc<str>, error: &TensorError) -> ShardError {
    failed(key, error.to_string())
}
