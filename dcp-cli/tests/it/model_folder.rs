//! What a Hugging Face model consists of besides its listed weights, and what a cast leaves.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::megatron::megatron;
use crate::support::{Run, dcp, path};

/// Writes a safetensors file of tensors of zeros: name, dtype, bytes of an element, shape.
pub(crate) fn weights(file: &Path, tensors: &[(&str, &str, usize, &[usize])], texts: &Value) {
    let mut header = serde_json::Map::new();
    if !texts.is_null() || file.ends_with("null.safetensors") {
        header.insert("__metadata__".to_owned(), texts.clone());
    }
    let mut end = 0;
    for (name, dtype, size, shape) in tensors {
        let len = shape.iter().product::<usize>() * size;
        header.insert(
            (*name).to_owned(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + len]}),
        );
        end += len;
    }
    let header = Value::Object(header).to_string();
    let len = (header.len() as u64).to_le_bytes();
    fs::write(file, [&len[..], header.as_bytes(), &vec![0; end]].concat()).unwrap();
}

pub(crate) fn dtypes(checkpoint: &str) -> BTreeMap<String, String> {
    let all = dcp(["inspect", checkpoint, "--json"]).json();
    let keys = all["keys"].as_object().unwrap().iter();
    let dtype = |key: &Value| key["dtype"].as_str().unwrap_or_default().to_owned();
    keys.map(|(name, key)| (name.clone(), dtype(key))).collect()
}

fn said(run: &Run, text: &str) {
    assert!(run.code == 0 && run.stderr.contains(text), "{text:?} is not in\n{}", run.stderr);
}

/// `git clone` without `git lfs pull` leaves pointers in place of large files, tokenizers among them.
#[test]
fn a_tokenizer_that_was_not_fetched_is_named_and_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let (from, target) = (at("model"), at("target"));
    fs::create_dir(&from).unwrap();
    weights(&folder.path().join("model/model.safetensors"), &[("w", "F32", 4, &[2])], &Value::Null);
    fs::write(at("model/config.json"), "{}").unwrap();
    let file = at("model/model.safetensors");
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{:064}\nsize 12345\n", 1);
    for name in ["tokenizer.json", "tokenizer.model", "tekken.json", "merges.txt"] {
        fs::write(at(&format!("model/{name}")), &pointer).unwrap();
        let run = dcp(["verify", "--deep", &from, "--json"]);
        let notes = run.json()["notes"].to_string();
        assert!(notes.contains(name) && notes.contains("git lfs pull"), "{notes}");
        let arguments: [&[&str]; 4] = [
            &["convert", &from, &target, "--to=hf"],
            &["convert", &from, &target, "--to=hf", "--dry-run"],
            &["convert", &file, &target, "--to=hf", "--config", &from],
            &["average", &from, &from, "--out", &target, "--to=hf"],
        ];
        for arguments in arguments {
            dcp([&["-q"], arguments].concat()).fails(1, &[name, "git lfs pull"]);
            assert!(!folder.path().join("target").exists(), "{arguments:?}");
        }
        // Weights are as sound as they were.
        dcp(["verify", &from]).ok();
        dcp(["convert", &from, &at("w.safetensors"), "--overwrite"]).ok();
        fs::remove_file(at(&format!("model/{name}"))).unwrap();
    }
    dcp(["convert", &from, &target, "--to=hf"]).ok();
}

#[test]
fn everything_but_weights_and_state_goes_with_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let files = [
        "config.json",
        "tokenizer.json",
        "hf_quant_config.json",
        "sentencepiece.bpe.model",
        "source.spm",
        "tekken.json",
        "qwen.tiktoken",
        "video_preprocessor_config.json",
        "adapter_config.json",
        "modeling_x.py",
        "1_Pooling/config.json",
        "additional_chat_templates/a.jinja",
    ];
    let left = [
        "optimizer.pt",
        "trainer_state.json",
        "training_args.bin",
        "rng_state_0.pth",
        "other.safetensors.index.fp16.json",
        "onnx/model.onnx",
        ".gitattributes",
    ];
    for name in files.iter().chain(&left) {
        let file = folder.path().join("model").join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "{}").unwrap();
    }
    let model = folder.path().join("model/model.safetensors");
    weights(&model, &[("w", "F32", 4, &[2])], &Value::Null);
    let (from, copy, of_config) = (at("model"), at("copy"), at("of_config"));
    let run = dcp(["convert", &from, &copy, "--to=hf"]);
    for name in ["modeling_x.py", "1_Pooling/config.json"] {
        said(&run, name);
    }
    said(&run, "not copying onnx/, optimizer.pt, ");
    let run = dcp(["convert", &from, &at("dcp"), "--to=dcp"]);
    said(
        &run,
        "not converting optimizer.pt, rng_state_0.pth, trainer_state.json, training_args.bin: ",
    );
    let file = format!("{from}/model.safetensors");
    for config in [from.clone(), format!("{from}/config.json")] {
        dcp(["convert", &file, &of_config, "--to=hf", "--overwrite", "--config", &config]).ok();
    }
    for made in ["copy", "of_config"] {
        for name in files {
            assert!(folder.path().join(made).join(name).is_file(), "{made} {name}");
        }
        for name in left {
            assert!(!folder.path().join(made).join(name).exists(), "{made} {name}");
        }
    }
    dcp(["convert", &file, &at("x"), "--to=hf", "--config", &file]).fails(2, &["is a file"]);
}

/// transformers opens no model without one.
#[test]
fn a_model_without_a_configuration_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let note = "there is no config.json";
    said(&dcp(["convert", "t21_plain", &at("a"), "--to=hf"]), note);
    said(&dcp(["average", "t21_plain", "t21_plain", "--to=hf", "--out", &at("b")]), note);
    fs::create_dir(at("config")).unwrap();
    fs::write(at("config/config.json"), "{}").unwrap();
    let (out, config) = (at("c"), at("config"));
    let run = dcp(["convert", "t21_plain", &out, "--to=hf", "--config", &config]);
    assert!(run.code == 0 && !run.stderr.contains(note), "{}", run.stderr);
}

#[test]
fn the_configuration_says_the_dtype_of_a_cast() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("a"), folder.path().join("b"));
    fs::create_dir(&from).unwrap();
    weights(&from.join("model.safetensors"), &[("w", "F32", 4, &[2])], &Value::Null);
    fs::write(from.join("config.json"), r#"{"torch_dtype":"float32"}"#).unwrap();
    dcp(["convert", &path(&folder, "a"), &path(&folder, "b"), "--to=hf", "--dtype=bf16"]).ok();
    let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
}

#[test]
fn a_tensor_that_the_index_does_not_list_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    fs::create_dir(at("m")).unwrap();
    let name = "model-00001-of-00001.safetensors";
    let two: [(&str, &str, usize, &[usize]); 2] = [("a", "F32", 4, &[2]), ("b", "F32", 4, &[2])];
    weights(&folder.path().join("m").join(name), &two, &Value::Null);
    let index = json!({"metadata": {}, "weight_map": {"b": name}}).to_string();
    fs::write(folder.path().join("m/model.safetensors.index.json"), index).unwrap();
    dcp(["convert", &at("m"), &at("o.safetensors")]).ok();
    assert_eq!(dtypes(&at("o.safetensors")).len(), 2);
    let report = dcp(["verify", &at("m"), "--json"]).json();
    let note = report["notes"][0].as_str().unwrap();
    assert!(note.starts_with("1 tensor that the index does not name"), "{note}");
}

/// `save_pretrained(variant="fp16")` writes such names.
#[test]
fn a_folder_of_one_variant_is_its_model() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    fs::create_dir(at("m")).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 1..=2 {
        let name = format!("model.fp16-0000{shard}-of-00002.safetensors");
        let tensor = format!("w{shard}");
        weights(&folder.path().join("m").join(&name), &[(&tensor, "F16", 2, &[2])], &Value::Null);
        map.insert(tensor, name.into());
    }
    let index = json!({"metadata": {"total_size": 8}, "weight_map": map}).to_string();
    fs::write(folder.path().join("m/model.safetensors.index.fp16.json"), index).unwrap();
    let report = dcp(["verify", &at("m"), "--json"]).json();
    assert_eq!((&report["ok"], &report["notes"]), (&json!(true), &json!([])));
    dcp(["convert", &at("m"), &at("o.safetensors")]).ok();
    assert_eq!(dtypes(&at("o.safetensors")).len(), 2);
}

#[test]
fn the_texts_of_a_safetensors_file_are_copied() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let texts = json!({"format": "pt", "ss_network_dim": "32", "modelspec.title": "x"});
    weights(&folder.path().join("a.safetensors"), &[("w", "F32", 4, &[2])], &texts);
    dcp(["convert", &at("a.safetensors"), &at("b.safetensors"), "--dtype=bf16"]).ok();
    dcp(["convert", &at("a.safetensors"), &at("c"), "--to=hf", "--rename=s/w/v/"]).ok();
    for file in ["b.safetensors", "c/model.safetensors"] {
        let bytes = fs::read(folder.path().join(file)).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        assert_eq!(header["__metadata__"], texts, "{file}");
    }
    weights(&folder.path().join("null.safetensors"), &[("w", "F32", 4, &[2])], &Value::Null);
    dcp(["convert", &at("null.safetensors"), &at("d.safetensors")]).ok();
}

#[test]
fn a_cast_leaves_scales_of_any_scheme() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let tensors: [(&str, &str, usize, &[usize]); 10] = [
        ("w.weight", "F8_E4M3", 1, &[4, 4]),
        ("w.weight_scale", "F32", 4, &[]),
        ("w.input_scale", "F32", 4, &[]),
        ("w.bias", "F32", 4, &[4]),
        ("q.weight", "U8", 1, &[8, 1]),
        ("q.weight.absmax", "F32", 4, &[4]),
        ("q.weight.quant_map", "F32", 4, &[16]),
        ("p.weight", "BF16", 2, &[4, 1]),
        ("p.weight.absmax", "F32", 4, &[4]),
        ("layers.0.moe.expert_bias", "F32", 4, &[4]),
    ];
    weights(&folder.path().join("a.safetensors"), &tensors, &Value::Null);
    let convert = ["convert", &at("a.safetensors"), &at("b.safetensors"), "--dtype=f16"];
    dcp(convert).ok();
    let (mut expected, found) = (dtypes(&at("a.safetensors")), dtypes(&at("b.safetensors")));
    expected.insert("w.bias".to_owned(), "float16".to_owned());
    assert_eq!(found, expected);
}

#[test]
fn schemes_that_are_not_read_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let method = |method: &str, format: &str| {
        let config = json!({"quantization_config": {"quant_method": method, "format": format}});
        fs::write(folder.path().join("m/config.json"), config.to_string()).unwrap();
    };
    fs::create_dir(at("m")).unwrap();
    let model = folder.path().join("m/model.safetensors");
    let convert = ["convert", &at("m"), &at("o"), "--to=hf", "--dequantize=bf16"];
    let of_channels: [(&str, &str, usize, &[usize]); 2] =
        [("w.weight", "F8_E4M3", 1, &[4, 4]), ("w.weight_scale", "F32", 4, &[4, 1])];
    weights(&model, &of_channels, &Value::Null);
    method("compressed-tensors", "float-quantized");
    dcp(convert).fails(2, &["w.weight_scale", "compressed-tensors (float-quantized)"]);
    let gptq: [(&str, &str, usize, &[usize]); 2] =
        [("w.qweight", "I32", 4, &[4, 4]), ("w.scales", "F16", 2, &[1, 4])];
    weights(&model, &gptq, &Value::Null);
    fs::write(folder.path().join("m/config.json"), "{}").unwrap();
    dcp(convert).fails(2, &["w.scales", "--dequantize does not read"]);
    weights(&model, &[("w", "F32", 4, &[4])], &Value::Null);
    dcp(convert).fails(2, &["--dequantize finds nothing quantized"]);
    // One scale for all of a weight.
    let whole: [(&str, &str, usize, &[usize]); 2] =
        [("w.weight", "F8_E4M3", 1, &[4, 4]), ("w.weight_scale_inv", "F32", 4, &[])];
    weights(&model, &whole, &Value::Null);
    dcp(convert).ok();
    assert_eq!(dtypes(&at("o")), BTreeMap::from([("w.weight".into(), "bfloat16".into())]));
}

/// transformers opens a folder without any of its names with random weights.
#[test]
fn names_of_another_family_than_the_configuration_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    fs::create_dir(at("config")).unwrap();
    fs::write(folder.path().join("config/config.json"), r#"{"model_type":"llama"}"#).unwrap();
    let (file, config) = (at("a.safetensors"), at("config"));
    let convert = ["convert", &file, &at("o"), "--to=hf", "--overwrite", "--config", &config];
    // A norm has one name in both.
    let titan: [(&str, &str, usize, &[usize]); 3] = [
        ("layers.0.attention.wq.weight", "F32", 4, &[2, 2]),
        ("norm.weight", "F32", 4, &[2]),
        ("tok_embeddings.weight", "F32", 4, &[2]),
    ];
    weights(file.as_ref(), &titan, &Value::Null);
    dcp(convert)
        .fails(2, &["config.json is of Llama", "a name of torchtitan", "--arch torchtitan_llama"]);
    weights(file.as_ref(), &[("h.0.attn.weight", "F32", 4, &[2, 2])], &Value::Null);
    dcp(convert).fails(2, &["config.json is of Llama", "h.0.attn.weight"]);
    for name in ["model.layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight"] {
        weights(file.as_ref(), &[(name, "F32", 4, &[2, 2])], &Value::Null);
        dcp(convert).ok();
    }
}

#[test]
fn options_that_change_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "o");
    let state = "../torch_save/states/app.pt";
    let plain = "all_dtypes";
    for (command, text) in [
        (&["convert", state, &out, "--to=hf", "--optimizer-layout=flat"][..], "--optimizer-layout"),
        (&["convert", plain, &out, "--to=dcp", "--optimizer-layout=flat"], "--optimizer-layout"),
        (
            &["convert", state, &out, "--to=torch-dist", "--config", "."],
            "--config is for a mapping",
        ),
        (&["convert", state, &out, "--to=torch-dist", "--pp=2"], "--pp divides"),
        (&["convert", state, &out, "--to=torch-dist", "--ep=2"], "--ep divides"),
        (
            &["convert", "../megatron/run_torch_dist_dp2", &out, "--to=hf", "--repair-optimizer"],
            "--repair-optimizer is for the optimizer, which is not written",
        ),
        (
            &[
                "average",
                state,
                state,
                "--out",
                &out,
                "--to=dcp",
                "--include=*.param_groups.*",
                "--non-float=first",
            ],
            "the average computes nothing",
        ),
    ] {
        dcp(["-q"].iter().chain(command)).fails(2, &[text]);
        assert!(!folder.path().join("o").exists(), "{command:?}");
    }
}

/// transformers ignores an output embedding that the configuration ties to the input embedding.
#[test]
fn a_tied_output_embedding_of_other_values_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["-q", "convert", &megatron("run_torch_dcp"), &at("hf"), "--to", "hf", "--untie"]).ok();
    let config = folder.path().join("hf/config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["tie_word_embeddings"] = true.into();
    fs::write(&config, json.to_string()).unwrap();
    let to_megatron =
        || dcp(["convert", &at("hf"), &at("megatron"), "--to", "torch-dist", "--overwrite"]);
    // One that is a copy is only left out.
    let run = to_megatron();
    said(&run, "\"lm_head.weight\" is left out");
    assert!(!run.stderr.contains("other values"), "{}", run.stderr);
    let key = &dcp(["inspect", &at("hf"), "--json"]).json()["keys"]["lm_head.weight"];
    let chunk = &key["chunks"][0];
    let file = folder.path().join("hf").join(chunk["file"].as_str().unwrap());
    let mut bytes = fs::read(&file).unwrap();
    bytes[usize::try_from(chunk["byte_offset"].as_u64().unwrap()).unwrap()] ^= 1;
    fs::write(&file, bytes).unwrap();
    let run = to_megatron();
    said(&run, "\"lm_head.weight\", which is left out, has other values than");
    said(&run, "--untie");
}

#[test]
fn what_is_combined_of_models_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    fs::create_dir(at("model")).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::write(folder.path().join("model").join(name), "{}").unwrap();
    }
    weights(&folder.path().join("model/model.safetensors"), &[("w", "F32", 4, &[2])], &Value::Null);
    let model = at("model");
    for command in [&["average"][..], &["merge", "--identical"]] {
        let more = [&*model, &model, "--to", "hf", "--overwrite", "--out"];
        let out = at("out");
        let run = dcp(command.iter().copied().chain(more).chain([&*out]));
        said(&run, "copying config.json, tokenizer.json");
        for name in ["config.json", "tokenizer.json", "model.safetensors"] {
            assert!(folder.path().join("out").join(name).is_file(), "{command:?} {name}");
        }
    }
}

/// The rows of query and key are in another order, so that names alone would make another model.
#[test]
fn a_model_of_torchtitan_becomes_one_of_transformers_and_one_again() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let file = at("titan.safetensors");
    let tensors: [(&str, &str, usize, &[usize]); 12] = [
        ("tok_embeddings.weight", "F32", 4, &[7, 8]),
        ("layers.0.attention.wq.weight", "F32", 4, &[8, 8]),
        ("layers.0.attention.wk.weight", "F32", 4, &[4, 8]),
        ("layers.0.attention.wv.weight", "F32", 4, &[4, 8]),
        ("layers.0.attention.wo.weight", "F32", 4, &[8, 8]),
        ("layers.0.feed_forward.w1.weight", "F32", 4, &[3, 8]),
        ("layers.0.feed_forward.w2.weight", "F32", 4, &[8, 3]),
        ("layers.0.feed_forward.w3.weight", "F32", 4, &[3, 8]),
        ("layers.0.attention_norm.weight", "F32", 4, &[8]),
        ("layers.0.ffn_norm.weight", "F32", 4, &[8]),
        ("norm.weight", "F32", 4, &[8]),
        ("output.weight", "F32", 4, &[7, 8]),
    ];
    weights(file.as_ref(), &tensors, &Value::Null);
    let mut bytes = fs::read(&file).unwrap();
    let data =
        bytes.len() - tensors.iter().map(|t| t.2 * t.3.iter().product::<usize>()).sum::<usize>();
    for (at, element) in bytes[data..].chunks_exact_mut(4).enumerate() {
        element.copy_from_slice(&(at as f32).to_le_bytes());
    }
    fs::write(&file, bytes).unwrap();
    fs::create_dir(at("config")).unwrap();
    let config_fields = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
        "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 7, "rope_theta": 500000.0,
    });
    fs::write(at("config/config.json"), config_fields.to_string()).unwrap();
    let (hf, config) = (at("hf"), at("config"));
    dcp(["convert", &file, &hf, "--to=hf", "--arch=torchtitan_llama"])
        .fails(2, &["a model of torchtitan says nothing about its heads", "pass --config"]);
    let to_hf = ["convert", &file, &hf, "--to=hf", "--arch=torchtitan_llama", "--config", &config];
    said(&dcp(to_hf), "mapped as torchtitan_llama: 12 tensors made of 12");
    let query =
        dcp(["get", &hf, "model.layers.0.self_attn.q_proj.weight", "--slice", ":,0", "--json"])
            .json();
    // Rows of the first head, of which 56 elements are before the first: 0, 2, 1, 3.
    let rows: Vec<_> =
        query["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let first = rows[0];
    assert_eq!(
        rows[..4].iter().map(|row| (row - first) / 8.0).collect::<Vec<_>>(),
        [0.0, 2.0, 1.0, 3.0]
    );
    for (setting, value, said) in [
        ("vocab_size", json!(9), &["vocab_size is 9", "tok_embeddings.weight", "has 7"][..]),
        ("intermediate_size", json!(4), &["intermediate_size is 4", "w1.weight", "has 3"]),
        ("hidden_size", json!(16), &["hidden_size is 16", "has 8"]),
        (
            "num_key_value_heads",
            json!(2),
            &["num_key_value_heads * head_dim is 8", "wk.weight", "has 4"],
        ),
        ("tie_word_embeddings", json!(true), &["tie_word_embeddings", "output.weight"]),
        ("attention_bias", json!(true), &["attention_bias is true", "no biases"]),
        ("mlp_bias", json!(true), &["mlp_bias is true", "no biases"]),
        ("model_type", json!("qwen2"), &["model_type is \"qwen2\""]),
        (
            "architectures",
            json!(["Qwen2ForCausalLM"]),
            &["architectures is [\"Qwen2ForCausalLM\"]"],
        ),
        ("hidden_act", json!("gelu"), &["hidden_act is \"gelu\""]),
        ("num_attention_heads", json!(0), &["num_attention_heads is 0", "whole number from 1"]),
        ("num_attention_heads", json!(-4), &["num_attention_heads is -4"]),
        ("num_attention_heads", json!("2"), &["num_attention_heads is \"2\""]),
        ("num_attention_heads", json!(1_u64 << 62), &["num_attention_heads is", "more heads than"]),
        ("num_key_value_heads", json!(0), &["num_key_value_heads is 0"]),
        ("head_dim", json!(0), &["head_dim is 0", "whole number from 1"]),
    ] {
        let mut changed = config_fields.clone();
        changed[setting] = value;
        fs::write(at("config/config.json"), changed.to_string()).unwrap();
        let failed = dcp([
            "convert",
            &file,
            &at("refused"),
            "--to=hf",
            "--arch=torchtitan_llama",
            "--config",
            &config,
        ]);
        // A setting that contradicts another tensor contradicts the checkpoint.
        let codes = if setting == "tie_word_embeddings" { [1, 2] } else { [2, 2] };
        assert!(codes.contains(&failed.code), "{setting}: {}", failed.stderr);
        let text = failed.stderr.replace("\n  ", " ");
        assert!(said.iter().all(|said| text.contains(said)), "{setting}: {text}");
        assert!(!folder.path().join("refused").exists(), "{setting}");
    }
    let back = at("back");
    said(
        &dcp(["convert", &hf, &back, "--to=dcp", "--arch=torchtitan_llama"]),
        "under torchtitan's names",
    );
    dcp(["diff", &file, &back]).ok();
    dcp(["convert", &hf, &at("x"), "--to=torch-dist", "--arch=torchtitan_llama"])
        .fails(2, &["--arch goes to torchtitan or from there"]);
    assert!(dcp(["arch"]).ok().contains("torchtitan_llama"));
}
