//! Values as the tagged JSON of `expected.json`: what Python's objects look like to people.

use std::fmt::Write as _;

use dcp_core::Value;
use dcp_core::value::Object;
use serde_json::{Value as Json, json};

/// The JSON that the fixtures' generator makes of the Python object.
pub fn tagged(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(b) => json!(b),
        Value::Int(n) if n.unsigned_abs() < 1 << 53 => json!(n),
        Value::Int(n) => json!({"t": "int", "v": n.to_string()}),
        Value::BigInt(n) => json!({"t": "int", "v": n.to_string()}),
        Value::Float(x) => json!({"t": "float", "v": float(*x)}),
        Value::Complex(re, im) => json!({"t": "complex", "re": float(*re), "im": float(*im)}),
        Value::Str(text) => json!(&**text),
        Value::Bytes(bytes) => json!({"t": "bytes", "hex": hex(bytes)}),
        Value::ByteArray(bytes) => json!({"t": "bytearray", "hex": hex(bytes)}),
        Value::List(items) => json!({"t": "list", "v": all(items)}),
        Value::Tuple(items) => json!({"t": "tuple", "v": all(items)}),
        Value::Set(items) => json!({"t": "set", "v": sorted(items)}),
        Value::FrozenSet(items) => json!({"t": "frozenset", "v": sorted(items)}),
        Value::Dict(dict) => {
            let entries: Vec<_> = dict.iter().map(|(k, v)| json!([tagged(k), tagged(v)])).collect();
            json!({"t": "dict", "v": entries})
        }
        Value::Tensor(tensor) => json!({
            "t": "tensor",
            "dtype": format!("torch.{}", tensor.dtype()),
            "shape": tensor.shape().to_vec(),
            "hex": hex(&tensor.to_vec().unwrap()),
        }),
        Value::Global(global) if global.is("builtins", "Ellipsis") => {
            json!({"t": "builtins.ellipsis", "repr": "Ellipsis"})
        }
        Value::Global(global) if &*global.module == "torch" => {
            json!({"t": "torch.dtype", "v": global.to_string()})
        }
        Value::Object(object) => tagged_object(object),
        Value::Opaque(opaque) => tagged(&opaque.view),
        other => panic!("{other:?}"),
    }
}

fn tagged_object(object: &Object) -> Json {
    let args = &object.args;
    let class = object.class.to_string();
    match class.replace("numpy.core", "numpy._core").as_str() {
        "numpy._core.multiarray.scalar" => {
            json!({"t": "npscalar", "dtype": dtype(&args[0]), "hex": hex(bytes(&args[1]))})
        }
        "numpy._core.multiarray._reconstruct" => {
            let Some(Value::Tuple(state)) = &object.state else { panic!("{object:?}") };
            let [_, Value::Tuple(shape), descr, Value::Bool(fortran), data] = &state[..] else {
                panic!("{state:?}")
            };
            if let Value::List(items) = data {
                return json!({"t": "ndarray_object", "v": all(items)});
            }
            let dtype = dtype(descr);
            let item =
                dtype[2..].parse::<usize>().unwrap() * if &dtype[1..2] == "U" { 4 } else { 1 };
            let shape: Vec<usize> = shape.iter().map(|n| n.as_int().unwrap() as usize).collect();
            let data =
                if *fortran { c_order(bytes(data), &shape, item) } else { bytes(data).to_vec() };
            json!({"t": "ndarray", "dtype": dtype, "shape": shape, "fortran": fortran, "hex": hex(&data)})
        }
        "argparse.Namespace" => {
            let state = object.state.as_ref().unwrap().as_dict().unwrap();
            let fields: Vec<_> =
                state.iter().map(|(k, v)| format!("{}={}", k.as_str().unwrap(), repr(v))).collect();
            json!({"t": class, "repr": format!("Namespace({})", fields.join(", "))})
        }
        "pathlib.PosixPath" => {
            let parts: Vec<_> = args.iter().map(|part| part.as_str().unwrap()).collect();
            let path = format!("/{}", parts[1..].join("/"));
            json!({"t": class, "repr": format!("PosixPath('{path}')")})
        }
        "torch.device" => {
            let text = format!("{}:{}", args[0].as_str().unwrap(), args[1].as_int().unwrap());
            json!({"t": class, "v": text})
        }
        "torch.serialization._get_layout" => {
            json!({"t": "torch.layout", "v": args[0].as_str().unwrap()})
        }
        "datetime.datetime" => {
            let b = bytes(&args[0]);
            let year = u16::from_be_bytes([b[0], b[1]]);
            let mut rest: Vec<_> = b[2..7].iter().map(u8::to_string).collect();
            let micros = u32::from_be_bytes([0, b[7], b[8], b[9]]);
            rest.extend((micros > 0).then(|| micros.to_string()));
            json!({"t": class, "repr": format!("datetime.datetime({year}, {})", rest.join(", "))})
        }
        "datetime.timedelta" => {
            let parts: Vec<_> = args.iter().map(|n| n.as_int().unwrap()).collect();
            assert_eq!((parts[0], parts[2]), (0, 0));
            json!({"t": class, "repr": format!("datetime.timedelta(seconds={})", parts[1])})
        }
        "decimal.Decimal" => json!({"t": class, "repr": format!("Decimal({})", repr(&args[0]))}),
        "builtins.range" | "builtins.slice" => {
            let mut args: Vec<_> = args.iter().map(repr).collect();
            if &*object.class.name == "range" && args[2] == "1" {
                args.truncate(2);
            }
            json!({"t": class, "repr": format!("{}({})", object.class.name, args.join(", "))})
        }
        "collections.deque" => {
            let items = repr(&Value::List(object.items.clone()));
            let maxlen = repr(&args[1]);
            json!({"t": class, "repr": format!("deque({items}, maxlen={maxlen})")})
        }
        "_io.BytesIO" => {
            let Some(Value::Tuple(state)) = &object.state else { panic!("{object:?}") };
            json!({"t": "BytesIO", "hex": hex(bytes(&state[0]))})
        }
        _ => panic!("{}", object.class),
    }
}

/// `<f4` of a `numpy.dtype("f4", False, True)` with its byte order in the state.
fn dtype(value: &Value) -> String {
    let Value::Object(object) = value else { panic!("{value:?}") };
    assert_eq!(object.class.to_string(), "numpy.dtype");
    let Some(Value::Tuple(state)) = &object.state else { panic!("{object:?}") };
    format!("{}{}", state[1].as_str().unwrap(), object.args[0].as_str().unwrap())
}

fn c_order(data: &[u8], shape: &[usize], item: usize) -> Vec<u8> {
    let count = shape.iter().product::<usize>();
    let mut out = Vec::new();
    for n in 0..count {
        let (mut rest, mut at, mut stride) = (n, 0, count);
        let mut digits = Vec::new();
        for size in shape.iter().rev() {
            digits.push(rest % size);
            rest /= size;
        }
        for (digit, size) in digits.iter().zip(shape.iter().rev()) {
            stride /= size;
            at += digit * stride;
        }
        out.extend_from_slice(&data[at * item..(at + 1) * item]);
    }
    out
}

fn bytes(value: &Value) -> &[u8] {
    let Value::Bytes(bytes) = value else { panic!("{value:?}") };
    bytes
}

fn all(items: &[Value]) -> Vec<Json> {
    items.iter().map(tagged).collect()
}

fn sorted(items: &[Value]) -> Vec<Json> {
    let mut items = all(items);
    items.sort_by_key(Json::to_string);
    items
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// As Python's `repr` of a float.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    format!("{x:?}")
}

fn repr(value: &Value) -> String {
    match value {
        Value::None => "None".into(),
        Value::Int(n) => n.to_string(),
        Value::Float(x) => float(*x),
        Value::Str(text) => format!("'{text}'"),
        Value::List(items) => {
            format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", "))
        }
        other => panic!("{other:?}"),
    }
}
