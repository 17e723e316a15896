//! What a Megatron checkpoint of a model holds, element by element: for every element of every
//! tensor, the one of the transformers model that it is. Nothing here uses the mappings.

use crate::model::Model;
use crate::support::{Tensor, Tensors};

/// The Megatron tensors of layer `layer`, or of the parts around the layers.
type Layer = Vec<(String, Tensor)>;

/// The tensors of a model in Megatron, with the vocabulary padded to `padded` rows of zeros.
pub(crate) fn megatron(model: &Model, hf: &Tensors, padded: usize) -> Tensors {
    let layers: Vec<Layer> = (0..model.layers).map(|layer| one_layer(model, hf, layer)).collect();
    let mut all = around(model, hf, padded);
    for at in 0..model.mtp {
        let layer = model.layers + at;
        for (name, tensor) in one_layer(model, hf, layer) {
            all.insert(format!("mtp.layers.{at}.transformer_layer.{name}"), tensor);
        }
        for (to, from) in [
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", "shared_head.norm"),
        ] {
            let from = hf[&format!("model.layers.{layer}.{from}.weight")].clone();
            all.insert(format!("mtp.layers.{at}.{to}.weight"), from);
        }
    }
    if !model.is_uniform() {
        for (at, layer) in layers.into_iter().enumerate() {
            for (name, tensor) in layer {
                all.insert(format!("decoder.layers.{at}.{name}"), tensor);
            }
        }
        return all;
    }
    for (slot, (name, first)) in layers[0].iter().enumerate() {
        let shape = [&[model.layers], first.shape.as_slice()].concat();
        let stacked = Tensor::new(&shape, |at| layers[at[0]][slot].1.at(&at[1..]));
        all.insert(format!("decoder.layers.{name}"), stacked);
    }
    all
}

fn around(model: &Model, hf: &Tensors, padded: usize) -> Tensors {
    let vocab = |name: &str| {
        let from = &hf[name];
        Tensor::new(&[padded, model.hidden], |at| if at[0] < model.vocab { from.at(at) } else { 0 })
    };
    let mut all = Tensors::new();
    if model.family == "gpt2" {
        let mut same = |to: &str, from: &str| {
            all.insert(to.to_owned(), hf[&format!("transformer.{from}")].clone());
        };
        same("embedding.position_embeddings.weight", "wpe.weight");
        same("decoder.final_layernorm.weight", "ln_f.weight");
        same("decoder.final_layernorm.bias", "ln_f.bias");
        all.insert("embedding.word_embeddings.weight".into(), vocab("transformer.wte.weight"));
        return all;
    }
    all.insert("embedding.word_embeddings.weight".into(), vocab("model.embed_tokens.weight"));
    all.insert("decoder.final_layernorm.weight".into(), hf["model.norm.weight"].clone());
    if !model.tied {
        all.insert("output_layer.weight".into(), vocab("lm_head.weight"));
    }
    all
}

/// Where a row of Megatron's fused query, key and value comes from: which of the three, and its
/// row there.
fn qkv_row(model: &Model, row: usize) -> (usize, usize) {
    let (per_group, head) = (model.heads / model.groups, model.head);
    let (slot, channel) = (row / head, row % head);
    let (group, within) = (slot / (per_group + 2), slot % (per_group + 2));
    if within < per_group {
        (0, (group * per_group + within) * head + channel)
    } else {
        (within - per_group + 1, group * head + channel)
    }
}

fn one_layer(model: &Model, hf: &Tensors, layer: usize) -> Layer {
    if model.family == "gpt2" {
        return gpt2_layer(model, hf, layer);
    }
    let get = |name: &str| &hf[&format!("model.layers.{layer}.{name}")];
    let mut all = Layer::new();
    let mut add = |name: &str, tensor: Tensor| all.push((name.to_owned(), tensor));
    let attention = |name: &str| get(&format!("self_attn.{name}")).clone();
    if let Some(mla) = model.mla {
        add("input_layernorm.weight", get("input_layernorm.weight").clone());
        if mla.q_lora > 0 {
            add("self_attention.linear_q_down_proj.weight", attention("q_a_proj.weight"));
            add(
                "self_attention.linear_q_up_proj.layer_norm_weight",
                attention("q_a_layernorm.weight"),
            );
            add("self_attention.linear_q_up_proj.weight", attention("q_b_proj.weight"));
        } else {
            add("self_attention.linear_q_proj.weight", attention("q_proj.weight"));
        }
        add("self_attention.linear_kv_down_proj.weight", attention("kv_a_proj_with_mqa.weight"));
        add(
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            attention("kv_a_layernorm.weight"),
        );
        add("self_attention.linear_kv_up_proj.weight", attention("kv_b_proj.weight"));
    } else {
        add("self_attention.linear_qkv.layer_norm_weight", get("input_layernorm.weight").clone());
        let rows = (model.heads + 2 * model.groups) * model.head;
        let parts = ["q", "k", "v"];
        let weight = Tensor::new(&[rows, model.hidden], |at| {
            let (part, row) = qkv_row(model, at[0]);
            if model.family == "phi3" {
                // All queries, all keys, all values.
                let (q, kv) = (model.heads * model.head, model.groups * model.head);
                let before = [0, q, q + kv][part];
                return get("self_attn.qkv_proj.weight").at(&[before + row, at[1]]);
            }
            get(&format!("self_attn.{}_proj.weight", parts[part])).at(&[row, at[1]])
        });
        add("self_attention.linear_qkv.weight", weight);
        if model.qkv_bias {
            let bias = Tensor::new(&[rows], |at| {
                let (part, row) = qkv_row(model, at[0]);
                get(&format!("self_attn.{}_proj.bias", parts[part])).at(&[row])
            });
            add("self_attention.linear_qkv.bias", bias);
        }
    }
    add("self_attention.linear_proj.weight", attention("o_proj.weight"));
    if model.qk_norm {
        add("self_attention.q_layernorm.weight", attention("q_norm.weight"));
        add("self_attention.k_layernorm.weight", attention("k_norm.weight"));
    }
    let norm = get("post_attention_layernorm.weight").clone();
    let gated = |gate: &Tensor, up: &Tensor| {
        let rows = gate.shape[0];
        Tensor::new(&[2 * rows, model.hidden], |at| {
            if at[0] < rows { gate.at(at) } else { up.at(&[at[0] - rows, at[1]]) }
        })
    };
    if !model.is_moe(layer) {
        add("mlp.linear_fc1.layer_norm_weight", norm);
        let fc1 = match model.family {
            "phi3" => get("mlp.gate_up_proj.weight").clone(),
            _ => gated(get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")),
        };
        add("mlp.linear_fc1.weight", fc1);
        add("mlp.linear_fc2.weight", get("mlp.down_proj.weight").clone());
        return all;
    }
    let (block, [gate, up, down]) = match model.family {
        "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    add("pre_mlp_layernorm.weight", norm);
    add("mlp.router.weight", get(&format!("{block}.gate.weight")).clone());
    if model.router_bias {
        let bias = get(&format!("{block}.gate.e_score_correction_bias")).clone();
        add("mlp.router.expert_bias", bias);
    }
    let expert =
        |number: usize, name: &str| get(&format!("{block}.experts.{number}.{name}.weight"));
    let (ffn, hidden) = (model.expert_ffn, model.hidden);
    let fc1 = Tensor::new(&[model.experts, 2 * ffn, hidden], |at| {
        let (name, row) = if at[1] < ffn { (gate, at[1]) } else { (up, at[1] - ffn) };
        expert(at[0], name).at(&[row, at[2]])
    });
    add("mlp.experts.experts.linear_fc1.weight", fc1);
    let fc2 = Tensor::new(&[model.experts, hidden, ffn], |at| expert(at[0], down).at(&at[1..]));
    add("mlp.experts.experts.linear_fc2.weight", fc2);
    if model.shared_experts > 0 {
        let shared = |name: &str| get(&format!("{block}.shared_experts.{name}.weight"));
        let fc1 = gated(shared("gate_proj"), shared("up_proj"));
        add("mlp.shared_experts.linear_fc1.weight", fc1);
        add("mlp.shared_experts.linear_fc2.weight", shared("down_proj").clone());
    }
    all
}

fn gpt2_layer(model: &Model, hf: &Tensors, layer: usize) -> Layer {
    let get = |name: &str| &hf[&format!("transformer.h.{layer}.{name}")];
    let turned = |name: &str| {
        let from = get(name);
        Tensor::new(&[from.shape[1], from.shape[0]], |at| from.at(&[at[1], at[0]]))
    };
    let hidden = model.hidden;
    let qkv = |row| {
        let (part, row) = qkv_row(model, row);
        part * hidden + row
    };
    let (weight, bias) = (get("attn.c_attn.weight"), get("attn.c_attn.bias"));
    [
        ("self_attention.linear_qkv.layer_norm_weight", get("ln_1.weight").clone()),
        ("self_attention.linear_qkv.layer_norm_bias", get("ln_1.bias").clone()),
        (
            "self_attention.linear_qkv.weight",
            Tensor::new(&[3 * hidden, hidden], |at| weight.at(&[at[1], qkv(at[0])])),
        ),
        ("self_attention.linear_qkv.bias", Tensor::new(&[3 * hidden], |at| bias.at(&[qkv(at[0])]))),
        ("self_attention.linear_proj.weight", turned("attn.c_proj.weight")),
        ("self_attention.linear_proj.bias", get("attn.c_proj.bias").clone()),
        ("mlp.linear_fc1.layer_norm_weight", get("ln_2.weight").clone()),
        ("mlp.linear_fc1.layer_norm_bias", get("ln_2.bias").clone()),
        ("mlp.linear_fc1.weight", turned("mlp.c_fc.weight")),
        ("mlp.linear_fc1.bias", get("mlp.c_fc.bias").clone()),
        ("mlp.linear_fc2.weight", turned("mlp.c_proj.weight")),
        ("mlp.linear_fc2.bias", get("mlp.c_proj.bias").clone()),
    ]
    .into_iter()
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .collect()
}
