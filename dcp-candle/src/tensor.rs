//! Tensors of candle as tensors of a checkpoint, and back.

use std::sync::Arc;

use candle_core::{DType as Theirs, Device};
use dcp_core::{DType, Dims, Region, Shard, Tensor};

use crate::error::CandleError;
use crate::memory::{CandleMemory, tensor_of, unsupported};

/// A tensor that shares the memory of a candle tensor, for saves and loads in place. Every rank
/// holds it whole.
///
/// # Errors
///
/// [`CandleError::NotContiguous`], and [`CandleError::UnsupportedDType`] for element types that
/// checkpoints do not have.
///
/// ```
/// use candle_core::{Device, Var};
/// use dcp_core::StateDict;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = Var::zeros((2, 3), candle_core::DType::F32, &Device::Cpu)?;
/// let mut state = StateDict::new();
/// state.insert("weight", dcp_candle::from_candle(&weight)?);
/// # Ok(())
/// # }
/// ```
pub fn from_candle(tensor: &candle_core::Tensor) -> Result<Tensor, CandleError> {
    let memory = Arc::new(CandleMemory::new(tensor)?);
    Ok(Tensor::on_device(dtype_of(tensor.dtype())?, dims(tensor), memory)?)
}

/// A tensor of `shape`, of which a candle tensor has the elements in `region`.
///
/// # Errors
///
/// As [`from_candle`], and [`CandleError::Tensor`] when region and candle tensor have different sizes.
pub fn shard_from_candle(
    tensor: &candle_core::Tensor,
    shape: impl Into<Dims>,
    region: Region,
) -> Result<Tensor, CandleError> {
    let dtype = dtype_of(tensor.dtype())?;
    let shard = Shard::on_device(dtype, region, Arc::new(CandleMemory::new(tensor)?))?;
    Ok(Tensor::sharded(dtype, shape, vec![shard])?)
}

/// Copies a whole tensor in host memory to a candle tensor.
///
/// # Errors
///
/// [`CandleError::NotWhole`] for a sharded tensor and for one on a device, and
/// [`CandleError::UnsupportedDType`] for element types that candle does not have.
pub fn to_candle(tensor: &Tensor, device: &Device) -> Result<candle_core::Tensor, CandleError> {
    if tensor.is_sharded() {
        return Err(CandleError::NotWhole);
    }
    let bytes = tensor.to_vec().ok_or(CandleError::NotWhole)?;
    let sizes = tensor.shape().iter().map(|size| usize::try_from(*size));
    let shape = sizes.collect::<Result<Vec<_>, _>>().map_err(candle_core::Error::wrap)?;
    Ok(tensor_of(candle_dtype(tensor.dtype())?, &bytes, device)?.reshape(shape)?)
}

fn dims(tensor: &candle_core::Tensor) -> Dims {
    tensor.dims().iter().map(|size| *size as u64).collect::<Vec<_>>().into()
}

const DTYPES: [(Theirs, DType); 10] = [
    (Theirs::U8, DType::UInt8),
    (Theirs::U32, DType::UInt32),
    (Theirs::I16, DType::Int16),
    (Theirs::I32, DType::Int32),
    (Theirs::I64, DType::Int64),
    (Theirs::BF16, DType::BFloat16),
    (Theirs::F16, DType::Float16),
    (Theirs::F32, DType::Float32),
    (Theirs::F64, DType::Float64),
    (Theirs::F8E4M3, DType::Float8E4M3Fn),
];

fn dtype_of(dtype: Theirs) -> Result<DType, CandleError> {
    let found = DTYPES.iter().find(|(theirs, _)| *theirs == dtype);
    found.map(|(_, ours)| *ours).ok_or_else(|| unsupported(dtype))
}

fn candle_dtype(dtype: DType) -> Result<Theirs, CandleError> {
    let found = DTYPES.iter().find(|(_, ours)| *ours == dtype);
    let unsupported = || CandleError::UnsupportedDType { dtype: dtype.name().to_owned() };
    found.map(|(theirs, _)| *theirs).ok_or_else(unsupported)
}
