//! The order in which Megatron's modules register their parameters, where it is known.
//!
//! A flat buffer holds parameters in the reverse of this order. It decides between parameters of
//! equal size and equal elements, such as layer norms that training has not changed yet.

/// A way in which the modules of a model are put together. The same names are registered in
/// another order by each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Registration {
    /// Whether the layer norms before the projections are parts of them, as with
    /// TransformerEngine, or modules before them, as with Megatron's local layers.
    fused_norms: bool,
    /// Whether all experts' first matrices come before their second ones, or both of one expert
    /// come before those of the next.
    grouped_experts: bool,
}

impl Registration {
    pub(super) const ALL: [Self; 4] = [
        Self { fused_norms: false, grouped_experts: false },
        Self { fused_norms: true, grouped_experts: false },
        Self { fused_norms: false, grouped_experts: true },
        Self { fused_norms: true, grouped_experts: true },
    ];

    pub(super) fn name(self) -> &'static str {
        match (self.fused_norms, self.grouped_experts) {
            (false, false) => "local layers",
            (true, false) => "TransformerEngine layers",
            (false, true) => "local layers with grouped experts",
            (true, true) => "TransformerEngine layers with grouped experts",
        }
    }

    /// The place of a parameter among all, comparable with others'; `None` where it is not known.
    pub(super) fn place(self, at: &ParamPlace<'_>) -> Option<Place> {
        let name = at.name;
        let outside = |section| Some(Place { section, ..Place::default() });
        let Some((layer, module)) = at.layer.zip(at.in_layer()) else {
            return match name {
                "embedding.word_embeddings.weight" => outside(0),
                "embedding.position_embeddings.weight" => outside(1),
                "embedding.tokentype_embeddings.weight" => outside(2),
                "decoder.final_layernorm.weight" | "decoder.final_norm.weight" => outside(4),
                "decoder.final_layernorm.bias" | "decoder.final_norm.bias" => outside(5),
                "output_layer.weight" => outside(6),
                "output_layer.bias" => outside(7),
                _ => None,
            };
        };
        let (order, expert) = match module.strip_prefix("mlp.experts.experts.") {
            Some(rest) => {
                let expert = at.expert?;
                let matrix = match rest {
                    "linear_fc1.weight" => 0,
                    "linear_fc1.bias" => 1,
                    "linear_fc2.weight" => 2,
                    "linear_fc2.bias" => 3,
                    _ => return None,
                };
                let place = match self.grouped_experts {
                    true => (matrix, expert),
                    false => (expert, matrix),
                };
                (EXPERTS, place)
            }
            None => (self.in_layer(module)?, (0, 0)),
        };
        Some(Place { section: 3, layer, order, expert, part: at.part })
    }

    /// The place of a parameter in its layer.
    fn in_layer(self, module: &str) -> Option<u64> {
        // A fused norm is registered with the projection behind it, before its matrix.
        let attention_norm = if self.fused_norms { 30 } else { 10 };
        let mlp_norm = if self.fused_norms { 60 } else { 50 };
        Some(match module {
            "self_attention.linear_qkv.layer_norm_weight" | "input_layernorm.weight" => {
                attention_norm
            }
            "self_attention.linear_qkv.layer_norm_bias" | "input_layernorm.bias" => {
                attention_norm + 1
            }
            "self_attention.linear_proj.weight" => 20,
            "self_attention.linear_proj.bias" => 21,
            "self_attention.linear_qkv.weight" => 32,
            "self_attention.linear_qkv.bias" => 33,
            "self_attention.q_layernorm.weight" => 40,
            "self_attention.q_layernorm.bias" => 41,
            "self_attention.k_layernorm.weight" => 42,
            "self_attention.k_layernorm.bias" => 43,
            "pre_mlp_layernorm.weight" => 50,
            "pre_mlp_layernorm.bias" => 51,
            "mlp.linear_fc1.layer_norm_weight" => mlp_norm,
            "mlp.linear_fc1.layer_norm_bias" => mlp_norm + 1,
            "mlp.linear_fc1.weight" => 62,
            "mlp.linear_fc1.bias" => 63,
            "mlp.linear_fc2.weight" => 64,
            "mlp.linear_fc2.bias" => 65,
            "mlp.router.weight" => 70,
            "mlp.router.bias" => 71,
            "mlp.shared_experts.gate_weight" => 90,
            "mlp.shared_experts.linear_fc1.weight" => 91,
            "mlp.shared_experts.linear_fc2.weight" => 92,
            _ => return None,
        })
    }
}

const EXPERTS: u64 = 80;

/// A place in the order of registration; larger ones come later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    section: u64,
    layer: u64,
    order: u64,
    expert: (u64, u64),
    part: u64,
}

/// A parameter of a rank, as far as its registration is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct ParamPlace<'a> {
    /// The key of the model's tensor.
    pub(super) name: &'a str,
    /// The layer, where it is of one.
    pub(super) layer: Option<u64>,
    /// The expert, where it is of one.
    pub(super) expert: Option<u64>,
    /// The position among the tensor's chunks along one axis, for parameters of which a rank has
    /// several pieces.
    pub(super) part: u64,
}

impl<'a> ParamPlace<'a> {
    /// The name of the parameter in its layer.
    fn in_layer(&self) -> Option<&'a str> {
        let rest = self.name.strip_prefix("decoder.layers.")?;
        match layer_in_name(rest) {
            Some((_, module)) => Some(module),
            None => Some(rest),
        }
    }
}

/// The layer that a name such as `3.mlp.linear_fc1.weight` begins with, and what follows.
pub(super) fn layer_in_name(rest: &str) -> Option<(u64, &str)> {
    let (layer, module) = rest.split_once('.')?;
    Some((layer.parse().ok()?, module))
}
