//! Llama of torchtitan: names, and rows that positions turn.

use std::collections::BTreeMap;

use dcp_mapping::{Facts, MapOptions, Mapping};

use crate::support::{
    Tensor, Tensors, checkpoint, contents, safetensors, to_hf_of, to_megatron_of,
};

const HEADS: usize = 4;
const GROUPS: usize = 2;
const HEAD: usize = 6;
const HIDDEN: usize = 5;
const LAYERS: usize = 2;

fn mapping() -> Mapping {
    Mapping::builtin("torchtitan_llama").unwrap()
}

fn facts() -> Facts {
    mapping()
        .facts_of_config(&serde_json::json!({
            "model_type": "llama",
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": HEAD,
            "hidden_size": HIDDEN,
            "intermediate_size": 3,
            "vocab_size": 7,
            "rope_theta": 10000.0,
        }))
        .unwrap()
}

/// Weights of small numbers, all different.
fn weights(seed: usize, shape: &[usize]) -> Tensor {
    let mut next = seed as f32;
    Tensor::new(shape, |_| {
        next = (next * 7.0 + 3.0) % 101.0;
        (next / 50.0 - 1.0).to_bits()
    })
}

/// A model as torchtitan names it, with the names of attention that a version has.
fn titan(attention: &str, output: &str) -> Tensors {
    let mut model = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let tensor = weights(model.len() + 1, shape);
        model.insert(name, tensor);
    };
    add("tok_embeddings.weight".into(), &[7, HIDDEN]);
    for layer in 0..LAYERS {
        for (name, shape) in [
            (format!("{attention}wq"), [HEADS * HEAD, HIDDEN]),
            (format!("{attention}wk"), [GROUPS * HEAD, HIDDEN]),
            (format!("{attention}wv"), [GROUPS * HEAD, HIDDEN]),
            ("attention.wo".into(), [HIDDEN, HEADS * HEAD]),
            ("feed_forward.w1".into(), [3, HIDDEN]),
            ("feed_forward.w2".into(), [HIDDEN, 3]),
            ("feed_forward.w3".into(), [3, HIDDEN]),
        ] {
            add(format!("layers.{layer}.{name}.weight"), &shape);
        }
        for name in ["attention_norm", "ffn_norm"] {
            add(format!("layers.{layer}.{name}.weight"), &[HIDDEN]);
        }
    }
    add("norm.weight".into(), &[HIDDEN]);
    add(output.into(), &[7, HIDDEN]);
    model
}

fn float(tensor: &Tensor, at: &[usize]) -> f64 {
    f32::from_bits(tensor.at(at)).into()
}

/// The channels of a head of a projection of `x`.
fn projected(weight: &Tensor, head: usize, x: &[f64]) -> Vec<f64> {
    let row = |row: usize| x.iter().enumerate().map(|(i, x)| float(weight, &[row, i]) * x).sum();
    (head * HEAD..(head + 1) * HEAD).map(row).collect()
}

fn angle(pair: usize, position: f64) -> f64 {
    position * 10000_f64.powf(-2.0 * pair as f64 / HEAD as f64)
}

/// torchtitan: neighboring channels are a complex number, which a position turns.
fn turned_as_complex(channels: &[f64], position: f64) -> Vec<f64> {
    let pairs = channels.chunks_exact(2).enumerate();
    let turned = pairs.flat_map(|(pair, channels)| {
        let (sin, cos) = angle(pair, position).sin_cos();
        let (re, im) = (channels[0], channels[1]);
        [re * cos - im * sin, re * sin + im * cos]
    });
    turned.collect()
}

/// transformers: `x * cos + rotate_half(x) * sin`, where the angles of both halves are the same.
fn turned_by_halves(channels: &[f64], position: f64) -> Vec<f64> {
    let half = HEAD / 2;
    let turned = (0..HEAD).map(|at| {
        let (sin, cos) = angle(at % half, position).sin_cos();
        let other = if at < half { -channels[at + half] } else { channels[at - half] };
        channels[at] * cos + other * sin
    });
    turned.collect()
}

#[test]
fn scores_of_attention_are_those_of_torchtitan() {
    let model = titan("attention.", "output.weight");
    let mapped = to_hf_of(&safetensors(&model), &mapping(), &facts(), &MapOptions::default());
    let hf = contents(&mapped.unwrap().source);
    let x = [0.3, -1.0, 0.7, 0.2, -0.4];
    let y = [-0.6, 0.1, 0.9, -0.8, 0.5];
    let mut different = 0;
    for layer in 0..LAYERS {
        let titan = |name: &str| &model[&format!("layers.{layer}.attention.{name}.weight")];
        let hf = |name: &str| &hf[&format!("model.layers.{layer}.self_attn.{name}.weight")];
        assert_eq!(titan("wv"), hf("v_proj"));
        for head in 0..HEADS {
            let group = head / (HEADS / GROUPS);
            let score = |q: Vec<f64>, k: Vec<f64>| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
            let expected = score(
                turned_as_complex(&projected(titan("wq"), head, &x), 3.0),
                turned_as_complex(&projected(titan("wk"), group, &y), 1.0),
            );
            let found = score(
                turned_by_halves(&projected(hf("q_proj"), head, &x), 3.0),
                turned_by_halves(&projected(hf("k_proj"), group, &y), 1.0),
            );
            assert!((expected - found).abs() < 1e-9, "{expected} {found}");
            // The rows as they are would give others.
            let unchanged = score(
                turned_by_halves(&projected(titan("wq"), head, &x), 3.0),
                turned_by_halves(&projected(titan("wk"), group, &y), 1.0),
            );
            different += usize::from((expected - unchanged).abs() > 1e-6);
        }
    }
    assert_eq!(different, LAYERS * HEADS);
}

#[test]
fn models_of_torchtitan_go_there_and_back_bit_for_bit() {
    let written = titan("attention.", "output.weight");
    let options = MapOptions::default();
    for (attention, output) in
        [("attention.", "output.weight"), ("attention.qkv_linear.", "lm_head.weight")]
    {
        let model = titan(attention, output);
        for prefix in ["", "model."] {
            let named =
                model.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone()));
            let stored = checkpoint(&safetensors(&named.collect()), 3);
            let hf = to_hf_of(&stored, &mapping(), &facts(), &options).unwrap();
            let names: Vec<_> = contents(&hf.source).into_keys().collect();
            assert!(names.contains(&"model.layers.1.mlp.gate_proj.weight".to_owned()), "{names:?}");
            let back = to_megatron_of(&hf.source, &mapping(), &facts(), &options).unwrap();
            let back = contents(&back.source);
            assert_eq!(back.len(), model.len());
            // Seeds follow the order of names, which is that of both.
            for (own, tensor) in &written {
                let newer = own.replace("attention.w", &format!("{attention}w"));
                let newer = newer.replace("attention.qkv_linear.wo", "attention.wo");
                let newer = newer.replace("output.weight", output);
                assert!(back[own] == model[&newer], "{own} of {newer}: {:?}", tensor.shape);
            }
        }
    }
}

#[test]
fn what_is_no_model_of_torchtitan_is_refused() {
    let options = MapOptions::default();
    let model = titan("attention.", "output.weight");
    let fails = |model: &Tensors, facts: &Facts| {
        to_hf_of(&safetensors(model), &mapping(), facts, &options).unwrap_err().to_string()
    };
    let error = fails(&model, &facts().with("num_attention_heads", 5).with("kv_channels", 4));
    assert!(
        error.contains("num_attention_heads * head_dim is 20: \"layers.0.attention.wq.weight\""),
        "{error}"
    );
    // Shapes that transformers cannot load with these settings.
    for (name, shape, said) in [
        (
            "layers.1.attention.wv.weight",
            &[HEADS * HEAD, HIDDEN][..],
            "num_key_value_heads * head_dim is 12",
        ),
        ("layers.0.feed_forward.w2.weight", &[3, HIDDEN], "hidden_size is 5"),
        ("layers.1.ffn_norm.weight", &[HIDDEN - 1], "hidden_size is 5"),
        ("norm.weight", &[HIDDEN, 1], "needs 1 axes"),
        ("output.weight", &[9, HIDDEN], "vocab_size is 7"),
    ] {
        let mut other = model.clone();
        other.insert(name.into(), weights(1, shape));
        let error = fails(&other, &facts());
        assert!(error.contains(said) && error.contains(name), "{name}: {error}");
    }
    for arg in ["add_qkv_bias", "add_bias_linear"] {
        let error = fails(&model, &facts().with(arg, true));
        assert!(error.contains("_bias is true") && error.contains("no biases"), "{error}");
    }
    let error = fails(&model, &Facts::new());
    assert!(error.contains("num_attention_heads"), "{error}");
    let mut more = model.clone();
    more.insert("layers.0.attention.q_norm.weight".into(), weights(1, &[HEAD]));
    let error = fails(&more, &facts());
    assert!(error.contains("layers.0.attention.q_norm.weight"), "{error}");
}
