//! Which checkpoints are complete: `ls`, `verify` and `prune` agree about files that were cut short,
//! never written, or not fetched, and about folders of programs that dcp does not read.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{dcp, fixtures};

/// A pointer of Git LFS.
const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";

/// A step of one format.
struct Step {
    what: &'static str,
    folder: TempDir,
}

fn step(what: &'static str, make: impl FnOnce(&Path)) -> Step {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path());
    Step { what, folder }
}

fn dcp_to(args: &[&str], target: &Path) {
    let source = fixtures().join("fsdp2_adam_2r").display().to_string();
    let target = target.display().to_string();
    dcp([&["convert", "-q", &source, &target], args].concat()).ok();
}

/// Copies the checkpoint of a fixture, but not what is expected of it.
fn copy(fixture: &str, to: &Path) {
    dcp_testing::copy_folder(&fixtures().join(fixture), to);
    for name in fs::read_dir(to).unwrap().map(|entry| entry.unwrap().path()) {
        if name.file_name().unwrap().to_string_lossy().starts_with("expected") {
            fs::remove_file(name).unwrap();
        }
    }
}

/// One step of each format.
fn steps() -> Vec<Step> {
    let copied = |from: &'static str| move |to: &Path| copy(from, to);
    vec![
        step("dcp", copied("fsdp2_adam_2r")),
        step("dcp of safetensors", copied("safetensors_fmt_2r")),
        step("dcp without collectives", copied("no_collectives_2r")),
        step("ByteCheckpoint", |to| {
            copy("../byte_checkpoint/fsdp2_2r", to);
            // The files of ranks, which are in no index: damage there leaves the step unknown.
            fs::remove_dir_all(to.join("extra_state")).unwrap();
        }),
        step("hugging face, one file", |to| dcp_to(&["--to", "hf", "--everything"], to)),
        step("hugging face, shards", |to| {
            dcp_to(&["--to", "hf", "--everything", "--max-shard-size", "1000"], to);
        }),
        step("a trainer's folder", |to| {
            dcp_to(&["--to", "hf", "--everything"], to);
            dcp_to(&["--to", "torch-save"], &to.join("optimizer.pt"));
            let older = fixtures().join("../torch_save/t21/legacy.pt");
            fs::copy(older, to.join("scheduler.pt")).unwrap();
        }),
        step("pytorch_model.bin", |to| {
            dcp_to(&["--to", "torch-save"], &to.join("pytorch_model.bin"))
        }),
        step("pytorch_model.bin, shards", |to| {
            let names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
            for name in names {
                dcp_to(&["--to", "torch-save", "--model-only"], &to.join(name));
            }
            let map =
                json!({ "weight_map": { "embed.weight": names[0], "norm.weight": names[1] } });
            fs::write(to.join("pytorch_model.bin.index.json"), map.to_string()).unwrap();
        }),
        step("olmo", |to| {
            let olmo = fixtures().join("../olmo");
            dcp_testing::copy_folder(&olmo.join("trainer/step3"), to);
            let model = olmo.join("fsdp2-2rank-bf16-modelonly/ckpt");
            dcp_testing::copy_folder(&model, &to.join("model_and_optim"));
        }),
        step("an adapter of peft", copied("../peft/lora/ckpt")),
        step("files of ranks", copied("../trainers/t24_fsdp1_mesh_2r/ckpt/global_step_2/actor")),
        step("megatron", copied("../megatron/tp2_basic/ckpt")),
        step("megatron by ranks", copied("../megatron/run_legacy_torch_tp2/iter_0000010")),
    ]
}

/// The files of a folder and below it, relative to it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false => found.push(path.strip_prefix(folder).unwrap().to_path_buf()),
            }
        }
    }
    found.sort();
    found
}

/// Files of which a step needs every byte. A configuration, a tokenizer or a note may be anything.
fn is_needed(file: &Path) -> bool {
    let name = file.file_name().unwrap().to_str().unwrap();
    let endings = [
        ".distcp",
        ".safetensors",
        ".pt",
        ".bin",
        ".metadata",
        ".index.json",
        "adapter_config.json",
    ];
    endings.iter().any(|ending| name.ends_with(ending))
}

/// The answer of `ls` to damage of a file: a step of OLMo-core is whole without the state of its trainer, which only a
/// resume reads.
fn damaged(file: &Path) -> Value {
    if file.starts_with("train") { Value::Null } else { json!(false) }
}

/// Lengths to which a file of `len` bytes is cut. JSON ends in a newline that it does not need.
fn cuts(file: &Path, len: usize) -> [usize; 4] {
    let is_json = file.extension().is_some_and(|ending| ending == "json");
    [0, 7.min(len - 1), len / 2, len - if is_json { 2 } else { 1 }]
}

fn listed(run: &Path) -> Value {
    dcp(["ls", "--json", &run.display().to_string()]).json()
}

fn state(run: &Path, name: &str) -> (Value, String) {
    let listing = listed(run);
    let entries = listing["entries"].as_array().unwrap();
    let one = entries.iter().find(|entry| entry["name"] == name);
    let one = one.unwrap_or_else(|| panic!("{name} is not in {listing:#}"));
    (one["complete"].clone(), one["problem"].as_str().unwrap_or_default().to_owned())
}

/// A run of the step under two names, the second of which is newer and is to be damaged.
fn run_of(step: &Step) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    for name in ["step10", "step20"] {
        dcp_testing::copy_folder(step.folder.path(), &run.path().join(name));
    }
    run
}

#[test]
fn a_file_that_was_cut_short_anywhere_makes_its_checkpoint_incomplete() {
    for step in steps() {
        let what = step.what;
        let run = run_of(&step);
        assert_eq!(state(run.path(), "step20"), (json!(true), String::new()), "{what}");
        for file in files(step.folder.path()).into_iter().filter(|file| is_needed(file)) {
            let path = run.path().join("step20").join(&file);
            let whole = fs::read(&path).unwrap();
            let len = whole.len();
            for cut in cuts(&file, len) {
                fs::write(&path, &whole[..cut]).unwrap();
                let (complete, problem) = state(run.path(), "step20");
                let shown = format!("{what}: {file:?} of {len} bytes, cut to {cut}");
                assert_eq!(complete, damaged(&file), "{shown}");
                assert!(!problem.is_empty());
                assert_eq!(listed(run.path())["latest"], "step10", "{what}: {file:?} {cut}");
            }
            fs::write(&path, &whole).unwrap();
        }
    }
}

#[test]
fn verify_finds_what_ls_finds() {
    for step in steps() {
        let what = step.what;
        let run = run_of(&step);
        let step20 = run.path().join("step20");
        let uri = step20.display().to_string();
        dcp(["verify", "-q", &uri]).ok();
        for file in files(step.folder.path()).into_iter().filter(|file| is_needed(file)) {
            let path = step20.join(&file);
            let whole = fs::read(&path).unwrap();
            fs::write(&path, &whole[..cuts(&file, whole.len())[3]]).unwrap();
            let verified = dcp(["verify", "-q", &uri]);
            assert_ne!(verified.code, 0, "{what}: {file:?}\n{}", verified.stdout);
            fs::write(&path, &whole).unwrap();
        }
    }
}

#[test]
fn a_pointer_of_git_lfs_is_no_file() {
    for step in steps() {
        let what = step.what;
        let run = run_of(&step);
        for file in files(step.folder.path()).into_iter().filter(|file| is_needed(file)) {
            let path = run.path().join("step20").join(&file);
            let whole = fs::read(&path).unwrap();
            fs::write(&path, LFS).unwrap();
            let (complete, problem) = state(run.path(), "step20");
            assert_eq!(complete, damaged(&file), "{what}: {file:?}");
            assert!(problem.contains("Git LFS"), "{what}: {file:?}: {problem}");
            let uri = run.path().join("step20").display().to_string();
            let verified = dcp(["verify", "-q", &uri]);
            assert_ne!(verified.code, 0, "{what}: {file:?}\n{}", verified.stdout);
            fs::write(&path, &whole).unwrap();
        }
    }
}

#[test]
fn an_index_of_zeros_is_found_beside_checkpoints_of_the_same_lengths() {
    for what in ["fsdp2_adam_2r", "../megatron/tp2_basic/ckpt"] {
        let run = tempfile::tempdir().unwrap();
        for name in ["step10", "step20", "step30"] {
            copy(what, &run.path().join(name));
        }
        let index = run.path().join("step10/.metadata");
        let len = fs::metadata(&index).unwrap().len();
        fs::write(&index, vec![0; usize::try_from(len).unwrap()]).unwrap();
        let (complete, problem) = state(run.path(), "step10");
        assert_eq!(complete, false, "{what}");
        assert!(problem.contains(".metadata"), "{problem}");
        assert_eq!(state(run.path(), "step20").0, true);
    }
}

#[test]
fn a_file_that_an_index_names_is_missed() {
    for step in steps().iter().filter(|step| step.what.ends_with("shards")) {
        for file in files(step.folder.path()) {
            let run = run_of(step);
            if file.extension().is_some_and(|ending| ending != "json") {
                fs::remove_file(run.path().join("step20").join(&file)).unwrap();
                let (complete, problem) = state(run.path(), "step20");
                assert_eq!(complete, false, "{}: {file:?}", step.what);
                assert!(problem.contains(file.to_str().unwrap()), "{problem}");
            }
        }
    }
}

#[test]
fn an_index_that_names_no_tensor_is_no_model() {
    for step in steps().iter().filter(|step| step.what.ends_with("shards")) {
        let run = run_of(step);
        let step20 = run.path().join("step20");
        let is_index = |file: &PathBuf| file.to_str().unwrap().ends_with(".index.json");
        let index = files(&step20).into_iter().find(is_index).unwrap();
        fs::write(step20.join(index), r#"{"metadata": {}, "weight_map": {}}"#).unwrap();
        let (complete, problem) = state(run.path(), "step20");
        assert_eq!(complete, false, "{}", step.what);
        assert!(problem.contains("names no tensor"), "{problem}");
        let (uri, target) = (step20.display().to_string(), run.path().join("target"));
        assert_ne!(dcp(["verify", "-q", &uri]).code, 0, "{}", step.what);
        let convert = ["convert", "-q", "--to", "dcp", &uri, target.to_str().unwrap()];
        dcp(convert).fails(1, &["index", "names no tensor"]);
        assert!(!target.exists());
    }
}

#[test]
fn a_missing_folder_of_a_rank_is_named() {
    let run = tempfile::tempdir().unwrap();
    let legacy = fixtures().join("../megatron/run_legacy_torch_tp2/iter_0000010");
    dcp_testing::copy_folder(&legacy, &run.path().join("iter_0000010"));
    fs::remove_dir_all(run.path().join("iter_0000010/mp_rank_00")).unwrap();
    let (complete, problem) = state(run.path(), "iter_0000010");
    assert_eq!(complete, false);
    assert_eq!(problem, "mp_rank_00 is missing");
}

/// Folders of other programs, and what names the program.
fn other_programs() -> Vec<(&'static str, Step)> {
    let model = |to: &Path| dcp_to(&["--to", "hf", "--everything"], to);
    let torch = |to: &Path, name: &str| dcp_to(&["--to", "torch-save"], &to.join(name));
    vec![
        (
            "slime",
            step("weight changes", |to| {
                dcp_to(&["--to", "hf", "--everything", "--max-shard-size", "1000"], to);
                let index = to.join("model.safetensors.index.json");
                let mut json: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
                json["metadata"] = json!({ "version": "000001", "delta_encoding": "xor" });
                fs::write(&index, json.to_string()).unwrap();
            }),
        ),
        (
            "torch_checkpointing",
            step("local tensors", |to| {
                model(to);
                fs::rename(to.join("model.safetensors"), to.join("model_0.safetensors")).unwrap();
                fs::write(to.join("metadata.pkl"), b"\x80\x04}.").unwrap();
            }),
        ),
        ("accelerate", step("its full state", |to| torch(to, "pytorch_model_fsdp.bin"))),
        ("files of torch.save", step("files of no known program", |to| torch(to, "weights.pt"))),
    ]
}

#[test]
fn folders_of_other_programs_are_refused_by_name_and_never_deleted() {
    for (program, step) in other_programs() {
        let run = run_of(&step);
        let (complete, problem) = state(run.path(), "step20");
        assert_eq!(complete, Value::Null, "{program}: {problem}");
        assert!(problem.contains(program), "{program}: {problem}");
        let uri = run.path().join("step20").display().to_string();
        let target = run.path().join("target").display().to_string();
        for command in [
            vec!["inspect", &uri],
            vec!["verify", &uri],
            vec!["stats", &uri],
            vec!["convert", &uri, &target, "--to", "dcp"],
            vec!["convert", &uri, &target, "--to", "hf"],
            vec!["diff", &uri, &uri],
        ] {
            let failed = dcp(command.iter());
            assert_ne!(failed.code, 0, "{program}: {command:?}\n{}", failed.stdout);
            assert!(failed.stderr.contains(program), "{program}: {command:?}: {}", failed.stderr);
        }
        assert!(!Path::new(&target).exists(), "{program}");
        let uri = run.path().display().to_string();
        let prune = ["prune", &uri, "--incomplete", "--min-age", "0s", "--yes"];
        dcp(prune).ok();
        for name in ["step10", "step20"] {
            let kept = files(&run.path().join(name));
            assert_eq!(kept, files(step.folder.path()), "{program}: {name}");
        }
    }
}
