//! Values against the JSON that the fixtures' generator made of them.

use dcp_core::value::{Dict, Object};
use dcp_core::{DType, Tensor, Value};
use serde_json::Value as Json;

/// Fails with the place of the first difference.
pub(crate) fn check(value: &Value, json: &Json, at: &str) {
    let value = value.view();
    match (value, json) {
        (Value::None, Json::Null) => {}
        (Value::Bool(a), Json::Bool(b)) => assert_eq!(a, b, "{at}"),
        (Value::Int(a), Json::Number(b)) => assert_eq!(Some(*a), b.as_i64(), "{at}"),
        (Value::Float(a), Json::Number(b)) => {
            assert!(near(*a, b.as_f64().unwrap()), "{at}: {a} and {b}");
        }
        (Value::Str(a), Json::String(b)) => assert_eq!(**a, **b, "{at}"),
        (Value::List(items), Json::Array(expected)) => list(items, expected, at),
        (Value::Tuple(items), json) => list(items, tagged(json, "__tuple__", at), at),
        (Value::Dict(entries), json) => dict(entries, json, at),
        (Value::Bytes(bytes), json) => {
            let text = json["__bytes_b64__"].as_str().unwrap_or_else(|| panic!("{at}: {json}"));
            assert_eq!(base64(bytes), text, "{at}");
        }
        (Value::Global(global), json) => {
            assert_eq!(json["__dtype__"], global.to_string(), "{at}");
        }
        (Value::Tensor(found), json) => tensor(found, json, at),
        (Value::Object(found), json) => object(found, json, at),
        (value, json) => panic!("{at}: {value:?} is not {json}"),
    }
}

fn tagged<'a>(json: &'a Json, tag: &str, at: &str) -> &'a [Json] {
    json[tag].as_array().unwrap_or_else(|| panic!("{at}: no {tag} but {json}"))
}

fn list(items: &[Value], expected: &[Json], at: &str) {
    assert_eq!(items.len(), expected.len(), "{at}");
    for (n, (item, expected)) in items.iter().zip(expected).enumerate() {
        check(item, expected, &format!("{at}[{n}]"));
    }
}

pub(crate) fn dict(entries: &Dict, json: &Json, at: &str) {
    let expected = json.as_object().unwrap_or_else(|| panic!("{at}: no dict but {json}"));
    if let Some(items) = expected.get("__dict_items__") {
        let items = items.as_array().unwrap();
        assert_eq!(entries.len(), items.len(), "{at}");
        for ((key, value), item) in entries.iter().zip(items) {
            check(key, &item[0], &format!("{at}, key {key:?}"));
            check(value, &item[1], &format!("{at}[{key:?}]"));
        }
        return;
    }
    let names: Vec<_> = entries.iter().map(|(key, _)| key.as_str().unwrap()).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    let mut all: Vec<_> = expected.keys().collect();
    all.sort_unstable();
    assert_eq!(sorted, all, "{at}");
    for name in names {
        check(entries.get(name).unwrap(), &expected[name], &format!("{at}.{name}"));
    }
}

fn tensor(tensor: &Tensor, json: &Json, at: &str) {
    assert_eq!(json["__tensor__"], format!("torch.{}", tensor.dtype()), "{at}");
    let shape: Vec<Json> = tensor.shape().iter().map(|n| (*n).into()).collect();
    assert_eq!(json["shape"], Json::from(shape), "{at}");
    let numbers = numbers(&tensor.to_vec().unwrap(), tensor.dtype());
    let expected = json["data"].as_array().unwrap();
    assert_eq!(numbers.len(), expected.len(), "{at}");
    for (found, expected) in numbers.into_iter().zip(expected) {
        assert!(near(found, expected.as_f64().unwrap()), "{at}: {found} and {expected}");
    }
}

/// Whether two numbers are the same, but for the last bit, which serde_json does not always get
/// right when it reads one.
fn near(a: f64, b: f64) -> bool {
    a.to_bits().abs_diff(b.to_bits()) <= 1
}

fn numbers(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let f32_of = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
    let elements = bytes.chunks(dtype.size());
    match dtype {
        DType::UInt8 => elements.map(|b| f64::from(b[0])).collect(),
        DType::Float32 => elements.map(f32_of).collect(),
        DType::BFloat16 => elements.map(|b| f32_of(&[0, 0, b[0], b[1]])).collect(),
        DType::Float64 => elements.map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        DType::Int64 => {
            elements.map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect()
        }
        other => panic!("{other}"),
    }
}

fn object(object: &Object, json: &Json, at: &str) {
    if let Some(entries) = json.get("__namespace__") {
        assert!(object.class.is("argparse", "Namespace"), "{at}: {}", object.class);
        let state = object.state.as_ref().and_then(Value::as_dict).unwrap();
        return dict(state, entries, at);
    }
    if let Some(class) = json.get("__enum__") {
        assert_eq!(*class, object.class.to_string(), "{at}");
        return list(&object.args, &[json["value"].clone()], at);
    }
    if let Some(dtype) = json.get("__ndarray__") {
        // _reconstruct(ndarray, (0,), b'b') with the state (1, shape, dtype, False, bytes).
        assert_eq!(dtype, "uint32", "{at}");
        assert_eq!(&*object.class.name, "_reconstruct", "{at}");
        let Some(Value::Tuple(state)) = &object.state else { panic!("{at}: {object:?}") };
        let Some(Value::Bytes(bytes)) = state.get(4) else { panic!("{at}: {state:?}") };
        let numbers = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        let expected = json["data"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32);
        return assert!(numbers.eq(expected), "{at}");
    }
    panic!("{at}: {object:?} is not {json}");
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut all = [0; 3];
        all[..group.len()].copy_from_slice(group);
        let n = u32::from_be_bytes([0, all[0], all[1], all[2]]);
        for digit in 0..4 {
            let index = (n >> (18 - 6 * digit) & 63) as usize;
            text.push(if digit > group.len() { '=' } else { char::from(DIGITS[index]) });
        }
    }
    text
}
