//! A step that counts as complete by names, lengths and headers, and that no reader opens, is never the reason that
//! `dcp prune` deletes the last one which does.

use std::fs;
use std::path::Path;

use dcp::core::metadata::{ChunkTable, Entry};
use dcp::formats::metadata::{Profile, decode, encode};
use serde_json::Value;
use tempfile::TempDir;

use crate::incomplete_sources::{accelerate, bins, copy, shards};
use crate::support::{dcp, path};

/// A checkpoint of Megatron-Core whose common state is an object of its index.
const INSIDE: &str = "../megatron/head020_basic_integrity/ckpt";

type Change = fn(&Path);

fn run_of(make: Change, steps: &[&str]) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    steps.iter().for_each(|name| make(&run.path().join(name)));
    run
}

/// Replaces the first bytes that are `old` by as many others.
fn replace(file: &Path, old: &[u8], new: &[u8]) {
    assert_eq!(old.len(), new.len());
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    fs::write(file, bytes).unwrap();
}

/// Writes ones over an object in the files of a checkpoint of DCP.
fn overwrite_object(step: &Path, fqn: &str) {
    let index = decode(&fs::read(step.join(".metadata")).unwrap()).unwrap();
    let object = index.get(fqn).unwrap().as_object().unwrap();
    let placement = object.placement.unwrap();
    let file = step.join(index.file(placement.file).unwrap().as_str());
    let mut bytes = fs::read(&file).unwrap();
    let start = usize::try_from(placement.byte_offset).unwrap();
    let len = usize::try_from(placement.byte_len).unwrap();
    bytes[start..start + len].fill(1);
    fs::write(file, bytes).unwrap();
}

/// Removes the last chunk of the first tensor that has several from an index.
fn lose_chunk(index: &Path) {
    let mut metadata = decode(&fs::read(index).unwrap()).unwrap();
    let is_split = |entry: &Entry| entry.as_tensor().is_some_and(|tensor| tensor.chunks.len() > 1);
    let fqn = metadata.iter().find(|(_, entry)| is_split(entry)).unwrap().0.to_string();
    let Some(Entry::Tensor(tensor)) = metadata.get_mut(&fqn) else { panic!("no {fqn}") };
    let mut chunks = ChunkTable::new(tensor.shape.ndim());
    for at in 0..tensor.chunks.len() - 1 {
        let chunk = tensor.chunks.get(at).unwrap();
        chunks.push(chunk.offsets, chunk.sizes, chunk.placement).unwrap();
    }
    tensor.chunks = chunks;
    fs::write(index, encode(&metadata, Profile::default()).unwrap()).unwrap();
}

const DAMAGE: [(&str, Change, Change); 7] = [
    (
        "an object of the common state",
        |to| copy(INSIDE, to),
        |step| {
            overwrite_object(step, "common_state/shard_0_1");
        },
    ),
    ("the dtype of a header", shards, |step| {
        replace(&step.join("model-00001-of-00004.safetensors"), b"\"F32\"", b"\"F99\"");
    }),
    ("the shape of a header", shards, |step| {
        replace(&step.join("model-00001-of-00004.safetensors"), b"\"shape\":[", b"\"shape\":{");
    }),
    ("the notes of a header", shards, |step| {
        replace(&step.join("model-00001-of-00004.safetensors"), b"\"pt\"", b"1234");
    }),
    ("a pickle", bins, |step| {
        replace(&step.join("pytorch_model-00001-of-00002.bin"), b"_rebuild_", b"\x00ebuild_.");
    }),
    ("the index of an optimizer", accelerate, |step| {
        lose_chunk(&step.join("optimizer_0/.metadata"));
    }),
    (
        "an array",
        |to| copy("../megatron/v09_zarr/ckpt", to),
        |step| {
            replace(&step.join("row.weight/.zarray"), b"\"chunks\"", b"\"chunkz\"");
        },
    ),
];

fn deleted(json: &Value) -> Vec<&str> {
    let gone = json["deleted"].as_array().unwrap().iter();
    gone.map(|one| one["name"].as_str().unwrap()).collect()
}

#[test]
fn the_last_step_that_a_reader_opens_stays() {
    let mut wrong = Vec::new();
    for (what, make, damage) in DAMAGE {
        // No part of a model of `torch.save` is deleted, as it has no index that could go first.
        let older = if what == "a pickle" { shards } else { make };
        let run = run_of(older, &["step10", "step20"]);
        make(&run.path().join("step30"));
        let step = path(&run, "step30");
        let before = dcp(["verify", &step]);
        assert_eq!(before.code, 0, "{what}: {}{}", before.stdout, before.stderr);
        damage(&run.path().join("step30"));
        assert_ne!(dcp(["verify", &step]).code, 0, "{what}");
        let uri = path(&run, "");
        let args = ["prune", &uri, "--by", "step", "--keep-last", "1", "--yes", "--json"];
        let done = dcp(args);
        let gone = match done.code {
            0 => deleted(&serde_json::from_str(&done.stdout).unwrap()).join(" "),
            _ => done.stderr.clone(),
        };
        if gone != "step10" {
            wrong.push(format!("{what}: {gone}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn where_no_step_opens_nothing_is_deleted() {
    for (what, make, damage) in DAMAGE {
        let run = run_of(make, &["step10", "step20"]);
        ["step10", "step20"].iter().for_each(|step| damage(&run.path().join(step)));
        let uri = path(&run, "");
        let done = dcp(["prune", &uri, "--by", "step", "--keep-last", "1", "--yes"]);
        assert!(run.path().join("step10").exists(), "{what}: {}", done.stdout);
        let is_refused = done.code == 1 && done.stderr.contains("so nothing is deleted");
        let stays = done.stderr.contains("step10 stays: half deleted");
        assert!(is_refused || stays, "{what}: {}{}", done.stdout, done.stderr);
    }
}

/// Neither a file of others nor what Python would run is damage of the checkpoint.
#[test]
fn findings_about_other_files_do_not_count_against_a_step() {
    let run = run_of(|to| copy("fsdp2_adam_2r", to), &["step10", "step20", "step30"]);
    for step in ["step10", "step20", "step30"] {
        fs::write(run.path().join(step).join("done.pt"), "").unwrap();
    }
    let report = dcp(["verify", "--json", &path(&run, "step30")]);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(report["problems"][0]["kind"], "stray_file", "{report:#}");
    let uri = path(&run, "");
    let done = dcp(["prune", &uri, "--by", "step", "--keep-last", "1", "--yes", "--json"]).json();
    assert_eq!(deleted(&done), ["step10", "step20"]);
    // A file of the checkpoint is one of its own.
    fs::write(run.path().join("step30/__1_0.distcp"), "cut").unwrap();
    let report = dcp(["verify", "--json", &path(&run, "step30")]);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    let kinds = report["problems"].as_array().unwrap().iter().map(|one| &one["kind"]);
    assert!(kinds.into_iter().any(|kind| kind == "short_file"), "{report:#}");
}

#[test]
fn a_damaged_newest_step_is_named_and_the_policy_keeps_it_too() {
    let run = run_of(|to| copy(INSIDE, to), &["step10", "step20", "step30"]);
    overwrite_object(&run.path().join("step30"), "common_state/shard_0_1");
    let uri = path(&run, "");
    let plan = ["prune", &uri, "--by", "step", "--keep-last", "1", "--dry-run"];
    let text = dcp(plan).ok();
    assert!(text.contains("the newest valid one"), "{text}");
    assert!(text.contains("not valid: step30"), "{text}");
    let done = dcp(["prune", &uri, "--by", "step", "--keep-last", "1", "--yes"]);
    assert!(done.stderr.contains("note: step30 does not verify: "), "{}", done.stderr);
    assert!(done.ok().contains("deleted step10"));
}
