//! Configurations that contradict the tensors which already have transformers' names.

use std::fs;

use serde_json::{Value, json};

use crate::model_folder::weights;
use crate::support::{dcp, path};

type Tensors = Vec<(String, Vec<usize>)>;

/// The tensors of a Llama of 2 layers: hidden size 16, 4 heads of 4, 2 for keys, 32 in the MLP, 40 tokens.
fn llama() -> Tensors {
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![40, 16]),
        ("model.norm.weight".to_owned(), vec![16]),
        ("lm_head.weight".to_owned(), vec![40, 16]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![16, 16]),
            ("self_attn.k_proj", vec![8, 16]),
            ("self_attn.v_proj", vec![8, 16]),
            ("self_attn.o_proj", vec![16, 16]),
            ("mlp.gate_proj", vec![32, 16]),
            ("mlp.up_proj", vec![32, 16]),
            ("mlp.down_proj", vec![16, 32]),
            ("input_layernorm", vec![16]),
            ("post_attention_layernorm", vec![16]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    all
}

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "vocab_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": false,
    })
}

fn changed(changes: &Value) -> Value {
    let mut config = config();
    let all = config.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        all.insert(name.clone(), value.clone());
    }
    config
}

struct Models(tempfile::TempDir);

impl Models {
    /// Converts weights with a configuration, and returns the arguments.
    fn convert(&self, tensors: &Tensors, config: &Value) -> crate::support::Run {
        let at = |name: &str| path(&self.0, name);
        fs::create_dir_all(at("config")).unwrap();
        fs::write(at("config/config.json"), config.to_string()).unwrap();
        let all: Vec<_> =
            tensors.iter().map(|(name, shape)| (&**name, "F32", 4, &**shape)).collect();
        weights(self.0.path().join("w.safetensors").as_path(), &all, &Value::Null);
        let _ = fs::remove_dir_all(at("out"));
        dcp([
            "-q",
            "convert",
            &at("w.safetensors"),
            &at("out"),
            "--to=hf",
            "--config",
            &at("config"),
        ])
    }

    fn refused(&self, tensors: &Tensors, config: &Value, texts: &[&str]) {
        self.convert(tensors, config).fails(2, texts);
        assert!(!self.0.path().join("out").exists(), "{config}");
    }
}

#[test]
fn a_configuration_that_contradicts_the_shapes_is_refused() {
    let models = Models(tempfile::tempdir().unwrap());
    models.convert(&llama(), &config()).ok();
    models.convert(&llama(), &changed(&json!({"head_dim": 4}))).ok();
    for (changes, texts) in [
        (json!({"hidden_size": 32}), ["hidden_size 32", "has 16 on its axis"]),
        (json!({"intermediate_size": 64}), ["intermediate_size 64", "has 32 on its axis 0"]),
        (
            json!({"vocab_size": 48}),
            ["vocab_size 48", "embed_tokens.weight\" has 40 on its axis 0"],
        ),
        (json!({"vocab_size": 32}), ["vocab_size 32", "has 40 on its axis 0"]),
        (json!({"num_hidden_layers": 3}), ["num_hidden_layers 3", "the tensors have 2 layers"]),
        (json!({"num_hidden_layers": 1}), ["num_hidden_layers 1", "the tensors have 2 layers"]),
        (json!({"num_attention_heads": 8}), ["num_key_value_heads * head_dim 4", "has 8"]),
        (json!({"num_key_value_heads": 4}), ["num_key_value_heads * head_dim 16", "has 8"]),
        (json!({"num_key_value_heads": null}), ["num_key_value_heads * head_dim 16", "has 8"]),
        (json!({"head_dim": 8}), ["num_attention_heads * head_dim 32", "has 16"]),
        (json!({"attention_bias": true}), ["attention_bias true", "no bias beside"]),
        (json!({"mlp_bias": true}), ["mlp_bias true", "no bias beside"]),
        (json!({"model_type": "qwen2"}), ["model_type \"qwen2\"", "no bias beside"]),
        (json!({"model_type": "mixtral"}), ["model_type \"mixtral\"", "no experts"]),
        (json!({"num_attention_heads": 0}), ["num_attention_heads 0", "at least one head"]),
        (json!({"num_key_value_heads": 0}), ["num_key_value_heads 0", "at least one head"]),
    ] {
        models.refused(&llama(), &changed(&changes), &texts);
    }
}

#[test]
fn a_setting_of_another_type_and_a_missing_size_are_refused() {
    let models = Models(tempfile::tempdir().unwrap());
    for (changes, texts) in [
        (
            json!({"num_hidden_layers": "2"}),
            ["num_hidden_layers \"2\"", "number is needed, not text"],
        ),
        (json!({"num_hidden_layers": {}}), ["num_hidden_layers {}", "not an object"]),
        (json!({"num_hidden_layers": null}), ["num_hidden_layers null", "not null"]),
        (json!({"num_hidden_layers": [2]}), ["num_hidden_layers [2]", "not a list"]),
        (
            json!({"hidden_size": 16.5}),
            ["hidden_size 16.5", "not a number with a sign or a fraction"],
        ),
        (json!({"vocab_size": true}), ["vocab_size true", "not true or false"]),
        (json!({"num_attention_heads": "4"}), ["num_attention_heads \"4\"", "not text"]),
        (json!({"num_key_value_heads": {}}), ["num_key_value_heads {}", "not an object"]),
        (json!({"head_dim": "4"}), ["head_dim \"4\"", "not text"]),
        (
            json!({"tie_word_embeddings": "no"}),
            ["tie_word_embeddings \"no\"", "true or false is needed"],
        ),
        (json!({"attention_bias": 1}), ["attention_bias 1", "true or false is needed"]),
    ] {
        models.refused(&llama(), &changed(&changes), &texts);
    }
    for (setting, said) in [
        ("hidden_size", "has 16 on its axis"),
        ("intermediate_size", "has 32 on its axis 0"),
        ("vocab_size", "has 40 on its axis 0"),
        ("num_hidden_layers", "the tensors have 2 layers"),
    ] {
        let mut config = config();
        config.as_object_mut().unwrap().remove(setting);
        models.refused(&llama(), &config, &[&format!("config.json has no {setting}"), said]);
    }
    // Numbers that follow from others may be missing, or null.
    models.convert(&llama(), &changed(&json!({"head_dim": null}))).ok();
}

/// The names of the tensors alone decide, and not the format of the source.
#[test]
fn a_configuration_that_contradicts_a_checkpoint_of_pytorch_is_refused() {
    let models = Models(tempfile::tempdir().unwrap());
    models.convert(&llama(), &config()).ok();
    let (hf, source) = (path(&models.0, "out"), path(&models.0, "dcp"));
    dcp(["convert", "-q", &hf, &source, "--to", "dcp"]).ok();
    let (config, out) = (path(&models.0, "config"), path(&models.0, "from-dcp"));
    let convert = ["-q", "convert", &source, &out, "--to", "hf", "--config", &config];
    dcp(convert).ok();
    fs::remove_dir_all(&out).unwrap();
    for (changes, said) in [
        (json!({"num_hidden_layers": 3}), "num_hidden_layers 3"),
        (json!({"intermediate_size": 64}), "intermediate_size 64"),
        (json!({"num_hidden_layers": "2"}), "not text"),
    ] {
        fs::write(models.0.path().join("config/config.json"), changed(&changes).to_string())
            .unwrap();
        dcp(convert).fails(2, &[said]);
        assert!(!models.0.path().join("from-dcp").exists());
    }
    // Beside the index, it is copied.
    fs::write(
        models.0.path().join("dcp/config.json"),
        changed(&json!({"intermediate_size": 64})).to_string(),
    )
    .unwrap();
    let run = dcp(["convert", &source, &out, "--to", "hf"]);
    let is_there = models.0.path().join("from-dcp/config.json").exists();
    assert_eq!(run.stderr.contains("intermediate_size 64"), is_there, "{}", run.stderr);
}

#[test]
fn output_weights_that_a_configuration_ties_to_others_are_refused() {
    let models = Models(tempfile::tempdir().unwrap());
    let without = |removed: &str| -> Tensors {
        llama().into_iter().filter(|(name, _)| name != removed).collect()
    };
    let tied = changed(&json!({"tie_word_embeddings": true}));
    let mut other = without("lm_head.weight");
    models.convert(&other, &tied).ok();
    models.refused(&other, &config(), &["tie_word_embeddings false", "no \"lm_head.weight\""]);
    let classes = json!({"architectures": ["LlamaModel"]});
    models.convert(&other, &changed(&classes)).ok();
    other.push(("lm_head.weight".to_owned(), vec![44, 16]));
    models.refused(&other, &tied, &["vocab_size 40", "\"lm_head.weight\" has 44"]);
    // A layer in the middle is missing.
    let mut gap = without("");
    for (name, _) in &mut gap {
        *name = name.replace("layers.1.", "layers.2.");
    }
    let three = changed(&json!({"num_hidden_layers": 3}));
    models.refused(&gap, &three, &["num_hidden_layers 3", "2 layers, the last", "number 2"]);
    // Weights that were packed have other shapes.
    let packed =
        json!({"hidden_size": 32, "quantization_config": {"quant_method": "bitsandbytes"}});
    models.convert(&llama(), &changed(&packed)).ok();
}

#[test]
fn a_configuration_of_another_family_is_named_as_that() {
    let models = Models(tempfile::tempdir().unwrap());
    let gpt2 = json!({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "vocab_size": 40,
                      "n_head": 4, "n_positions": 8});
    models.refused(
        &llama(),
        &gpt2,
        &["no tensor but \"lm_head.weight\" has a name of that family"],
    );
    let mut weights: Tensors = vec![
        ("transformer.wte.weight".to_owned(), vec![40, 16]),
        ("transformer.wpe.weight".to_owned(), vec![8, 16]),
        ("transformer.h.0.attn.c_attn.weight".to_owned(), vec![16, 48]),
        ("transformer.h.0.mlp.c_fc.weight".to_owned(), vec![16, 64]),
    ];
    models.convert(&weights, &gpt2).ok();
    weights[1].1 = vec![16, 16];
    models.refused(&weights, &gpt2, &["n_positions 8", "wpe.weight\" has 16"]);
}

/// Families share most names and shapes.
#[test]
fn a_configuration_of_a_family_with_other_tensors_is_refused() {
    let models = Models(tempfile::tempdir().unwrap());
    let of = |name: &str| changed(&json!({"model_type": name, "head_dim": 4}));
    for (family, missing) in [
        ("qwen3_moe", "no \"model.layers.0.self_attn.q_norm.weight\", which Qwen3-MoE has"),
        ("qwen3", "no \"model.layers.0.self_attn.q_norm.weight\", which Qwen3 has"),
        ("phi3", "no \"model.layers.0.self_attn.qkv_proj.weight\", which Phi-3 and 4 has"),
    ] {
        models.refused(&llama(), &of(family), &[&format!("model_type \"{family}\""), missing]);
    }
    models.convert(&llama(), &of("mistral")).ok();
    let mut qwen3 = llama();
    for (layer, name) in [(0, "q_norm"), (0, "k_norm"), (1, "q_norm"), (1, "k_norm")] {
        qwen3.push((format!("model.layers.{layer}.self_attn.{name}.weight"), vec![4]));
    }
    models.convert(&qwen3, &of("qwen3")).ok();
    models.refused(&qwen3, &of("qwen3_moe"), &["no experts, which Qwen3-MoE has"]);
    models
        .convert(
            &qwen3,
            &changed(&json!({"model_type": "qwen3_moe", "head_dim": 4, "num_experts": 0})),
        )
        .ok();
    models.refused(&qwen3, &of("llama"), &["q_norm.weight\" is a tensor of Qwen3", "no place"]);
    // Of one layer, nothing is missing, but there may be too much.
    let layer = |all: &Tensors| -> Tensors {
        all.iter().filter(|(name, _)| name.contains("layers.1.")).cloned().collect()
    };
    models.convert(&layer(&llama()), &of("qwen3")).ok();
    models.refused(&layer(&qwen3), &of("llama"), &["is a tensor of Qwen3"]);
    // Fused and split projections.
    let mut fused = llama();
    fused.retain(|(name, _)| !["q_proj", "k_proj", "v_proj"].iter().any(|one| name.contains(one)));
    for layer in 0..2 {
        fused.push((format!("model.layers.{layer}.self_attn.qkv_proj.weight"), vec![32, 16]));
    }
    models.refused(&fused, &of("llama"), &["no \"model.layers.0.self_attn.q_proj.weight\""]);
    // A tensor that no family has may be a head of the user's own.
    let mut more = llama();
    more.push(("value_head.weight".to_owned(), vec![1, 16]));
    models.convert(&more, &of("llama")).ok();
}

#[test]
fn a_configuration_of_the_source_that_contradicts_its_weights_is_named_in_a_note() {
    let models = Models(tempfile::tempdir().unwrap());
    let (source, out) = (models.0.path().join("source"), path(&models.0, "copy"));
    fs::create_dir(&source).unwrap();
    let all = llama();
    let all: Vec<_> = all.iter().map(|(name, shape)| (&**name, "F32", 4, &**shape)).collect();
    weights(&source.join("model.safetensors"), &all, &Value::Null);
    for (changes, said) in [
        (json!({}), None),
        (json!({"intermediate_size": 64}), Some(["intermediate_size 64", "has 32 on its axis 0"])),
        (json!({"model_type": "qwen3", "head_dim": 4}), Some(["model_type \"qwen3\"", "q_norm"])),
    ] {
        fs::write(source.join("config.json"), changed(&changes).to_string()).unwrap();
        let run =
            dcp(["convert", &source.display().to_string(), &out, "--to", "hf", "--overwrite"]);
        let has_note = run.stderr.contains("it is copied as it is, and --config");
        assert_eq!(has_note, said.is_some(), "{changes}: {}", run.stderr);
        assert!(said.iter().flatten().all(|said| run.stderr.contains(said)), "{}", run.stderr);
        run.ok();
    }
}
