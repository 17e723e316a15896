//! Finds the tensors whose values a cast of weights would make wrong.

use std::collections::{HashMap, HashSet};

use dcp_core::DType;

/// The names of the state of a packed weight `X`, as in `X.absmax`: bitsandbytes stores packed bytes
/// in `X`, whatever its dtype.
const PACKED_STATE: &[&str] = &["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
const PACKED_STATE_START: &str = "quant_state";
/// The packed weight of HQQ, whose bytes may be stored as floats.
const HQQ_WEIGHT: &str = "W_q";
/// The names of code books that AQLM and VPTQ keep next to codes, and that may be larger than these.
const CODE_BOOKS: &[&str] = &["codebooks", "centroids", "res_centroids"];
/// The endings of names of scales, in a checkpoint with packed weights.
const SCALE_ENDINGS: &[&str] = &["_scale", "_scale_inv", "_scale_2", "_scales", "_zero_point"];
/// Names of scales that are whole names.
const SCALES: &[&str] = &["scale", "scales", "SCB"];
/// Words in the names of the bias that balances the experts of a router in DeepSeek, torchtitan, LFM2,
/// AFMoE, OLMo, Ernie and Megatron-Core: each name says whose bias it is, unlike that of a layer.
const BALANCING: &[&str] = &["expert", "score", "correction", "balanc", "routing"];

/// The tensors of a checkpoint that keep their dtype when weights are cast: what [`is_exact`] names,
/// packed weights, and the scales, zero points and code books next to them, of any scheme. They are
/// found by the tensors around them, not by the name of a scheme.
///
/// ```
/// use dcp_cast::ExactTensors;
/// use dcp_core::DType;
///
/// let tensors = [
///     ("q.weight", DType::Float8E4M3Fn, &[64, 64][..]),
///     ("q.weight_scale", DType::Float32, &[64, 1]),
///     ("q.bias", DType::Float32, &[64]),
/// ];
/// let exact = ExactTensors::of(tensors);
/// assert!(exact.contains("q.weight_scale") && !exact.contains("q.bias"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct ExactTensors {
    names: HashSet<String>,
    /// The tensors in modules that have scales by name.
    scaled: HashSet<String>,
    /// The first tensor that has scales of packed weights.
    scales: Option<String>,
}

impl ExactTensors {
    /// Finds them among tensors of these names, dtypes and shapes.
    #[must_use]
    pub fn of<'a>(tensors: impl IntoIterator<Item = (&'a str, DType, &'a [u64])>) -> Self {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let mut packed: HashSet<&str> = HashSet::new();
        // The largest packed weight of each module.
        let mut modules: HashMap<&str, u64> = HashMap::new();
        for (fqn, dtype, shape) in tensors.iter().copied() {
            let (module, name) = divided(fqn);
            if is_packed(name, dtype, shape) || name == HQQ_WEIGHT {
                packed.insert(fqn);
                let largest = modules.entry(module).or_default();
                *largest = (*largest).max(count(shape));
            }
            if PACKED_STATE.contains(&name) || name.starts_with(PACKED_STATE_START) {
                packed.insert(module);
                modules.entry(divided(module).0).or_default();
            }
        }
        if packed.is_empty() {
            return Self::default();
        }
        let exact = tensors.into_iter().filter(|(fqn, _, shape)| {
            let (module, name) = divided(fqn);
            let smaller = |module| modules.get(module).is_some_and(|most| count(shape) < *most);
            // HQQ keeps scales in a dict next to the weight.
            let of_dict = divided(module).1 == "meta" && modules.contains_key(divided(module).0);
            packed.contains(fqn)
                || packed.contains(module)
                || packed.contains(divided(module).0)
                || of_dict
                || CODE_BOOKS.contains(&name) && modules.contains_key(module)
                || owner_of_code_book(module).is_some_and(|owner| modules.contains_key(owner))
                || SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending))
                || !name.ends_with("bias") && smaller(module)
        });
        let exact: Vec<(&str, DType)> = exact.map(|(fqn, dtype, _)| (fqn, dtype)).collect();
        let scales = exact.iter().find(|(fqn, dtype)| {
            let module = divided(fqn).0;
            // Numbers of 64 bits and truth values are counts and masks.
            !matches!(dtype, DType::Int64 | DType::UInt64 | DType::Bool)
                && !packed.contains(fqn)
                && (packed.contains(module) || modules.contains_key(module))
        });
        let scales = scales.map(|(fqn, _)| (*fqn).to_owned());
        let names: Vec<&str> = exact.into_iter().map(|(fqn, _)| fqn).collect();
        let mut owners: HashSet<&str> = HashSet::new();
        for (module, name) in names.iter().map(|fqn| divided(fqn)) {
            let is_scale = SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending))
                || SCALES.contains(&name)
                || PACKED_STATE.contains(&name);
            if is_scale {
                let outer = packed.contains(module) || divided(module).1 == "meta";
                owners.extend([module].into_iter().chain(outer.then(|| divided(module).0)));
            }
        }
        let is_scaled = |fqn: &&&str| {
            let module = divided(fqn).0;
            owners.contains(module) || owners.contains(divided(module).0) || owners.contains(**fqn)
        };
        let scaled = names.iter().filter(is_scaled).map(|fqn| (*fqn).to_owned()).collect();
        Self { names: names.into_iter().map(str::to_owned).collect(), scaled, scales }
    }

    /// A tensor with the scales of packed weights, if there is one: what a quantized model has and
    /// other models do not.
    #[must_use]
    pub fn scales(&self) -> Option<&str> {
        self.scales.as_deref()
    }

    /// Whether a tensor is a packed weight with scales or belongs to one, so that its numbers mean nothing
    /// alone. 8-bit floats without scales are numbers.
    #[must_use]
    pub fn is_quantized(&self, fqn: &str) -> bool {
        self.scaled.contains(fqn)
    }

    /// Whether a tensor keeps its dtype.
    #[must_use]
    pub fn contains(&self, fqn: &str) -> bool {
        is_exact(fqn) || self.names.contains(fqn)
    }
}

/// The module whose code book this module is.
fn owner_of_code_book(module: &str) -> Option<&str> {
    let (owner, name) = divided(module);
    CODE_BOOKS.contains(&name).then_some(owner)
}

/// The name of a module, and that of its parameter.
fn divided(fqn: &str) -> (&str, &str) {
    fqn.rsplit_once('.').unwrap_or(("", fqn))
}

fn count(shape: &[u64]) -> u64 {
    shape.iter().fold(1, |all, len| all.saturating_mul(*len))
}

/// Whether a tensor has several axes of bytes or of packed words, as weights have and counters do not.
fn is_packed(name: &str, dtype: DType, shape: &[u64]) -> bool {
    let packs = match dtype {
        DType::Int8
        | DType::UInt8
        | DType::Int16
        | DType::UInt16
        | DType::Int32
        | DType::UInt32 => shape.len() > 1,
        DType::Float8E4M3Fn
        | DType::Float8E5M2
        | DType::Float8E4M3FnUz
        | DType::Float8E5M2FnUz
        | DType::Float4E2M1FnX2 => true,
        _ => false,
    };
    // A causal mask is bytes too.
    packs && name != "bias" && !name.contains("mask")
}

/// Whether a tensor of that name keeps its dtype when weights are cast, whatever is next to it: scales
/// of block-scaled weights, optimizer step counts, and the expert biases of a router, which
/// transformers and Megatron-Core keep in float32.
#[must_use]
pub fn is_exact(fqn: &str) -> bool {
    let name = divided(fqn).1;
    let balances = name.ends_with("_bias") && BALANCING.iter().any(|word| name.contains(word));
    fqn.ends_with("_scale_inv") || name == "step" || balances
}

#[cfg(test)]
mod tests {
    use super::*;

    const F8: DType = DType::Float8E4M3Fn;
    const F32: DType = DType::Float32;
    const U8: DType = DType::UInt8;
    const I8: DType = DType::Int8;

    type Tensor = (&'static str, DType, &'static [u64]);

    /// Schemes, what of each keeps its dtype and what does not.
    const SCHEMES: &[(&str, &[Tensor], &[Tensor])] = &[
        (
            "compressed-tensors, fp8 per channel",
            &[
                ("l.q.weight", F8, &[8, 8]),
                ("l.q.weight_scale", F32, &[8, 1]),
                ("l.q.input_scale", F32, &[]),
                ("l.k_scale", F32, &[1]),
                ("l.v_scale", F32, &[1]),
            ],
            &[("l.q.bias", F32, &[8]), ("l.norm.weight", F32, &[8])],
        ),
        (
            "NVFP4",
            &[
                ("q.weight", U8, &[8, 4]),
                ("q.weight_scale", F8, &[8, 1]),
                ("q.weight_scale_2", F32, &[]),
                ("q.input_global_scale", F32, &[1]),
                ("q.weight_global_scale", F32, &[1]),
            ],
            &[("q.bias", F32, &[8]), ("lm_head.weight", F32, &[8, 8])],
        ),
        (
            "bitsandbytes, 4 bits",
            &[
                ("q.weight", U8, &[32, 1]),
                ("q.weight.absmax", F32, &[32]),
                ("q.weight.quant_map", F32, &[16]),
                ("q.weight.nested_absmax", F32, &[1]),
                ("q.weight.quant_state.bitsandbytes__nf4", U8, &[80]),
            ],
            &[("q.bias", F32, &[8]), ("q.lora_A.default.weight", F32, &[4, 8])],
        ),
        (
            "bitsandbytes, stored as bfloat16",
            &[
                ("q.weight", DType::BFloat16, &[16, 1]),
                ("q.weight.absmax", F32, &[8]),
                ("q.weight.quant_map", F32, &[16]),
            ],
            &[("k.weight", DType::BFloat16, &[8, 8])],
        ),
        (
            "bitsandbytes, 8 bits",
            &[("q.weight", I8, &[8, 8]), ("q.SCB", F32, &[8])],
            &[("q.bias", F32, &[8])],
        ),
        (
            "GPTQ",
            &[
                ("q.qweight", DType::Int32, &[4, 8]),
                ("q.qzeros", DType::Int32, &[1, 2]),
                ("q.scales", DType::Float16, &[1, 8]),
            ],
            &[("q.bias", DType::Float16, &[8])],
        ),
        (
            "quanto",
            &[
                ("q.weight._data", I8, &[8, 8]),
                ("q.weight._scale", F32, &[8, 1]),
                ("q.input_scale", F32, &[]),
                ("q.output_scale", F32, &[]),
            ],
            &[("q.bias", F32, &[8])],
        ),
        (
            "HQQ",
            &[
                ("q.W_q", DType::BFloat16, &[16, 8]),
                ("q.scale", F32, &[16, 1]),
                ("q.zero", F32, &[16, 1]),
                ("k.W_q", U8, &[16, 8]),
                ("k.meta.scale", F32, &[16, 1]),
            ],
            &[("q.bias", F32, &[8])],
        ),
        (
            "compressed-tensors, packed",
            &[
                ("q.weight_packed", DType::Int32, &[8, 1]),
                ("q.weight_scale", DType::BFloat16, &[8, 1]),
                ("q.weight_zero_point", DType::Int32, &[1, 1]),
            ],
            &[("q.bias", DType::BFloat16, &[8])],
        ),
        (
            "AQLM",
            &[
                ("q.codes", DType::Int16, &[8, 8, 1]),
                ("q.codebooks", DType::Float16, &[2, 16, 1, 8]),
                ("q.scales", DType::Float16, &[8, 1, 1, 1]),
            ],
            &[("q.bias", DType::Float16, &[8]), ("norm.weight", DType::Float16, &[8])],
        ),
        (
            "VPTQ",
            &[
                ("q.indices", DType::UInt16, &[1, 8, 8]),
                ("q.centroids.weight", DType::Float16, &[1, 64]),
                ("q.weight_scale", DType::Float16, &[8]),
            ],
            &[("q.bias", DType::Float16, &[8])],
        ),
        (
            "no packed weight",
            &[],
            &[
                ("logit_scale", F32, &[]),
                ("h.attn.masked_bias", F32, &[]),
                ("h.attn.scale", F32, &[4]),
                ("bn.running_mean", F32, &[8]),
            ],
        ),
    ];

    #[test]
    fn scales_of_every_scheme_keep_their_dtype() {
        let mask: Tensor = ("h.attn.bias", U8, &[1, 1, 8, 8]);
        for (scheme, exact, cast) in SCHEMES {
            let all = exact.iter().chain(*cast).chain([&mask]);
            let found = ExactTensors::of(all.map(|(fqn, dtype, shape)| (*fqn, *dtype, *shape)));
            for (fqn, ..) in *exact {
                assert!(found.contains(fqn), "{scheme}: {fqn}");
            }
            for (fqn, ..) in *cast {
                assert!(!found.contains(fqn), "{scheme}: {fqn}");
            }
            assert_eq!(found.scales().is_some(), !exact.is_empty(), "{scheme}");
            for (fqn, ..) in exact.iter().chain(*cast) {
                let is_of_it = exact.iter().any(|(name, ..)| name == fqn);
                assert_eq!(found.is_quantized(fqn), is_of_it, "{scheme}: {fqn}");
            }
        }
    }

    #[test]
    fn counts_beside_integers_are_no_scales() {
        let found = |dtype| {
            let tensors = [("l.w", DType::UInt32, &[8, 8][..]), ("l.n", dtype, &[8])];
            ExactTensors::of(tensors).scales().map(str::to_owned)
        };
        assert_eq!(found(F32).as_deref(), Some("l.n"));
        assert_eq!(
            (found(DType::UInt64), found(DType::Int64), found(DType::Bool)),
            Default::default()
        );
    }

    #[test]
    fn floats_of_8_bits_without_scales_are_numbers() {
        let tensors = [("w", F8, &[8, 8][..]), ("b", F32, &[8]), ("l.w", F8, &[4, 4])];
        let found = ExactTensors::of(tensors);
        assert!(found.contains("w"));
        assert!(tensors.iter().all(|(fqn, ..)| !found.is_quantized(fqn)));
    }

    #[test]
    fn expert_biases_of_every_family_keep_their_dtype() {
        for name in [
            "model.layers.0.mlp.gate.e_score_correction_bias",
            "layers.0.moe.expert_bias",
            "model.layers.0.feed_forward.expert_bias",
            "decoder.layers.0.mlp.router.expert_bias",
            "model.layers.0.mlp.expert_bias",
            "blocks.0.feed_forward_moe.router.score_bias",
            "model.layers.0.mlp.moe_statics.e_score_correction_bias",
        ] {
            assert!(is_exact(name), "{name}");
        }
        for name in [
            "mlp.experts.gate_up_proj_bias",
            "mlp.router.bias",
            "experts.0.bias",
            "attn.relative_position_bias_table",
        ] {
            assert!(!is_exact(name), "{name}");
        }
    }
}
