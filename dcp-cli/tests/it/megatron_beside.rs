//! Files in the folders of Megatron-Core's checkpoints that describe the model.

use std::fs;

use crate::megatron::megatron;
use crate::megatron_convert::tensors_of;
use crate::support::{dcp, path, read_json};

const MODEL: &str = "gpt_tp2pp2_swiglu/ckpt";

/// A model of Megatron-Core without arguments, as others than Megatron-LM save it.
fn without_arguments(folder: &tempfile::TempDir, name: &str) -> String {
    let file = path(folder, "plain.safetensors");
    dcp(["-q", "convert", &megatron(MODEL), &file, "--model-only", "--overwrite"]).ok();
    let place = path(folder, name);
    dcp(["-q", "convert", &file, &place, "--to", "torch-dist", "--arch", "none"]).ok();
    place
}

const RUN_CONFIG: &str = "\
num_layers: 2
    hidden_size: 8
    ffn_hidden_size: 12
    num_attention_heads: 4
    num_query_groups: 2
    gated_linear_unit: true
    activation_func: {_target_: torch.nn.functional.silu, _call_: false}
    layernorm_epsilon: 1.0e-05
    normalization: RMSNorm
    position_embedding_type: rope
    rotary_base: 10000
    seq_length: 64
    vocab_size: 16
";

#[test]
fn a_configuration_beside_it_tells_what_arguments_do() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let bridge = without_arguments(&folder, "bridge");
    dcp(["convert", &bridge, &at("hf"), "--to", "hf"])
        .fails(2, &["needs num_attention_heads", "--config reads the rest"]);
    let config = format!("_target_: a.ConfigContainer\nmodel:\n    {RUN_CONFIG}");
    fs::write(at("bridge/run_config.yaml"), config).unwrap();
    let run = dcp(["convert", &bridge, &at("hf"), "--to", "hf"]);
    assert!(run.stderr.contains("run_config.yaml describes the model"), "{}", run.stderr);
    run.ok();
    let config = read_json(&folder.path().join("hf/config.json"));
    assert_eq!(config["num_key_value_heads"], 2);
    assert_eq!(config["max_position_embeddings"], 64);
    // NeMo has the checkpoint in one folder, and its description in another.
    fs::create_dir_all(at("nemo/context")).unwrap();
    fs::rename(&bridge, at("nemo/weights")).unwrap();
    fs::remove_file(at("nemo/weights/run_config.yaml")).unwrap();
    let config = format!("_target_: a.LlamaModel\nconfig:\n    {RUN_CONFIG}");
    fs::write(at("nemo/context/model.yaml"), config).unwrap();
    for (place, target) in [("nemo", "one"), ("nemo/weights", "two")] {
        dcp(["-q", "convert", &at(place), &at(target), "--to", "hf"]).ok();
        assert_eq!(tensors_of(&at(target)), tensors_of(&at("hf")));
        let config = read_json(&folder.path().join(target).join("config.json"));
        assert_eq!(config["num_attention_heads"], 4);
    }
    dcp(["inspect", &at("nemo")]).ok();
    fs::write(at("nemo/context/model.yaml"), "config: [\n").unwrap();
    dcp(["-q", "convert", &at("nemo"), &at("bad"), "--to", "hf"])
        .fails(1, &["context/model.yaml:2: ", "hint: the file describes the model"]);
}
