//! `ls`, `inspect` and `verify` give one answer to the question whether a checkpoint is complete: for
//! every format, whichever of its files is missing, cut short, zeroed or a pointer of Git LFS.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_jobs::{Destination, Format, Need, Opener};
use dcp_storage_fs::FsStorage;
use serde_json::{Value, json};

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
/// The name of the checkpoint in its run.
const STEP: &str = "step20";

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    dcp::opener(storages).need(Need::Readable)
}

fn fixture(name: &str) -> PathBuf {
    dcp_testing::fixture(name)
}

async fn convert(format: Format, to: &Path) {
    convert_with(Destination::new(to.display().to_string()).to(format)).await;
}

async fn convert_with(destination: Destination) {
    let source = fixture("pytorch/fsdp2_adam_2r").display().to_string();
    let source = opener().open(&source).await.unwrap();
    source.convert(destination).run().await.unwrap();
}

/// Copies a fixture, but not what is expected of it.
fn copy(name: &str, to: &Path) {
    dcp_testing::copy_folder(&fixture(name), to);
    for path in files(to) {
        if path.file_name().unwrap().to_string_lossy().starts_with("expected") {
            fs::remove_file(to.join(path)).unwrap();
        }
    }
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

/// Renames the files and the index of a sharded model to those of a variant, as transformers names them.
fn as_variant(folder: &Path, stem: &str, ending: &str, variant: &str) {
    let renamed = |name: &str| name.replacen(stem, &format!("{stem}.{variant}"), 1);
    let index = folder.join(format!("{stem}.{ending}.index.json"));
    let mut json: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    for file in json["weight_map"].as_object_mut().unwrap().values_mut() {
        *file = json!(renamed(file.as_str().unwrap()));
    }
    fs::remove_file(index).unwrap();
    for file in files(folder) {
        let name = file.to_str().unwrap();
        if name.ends_with(ending) {
            fs::rename(folder.join(name), folder.join(renamed(name))).unwrap();
        }
    }
    let index = format!("{stem}.{ending}.index.{variant}.json");
    fs::write(folder.join(index), json.to_string()).unwrap();
}

/// Adds the files of one model to another one.
fn with_all(from: &Path, to: &Path) {
    for file in files(from) {
        fs::copy(from.join(&file), to.join(&file)).unwrap();
    }
}

async fn bin_shards(to: &Path) {
    let names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
    fs::create_dir_all(to).unwrap();
    for name in names {
        convert(Format::TorchSave, &to.join(name)).await;
    }
    let map = json!({ "weight_map": {
        "model.embed.weight": names[0], "model.norm.weight": names[1] } });
    fs::write(to.join("pytorch_model.bin.index.json"), map.to_string()).unwrap();
}

async fn sharded(to: &Path) {
    let destination = Destination::new(to.display().to_string()).to(Format::HuggingFace);
    convert_with(destination.max_shard_bytes(1000)).await;
}

/// A checkpoint of each format, made in the folder or as the file `at`.
async fn make(what: &str, at: &Path) {
    let scratch = tempfile::tempdir().unwrap();
    let other = scratch.path().join("other");
    match what {
        "hf" => convert(Format::HuggingFace, at).await,
        "hf, shards" => sharded(at).await,
        "hf, sharded variant" => {
            sharded(at).await;
            as_variant(at, "model", "safetensors", "fp16");
        }
        "hf, two sharded variants" => {
            sharded(at).await;
            sharded(&other).await;
            as_variant(at, "model", "safetensors", "fp16");
            as_variant(&other, "model", "safetensors", "bf16");
            with_all(&other, at);
        }
        "hf, a model and its sharded variant" => {
            sharded(at).await;
            sharded(&other).await;
            as_variant(&other, "model", "safetensors", "fp16");
            with_all(&other, at);
        }
        "hf, variants of one file" => {
            convert(Format::HuggingFace, at).await;
            let (single, variant) = (at.join("model.safetensors"), "model.fp16.safetensors");
            fs::copy(&single, at.join(variant)).unwrap();
            fs::rename(single, at.join("model.bf16.safetensors")).unwrap();
        }
        "hf, diffusers" => {
            sharded(at).await;
            for file in files(at) {
                let name = file.to_str().unwrap();
                if let Some(rest) = name.strip_prefix("model") {
                    let to = at.join(format!("diffusion_pytorch_model{rest}"));
                    fs::rename(at.join(name), &to).unwrap();
                    if name.ends_with(".json") {
                        let text = fs::read_to_string(&to).unwrap();
                        let text = text.replace("\"model-", "\"diffusion_pytorch_model-");
                        fs::write(&to, text).unwrap();
                    }
                }
            }
        }
        "hf, a trainer's folder" => {
            convert(Format::HuggingFace, at).await;
            convert(Format::TorchSave, &at.join("optimizer.pt")).await;
            fs::copy(fixture("torch_save/t21/legacy.pt"), at.join("scheduler.pt")).unwrap();
        }
        "bin" => {
            fs::create_dir_all(at).unwrap();
            convert(Format::TorchSave, &at.join("pytorch_model.bin")).await;
        }
        "bin, shards" => bin_shards(at).await,
        "bin, sharded variant" => {
            bin_shards(at).await;
            as_variant(at, "pytorch_model", "bin", "fp16");
        }
        "safetensors" => {
            fs::create_dir_all(at).unwrap();
            convert(Format::Safetensors, &at.join("weights.safetensors")).await;
        }
        "olmo" => {
            copy("olmo/trainer/step3", at);
            let model = fixture("olmo/fsdp2-2rank-bf16-modelonly/ckpt");
            dcp_testing::copy_folder(&model, &at.join("model_and_optim"));
        }
        "nemo" => copy("megatron/tp2_basic/ckpt", &at.join("weights")),
        "accelerate" => {
            copy("pytorch/t21_plain", &at.join("pytorch_model_fsdp_0"));
            copy("pytorch/fsdp2_adam_2r", &at.join("optimizer_0"));
        }
        fixture => copy(fixture, at),
    }
}

const FOLDERS: [&str; 29] = [
    "pytorch/fsdp2_adam_2r",
    "pytorch/safetensors_fmt_2r",
    "pytorch/zstd_2r",
    "pytorch/no_collectives_2r",
    "hf",
    "hf, shards",
    "hf, sharded variant",
    "hf, two sharded variants",
    "hf, a model and its sharded variant",
    "hf, variants of one file",
    "hf, diffusers",
    "hf, a trainer's folder",
    "hf/sharded_2r/ckpt",
    "hf/consolidated_index_4r/ckpt",
    "bin",
    "bin, shards",
    "bin, sharded variant",
    "safetensors",
    "olmo",
    "nemo",
    "accelerate",
    "megatron/tp2_basic/ckpt",
    "megatron/run_torch_dist_v019/iter_0000010",
    "megatron/head020_basic_integrity/ckpt",
    "megatron/v09_zarr/ckpt",
    "megatron/v06_zarr/ckpt",
    "megatron/v09_flattened_torch24/ckpt",
    "megatron/v015_flattened/ckpt",
    "megatron/run_legacy_torch_tp2/iter_0000010",
];

/// What each command says: whether the checkpoint is whole.
#[derive(Debug, PartialEq)]
struct Answers {
    ls: bool,
    inspect: bool,
    verify: bool,
}

impl Answers {
    fn agree(&self) -> bool {
        self.ls == self.inspect && self.inspect == self.verify
    }
}

async fn answers_of(run: &Path, name: &str) -> (Answers, String) {
    let opener = opener();
    let listing = opener.list(&run.display().to_string()).await.unwrap();
    let entry = listing.entries.iter().find(|entry| entry.name == name);
    let ls = entry.and_then(|entry| entry.complete) == Some(true);
    let mut said = format!("ls: {:?}", entry.and_then(|entry| entry.problem.as_deref()));
    let (mut inspect, mut verify) = (false, false);
    match opener.open(&run.join(name).display().to_string()).await {
        Ok(opened) => {
            match opened.inspect().run().await {
                Ok(found) => {
                    inspect = found.problem.is_none();
                    said.push_str(&format!("; inspect: {:?}", found.problem));
                }
                Err(error) => said.push_str(&format!("; inspect: {error}")),
            }
            match opened.verify().run().await {
                Ok(report) => {
                    verify = report.ok;
                    let first = report.problems.first().map(|problem| &problem.message);
                    said.push_str(&format!("; verify: {first:?}"));
                }
                Err(error) => said.push_str(&format!("; verify: {error}")),
            }
        }
        Err(error) => said.push_str(&format!("; open: {error}")),
    }
    (Answers { ls, inspect, verify }, said)
}

/// What is done to a file: its new bytes, `None` where it is removed.
fn damages(whole: &[u8]) -> Vec<(&'static str, Option<Vec<u8>>)> {
    let len = whole.len();
    let cut = |len: usize| Some(whole.get(..len).unwrap_or_default().to_vec());
    vec![
        ("removed", None),
        ("empty", cut(0)),
        ("half", cut(len / 2)),
        ("one byte less", cut(len.saturating_sub(1))),
        ("zeros", Some(vec![0; len])),
        ("a pointer of Git LFS", Some(LFS.to_vec())),
    ]
}

/// Files that a checkpoint is complete without, and why.
const NOT_NEEDED: [(&str, &str); 3] = [
    ("config.json", "no tensor is in it: the class of the model loads it"),
    (".dcp", "the sidecar of dcp: readers do without"),
    ("data_paths.txt", "a note of OLMo-core"),
];

/// Files that a checkpoint is complete without, but not with a part of them, and why.
const OPTIONAL: [(&str, &str); 6] = [
    ("optimizer.pt", "not every model has one, and nothing names it"),
    ("scheduler.pt", "the same"),
    ("sharded/", "PyTorch's consolidation leaves the files of ranks, which nothing reads"),
    ("model.bf16.safetensors", "the other variant is then the model"),
    ("model.fp16.safetensors", "the same"),
    ("integrity.json", "Megatron-Core writes one since 0.17.1, with --verify-integrity"),
];

/// Files whose number no name says: the last rank of files without an index, where the extent of a tensor is
/// that of the parts that are there, and the objects of zarr, whose last axis has no length in a name.
const LAST: [&str; 3] = [
    "shard-00002-model-00001-of-00001.safetensors",
    "_extra_state/shard_0_1.pt",
    "rng_state/shard_0.1_1.pt",
];

fn may_be_whole(file: &Path, damage: &str) -> bool {
    let (path, name) = (file.to_string_lossy(), file.file_name().unwrap().to_string_lossy());
    let is_optional = OPTIONAL.iter().any(|(start, _)| path.starts_with(start))
        || LAST.iter().any(|end| path.ends_with(end));
    damage == "zeros"
        || NOT_NEEDED.iter().any(|(start, _)| name.starts_with(start))
        || damage == "removed" && is_optional
}

#[tokio::test]
async fn ls_inspect_and_verify_agree_about_every_file_of_every_format() {
    let mut wrong = Vec::new();
    for what in FOLDERS {
        let run = tempfile::tempdir().unwrap();
        let step = run.path().join(STEP);
        make(what, &step).await;
        let (answers, said) = answers_of(run.path(), STEP).await;
        if answers != (Answers { ls: true, inspect: true, verify: true }) {
            wrong.push(format!("{what}: sound, {answers:?}: {said}"));
            continue;
        }
        for file in files(&step) {
            let path = step.join(&file);
            let whole = fs::read(&path).unwrap();
            for (damage, bytes) in damages(&whole) {
                // JSON does without the newline at its end.
                let is_same = |bytes: &Vec<u8>| bytes.trim_ascii_end() == whole.trim_ascii_end();
                if bytes.as_ref().is_some_and(is_same) {
                    continue;
                }
                match bytes {
                    Some(bytes) => fs::write(&path, bytes).unwrap(),
                    None => fs::remove_file(&path).unwrap(),
                }
                let (answers, said) = answers_of(run.path(), STEP).await;
                if !answers.agree() || answers.ls && !may_be_whole(&file, damage) {
                    wrong.push(format!("{what}: {file:?} {damage}, {answers:?}: {said}"));
                }
                fs::write(&path, &whole).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
