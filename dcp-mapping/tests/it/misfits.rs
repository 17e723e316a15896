//! Checkpoints that do not fit a mapping: which rule, which tensor, which line.

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointMetadata, DType};
use dcp_jobs::Source;
use dcp_mapping::{Facts, MapOptions, Mapping, MappingError, recognize_config};
use serde_json::json;

use crate::model::Model;
use crate::support::{Tensor, Tensors, safetensors, to_hf_of, to_megatron_of};

const MINE: &str = r#"[family]
name = "mine"

[[rule]]
name = "weight"
hf = ["a.{layer}", "b.{layer}"]
megatron = "w.{layer}.x"
op = "concat"

[[rule]]
hf = "n.{layer}"
megatron = "n.{layer}.x"
also = ["m.{layer}.x"]
transpose = true
"#;

fn zeros(shapes: &[(&str, &[usize])]) -> Source {
    let tensors =
        shapes.iter().map(|(name, shape)| ((*name).to_owned(), Tensor::new(shape, |_| 0)));
    safetensors(&tensors.collect())
}

fn mine(to_hf: bool, shapes: &[(&str, &[usize])]) -> Result<(), MappingError> {
    let mapping = Mapping::parse(MINE, "mine.toml").unwrap();
    let (source, facts, options) = (zeros(shapes), Facts::new(), MapOptions::default());
    match to_hf {
        true => to_hf_of(&source, &mapping, &facts, &options),
        false => to_megatron_of(&source, &mapping, &facts, &options),
    }
    .map(|_| ())
}

#[test]
fn a_mapping_of_ones_own_works_both_ways() {
    mine(true, &[("w.x", &[2, 4, 3]), ("n.x", &[2, 4, 3])]).unwrap();
    let [a, b, n] = [("a.0", &[2, 3][..]), ("b.0", &[2, 3]), ("n.0", &[3, 4])];
    mine(false, &[a, b, n]).unwrap();
}

#[test]
fn the_rule_and_the_tensor_are_named() {
    let [w, n]: [(&str, &[usize]); 2] = [("w.x", &[2, 4, 3]), ("n.x", &[2, 4, 3])];
    let (w, n) = (w, n);
    for (to_hf, shapes, line, expected) in [
        (true, vec![n], 4, "it matches nothing: there is no \"w.{layer}.x\""),
        (true, vec![w], 10, "there is no \"n.{layer}.x\" or \"m.{layer}.x\""),
        (true, vec![w, ("n.0.x", &[4, 3])], 10, "there is no tensor \"n.1.x\""),
        (true, vec![("w.x", &[2, 5, 3]), n], 4, "\"w.x\": 5 rows cannot be divided into 2"),
        (true, vec![w, ("n.x", &[2, 4])], 10, "\"n.x\": a tensor of shape [4] has no two axes"),
        (true, vec![("w.x", &[]), n], 4, "\"w.x\" has the shape [], and no axis for {layer}"),
        (true, vec![("w.x", &[70_000, 0]), n], 4, "\"w.x\" has the shape [70000, 0], too many"),
        (
            true,
            vec![w, n, ("n.1.x", &[4, 3])],
            10,
            "two tensors in one place, \"n.x\" and \"n.1.x\"",
        ),
        (
            true,
            vec![w, n, ("m.x", &[2, 4, 3])],
            10,
            "two tensors in one place, \"n.x\" and \"m.x\"",
        ),
        (false, vec![("a.0", &[1, 3]), ("n.0", &[3, 4])], 4, "there is no tensor \"b.0\""),
        (
            false,
            vec![("a.0", &[1, 3]), ("b.0", &[1, 4]), ("n.0", &[3, 4])],
            4,
            "\"a.0\", \"b.0\": tensors of shapes [1, 3] and [1, 4] cannot be joined along axis 0",
        ),
        (
            false,
            vec![("a.0", &[3, 3]), ("b.0", &[1, 3]), ("n.0", &[3, 4])],
            4,
            "\"a.0\", \"b.0\": the parts have [3, 1] along axis 0, not [2, 2]",
        ),
        (
            false,
            vec![
                ("a.0", &[1, 3]),
                ("b.0", &[1, 3]),
                ("a.1", &[2, 3]),
                ("b.1", &[2, 3]),
                ("n.0", &[3, 4]),
                ("n.1", &[3, 4]),
            ],
            4,
            "\"w.x\" would be of float32 [2, 3] and of float32 [4, 3]",
        ),
    ] {
        match mine(to_hf, &shapes).unwrap_err() {
            MappingError::Rule { file, line: found, problem, .. } => {
                assert!(problem.contains(expected), "{shapes:?}: {problem}");
                assert_eq!((file.as_str(), found), ("mine.toml", line), "{problem}");
            }
            other => panic!("{shapes:?}: {other}"),
        }
    }
    let error = mine(true, &[w, n, ("q.x", &[1]), ("optimizer.state.x", &[1])]).unwrap_err();
    assert_eq!(error.to_string(), "the mapping \"mine\" has no rule for \"q.x\"");
}

fn change(
    model: &Model,
    change: impl FnOnce(&mut Tensors),
    config: &[(&str, serde_json::Value)],
) -> String {
    let mut tensors = model.tensors();
    change(&mut tensors);
    let mut json = model.config();
    for (field, value) in config {
        json[*field] = value.clone();
    }
    let mapping = recognize_config(&json).unwrap();
    let source = safetensors(&tensors);
    let facts = mapping.facts_of_config(&json);
    let mapped =
        facts.and_then(|facts| to_megatron_of(&source, &mapping, &facts, &MapOptions::default()));
    mapped.unwrap_err().to_string()
}

#[test]
fn models_and_their_configurations_that_disagree() {
    let llama = Model::dense("llama");
    for (field, value, expected) in [
        ("num_attention_heads", json!(5), "40 rows are not those of 5 heads in 2 query groups"),
        ("num_key_value_heads", json!(1), "num_query_groups"),
        (
            "num_key_value_heads",
            json!(0),
            "num_key_value_heads is 0: it must be a whole number from 1",
        ),
        ("head_dim", json!(2), "2 channels (kv_channels) have 20"),
        ("num_hidden_layers", json!(4), "there is no tensor \"model.layers.3."),
        ("num_hidden_layers", json!(2), "no rule for \"model.layers.2."),
        ("num_hidden_layers", json!("two"), "num_layers is \"two\""),
        ("num_hidden_layers", json!(u64::MAX), "too many"),
        ("num_attention_heads", json!(u64::MAX), "heads"),
        ("num_attention_heads", json!(0), "heads"),
        ("num_attention_heads", json!(null), "needs num_attention_heads"),
        ("tie_word_embeddings", json!("no"), "it must be true or false"),
    ] {
        if field == "tie_word_embeddings" {
            let mapping = Mapping::builtin("llama").unwrap();
            let error = mapping.facts_of_config(&json!({ field: value })).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            continue;
        }
        let error = change(&llama, |_| (), &[(field, value.clone())]);
        let other = field == "num_key_value_heads" && error.contains("rows");
        assert!(error.contains(expected) || other, "{field} {value}: {error}");
    }
    let error = change(&llama, |t| _ = t.remove("lm_head.weight"), &[]);
    assert!(error.contains("there is no \"lm_head.weight\", though"), "{error}");
    let wider = |t: &mut Tensors| {
        let name = "model.layers.1.self_attn.k_proj.weight".to_owned();
        t.insert(name, Tensor::new(&[8, 9], |_| 0));
    };
    let error = change(&llama, wider, &[]);
    assert!(error.contains("families/llama.toml:") && error.contains("k_proj.weight"), "{error}");
    let error = change(
        &Model { experts: 3, expert_ffn: 7, ..Model::dense("mixtral") },
        |t| {
            t.remove("model.layers.2.block_sparse_moe.experts.1.w3.weight");
        },
        &[],
    );
    assert!(
        error
            .contains("there is no tensor \"model.layers.2.block_sparse_moe.experts.1.w3.weight\""),
        "{error}"
    );
}

#[test]
fn weights_that_mean_something_else_are_refused() {
    let mapping = Mapping::builtin("llama").unwrap();
    let source = zeros(&[
        ("decoder.layers.mlp.linear_fc1.weight", &[1, 8, 4]),
        ("decoder.layers.mlp.linear_fc2.weight", &[1, 4, 8]),
    ]);
    let refused = |facts: &Facts| {
        let mapped = to_hf_of(&source, &mapping, facts, &MapOptions::default());
        mapped.unwrap_err().to_string()
    };
    let error = refused(&Facts::new());
    assert!(error.contains("an MLP without a gate"), "{error}");
    for arg in ["layernorm_zero_centered_gamma", "apply_layernorm_1p", "rotary_interleaved"] {
        let error = refused(&Facts::new().with(arg, true));
        assert!(error.contains(arg), "{error}");
    }
}

#[test]
fn a_family_that_is_named_has_to_fit() {
    let qwen = Model { qkv_bias: true, ..Model::dense("qwen2") };
    let mapped = |model: &Model| {
        let mapping = recognize_config(&model.config()).unwrap();
        let facts = mapping.facts_of_config(&model.config()).unwrap();
        let options = MapOptions::default();
        to_megatron_of(&safetensors(&model.tensors()), &mapping, &facts, &options).unwrap()
    };
    let llama = Mapping::builtin("llama").unwrap();
    let (source, options) = (mapped(&qwen), MapOptions::default());
    let error = to_hf_of(&source.source, &llama, &source.facts, &options).unwrap_err();
    assert!(matches!(error, MappingError::OtherFamily { .. }), "{error}");
    assert!(error.to_string().contains("a linear_qkv.bias but no linear_proj.bias"), "{error}");
    // Llama with all biases is not as it usually is, and its configuration says so.
    let plain = Model::dense("llama");
    let mut tensors = plain.tensors();
    for layer in 0..plain.layers {
        for (name, rows) in [("q", 24), ("k", 8), ("v", 8), ("o", 8)] {
            let name = format!("model.layers.{layer}.self_attn.{name}_proj.bias");
            tensors.insert(name, Tensor::new(&[rows], |at| at[0] as u32));
        }
    }
    let facts = llama.facts_of_config(&plain.config()).unwrap();
    let biased = to_megatron_of(&safetensors(&tensors), &llama, &facts, &options).unwrap();
    let back = to_hf_of(&biased.source, &llama, &biased.facts, &options);
    let back = back.unwrap();
    assert_eq!(llama.config_json(&back.facts).unwrap()["attention_bias"], true);
    assert!(
        back.report.notes.iter().any(|note| note.contains("unlike")),
        "{:?}",
        back.report.notes
    );
    let without = mapped(&plain);
    let facts = without.facts.clone().with("hf_config", json!(null)).with("add_qkv_bias", true);
    let without = to_hf_of(&without.source, &llama, &facts, &options).unwrap();
    assert_eq!(llama.config_json(&without.facts).unwrap()["attention_bias"], false);
    assert!(!without.report.notes.iter().any(|note| note.contains("unlike")));
    let gpt2 = Model::all().pop().unwrap();
    let (mapping, gpt2) = (Mapping::builtin("gpt2").unwrap(), mapped(&gpt2));
    for (facts, why) in [
        (gpt2.facts.clone().with("num_query_groups", 3), "6 heads are in 3 query groups"),
        (gpt2.facts.clone().with("kv_channels", 3), "6 heads of 3 channels"),
    ] {
        let error = to_hf_of(&gpt2.source, &mapping, &facts, &options).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // Other families whose width of a head transformers works out.
    let phi3 = Model::all().into_iter().find(|model| model.family == "phi3").unwrap();
    let (mapping, phi3) = (Mapping::builtin("phi3").unwrap(), mapped(&phi3));
    let facts = phi3.facts.clone().with("kv_channels", 8);
    let error = to_hf_of(&phi3.source, &mapping, &facts, &options).unwrap_err().to_string();
    assert!(error.contains("6 heads of 8 channels"), "{error}");
}

#[test]
fn an_index_that_claims_much_takes_little() {
    let mut metadata = CheckpointMetadata::new();
    for name in ["decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.layers.x"] {
        let tensor = TensorEntry::new(DType::Float32, [u64::MAX, u64::MAX, 0, 1]);
        metadata.insert(name, Entry::Tensor(tensor));
    }
    let found = dcp_mapping::recognize(&metadata, &Facts::new()).unwrap();
    assert!(matches!(found, dcp_mapping::Recognition::Unknown { .. }));
}
