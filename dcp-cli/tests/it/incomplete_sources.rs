//! Jobs that write a new checkpoint, of sources that `dcp ls` calls incomplete and of steps in several parts.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{dcp, fixtures, path};

/// The commands that write a checkpoint of SRC.
const JOBS: [&[&str]; 8] = [
    &["convert", "SRC", "OUT", "--to", "dcp"],
    &["convert", "SRC", "OUT", "--to", "hf"],
    &["convert", "SRC", "OUT", "--to", "torch-save", "--everything"],
    &["convert", "SRC", "OUT", "--to", "safetensors"],
    &["reshard", "SRC", "OUT", "--ranks", "2"],
    &["average", "SRC", "SRC", "--out", "OUT", "--to", "dcp", "--non-float", "first"],
    &["merge", "SRC", "--out", "OUT", "--to", "dcp"],
    &["unshard", "SRC", "OUT"],
];

pub(crate) fn copy(fixture: &str, to: &Path) {
    dcp_testing::copy_folder(&fixtures().join(fixture), to);
}

fn with<'a>(job: &'a [&str], source: &'a str, target: &'a str) -> impl Iterator<Item = &'a str> {
    job.iter().map(move |arg| match *arg {
        "SRC" => source,
        "OUT" => target,
        arg => arg,
    })
}

fn run(job: &[&str], source: &str, target: &str) -> crate::support::Run {
    dcp(with(job, source, target))
}

pub(crate) fn olmo(step: &Path) {
    copy("../olmo/trainer/step3", step);
    copy("../olmo/fsdp2-2rank-bf16-modelonly/ckpt", &step.join("model_and_optim"));
}

pub(crate) fn accelerate(step: &Path) {
    copy("t21_plain", &step.join("pytorch_model_fsdp_0"));
    copy("fsdp2_adam_2r", &step.join("optimizer_0"));
}

pub(crate) fn shards(step: &Path) {
    let to = step.display().to_string();
    dcp(["convert", "-q", "t21_plain", &to, "--to", "hf", "--max-shard-size", "600"]).ok();
}

/// The shards under the names of a variant.
fn variant(step: &Path) {
    shards(step);
    let index = step.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap().replace("\"model-", "\"model.fp16-");
    fs::write(step.join("model.safetensors.index.fp16.json"), text).unwrap();
    fs::remove_file(index).unwrap();
    for number in 1..=4 {
        let name = |model: &str| step.join(format!("{model}-0000{number}-of-00004.safetensors"));
        fs::rename(name("model"), name("model.fp16")).unwrap();
    }
}

pub(crate) fn bins(step: &Path) {
    fs::create_dir_all(step).unwrap();
    let (one, two) = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin");
    for (file, key) in [(one, "model.norm.weight"), (two, "model.embed.weight")] {
        let to = step.join(file).display().to_string();
        dcp(["convert", "-q", "t21_plain", &to, "--to", "torch-save", "--include", key]).ok();
    }
    let map = json!({"model.norm.weight": one, "model.embed.weight": two});
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    fs::write(step.join("pytorch_model.bin.index.json"), index).unwrap();
}

/// For an index: what it holds without its second shard.
const FORGETS: &[u8] = b"forgets";

fn without_a_shard(index: &Path) {
    let mut json: Value = serde_json::from_slice(&fs::read(index).unwrap()).unwrap();
    let map = json["weight_map"].as_object_mut().unwrap();
    map.retain(|_, file| !file.as_str().unwrap().contains("-00002-of-"));
    fs::write(index, json.to_string()).unwrap();
}

fn complete(run: &TempDir, name: &str) -> Value {
    let listing = dcp(["ls", "--json", &path(run, "")]).json();
    let entries = listing["entries"].as_array().unwrap();
    entries.iter().find(|entry| entry["name"] == name).unwrap()["complete"].clone()
}

/// A source, a file of it, what the file holds instead, and what errors name.
type Case = (fn(&Path), &'static str, Option<&'static [u8]>, &'static str);

#[test]
fn what_ls_calls_incomplete_no_job_makes_a_checkpoint_of() {
    let cases: &[Case] = &[
        (olmo, ".metadata.json", None, ".metadata.json"),
        (olmo, ".metadata.json", Some(b"{\"version\":"), ".metadata.json"),
        (olmo, "train/rank0.pt", None, "train"),
        (olmo, "model_and_optim/__0_0.distcp", None, "__0_0.distcp"),
        (|to| copy("../megatron/tp2_basic/ckpt", to), "metadata.json", None, "metadata.json"),
        (|to| copy("../megatron/tp2_basic/ckpt", to), "common.pt", None, "common.pt"),
        (accelerate, "optimizer_0/.metadata", None, "optimizer_0"),
        (accelerate, "optimizer_0/__1_0.distcp", None, "optimizer_0"),
        (accelerate, "pytorch_model_fsdp_0/__0_0.distcp", None, "__0_0.distcp"),
        (|to| copy("t21_plain", to), ".metadata", None, ".metadata"),
        (|to| copy("t21_plain", to), "__0_0.distcp", Some(b"cut"), "__0_0.distcp"),
        (shards, "model.safetensors.index.json", None, "index"),
        (shards, "model-00001-of-00004.safetensors", None, "model-00001-of-00004.safetensors"),
        (shards, "model-00002-of-00004.safetensors", Some(b""), "model-00002-of-00004.safetensors"),
        (
            shards,
            "model.safetensors.index.json",
            Some(FORGETS),
            "\"model-00002-of-00004.safetensors",
        ),
        (
            variant,
            "model.safetensors.index.fp16.json",
            Some(FORGETS),
            "\"model.fp16-00002-of-00004",
        ),
        (bins, "pytorch_model.bin.index.json", Some(FORGETS), "\"pytorch_model-00002-of-00002"),
    ];
    for (number, (make, file, instead, said)) in cases.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("step3");
        make(&step);
        let (source, out) = (path(&folder, "step3"), path(&folder, "out"));
        assert_eq!(complete(&folder, "step3"), true, "{number}");
        let possible: Vec<_> = JOBS
            .iter()
            .filter(|job| {
                let done = run(job, &source, &out).code == 0;
                let _ = fs::remove_dir_all(&out).or_else(|_| fs::remove_file(&out));
                done
            })
            .collect();
        assert!(possible.len() >= 2, "{number}: {possible:?}");
        match instead {
            Some(bytes) if *bytes == FORGETS => without_a_shard(&step.join(file)),
            Some(bytes) => fs::write(step.join(file), bytes).unwrap(),
            None => fs::remove_file(step.join(file)).unwrap(),
        }
        assert_eq!(complete(&folder, "step3"), false, "{number} {file}");
        for job in possible {
            let done = run(job, &source, &out);
            // The tensors alone, with a note.
            if *file == "metadata.json" && job.contains(&"safetensors") {
                assert!(done.stderr.contains("note: the folder has"), "{}", done.stderr);
                done.ok();
                fs::remove_file(&out).unwrap();
                continue;
            }
            let shown = format!("{number} {file}: {job:?}\n{}", done.stderr);
            assert!(done.code == 1 && done.stderr.contains("error: "), "{shown}");
            // What opening a folder without an index says, says what the folder has.
            let has_hint = done.stderr.contains("hint: ") || *file == ".metadata";
            assert!(done.stderr.contains(said) && has_hint, "{shown}");
            assert!(!Path::new(&out).exists(), "{shown}");
        }
    }
}

#[test]
fn a_step_of_several_parts_is_never_written_in_part() {
    let folder = tempfile::tempdir().unwrap();
    accelerate(&folder.path().join("my step3"));
    let (source, out) = (path(&folder, "my step3"), path(&folder, "out"));
    let merge = format!(
        "`dcp merge` of \"{source}/pytorch_model_fsdp_0\", \"{source}/optimizer_0\" writes"
    );
    let said = ["\"optimizer_0\"", &*merge];
    for job in [0, 2, 3, 4, 5, 6] {
        dcp(["-q"].iter().copied().chain(with(JOBS[job], &source, &out))).fails(2, &said);
        assert!(!Path::new(&out).exists());
    }
    // The model alone, by its option and by its path.
    let model = dcp(["convert", &source, &out, "--to", "hf"]);
    assert!(model.stderr.contains("pytorch_model_fsdp_0"), "{}", model.stderr);
    assert!(model.stderr.contains("optimizer_0"), "{}", model.stderr);
    model.ok();
    let parts = ["pytorch_model_fsdp_0", "optimizer_0"];
    let parts = parts.map(|part| format!("{source}/{part}"));
    let one = path(&folder, "one");
    dcp(["convert", &parts[0], &one, "--to", "dcp"]).ok();
}

#[test]
fn a_damaged_part_of_a_step_makes_it_incomplete_and_its_model_stays() {
    let cases: [(&str, &str, Option<&[u8]>); 4] = [
        ("optimizer_0", ".metadata", None),
        ("optimizer_0", "__1_0.distcp", None),
        ("optim", "__0_0.distcp", Some(b"cut")),
        ("optimizer", "model-00002-of-00004.safetensors", None),
    ];
    for (part, file, instead) in cases {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("step3");
        let to = step.display().to_string();
        dcp(["convert", "-q", "t21_plain", &to, "--to", "hf"]).ok();
        match part {
            "optimizer" => shards(&step.join(part)),
            _ => copy("fsdp2_adam_2r", &step.join(part)),
        }
        // A step of its own, in the folder of a run that has its last model at the top.
        copy("t21_plain", &step.join("step-1"));
        fs::remove_file(step.join("step-1/.metadata")).unwrap();
        assert_eq!(complete(&folder, "step3"), true, "{part} {file}");
        match instead {
            Some(bytes) => fs::write(step.join(part).join(file), bytes).unwrap(),
            None => fs::remove_file(step.join(part).join(file)).unwrap(),
        }
        assert_eq!(complete(&folder, "step3"), false, "{part} {file}");
        dcp(["inspect", &to]).not_whole(&[part]);
        assert_eq!(dcp(["verify", &to]).code, 1, "{part} {file}");
        dcp(["prune", &path(&folder, ""), "--incomplete", "--min-age", "0s", "--yes"]).ok();
        assert!(step.join("model.safetensors").exists(), "{part} {file}");
        // The model is read, and a note says what is not whole.
        let out = path(&folder, "out");
        let written = dcp(["convert", &to, &out, "--to", "dcp"]);
        assert!(written.stderr.contains(part), "{part} {file}: {}", written.stderr);
        written.ok();
    }
}
