//! The `_extra_state` objects of Megatron's modules. They are empty without Transformer Engine's
//! mixed precision, but a model does not load where they are missing.

use crate::map::options::LayerSpec;

/// The keys of the extra states that belong to the module of which `tensor` is the weight, one for
/// each cell of its `grid` of layers and experts; none where `tensor` is no such weight.
///
/// Modules of Transformer Engine have them that local ones do not, and more or fewer with its
/// version. One that no model has is not read.
pub(crate) fn extra_states(tensor: &str, grid: &[u64], spec: LayerSpec) -> Vec<String> {
    let Some(module) = tensor.strip_suffix(".weight") else { return Vec::new() };
    let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
    let is_linear = name.starts_with("linear_") || name == "eh_proj";
    let is_fused = spec == LayerSpec::TransformerEngine;
    let mut modules = Vec::new();
    if is_linear || is_fused && name.ends_with("norm") {
        modules.push(module.to_owned());
    }
    if is_fused && name == "linear_proj" {
        modules.push(format!("{parent}.core_attention"));
    }
    let cells = cells(grid);
    let keys = |module: String| {
        cells.iter().map(move |cell| format!("{module}._extra_state/shard_{cell}"))
    };
    modules.into_iter().flat_map(keys).collect()
}

/// The cells of a grid in the form that Megatron's keys have: `0.2_3.4` is that at 0 and 2 of 3
/// times 4.
fn cells(grid: &[u64]) -> Vec<String> {
    if grid.is_empty() {
        return vec!["0_1".to_owned()];
    }
    let places = grid.iter().fold(vec![String::new()], |places, size| {
        let below = |place: &String| {
            let dot = if place.is_empty() { "" } else { "." };
            (0..*size).map(|at| format!("{place}{dot}{at}")).collect::<Vec<_>>()
        };
        places.iter().flat_map(below).collect()
    });
    let sizes: Vec<_> = grid.iter().map(u64::to_string).collect();
    let sizes = sizes.join(".");
    places.into_iter().map(|place| format!("{place}_{sizes}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_megatron() {
        let keys = |tensor, grid: &[u64]| extra_states(tensor, grid, LayerSpec::Local);
        assert_eq!(
            keys("decoder.layers.mlp.linear_fc1.weight", &[2]),
            [
                "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2",
                "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2",
            ]
        );
        let experts = keys("decoder.layers.mlp.experts.experts.linear_fc2.weight", &[2, 3]);
        assert_eq!(experts.len(), 6);
        assert_eq!(
            experts[4],
            "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.1_2.3"
        );
        assert_eq!(
            keys("mtp.layers.0.eh_proj.weight", &[]),
            ["mtp.layers.0.eh_proj._extra_state/shard_0_1"]
        );
    }

    #[test]
    fn modules_without_a_state_have_no_key() {
        for tensor in [
            "embedding.word_embeddings.weight",
            "output_layer.weight",
            "decoder.layers.mlp.router.weight",
            "decoder.layers.self_attention.linear_qkv.bias",
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        ] {
            assert!(
                extra_states(tensor, &[2], LayerSpec::TransformerEngine).is_empty(),
                "{tensor}"
            );
        }
    }

    #[test]
    fn transformer_engine_has_more() {
        let keys = |tensor, spec| extra_states(tensor, &[1], spec);
        let norm = "decoder.layers.self_attention.q_layernorm.weight";
        assert!(keys(norm, LayerSpec::Local).is_empty());
        assert_eq!(keys(norm, LayerSpec::TransformerEngine).len(), 1);
        let proj = "decoder.layers.self_attention.linear_proj.weight";
        assert_eq!(keys(proj, LayerSpec::Local).len(), 1);
        assert_eq!(
            keys(proj, LayerSpec::TransformerEngine)[1],
            "decoder.layers.self_attention.core_attention._extra_state/shard_0_1"
        );
    }
}
