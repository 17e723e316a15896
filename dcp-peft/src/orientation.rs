//! The order of the axes of stored matrices.
//!
//! `nn.Linear` stores outputs × inputs, the `Conv1D` of GPT-2 inputs × outputs. The configuration has one flag for
//! all modules (`fan_in_fan_out`), and PEFT corrects it for each by its class: it warns, and goes on. So the flag
//! decides nothing where the tensors do. The shapes of the adapter's two matrices decide for every matrix that is
//! not square. For a square one the biases of its layer do: a bias has the length of the outputs, so a matrix that
//! is not square shows beside its bias how its layer stores matrices.

use std::collections::HashMap;

use dcp_core::CheckpointMetadata;

/// The orders of axes that the biases of a layer show.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    outputs_first: bool,
    inputs_first: bool,
}

/// The orders of axes of a base, by layer.
#[derive(Debug)]
pub(crate) struct Orientations(HashMap<String, Shown>);

impl Orientations {
    pub(crate) fn of(base: &CheckpointMetadata) -> Self {
        let mut found: HashMap<String, Shown> = HashMap::new();
        for (fqn, entry) in base.iter() {
            let Some(module) = fqn.strip_suffix(".weight") else { continue };
            let Some(layer) = layer_of(module) else { continue };
            let bias = base.get(&format!("{module}.bias")).and_then(|entry| entry.as_tensor());
            let (Some(weight), Some(bias)) = (entry.as_tensor(), bias) else { continue };
            let ([rows, columns], [outputs]) = (weight.shape.as_ref(), bias.shape.as_ref()) else {
                continue;
            };
            if rows != columns {
                let shown = found.entry(layer.to_owned()).or_default();
                shown.outputs_first |= rows == outputs;
                shown.inputs_first |= columns == outputs;
            }
        }
        Self(found)
    }

    /// Whether the matrix of `module`, which has `rows` × `columns`, is stored as inputs × outputs. `flag` is the
    /// setting of the adapter. `None` where nothing decides.
    pub(crate) fn is_input_first(
        &self,
        module: &str,
        [rows, columns]: [u64; 2],
        [outputs, inputs]: [u64; 2],
        flag: bool,
    ) -> Option<bool> {
        let fits = [(rows, columns) == (outputs, inputs), (rows, columns) == (inputs, outputs)];
        match fits {
            [true, false] => return Some(false),
            [false, true] => return Some(true),
            // Of another model, which the comparison of shapes says.
            [false, false] => return Some(flag),
            [true, true] => {}
        }
        let shown = layer_of(module).and_then(|layer| self.0.get(layer)).copied();
        match shown.unwrap_or_default() {
            Shown { outputs_first: true, inputs_first: false } => Some(false),
            Shown { outputs_first: false, inputs_first: true } => Some(true),
            // Few models store inputs first, and PEFT sets the flag for those by itself.
            _ => (!flag).then_some(false),
        }
    }
}

/// The name of the layer that a module is in: up to the last number.
fn layer_of(module: &str) -> Option<&str> {
    let mut end = 0;
    let mut layer = None;
    for part in module.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            layer = module.get(..end);
        }
        end += 1;
    }
    layer
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dcp_core::DType;
    use dcp_core::metadata::{Entry, TensorEntry};

    use super::*;

    fn base(tensors: &[(&str, &[u64])]) -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for (fqn, shape) in tensors {
            let tensor = TensorEntry::new(DType::Float32, shape.to_vec());
            metadata.insert(Arc::from(*fqn), Entry::Tensor(tensor));
        }
        metadata
    }

    #[test]
    fn shapes_decide_before_the_flag() {
        let none = Orientations::of(&CheckpointMetadata::new());
        for flag in [false, true] {
            assert_eq!(none.is_input_first("h.0.a", [4, 12], [12, 4], flag), Some(true));
            assert_eq!(none.is_input_first("h.0.a", [12, 4], [12, 4], flag), Some(false));
        }
    }

    #[test]
    fn of_a_square_matrix_the_biases_of_its_layer_decide() {
        let gpt2 = base(&[
            ("h.0.attn.c_attn.weight", &[4, 12]),
            ("h.0.attn.c_attn.bias", &[12]),
            ("h.0.ln_1.weight", &[4]),
            ("h.0.ln_1.bias", &[4]),
        ]);
        let qwen = base(&[
            ("layers.0.k_proj.weight", &[2, 4]),
            ("layers.0.k_proj.bias", &[2]),
            ("layers.1.q_proj.weight", &[4, 4]),
            ("layers.1.q_proj.bias", &[4]),
        ]);
        for flag in [false, true] {
            let (gpt2, qwen) = (Orientations::of(&gpt2), Orientations::of(&qwen));
            let square = ([4, 4], [4, 4]);
            let of_gpt2 = gpt2.is_input_first("h.0.attn.c_proj", square.0, square.1, flag);
            assert_eq!(of_gpt2, Some(true));
            let of_qwen = qwen.is_input_first("layers.0.q_proj", square.0, square.1, flag);
            assert_eq!(of_qwen, Some(false));
            let unknown = qwen.is_input_first("layers.1.q_proj", square.0, square.1, flag);
            assert_eq!(unknown, (!flag).then_some(false));
        }
    }
}
