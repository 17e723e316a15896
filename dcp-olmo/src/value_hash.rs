//! Hashes of values, so that equal settings are found without comparing each with each.

use std::hash::{DefaultHasher, Hash};

use dcp_core::Value;

/// A hash that is equal for values that are [the same](Value::same).
pub(crate) fn hash(value: &Value, hasher: &mut DefaultHasher) {
    value.kind().hash(hasher);
    let all = |values: &[Value], hasher: &mut DefaultHasher| {
        values.len().hash(hasher);
        values.iter().for_each(|value| hash(value, hasher));
    };
    match value {
        Value::Bool(b) => b.hash(hasher),
        Value::Int(n) => n.hash(hasher),
        Value::Float(x) => x.to_bits().hash(hasher),
        Value::Complex(x, y) => (x.to_bits(), y.to_bits()).hash(hasher),
        Value::Str(text) => text.hash(hasher),
        Value::Bytes(bytes) | Value::ByteArray(bytes) => bytes.hash(hasher),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) | Value::FrozenSet(items) => {
            all(items, hasher);
        }
        Value::Dict(dict) => {
            dict.len().hash(hasher);
            for (key, value) in dict.iter() {
                hash(key, hasher);
                hash(value, hasher);
            }
        }
        Value::Tensor(tensor) => {
            tensor.dtype().name().hash(hasher);
            tensor.shape().hash(hasher);
            // Without its elements it is only compared more often.
            tensor.to_vec().unwrap_or_default().hash(hasher);
        }
        Value::Global(global) => global.hash(hasher),
        Value::Object(object) => {
            object.class.hash(hasher);
            all(&object.args, hasher);
            all(&object.items, hasher);
            object.state.iter().for_each(|state| hash(state, hasher));
            for (key, value) in &object.entries {
                hash(key, hasher);
                hash(value, hasher);
            }
        }
        Value::Opaque(opaque) => opaque.encoded.hash(hasher),
        Value::BigInt(n) => n.hash(hasher),
        _ => {}
    }
}
