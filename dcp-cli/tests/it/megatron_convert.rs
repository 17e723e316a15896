//! Checkpoints of Megatron-Core that are written, resharded, and mapped to Hugging Face and back.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::megatron::megatron;
use crate::support::{dcp, path, read_json, tensors};

const MODEL: &str = "gpt_tp2pp2_swiglu/ckpt";

#[test]
fn any_format_goes_to_torch_dist_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let source = megatron("tp2_basic/ckpt");
    for (name, more) in [
        ("compatible", &["--tp=2"] as &[&str]),
        ("newest", &["--form=newest", "--integrity"]),
        ("staged", &["--tp=1", "--pp=1"]),
    ] {
        let out = path(&folder, name);
        dcp(["convert", &source, &out, "--to", "torch-dist"].iter().chain(more)).ok();
        dcp(["diff", &source, &out]).ok();
        dcp(["verify", &out, "--deep"]).ok();
        let has = |file: &str| folder.path().join(name).join(file).exists();
        assert_eq!(has("common.pt"), name != "newest");
        assert_eq!(has("integrity.json"), name == "newest");
        assert!(has("metadata.json"));
    }
    // Through PyTorch's formats, nothing is lost either.
    for (name, to) in [("d", "dcp"), ("x.pt", "torch-save")] {
        let (through, back) = (path(&folder, name), path(&folder, &format!("{name}.back")));
        dcp(["convert", &source, &through, "--to", to]).ok();
        dcp(["convert", &through, &back, "--to", "megatron"]).ok();
        dcp(["diff", &source, &back]).ok();
    }
}

#[test]
fn a_layout_is_rewritten() {
    let folder = tempfile::tempdir().unwrap();
    let source = megatron(MODEL);
    let out = path(&folder, "resharded");
    let report = dcp(["reshard", &source, &out, "--tp", "4", "--pp", "1", "--json"]).json();
    assert_eq!(report["tensors"], 8);
    let found = dcp(["inspect", &out, "--json"]).json();
    let chunks = |key: &str| found["keys"][key]["chunks"].as_array().unwrap().len();
    assert_eq!(chunks("decoder.layers.self_attention.linear_proj.weight"), 2 * 4);
    assert_eq!(chunks("embedding.word_embeddings.weight"), 4);
    dcp(["diff", &source, &out]).ok();
    // What is there is shown; the arguments are those of the run.
    let megatron = &found["megatron"];
    assert_eq!([&megatron["parallel"]["tensor"], &megatron["parallel"]["pipeline"]], [4, 1]);
    assert_eq!(megatron["parallel_of_args"]["tensor"], 2);
    let text = dcp(["inspect", &out]).ok();
    assert!(text.contains("parallel   TP 4 · PP 1\n"), "{text}");
    assert!(text.contains("was TP 2 · PP 2 · DP 1 · 4 ranks, as the arguments say"), "{text}");
    let newest = path(&folder, "newest");
    dcp(["reshard", &out, &newest, "--form", "newest"]).ok();
    let newest = dcp(["inspect", &newest, "--json"]).json();
    assert_eq!(newest["megatron"]["parallel"], megatron["parallel"]);
    // Without other sizes, it is laid out as it was.
    let again = path(&folder, "again");
    dcp(["convert", &source, &again, "--to", "torch-dist"]).ok();
    let found = dcp(["inspect", &again, "--json"]).json();
    assert_eq!(
        found["keys"]["embedding.word_embeddings.weight"]["chunks"].as_array().unwrap().len(),
        2
    );
    let planned = dcp(["reshard", &source, &path(&folder, "dry"), "--tp", "2", "--dry-run"]).ok();
    assert!(planned.contains("would be written"), "{planned}");
    assert!(!folder.path().join("dry").exists());
}

#[test]
fn stages_and_experts_are_divided_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (megatron(MODEL), path(&folder, "out"));
    let uneven = ["--pp=3", "--account-for-embedding-in-pipeline-split"];
    dcp(["-q", "reshard", &source, &out].into_iter().chain(uneven)).ok();
    dcp(["diff", &source, &out]).ok();
    let found = dcp(["inspect", &out, "--json"]).json();
    let norm = &found["keys"]["decoder.layers.self_attention.linear_qkv.layer_norm_weight"];
    let files = norm["chunks"].as_array().unwrap().iter().map(|chunk| chunk["file"].clone());
    // The first stage has the embedding alone, and each stage two ranks.
    assert_eq!(files.collect::<Vec<_>>(), ["__2_0.distcp", "__4_0.distcp"]);
    let (source, out) = (megatron("gpt_moe_ep2_swiglu/ckpt"), path(&folder, "experts"));
    dcp(["-q", "reshard", &source, &out, "--tp=2", "--ep=2", "--etp=1"]).ok();
    dcp(["diff", &source, &out]).ok();
    let sizes = dcp(["inspect", &out, "--json"]).json()["megatron"]["parallel"].clone();
    assert_eq!([&sizes["tensor"], &sizes["expert"], &sizes["expert_tensor"]], [2, 2, 1]);
}

#[test]
fn layouts_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (megatron(MODEL), path(&folder, "out"));
    let reshard = |uri: &str, more: &[&str]| dcp(["-q", "reshard", uri, &out].iter().chain(more));
    reshard(&source, &["--tp", "3"]).fails(2, &["cannot be divided into 3", "hint: choose other"]);
    reshard(&source, &["--pp", "3"]).fails(2, &["hint: choose another --pp", "--decoder-first"]);
    reshard(&source, &["--pp", "1", "--vpp", "2"]).fails(2, &["one pipeline stage"]);
    reshard(&source, &["--ranks", "2"]).fails(2, &["Megatron-Core", "hint: choose another layout"]);
    reshard("fsdp2_adam_2r", &["--tp", "2"]).fails(2, &["is none", "hint: say --ranks"]);
    reshard(&megatron("gpt_dp2_dp_reshardable/ckpt"), &["--tp", "2"])
        .fails(2, &["flat buffers", "--optimizer per-parameter"]);
    dcp(["convert", "zstd_2r", &out, "--to", "dcp", "--tp", "2"])
        .fails(2, &["--tp is for torch-dist"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was written");
}

#[test]
fn a_folder_is_one_checkpoint_of_one_kind() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (megatron(MODEL), path(&folder, "out"));
    let plain = path(&folder, "plain");
    dcp(["convert", &source, &out, "--to", "torch-dist"]).ok();
    dcp(["convert", "nested", &plain, "--to", "dcp"]).ok();
    dcp(["convert", &source, &out, "--to", "torch-dist"]).fails(2, &["--overwrite"]);
    dcp(["convert", &source, &out, "--to", "torch-dist", "--tp=1", "--overwrite"]).ok();
    dcp(["diff", &source, &out]).ok();
    for to in ["dcp", "hf"] {
        dcp(["-q", "convert", "nested", &out, "--to", to, "--overwrite", "--everything"])
            .fails(2, &["another checkpoint", "Megatron-Core", "another directory"]);
    }
    dcp(["convert", &source, &plain, "--to", "torch-dist", "--overwrite"])
        .fails(2, &["another checkpoint", "PyTorch's format"]);
}

#[test]
fn nothing_is_written_in_place_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (source, run) = (megatron(MODEL), path(&folder, "run"));
    let at = |name: &str| path(&folder, &format!("run/{name}"));
    // Its arguments have the fields of config.json.
    let with_args = megatron("run_torch_dist_dp2");
    dcp(["convert", &source, &at("iter_0000010"), "--to", "torch-dist"]).ok();
    for tracker in [false, true] {
        if tracker {
            fs::write(at("latest_checkpointed_iteration.txt"), "10").unwrap();
        }
        for to in ["torch-dist", "dcp", "hf"] {
            for more in [&["--overwrite"][..], &["--dry-run"]] {
                let source = if to == "hf" { &with_args } else { &source };
                dcp(["-q", "convert", source, &run, "--to", to].iter().chain(more))
                    .fails(2, &["a run of Megatron-LM", "run/release"]);
            }
        }
    }
    dcp(["reshard", &source, &run, "--tp", "1"]).fails(2, &["a run of Megatron-LM"]);
    dcp(["convert", &source, &at("release"), "--to", "torch-dist"]).ok();
    dcp(["diff", &source, &run]).ok();
}

#[test]
fn shifted_optimizer_state_is_not_carried_over() {
    let folder = tempfile::tempdir().unwrap();
    let bad = megatron("gpt_fully_reshardable_multibucket_CORRUPT/ckpt");
    let convert = |name: &str, more: &[&str]| {
        let out = path(&folder, name);
        dcp(["-q", "convert", &bad, &out, "--to", "torch-dist"].iter().chain(more))
    };
    convert("refused", &[])
        .fails(1, &["is damaged", "embedding.word_embeddings.weight", "--repair-optimizer"]);
    assert!(!folder.path().join("refused").exists());
    convert("repaired", &["--repair-optimizer"]).ok();
    let repaired = path(&folder, "repaired");
    dcp(["verify", &repaired, "--deep"]).ok();
    let all = tensors_of(&repaired);
    let moments = all.iter().filter(|(name, _)| name.starts_with("optimizer.state.exp_avg"));
    assert!(
        moments.clone().count() > 0
            && moments.clone().all(|(_, (_, _, bytes))| bytes.iter().all(|b| *b == 0))
    );
    convert("model", &["--no-optimizer"]).ok();
    let model = tensors_of(&path(&folder, "model"));
    assert!(model.keys().all(|name| !name.contains("optimizer")));
    convert("as_it_is", &["--allow-corrupt-optimizer"]).ok();
    dcp(["diff", &bad, &path(&folder, "as_it_is")]).ok();
    dcp(["convert", "zstd_2r", &path(&folder, "x.pt"), "--repair-optimizer"])
        .fails(2, &["--repair-optimizer is for checkpoints of Megatron-Core"]);
}

type Tensors = std::collections::BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

pub(crate) fn tensors_of(uri: &str) -> Tensors {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "all.safetensors");
    dcp(["-q", "convert", uri, &file, "--everything"]).ok();
    tensors(Path::new(&file))
}

#[test]
fn an_optimizer_is_shown_by_parameter() {
    let folder = tempfile::tempdir().unwrap();
    let source = megatron("gpt_dp2_dp_reshardable/ckpt");
    let out = path(&folder, "out");
    let more = ["--optimizer", "per-parameter", "--tp", "2"];
    let run = dcp(["convert", &source, &out, "--to", "torch-dist"].iter().chain(&more));
    assert!(run.stderr.contains("optimizer by parameter, from dp_reshardable"), "{}", run.stderr);
    run.ok();
    let found = dcp(["inspect", &out, "--json"]).json();
    assert_eq!(found["megatron"]["optimizer"], "fully_reshardable");
    let master = "optimizer.state.param.embedding.word_embeddings.weight";
    assert!(found["keys"].get(master).is_some(), "{:?}", found["keys"]);
    dcp(["verify", &out, "--deep"]).ok();
}

#[test]
fn a_model_goes_to_hugging_face_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let source = megatron("run_torch_dist_dp2");
    let at = |name: &str| path(&folder, name);
    let report = dcp(["convert", &source, &at("hf"), "--to", "hf", "--json"]).json();
    assert_eq!(report["mapping"]["family"], "llama");
    assert_eq!(report["tensors"], 11);
    let config = read_json(&folder.path().join("hf/config.json"));
    assert_eq!(config["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!(config["num_attention_heads"], 4);
    assert_eq!(config["torch_dtype"], "bfloat16");
    dcp(["convert", &source, &at("wide"), "--to", "hf", "--dtype", "fp32"]).ok();
    let wide = read_json(&folder.path().join("wide/config.json"));
    assert_eq!(wide["torch_dtype"], "float32");
    let found = dcp(["inspect", &at("hf"), "--json"]).json();
    let q = &found["keys"]["model.layers.0.self_attn.q_proj.weight"];
    assert_eq!(q["shape"], json!([8, 8]));

    let back = ["--to", "torch-dist", "--arch", "auto", "--make-vocab-divisible-by", "16"];
    dcp(["convert", &at("hf"), &at("back")].iter().map(|s| *s as &str).chain(back)).ok();
    dcp(["verify", &at("back"), "--deep"]).ok();
    let (before, after) = (tensors_of(&source), tensors_of(&at("back")));
    for (name, tensor) in &after {
        assert_eq!(before.get(name), Some(tensor), "{name}");
    }
    assert_eq!(after.len(), before.keys().filter(|name| !name.contains("optimizer")).count());
    dcp(["convert", &at("back"), &at("again"), "--to", "hf"]).ok();
    assert_eq!(tensors_of(&at("again")), tensors_of(&at("hf")));
    assert_eq!(read_json(&folder.path().join("again/config.json"))["model_type"], "llama");
}

#[test]
fn local_layers_ask_for_no_state_of_transformer_engine() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["convert", &megatron("run_torch_dist_dp2"), &at("hf"), "--to", "hf"]).ok();
    for (layers, states) in [(&[][..], 6), (&["--transformer-impl", "local"], 4)] {
        let back = ["convert", &at("hf"), &at("back"), "--to", "torch-dist", "--overwrite"];
        dcp(back.iter().chain(layers)).ok();
        let found = dcp(["inspect", &at("back"), "--json"]).json();
        let keys = found["keys"].as_object().unwrap().keys();
        let keys: Vec<_> = keys.filter(|key| key.contains("._extra_state/shard_0_1")).collect();
        assert_eq!(keys.len(), states, "{keys:?}");
    }
    let idle = ["convert", &at("back"), &at("again"), "--to", "hf", "--transformer-impl", "local"];
    dcp(idle).fails(2, &["--transformer-impl chooses names for Megatron-Core"]);
}

#[test]
fn a_configuration_tells_what_the_arguments_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let (like, out) = (path(&folder, "like"), path(&folder, "hf"));
    fs::create_dir(&like).unwrap();
    let describe = |layers: u32| {
        let config = json!({
            "model_type": "mistral", "vocab_size": 13, "num_hidden_layers": layers,
            "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true,
        });
        fs::write(folder.path().join("like/config.json"), config.to_string()).unwrap();
        dcp(["convert", &megatron(MODEL), &out, "--to", "hf", "--config", &like, "--json"])
    };
    describe(3).fails(2, &["num_layers is 2: config.json says 3", "hint: pass --config"]);
    assert_eq!(describe(2).json()["mapping"]["family"], "mistral");
    let embedding = &tensors_of(&out)["model.embed_tokens.weight"];
    assert_eq!(embedding.1, [13, 8]);
    assert_eq!(read_json(&folder.path().join("hf/config.json"))["vocab_size"], 13);
}

#[test]
fn a_run_that_pytorch_saved_alone_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = megatron("run_torch_dcp");
    let report = dcp(["convert", &source, &at("hf"), "--to", "hf", "--json"]).json();
    assert_eq!(report["mapping"]["family"], "llama");
    assert_eq!(read_json(&folder.path().join("hf/config.json"))["model_type"], "llama");
    // Files of Hugging Face go the other way without an option.
    let run = dcp(["convert", &at("hf"), &at("back"), "--to", "torch-dist"]);
    assert!(run.stderr.contains("by config.json; --arch none"), "{}", run.stderr);
    run.ok();
    assert!(tensors_of(&at("back")).contains_key("embedding.word_embeddings.weight"));
    dcp(["-q", "convert", &at("hf"), &at("kept"), "--to", "torch-dist", "--arch", "none"]).ok();
    assert!(tensors_of(&at("kept")).contains_key("model.embed_tokens.weight"));
    for to in ["dcp", "hf", "safetensors"] {
        dcp(["convert", &at("hf"), &at("wrong"), "--to", to, "--arch", "llama"])
            .fails(2, &["neither", "--to torch-dist"]);
    }
    fs::write(at("hf/config.json"), r#"{"model_type": "bert"}"#).unwrap();
    dcp(["-q", "convert", &at("hf"), &at("wrong"), "--to", "torch-dist"])
        .fails(2, &["no model family \"bert\"", "llama", "--arch none"]);
    // Of others, only a note says that there would be a way.
    let run = dcp(["convert", "nested", &at("nested"), "--to", "torch-dist"]);
    assert!(run.stderr.contains("keep their names, which Megatron-LM"), "{}", run.stderr);
    run.ok();
    // A run of torch_dcp has names of Megatron-Core, but those of modules.
    let run = dcp(["convert", &source, &at("modules"), "--to", "torch-dist"]);
    assert!(run.stderr.contains("Megatron-LM does not load; convert to hf"), "{}", run.stderr);
    run.ok();
    // As `dist_checkpointing` names them, they are those that it requests.
    let sharded = megatron("run_torch_dist_dp2/iter_0000010");
    let run = dcp(["convert", &sharded, &at("sharded"), "--to", "torch-dist"]);
    assert!(!run.stderr.contains("keep their names"), "{}", run.stderr);
    run.ok();
    assert!(!folder.path().join("wrong").exists());
}

#[test]
fn a_checkpoint_that_is_not_whole_is_bad() {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (megatron(MODEL), path(&folder, "hf"));
    let hf = |more: &[&str]| dcp(["-q", "convert", &source, &out, "--to", "hf"].iter().chain(more));
    hf(&["--arch", "qwen3"]).fails(1, &["rule \"", "the mapping \"qwen3\", line", "not whole"]);
    hf(&["--arch", "/dev/zero"]).fails(3, &["cannot read the mapping", "device"]);
    let like = path(&folder, "like");
    fs::create_dir_all(folder.path().join("like/config.json")).unwrap();
    hf(&["--config", &like]).fails(2, &["there is no config.json", "pass --config"]);
}

#[test]
fn more_ranks_than_query_groups_need_a_newer_version() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    // 4 heads in 2 groups.
    let source = megatron("v015_gpt_tp2dp2_swiglu_fs_model_space/ckpt");
    let reshard = |tp: &str, to: &str| dcp(["reshard", &source, to, "--tp", tp, "--json"]);
    let args = dcp(["inspect", &source, "--args", "--json"]).json();
    assert_eq!(args["num_query_groups"], 2, "{args}");
    assert_eq!(reshard("2", &at("two")).json().get("oldest_version"), None);
    assert_eq!(reshard("4", &at("four")).json()["oldest_version"], "0.16");
}

#[test]
fn names_are_kept_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "hf");
    dcp(["-q", "convert", &megatron(MODEL), &out, "--to", "hf", "--arch", "none"]).ok();
    assert!(tensors_of(&out).contains_key("decoder.layers.mlp.linear_fc1.weight"));
    assert!(!folder.path().join("hf/config.json").exists());
}

#[test]
fn a_mapping_of_ones_own_is_taken_or_refused_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let toml = path(&folder, "my.toml");
    let llama = dcp(["arch", "llama"]).ok();
    fs::write(&toml, &llama).unwrap();
    let convert = |arch: &str| {
        dcp(["-q", "convert", &megatron(MODEL), &path(&folder, "hf"), "--to", "hf", "--arch", arch])
    };
    // The arguments are few, and they do not define the model.
    convert(&toml).fails(2, &["config.json needs", "rope_theta", "hint: pass --config"]);
    let model = format!("{}/model.safetensors", path(&folder, "file"));
    fs::create_dir(folder.path().join("file")).unwrap();
    dcp(["-q", "convert", &megatron(MODEL), &model, "--arch", &toml]).ok();
    assert!(tensors_of(&model).contains_key("model.embed_tokens.weight"));
    let line = 1 + llama.lines().position(|line| line.trim_start().starts_with("op =")).unwrap();
    let bad: Vec<_> = llama
        .lines()
        .enumerate()
        .map(|(at, text)| if at + 1 == line { "op = \"explode\"" } else { text })
        .collect();
    fs::write(&toml, bad.join("\n")).unwrap();
    convert(&toml).fails(2, &["my.toml:", "explode", "hint: `dcp arch FAMILY"]);
    fs::write(&toml, "[family\n").unwrap();
    convert(&toml).fails(2, &["my.toml:1"]);
    convert(&path(&folder, "none.toml")).fails(3, &["cannot read the mapping"]);
    convert("gpt5").fails(2, &["no model family \"gpt5\"", "llama"]);
    convert("gpt2").fails(2, &["a gated MLP", "\"gpt2\"", "hint: --arch names"]);
    assert!(!folder.path().join("hf").exists());
}

#[test]
fn what_is_of_no_family_is_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "hf");
    dcp(["-q", "convert", &megatron("v015_flattened/ckpt"), &out, "--to", "hf"]).fails(
        2,
        &["of no family", "llama: there is no", "--arch none", "families: llama, mistral"],
    );
    dcp(["convert", "fsdp2_adam_2r", &out, "--to", "torch-dist", "--arch", "llama"])
        .fails(2, &["there is no config.json", "pass --config"]);
    dcp(["convert", "zstd_2r", &out, "--to", "dcp", "--untie"])
        .fails(2, &["--untie is for a mapping"]);
    assert!(!folder.path().join("hf").exists());
}

#[test]
fn another_family_than_that_of_the_model_is_taken_and_said() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["convert", &megatron("run_torch_dist_dp2"), &at("hf"), "--to", "hf"]).ok();
    let convert = |target: &str| {
        let run = ["convert", &at("hf"), &at(target), "--to", "torch-dist", "--arch", "llama"];
        let run = dcp(run);
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stderr
    };
    assert!(!convert("own").contains("is that of"));
    let file = folder.path().join("hf/config.json");
    let mut config = read_json(&file);
    config["model_type"] = json!("mistral");
    fs::write(&file, config.to_string()).unwrap();
    let said = convert("other");
    assert!(said.contains("config.json is of mistral and is read as one of llama"), "{said}");
}

#[test]
fn the_commands_of_the_guide_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = root.join("docs/guides/megatron-to-hugging-face.md");
    let page = fs::read_to_string(page).unwrap();
    let blocks: String =
        page.split("```sh").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    let blocks = blocks.replace("\\\n", " ");
    let folder = tempfile::tempdir().unwrap();
    let mut run = 0;
    for line in blocks.lines().filter(|line| !line.trim().is_empty()) {
        let line = line.replace("/tmp/", &path(&folder, ""));
        let args: Vec<_> = line.split_whitespace().skip(1).collect();
        let output = crate::support::command().current_dir(&root).args(&args).output().unwrap();
        crate::support::finish(output).ok();
        run += 1;
    }
    assert!(run >= 7, "{run} commands in\n{page}");
}

#[test]
fn chained_optimizers_are_left_out_of_models() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "model.safetensors");
    let source = megatron("gpt_moe_chained_dp_reshardable/ckpt");
    dcp(["-q", "convert", &source, &out, "--no-optimizer"]).ok();
    let all = tensors(Path::new(&out));
    assert!(
        !all.is_empty() && all.keys().all(|name| !name.contains("optimizer")),
        "{:?}",
        all.keys()
    );
}

#[test]
fn families_are_listed() {
    let listed = dcp(["arch", "--json"]).json();
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    for name in ["llama", "qwen3_moe", "deepseek_v3", "gpt2"] {
        assert!(names.contains(&Value::from(name)), "{names:?}");
        assert!(dcp(["arch"]).ok().contains(name));
        assert!(dcp(["arch", name]).ok().contains("[[rule]]"));
    }
    dcp(["arch", "gpt5"]).fails(2, &["no model family"]);
}

#[test]
fn weights_that_torch_saved_are_a_model_of_hugging_face() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["-q", "convert", &megatron("run_torch_dcp"), &at("hf"), "--to", "hf"]).ok();
    for one in ["one", "many"] {
        fs::create_dir(at(one)).unwrap();
        fs::copy(at("hf/config.json"), at(&format!("{one}/config.json"))).unwrap();
    }
    let save = |file: &str, choice: &str| {
        dcp(["-q", "convert", &at("hf"), &at(file), "--to", "torch-save", choice, "model.layers"])
            .ok();
    };
    let all = ["-q", "convert", &at("hf"), &at("one/pytorch_model.bin"), "--to", "torch-save"];
    dcp(all).ok();
    save("many/pytorch_model-00001-of-00002.bin", "--include");
    save("many/pytorch_model-00002-of-00002.bin", "--exclude");
    let names = tensors_of(&at("hf")).into_keys().map(|name| {
        let number = if name.starts_with("model.layers") { 1 } else { 2 };
        (name, json!(format!("pytorch_model-0000{number}-of-00002.bin")))
    });
    let index = json!({ "weight_map": names.collect::<serde_json::Map<_, _>>() });
    fs::write(at("many/pytorch_model.bin.index.json"), index.to_string()).unwrap();
    dcp(["-q", "convert", &at("hf"), &at("expected"), "--to", "torch-dist"]).ok();
    for from in ["one", "many"] {
        let made = at(&format!("{from}_megatron"));
        dcp(["-q", "convert", &at(from), &made, "--to", "torch-dist"]).ok();
        assert_eq!(tensors_of(&made), tensors_of(&at("expected")), "{from}");
    }
    fs::remove_file(at("many/pytorch_model-00002-of-00002.bin")).unwrap();
    dcp(["inspect", &at("many")]).fails(1, &["00002-of-00002.bin", "is not there"]);
}
