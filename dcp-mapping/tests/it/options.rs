//! What options change.

use dcp_core::DType;
use dcp_mapping::{
    Facts, LayerForm, LayerSpec, MapOptions, Mapped, Mapping, MappingError, Padding, Tying,
    recognize_config,
};

use crate::model::Model;
use crate::support::{Tensor, Tensors, block_on, contents, safetensors, to_hf_of, to_megatron_of};

fn to_megatron(model: &Model, hf: &Tensors, options: &MapOptions) -> Result<Mapped, MappingError> {
    let mapping = recognize_config(&model.config()).unwrap();
    let facts = mapping.facts_of_config(&model.config()).unwrap();
    to_megatron_of(&safetensors(hf), &mapping, &facts, options)
}

fn to_hf(model: &Model, tensors: &Tensors, facts: &Facts, options: &MapOptions) -> Mapped {
    let mapping = Mapping::builtin(model.family).unwrap();
    to_hf_of(&safetensors(tensors), &mapping, facts, options).unwrap()
}

fn options(change: impl FnOnce(&mut MapOptions)) -> MapOptions {
    let mut options = MapOptions::default();
    change(&mut options);
    options
}

#[test]
fn names_of_layers_and_norms() {
    let model = Model { experts: 3, expert_ffn: 7, ..Model::dense("mixtral") };
    let hf = model.tensors();
    let has = |options: &MapOptions, name: &str| {
        let mapped = to_megatron(&model, &hf, options).unwrap();
        mapped.report.created.iter().any(|created| created == name)
    };
    assert!(has(&options(|_| ()), "decoder.layers.pre_mlp_layernorm.weight"));
    let local = options(|o| o.spec = LayerSpec::Local);
    assert!(has(&local, "decoder.layers.mlp.linear_fc1.layer_norm_weight"));
    let apart = options(|o| o.layers = LayerForm::PerLayer);
    assert!(has(&apart, "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"));
    let mixed = Model { qk_norm: true, dense_layers: 2, family: "qwen3_moe", ..model.clone() };
    let stacked = options(|o| o.layers = LayerForm::Stacked);
    let error = to_megatron(&mixed, &mixed.tensors(), &stacked).unwrap_err();
    assert!(error.to_string().contains("1 of 3 layers have experts"), "{error}");
}

#[test]
fn local_layers_with_latent_attention_fuse_no_norm() {
    let family = |model: &&Model| model.family == "deepseek_v3" && model.dense_layers == 1;
    let model = Model::all().into_iter().find(|model| family(&model)).unwrap();
    let spec = options(|o| o.spec = LayerSpec::Local);
    let created = to_megatron(&model, &model.tensors(), &spec).unwrap().report.created;
    let norms: Vec<_> = created.iter().filter(|name| name.contains("norm")).collect();
    for layer in ["0", "1"] {
        for norm in ["input_layernorm", "self_attention.q_layernorm", "self_attention.kv_layernorm"]
        {
            let name = format!("decoder.layers.{layer}.{norm}.weight");
            assert!(norms.contains(&&name), "{name}: {norms:?}");
        }
        let name = format!("decoder.layers.{layer}.pre_mlp_layernorm.weight");
        assert!(norms.contains(&&name), "{name}: {norms:?}");
    }
    assert_eq!(norms.len(), 3 * 4 + 1, "{norms:?}");
}

#[test]
fn embeddings_are_tied_and_untied() {
    let model = Model::dense("llama");
    let hf = model.tensors();
    let tied = to_megatron(&model, &hf, &options(|o| o.tying = Tying::Tie)).unwrap();
    assert!(tied.report.tied);
    assert_eq!(tied.report.dropped, ["lm_head.weight".into()]);
    let megatron = contents(&tied.source);
    assert!(!megatron.contains_key("output_layer.weight"));
    let back = to_hf(&model, &megatron, &tied.facts, &MapOptions::default());
    assert!(!contents(&back.source).contains_key("lm_head.weight"));
    let back = to_hf(&model, &megatron, &tied.facts, &options(|o| o.tying = Tying::Untie));
    let untied = contents(&back.source);
    assert_eq!(untied["lm_head.weight"], hf["model.embed_tokens.weight"]);
    assert!(!back.report.tied && back.report.notes.len() == 1, "{:?}", back.report.notes);
    let config = Mapping::builtin("llama").unwrap().config_json(&back.facts).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    // A head that the configuration says nobody looks at.
    let model = Model { tied: true, ..model };
    let mapped = to_megatron(&model, &hf, &MapOptions::default()).unwrap();
    assert!(mapped.report.tied && mapped.report.notes[0].contains("lm_head"));
}

#[test]
fn an_output_embedding_of_another_shape_is_refused() {
    let model = Model::dense("llama");
    let mut hf = model.tensors();
    let other = hf["model.layers.0.mlp.up_proj.weight"].clone();
    assert_ne!(other.shape, hf["lm_head.weight"].shape);
    hf.insert("lm_head.weight".into(), other);
    let error = to_megatron(&model, &hf, &MapOptions::default()).unwrap_err().to_string();
    assert!(error.contains("vocab_size") && error.contains("has shape ["), "{error}");
}

#[test]
fn vocabularies_are_padded_as_megatron_does_it() {
    let model = Model::dense("llama");
    let mapping = Mapping::builtin("llama").unwrap();
    let facts = mapping.facts_of_config(&model.config()).unwrap();
    let source = safetensors(&model.tensors());
    let rows = |padding| {
        let facts = facts.clone().with_padding(padding);
        let mapped = to_megatron_of(&source, &mapping, &facts, &MapOptions::default());
        let mapped = mapped?;
        assert_eq!(mapped.facts.get("vocab_size"), Some(&11.into()));
        let padded = mapped.facts.get("padded_vocab_size").unwrap().as_u64().unwrap();
        assert_eq!(contents(&mapped.source)["output_layer.weight"].shape, [padded as usize, 8]);
        Ok::<_, MappingError>(padded)
    };
    assert_eq!(rows(Padding::default()).unwrap(), 128);
    assert_eq!(rows(Padding::Multiple { divisor: 4, tensor_parallel: 2 }).unwrap(), 16);
    assert_eq!(rows(Padding::Multiple { divisor: 1, tensor_parallel: 1 }).unwrap(), 11);
    assert_eq!(rows(Padding::Exactly(13)).unwrap(), 13);
    let error = rows(Padding::Exactly(10)).unwrap_err().to_string();
    assert!(error.contains("more than the padded vocabulary of 10"), "{error}");
    let error = rows(Padding::Multiple { divisor: u64::MAX, tensor_parallel: 2 }).unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

#[test]
fn a_vocabulary_that_is_larger_than_its_embedding() {
    let model = Model::dense("llama");
    let megatron = to_megatron(&model, &model.tensors(), &MapOptions::default()).unwrap();
    let facts = megatron.facts.clone().with("vocab_size", 129);
    let mapping = Mapping::builtin("llama").unwrap();
    let mapped = to_hf_of(&megatron.source, &mapping, &facts, &MapOptions::default());
    let error = mapped.unwrap_err().to_string();
    assert!(error.contains("fewer than the vocabulary of 129"), "{error}");
}

#[test]
fn tensors_are_left_out_when_asked_to_be() {
    let model = Model::dense("llama");
    let mut hf = model.tensors();
    hf.insert("extra.weight".into(), Tensor::new(&[2], |_| 0));
    hf.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::new(&[2], |_| 0));
    let error = to_megatron(&model, &hf, &MapOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "the mapping \"llama\" has no rule for \"extra.weight\"");
    let dropped = to_megatron(&model, &hf, &options(|o| o.drop = vec!["extra.*".into()])).unwrap();
    assert_eq!(dropped.report.dropped.len(), 2);
    let left = to_megatron(&model, &hf, &options(|o| o.allow_left_over = true)).unwrap();
    assert_eq!(left.report.left_over, ["extra.weight".into()]);
}

#[test]
fn experts_in_one_tensor_are_experts() {
    let model = Model { experts: 3, expert_ffn: 7, ..Model::dense("mixtral") };
    let hf = model.tensors();
    let expected = contents(&to_megatron(&model, &hf, &MapOptions::default()).unwrap().source);
    let mut fused = hf.clone();
    fused.retain(|name, _| !name.contains("experts"));
    for layer in 0..model.layers {
        let block = format!("model.layers.{layer}.block_sparse_moe");
        let one =
            |expert: usize, name: &str| &hf[&format!("{block}.experts.{expert}.{name}.weight")];
        let both = Tensor::new(&[3, 14, 8], |at| match at[1].checked_sub(7) {
            None => one(at[0], "w1").at(&at[1..]),
            Some(row) => one(at[0], "w3").at(&[row, at[2]]),
        });
        let down = Tensor::new(&[3, 8, 7], |at| one(at[0], "w2").at(&at[1..]));
        let mlp = format!("model.layers.{layer}.mlp");
        let router = fused.remove(&format!("{block}.gate.weight")).unwrap();
        fused.insert(format!("{mlp}.gate.weight"), router);
        fused.insert(format!("{mlp}.experts.gate_up_proj"), both);
        fused.insert(format!("{mlp}.experts.down_proj"), down);
    }
    let mapped = to_megatron(&model, &fused, &MapOptions::default()).unwrap();
    assert!(contents(&mapped.source) == expected);
}

#[test]
fn wrappers_in_front_of_names_are_seen_through() {
    for (model, from, to) in
        [(Model::dense("llama"), "", "module."), (Model::dense("llama"), "", "model.module.")]
    {
        let hf = model.tensors();
        let mapped = to_megatron(&model, &hf, &MapOptions::default()).unwrap();
        let megatron = contents(&mapped.source).into_iter();
        let wrapped = megatron.map(|(k, t)| (format!("{to}{}", k.strip_prefix(from).unwrap()), t));
        let back = to_hf(&model, &wrapped.collect(), &mapped.facts, &MapOptions::default());
        assert!(contents(&back.source) == hf);
    }
    let model = Model::all().pop().unwrap();
    assert_eq!(model.family, "gpt2");
    let hf = model.tensors();
    let bare = hf.iter().map(|(k, t)| (k.replace("transformer.", ""), t.clone())).collect();
    let expected = to_megatron(&model, &hf, &MapOptions::default()).unwrap();
    let found = to_megatron(&model, &bare, &MapOptions::default()).unwrap();
    assert!(contents(&found.source) == contents(&expected.source));
}

#[test]
fn sizes_and_dtypes_of_ones_own() {
    let toml = r#"
        [family]
        name = "mine"
        [[rule]]
        hf = ["q", "kv", "rope"]
        megatron = "down"
        op = "concat"
        axis = 1
        sizes = ["q_lora_rank", "2*kv_lora_rank", "rest"]
        [[rule]]
        hf = "bias"
        megatron = "expert_bias"
        megatron_dtype = "bfloat16"
        hf_dtype = "float64"
    "#;
    let mapping = Mapping::parse(toml, "mine.toml").unwrap();
    let facts = Facts::new().with("q_lora_rank", 1).with("kv_lora_rank", 2);
    let tensors: Tensors = [
        ("down".to_owned(), Tensor::new(&[2, 6], |at| (at[0] * 6 + at[1]) as u32)),
        ("expert_bias".to_owned(), Tensor::new(&[2], |_| 1.5_f32.to_bits())),
    ]
    .into();
    let source = safetensors(&tensors);
    let map = |facts: &Facts| to_hf_of(&source, &mapping, facts, &MapOptions::default());
    let mapped = map(&facts).unwrap();
    let metadata = block_on(mapped.source.metadata()).unwrap();
    let shape = |name: &str| metadata.get(name).unwrap().as_tensor().unwrap().shape.to_vec();
    assert_eq!([shape("q"), shape("kv"), shape("rope")], [[2, 1], [2, 4], [2, 1]]);
    assert_eq!(metadata.get("bias").unwrap().as_tensor().unwrap().dtype, DType::Float64);
    let error = map(&facts.clone().with("kv_lora_rank", 3)).unwrap_err().to_string();
    assert!(error.contains("6 rows are not 1 + 6 + rest"), "{error}");
    let error = map(&Facts::new()).unwrap_err().to_string();
    assert!(error.contains("needs q_lora_rank"), "{error}");
    // The other way the parts have to be as long.
    let back = |facts: &Facts| {
        to_megatron_of(&mapped.source, &mapping, facts, &MapOptions::default()).map(|_| ())
    };
    back(&facts).unwrap();
    let error = back(&facts.clone().with("kv_lora_rank", 1)).unwrap_err().to_string();
    assert!(error.contains("[1, 4, 1] along axis 1, not [1, 2, 3]"), "{error}");
}

#[test]
fn a_configuration_that_is_there_tells_what_arguments_do_not() {
    let model = Model::dense("llama");
    let mapping = Mapping::builtin("llama").unwrap();
    let megatron = to_megatron(&model, &model.tensors(), &MapOptions::default()).unwrap();
    let mut args = megatron.facts.clone();
    // As it is in runs whose tokenizer has the size.
    args.set("vocab_size", serde_json::Value::Null);
    let config = mapping.facts_of_config(&model.config()).unwrap();
    let map = |facts: &Facts| {
        to_hf_of(&megatron.source, &mapping, facts, &MapOptions::default()).unwrap()
    };
    let padded = map(&args);
    assert!(padded.report.trimmed.is_empty() && padded.report.notes[0].contains("vocab_size"));
    let facts = args.clone().described_by(&config).unwrap();
    assert!(contents(&map(&facts).source) == model.tensors());
    for (name, value) in [
        ("num_layers", serde_json::json!(4)),
        ("num_query_groups", serde_json::json!(1)),
        ("untie_embeddings_and_output_weights", serde_json::json!(false)),
        ("rotary_base", serde_json::json!(5e5)),
        ("layernorm_epsilon", serde_json::json!(1e-5)),
        ("ffn_hidden_size", serde_json::json!(99)),
        ("kv_channels", serde_json::json!(2)),
    ] {
        let other = config.clone().with(name, value);
        let error = args.clone().described_by(&other).unwrap_err().to_string();
        assert!(error.starts_with(name) && error.contains("another model"), "{error}");
    }
    // Numbers are the same however they are written; training may have been on shorter texts.
    let args = args.with("rotary_base", 10_000).with("seq_length", 4).with("vocab_size", 11);
    args.clone().described_by(&config).unwrap();
    let error = args.with("vocab_size", 12).described_by(&config).unwrap_err().to_string();
    assert!(error.starts_with("vocab_size is 12") && error.contains("11"), "{error}");
    // Shapes fill in for missing arguments.
    let facts = Facts::new().described_by(&config.clone().with("ffn_hidden_size", 99)).unwrap();
    let mapped = to_hf_of(&megatron.source, &mapping, &facts, &MapOptions::default());
    let error = mapped.unwrap_err().to_string();
    assert!(error.starts_with("ffn_hidden_size is 99") && error.contains("has 5"), "{error}");
}

#[test]
fn a_vocabulary_is_trimmed_only_where_padding_explains_its_rows() {
    let model = Model::dense("llama");
    let mapping = Mapping::builtin("llama").unwrap();
    let megatron = to_megatron(&model, &model.tensors(), &MapOptions::default()).unwrap();
    let rows = |facts: &Facts| {
        let mapped = to_hf_of(&megatron.source, &mapping, facts, &MapOptions::default()).unwrap();
        let rows = contents(&mapped.source)["lm_head.weight"].shape[0];
        assert_eq!(mapping.config_json(&mapped.facts).unwrap()["vocab_size"], rows);
        let kept = mapped.report.notes.iter().any(|note| note.contains("keeps all its rows"));
        assert_eq!(kept, rows == 128, "{:?}", mapped.report.notes);
        rows
    };
    let args = megatron.facts.clone().with("make_vocab_size_divisible_by", 64);
    assert_eq!(rows(&args), 128, "11 tokens would have been padded to 64 rows");
    assert_eq!(rows(&args.clone().with("tensor_model_parallel_size", 2)), 11);
    assert_eq!(rows(&args.clone().with("vocab_size", 65)), 65);
    assert_eq!(rows(&args.clone().with("vocab_size", 1000)), 128);
    let config = mapping.facts_of_config(&model.config()).unwrap();
    assert_eq!(rows(&args.described_by(&config).unwrap()), 11);
}

#[test]
fn trap_07_padding_of_the_vocabulary_is_left_out_whatever_is_in_it() {
    let model = Model::dense("llama");
    let mapped = to_megatron(&model, &model.tensors(), &MapOptions::default()).unwrap();
    let mut megatron = contents(&mapped.source);
    let names = ["embedding.word_embeddings.weight", "output_layer.weight"];
    for name in names {
        // What training leaves in rows that no token has.
        let rows = megatron.get_mut(name).unwrap();
        let garbage =
            |row: usize, at: usize| if row < 11 { rows.elements[at] } else { 0x7fc0_beef };
        let elements = (0..128 * 8).map(|at| garbage(at / 8, at)).collect();
        *rows = Tensor { shape: vec![128, 8], elements };
    }
    let back = to_hf(&model, &megatron, &mapped.facts, &MapOptions::default());
    assert!(contents(&back.source) == model.tensors());
    assert_eq!(back.report.trimmed.len(), 2);
    assert!(back.report.trimmed.iter().all(|(_, rows)| *rows == 117));
    // And what is added is zero.
    let again =
        contents(&to_megatron(&model, &model.tensors(), &MapOptions::default()).unwrap().source);
    assert!(names.iter().all(|name| again[*name].elements[11 * 8..].iter().all(|e| *e == 0)));
}
