//! What Lightning notes of the checkpoints of a run, in the state of the trainer with each of them.

use std::collections::BTreeMap;

use dcp_core::{DType, Value};
use dcp_formats::torch_object::decode_object;

use super::sidecar::names_folder;

/// The state of the trainer of Lightning and Fabric (2.6), in the folder of a sharded checkpoint.
pub(super) const LIGHTNING_STATE: &str = "meta.pt";
/// The longest one that is read, in bytes: those of several checkpoints are read at once.
pub(super) const LIGHTNING_STATE_BYTES_MAX: u64 = 16 << 20;

/// What the callbacks `ModelCheckpoint` had noted when a checkpoint was saved.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LightningState {
    /// The monitored metrics of this checkpoint, as far as it was among the best.
    pub(super) metrics: BTreeMap<String, f64>,
    /// The paths of the best checkpoints, one of each callback.
    pub(super) best: Vec<String>,
}

impl LightningState {
    /// Parses the file of the checkpoint in the folder `name`; `None` for a file that cannot be parsed.
    ///
    /// A callback is recognized by `best_k_models`, not by its key, which has its arguments in it.
    pub(super) fn parse(bytes: Vec<u8>, name: &str) -> Option<Self> {
        let state = decode_object(&bytes.into()).ok()?;
        let mut found = Self::default();
        let Some(Value::Dict(callbacks)) = field(&state, "callbacks") else { return Some(found) };
        for (_, callback) in callbacks.iter() {
            let Some(Value::Dict(models)) = field(callback, "best_k_models") else { continue };
            let own =
                models.iter().find(|(path, _)| text(path).is_some_and(|p| names_folder(p, name)));
            let score = own.and_then(|(_, score)| number(score)).filter(|score| score.is_finite());
            if let (Some(monitor), Some(score)) = (field(callback, "monitor").and_then(text), score)
            {
                found.metrics.insert(monitor.to_owned(), score);
            }
            let best = field(callback, "best_model_path").and_then(text);
            found.best.extend(best.filter(|path| !path.is_empty()).map(str::to_owned));
        }
        Some(found)
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
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        #[allow(clippy::cast_precision_loss, reason = "a metric is compared, not added up")]
        Value::Int(number) => Some(*number as f64),
        Value::Tensor(tensor) if tensor.dtype() == DType::Float64 => {
            tensor.to_vec_of::<f64>().ok()?.first().copied()
        }
        Value::Tensor(tensor) => tensor.to_vec_of::<f32>().ok()?.first().copied().map(f64::from),
        _ => None,
    }
}
