//! Python's plain data as values, and back.
//!
//! Going in, what is not plain (an instance of a class) is `None` here, and the caller encodes it with `torch.save`.
//! Coming out, what only Python code can make is a `distcp.Opaque`, which holds the encoded object and shows what is in
//! it: nothing is unpickled.

use std::sync::Arc;

use bytes::Bytes;
use dcp::Value;
use dcp::core::value::{BigInt, Dict};
use dcp::formats::torch_object::encode_object;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet,
    PyString, PyTuple,
};

use crate::failure::Failure;

/// The depth up to which values nest; PyTorch's own recursion ends at Python's limit of 1000 calls.
const DEPTH_MAX: usize = 256;

/// The value of plain data, exactly of these types: `None` for anything else, subclasses included.
pub(crate) fn plain(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    plain_at(object, 0)
}

fn plain_at(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Option<Value>> {
    if depth > DEPTH_MAX {
        return Ok(None);
    }
    let items = |items: Bound<'_, PyAny>| -> PyResult<Option<Vec<Value>>> {
        items.try_iter()?.map(|item| plain_at(&item?, depth + 1)).collect()
    };
    Ok(if object.is_none() {
        Some(Value::None)
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        Some(Value::Bool(value.is_true()))
    } else if let Ok(value) = object.cast_exact::<PyInt>() {
        Some(integer(value)?)
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        Some(Value::Float(value.value()))
    } else if let Ok(value) = object.cast_exact::<PyComplex>() {
        Some(Value::Complex(value.real(), value.imag()))
    } else if let Ok(value) = object.cast_exact::<PyString>() {
        // A lone surrogate is no text of UTF-8; `torch.save` encodes it.
        value.to_str().ok().map(|text| Value::Str(text.into()))
    } else if let Ok(value) = object.cast_exact::<PyBytes>() {
        Some(Value::Bytes(Bytes::copy_from_slice(value.as_bytes())))
    } else if let Ok(value) = object.cast_exact::<PyByteArray>() {
        Some(Value::ByteArray(value.to_vec().into()))
    } else if let Ok(value) = object.cast_exact::<PyList>() {
        items(value.as_any().clone())?.map(Value::List)
    } else if let Ok(value) = object.cast_exact::<PyTuple>() {
        items(value.as_any().clone())?.map(Value::Tuple)
    } else if let Ok(value) = object.cast_exact::<PySet>() {
        items(value.as_any().clone())?.map(Value::Set)
    } else if let Ok(value) = object.cast_exact::<PyFrozenSet>() {
        items(value.as_any().clone())?.map(Value::FrozenSet)
    } else if let Ok(value) = object.cast_exact::<PyDict>() {
        let mut dict = Dict::new();
        for (key, value) in value {
            let (Some(key), Some(value)) =
                (plain_at(&key, depth + 1)?, plain_at(&value, depth + 1)?)
            else {
                return Ok(None);
            };
            dict.insert(key, value);
        }
        Some(Value::Dict(dict))
    } else {
        None
    })
}

fn integer(value: &Bound<'_, PyInt>) -> PyResult<Value> {
    if let Ok(number) = value.extract::<i64>() {
        return Ok(Value::Int(number));
    }
    // Two's complement with room for the sign.
    let bits: usize = value.call_method0("bit_length")?.extract()?;
    let arguments = PyDict::new(value.py());
    arguments.set_item("signed", true)?;
    let bytes = value.call_method("to_bytes", (bits / 8 + 1, "little"), Some(&arguments))?;
    let bytes: Vec<u8> = bytes.extract()?;
    Ok(Value::BigInt(BigInt::from_le_bytes(bytes)))
}

/// The object of Python that a value is.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    fqn: &str,
    value: &Value,
) -> PyResult<Bound<'py, PyAny>> {
    match plain_object(py, value)? {
        Some(object) => Ok(object),
        None => opaque(py, fqn, value),
    }
}

/// The object of plain data; `None` where a part of it is none.
fn plain_object<'py>(py: Python<'py>, value: &Value) -> PyResult<Option<Bound<'py, PyAny>>> {
    let all = |items: &[Value]| -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        items.iter().map(|item| plain_object(py, item)).collect()
    };
    Ok(match value {
        Value::None => Some(py.None().into_bound(py)),
        Value::Bool(value) => Some(PyBool::new(py, *value).to_owned().into_any()),
        Value::Int(value) => Some(value.into_pyobject(py)?.into_any()),
        Value::BigInt(value) => {
            let arguments = PyDict::new(py);
            arguments.set_item("signed", true)?;
            let bytes = PyBytes::new(py, value.to_le_bytes());
            Some(py.get_type::<PyInt>().call_method(
                "from_bytes",
                (bytes, "little"),
                Some(&arguments),
            )?)
        }
        Value::Float(value) => Some(PyFloat::new(py, *value).into_any()),
        Value::Complex(real, imag) => Some(PyComplex::from_doubles(py, *real, *imag).into_any()),
        Value::Str(value) => Some(PyString::new(py, value).into_any()),
        Value::Bytes(value) => Some(PyBytes::new(py, value).into_any()),
        Value::ByteArray(value) => Some(PyByteArray::new(py, value).into_any()),
        Value::List(items) => {
            all(items)?.map(|items| PyList::new(py, items)).transpose()?.map(Bound::into_any)
        }
        Value::Tuple(items) => {
            all(items)?.map(|items| PyTuple::new(py, items)).transpose()?.map(Bound::into_any)
        }
        Value::Set(items) => {
            all(items)?.map(|items| PySet::new(py, items)).transpose()?.map(Bound::into_any)
        }
        Value::FrozenSet(items) => {
            all(items)?.map(|items| PyFrozenSet::new(py, items)).transpose()?.map(Bound::into_any)
        }
        Value::Dict(entries) => {
            let dict = PyDict::new(py);
            for (key, value) in entries.iter() {
                let (Some(key), Some(value)) = (plain_object(py, key)?, plain_object(py, value)?)
                else {
                    return Ok(None);
                };
                dict.set_item(key, value)?;
            }
            Some(dict.into_any())
        }
        _ => None,
    })
}

/// An object that only Python code can make, encoded.
fn opaque<'py>(py: Python<'py>, fqn: &str, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    let shown = match value {
        Value::Opaque(opaque) => format!("{:?}", opaque.view),
        other => format!("{other:?}"),
    };
    let bytes = encoded(fqn, value)?;
    py.import("distcp._opaque")?.getattr("Opaque")?.call1((fqn, PyBytes::new(py, &bytes), shown))
}

/// The value as `torch.save` encodes it.
pub(crate) fn encoded(fqn: &str, value: &Value) -> Result<Bytes, Failure> {
    encode_object(value).map_err(|error| {
        let subject = format!("object {fqn:?}");
        Failure::Checkpoint(dcp::core::FormatError::new(subject, error.to_string()).into())
    })
}

/// Whether a value is plain data, which needs no class of Python.
pub(crate) fn is_plain(value: &Value) -> bool {
    match value {
        Value::List(items) | Value::Tuple(items) | Value::Set(items) | Value::FrozenSet(items) => {
            items.iter().all(is_plain)
        }
        Value::Dict(entries) => entries.iter().all(|(key, value)| is_plain(key) && is_plain(value)),
        Value::Global(_) | Value::Object(_) | Value::Opaque(_) | Value::Tensor(_) => false,
        _ => true,
    }
}

/// A key of a dict in a state dict, which PyTorch accepts of any of these types.
pub(crate) fn key(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    Ok(plain(object)?.filter(|key| {
        matches!(
            key,
            Value::Str(_)
                | Value::Int(_)
                | Value::Bool(_)
                | Value::None
                | Value::Float(_)
                | Value::Tuple(_)
        )
    }))
}

/// A string as the key of a flat state dict.
pub(crate) fn text(text: &str) -> Value {
    Value::Str(Arc::from(text))
}
