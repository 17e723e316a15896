//! The notes of Lightning on the checkpoints of a run, in the state of the trainer with each of them.

use std::collections::BTreeMap;

use dcp_core::{DType, Value};
use dcp_formats::torch_object::decode_object;

use super::notes::Best;
use super::sidecar::names_folder;

/// The state of the trainer of Lightning and Fabric (2.6), in the folder of a sharded checkpoint.
pub(super) const LIGHTNING_STATE: &str = "meta.pt";

/// The notes of the callbacks `ModelCheckpoint` when a checkpoint was saved.
#[derive(Debug, PartialEq)]
pub(super) struct LightningState {
    /// The monitored metrics of this checkpoint, as far as it was among the best.
    pub(super) metrics: BTreeMap<String, f64>,
    /// The paths of the best checkpoints, one of each callback.
    pub(super) best: Best,
    /// The training step.
    pub(super) step: Option<u64>,
}

impl LightningState {
    /// Parses the file of the checkpoint in the folder `name`; `None` for a file that cannot be parsed.
    ///
    /// A callback is recognized by its entries, not by its key, which has its arguments in it. One that
    /// has the name or an entry of a `ModelCheckpoint`, and not the entries that 2.6 saves, makes the
    /// best checkpoint unclear.
    pub(super) fn parse(bytes: Vec<u8>, name: &str) -> Option<Self> {
        let state = decode_object(&bytes.into()).ok()?;
        let step = match field(&state, "global_step") {
            Some(Value::Int(step)) => u64::try_from(*step).ok(),
            _ => None,
        };
        let mut found = Self { metrics: BTreeMap::new(), best: Best::Paths(Vec::new()), step };
        match &state {
            Value::Dict(_) | Value::Opaque(_) => {}
            _ => return Some(found.unclear("holds no dict")),
        }
        let callbacks = match field(&state, "callbacks") {
            Some(Value::Dict(callbacks)) => callbacks,
            // Fabric has none.
            None => return Some(found),
            Some(_) => return Some(found.unclear("has callbacks that are no dict")),
        };
        let mut paths = Vec::new();
        for (key, callback) in callbacks.iter() {
            let path = field(callback, "best_model_path");
            let models = field(callback, "best_k_models");
            let has_name = text(key).is_some_and(|key| key.contains("ModelCheckpoint"));
            if path.is_none() && models.is_none() && !has_name {
                continue;
            }
            let (Some(path), Some(Value::Dict(models))) = (path, models) else {
                return Some(found.unclear("has a ModelCheckpoint of another shape"));
            };
            match path {
                Value::Str(path) if path.is_empty() => {}
                Value::Str(path) => paths.push(path.to_string()),
                Value::None => {}
                _ => return Some(found.unclear("has a best_model_path that is no string")),
            }
            let own =
                models.iter().find(|(path, _)| text(path).is_some_and(|p| names_folder(p, name)));
            let score = own.and_then(|(_, score)| number(score)).filter(|score| score.is_finite());
            if let (Some(monitor), Some(score)) = (field(callback, "monitor").and_then(text), score)
            {
                found.metrics.insert(monitor.to_owned(), score);
            }
        }
        found.best = Best::Paths(paths);
        Some(found)
    }

    fn unclear(self, problem: &str) -> Self {
        Self { best: Best::Unclear(problem.to_owned()), metrics: BTreeMap::new(), ..self }
    }
}

fn field<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Dict(dict) => dict.get(name),
        // A callback shares the tensor of its best score between two entries.
        Value::Opaque(opaque) => field(&opaque.view, name),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Str(text) => Some(text),
        _ => None,
    }
}

/// A score: a tensor of one element, or a number.
#[allow(clippy::cast_precision_loss, reason = "a metric is compared, not added up")]
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        Value::Int(number) => Some(*number as f64),
        Value::Tensor(tensor) => element(tensor.dtype(), &tensor.to_vec()?),
        _ => None,
    }
}

/// The only element of a tensor, as a number.
#[allow(clippy::cast_precision_loss, reason = "a metric is compared, not added up")]
fn element(dtype: DType, bytes: &[u8]) -> Option<f64> {
    macro_rules! of {
        ($number:ty) => {
            <$number>::from_le_bytes(bytes.try_into().ok()?)
        };
    }
    Some(match dtype {
        DType::Float64 => of!(f64),
        DType::Float32 => of!(f32).into(),
        DType::BFloat16 => f32::from_bits(u32::from(of!(u16)) << 16).into(),
        DType::Float16 => float16(of!(u16)),
        DType::Int64 => of!(i64) as f64,
        DType::UInt64 => of!(u64) as f64,
        DType::Int32 => of!(i32).into(),
        DType::UInt32 => of!(u32).into(),
        DType::Int16 => of!(i16).into(),
        DType::UInt16 => of!(u16).into(),
        DType::Int8 => of!(i8).into(),
        DType::UInt8 => of!(u8).into(),
        _ => return None,
    })
}

fn float16(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff) / 1024.0);
    let magnitude = match exponent {
        0 => fraction * 2_f64.powi(-14),
        0x1f if fraction > 0.0 => f64::NAN,
        0x1f => f64::INFINITY,
        exponent => (1.0 + fraction) * 2_f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
#[path = "lightning_tests.rs"]
mod tests;
