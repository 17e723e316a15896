//! Tensors of the `safetensors` crate, in both directions without a copy.

use std::borrow::Cow;

use bytes::Bytes;
use dcp_core::error::StateProblem;
use dcp_core::{
    CheckpointError, DType, Dims, FormatError, HostMemory, StateDict, Tensor, TensorView,
};
use safetensors::tensor::{Dtype, SafeTensors, View};

use super::dtype::{dtype_name, packing, parse_dtype};

/// The tensors of a file that the `safetensors` crate parsed, by name. They share the memory of
/// `file`, which cannot be written: a save reads it, a load refuses it.
///
/// `file` is what [`SafeTensors::deserialize`] got; a mapping of a file becomes [`Bytes`] by
/// [`Bytes::from_owner`].
///
/// ```
/// use dcp_core::bytes::Bytes;
/// use dcp_formats::safetensors::{from_safetensors, to_safetensors};
/// use safetensors::SafeTensors;
///
/// let state = [("weight", dcp_core::Tensor::from_slice(&[1.0_f32, 2.0], [2])?)].into();
/// let file = Bytes::from(safetensors::serialize(to_safetensors(&state)?, None)?);
/// let read = from_safetensors(&file, &SafeTensors::deserialize(&file)?)?;
/// assert!(read.get("weight").is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// When a dtype has no equivalent, or the tensors are of other memory than `file`.
pub fn from_safetensors(
    file: &Bytes,
    tensors: &SafeTensors<'_>,
) -> Result<StateDict, CheckpointError> {
    let bad = |name: &str, problem: String| {
        FormatError::new("safetensors file", format!("{name:?}: {problem}"))
    };
    let memory = HostMemory::from_bytes(file.clone());
    let mut state = StateDict::new();
    for (name, view) in tensors.iter() {
        let dtype = parse_dtype(&view.dtype().to_string());
        let dtype = dtype.ok_or_else(|| bad(name, format!("no dtype is {}", view.dtype())))?;
        let mut shape: Dims = view.shape().into();
        if let Some(last) = shape.last_mut() {
            *last /= packing(dtype);
        }
        let data = view.data();
        let start = (data.as_ptr() as usize).checked_sub(file.as_ptr() as usize);
        let start = match start {
            _ if data.is_empty() => 0,
            Some(start) if start + data.len() <= file.len() => start,
            _ => return Err(bad(name, "it is in other memory than the file".into()).into()),
        };
        let view = TensorView::contiguous(memory.clone(), dtype, shape, start)?;
        if view.byte_len() != data.len() as u64 {
            let problem = format!("{} bytes for {dtype} {}", data.len(), view.shape());
            return Err(bad(name, problem).into());
        }
        state.insert(name, Tensor::from_view(view)?);
    }
    Ok(state)
}

/// The tensors of a state dict of one level, for `safetensors::serialize`. They borrow the memory
/// of contiguous tensors, which cannot be written while they exist.
///
/// # Errors
///
/// [`StateProblem::NotStorable`] with the key of a value that is no whole tensor in host memory, or
/// whose dtype the format lacks; when memory is lent for writing.
pub fn to_safetensors(state: &StateDict) -> Result<Vec<(String, LibraryTensor)>, CheckpointError> {
    let tensor = |(key, value): (&dcp_core::Value, &dcp_core::Value)| {
        let name = key.as_str().unwrap_or_default();
        let refuse =
            |problem: &str| StateProblem::NotStorable { problem: problem.to_owned() }.of(name);
        let Some(tensor) = value.as_tensor() else {
            return Err(
                refuse("a file of safetensors has tensors only; flatten nested dicts").into()
            );
        };
        let [shard] = tensor.shards() else {
            return Err(refuse("it is in several shards or in none").into());
        };
        if shard.region().sizes() != tensor.shape() {
            return Err(refuse("it is a shard of a larger tensor").into());
        }
        let payload = shard.host_view(name)?.payload();
        let payload =
            payload.map_err(|source| CheckpointError::Memory { fqn: name.to_owned(), source })?;
        let dtype = library_dtype(tensor.dtype());
        let dtype = dtype.ok_or_else(|| refuse("a file of safetensors cannot hold its dtype"))?;
        let shape = tensor.shape().iter().map(|size| usize::try_from(*size));
        let shape = shape.collect::<Result<Vec<_>, _>>();
        let mut shape = shape.map_err(|_| refuse("its shape exceeds the address space"))?;
        if let Some(last) = shape.last_mut() {
            *last *= packing(tensor.dtype()) as usize;
        }
        Ok((name.to_owned(), LibraryTensor { dtype, shape, data: payload.to_bytes() }))
    };
    state.iter().map(tensor).collect()
}

fn library_dtype(dtype: DType) -> Option<Dtype> {
    let name = dtype_name(dtype)?;
    ALL.iter().copied().find(|known| known.to_string() == name)
}

const ALL: [Dtype; 20] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// A tensor of a state dict as the `safetensors` crate writes it.
#[derive(Clone, Debug)]
pub struct LibraryTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Bytes,
}

impl View for LibraryTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_of_the_format_has_one_of_the_library() {
        for name in ALL.map(|dtype| dtype.to_string()) {
            let dtype = parse_dtype(&name).unwrap();
            assert_eq!(library_dtype(dtype).unwrap().to_string(), name);
        }
        assert!(library_dtype(DType::Complex128).is_none());
    }

    #[test]
    fn nothing_is_copied_in_either_direction() {
        let weight = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]).unwrap();
        let (packed, empty) = (DType::Float4E2M1FnX2, Tensor::zeros(DType::Int64, [0, 4]).unwrap());
        let packed = Tensor::replicated(packed, [3, 2], vec![7; 6]).unwrap();
        let scalar = Tensor::from_slice(&[true], [0_u64; 0]).unwrap();
        let state: StateDict =
            [("weight", weight), ("packed", packed), ("empty", empty), ("scalar", scalar)].into();
        let views = to_safetensors(&state).unwrap();
        let own = |name: &str| state.get(name).unwrap().as_tensor().unwrap();
        let elements = own("weight").elements::<f32>().unwrap();
        assert_eq!(views[0].1.data().as_ptr(), elements.as_ptr().cast());
        let file = Bytes::from(safetensors::serialize(views, None).unwrap());
        let read = from_safetensors(&file, &SafeTensors::deserialize(&file).unwrap()).unwrap();
        assert_eq!(read.len(), state.len());
        let range = file.as_ptr_range();
        for (key, value) in state.iter() {
            let found = read.get_value(key).unwrap();
            assert!(found.same(value), "{key:?}");
            let bytes = found.as_tensor().unwrap().shards()[0].view().unwrap().payload().unwrap();
            let bytes = bytes.to_bytes();
            assert!(bytes.is_empty() || range.contains(&bytes.as_ptr()), "{key:?}");
        }
        let other = Bytes::copy_from_slice(&file);
        assert!(from_safetensors(&other, &SafeTensors::deserialize(&file).unwrap()).is_err());
    }

    #[test]
    fn what_is_no_whole_tensor_is_refused_by_name() {
        let half = dcp_core::Region::new([1], [1]).unwrap();
        let half = Tensor::zeros_sharded(DType::UInt8, [2], [half]).unwrap();
        let complex = Tensor::zeros(DType::Complex128, [2]).unwrap();
        for value in [dcp_core::Value::from(1), half.into(), complex.into()] {
            let error = to_safetensors(&StateDict::from([("key", value)])).unwrap_err();
            assert!(error.to_string().contains("\"key\""), "{error}");
        }
    }
}
