//! Partition rules: how tensor, pipeline and expert parallelism cut each parameter.

mod division;
mod heads;
mod key;
mod observed;
mod ranks;

pub use crate::layout::{ParallelLayout, PipelineSplit};
pub(crate) use division::MegatronDivision;
pub(crate) use heads::oldest_version;
pub(crate) use observed::Observed;

/// The cut of a parameter by the tensor parallelism of `t` ranks, along one of its own axes: those
/// without the axes of layers and experts that Megatron-Core puts in front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorCut {
    /// Every rank has all of it; the first one writes it.
    Replicated,
    /// Into `t` parts along the first axis: the outputs of a column-parallel layer, or the
    /// vocabulary.
    Column,
    /// Into `t` parts along the second axis: the inputs of a row-parallel layer.
    Row,
    /// Of a gated layer, two matrices one behind the other along the first axis, each cut into
    /// `t` parts: rank `r` has parts `r` and `t + r` of `2t`. Of a layer that is not gated, as
    /// [`Column`](Self::Column): the shape of the layer behind it decides.
    Gated,
}

/// A rule of [`RULES`]: the cut of parameters whose names have this ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionRule {
    /// The last components of the name; one that begins with `*` may go on in front.
    pub ending: &'static str,
    /// The cut of these parameters.
    pub cut: TensorCut,
}

const fn rule(ending: &'static str, cut: TensorCut) -> PartitionRule {
    PartitionRule { ending, cut }
}

/// The rules by which Megatron-Core (0.6 to 0.19) cuts parameters among tensor-parallel ranks; the
/// first that fits counts. Names are those of checkpoints, which do not contain module classes.
///
/// Optimizer state of one parameter (`optimizer.state.<state>.<name>`) is cut as the parameter.
/// What no rule names keeps the grid that it was stored in.
pub const RULES: &[PartitionRule] = &{
    use TensorCut::{Column, Gated, Replicated, Row};
    [
        // Embeddings and the head: along the vocabulary.
        rule("word_embeddings.weight", Column),
        rule("position_embeddings.weight", Replicated),
        rule("tokentype_embeddings.weight", Replicated),
        rule("output_layer.weight", Column),
        rule("output_layer.bias", Column),
        // Attention. The rows of `linear_qkv` are grouped by query group, so equal parts are whole
        // groups where the groups divide.
        rule("linear_qkv.weight", Column),
        rule("linear_qkv.bias", Column),
        rule("linear_q.weight", Column),
        rule("linear_q.bias", Column),
        rule("linear_kv.weight", Column),
        rule("linear_kv.bias", Column),
        rule("linear_proj.weight", Row),
        rule("linear_proj.bias", Replicated),
        rule("core_attention.softmax_offset", Column),
        // Multi-latent attention: what leads down to the latent space is the same everywhere.
        rule("linear_q_proj.weight", Column),
        rule("linear_q_down_proj.weight", Replicated),
        rule("linear_q_up_proj.weight", Column),
        rule("linear_kv_down_proj.weight", Replicated),
        rule("linear_kv_up_proj.weight", Column),
        rule("linear_qkv_down_proj.weight", Replicated),
        // Feed-forward layers, experts and shared experts. `weight_w` and `weight_v` are the two
        // matrices of a gated layer under names of their own (`singleton_local_shards`, 0.15).
        rule("linear_fc1.weight", Gated),
        rule("linear_fc1.bias", Gated),
        rule("linear_fc1.weight_w", Column),
        rule("linear_fc1.weight_v", Column),
        rule("linear_fc1.bias_w", Column),
        rule("linear_fc1.bias_v", Column),
        rule("linear_fc2.weight", Row),
        rule("linear_fc2.bias", Replicated),
        rule("shared_experts.gate_weight", Replicated),
        rule("router.weight", Replicated),
        rule("router.bias", Replicated),
        rule("router.expert_bias", Replicated),
        // Multi-token prediction.
        rule("eh_proj.weight", Column),
        // Mamba and gated delta networks, whose fused projections are stored in their parts.
        rule("mixer.norm.weight", Column),
        rule("in_proj.weight.z", Column),
        rule("in_proj.weight.x", Column),
        rule("in_proj.weight.B", Column),
        rule("in_proj.weight.C", Column),
        rule("in_proj.weight.dt", Column),
        rule("in_proj.weight.query", Column),
        rule("in_proj.weight.key", Column),
        rule("in_proj.weight.value", Column),
        rule("in_proj.weight.beta", Column),
        rule("in_proj.weight.alpha", Column),
        rule("conv1d.weight.x", Column),
        rule("conv1d.weight.B", Column),
        rule("conv1d.weight.C", Column),
        rule("conv1d.weight.query", Column),
        rule("conv1d.weight.key", Column),
        rule("conv1d.weight.value", Column),
        rule("conv1d.bias.x", Column),
        rule("conv1d.bias.B", Column),
        rule("conv1d.bias.C", Column),
        rule("conv1d.bias.query", Column),
        rule("conv1d.bias.key", Column),
        rule("conv1d.bias.value", Column),
        rule("A_log", Column),
        rule("mixer.D", Column),
        rule("dt_bias", Column),
        rule("out_proj.weight", Row),
        rule("out_proj.bias", Replicated),
        // Norms, on their own or fused into the layer behind them.
        rule("layer_norm_weight", Replicated),
        rule("layer_norm_bias", Replicated),
        rule("*norm.weight", Replicated),
        rule("*norm.bias", Replicated),
    ]
};

/// Returns the cut of the parameter of this name, without its optimizer's prefix; `None` when no
/// rule names it.
#[must_use]
pub fn tensor_cut(name: &str) -> Option<TensorCut> {
    let fits = |rule: &&PartitionRule| match rule.ending.strip_prefix('*') {
        Some(ending) => name.ends_with(ending),
        None => name
            .strip_suffix(rule.ending)
            .is_some_and(|before| before.is_empty() || before.ends_with('.')),
    };
    RULES.iter().find(fits).map(|rule| rule.cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_whole_components() {
        let cut = |name| tensor_cut(name);
        assert_eq!(cut("decoder.layers.mlp.linear_fc1.weight"), Some(TensorCut::Gated));
        assert_eq!(cut("linear_fc1.weight"), Some(TensorCut::Gated));
        assert_eq!(cut("mlp.not_linear_fc1.weight"), None);
        assert_eq!(cut("decoder.layers.input_layernorm.weight"), Some(TensorCut::Replicated));
        assert_eq!(cut("decoder.layers.0.mixer.norm.weight"), Some(TensorCut::Column));
        assert_eq!(cut("decoder.final_norm.weight"), Some(TensorCut::Replicated));
        assert_eq!(cut("decoder.layers.mlp.experts.weight1"), None);
        assert_eq!(cut(""), None);
    }

    #[test]
    fn no_rule_is_hidden_by_an_earlier_one() {
        for (n, rule) in RULES.iter().enumerate() {
            let name = format!("decoder.layers.{}", rule.ending.replace('*', "final_"));
            let first = RULES.iter().position(|other| {
                let ending = other.ending.strip_prefix('*').unwrap_or(other.ending);
                name.ends_with(ending)
            });
            assert_eq!(first, Some(n), "{}", rule.ending);
        }
    }
}
