//! The arguments of the training run: `args` of the common state, an `argparse.Namespace` as plain
//! data.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{DType, Value};

/// The arguments that a run of Megatron-LM was started with, by name.
///
/// Nothing is made of them but data: values of unknown classes (enums, functions) are what
/// [`Value::Object`] and [`Value::Global`] show. Getters return `None` where an argument is
/// absent, `None` in Python, or of another kind.
#[derive(Clone, Debug)]
pub struct MegatronArgs(Arc<Dict>);

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $kind:ident -> $type:ty;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(&self) -> Option<$type> {
            self.$kind(stringify!($name))
        }
    )*};
}

impl MegatronArgs {
    /// The attributes of a namespace, or the entries of a dict; `None` of anything else.
    #[must_use]
    pub fn from_value(value: &Value) -> Option<Self> {
        Some(Self(Arc::new(value.attributes()?.clone())))
    }

    /// All of them, in the order in which they were stored.
    #[must_use]
    pub fn dict(&self) -> &Dict {
        &self.0
    }

    /// One of them, as it is.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// One that is a number of things.
    #[must_use]
    pub fn count(&self, name: &str) -> Option<u64> {
        self.get(name)?.as_int().and_then(|n| u64::try_from(n).ok())
    }

    /// One that is a real number; integers are taken, too.
    #[must_use]
    pub fn real(&self, name: &str) -> Option<f64> {
        match self.get(name)? {
            Value::Float(x) => Some(*x),
            #[allow(clippy::cast_precision_loss, reason = "it is what Python does with them")]
            Value::Int(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// One that is true or false.
    #[must_use]
    pub fn flag(&self, name: &str) -> Option<bool> {
        match self.get(name)? {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// One that is text.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }

    /// One that is a dtype, such as `torch.bfloat16`.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.get(name)? {
            Value::Global(global) if &*global.module == "torch" => global.name.parse().ok(),
            _ => None,
        }
    }

    getters! {
        /// Layers of the decoder.
        num_layers: count -> u64;
        /// Width of the model.
        hidden_size: count -> u64;
        /// Width within the MLP.
        ffn_hidden_size: count -> u64;
        /// Heads of attention.
        num_attention_heads: count -> u64;
        /// Groups of heads that share keys and values, where `group_query_attention` is on.
        num_query_groups: count -> u64;
        /// Whether heads share keys and values in groups.
        group_query_attention: flag -> bool;
        /// Elements of one head.
        kv_channels: count -> u64;
        /// Longest sequence.
        seq_length: count -> u64;
        /// Positions there are embeddings for.
        max_position_embeddings: count -> u64;
        /// Tokens of the tokenizer; the embedding has `padded_vocab_size` rows.
        vocab_size: count -> u64;
        /// Rows of the embedding.
        padded_vocab_size: count -> u64;
        /// Factor of `padded_vocab_size`, which is a multiple of it times the tensor parallel size.
        make_vocab_size_divisible_by: count -> u64;
        /// Whether the MLP is gated by SiLU.
        swiglu: flag -> bool;
        /// Whether linear layers have biases.
        add_bias_linear: flag -> bool;
        /// Whether the QKV projection has biases.
        add_qkv_bias: flag -> bool;
        /// Whether queries and keys are normalized.
        qk_layernorm: flag -> bool;
        /// Whether the output layer has weights of its own.
        untie_embeddings_and_output_weights: flag -> bool;
        /// Kind of positions, such as `rope` or `learned_absolute`.
        position_embedding_type: text -> &str;
        /// Base of rotary positions.
        rotary_base: real -> f64;
        /// Kind of normalization, such as `RMSNorm`.
        normalization: text -> &str;
        /// Added to the variance in normalization.
        norm_epsilon: real -> f64;
        /// `norm_epsilon` under its name before Megatron-Core 0.5.
        layernorm_epsilon: real -> f64;
        /// Experts of a layer.
        num_experts: count -> u64;
        /// Width within an expert.
        moe_ffn_hidden_size: count -> u64;
        /// Experts that a token is sent to.
        moe_router_topk: count -> u64;
        /// Width within the experts that every token goes through.
        moe_shared_expert_intermediate_size: count -> u64;
        /// Whether attention is DeepSeek's multi-latent one.
        multi_latent_attention: flag -> bool;
        /// Ranks that share a layer's matrices.
        tensor_model_parallel_size: count -> u64;
        /// Ranks that share the layers.
        pipeline_model_parallel_size: count -> u64;
        /// Ranks that share the experts.
        expert_model_parallel_size: count -> u64;
        /// Ranks that share a sequence.
        context_parallel_size: count -> u64;
        /// Ranks that train on other data.
        data_parallel_size: count -> u64;
        /// All ranks.
        world_size: count -> u64;
        /// The iteration that was saved.
        iteration: count -> u64;
        /// Samples that were trained on.
        consumed_train_samples: count -> u64;
        /// Dtype of the parameters.
        params_dtype: dtype -> DType;
        /// Whether the optimizer's state is spread over the data parallel ranks.
        use_distributed_optimizer: flag -> bool;
        /// Whether the save was spread over the data parallel ranks.
        ckpt_fully_parallel_save: flag -> bool;
        /// Format of checkpoints, such as `torch_dist`.
        ckpt_format: text -> &str;
        /// Kind of tokenizer.
        tokenizer_type: text -> &str;
        /// Path or name of the tokenizer.
        tokenizer_model: text -> &str;
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::value::{Global, Object};

    use super::*;

    #[test]
    fn a_namespace_is_plain_data() {
        let mut state = Dict::new();
        state.insert("num_layers", 2);
        state.insert("world_size", -1);
        state.insert("rotary_base", 10000);
        state.insert("norm_epsilon", 1e-5);
        state.insert("swiglu", true);
        state.insert("normalization", "RMSNorm");
        state.insert("num_experts", Value::None);
        state.insert("params_dtype", Value::Global(Global::new("torch", "bfloat16")));
        let mut namespace = Object::new(Global::new("argparse", "Namespace"), Vec::new());
        namespace.state = Some(Value::Dict(state));
        let args = MegatronArgs::from_value(&Value::from(namespace)).unwrap();
        assert_eq!(args.num_layers(), Some(2));
        assert_eq!(args.world_size(), None);
        assert_eq!(args.rotary_base(), Some(10000.0));
        assert_eq!(args.norm_epsilon(), Some(1e-5));
        assert_eq!(args.swiglu(), Some(true));
        assert_eq!(args.normalization(), Some("RMSNorm"));
        assert_eq!(args.num_experts(), None);
        assert_eq!(args.hidden_size(), None);
        assert_eq!(args.params_dtype(), Some(DType::BFloat16));
        assert_eq!(args.dict().len(), 8);
    }

    #[test]
    fn what_is_no_namespace_has_no_arguments() {
        assert!(MegatronArgs::from_value(&Value::from(3)).is_none());
        let bare = Object::new(Global::new("argparse", "Namespace"), Vec::new());
        assert!(MegatronArgs::from_value(&Value::from(bare)).is_none());
    }
}
