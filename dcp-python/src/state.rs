//! State dicts of Python: nested dicts and lists, tensors in Python's memory, plain data, and encoded objects.
//!
//! Rust descends into dicts and lists. What else is no plain data goes to a function of the package, `describe`, which has
//! the classes of tensors (`distcp/torch/_tensors.py`). It returns a tuple of dtype, shape, regions and parts for
//! a tensor and the bytes of `torch.save` for any other object. A part says where its elements are, so that no element
//! passes through Python.

use bytes::Bytes;
use dcp::core::value::Dict;
use dcp::core::{Dims, TensorView};
use dcp::formats::torch_object::decode_object;
use dcp::{DType, Region, Shard, StateDict, Tensor, Value};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyMapping};

use crate::failure::Failure;
use crate::memory;
use crate::value::{key, plain, to_python};

/// The place of elements: an address and the bytes from it, the strides in elements if they are not row-major, and the
/// object that keeps them.
pub(crate) type Part = (usize, usize, Option<Vec<u64>>, Py<PyAny>);

/// Offsets and sizes of a box.
pub(crate) type Extent = (Vec<u64>, Vec<u64>);

/// A tensor of Python: its dtype, the shape of the whole, offsets and sizes of each part unless there is one whole, and
/// the parts.
pub(crate) type Described = (String, Vec<u64>, Option<Vec<Extent>>, Vec<Part>);

/// The state dict of a dict.
pub(crate) fn from_python(
    state: &Bound<'_, PyAny>,
    describe: &Bound<'_, PyAny>,
) -> Result<StateDict, Failure> {
    match value_of(state, describe, "")? {
        Value::Dict(dict) => Ok(dict),
        _ => Err(Failure::Argument(
            "a state dict is a dict with tensors and plain data in it".to_owned(),
        )),
    }
}

fn value_of(
    object: &Bound<'_, PyAny>,
    describe: &Bound<'_, PyAny>,
    name: &str,
) -> Result<Value, Failure> {
    let below = |step: &dyn std::fmt::Display| match name {
        "" => step.to_string(),
        name => format!("{name}.{step}"),
    };
    if let Ok(entries) = object.cast::<PyDict>() {
        let mut dict = Dict::new();
        for (step, value) in entries {
            insert(&mut dict, &step, value_of(&value, describe, &below(&step))?, name)?;
        }
        return Ok(Value::Dict(dict));
    }
    if let Ok(items) = object.cast::<PyList>() {
        let values =
            items.iter().enumerate().map(|(at, item)| value_of(&item, describe, &below(&at)));
        let values = values.collect::<Result<Vec<_>, _>>()?;
        // A list that flattening leaves whole is one object, which has one encoding.
        if values.iter().any(|value| matches!(value, Value::Opaque(_))) && !is_descended(&values) {
            return leaf(object, describe, name);
        }
        return Ok(Value::List(values));
    }
    if let Some(value) = plain(object)? {
        return Ok(value);
    }
    // PyTorch descends into any mapping, such as a `MappingProxyType` or one of omegaconf.
    if object.cast::<PyMapping>().is_ok() && object.hasattr("items")? {
        let mut dict = Dict::new();
        for entry in object.call_method0("items")?.try_iter()? {
            let (step, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = entry?.extract()?;
            insert(&mut dict, &step, value_of(&value, describe, &below(&step))?, name)?;
        }
        return Ok(Value::Dict(dict));
    }
    leaf(object, describe, name)
}

fn insert(
    dict: &mut Dict,
    step: &Bound<'_, PyAny>,
    value: Value,
    name: &str,
) -> Result<(), Failure> {
    let step = key(step)?.ok_or_else(|| {
        Failure::Argument(format!(
            "a key of {name:?} is {step:?}; keys are strings, numbers or tuples of them"
        ))
    })?;
    dict.insert(step, value);
    Ok(())
}

/// Whether flattening descends into a list: it holds a tensor or a dict, at some depth of lists.
fn is_descended(values: &[Value]) -> bool {
    values.iter().any(|value| match value {
        Value::Tensor(_) | Value::Dict(_) => true,
        Value::List(items) => is_descended(items),
        _ => false,
    })
}

fn leaf(
    object: &Bound<'_, PyAny>,
    describe: &Bound<'_, PyAny>,
    name: &str,
) -> Result<Value, Failure> {
    let described = describe.call1((object, name))?;
    if let Ok(encoded) = described.cast::<PyBytes>() {
        let encoded = Bytes::copy_from_slice(encoded.as_bytes());
        return decode_object(&encoded).map_err(|error| Failure::Checkpoint(error.into()));
    }
    Ok(Value::Tensor(tensor(described.extract()?, name)?))
}

/// The tensor that Python describes.
pub(crate) fn tensor(described: Described, name: &str) -> Result<Tensor, Failure> {
    let (dtype, shape, regions, parts) = described;
    let dtype: DType =
        dtype.parse().map_err(|error| Failure::Argument(format!("{name:?} has an {error}")))?;
    let failed =
        |error: dcp::core::error::TensorError| Failure::Checkpoint(error.with_fqn(name).into());
    let Some(regions) = regions else {
        let part = parts.into_iter().next();
        let part = part.ok_or_else(|| Failure::Argument(format!("{name:?} has no elements")))?;
        return Tensor::from_view(view(dtype, &shape, part).map_err(failed)?).map_err(failed);
    };
    let shards = regions.into_iter().zip(parts).map(|((offsets, sizes), part)| {
        let region =
            Region::new(offsets, sizes.clone()).map_err(dcp::core::error::TensorError::from)?;
        Shard::with_view(region, view(dtype, &sizes, part)?)
    });
    let shards = shards.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    Tensor::sharded(dtype, shape, shards).map_err(failed)
}

/// The elements of a part, as a view of Python's memory.
pub(crate) fn view(
    dtype: DType,
    sizes: &[u64],
    part: Part,
) -> Result<TensorView, dcp::core::error::TensorError> {
    let (address, byte_len, strides, owner) = part;
    let memory = memory::of_object(address, byte_len, owner);
    let sizes = Dims::from(sizes.to_vec());
    match strides {
        None => TensorView::contiguous(memory, dtype, sizes, 0),
        Some(strides) => TensorView::strided(memory, dtype, sizes, strides, 0),
    }
}

/// Puts loaded objects where they were in the Python state; tensors were filled in place. `make` turns an object that
/// only Python code can make into one.
pub(crate) fn write_back(
    state: &Bound<'_, PyAny>,
    loaded: &Dict,
    make: &Bound<'_, PyAny>,
) -> Result<(), Failure> {
    for (step, value) in loaded.iter() {
        let step = to_python(state.py(), "a key", step)?;
        put(state, step, value, make)?;
    }
    Ok(())
}

fn put(
    parent: &Bound<'_, PyAny>,
    step: Bound<'_, PyAny>,
    value: &Value,
    make: &Bound<'_, PyAny>,
) -> Result<(), Failure> {
    match value {
        Value::Tensor(_) => return Ok(()),
        Value::Dict(loaded) => {
            let child = parent.get_item(&step)?;
            if child.cast::<PyMapping>().is_ok() {
                return write_back(&child, loaded, make);
            }
        }
        Value::List(items) if is_descended(items) => {
            let child = parent.get_item(&step)?;
            if child.cast::<PyList>().is_ok() {
                for (at, item) in items.iter().enumerate() {
                    put(
                        &child,
                        at.into_pyobject(parent.py()).map_err(PyErr::from)?.into_any(),
                        item,
                        make,
                    )?;
                }
                return Ok(());
            }
        }
        _ => {}
    }
    let object = to_python(parent.py(), &step.to_string(), value)?;
    parent.set_item(step, make.call1((object,))?)?;
    Ok(())
}
