//! The common state of a Megatron checkpoint that dcp makes.

use dcp_core::Value;
use dcp_core::value::{Dict, Global, Object};
use serde_json::Value as Json;

use crate::facts::Facts;

/// A common state with the arguments as an `argparse.Namespace`, as Megatron's
/// `--use-checkpoint-args` reads them, and an iteration of 0.
pub(crate) fn common_state(facts: &Facts) -> Dict {
    let mut args = Dict::new();
    for (name, value) in facts.values() {
        args.insert(name.as_str(), python(value));
    }
    if let Some(dtype) = facts.get("params_dtype").and_then(Json::as_str) {
        let dtype = dtype.strip_prefix("torch.").unwrap_or(dtype);
        args.insert("params_dtype", Value::Global(Global::new("torch", dtype)));
        args.insert("bf16", Value::Bool(dtype == "bfloat16"));
        args.insert("fp16", Value::Bool(dtype == "float16"));
    }
    if let Some(epsilon) = facts.get("layernorm_epsilon") {
        args.insert("norm_epsilon", python(epsilon));
    }
    for (name, value) in
        [("iteration", 0), ("consumed_train_samples", 0), ("consumed_valid_samples", 0)]
    {
        args.insert(name, Value::Int(value));
    }
    let mut namespace = Object::new(Global::new("argparse", "Namespace"), Vec::new());
    namespace.state = Some(Value::Dict(args));
    Dict::from([
        ("args", Value::Object(Box::new(namespace))),
        ("checkpoint_version", Value::Float(3.0)),
        ("iteration", Value::Int(0)),
    ])
}

fn python(value: &Json) -> Value {
    match value {
        Json::Null => Value::None,
        Json::Bool(b) => Value::Bool(*b),
        Json::Number(number) => match number.as_i64() {
            Some(n) => Value::Int(n),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Str(text.as_str().into()),
        Json::Array(items) => Value::List(items.iter().map(python).collect()),
        Json::Object(fields) => {
            Value::Dict(fields.iter().map(|(key, value)| (key.as_str(), python(value))).collect())
        }
    }
}
