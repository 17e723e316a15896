//! `average` and `merge`: several checkpoints as one.

use crate::megatron::megatron;
use crate::support::{assert_same_tensors, dcp, path, tensors};

#[test]
fn the_average_of_a_checkpoint_with_itself_is_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in ["fsdp2_adam_2r", "zstd_2r", "strided_4r"] {
        let (copy, out) = (path(&folder, &format!("{fixture}_8")), path(&folder, fixture));
        dcp(["reshard", fixture, &copy, "--ranks", "3"]).ok();
        let average = ["average", fixture, &copy, fixture, "--out", &out, "--to", "dcp"];
        // In 32 bits, a third of three times a number is not always that number.
        let report = dcp(average.iter().chain(&["--accumulate", "f64", "--json"])).json();
        assert_eq!(report["dry_run"], false);
        dcp(["verify", &out, "--deep"]).ok();
        let file = path(&folder, &format!("{fixture}.safetensors"));
        dcp(["convert", &out, &file]).ok();
        assert_same_tensors(&tensors(file.as_ref()), fixture);
        let keys = |uri: &str| {
            let all = dcp(["inspect", uri, "--json"]).json()["keys"].clone();
            let objects =
                all.as_object().unwrap().iter().filter(|(_, key)| key["kind"] == "object");
            objects.map(|(name, key)| (name.clone(), key["value"].clone())).collect::<Vec<_>>()
        };
        assert_eq!(keys(&out), keys(fixture), "objects are taken along");
        dcp(average).fails(2, &["exists already", "--overwrite"]);
    }
}

#[test]
fn an_average_says_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    let sources = ["average", "fsdp2_adam_2r", "fsdp2_adam_2r", "-o", &file];
    let dry = dcp(sources.iter().chain(&["--include", "model.*", "--dtype", "bf16", "--dry-run"]));
    let text = dry.ok();
    assert!(text.contains("bfloat16") && text.contains("would be written"), "{text}");
    assert!(!std::fs::exists(&file).unwrap());
    let run = dcp(sources.iter().chain(&["--dtype", "bf16", "--weights", "0.7,0.3"]));
    assert!(run.stderr.contains("note: averaged 38 tensors; 18 other keys"), "{}", run.stderr);
    assert!(run.stderr.contains("cast 29 tensors to bfloat16"), "{}", run.stderr);
    run.ok();
    let found = tensors(file.as_ref());
    assert_eq!(found.values().filter(|(dtype, ..)| dtype == "bfloat16").count(), 29);
}

#[test]
fn checkpoints_that_do_not_go_together_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "out");
    let average = |sources: &[&str], more: &[&str]| {
        let target = ["--out", &out, "--to", "dcp"];
        dcp(["average"].iter().chain(sources).chain(&target).chain(more))
    };
    let pair = ["fsdp2_adam_2r", "nested"];
    average(&pair, &[]).fails(2, &["missing in checkpoint 2", "and 80 more", "hint: "]);
    average(&["nested", "nested"], &["--weights", "1"]).fails(2, &["the weights are 1"]);
    average(&["nested", "nested"], &["--weights", "1,-1"]).fails(2, &["a sum that is not zero"]);
    dcp(["merge", "nested", "nested", "--out", &out, "--to", "dcp"])
        .fails(2, &["is in checkpoints 1 and 2", "--identical"]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn what_was_taken_apart_is_merged_again() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let (model, rest, whole) = (at("model"), at("rest"), at("whole"));
    let source = "fsdp2_adam_2r";
    dcp(["convert", source, &model, "--to", "dcp", "--include", "model"]).ok();
    dcp(["convert", source, &rest, "--to", "dcp", "--exclude", "model", "--ranks", "2"]).ok();
    dcp(["merge", &model, &rest, "--out", &whole, "--to", "dcp"]).ok();
    dcp(["verify", &whole, "--deep"]).ok();
    let file = at("whole.safetensors");
    dcp(["convert", &whole, &file]).ok();
    assert_same_tensors(&tensors(file.as_ref()), source);
    let objects = |uri: &str| {
        let all = dcp(["inspect", uri, "--json"]).json()["keys"].clone();
        let keys = all.as_object().unwrap();
        let objects = keys.iter().filter(|(_, key)| key["kind"] == "object");
        let mut objects: Vec<_> =
            objects.map(|(name, key)| (name.clone(), key["value"].clone())).collect();
        objects.sort_by(|a, b| a.0.cmp(&b.0));
        objects
    };
    assert_eq!(objects(&whole), objects(source));
    // What is the same in both is taken once.
    let again = at("again.safetensors");
    dcp(["merge", &whole, source, &model, "--identical", "--out", &again]).ok();
    assert_same_tensors(&tensors(again.as_ref()), source);
}

#[test]
fn a_merged_folder_has_everything_and_others_say_what_they_leave_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = "fsdp2_adam_2r";
    dcp(["convert", source, &at("a"), "--to", "dcp", "--include", "model.*"]).ok();
    dcp(["convert", "zstd_2r", &at("b.safetensors")]).ok();
    let merged = dcp(["merge", &at("a"), &at("b.safetensors"), "--out", &at("m"), "--to", "hf"]);
    merged.ok();
    let keys = dcp(["inspect", &at("m"), "--json"]).json()["keys"].clone();
    assert!(keys.as_object().unwrap().keys().any(|name| name == "w"), "{keys}");

    for command in [
        &["convert", source, &at("c"), "--to", "hf"] as &[&str],
        &["average", source, "--out", &at("d"), "--to", "hf"],
    ] {
        let run = dcp(command.iter().chain(&["--json", "--dry-run"]));
        assert!(run.stderr.contains("taking the model, 12 of 56 keys"), "{}", run.stderr);
        assert_eq!(run.json()["not_taken"], 44);
    }
}

#[test]
fn tensors_that_are_one_memory_stay_one() {
    let folder = tempfile::tempdir().unwrap();
    let tied = "../torch_save/tied/model.pt";
    let once = dcp(["convert", tied, &path(&folder, "once.safetensors"), "--json"]).json();
    assert_ne!(once["tied"], serde_json::json!({}), "{once}");
    for (name, sources) in [("average", [tied, tied, "-o"]), ("cast", [tied, "--dtype", "bf16"])] {
        let out = path(&folder, &format!("{name}.safetensors"));
        let command = if name == "average" { "average" } else { "convert" };
        let mut args = vec![command];
        args.extend(sources);
        args.extend([&*out, "--json"]);
        assert_eq!(dcp(args).json()["tied"], once["tied"], "{name}");
    }
}

#[test]
fn formats_may_be_mixed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = "fsdp2_adam_2r";
    let (file, pt, hf) = (at("a.safetensors"), at("a.pt"), at("hf"));
    dcp(["convert", source, &file]).ok();
    dcp(["convert", source, &pt, "--to", "torch-save"]).ok();
    dcp(["convert", source, &hf, "--to", "hf", "--everything"]).ok();
    let out = at("average.safetensors");
    let tensors_only = ["--include", "model", "--include", "optimizer.state"];
    let average = ["average", &file, &pt, &hf, source, "--accumulate", "f64", "-o", &out];
    dcp(average.iter().chain(&tensors_only)).ok();
    let wanted = tensors(file.as_ref());
    assert_eq!(tensors(out.as_ref()), wanted);

    let (model, rest) = (at("model.safetensors"), at("rest.pt"));
    dcp(["convert", &file, &model, "--include", "model"]).ok();
    dcp(["convert", &pt, &rest, "--to", "torch-save", "--exclude", "model"]).ok();
    let whole = at("whole.pt");
    dcp(["merge", &model, &rest, "--to", "torch-save", "-o", &whole]).ok();
    let found = dcp(["diff", &whole, source, "--json"]).json();
    assert_eq!(found["differences"], serde_json::json!([]), "{found}");
}

#[test]
fn what_has_no_difference_goes_together() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    for fixture in ["objects", "t24_plain", "vectors"] {
        let pt = at(&format!("{fixture}.pt"));
        dcp(["convert", fixture, &pt, "--to", "torch-save"]).ok();
        dcp(["diff", fixture, &pt]).ok();
        let (average, merged) = (at(&format!("{fixture}_a.pt")), at(&format!("{fixture}_m.pt")));
        let run = dcp(["average", fixture, &pt, "--accumulate", "f64", "-o", &average]);
        match fixture {
            // Without tensors there is no average.
            "objects" => run.fails(2, &["the average computes nothing"]),
            _ => drop(run.ok()),
        }
        dcp(["merge", fixture, &pt, "--identical", "-o", &merged]).ok();
    }
    let run = dcp(["merge", "fsdp2_adam_2r", "t24_plain", "--identical", "-o", &at("none.pt")]);
    assert_ne!(run.code, 0);
}

#[test]
fn an_average_of_finite_numbers_that_overflows_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend([3e38_f32, 1.0].map(f32::to_le_bytes).concat());
    let source = at("huge.safetensors");
    std::fs::write(&source, file).unwrap();
    let run = dcp(["average", &source, &source, "-o", &at("a.safetensors")]);
    assert!(run.stderr.contains("1 mean of finite numbers exceeded"), "{}", run.stderr);
    assert!(run.stderr.contains("w"), "{}", run.stderr);
    let report = dcp(["average", &source, &source, "-o", &at("b.safetensors"), "--json"]).json();
    assert_eq!(report["overflowed"], serde_json::json!({"w": 1}));
    let wide = ["average", &source, &source, "--accumulate", "f64", "-o"];
    let out = at("c.safetensors");
    let run = dcp(wide.iter().copied().chain([&*out]));
    assert!(!run.stderr.contains("exceeded"), "{}", run.stderr);
    assert_eq!(tensors(out.as_ref()), tensors(source.as_ref()));
}

#[test]
fn shifted_optimizer_state_of_megatron_is_not_combined_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let bad = megatron("gpt_fully_reshardable_multibucket_CORRUPT/ckpt");
    let sound = megatron("head020_fully_reshardable_multibucket/ckpt");
    let out = path(&folder, "out");
    let average =
        ["-q", "average", &sound, &bad, "--non-float", "first", "-o", &out, "--to", "dcp"];
    let merge = ["-q", "merge", &bad, "zstd_2r", "-o", &out, "--to", "dcp"];
    for command in [&average[..], &merge] {
        let run = |more: &[&str]| dcp(command.iter().chain(more));
        run(&[])
            .fails(1, &["CORRUPT", "is damaged", "--no-optimizer", "--allow-corrupt-optimizer"]);
        assert!(!std::fs::exists(&out).unwrap());
        run(&["--no-optimizer", "--dry-run"]).ok();
        run(&["--exclude", "optimizer", "--dry-run"]).ok();
        run(&["--include", "optimizer", "--dry-run"]).fails(1, &["is damaged"]);
        run(&["--allow-corrupt-optimizer", "--dry-run"]).ok();
    }
    dcp(["-q", "average", &sound, &sound, "-o", &out, "--to", "dcp"]).ok();
    let other = path(&folder, "other.safetensors");
    dcp(["average", "zstd_2r", "-o", &other, "--allow-corrupt-optimizer"])
        .fails(2, &["--allow-corrupt-optimizer is for checkpoints of Megatron-Core"]);
}
