//! A rank's shard of a global tensor.

use std::ops::Range;
use std::sync::Arc;

use dcp_core::{DType, Dims, Region, TensorView};

use super::builder::{Place, ShardedTensorBuilder};
use super::error::ShardError;
use super::local::LocalTensor;
use super::replica::ReplicaId;

/// A rank's shard of a global tensor, in the terms of Megatron-Core's `ShardedTensor`.
///
/// The global shape begins with the prepended axes, which the local shard does not have: it is at
/// one position of each, as a layer does on the layer axis. Offsets are in elements. Where the
/// grid is regular, [`axis_fragmentations`](Self::axis_fragmentations) says how many shards there
/// are along each axis; whether that fits the shapes, and whether all ranks together make the
/// tensor, is checked with all ranks' shards at hand
/// ([`validate_sharding_integrity`](super::validate_sharding_integrity)).
#[derive(Clone, Debug)]
pub struct ShardedTensor {
    pub(super) key: Arc<str>,
    pub(super) local: LocalTensor,
    pub(super) global_shape: Dims,
    pub(super) region: Region,
    pub(super) axis_fragmentations: Option<Dims>,
    pub(super) replica_id: ReplicaId,
    pub(super) prepend_axis_num: usize,
    pub(super) allow_shape_mismatch: bool,
    pub(super) flattened_range: Option<Range<u64>>,
}

impl ShardedTensor {
    /// The shard of `key` at a position of an even grid: `local` and, with
    /// [`offset`](ShardedTensorBuilder::offset), its place on every axis that is cut. Axes that
    /// are not mentioned are whole.
    ///
    /// ```
    /// use dcp_core::{DType, Region};
    /// use dcp_megatron::sharded::{LocalTensor, ShardedTensor};
    ///
    /// // Layer 3 of 24, its rows the second half under tensor parallelism of two.
    /// let shard = ShardedTensor::from_rank_offsets(
    ///     "decoder.layers.mlp.linear_fc1.weight",
    ///     LocalTensor::described(DType::BFloat16, [512, 256]),
    /// )
    /// .prepended_axes(1)
    /// .offset(0, 3, 24)
    /// .offset(1, 1, 2)
    /// .replica_id([0, 0, 0])
    /// .build()?;
    /// assert_eq!(shard.global_shape(), &[24, 1024, 256].into());
    /// assert_eq!(shard.region(), &Region::new([3, 512, 0], [1, 512, 256])?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_rank_offsets(
        key: impl Into<Arc<str>>,
        local: impl Into<LocalTensor>,
    ) -> ShardedTensorBuilder {
        ShardedTensorBuilder::new(key.into(), local.into(), Place::Ranks(Vec::new()))
    }

    /// The shard of `key` at `global_offset` of a tensor of `global_shape`, both with the
    /// prepended axes. The grid is irregular unless
    /// [`axis_fragmentations`](ShardedTensorBuilder::axis_fragmentations) say otherwise.
    pub fn builder(
        key: impl Into<Arc<str>>,
        local: impl Into<LocalTensor>,
        global_shape: impl Into<Dims>,
        global_offset: impl Into<Dims>,
    ) -> ShardedTensorBuilder {
        let (shape, offset) = (global_shape.into(), global_offset.into());
        let place = Place::Global { shape, offset, fragmentations: None };
        ShardedTensorBuilder::new(key.into(), local.into(), place)
    }

    /// The name of the global tensor.
    #[must_use]
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// The memory of this shard: of the local shape, or for a flattened range of one axis.
    #[must_use]
    pub fn data(&self) -> Option<&TensorView> {
        self.local.data.as_ref()
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.local.dtype
    }

    /// The shape of the shard without the prepended axes; with a flattened range, of the block
    /// that the range is of.
    #[must_use]
    pub fn local_shape(&self) -> &Dims {
        &self.local.shape
    }

    /// The shape of the whole tensor with the prepended axes.
    #[must_use]
    pub fn global_shape(&self) -> &Dims {
        &self.global_shape
    }

    /// Returns the offsets of the shard in the whole tensor.
    #[must_use]
    pub fn global_offset(&self) -> &Dims {
        self.region.offsets()
    }

    /// The box of the whole tensor that this is a shard of.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Shards along each global axis; `None` for an irregular grid.
    #[must_use]
    pub fn axis_fragmentations(&self) -> Option<&Dims> {
        self.axis_fragmentations.as_ref()
    }

    /// Returns the identifier of the shard's replica.
    #[must_use]
    pub fn replica_id(&self) -> &ReplicaId {
        &self.replica_id
    }

    /// Returns the number of leading global axes that the local shard does not have.
    #[must_use]
    pub fn prepend_axis_num(&self) -> usize {
        self.prepend_axis_num
    }

    /// Whether on a load the stored tensor may have another shape; what is not stored is then
    /// zero.
    #[must_use]
    pub fn allow_shape_mismatch(&self) -> bool {
        self.allow_shape_mismatch
    }

    /// The elements of the shard in row-major order that are here, in checkpoints of
    /// Megatron-Core 0.15 and before.
    #[must_use]
    pub fn flattened_range(&self) -> Option<&Range<u64>> {
        self.flattened_range.as_ref()
    }

    /// The shard's position in a regular grid; `None` when the grid is irregular.
    #[must_use]
    #[doc(alias = "local_chunk_offset_in_global")]
    pub fn chunk_coordinate(&self) -> Option<Dims> {
        self.axis_fragmentations.as_ref()?;
        let (offsets, sizes) = (self.region.offsets().iter(), self.region.sizes().iter());
        Some(offsets.zip(sizes).map(|(offset, size)| offset / (*size).max(1)).collect())
    }

    /// The memory with the prepended axes: shaped as [`region`](Self::region). `None` without
    /// memory and for flattened ranges.
    #[must_use]
    pub fn global_data(&self) -> Option<TensorView> {
        match self.flattened_range {
            None => {
                let axes: Vec<Option<usize>> = std::iter::repeat_n(None, self.prepend_axis_num)
                    .chain((0..self.local.shape.ndim()).map(Some))
                    .collect();
                self.data()?.with_axes(&axes).ok()
            }
            Some(_) => None,
        }
    }

    /// Sets the identifier of the shard's replica.
    #[must_use]
    pub fn with_replica_id(mut self, replica_id: impl Into<ReplicaId>) -> Self {
        self.replica_id = replica_id.into();
        self
    }

    /// Replaces the key.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<Arc<str>>) -> Self {
        self.key = key.into();
        self
    }

    /// Removes the memory, which leaves the description for other ranks.
    #[must_use]
    pub fn without_data(mut self) -> Self {
        self.local.data = None;
        self
    }

    /// Replaces the memory.
    ///
    /// # Errors
    ///
    /// When dtype or shape are others.
    pub fn with_data(mut self, data: TensorView) -> Result<Self, ShardError> {
        self.local.data = Some(data);
        self.check_data()?;
        Ok(self)
    }

    /// Replaces the local tensor by one in other memory or without memory, also of another dtype:
    /// optimizer state of 32 bits, for example, in the place of its parameter of 16 bits. Give it a
    /// [key](Self::with_key) of its own.
    ///
    /// # Errors
    ///
    /// When the shape is another one, or of a flattened range the length.
    #[doc(alias = "make_sharded_optimizer_tensor")]
    pub fn with_local(mut self, local: impl Into<LocalTensor>) -> Result<Self, ShardError> {
        let local = local.into();
        let expected = self.data_shape();
        if local.shape != expected {
            let (key, data) = (self.key.to_string(), local.shape);
            return Err(ShardError::DataShape { key, local: expected, data });
        }
        (self.local.dtype, self.local.data) = (local.dtype, local.data);
        self.check_size()?;
        self.check_data()?;
        Ok(self)
    }

    /// A part of this shard as a shard of a smaller tensor, which has this part of every shard
    /// along `axis`: what Megatron-Core's `narrow` makes. The axis counts without the prepended
    /// ones.
    ///
    /// # Errors
    ///
    /// When the part is outside the shard, `len` does not divide the local size, the shard does
    /// not begin at a multiple of that, or it is a flattened range.
    pub fn narrow(&self, axis: usize, start: u64, len: u64) -> Result<Self, ShardError> {
        let refuse = |problem: &str| ShardError::Narrow {
            key: self.key.to_string(),
            axis,
            start,
            len,
            problem: problem.to_owned(),
        };
        if self.flattened_range.is_some() {
            return Err(refuse("it is a flattened range"));
        }
        let local = *self.local.shape.get(axis).ok_or_else(|| refuse("there is no such axis"))?;
        if start.checked_add(len).is_none_or(|end| end > local) {
            return Err(refuse(&format!("the shard has {local}")));
        }
        let global_axis = axis + self.prepend_axis_num;
        let scale = |n: u64| match local {
            0 => Some(0),
            _ => n.checked_mul(len).filter(|scaled| scaled % local == 0).map(|n| n / local),
        };
        let (mut global_shape, mut offsets) =
            (self.global_shape.clone(), self.region.offsets().clone());
        let irregular = || refuse("offset and global size do not scale to whole elements");
        for numbers in [&mut global_shape, &mut offsets] {
            if let Some(n) = numbers.get_mut(global_axis) {
                *n = scale(*n).ok_or_else(irregular)?;
            }
        }
        let (mut sizes, mut from) =
            (self.local.shape.clone(), Dims::zeros(self.local.shape.ndim()));
        if let (Some(size), Some(first)) = (sizes.get_mut(axis), from.get_mut(axis)) {
            (*size, *first) = (len, start);
        }
        let region =
            Region::new(from, sizes.clone()).map_err(|error| refuse(&error.to_string()))?;
        let data = self.data().map(|data| data.narrow(&region)).transpose();
        let data = data.map_err(|error| refuse(&error.to_string()))?;
        let local = LocalTensor { dtype: self.local.dtype, shape: sizes, data };
        let mut part = Self::builder(Arc::clone(&self.key), local, global_shape, offsets)
            .prepended_axes(self.prepend_axis_num)
            .replica_id(self.replica_id.clone())
            .allow_shape_mismatch(self.allow_shape_mismatch);
        if let Some(fragmentations) = &self.axis_fragmentations {
            part = part.axis_fragmentations(fragmentations.clone());
        }
        part.build()
    }

    /// The shape of the memory.
    fn data_shape(&self) -> Dims {
        match &self.flattened_range {
            Some(range) => Dims::from([range.end.saturating_sub(range.start)]),
            None => self.local.shape.clone(),
        }
    }

    /// Whether the bytes of the whole tensor can be counted.
    pub(super) fn check_size(&self) -> Result<(), ShardError> {
        let volume = self.global_shape.checked_volume();
        match volume.and_then(|volume| volume.checked_mul(self.local.dtype.size() as u64)) {
            Some(_) => Ok(()),
            None => Err(ShardError::TooLarge {
                key: self.key.to_string(),
                problem: format!("the bytes of global shape {}", self.global_shape),
            }),
        }
    }

    pub(super) fn check_data(&self) -> Result<(), ShardError> {
        let Some(data) = &self.local.data else { return Ok(()) };
        let key = || self.key.to_string();
        if data.dtype() != self.local.dtype {
            let (declared, data) = (self.local.dtype, data.dtype());
            return Err(ShardError::DType { key: key(), declared, data });
        }
        let expected = self.data_shape();
        if *data.shape() != expected {
            let data = data.shape().clone();
            return Err(ShardError::DataShape { key: key(), local: expected, data });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::HostMemory;

    use super::*;

    fn f32s(shape: &[u64]) -> LocalTensor {
        LocalTensor::described(DType::Float32, shape)
    }

    fn memory(shape: &[u64]) -> TensorView {
        let bytes: Vec<u8> = (0..shape.iter().product::<u64>() as u8).collect();
        TensorView::contiguous(HostMemory::from_vec(bytes), DType::UInt8, shape, 0).unwrap()
    }

    #[test]
    fn rank_offsets_make_an_even_grid() {
        let shard = ShardedTensor::from_rank_offsets("w", f32s(&[24, 8]))
            .prepended_axes(2)
            .offset(0, 3, 4)
            .offset(1, 1, 2)
            .offset(2, 1, 3)
            .replica_id((0, 0, 1))
            .build()
            .unwrap();
        assert_eq!(shard.global_shape(), &[4, 2, 72, 8].into());
        assert_eq!(shard.global_offset(), &[3, 1, 24, 0].into());
        assert_eq!(shard.region().sizes(), &[1, 1, 24, 8].into());
        assert_eq!(shard.axis_fragmentations(), Some(&[4, 2, 3, 1].into()));
        assert_eq!(shard.chunk_coordinate(), Some([3, 1, 1, 0].into()));
        assert!(!shard.replica_id().is_main());
    }

    /// Trap 12: Megatron-Core silently takes the last of two places on one axis.
    #[test]
    fn trap_12_an_axis_placed_twice_is_refused() {
        let twice = ShardedTensor::from_rank_offsets("w", f32s(&[4])).offset(0, 0, 2);
        let error = twice.offset(0, 1, 2).build().unwrap_err();
        assert!(error.to_string().contains("placed twice"), "{error}");
    }

    #[test]
    fn places_that_are_none_are_refused() {
        let place = |axis, position, fragments| {
            ShardedTensor::from_rank_offsets("w", f32s(&[4]))
                .offset(axis, position, fragments)
                .build()
        };
        assert!(place(0, 1, 2).is_ok());
        for (axis, position, fragments) in [(1, 0, 1), (0, 2, 2), (0, 0, 0), (0, 1, u64::MAX)] {
            let error = place(axis, position, fragments).unwrap_err();
            assert!(matches!(error, ShardError::RankOffset { .. }), "{error}");
        }
    }

    #[test]
    fn shapes_and_offsets_that_contradict_each_other_are_refused() {
        let build = |local: &[u64], global: &[u64], offset: &[u64]| {
            ShardedTensor::builder("w", f32s(local), global, offset)
        };
        assert!(build(&[3], &[7], &[4]).build().is_ok());
        assert!(matches!(build(&[3], &[7], &[4, 0]).build(), Err(ShardError::Axes { .. })));
        assert!(matches!(build(&[3], &[7, 1], &[4, 0]).build(), Err(ShardError::Axes { .. })));
        assert!(build(&[3], &[2, 7], &[1, 4]).prepended_axes(1).build().is_ok());
        let grid = build(&[3], &[6], &[4]).axis_fragmentations([2]);
        assert!(matches!(grid.build(), Err(ShardError::OffGrid { axis: 0, .. })));
        assert!(build(&[3], &[6], &[3]).axis_fragmentations([2, 1]).build().is_err());
        let huge = build(&[1 << 40, 1 << 40], &[1 << 40, 1 << 40], &[0, 0]);
        assert!(matches!(huge.build(), Err(ShardError::TooLarge { .. })));
        assert!(matches!(build(&[2], &[4], &[u64::MAX]).build(), Err(ShardError::TooLarge { .. })));
    }

    #[test]
    fn data_is_what_was_declared() {
        let shard = ShardedTensor::from_rank_offsets("w", memory(&[2, 3])).build().unwrap();
        assert!(shard.clone().with_data(memory(&[3, 2])).is_err());
        let other = TensorView::contiguous(HostMemory::zeroed(24), DType::Float32, [2, 3], 0);
        assert!(matches!(shard.with_data(other.unwrap()), Err(ShardError::DType { .. })));
    }

    /// Megatron-Core makes the shards of an optimizer's state from those of its parameters.
    #[test]
    fn optimizer_state_lies_where_its_parameter_does() {
        let parameter = ShardedTensor::from_rank_offsets("w", memory(&[2, 3]))
            .prepended_axes(1)
            .offset(0, 1, 2)
            .offset(2, 1, 4)
            .replica_id(3)
            .build()
            .unwrap();
        let floats = TensorView::contiguous(HostMemory::zeroed(24), DType::Float32, [2, 3], 0);
        let state = parameter.clone().with_local(floats.unwrap()).unwrap().with_key("exp_avg.w");
        assert_eq!((state.dtype(), &**state.key()), (DType::Float32, "exp_avg.w"));
        assert_eq!(state.region(), parameter.region());
        assert_eq!(state.global_shape(), parameter.global_shape());
        assert_eq!(state.axis_fragmentations(), parameter.axis_fragmentations());
        assert_eq!(state.replica_id(), parameter.replica_id());
        assert_eq!(state.data().map(TensorView::dtype), Some(DType::Float32));
        assert!(parameter.clone().with_local(f32s(&[2, 3])).unwrap().data().is_none());
        let other = parameter.with_local(f32s(&[3, 2]));
        assert!(matches!(other, Err(ShardError::DataShape { .. })));

        let range = ShardedTensor::from_rank_offsets("w", memory(&[4]))
            .flattened_range(1..5, [2, 3])
            .build()
            .unwrap();
        let state = range.clone().with_local(f32s(&[4])).unwrap();
        assert_eq!((state.local_shape(), state.flattened_range()), (&[2, 3].into(), Some(&(1..5))));
        assert!(range.with_local(f32s(&[2, 3])).is_err());

        let huge = LocalTensor::described(DType::UInt8, [1 << 62]);
        let huge = ShardedTensor::from_rank_offsets("w", huge).build().unwrap();
        assert!(matches!(huge.with_local(f32s(&[1 << 62])), Err(ShardError::TooLarge { .. })));
    }

    #[test]
    fn prepended_axes_lie_over_the_same_memory() {
        let shard = ShardedTensor::from_rank_offsets("w", memory(&[2, 3]))
            .prepended_axes(1)
            .offset(0, 5, 6)
            .build()
            .unwrap();
        let data = shard.global_data().unwrap();
        assert_eq!(data.shape(), shard.region().sizes());
        assert_eq!(data.payload().unwrap().to_bytes()[..], [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn flattened_ranges_are_of_the_block() {
        let flat = |start, end, data: &[u64]| {
            ShardedTensor::from_rank_offsets("w", memory(data))
                .offset(0, 1, 2)
                .flattened_range(start..end, [2, 3])
                .build()
        };
        let shard = flat(1, 5, &[4]).unwrap();
        assert_eq!((shard.global_shape(), shard.local_shape()), (&[4, 3].into(), &[2, 3].into()));
        assert!(shard.global_data().is_none());
        assert!(matches!(flat(1, 5, &[5]), Err(ShardError::DataShape { .. })));
        assert!(matches!(flat(3, 7, &[4]), Err(ShardError::Flattened { .. })));
        assert!(matches!(flat(5, 4, &[4]), Err(ShardError::Flattened { .. })));
    }

    #[test]
    fn narrowing_scales_the_whole_tensor() {
        let shard = ShardedTensor::from_rank_offsets("w", memory(&[4, 3]))
            .prepended_axes(1)
            .offset(0, 1, 2)
            .offset(1, 2, 3)
            .build()
            .unwrap();
        let part = shard.narrow(0, 2, 2).unwrap();
        assert_eq!(part.global_shape(), &[2, 6, 3].into());
        assert_eq!(part.global_offset(), &[1, 4, 0].into());
        assert_eq!(part.axis_fragmentations(), shard.axis_fragmentations());
        assert_eq!(part.data().unwrap().payload().unwrap().to_bytes()[..], [6, 7, 8, 9, 10, 11]);
        assert!(shard.narrow(0, 3, 2).is_err());
        assert!(shard.narrow(2, 0, 1).is_err());
        let uneven = ShardedTensor::builder("w", memory(&[4]), [10], [3]).build().unwrap();
        assert!(matches!(uneven.narrow(0, 0, 2), Err(ShardError::Narrow { .. })));
    }
}
