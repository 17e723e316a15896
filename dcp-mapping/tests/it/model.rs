//! Tiny models as transformers has them: names and shapes, with random contents.

use serde_json::{Value, json};

use crate::support::{Tensor, Tensors};

/// Sizes of a model. What a family has none of is 0.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) family: &'static str,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) ffn: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) head: usize,
    pub(crate) vocab: usize,
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) qk_norm: bool,
    pub(crate) experts: usize,
    pub(crate) expert_ffn: usize,
    /// Layers from which on there are experts.
    pub(crate) dense_layers: usize,
    pub(crate) shared_experts: usize,
    pub(crate) router_bias: bool,
    pub(crate) mla: Option<Mla>,
    pub(crate) positions: usize,
    /// Layers for multi-token prediction.
    pub(crate) mtp: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mla {
    pub(crate) q_lora: usize,
    pub(crate) kv_lora: usize,
    pub(crate) nope: usize,
    pub(crate) rope: usize,
    pub(crate) value: usize,
}

impl Model {
    /// A model like Llama's, with more heads than the width has room for.
    pub(crate) fn dense(family: &'static str) -> Self {
        Self {
            family,
            layers: 3,
            hidden: 8,
            ffn: 5,
            heads: 6,
            groups: 2,
            head: 4,
            vocab: 11,
            tied: false,
            qkv_bias: false,
            qk_norm: false,
            experts: 0,
            expert_ffn: 0,
            dense_layers: 0,
            shared_experts: 0,
            router_bias: false,
            mla: None,
            positions: 0,
            mtp: 0,
        }
    }

    /// The models that are tested.
    pub(crate) fn all() -> Vec<Self> {
        let dense = Self::dense;
        let moe = |family| Self { experts: 3, expert_ffn: 7, ..dense(family) };
        let deepseek = |family, q_lora| Self {
            groups: 6,
            dense_layers: 1,
            shared_experts: 2,
            mla: Some(Mla { q_lora, kv_lora: 5, nope: 3, rope: 2, value: 4 }),
            ..moe(family)
        };
        vec![
            dense("llama"),
            Self { tied: true, groups: 6, ..dense("llama") },
            Self { vocab: 128, groups: 1, ..dense("llama") },
            dense("mistral"),
            Self { qkv_bias: true, ..dense("qwen2") },
            Self { qkv_bias: true, tied: true, ..dense("qwen2") },
            Self { qk_norm: true, ..dense("qwen3") },
            moe("mixtral"),
            Self { qk_norm: true, ..moe("qwen3_moe") },
            Self { qk_norm: true, dense_layers: 2, ..moe("qwen3_moe") },
            Self { hidden: 24, ..dense("phi3") },
            deepseek("deepseek_v2", 6),
            deepseek("deepseek_v2", 0),
            Self { router_bias: true, ..deepseek("deepseek_v3", 6) },
            Self { router_bias: true, mtp: 2, ..deepseek("deepseek_v3", 0) },
            Self { router_bias: true, dense_layers: 0, ..deepseek("deepseek_v3", 6) },
            Self {
                tied: true,
                groups: 6,
                positions: 9,
                ffn: 32,
                head: 2,
                hidden: 12,
                ..dense("gpt2")
            },
        ]
    }

    /// Its `config.json`, as far as weights depend on it.
    pub(crate) fn config(&self) -> Value {
        if self.family == "gpt2" {
            return json!({
                "model_type": "gpt2", "n_layer": self.layers, "n_embd": self.hidden,
                "n_head": self.heads, "n_inner": self.ffn, "vocab_size": self.vocab,
                "n_positions": self.positions, "layer_norm_epsilon": 1e-5,
            });
        }
        let mut config = json!({
            "model_type": self.family, "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_attention_heads": self.heads, "num_key_value_heads": self.groups,
            "vocab_size": self.vocab, "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64,
        });
        let fields = config.as_object_mut().unwrap();
        let mut set = |name: &str, value: Value| _ = fields.insert(name.to_owned(), value);
        match self.mla {
            None => set("head_dim", self.head.into()),
            Some(mla) => {
                set("q_lora_rank", if mla.q_lora > 0 { mla.q_lora.into() } else { Value::Null });
                set("kv_lora_rank", mla.kv_lora.into());
                set("qk_nope_head_dim", mla.nope.into());
                set("qk_rope_head_dim", mla.rope.into());
                set("v_head_dim", mla.value.into());
                set("n_routed_experts", self.experts.into());
                set("n_shared_experts", self.shared_experts.into());
                set("first_k_dense_replace", self.dense_layers.into());
                set("moe_intermediate_size", self.expert_ffn.into());
                set("num_experts_per_tok", 2.into());
                if self.router_bias {
                    set("n_group", 1.into());
                    set("topk_group", 1.into());
                    set("num_nextn_predict_layers", self.mtp.into());
                }
            }
        }
        if self.experts > 0 && self.mla.is_none() {
            set("num_experts_per_tok", 2.into());
            if self.family == "mixtral" {
                set("num_local_experts", self.experts.into());
                set("intermediate_size", self.expert_ffn.into());
            } else {
                set("num_experts", self.experts.into());
                set("moe_intermediate_size", self.expert_ffn.into());
                set("mlp_only_layers", (0..self.dense_layers).collect());
            }
        }
        config
    }

    /// The configuration of some model of a family, with other fields.
    pub(crate) fn config_with(family: &str, more: Value) -> Value {
        let model = Self::all().into_iter().find(|model| model.family == family).unwrap();
        let mut config = model.config();
        let fields = config.as_object_mut().unwrap();
        if more.get("rope_parameters").is_some() {
            fields.remove("rope_theta");
        }
        fields.extend(more.as_object().unwrap().clone());
        config
    }

    /// All tensors, of random bits.
    pub(crate) fn tensors(&self) -> Tensors {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |_: &[usize]| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 32) as u32
        };
        let shapes = self.shapes();
        let tensors = shapes.into_iter();
        let mut all: Tensors =
            tensors.map(|(name, shape)| (name, Tensor::new(&shape, &mut random))).collect();
        // Layers for multi-token prediction have the embeddings of the model.
        for layer in self.layers..self.layers + self.mtp {
            for (copy, of) in [
                ("embed_tokens", "model.embed_tokens.weight"),
                ("shared_head.head", "lm_head.weight"),
            ] {
                let tensor = all.get(of).cloned();
                all.extend(tensor.map(|of| (format!("model.layers.{layer}.{copy}.weight"), of)));
            }
        }
        all
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (h, q, kv) = (self.hidden, self.heads * self.head, self.groups * self.head);
        let mut all: Vec<(String, Vec<usize>)> = Vec::new();
        if self.family == "gpt2" {
            all.push(("transformer.wte.weight".into(), vec![self.vocab, h]));
            all.push(("transformer.wpe.weight".into(), vec![self.positions, h]));
            for layer in 0..self.layers {
                let mut add = |name: &str, shape: &[usize]| {
                    all.push((format!("transformer.h.{layer}.{name}"), shape.to_vec()));
                };
                for norm in ["ln_1", "ln_2"] {
                    add(&format!("{norm}.weight"), &[h]);
                    add(&format!("{norm}.bias"), &[h]);
                }
                add("attn.c_attn.weight", &[h, 3 * h]);
                add("attn.c_attn.bias", &[3 * h]);
                add("attn.c_proj.weight", &[h, h]);
                add("attn.c_proj.bias", &[h]);
                add("mlp.c_fc.weight", &[h, self.ffn]);
                add("mlp.c_fc.bias", &[self.ffn]);
                add("mlp.c_proj.weight", &[self.ffn, h]);
                add("mlp.c_proj.bias", &[h]);
            }
            all.push(("transformer.ln_f.weight".into(), vec![h]));
            all.push(("transformer.ln_f.bias".into(), vec![h]));
            return all;
        }
        all.push(("model.embed_tokens.weight".into(), vec![self.vocab, h]));
        for layer in 0..self.layers + self.mtp {
            let mut add = |name: &str, shape: &[usize]| {
                all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            if layer >= self.layers {
                for name in ["enorm", "hnorm", "shared_head.norm"] {
                    add(&format!("{name}.weight"), &[h]);
                }
                add("eh_proj.weight", &[h, 2 * h]);
            }
            add("input_layernorm.weight", &[h]);
            add("post_attention_layernorm.weight", &[h]);
            if let Some(mla) = self.mla {
                let query = self.heads * (mla.nope + mla.rope);
                if mla.q_lora > 0 {
                    add("self_attn.q_a_proj.weight", &[mla.q_lora, h]);
                    add("self_attn.q_a_layernorm.weight", &[mla.q_lora]);
                    add("self_attn.q_b_proj.weight", &[query, mla.q_lora]);
                } else {
                    add("self_attn.q_proj.weight", &[query, h]);
                }
                add("self_attn.kv_a_proj_with_mqa.weight", &[mla.kv_lora + mla.rope, h]);
                add("self_attn.kv_a_layernorm.weight", &[mla.kv_lora]);
                let key_value = self.heads * (mla.nope + mla.value);
                add("self_attn.kv_b_proj.weight", &[key_value, mla.kv_lora]);
                add("self_attn.o_proj.weight", &[h, self.heads * mla.value]);
            } else if self.family == "phi3" {
                add("self_attn.qkv_proj.weight", &[q + 2 * kv, h]);
                add("self_attn.o_proj.weight", &[h, q]);
            } else {
                for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                    add(&format!("self_attn.{name}_proj.weight"), &[rows, h]);
                    if self.qkv_bias {
                        add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                    }
                }
                add("self_attn.o_proj.weight", &[h, q]);
            }
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head]);
                add("self_attn.k_norm.weight", &[self.head]);
            }
            if self.family == "phi3" {
                add("mlp.gate_up_proj.weight", &[2 * self.ffn, h]);
                add("mlp.down_proj.weight", &[h, self.ffn]);
                continue;
            }
            if !self.is_moe(layer) {
                add("mlp.gate_proj.weight", &[self.ffn, h]);
                add("mlp.up_proj.weight", &[self.ffn, h]);
                add("mlp.down_proj.weight", &[h, self.ffn]);
                continue;
            }
            let (block, [gate, up, down]) = match self.family {
                "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
                _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
            };
            add(&format!("{block}.gate.weight"), &[self.experts, h]);
            if self.router_bias {
                add(&format!("{block}.gate.e_score_correction_bias"), &[self.experts]);
            }
            for expert in 0..self.experts {
                add(&format!("{block}.experts.{expert}.{gate}.weight"), &[self.expert_ffn, h]);
                add(&format!("{block}.experts.{expert}.{up}.weight"), &[self.expert_ffn, h]);
                add(&format!("{block}.experts.{expert}.{down}.weight"), &[h, self.expert_ffn]);
            }
            let shared = self.shared_experts * self.expert_ffn;
            if shared > 0 {
                add(&format!("{block}.shared_experts.gate_proj.weight"), &[shared, h]);
                add(&format!("{block}.shared_experts.up_proj.weight"), &[shared, h]);
                add(&format!("{block}.shared_experts.down_proj.weight"), &[h, shared]);
            }
        }
        all.push(("model.norm.weight".into(), vec![h]));
        if !self.tied {
            all.push(("lm_head.weight".into(), vec![self.vocab, h]));
        }
        all
    }

    pub(crate) fn is_moe(&self, layer: usize) -> bool {
        self.experts > 0 && layer >= self.dense_layers
    }

    /// Whether all layers have the same tensors.
    pub(crate) fn is_uniform(&self) -> bool {
        self.experts == 0 || self.dense_layers == 0
    }
}
