//! Tensors as a rank holds them: shards of a global tensor, in host memory or on a device.

use std::sync::Arc;

use crate::tensors::device::DeviceMemory;
use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;
use crate::tensors::error::TensorError;
use crate::tensors::memory::{Elements, HostMemory, NumericElement, TensorElement, element};
use crate::tensors::region::Region;
use crate::tensors::tensor_view::{TensorView, full};

/// A tensor as this rank holds it: dtype and shape of the whole, and this rank's parts.
///
/// Clones share the memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    dtype: DType,
    shape: Dims,
    sharded: bool,
    shards: Vec<Shard>,
}

/// A part of a tensor in this rank's memory.
#[derive(Clone, Debug)]
pub struct Shard {
    region: Region,
    dtype: DType,
    data: ShardData,
}

/// The elements of a [`Shard`], in host memory or on a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ShardData {
    /// In host memory.
    Host(TensorView),
    /// On a device, row-major in all of its memory.
    Device(Arc<dyn DeviceMemory>),
}

impl Tensor {
    /// A row-major tensor that every rank holds whole. One of the ranks writes it in a save.
    ///
    /// # Errors
    ///
    /// When the memory does not have exactly the size of dtype and shape.
    pub fn replicated(
        dtype: DType,
        shape: impl Into<Dims>,
        memory: impl Into<HostMemory>,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        let region = full(&shape)?;
        let shard = Shard::new(dtype, region, memory)?;
        Ok(Self { dtype, shape, sharded: false, shards: vec![shard] })
    }

    /// A replicated tensor of copied elements.
    ///
    /// ```
    /// use dcp_core::Tensor;
    ///
    /// let tensor = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], [2, 2])?;
    /// assert_eq!(tensor.dtype(), dcp_core::DType::Float32);
    /// assert_eq!(tensor.elements::<f32>()?[2], 3.0);
    /// # Ok::<(), dcp_core::error::TensorError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the shape has another number of elements.
    pub fn from_slice<T: TensorElement>(
        elements: &[T],
        shape: impl Into<Dims>,
    ) -> Result<Self, TensorError> {
        Self::replicated(T::DTYPE, shape, element::to_bytes(elements))
    }

    /// A replicated tensor in the memory of a vector, without a copy on little-endian machines.
    ///
    /// # Errors
    ///
    /// When the shape has another number of elements.
    pub fn from_vec<T: NumericElement>(
        elements: Vec<T>,
        shape: impl Into<Dims>,
    ) -> Result<Self, TensorError> {
        if cfg!(target_endian = "little") {
            Self::replicated(T::DTYPE, shape, HostMemory::from_elements(elements))
        } else {
            Self::from_slice(&elements, shape)
        }
    }

    /// A tensor that every rank holds whole, with the layout of `view`.
    ///
    /// # Errors
    ///
    /// When the number of elements exceeds `u64`.
    pub fn from_view(view: TensorView) -> Result<Self, TensorError> {
        let (dtype, shape) = (view.dtype(), view.shape().clone());
        let shard = Shard::with_view(full(&shape)?, view)?;
        Ok(Self { dtype, shape, sharded: false, shards: vec![shard] })
    }

    /// A tensor that every rank holds whole, on a device.
    ///
    /// # Errors
    ///
    /// When the memory does not have exactly the size of dtype and shape.
    pub fn on_device(
        dtype: DType,
        shape: impl Into<Dims>,
        memory: Arc<dyn DeviceMemory>,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        let shard = Shard::on_device(dtype, full(&shape)?, memory)?;
        Ok(Self { dtype, shape, sharded: false, shards: vec![shard] })
    }

    /// A tensor of which this rank holds `shards`, possibly none.
    ///
    /// # Errors
    ///
    /// When a shard is outside `shape` or has another dtype.
    pub fn sharded(
        dtype: DType,
        shape: impl Into<Dims>,
        shards: Vec<Shard>,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        let whole = full(&shape)?;
        for shard in &shards {
            if !whole.contains(&shard.region) {
                let problem = format!("shard {} is outside shape {shape}", shard.region);
                return Err(TensorError::Invalid { fqn: None, problem });
            }
            if shard.dtype != dtype {
                return Err(TensorError::Invalid {
                    fqn: None,
                    problem: format!("a {} shard in a {dtype} tensor", shard.dtype),
                });
            }
        }
        Ok(Self { dtype, shape, sharded: true, shards })
    }

    /// A replicated tensor of zeros, as the destination of a load.
    ///
    /// # Errors
    ///
    /// When the size exceeds the address space, or memory is exhausted
    /// ([`TensorError::OutOfMemory`]).
    pub fn zeros(dtype: DType, shape: impl Into<Dims>) -> Result<Self, TensorError> {
        let shape = shape.into();
        let bytes = byte_len(dtype, &shape)?;
        let memory = zeroed(dtype, &shape, bytes)?;
        Self::replicated(dtype, shape, memory)
    }

    /// A sharded tensor of zeros with `regions`, as the destination of a load.
    ///
    /// # Errors
    ///
    /// As [`Tensor::zeros`] and [`Tensor::sharded`].
    pub fn zeros_sharded(
        dtype: DType,
        shape: impl Into<Dims>,
        regions: impl IntoIterator<Item = Region>,
    ) -> Result<Self, TensorError> {
        let shards = regions
            .into_iter()
            .map(|region| {
                let bytes = byte_len(dtype, region.sizes())?;
                let memory = zeroed(dtype, region.sizes(), bytes)?;
                Shard::new(dtype, region, memory)
            })
            .collect::<Result<_, TensorError>>()?;
        Self::sharded(dtype, shape, shards)
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of the whole tensor.
    #[must_use]
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Whether ranks hold different parts.
    #[must_use]
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// The parts that this rank holds.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// All bytes in row-major order, if one shard in host memory holds the whole tensor.
    #[must_use]
    pub fn to_vec(&self) -> Option<Vec<u8>> {
        match &*self.shards {
            [shard] if shard.region.sizes() == &self.shape => {
                Some(shard.view()?.payload().ok()?.to_bytes().to_vec())
            }
            _ => None,
        }
    }

    /// All elements in row-major order, if one shard holds the whole tensor: those in memory where
    /// they are contiguous and aligned there, a copy otherwise.
    ///
    /// # Errors
    ///
    /// When the tensor has another dtype, is in several shards or in none, is on a device, or its
    /// memory is lent for writing.
    #[doc(alias = "as_slice")]
    pub fn elements<T: TensorElement>(&self) -> Result<Elements<T>, TensorError> {
        let refuse = |problem: String| TensorError::Invalid { fqn: None, problem };
        check_element::<T>(self.dtype)?;
        let [shard] = &*self.shards else {
            let problem = format!("{} shards are not one tensor of elements", self.shards.len());
            return Err(refuse(problem));
        };
        if shard.region.sizes() != &self.shape {
            let problem = format!("shard {} is a part of shape {}", shard.region, self.shape);
            return Err(refuse(problem));
        }
        shard.elements()
    }

    /// All elements in row-major order, copied.
    ///
    /// # Errors
    ///
    /// As [`elements`](Self::elements).
    pub fn to_vec_of<T: TensorElement>(&self) -> Result<Vec<T>, TensorError> {
        Ok(self.elements::<T>()?.to_vec())
    }

    /// Whether dtype, shape, shards and bytes are equal. Those on a device are equal if they are the
    /// same memory.
    #[must_use]
    pub fn same(&self, other: &Tensor) -> bool {
        self.dtype == other.dtype
            && self.shape == other.shape
            && self.shards.len() == other.shards.len()
            && self
                .shards
                .iter()
                .zip(&other.shards)
                .all(|(a, b)| a.region == b.region && a.data.same(&b.data))
    }
}

impl Shard {
    /// The part `region` of a tensor, row-major in all of `memory`.
    ///
    /// # Errors
    ///
    /// When the memory does not have exactly the size of dtype and region.
    pub fn new(
        dtype: DType,
        region: Region,
        memory: impl Into<HostMemory>,
    ) -> Result<Self, TensorError> {
        let memory = memory.into();
        let expected = byte_len(dtype, region.sizes())?;
        if memory.len() != expected {
            let found = memory.len();
            let problem =
                format!("{dtype} {region} needs {expected} bytes, its memory has {found}");
            return Err(TensorError::Invalid { fqn: None, problem });
        }
        let view = TensorView::contiguous(memory, dtype, region.sizes().clone(), 0)?;
        Ok(Self { region, dtype, data: ShardData::Host(view) })
    }

    /// The part `region` of a tensor in the memory of a vector, row-major, without a copy on
    /// little-endian machines.
    ///
    /// ```
    /// use dcp_core::{DType, Region, Shard, Tensor};
    ///
    /// // Rank 1 of 2 has the last two rows.
    /// let rows = Region::new([2, 0], [2, 3])?;
    /// let shard = Shard::from_vec(vec![0.5_f32; 6], rows)?;
    /// let tensor = Tensor::sharded(DType::Float32, [4, 3], vec![shard])?;
    /// assert_eq!(tensor.shards()[0].to_vec_of::<f32>()?, [0.5; 6]);
    /// # Ok::<(), dcp_core::error::TensorError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the region has another number of elements.
    pub fn from_vec<T: NumericElement>(
        elements: Vec<T>,
        region: Region,
    ) -> Result<Self, TensorError> {
        let whole = Tensor::from_vec(elements, region.sizes().clone())?;
        let view = whole.shards.first().and_then(Shard::view).cloned();
        let view = view.ok_or_else(|| TensorError::Invalid {
            fqn: None,
            problem: "its elements are in no memory of the host".to_owned(),
        })?;
        Ok(Self { region, dtype: T::DTYPE, data: ShardData::Host(view) })
    }

    /// All elements of the part in row-major order: those in memory where they are contiguous and
    /// aligned there, a copy otherwise.
    ///
    /// # Errors
    ///
    /// When it has another dtype, is on a device, or its memory is lent for writing.
    pub fn elements<T: TensorElement>(&self) -> Result<Elements<T>, TensorError> {
        let refuse = |problem: String| TensorError::Invalid { fqn: None, problem };
        check_element::<T>(self.dtype)?;
        let view = match &self.data {
            ShardData::Host(view) => view,
            ShardData::Device(memory) => {
                return Err(refuse(format!("its elements are on {}", memory.device())));
            }
        };
        let payload = view.payload().map_err(|error| refuse(error.to_string()))?;
        Ok(Elements::of(payload.to_bytes()))
    }

    /// All elements of the part in row-major order, copied.
    ///
    /// # Errors
    ///
    /// As [`elements`](Self::elements).
    pub fn to_vec_of<T: TensorElement>(&self) -> Result<Vec<T>, TensorError> {
        Ok(self.elements::<T>()?.to_vec())
    }

    /// The part `region` of a tensor, row-major in all of a device's `memory`. Saves and loads copy
    /// it in pieces.
    ///
    /// # Errors
    ///
    /// When the memory does not have exactly the size of dtype and region.
    pub fn on_device(
        dtype: DType,
        region: Region,
        memory: Arc<dyn DeviceMemory>,
    ) -> Result<Self, TensorError> {
        let expected = region.volume().checked_mul(dtype.size() as u64);
        let found = memory.byte_len();
        if expected != Some(found) {
            let problem = format!(
                "{dtype} {region} needs {} bytes, its memory on {} has {found}",
                expected
                    .map_or_else(|| "more than 2^64".to_owned(), |expected| expected.to_string()),
                memory.device()
            );
            return Err(TensorError::Invalid { fqn: None, problem });
        }
        Ok(Self { region, dtype, data: ShardData::Device(memory) })
    }

    /// The part `region` of a tensor, with the layout of `view`: inside a padded or flattened
    /// buffer, or transposed.
    ///
    /// # Errors
    ///
    /// When the view's shape differs from the region's.
    pub fn with_view(region: Region, view: TensorView) -> Result<Self, TensorError> {
        if region.sizes() != view.shape() {
            return Err(TensorError::Invalid {
                fqn: None,
                problem: format!("region {region} over a view of shape {}", view.shape()),
            });
        }
        Ok(Self { region, dtype: view.dtype(), data: ShardData::Host(view) })
    }

    /// Moves the region of the shard by `by` elements per axis, with the same elements: for a shard of a
    /// tensor that is itself a shard, which begins there, as of FSDP1 over tensor parallelism.
    ///
    /// ```
    /// use dcp_core::{DType, Region, Shard};
    ///
    /// // Rows 2 and 3 of the columns that begin at 8.
    /// let inner = Shard::new(DType::UInt8, Region::new([2, 0], [2, 4])?, vec![0; 8])?;
    /// assert_eq!(inner.translate(&[0, 8])?.region().to_string(), "[2:4, 8:12]");
    /// # Ok::<(), dcp_core::error::TensorError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the number of axes differs or an end exceeds `u64`.
    #[doc(alias = "flatten_sharded_tensors")]
    pub fn translate(&self, by: &[u64]) -> Result<Self, TensorError> {
        Ok(Self { region: self.region.translate(by)?, ..self.clone() })
    }

    /// The region of the part in the whole tensor.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of all elements in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.region.volume() * self.dtype.size() as u64
    }

    /// The elements, in host memory or on a device.
    #[must_use]
    pub fn data(&self) -> &ShardData {
        &self.data
    }

    /// The layout of the part in host memory; `None` if it is on a device.
    #[must_use]
    pub fn view(&self) -> Option<&TensorView> {
        if let ShardData::Host(view) = &self.data { Some(view) } else { None }
    }

    /// The layout of the part in host memory, for code that needs it there. `fqn` is the tensor's
    /// name.
    ///
    /// # Errors
    ///
    /// [`TensorError::OnDevice`] if it is on a device.
    pub fn host_view(&self, fqn: &str) -> Result<&TensorView, TensorError> {
        match &self.data {
            ShardData::Host(view) => Ok(view),
            ShardData::Device(memory) => Err(TensorError::OnDevice {
                fqn: fqn.to_owned(),
                device: memory.device().to_owned(),
            }),
        }
    }
}

impl ShardData {
    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(a), Self::Host(b)) => {
                let bytes = |view: &TensorView| view.payload().map(|payload| payload.to_bytes());
                bytes(a).is_ok_and(|a| Ok(a) == bytes(b))
            }
            (Self::Device(a), Self::Device(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

fn check_element<T: TensorElement>(dtype: DType) -> Result<(), TensorError> {
    match dtype == T::DTYPE {
        true => Ok(()),
        false => Err(TensorError::Invalid {
            fqn: None,
            problem: format!("a {dtype} tensor has no elements of {}", T::DTYPE),
        }),
    }
}

fn zeroed(dtype: DType, sizes: &Dims, bytes: usize) -> Result<HostMemory, TensorError> {
    HostMemory::try_zeroed(bytes).ok_or_else(|| TensorError::OutOfMemory {
        what: format!("a tensor of {dtype} and shape {sizes}"),
        byte_len: bytes as u64,
    })
}

fn byte_len(dtype: DType, sizes: &Dims) -> Result<usize, TensorError> {
    sizes
        .checked_volume()
        .and_then(|volume| volume.checked_mul(dtype.size() as u64))
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .ok_or_else(|| TensorError::Invalid {
            fqn: None,
            problem: format!("{dtype} of shape {sizes} does not fit in memory"),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<T: TensorElement + PartialEq + std::fmt::Debug>(elements: &[T]) {
        let tensor = Tensor::from_slice(elements, &[elements.len()]).unwrap();
        assert_eq!(tensor.dtype().size(), size_of::<T>());
        assert_eq!(&*tensor.elements::<T>().unwrap(), elements);
        assert_eq!(tensor.to_vec_of::<T>().unwrap(), elements);
        assert!(Tensor::from_slice(elements, [3]).is_err());
    }

    #[test]
    fn elements_of_every_type_of_rust_round_trip() {
        round_trip(&[f64::MIN, 0.1]);
        round_trip(&[f32::NEG_INFINITY, 0.1]);
        round_trip(&[i64::MIN, 1]);
        round_trip(&[i32::MIN, 1]);
        round_trip(&[i16::MIN, 1]);
        round_trip(&[i8::MIN, 1]);
        round_trip(&[u64::MAX, 1]);
        round_trip(&[u32::MAX, 1]);
        round_trip(&[u16::MAX, 1]);
        round_trip(&[u8::MAX, 1]);
        round_trip(&[true, false]);
        round_trip::<f32>(&[]);
    }

    #[test]
    fn elements_are_those_of_a_whole_tensor_of_that_dtype() {
        let tensor = Tensor::from_vec(vec![1_u32, 2, 3, 4], [2, 2]).unwrap();
        assert!(tensor.elements::<u32>().unwrap().is_lent());
        let error = tensor.elements::<f32>().unwrap_err().to_string();
        assert!(error.contains("uint32") && error.contains("float32"), "{error}");
        let memory = tensor.shards()[0].view().unwrap().memory().clone();
        let transposed = TensorView::strided(memory, DType::UInt32, [2, 2], vec![1, 2], 0).unwrap();
        let transposed = Tensor::from_view(transposed).unwrap();
        assert_eq!(transposed.to_vec_of::<u32>().unwrap(), [1, 3, 2, 4]);
        let part = Region::new([0], [1]).unwrap();
        let part = Tensor::zeros_sharded(DType::UInt8, [2], [part]).unwrap();
        assert!(part.elements::<u8>().is_err());
        let lent = tensor.shards()[0].view().unwrap().lend().unwrap();
        assert!(tensor.elements::<u32>().is_err());
        drop(lent);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        let region = Region::full([1 << 60]).unwrap();
        let whole = Tensor::zeros(DType::UInt8, [1 << 60]).unwrap_err();
        let shards = Tensor::zeros_sharded(DType::UInt8, [1 << 60], [region]).unwrap_err();
        for error in [whole, shards] {
            assert!(matches!(error, TensorError::OutOfMemory { .. }), "{error}");
            assert!(error.to_string().contains("1152921504606846976"), "{error}");
        }
        assert_eq!(Tensor::zeros(DType::UInt8, [0]).unwrap().to_vec().unwrap(), [0; 0]);
        assert_eq!(Tensor::zeros(DType::Int16, [2]).unwrap().to_vec().unwrap(), [0; 4]);
    }
}
