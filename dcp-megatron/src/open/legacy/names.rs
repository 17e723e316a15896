//! Translates parameter names of modules to those of distributed checkpoints.

/// A module's name for a parameter or an extra state, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalName {
    /// The stack of layers that it is in, such as `decoder.layers`, and the layer's number among
    /// those of the rank.
    pub(super) layer: Option<(String, u64)>,
    /// The number of the expert among those of the rank.
    pub(super) expert: Option<u64>,
    /// The name in the layer, or the whole name outside of one, without the number of the expert.
    pub(super) name: String,
}

impl LocalName {
    pub(super) fn parse(key: &str) -> Self {
        let (layer, rest) = match in_layers(key) {
            Some((stack, number, rest)) => (Some((stack.to_owned(), number)), rest),
            None => (None, key),
        };
        let (expert, name) = of_expert(rest);
        Self { layer, expert, name }
    }

    /// Whether it is of experts and does not say of which one, such as `experts.weight1` of
    /// `GroupedMLP`, which is a matrix of all experts that the rank has. Shared experts are no such
    /// experts: all ranks have them.
    pub(super) fn is_of_all_experts(&self) -> bool {
        self.expert.is_none() && self.name.split('.').any(|part| part == "experts")
    }

    /// The name in distributed checkpoints, where a norm in front of a layer is named as part of
    /// it. Modules of the local implementation (`LayerSpec::Local`) have them on their own.
    pub(super) fn with_fused_norms(mut self, local: bool) -> Self {
        let fused = [
            ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
            ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
        ];
        if local && self.layer.is_some() {
            for (norm, fused) in fused {
                if let Some(which) = self.name.strip_prefix(norm) {
                    self.name = format!("{fused}{which}");
                    break;
                }
            }
        }
        self
    }
}

/// The stack, the number and the rest of the name of something in a layer.
fn in_layers(key: &str) -> Option<(&str, u64, &str)> {
    const LAYERS: &str = "layers.";
    let mut from = 0;
    loop {
        let start = from + key.get(from..)?.find(LAYERS)?;
        let end = start + LAYERS.len();
        let begins = start == 0 || key.get(..start)?.ends_with('.');
        let numbered = key.get(end..)?.split_once('.').filter(|_| begins);
        if let Some((number, rest)) = numbered.and_then(|(n, rest)| Some((n.parse().ok()?, rest))) {
            return Some((key.get(..end - 1)?, number, rest));
        }
        from = end;
    }
}

/// Returns the expert that a name is of, and the name that all experts share: of one module for
/// each, or of one for all with a weight for each.
fn of_expert(name: &str) -> (Option<u64>, String) {
    let whole = || (None, name.to_owned());
    let shared = |before: &str, rest: &str| format!("{before}experts.experts.{rest}");
    if let Some((before, rest)) = name.split_once("experts.local_experts.") {
        let Some((number, rest)) = rest.split_once('.') else { return whole() };
        let Ok(number) = number.parse() else { return whole() };
        return (Some(number), shared(before, rest));
    }
    let Some((before, rest)) = name.split_once("experts.linear_fc") else { return whole() };
    if before.ends_with("shared_") {
        return whole();
    }
    for kind in ["weight", "bias"] {
        let numbered = rest.split_once(&format!(".{kind}"));
        if let Some((matrix, digits)) = numbered
            && let Ok(number) = digits.parse()
        {
            return (Some(number), shared(before, &format!("linear_fc{matrix}.{kind}")));
        }
    }
    whole()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(key: &str) -> (Option<(String, u64)>, Option<u64>, String) {
        let LocalName { layer, expert, name } = LocalName::parse(key);
        (layer, expert, name)
    }

    #[test]
    fn layers_and_experts_are_found() {
        let decoder = |n| Some(("decoder.layers".to_owned(), n));
        assert_eq!(
            parse("decoder.layers.3.mlp.linear_fc1.weight"),
            (decoder(3), None, "mlp.linear_fc1.weight".to_owned())
        );
        assert_eq!(
            parse("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"),
            (decoder(0), Some(2), "mlp.experts.experts.linear_fc1.weight".to_owned())
        );
        assert_eq!(
            parse("decoder.layers.0.mlp.experts.linear_fc2.weight11"),
            (decoder(0), Some(11), "mlp.experts.experts.linear_fc2.weight".to_owned())
        );
        for whole in [
            "mlp.shared_experts.linear_fc1.weight",
            "mlp.experts.linear_fc1._extra_state",
            "mlp.experts.weight1",
        ] {
            let key = format!("decoder.layers.0.{whole}");
            assert_eq!(parse(&key), (decoder(0), None, whole.to_owned()));
            let of_all = LocalName::parse(&key).is_of_all_experts();
            assert_eq!(of_all, !whole.contains("shared"), "{key}");
        }
        let name = "embedding.word_embeddings.weight";
        assert_eq!(parse(name), (None, None, name.to_owned()));
        assert_eq!(parse("mylayers.3.weight").0, None);
        for one in ["experts.local_experts.0.linear_fc1.weight", "experts.linear_fc1.weight3"] {
            assert!(!LocalName::parse(&format!("mlp.{one}")).is_of_all_experts(), "{one}");
        }
    }

    #[test]
    fn norms_are_named_as_part_of_what_they_are_in_front_of() {
        let name = |key, local| LocalName::parse(key).with_fused_norms(local).name;
        let key = "decoder.layers.0.input_layernorm.weight";
        assert_eq!(name(key, true), "self_attention.linear_qkv.layer_norm_weight");
        assert_eq!(name(key, false), "input_layernorm.weight");
        let key = "decoder.layers.0.pre_mlp_layernorm.bias";
        assert_eq!(name(key, true), "mlp.linear_fc1.layer_norm_bias");
        assert_eq!(name("decoder.final_layernorm.weight", true), "decoder.final_layernorm.weight");
    }
}
