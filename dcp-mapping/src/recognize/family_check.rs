//! Checks that a Megatron checkpoint matches the family of a mapping.

use crate::error::MappingError;
use crate::facts::Facts;
use crate::mapping::Mapping;
use crate::recognize::contradictions;
use crate::recognize::shapes::Shapes;

/// Refuses weights that transformers has no way to load in the family, sets the facts that the
/// tensors decide, and says what else is not as it is in models of the family.
pub(crate) fn fit(
    mapping: &Mapping,
    shapes: &Shapes,
    facts: &mut Facts,
) -> Result<Vec<String>, MappingError> {
    let other =
        |why: String| MappingError::OtherFamily { family: mapping.family.name.clone(), why };
    // In transformers, one field is about the biases of all projections of attention.
    if mapping.config.fields.get("attention_bias").is_some_and(|arg| arg == "add_qkv_bias") {
        let has = |name: &str| shapes.has(&format!("decoder.layers.self_attention.{name}"));
        match (has("linear_qkv.bias"), has("linear_proj.bias")) {
            (true, false) => {
                return Err(other("there is a linear_qkv.bias but no linear_proj.bias".to_owned()));
            }
            (false, true) => {
                return Err(other("there is a linear_proj.bias but no linear_qkv.bias".to_owned()));
            }
            (both, _) => facts.set("add_qkv_bias", both),
        }
        if mapping.config.fields.values().any(|arg| arg == "add_bias_linear") {
            facts.set("add_bias_linear", shapes.has("decoder.layers.mlp.linear_fc1.bias"));
        }
    }
    if mapping.config.args.get("group_query_attention") == Some(&false.into())
        && let Some(heads) = facts.get_u64("num_attention_heads")?
    {
        let groups = facts.query_groups(heads)?;
        if groups != heads {
            return Err(other(format!("{heads} heads are in {groups} query groups")));
        }
    }
    // Where transformers has no field for the width of a head, it works it out.
    let says = |arg: &str| mapping.config.fields.values().any(|known| known == arg);
    if says("num_attention_heads")
        && !says("kv_channels")
        && !says("kv_lora_rank")
        && let Some(heads) = facts.get_u64("num_attention_heads")?
        && let Some(head) = facts.get_u64("kv_channels")?
        && let Some(hidden) = facts.get_u64("hidden_size")?
        && head.checked_mul(heads) != Some(hidden)
    {
        let why =
            format!("{heads} heads of {head} channels are not as wide as the model, {hidden}");
        return Err(other(why));
    }
    let note = |what| format!("unlike models of the family {:?}, {what}", mapping.family.name);
    Ok(contradictions(mapping, shapes).into_iter().map(note).collect())
}
