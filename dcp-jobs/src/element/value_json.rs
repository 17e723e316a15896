//! Encodes state-dict values as JSON: plain values as they are, others tagged `{"type": …}`.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::text::beginning;
use dcp_core::value::{BigInt, Dict, Global, Object};
use dcp_core::{DType, Tensor, Value};
use serde_json::{Map, Number, json};

use crate::element::{Element, decode, numpy};

type Json = serde_json::Value;

/// Limits on encoded values. What exceeds them becomes `{"type": "truncated", …}`.
///
/// Repeated strings and byte strings are written again until their total reaches
/// [`SHARED_MIN`](ValueEncoder::SHARED_MIN) plus the total of distinct ones.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct JsonLimits {
    /// The nesting depth of containers.
    pub depth: usize,
    /// The total number of values.
    pub values: usize,
    /// The length of one string or byte string, in bytes.
    pub bytes: usize,
}

impl Default for JsonLimits {
    /// Depth 64, 100 000 values, 1 MiB per string.
    fn default() -> Self {
        Self { depth: 64, values: 100_000, bytes: 1 << 20 }
    }
}

/// Encodes `value` as JSON.
///
/// `null`, booleans, finite floats, integers of up to 53 bits, strings, lists, and dicts with
/// string keys (none of which is `type`) are plain. All else is an object whose `type` is Python's
/// name: `int` and `float` with their `value` as text, `bytes` in `hex`, `tuple` and `set` with
/// `items`, `dict` with `entries`, `tensor` with `dtype`, `shape` and `values`, NumPy scalars and
/// arrays likewise, and other objects by their class with the stored `args`, `state`, `items` and
/// `entries`.
#[must_use]
pub fn value_json(value: &Value, limits: &JsonLimits) -> Json {
    ValueEncoder::new(limits).json(value)
}

/// Encodes several values, which may share memory, as JSON.
///
/// A few bytes of a file can refer to one long string a million times, and so can a million
/// objects.
#[derive(Debug)]
pub struct ValueEncoder<'a> {
    /// Values that the current object may still encode.
    left: usize,
    /// Long strings and byte strings already seen, by address. Holding them prevents reuse of the
    /// address.
    met: HashMap<usize, Held>,
    /// Everything written so far, by content hash and length.
    shown: HashSet<(u64, usize)>,
    /// Bytes of repetitions that may still be written.
    again_left: usize,
    limits: &'a JsonLimits,
}

/// A string or a byte string, with the memory that owns it.
#[derive(Debug)]
enum Held {
    Text(Arc<str>),
    Bytes(Bytes),
}

impl Held {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl<'a> ValueEncoder<'a> {
    /// Bytes of repetitions that may be written in addition to the total of distinct strings.
    pub const SHARED_MIN: usize = 16 << 20;
    /// A string up to this length costs no more than a reference to it.
    const SHORT: usize = 16;
    /// A string longer than this is identified by address before its content is hashed.
    const LONG: usize = 4096;

    /// An encoder that applies `limits` to each value.
    #[must_use]
    pub fn new(limits: &'a JsonLimits) -> Self {
        Self {
            left: 0,
            met: HashMap::new(),
            shown: HashSet::new(),
            again_left: Self::SHARED_MIN,
            limits,
        }
    }

    /// Encodes one value, as [`value_json`] does.
    #[must_use]
    pub fn json(&mut self, value: &Value) -> Json {
        self.left = self.limits.values;
        self.value(value, 0)
    }

    /// The number of leading bytes of a string that the limits allow to be written, whether it is
    /// new or a repetition. Returns `None` when it must be truncated entirely.
    fn affords(&mut self, held: Held) -> Option<usize> {
        let whole = held.bytes();
        let len = match &held {
            Held::Text(text) => beginning(text, self.limits.bytes).len(),
            Held::Bytes(bytes) => bytes.len().min(self.limits.bytes),
        };
        if len <= Self::SHORT {
            return Some(len);
        }
        let address = whole.as_ptr().addr();
        let is_new = !self.met.contains_key(&address) && {
            let mut hasher = DefaultHasher::new();
            whole.hash(&mut hasher);
            self.shown.insert((hasher.finish(), whole.len()))
        };
        if len > Self::LONG {
            self.met.entry(address).or_insert(held);
        }
        if is_new {
            self.again_left = self.again_left.saturating_add(len);
            return Some(len);
        }
        self.again_left = self.again_left.checked_sub(len)?;
        Some(len)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Json {
        if self.left == 0 || depth > self.limits.depth {
            return json!({ "type": "truncated", "kind": value.kind() });
        }
        self.left -= 1;
        let depth = depth + 1;
        match value {
            Value::None => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Int(n) if n.unsigned_abs() <= 1 << 53 => json!(n),
            Value::Int(n) => json!({ "type": "int", "value": n.to_string() }),
            Value::BigInt(n) => self.big_int(n),
            Value::Float(x) => float(*x),
            Value::Complex(re, im) => {
                json!({ "type": "complex", "real": float(*re), "imag": float(*im) })
            }
            Value::Str(text) => self.text(text),
            Value::Bytes(bytes) => self.bytes("bytes", bytes),
            Value::ByteArray(bytes) => self.bytes("bytearray", bytes),
            Value::List(items) => Json::Array(self.items(items, depth)),
            Value::Tuple(items) => json!({ "type": "tuple", "items": self.items(items, depth) }),
            Value::Set(items) => json!({ "type": "set", "items": self.items(items, depth) }),
            Value::FrozenSet(items) => {
                json!({ "type": "frozenset", "items": self.items(items, depth) })
            }
            Value::Dict(dict) => self.dict(dict, depth),
            Value::Tensor(tensor) => self.tensor(tensor),
            Value::Global(global) => json!({ "type": "global", "name": self.name(global) }),
            Value::Object(object) => match numpy::Numpy::of(object) {
                Some(found) => self.numpy(&found),
                None => self.object(object, depth),
            },
            Value::Opaque(opaque) => self.value(&opaque.view, depth),
            other => json!({ "type": other.kind() }),
        }
    }

    fn items(&mut self, items: &[Value], depth: usize) -> Vec<Json> {
        let mut all = Vec::new();
        for (index, item) in items.iter().enumerate() {
            if self.left == 0 {
                all.push(json!({ "type": "truncated", "left_out": items.len() - index }));
                break;
            }
            all.push(self.value(item, depth));
        }
        all
    }

    fn entries<'v>(
        &mut self,
        entries: impl ExactSizeIterator<Item = (&'v Value, &'v Value)>,
        depth: usize,
    ) -> Vec<Json> {
        let mut all = Vec::new();
        let len = entries.len();
        for (index, (key, value)) in entries.enumerate() {
            if self.left == 0 {
                all.push(json!({ "type": "truncated", "left_out": len - index }));
                break;
            }
            all.push(json!([self.value(key, depth), self.value(value, depth)]));
        }
        all
    }

    fn dict(&mut self, dict: &Dict, depth: usize) -> Json {
        let mut is_plain = |key: &Value| {
            let Value::Str(key) = key else { return false };
            &**key != "type" && self.affords(Held::Text(Arc::clone(key))) == Some(key.len())
        };
        let plain = dict.iter().all(|(key, _)| is_plain(key));
        if !plain || dict.len() > self.left {
            return json!({ "type": "dict", "entries": self.entries(dict.iter(), depth) });
        }
        let mut object = Map::new();
        for (key, value) in dict.iter() {
            if let Some(key) = key.as_str() {
                object.insert(key.to_owned(), self.value(value, depth));
            }
        }
        Json::Object(object)
    }

    fn object(&mut self, object: &Object, depth: usize) -> Json {
        let mut json = Map::new();
        json.insert("type".into(), Json::String(self.name(&object.class)));
        if !object.args.is_empty() {
            json.insert("args".into(), Json::Array(self.items(&object.args, depth)));
        }
        if let Some(state) = &object.state {
            json.insert("state".into(), self.value(state, depth));
        }
        if !object.items.is_empty() {
            json.insert("items".into(), Json::Array(self.items(&object.items, depth)));
        }
        if !object.entries.is_empty() {
            let entries = object.entries.iter().map(|(key, value)| (key, value));
            json.insert("entries".into(), Json::Array(self.entries(entries, depth)));
        }
        Json::Object(json)
    }

    fn tensor(&mut self, tensor: &Tensor) -> Json {
        let dtype = tensor.dtype();
        let mut json = Map::new();
        json.insert("type".into(), json!("tensor"));
        json.insert("dtype".into(), json!(dtype.name()));
        json.insert("shape".into(), json!(&**tensor.shape()));
        if let Some(bytes) = tensor.to_vec() {
            json.insert("values".into(), self.elements(dtype, &bytes));
        }
        Json::Object(json)
    }

    fn numpy(&mut self, found: &numpy::Numpy) -> Json {
        let mut json = Map::new();
        match found {
            numpy::Numpy::Scalar { kind, value } => {
                json.insert("type".into(), Json::String(format!("numpy.{kind}")));
                let value = value.as_ref().and_then(|(dtype, bytes)| decode(*dtype, bytes));
                if let Some(value) = value {
                    json.insert("value".into(), element_json(&value));
                }
            }
            numpy::Numpy::Array { kind, shape, fortran, data } => {
                json.insert("type".into(), json!("numpy.ndarray"));
                json.insert("dtype".into(), json!(kind));
                json.insert("shape".into(), json!(shape));
                if *fortran {
                    json.insert("order".into(), json!("F"));
                }
                if let Some((dtype, bytes)) = data {
                    json.insert("values".into(), self.elements(*dtype, bytes));
                }
            }
        }
        Json::Object(json)
    }

    /// Encodes elements in memory order, as a flat list.
    fn elements(&mut self, dtype: DType, bytes: &[u8]) -> Json {
        let total = bytes.len() / dtype.size();
        let shown = total.min(self.left);
        self.left -= shown;
        let elements = bytes.chunks_exact(dtype.size()).take(shown);
        let mut all: Vec<_> = elements
            .filter_map(|bytes| decode(dtype, bytes))
            .map(|value| element_json(&value))
            .collect();
        if shown < total {
            all.push(json!({ "type": "truncated", "left_out": total - shown }));
        }
        Json::Array(all)
    }

    fn text(&mut self, text: &Arc<str>) -> Json {
        let Some(len) = self.affords(Held::Text(Arc::clone(text))) else {
            return json!({ "type": "truncated", "kind": "str", "bytes": text.len() });
        };
        if len == text.len() {
            return Json::String(text.to_string());
        }
        let shown = text.get(..len).unwrap_or_default();
        json!({ "type": "truncated", "kind": "str", "value": shown, "bytes": text.len() })
    }

    /// Encodes an integer. A long one counts as many values as it has words.
    fn big_int(&mut self, n: &BigInt) -> Json {
        let bytes = n.to_le_bytes();
        self.left = self.left.saturating_sub(bytes.len() / 8);
        if self.affords(Held::Bytes(bytes.clone())) != Some(bytes.len()) {
            return json!({ "type": "truncated", "kind": "int", "bytes": bytes.len() });
        }
        json!({ "type": "int", "value": n.to_string() })
    }

    fn name(&mut self, global: &Global) -> String {
        let [module, name] = [&global.module, &global.name].map(|part| {
            let len = self.affords(Held::Text(Arc::clone(part)));
            len.and_then(|len| part.get(..len)).unwrap_or("…")
        });
        format!("{module}.{name}")
    }

    fn bytes(&mut self, kind: &str, bytes: &Bytes) -> Json {
        let Some(len) = self.affords(Held::Bytes(bytes.clone())) else {
            return json!({ "type": "truncated", "kind": kind, "bytes": bytes.len() });
        };
        let shown = bytes.get(..len).unwrap_or(bytes);
        let hex = hex(shown);
        let mut json = json!({ "type": kind, "hex": hex });
        if let (true, Some(json)) = (shown.len() < bytes.len(), json.as_object_mut()) {
            json.insert("bytes".into(), json!(bytes.len()));
        }
        json
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('?');
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(digit(byte >> 4));
        text.push(digit(byte & 15));
    }
    text
}

fn float(x: f64) -> Json {
    match Number::from_f64(x) {
        Some(number) => Json::Number(number),
        None => json!({ "type": "float", "value": crate::element::float(x) }),
    }
}

/// Encodes one element.
pub(crate) fn element_json(element: &Element) -> Json {
    match element {
        Element::Float(x) => float(*x),
        Element::Int(n) if n.unsigned_abs() <= 1 << 53 => json!(n),
        Element::UInt(n) if *n <= 1 << 53 => json!(n),
        Element::Int(_) | Element::UInt(_) => {
            json!({ "type": "int", "value": element.to_string() })
        }
        Element::Bool(b) => json!(b),
        Element::Complex(re, im) => {
            json!({ "type": "complex", "real": float(*re), "imag": float(*im) })
        }
        Element::Pair(low, high) => json!([float(*low), float(*high)]),
        Element::Bits(..) => json!(element.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::value::{BigInt, Global, Opaque};

    use super::*;

    fn json_of(value: impl Into<Value>) -> Json {
        value_json(&value.into(), &JsonLimits::default())
    }

    #[test]
    fn plain_values_are_plain() {
        let dict = Dict::from([
            ("a", Value::Int(1)),
            ("b", Value::List(vec![Value::None, Value::Bool(true), "x".into(), 1.5.into()])),
            ("c", Value::Dict(Dict::new())),
        ]);
        let expected = json!({ "a": 1, "b": [null, true, "x", 1.5], "c": {} });
        assert_eq!(json_of(dict), expected);
        assert_eq!(json_of(1.0).to_string(), "1.0");
    }

    #[test]
    fn what_json_lacks_is_tagged() {
        assert_eq!(json_of(f64::NAN), json!({ "type": "float", "value": "nan" }));
        assert_eq!(json_of(f64::NEG_INFINITY), json!({ "type": "float", "value": "-inf" }));
        assert_eq!(json_of(1_i64 << 53), json!(9_007_199_254_740_992_i64));
        assert_eq!(json_of((1_i64 << 53) + 1)["value"], json!("9007199254740993"));
        let big = Value::BigInt(BigInt::from_le_bytes(
            vec![0; 9].into_iter().chain([1]).collect::<Vec<u8>>(),
        ));
        assert_eq!(json_of(big)["value"], json!("4722366482869645213696"));
        let tuple = Value::Tuple(vec![1_i32.into(), Bytes::from_static(b"\x00a").into()]);
        assert_eq!(
            json_of(tuple),
            json!({ "type": "tuple", "items": [1, { "type": "bytes", "hex": "0061" }] })
        );
        let by_int = Dict::from([(1_i64, "x")]);
        assert_eq!(json_of(by_int), json!({ "type": "dict", "entries": [[1, "x"]] }));
        let pretender = Dict::from([("type", "int"), ("value", "5")]);
        assert_eq!(json_of(pretender)["type"], json!("dict"));
        let tensor = Tensor::replicated(DType::Int16, [2], vec![1, 0, 0xff, 0xff]).unwrap();
        assert_eq!(
            json_of(tensor),
            json!({ "type": "tensor", "dtype": "int16", "shape": [2], "values": [1, -1] })
        );
    }

    #[test]
    fn objects_show_their_class_and_parts() {
        let mut object = Object::new(Global::new("argparse", "Namespace"), vec![]);
        object.state = Some(Dict::from([("lr", 0.1)]).into());
        let opaque = Opaque { encoded: Bytes::new(), view: object.into() };
        assert_eq!(
            json_of(Value::Opaque(Arc::new(opaque))),
            json!({ "type": "argparse.Namespace", "state": { "lr": 0.1 } })
        );
    }

    #[test]
    fn what_shares_memory_is_not_repeated_without_end() {
        // A sixteenth of what may be shown by default, and of each value.
        let (long, shared_min) = (1 << 16, ValueEncoder::SHARED_MIN / 16);
        let limits = JsonLimits::default();
        let encoder = || ValueEncoder { again_left: shared_min, ..ValueEncoder::new(&limits) };
        let text: Arc<str> = "x".repeat(long).into();
        let bytes = Bytes::from(vec![7; long]);
        let number = Value::BigInt(BigInt::from_le_bytes(vec![7; long]));
        let class = Global::new(Arc::clone(&text), Arc::clone(&text));
        let object = Value::from(Object::new(class.clone(), vec![]));
        let keyed = Value::from(Dict::from([(Arc::clone(&text), 1)]));
        for shared in [text.into(), bytes.into(), number, Value::Global(class), object, keyed] {
            let limit = 4 * (shared_min + 2 * long);
            let json = encoder().json(&Value::List(vec![shared.clone(); 9_000]));
            assert!(json.to_string().len() < limit, "{} in a list", shared.kind());
            // The same as objects of their own.
            let mut encoder = encoder();
            let all: usize = (0..9_000).map(|_| encoder.json(&shared).to_string().len()).sum();
            assert!(all < limit, "{} alone: {all}", shared.kind());
        }
        // What is not shared is shown, however much of it there is.
        let apart: Vec<Value> = (0..40).map(|n| format!("{n}").repeat(long / 2).into()).collect();
        assert!(encoder().json(&Value::List(apart)).to_string().len() > 25 * long);
    }

    #[test]
    fn deep_and_long_values_are_cut() {
        let mut deep = Value::List(vec![]);
        for _ in 0..1000 {
            deep = Value::List(vec![deep]);
        }
        let text = json_of(deep).to_string();
        assert!(text.contains("truncated") && text.len() < 300, "{text}");
        let limits = JsonLimits { values: 4, ..JsonLimits::default() };
        let long = Value::List(vec![Value::Int(0); 10]);
        let json = value_json(&long, &limits);
        assert_eq!(json, json!([0, 0, 0, { "type": "truncated", "left_out": 7 }]));
        let limits = JsonLimits { bytes: 3, ..JsonLimits::default() };
        let json = value_json(&Value::from("añb"), &limits);
        assert_eq!(json["value"], json!("añ"));
    }
}
