//! What PyTorch says is in a checkpoint: `expected.safetensors`, whole tensors as bytes, and
//! `expected.json`, dtypes, shapes and objects, where `{"t": ...}` tags what JSON has no word for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dcp::core::value::{BigInt, Dict, Global, Object};
use dcp::{StateDict, Tensor, Value};
use serde_json::Value as Json;

use crate::{Result, layout};

/// The expected contents of a checkpoint.
pub(crate) struct Contents {
    tensors: BTreeMap<String, (String, Vec<u64>, Vec<u8>)>,
    objects: BTreeMap<String, Json>,
}

impl Contents {
    /// Reads the two files beside the checkpoint.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let json: Json = serde_json::from_slice(&std::fs::read(folder.join("expected.json"))?)?;
        let file = std::fs::read(folder.join("expected.safetensors"))?;
        let (len, rest) = file.split_first_chunk::<8>().ok_or("expected.safetensors is short")?;
        let len = usize::try_from(u64::from_le_bytes(*len))?;
        let (header, data) = rest.split_at_checked(len).ok_or("expected.safetensors is short")?;
        let header: Json = serde_json::from_slice(header)?;

        let mut tensors = BTreeMap::new();
        for (fqn, tensor) in object(&json, "tensors")? {
            let bytes = match numbers(header.get(fqn), "data_offsets")?[..] {
                [begin, end] => data.get(usize::try_from(begin)?..usize::try_from(end)?),
                _ => None,
            };
            let bytes = bytes.ok_or("expected.safetensors is damaged")?.to_vec();
            let dtype = text(tensor, "dtype")?.to_owned();
            tensors.insert(fqn.clone(), (dtype, numbers(Some(tensor), "shape")?, bytes));
        }
        let objects = object(&json, "objects")?;
        let objects = objects.iter().map(|(fqn, value)| (fqn.clone(), value.clone())).collect();
        Ok(Self { tensors, objects })
    }

    /// Fails unless `state`, flat, holds exactly these names with these contents; of a sharded
    /// tensor, the parts that are here.
    pub(crate) fn compare(&self, state: &StateDict) -> Result {
        let found: Vec<&str> = state.iter().filter_map(|(fqn, _)| fqn.as_str()).collect();
        for fqn in self.tensors.keys().chain(self.objects.keys()) {
            if !found.contains(&&**fqn) {
                return Err(format!("{fqn} is not in the checkpoint").into());
            }
        }
        for (fqn, value) in state.iter() {
            let fqn = fqn.as_str().unwrap_or_default();
            match (value, self.tensors.get(fqn), self.objects.get(fqn)) {
                (Value::Tensor(tensor), Some(expected), _) => {
                    same_tensor(tensor, expected).map_err(|e| format!("{fqn}: {e}"))?;
                }
                (object, _, Some(expected)) => {
                    if !matches(object.view(), expected) {
                        return Err(format!("{fqn} is {object:?}, not {expected}").into());
                    }
                }
                _ => return Err(format!("{fqn} is in the checkpoint but not expected").into()),
            }
        }
        Ok(())
    }
}

fn same_tensor(tensor: &Tensor, (dtype, shape, whole): &(String, Vec<u64>, Vec<u8>)) -> Result {
    if tensor.dtype().name() != dtype || **tensor.shape() != **shape {
        return Err(format!("{} {}, not {dtype} {shape:?}", tensor.dtype(), tensor.shape()).into());
    }
    for shard in tensor.shards() {
        let expected = layout::bytes_of(tensor.dtype(), shape, whole, shard.region())?;
        if shard.host_view("tensor")?.payload()?.to_bytes() != expected {
            return Err(format!("{} differs", shard.region()).into());
        }
    }
    Ok(())
}

/// Whether a value is what the tagged JSON says.
pub(crate) fn matches(value: &Value, json: &Json) -> bool {
    let all = |values: &[Value], items: &[Json]| {
        values.len() == items.len() && values.iter().zip(items).all(|(v, j)| matches(v, j))
    };
    let tag = json.get("t").and_then(Json::as_str);
    let items = json.get("v").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
    let hex = || json.get("hex").and_then(Json::as_str).and_then(unhex);
    match (value, tag) {
        (Value::None, None) => json.is_null(),
        (Value::Bool(b), None) => json.as_bool() == Some(*b),
        (Value::Int(n), None) => json.as_i64() == Some(*n),
        (Value::Str(text), None) => json.as_str() == Some(&**text),
        (Value::Int(n), Some("int")) => json.get("v") == Some(&Json::from(n.to_string())),
        (Value::BigInt(n), Some("int")) => json.get("v") == Some(&Json::from(n.to_string())),
        (Value::Float(x), Some("float")) => {
            json.get("bits") == Some(&Json::from(format!("{:016x}", x.to_bits())))
        }
        (Value::Complex(re, im), Some("complex")) => {
            all(&[Value::Float(*re), Value::Float(*im)], items)
        }
        (Value::Bytes(bytes), Some("bytes")) | (Value::ByteArray(bytes), Some("bytearray")) => {
            hex().is_some_and(|hex| hex == **bytes)
        }
        (Value::List(values), Some("list")) | (Value::Tuple(values), Some("tuple")) => {
            all(values, items)
        }
        (Value::Set(values), Some("set")) | (Value::FrozenSet(values), Some("frozenset")) => {
            values.len() == items.len()
                && items.iter().all(|item| values.iter().any(|value| matches(value, item)))
        }
        (Value::Dict(dict), Some("dict")) => {
            let entry = |(k, v): (&Value, &Value), pair: &Json| {
                all(&[k.clone(), v.clone()], pair.as_array().map_or(&[], Vec::as_slice))
            };
            dict.len() == items.len() && dict.iter().zip(items).all(|(kv, pair)| entry(kv, pair))
        }
        (Value::Tensor(tensor), Some("tensor")) => {
            let dtype = json.get("dtype").and_then(Json::as_str);
            dtype == Some(&format!("torch.{}", tensor.dtype())) && tensor.to_vec() == hex()
        }
        (Value::Object(object), Some("numpy_scalar" | "numpy_array")) => {
            // The bytes are the last thing that numpy gives, whatever its version calls the rest.
            object.class.module.starts_with("numpy") && last_bytes(object) == hex()
        }
        // A name of its own, such as a dtype.
        (Value::Global(global), Some(_)) => {
            json.get("repr").and_then(Json::as_str) == Some(&global.to_string())
        }
        // torch.Size is looked at as a tuple.
        (Value::Tuple(_), Some("torch.Size")) => true,
        // Nothing was constructed, so there is no repr to compare: only the class is known here.
        // That its contents survive is shown by carrying it back to PyTorch.
        (Value::Object(object), Some(class)) => {
            object.class.to_string() == class || mentions(object, class)
        }
        _ => false,
    }
}

/// Whether a class is among what an object is made from: some are made by a helper function.
fn mentions(object: &Object, class: &str) -> bool {
    let name = class.rsplit('.').next().unwrap_or(class);
    object.class.name.ends_with(name)
        || object
            .args
            .iter()
            .any(|arg| matches!(arg, Value::Global(global) if global.to_string() == class))
}

fn last_bytes(object: &Object) -> Option<Vec<u8>> {
    let state = match &object.state {
        Some(Value::Tuple(items)) => items.last(),
        _ => object.args.last(),
    };
    match state {
        Some(Value::Bytes(bytes)) => Some(bytes.to_vec()),
        _ => None,
    }
}

/// The value of tagged JSON.
pub(crate) fn value_of(json: &Json) -> Result<Value> {
    let tag = json.get("t").and_then(Json::as_str);
    let items = || {
        let items = json.get("v").and_then(Json::as_array).ok_or("a tag without its items")?;
        items.iter().map(value_of).collect::<Result<Vec<_>>>()
    };
    Ok(match (json, tag) {
        (Json::Null, _) => Value::None,
        (Json::Bool(b), _) => Value::Bool(*b),
        (Json::Number(n), _) => Value::Int(n.as_i64().ok_or("a float without its tag")?),
        (Json::String(text), _) => Value::from(text.as_str()),
        (_, Some("float")) => {
            Value::Float(f64::from_bits(u64::from_str_radix(text(json, "bits")?, 16)?))
        }
        (_, Some("bytes")) => {
            Value::Bytes(unhex(text(json, "hex")?).ok_or("bytes that are not hex")?.into())
        }
        (_, Some("int")) => Value::BigInt(big(text(json, "v")?).ok_or("no integer")?),
        (_, Some("list")) => Value::List(items()?),
        (_, Some("tuple")) => Value::Tuple(items()?),
        (_, Some("torch.dtype")) => {
            let name = text(json, "repr")?;
            let (module, name) = name.split_once('.').ok_or("a dtype of no module")?;
            Value::Global(Global::new(module, name))
        }
        (_, Some("dict")) => {
            let mut dict = Dict::new();
            for pair in json.get("v").and_then(Json::as_array).into_iter().flatten() {
                let [key, value] = pair.as_array().map_or(&[][..], Vec::as_slice) else {
                    return Err("an entry of a dict is a pair".into());
                };
                dict.insert(value_of(key)?, value_of(value)?);
            }
            Value::Dict(dict)
        }
        (_, Some("tensor")) => {
            let dtype = text(json, "dtype")?;
            let dtype = dtype.strip_prefix("torch.").unwrap_or(dtype).parse()?;
            let bytes = unhex(text(json, "hex")?).ok_or("bytes that are not hex")?;
            Tensor::replicated(dtype, numbers(Some(json), "shape")?, bytes)?.into()
        }
        _ => return Err(format!("no value for {json}").into()),
    })
}

/// A decimal number that is not negative.
fn big(decimal: &str) -> Option<BigInt> {
    let mut bytes = vec![0_u8];
    for digit in decimal.chars() {
        let mut carry = digit.to_digit(10)?;
        for byte in &mut bytes {
            let n = u32::from(*byte) * 10 + carry;
            (*byte, carry) = ((n & 0xff) as u8, n >> 8);
        }
        if carry > 0 {
            bytes.push(u8::try_from(carry).ok()?);
        }
    }
    bytes.push(0);
    Some(BigInt::from_le_bytes(bytes))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn object<'a>(json: &'a Json, field: &str) -> Result<&'a serde_json::Map<String, Json>> {
    json.get(field).and_then(Json::as_object).ok_or_else(|| format!("no {field}").into())
}

/// A field that is a text.
pub(crate) fn text<'a>(json: &'a Json, field: &str) -> Result<&'a str> {
    json.get(field).and_then(Json::as_str).ok_or_else(|| format!("no {field}").into())
}

/// A field that is a list of numbers.
pub(crate) fn numbers(json: Option<&Json>, field: &str) -> Result<Vec<u64>> {
    let list = json.and_then(|json| json.get(field)).and_then(Json::as_array);
    let list = list.ok_or_else(|| format!("no {field}"))?;
    list.iter().map(|n| n.as_u64().ok_or_else(|| "no number".into())).collect()
}

/// A path of a state dict: names and numbers of list elements.
pub(crate) fn path(json: &Json) -> Result<dcp::core::path::StatePath> {
    use dcp::core::path::PathItem;
    let items = json.get("path").and_then(Json::as_array).ok_or("no path")?;
    let items = items.iter().map(|item| match item {
        Json::String(key) => Ok(PathItem::Key(Arc::from(key.as_str()))),
        index => Ok(PathItem::Index(index.as_u64().ok_or("a path of neither text nor numbers")?)),
    });
    items.collect::<Result<Vec<_>>>().map(Into::into)
}
