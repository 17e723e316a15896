//! Tensors of burn's format as tensors of a checkpoint, and back.

use burn_core::tensor::{BoolStore, Bytes, DType as Theirs, Shape};
use burn_store::burn_pack::Tensor as Packed;
use dcp_core::{DType, Tensor};

use crate::error::BurnError;

const DTYPES: [(Theirs, DType); 14] = [
    (Theirs::F64, DType::Float64),
    (Theirs::F32, DType::Float32),
    (Theirs::Flex32, DType::Float32),
    (Theirs::F16, DType::Float16),
    (Theirs::BF16, DType::BFloat16),
    (Theirs::I64, DType::Int64),
    (Theirs::I32, DType::Int32),
    (Theirs::I16, DType::Int16),
    (Theirs::I8, DType::Int8),
    (Theirs::U64, DType::UInt64),
    (Theirs::U32, DType::UInt32),
    (Theirs::U16, DType::UInt16),
    (Theirs::U8, DType::UInt8),
    (Theirs::Bool(BoolStore::Native), DType::Bool),
];

/// A tensor with the elements of burn's, in host memory of its own.
pub(crate) fn unpacked(packed: Packed) -> Result<Tensor, BurnError> {
    let (name, dtype, shape, _, bytes) = packed.into_parts()?;
    let found = DTYPES.iter().find(|(theirs, _)| *theirs == dtype);
    let Some((_, dtype)) = found else {
        return Err(BurnError::UnsupportedDType { name, dtype: format!("{dtype:?}") });
    };
    let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
    Ok(Tensor::replicated(*dtype, shape, bytes.to_vec())?)
}

/// The elements of a loaded tensor for the parameter `id`.
pub(crate) fn packed(name: &str, id: Option<u64>, tensor: &Tensor) -> Result<Packed, BurnError> {
    let not_whole = || BurnError::NotWhole { name: name.to_owned() };
    let bytes = tensor.to_vec().filter(|_| !tensor.is_sharded()).ok_or_else(not_whole)?;
    let found = DTYPES.iter().find(|(_, ours)| *ours == tensor.dtype());
    let Some((dtype, _)) = found else {
        let dtype = tensor.dtype().name().to_owned();
        return Err(BurnError::UnsupportedDType { name: name.to_owned(), dtype });
    };
    let sizes: Result<Vec<usize>, _> =
        tensor.shape().iter().map(|one| usize::try_from(*one)).collect();
    let shape = Shape::from(sizes.map_err(|_| not_whole())?);
    Ok(Packed::new(name.to_owned(), *dtype, shape, id, Bytes::from_bytes_vec(bytes)))
}
