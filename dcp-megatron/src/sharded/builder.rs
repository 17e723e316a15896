//! Builds checked shards from grid positions or explicit offsets.

use std::ops::Range;
use std::sync::Arc;

use dcp_core::{Dims, Region};

use super::error::ShardError;
use super::local::LocalTensor;
use super::replica::ReplicaId;
use super::tensor::ShardedTensor;

/// Describes a [`ShardedTensor`]; made by [`ShardedTensor::from_rank_offsets`] and
/// [`ShardedTensor::builder`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct ShardedTensorBuilder {
    key: Arc<str>,
    local: LocalTensor,
    place: Place,
    replica_id: ReplicaId,
    prepend_axis_num: usize,
    allow_shape_mismatch: bool,
    flattened: Option<(Range<u64>, Option<Dims>)>,
    /// The setters that do not apply to the place.
    misplaced: Option<&'static str>,
}

#[derive(Clone, Debug)]
pub(super) enum Place {
    Ranks(Vec<(usize, u64, u64)>),
    Global { shape: Dims, offset: Dims, fragmentations: Option<Dims> },
}

impl ShardedTensorBuilder {
    pub(super) fn new(key: Arc<str>, local: LocalTensor, place: Place) -> Self {
        Self {
            key,
            local,
            place,
            replica_id: ReplicaId::MAIN,
            prepend_axis_num: 0,
            allow_shape_mismatch: false,
            flattened: None,
            misplaced: None,
        }
    }

    /// The shard is number `position` of `fragments` equal ones along a global axis, counted with
    /// the prepended ones. Only after [`ShardedTensor::from_rank_offsets`].
    pub fn offset(mut self, axis: usize, position: u64, fragments: u64) -> Self {
        match &mut self.place {
            Place::Ranks(ranks) => ranks.push((axis, position, fragments)),
            Place::Global { .. } => {
                self.misplaced = Some(
                    "positions on an axis go with `ShardedTensor::from_rank_offsets`, not with \
                     the global offset of `ShardedTensor::builder`",
                );
            }
        }
        self
    }

    /// Sets the number of leading axes of the global shape that the local shard does not have.
    pub fn prepended_axes(mut self, count: usize) -> Self {
        self.prepend_axis_num = count;
        self
    }

    /// The number of equal shards along each global axis. Only after [`ShardedTensor::builder`],
    /// which takes shape and offset.
    pub fn axis_fragmentations(mut self, counts: impl Into<Dims>) -> Self {
        match &mut self.place {
            Place::Global { fragmentations, .. } => *fragmentations = Some(counts.into()),
            Place::Ranks(_) => {
                self.misplaced = Some(
                    "axis fragmentations go with the global shape of `ShardedTensor::builder`; \
                     those of `ShardedTensor::from_rank_offsets` follow from its positions",
                );
            }
        }
        self
    }

    /// Sets the identifier of the shard's replica; the main one by default.
    pub fn replica_id(mut self, id: impl Into<ReplicaId>) -> Self {
        self.replica_id = id.into();
        self
    }

    /// Whether on a load the stored tensor may have another shape.
    pub fn allow_shape_mismatch(mut self, allow: bool) -> Self {
        self.allow_shape_mismatch = allow;
        self
    }

    /// The memory holds only these elements of the shard, in row-major order and as one axis, as
    /// optimizer states of Megatron-Core 0.15 and before. The shard itself has `local_shape`.
    #[doc(alias = "from_rank_offsets_flat")]
    pub fn flattened_range(mut self, range: Range<u64>, local_shape: impl Into<Dims>) -> Self {
        self.flattened = Some((range, Some(local_shape.into())));
        self
    }

    /// The shard.
    ///
    /// # Errors
    ///
    /// When the numbers contradict each other: see [`ShardError`]. An axis that is placed twice
    /// is refused, where Megatron-Core silently takes the last place, and so is a place that is
    /// described in both ways.
    pub fn build(self) -> Result<ShardedTensor, ShardError> {
        let Self { key, mut local, place, replica_id, prepend_axis_num, .. } = self;
        if let Some(problem) = self.misplaced {
            return Err(ShardError::Misplaced { key: key.to_string(), problem });
        }
        let mut flattened_range = None;
        if let Some((range, Some(shape))) = self.flattened {
            check_range(&key, &range, &shape)?;
            local.shape = shape;
            flattened_range = Some(range);
        }
        let sizes: Dims =
            std::iter::repeat_n(1, prepend_axis_num).chain(local.shape.iter().copied()).collect();
        let (global_shape, offsets, axis_fragmentations) = match place {
            Place::Ranks(ranks) => on_even_grid(&key, &sizes, &ranks)?,
            Place::Global { shape, offset, fragmentations } => (shape, offset, fragmentations),
        };
        let axes = |what, found| ShardError::Axes {
            key: key.to_string(),
            what,
            found,
            global: global_shape.clone(),
        };
        if offsets.ndim() != global_shape.ndim() {
            return Err(axes("offsets", offsets.ndim()));
        }
        if sizes.ndim() != global_shape.ndim() {
            return Err(axes("local and prepended axes", sizes.ndim()));
        }
        if let Some(fragmentations) = &axis_fragmentations {
            if fragmentations.ndim() != global_shape.ndim() {
                return Err(axes("axis fragmentations", fragmentations.ndim()));
            }
            let placed = offsets.iter().zip(&*sizes).enumerate();
            for (axis, (&offset, &size)) in placed.skip(prepend_axis_num) {
                if size != 0 && offset % size != 0 {
                    let key = key.to_string();
                    return Err(ShardError::OffGrid { key, axis, offset, local: size });
                }
            }
        }
        let region = Region::new(offsets, sizes).map_err(|error| ShardError::TooLarge {
            key: key.to_string(),
            problem: error.to_string(),
        })?;
        let tensor = ShardedTensor {
            key,
            local,
            global_shape,
            region,
            axis_fragmentations,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch: self.allow_shape_mismatch,
            flattened_range,
        };
        tensor.check_size()?;
        tensor.check_data()?;
        Ok(tensor)
    }
}

type Grid = (Dims, Dims, Option<Dims>);

/// Global shape, offset and fragmentations of a shard of `sizes` at the given places.
fn on_even_grid(
    key: &Arc<str>,
    sizes: &Dims,
    ranks: &[(usize, u64, u64)],
) -> Result<Grid, ShardError> {
    let (mut shape, mut offsets) = (sizes.clone(), Dims::zeros(sizes.ndim()));
    let mut fragmentations: Dims = std::iter::repeat_n(1, sizes.ndim()).collect();
    let mut placed = vec![false; sizes.ndim()];
    for &(axis, position, fragments) in ranks {
        let refuse = |problem| ShardError::RankOffset {
            key: key.to_string(),
            axis,
            position,
            fragments,
            problem,
        };
        let (Some(size), Some(seen)) = (sizes.get(axis), placed.get_mut(axis)) else {
            return Err(refuse("there is no such axis"));
        };
        if std::mem::replace(seen, true) {
            return Err(refuse("the axis is placed twice"));
        }
        if position >= fragments {
            return Err(refuse("positions count from 0 to one less than the fragments"));
        }
        let whole =
            size.checked_mul(fragments).ok_or_else(|| refuse("the size exceeds 64 bits"))?;
        for (numbers, n) in [
            (&mut shape, whole),
            // Less than the whole, which fits.
            (&mut offsets, size * position),
            (&mut fragmentations, fragments),
        ] {
            if let Some(slot) = numbers.get_mut(axis) {
                *slot = n;
            }
        }
    }
    Ok((shape, offsets, Some(fragmentations)))
}

fn check_range(key: &Arc<str>, range: &Range<u64>, shape: &Dims) -> Result<(), ShardError> {
    let volume = shape.checked_volume();
    if range.start <= range.end && volume.is_some_and(|volume| range.end <= volume) {
        return Ok(());
    }
    Err(ShardError::Flattened {
        key: key.to_string(),
        start: range.start,
        end: range.end,
        problem: format!("a shard of shape {shape} has no such elements"),
    })
}
