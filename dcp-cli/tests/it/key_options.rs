//! KeyOptions and renaming keys, and saying only what would be written.

use std::fs;

use serde_json::{Value, json};

use crate::support::{dcp, path};

fn keys(uri: &str) -> Vec<String> {
    let all: Value = dcp(["inspect", uri, "--json"]).json();
    all["keys"].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn globs_choose_and_substitutions_rename() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    dcp([
        "convert",
        "fsdp2_adam_2r",
        &file,
        "--include",
        "model.layers",
        "--include=*.norm.weight",
        "--exclude=optimizer",
        "--exclude=*.bias",
        r"--rename=s/^model\.//",
        "--rename=s/layers/h/",
    ])
    .ok();
    let mut found = keys(&file);
    found.sort();
    assert_eq!(found, ["h.0.weight", "h.1.weight", "norm.weight"]);
    dcp(["convert", "fsdp2_adam_2r", &path(&folder, "y"), "--to=dcp", "--include=nothing.*"])
        .fails(2, &["the selection leaves nothing of the checkpoint"]);
}

/// Of a DCP checkpoint, commands read and check the chosen tensors alone.
#[test]
fn what_is_not_chosen_may_be_missing() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let header = br#"{"one":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"wide":{"dtype":"F32","shape":[4,2],"data_offsets":[4,36]}}"#;
    let model = [&(header.len() as u64).to_le_bytes()[..], header, &[7; 36]].concat();
    let (whole, half, out) = (at("model.safetensors"), at("half"), at("out"));
    fs::write(&whole, model).unwrap();
    dcp(["convert", &whole, &half, "--to=dcp", "-n2"]).ok();
    fs::remove_file(format!("{half}/__1_0.distcp")).unwrap();
    for command in [
        &["convert", &half, &out, "--to=dcp", "--overwrite"][..],
        &["reshard", &half, &out, "-n2", "--overwrite"],
        &["average", &half, &whole, "--out", &out, "--to=dcp", "--overwrite"],
        &["diff", &half, &whole],
    ] {
        let with = |include| dcp(command.iter().copied().chain([include]));
        with("--include=one").ok();
        with("--exclude=wide").ok();
        assert!(with("--include=wide").stderr.contains("__1_0.distcp"), "{command:?}");
        assert!(dcp(command).stderr.contains("__1_0.distcp"), "{command:?}");
    }
    dcp(["stats", &half, "one"]).ok();
    dcp(["stats", &half, "--filter=one"]).ok();
    assert!(dcp(["stats", &half, "wide"]).stderr.contains("__1_0.distcp"));
    assert!(dcp(["stats", &half, "--filter=w*"]).stderr.contains("__1_0.distcp"));
}

/// A typo in a pattern changes what is written, so it is never silent.
#[test]
fn patterns_that_match_nothing_are_named_with_the_nearest_key() {
    let folder = tempfile::tempdir().unwrap();
    let (file, other) = (path(&folder, "x.safetensors"), path(&folder, "y"));
    let source = "fsdp2_adam_2r";
    let typos = ["--exclude=optimzer", r"--rename=s/^modl\.//", "--include=model.nrom"];
    let said = [
        "--include 'model.nrom' matches no key; the nearest is \"model.norm\"",
        "--exclude 'optimzer' matches no key; the nearest is \"optimizer\"",
        r"--rename 's/^modl\.//' matches no key; the nearest is ",
    ];
    let keep = ["--dtype=bf16", "--keep-dtype=*.layr.*"];
    let kept = "--keep-dtype '*.layr.*' matches no key; the nearest is \"model.layers.0.bias\"";
    let note = |run: crate::support::Run, said: &[&str]| {
        assert_eq!(run.code, 0, "{}", run.stderr);
        for text in said {
            assert!(run.stderr.contains(&format!("note: {text}")), "{text}: {}", run.stderr);
        }
    };
    let more = ["--include=model", "--overwrite"];
    let with = |args: &[&str]| dcp(args.iter().chain(&typos).chain(&more).copied());
    let convert = ["convert", source, &file, keep[0], keep[1]];
    note(with(&convert), &[said[0], said[1], said[2], kept]);
    let average = ["average", source, source, "--out", &file, keep[0], keep[1]];
    note(with(&average), &[said[0], said[1], said[2], kept]);
    let merge = ["merge", source, source, "--identical", "--out", &file];
    note(with(&merge), &said);
    note(with(&["reshard", source, &other, "-n2"]), &said);
    let json = with(&["reshard", source, &other, "-n2", "--json"]).json();
    let first = json!({"option": "include", "pattern": "model.nrom", "nearest": "model.norm"});
    assert_eq!((&json["unmatched"][0], json["unmatched"][2].is_object()), (&first, true));
    let right = ["reshard", source, &other, "-n2", "--include=model", "--overwrite", "--json"];
    assert!(dcp(right).json().get("unmatched").is_none());
    // What is compared or shown.
    let diff = ["diff", source, source, "--keys-only", "--strip-a=mdoel.", "--exclude=optimzer"];
    let run = dcp(diff);
    assert!(run.stderr.contains("--strip-a 'mdoel.' matches no key; the nearest is \"model."));
    assert!(run.stderr.contains(said[1]), "{}", run.stderr);
    note(
        dcp(["stats", source, "--filter=model.nrom", "--filter=model.bn"]),
        &["--filter 'model.nrom' matches no key; the nearest is \"model.norm\""],
    );
    // Where nothing is left, it is an error.
    let nothing = ["--include=model.nrom"];
    let near = "did you mean \"model.norm\"?";
    dcp(["convert", source, &file, nothing[0], "--overwrite"]).fails(2, &[near]);
    dcp(["stats", source, "--filter=model.nrom"]).fails(2, &[near]);
    dcp(["diff", source, source, nothing[0]]).fails(2, &[near]);
    dcp(["inspect", source, "--filter=model.nrom.*"]).fails(2, &["did you mean \"model.norm."]);
}

/// With a mapping, the names are those that it gives.
#[test]
fn patterns_are_compared_with_the_names_that_a_mapping_gives() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "hf");
    let source = "../megatron/run_torch_dist_dp2";
    let run = dcp(["convert", source, &target, "--to=hf", "--exclude=model.embed_tokns"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let said =
        "--exclude 'model.embed_tokns' matches no key; the nearest is \"model.embed_tokens\"";
    assert!(run.stderr.contains(said), "{}", run.stderr);
}

#[test]
fn the_model_is_taken_out_of_a_training_state() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "model");
    dcp(["convert", "fsdp2_adam_2r", &target, "--to=dcp", "--model-only"]).ok();
    assert_eq!(keys(&target).first().unwrap(), "embed.weight");
    dcp(["verify", &target, "--deep"]).ok();
    let target = path(&folder, "rest");
    dcp(["reshard", "fsdp2_adam_2r", &target, "-n2", "--no-optimizer"]).ok();
    let found = keys(&target);
    assert!(
        found.contains(&"step".to_owned()) && found.contains(&"lr_scheduler.last_epoch".into())
    );
    assert!(!found.iter().any(|key| key.starts_with("optimizer")), "{found:?}");
}

#[test]
fn optimizers_are_left_out_wherever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let weights = ["0.bias", "0.weight", "2.bias", "2.weight"];
    for (state, model, rest) in [
        ("app", "", "app.model."),
        ("flat", "", "app.model."),
        ("root", "", ""),
        ("jax", "", "params."),
        ("gan", "g.", "g."),
    ] {
        let source = format!("../torch_save/states/{state}.pt");
        let at = |name: &str| path(&folder, &format!("{state}.{name}"));
        dcp(["convert", &source, &at("pt"), "--model-only"]).ok();
        dcp(["convert", &source, &at("hf"), "--to=hf"]).ok();
        dcp(["convert", &source, &at("rest.pt"), "--no-optimizer"]).ok();
        for (made, prefix) in [("pt", model), ("hf", model), ("rest.pt", rest)] {
            let mut found = keys(&at(made));
            found.sort();
            let expected = weights.map(|name| format!("{prefix}{name}"));
            assert_eq!(found, expected, "{state} {made}");
        }
        // With the option, all of it is written.
        dcp(["convert", &source, &at("all"), "--to=hf", "--everything"]).ok();
        assert!(keys(&at("all")).len() > weights.len(), "{state}");
    }
}

/// Composer and LLM Foundry keep the model and the optimizers in a dict `state`.
#[test]
fn the_model_is_found_below_an_outer_root() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = "../torch_save/states/app.pt";
    let renames = ["--rename=s/^app.optim/state.optimizers.Adam/", "--rename=s/^app/state/"];
    for name in ["composer.pt", "composer"] {
        dcp(["convert", source, &at(name)]
            .iter()
            .chain(&renames)
            .chain(&["--to=dcp"][..usize::from(name == "composer")]))
        .ok();
        let diff = dcp(["diff", source, &at(name), "--model-only", "--json"]).json();
        assert_eq!((&diff["equal"], &diff["compared"]["tensors"]), (&json!(true), &json!(4)));
        dcp(["convert", &at(name), &at("hf"), "--to=hf", "--overwrite"]).ok();
        let mut found = keys(&at("hf"));
        found.sort();
        assert_eq!(found, ["0.bias", "0.weight", "2.bias", "2.weight"]);
    }
}

/// A new name does not change what is selected.
#[test]
fn renames_leave_the_choice_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "hf");
    let source = "../torch_save/states/app.pt";
    dcp(["convert", source, &target, "--to=hf", r"--rename=s/^2\./head./"]).ok();
    let mut found = keys(&target);
    found.sort();
    assert_eq!(found, ["0.bias", "0.weight", "head.bias", "head.weight"]);
}

/// What compares or writes nothing is no success.
#[test]
fn every_command_refuses_a_selection_that_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let (source, only, out) = ("../torch_save/states/app.pt", at("only.pt"), at("out"));
    dcp(["convert", source, &only, "--include=app.optim"]).ok();
    let dcp_form = at("only");
    dcp(["convert", &only, &dcp_form, "--to=dcp"]).ok();
    for command in [
        &["convert", &only, &out, "--to=dcp", "--no-optimizer"][..],
        &["convert", &only, &out, "--to=hf"],
        &["convert", &only, &out, "--to=dcp", "--exclude=*"],
        &["diff", &only, &only, "--no-optimizer"],
        &["diff", &only, &only, "--model-only"],
        &["diff", &only, &only, "--exclude=app"],
        &["reshard", &dcp_form, &out, "-n2", "--no-optimizer"],
        &["average", &only, &only, "--out", &out, "--to=dcp", "--no-optimizer"],
        &["merge", &only, &only, "--identical", "--out", &out, "--to=dcp", "--no-optimizer"],
        &["stats", &only, "--filter=nothing"],
    ] {
        dcp(command).fails(2, &["the selection leaves nothing of "]);
        assert!(!folder.path().join("out").exists(), "{command:?}");
    }
}

/// A counter is no model.
#[test]
fn a_model_without_weights_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let (file, state, out) = (at("state.pt"), at("state"), at("out"));
    let source = "../torch_save/states/sgd.pt";
    dcp(["convert", source, &file, r"--rename=s/^optim\.param_groups\.0\.lr$/step/"]).ok();
    dcp(["convert", &file, &state, "--to=dcp", "--exclude=x"]).ok();
    assert!(keys(&state).contains(&"step".to_owned()), "{:?}", keys(&state));
    for command in [
        &["convert", &state, &out, "--to=dcp", "--model-only", "--exclude=model"][..],
        &["convert", &state, &out, "--to=torch-save", "--model-only", "--exclude=model.*"],
        &["reshard", &state, &out, "-n2", "--model-only", "--exclude=model"],
    ] {
        dcp(command).fails(2, &["the selection leaves nothing of the weights of "]);
        assert!(!folder.path().join("out").exists(), "{command:?}");
    }
    // What is chosen by name is taken, whatever it is.
    dcp(["convert", &state, &out, "--to=dcp", "--include=step"]).ok();
}

/// A renamed key stays in its dict.
#[test]
fn renames_leave_nested_dicts_whole() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "x.pt");
    let source = "../torch_save/states/app.pt";
    dcp(["convert", source, &target, r"--rename=s/\.2\.bias$/.last/"]).ok();
    let diff = dcp(["diff", source, &target, "--model-only", "--json"]);
    let model: Value = serde_json::from_str(&diff.stdout).unwrap();
    assert_eq!(model["counts"]["only_in_b"], json!(1));
    dcp(["get", &target, "app.model.last"]).ok();
}

#[test]
fn a_state_whose_parts_are_unknown_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "x");
    for how in [&["--to=hf"][..], &["--to=dcp", "--model-only"], &["--to=dcp", "--no-optimizer"]] {
        let convert = ["convert", "nested", &target].into_iter().chain(how.iter().copied());
        dcp(convert).fails(2, &["nothing says which of", "--include or --exclude", "--everything"]);
        assert!(!folder.path().join("x").exists());
    }
    // Optimizer state that only its keys show.
    let renamed = path(&folder, "renamed");
    let source = "../torch_save/states/root.pt";
    let rename = ["--rename=s/^state/adam/", "--exclude=param_groups", "--to=dcp"];
    dcp(["convert", source, &renamed].iter().chain(&rename)).ok();
    dcp(["convert", &renamed, &target, "--to=hf"])
        .fails(2, &["adam.0.bias.exp_avg", "look like the state of an optimizer"]);
    dcp(["convert", &renamed, &target, "--to=hf", "--exclude=adam"]).ok();
}

/// PyTorch's `set_optimizer_state_dict` gives settings only to parameters in these lists.
#[test]
fn parameters_of_groups_are_renamed_with_their_state() {
    let folder = tempfile::tempdir().unwrap();
    let source = "../torch_save/states/app.pt";
    for (target, more) in [("dcp", &["--to=dcp"][..]), ("one.pt", &[])] {
        let target = path(&folder, target);
        let rename = [r"--rename=s/\b2\./head./", "--rename=s/^app/run/"];
        dcp(["convert", source, &target].iter().chain(&rename).chain(more)).ok();
        let all: Value = dcp(["inspect", &target, "--json"]).json();
        let params = &all["keys"]["run.optim.param_groups.0.params"]["value"];
        assert_eq!(*params, json!(["0.weight", "0.bias", "head.weight", "head.bias"]));
        assert!(all["keys"].get("run.optim.state.head.bias.exp_avg").is_some(), "{all}");
        dcp(["verify", "--deep", &target]).ok();
    }
}

#[test]
fn a_file_maps_names() {
    let folder = tempfile::tempdir().unwrap();
    let (map, file) = (path(&folder, "names"), path(&folder, "x.safetensors"));
    fs::write(&map, "model.norm.weight  ln.gain\nmodel.norm.bias -\n").unwrap();
    let convert = ["convert", "fsdp2_adam_2r", &file, "--include=model.norm", "--map", &map];
    dcp(convert).ok();
    assert_eq!(keys(&file), ["ln.gain"]);
    fs::write(&map, r#"{"model.norm.weight": "a", "model.norm.weight": "b"}"#).unwrap();
    dcp(convert).fails(2, &[r#""model.norm.weight" occurs twice"#]);
    fs::write(&map, "model.nrm.weight ln.gain\n").unwrap();
    let mut again = convert.to_vec();
    again.push("--overwrite");
    dcp(again)
        .fails(2, &["the mapping maps names that are not in the checkpoint: model.nrm.weight"]);
    assert_eq!(keys(&file), ["ln.gain"]);
}

#[test]
fn two_keys_never_get_one_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    let run = dcp(["convert", "fsdp2_adam_2r", &file, r"--rename=s/layers\.\d/layer/"]);
    run.fails(
        2,
        &[r#""model.layers.0.weight" and "model.layers.1.weight" as "model.layer.weight""#],
    );
    dcp(["convert", "fsdp2_adam_2r", &file, "--rename=s/(/x/"]).fails(2, &["unclosed group"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_dry_run_says_all_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for (target, to) in [("x.safetensors", "safetensors"), ("new/x", "dcp")] {
        let target = path(&folder, target);
        let convert = ["convert", "fsdp2_adam_2r", &target, "--to", to, "--json"];
        let planned = dcp(convert.iter().chain(&["--dry-run"])).json();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(planned["keys"]["model.norm.bias"]["shape"], serde_json::json!([8]));
        let written = dcp(convert).json();
        for what in ["tensors", "objects", "bytes", "files", "left_out"] {
            assert_eq!(planned[what], written[what], "{to} {what}");
        }
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path)).unwrap();
        }
    }
}

#[test]
fn floats_are_cast_and_what_is_lost_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (file, narrow) = (path(&folder, "x.safetensors"), path(&folder, "y.safetensors"));
    let model = ["convert", "fsdp2_adam_2r", &file, "--model-only", "--dtype=bf16"];
    let run = dcp(model.iter().chain(&["--keep-dtype=norm"]));
    assert!(run.stderr.starts_with("note: cast 9 tensors to bfloat16; values changed by at most"));
    let all = dcp(["inspect", &file, "--json"]).json();
    let dtype = |key: &str| all["keys"][key]["dtype"].as_str().unwrap().to_owned();
    assert_eq!(dtype("embed.weight"), "bfloat16");
    assert_eq!(dtype("norm.weight"), "float32");
    assert_eq!(dtype("bn.num_batches_tracked"), "int64");

    let all = ["convert", "all_dtypes", &narrow, "--dtype=e4m3", "--overwrite"];
    dcp(all).ok();
    let report = dcp(all.iter().chain(&["--json"])).json();
    let cast = report["cast"]["tensors"].as_object().unwrap();
    assert!(cast.values().all(|cast| cast["to"] == "float8_e4m3fn"), "{cast:?}");
    assert!(cast.len() == 4, "{cast:?}");
    dcp(["convert", "all_dtypes", &narrow, "--dtype=int8"])
        .fails(2, &["int8 is not a float", "bfloat16"]);
    dcp(["convert", "all_dtypes", &narrow, "--dtype=b16"])
        .fails(2, &["is not a dtype", "float32, float16, bfloat16"]);
}

#[test]
fn a_cast_leaves_alone_what_has_to_stay_exact() {
    let folder = tempfile::tempdir().unwrap();
    let dtypes = |source: &str, names: [&str; 2]| {
        let file = path(&folder, "x.safetensors");
        dcp(["-q", "convert", source, &file, "--dtype=bf16", "--overwrite"]).ok();
        let keys = dcp(["inspect", &file, "--json"]).json()["keys"].clone();
        names.map(|name| keys[name]["dtype"].as_str().unwrap_or_default().to_owned())
    };
    let quantized = dtypes("../hf/quant_fp8_block/ckpt", ["a.weight_scale_inv", "norm"]);
    assert_eq!(quantized, ["float32", "bfloat16"]);
    let names = ["optimizer.state.norm.weight.step", "optimizer.state.norm.weight.exp_avg"];
    assert_eq!(dtypes("fsdp2_adam_2r", names), ["float32", "bfloat16"]);
}

#[test]
fn a_name_that_a_format_reserves_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    let rename = "--rename=s/^model.norm.weight$/__metadata__/";
    let run = dcp(["convert", "fsdp2_adam_2r", &file, "--include=model", rename]);
    run.fails(2, &["\"__metadata__\" is not a name that a tensor can have in a safetensors file"]);
}

/// `SGD.load_state_dict` needs the `state` that it saved, although nothing is in it.
#[test]
fn empty_dicts_are_written_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = "../torch_save/states/sgd.pt";
    dcp(["convert", source, &at("whole.pt")]).ok();
    dcp(["convert", source, &at("selected.pt"), "--exclude=x"]).ok();
    dcp(["convert", source, &at("cast.pt"), "--dtype=bf16"]).ok();
    dcp(["convert", source, &at("dcp"), "--to=dcp"]).ok();
    dcp(["convert", &at("dcp"), &at("back.pt")]).ok();
    dcp(["merge", source, source, "--identical", "--out", &at("merged.pt")]).ok();
    dcp(["average", source, source, "--out", &at("averaged.pt")]).ok();
    for name in ["whole.pt", "selected.pt", "cast.pt", "dcp", "back.pt", "merged.pt", "averaged.pt"]
    {
        assert_eq!(dcp(["get", &at(name), "optim.state"]).ok(), "{}\n", "{name}");
    }
    // The model is found as before.
    dcp(["convert", source, &at("hf"), "--to=hf"]).ok();
    assert_eq!(keys(&at("hf")).len(), 2);
}
