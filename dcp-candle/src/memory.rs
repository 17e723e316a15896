//! The memory of a candle tensor, on any of its devices.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, DeviceLocation, Storage, Tensor, WithDType};
use dcp_core::HostMemory;
use dcp_core::device::{DeviceError, DeviceMemory};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::error::CandleError;

#[cfg(target_endian = "big")]
compile_error!(
    "candle's elements are in the order of the machine, a checkpoint's are little-endian"
);

/// All elements of a contiguous tensor. A save and a load copy them in pieces, under the lock of the
/// tensor's storage, so that training may go on with other tensors.
#[derive(Debug)]
pub(crate) struct CandleMemory {
    /// One axis; shares the storage of the tensor.
    flat: Tensor,
    device: String,
}

impl CandleMemory {
    pub(crate) fn new(tensor: &Tensor) -> Result<Self, CandleError> {
        if !tensor.is_contiguous() {
            return Err(CandleError::NotContiguous { shape: tensor.dims().to_vec() });
        }
        let device = match tensor.device().location() {
            DeviceLocation::Cpu => "cpu".to_owned(),
            DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
            DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
        };
        Ok(Self { flat: tensor.detach().flatten_all()?, device })
    }

    fn element_bytes(&self) -> usize {
        self.flat.dtype().size_in_bytes()
    }

    fn copy_out(&self, range: &Range<u64>, out: &mut Vec<u8>) -> Result<(), CandleError> {
        let (first, count) = self.elements(range)?;
        let piece = self.flat.narrow(0, first, count)?.to_device(&Device::Cpu)?;
        let (storage, layout) = piece.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(CandleError::NotWhole);
        };
        let start = layout.start_offset();
        append(storage, start..start + count, out)
    }

    fn copy_in(&self, range: &Range<u64>, bytes: &[u8]) -> Result<(), CandleError> {
        let (first, _) = self.elements(range)?;
        let piece = tensor_of(self.flat.dtype(), bytes, self.flat.device())?;
        Ok(self.flat.slice_set(&piece, 0, first)?)
    }

    /// The first element of a range of bytes, and their number.
    fn elements(&self, range: &Range<u64>) -> Result<(usize, usize), CandleError> {
        let size = self.element_bytes();
        let (start, end) = (to_usize(range.start)?, to_usize(range.end)?);
        if !start.is_multiple_of(size) || !end.is_multiple_of(size) || end < start {
            return Err(CandleError::PartOfElement { start: range.start, end: range.end, size });
        }
        Ok((start / size, (end - start) / size))
    }
}

fn to_usize(offset: u64) -> Result<usize, CandleError> {
    usize::try_from(offset).map_err(|error| candle_core::Error::wrap(error).into())
}

#[async_trait]
impl DeviceMemory for CandleMemory {
    fn device(&self) -> &str {
        &self.device
    }

    fn byte_len(&self) -> u64 {
        (self.flat.elem_count() * self.element_bytes()) as u64
    }

    async fn read(&self, ranges: &[Range<u64>]) -> Result<Bytes, DeviceError> {
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let mut out = Vec::with_capacity(to_usize(total)?);
        for range in ranges {
            self.copy_out(range, &mut out)?;
        }
        Ok(out.into())
    }

    async fn write(&self, ranges: &[Range<u64>], mut bytes: Bytes) -> Result<(), DeviceError> {
        for range in ranges {
            let piece = bytes.split_to(to_usize(range.end - range.start)?);
            self.copy_in(range, &piece)?;
        }
        Ok(())
    }

    fn staging(&self, _: usize) -> Option<HostMemory> {
        None
    }
}

/// Adds the bytes of `elements` to `out`.
fn append(
    storage: &CpuStorage,
    elements: Range<usize>,
    out: &mut Vec<u8>,
) -> Result<(), CandleError> {
    let bytes: &[u8] = match storage {
        CpuStorage::U8(all) => &all[elements],
        CpuStorage::U32(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::I16(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::I32(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::I64(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::BF16(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::F16(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::F32(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::F64(all) => bytemuck::cast_slice(&all[elements]),
        CpuStorage::F8E4M3(all) => {
            out.extend(all[elements].iter().map(|element| element.to_bits()));
            return Ok(());
        }
        other => return Err(unsupported(other.dtype())),
    };
    out.extend_from_slice(bytes);
    Ok(())
}

/// A tensor with one axis of these elements.
pub(crate) fn tensor_of(
    dtype: DType,
    bytes: &[u8],
    device: &Device,
) -> Result<Tensor, CandleError> {
    fn of<T: WithDType + bytemuck::Pod>(
        bytes: &[u8],
        device: &Device,
    ) -> Result<Tensor, CandleError> {
        let elements: Vec<T> = bytemuck::allocation::pod_collect_to_vec(bytes);
        let count = elements.len();
        Ok(Tensor::from_vec(elements, count, device)?)
    }
    match dtype {
        DType::U8 => of::<u8>(bytes, device),
        DType::U32 => of::<u32>(bytes, device),
        DType::I16 => of::<i16>(bytes, device),
        DType::I32 => of::<i32>(bytes, device),
        DType::I64 => of::<i64>(bytes, device),
        DType::BF16 => of::<bf16>(bytes, device),
        DType::F16 => of::<f16>(bytes, device),
        DType::F32 => of::<f32>(bytes, device),
        DType::F64 => of::<f64>(bytes, device),
        DType::F8E4M3 => {
            let elements: Vec<_> = bytes.iter().map(|byte| F8E4M3::from_bits(*byte)).collect();
            Ok(Tensor::from_vec(elements, bytes.len(), device)?)
        }
        other => Err(unsupported(other)),
    }
}

pub(crate) fn unsupported(dtype: DType) -> CandleError {
    CandleError::UnsupportedDType { dtype: dtype.as_str().to_owned() }
}
