//! Checkpoints that Megatron wrote.

use dcp_mapping::{Facts, MapOptions, Mapping, map_to_hf};

use crate::support::{Tensor, block_on, contents, fixture, job};

#[test]
fn a_dense_model_of_two_by_two_ranks() {
    let (source, expected) = fixture("gpt_tp2pp2_swiglu");
    let mapping = Mapping::builtin("llama").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4).with("num_query_groups", 2);
    let mapped = block_on(map_to_hf(&source, &mapping, &facts, &MapOptions::default(), &job()));
    let mapped = mapped.unwrap();
    let hf = contents(&mapped.source);
    assert_eq!(hf.len(), 2 + 2 * 9);
    let stored = |name: &str| &expected[name];
    let fused = stored("decoder.layers.self_attention.linear_qkv.weight");
    for layer in 0..2 {
        let get = |name: &str| &hf[&format!("model.layers.{layer}.{name}.weight")];
        let q = Tensor::new(&[8, 8], |at| {
            // Two heads of two channels, then key and value of two channels each.
            let (group, row) = (at[0] / 4, at[0] % 4);
            fused.at(&[layer, group * 8 + row, at[1]])
        });
        let k = Tensor::new(&[4, 8], |at| fused.at(&[layer, at[0] / 2 * 8 + 4 + at[0] % 2, at[1]]));
        let v = Tensor::new(&[4, 8], |at| fused.at(&[layer, at[0] / 2 * 8 + 6 + at[0] % 2, at[1]]));
        assert_eq!(*get("self_attn.q_proj"), q);
        assert_eq!(*get("self_attn.k_proj"), k);
        assert_eq!(*get("self_attn.v_proj"), v);
        let fc1 = stored("decoder.layers.mlp.linear_fc1.weight");
        let gate = Tensor::new(&[12, 8], |at| fc1.at(&[layer, at[0], at[1]]));
        let up = Tensor::new(&[12, 8], |at| fc1.at(&[layer, at[0] + 12, at[1]]));
        assert_eq!(*get("mlp.gate_proj"), gate);
        assert_eq!(*get("mlp.up_proj"), up);
        let norm = stored("decoder.layers.mlp.linear_fc1.layer_norm_weight");
        let norm = Tensor::new(&[8], |at| norm.at(&[layer, at[0]]));
        assert_eq!(*get("post_attention_layernorm"), norm);
    }
    assert_eq!(hf["model.embed_tokens.weight"], *stored("embedding.word_embeddings.weight"));
    assert!(mapped.report.tied);
    assert_eq!(mapped.report.notes.len(), 1, "{:?}", mapped.report.notes);
    let config = mapping.config_json(&mapped.facts).unwrap();
    assert_eq!(config["num_hidden_layers"], 2);
    assert_eq!(config["head_dim"], 2);
    assert_eq!(config["vocab_size"], 16);
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(config["torch_dtype"], "float32");
}
