//! Models of Hugging Face whose index, headers and files contradict each other.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{dcp, fixtures, path};

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// A model of two shards.
fn sharded(to: &Path) {
    let source = fixtures().join("fsdp2_adam_2r").display().to_string();
    let to = to.display().to_string();
    dcp(["convert", "-q", &source, &to, "--to", "hf", "--max-shard-size", "1000"]).ok();
}

/// A run with a whole `checkpoint-1`, and the folder of a `checkpoint-2` after it.
fn run() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let step = run.join("checkpoint-2");
    sharded(&run.join("checkpoint-1"));
    fs::create_dir(&step).unwrap();
    (folder, run, step)
}

/// A file with two tensors of eight bytes, the second at `start` of the data.
fn two_tensors(start: u64) -> Vec<u8> {
    let tensor =
        |start: u64| json!({"dtype": "U8", "shape": [8], "data_offsets": [start, start + 8]});
    let header = json!({"a": tensor(0), "b": tensor(start)}).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend((0..start + 8).map(|_| 1));
    file
}

/// Every command says that `checkpoint-2` of the run is not whole, and `prune` keeps `checkpoint-1`.
#[track_caller]
fn is_not_whole(run: &Path, said: &str) {
    let (uri, step) = (run.display().to_string(), run.join("checkpoint-2").display().to_string());
    let listing = dcp(["ls", "--json", &uri]).json();
    let entries = listing["entries"].as_array().unwrap();
    let entry = entries.iter().find(|entry| entry["name"] == "checkpoint-2").unwrap();
    assert_eq!(entry["complete"], false, "{said}: {entry}");
    assert!(entry["problem"].as_str().unwrap().contains(said), "{said}: {entry}");
    assert_eq!(listing["latest"], "checkpoint-1");
    assert_eq!(dcp(["inspect", &step]).code, 1, "{said}");
    assert_eq!(dcp(["verify", &step]).code, 1, "{said}");
    let target = run.join("../target").display().to_string();
    assert_eq!(dcp(["convert", &step, &target, "--to", "dcp"]).code, 1, "{said}");
    dcp(["prune", &uri, "--keep-last", "1", "--yes"]);
    assert!(run.join("checkpoint-1").exists(), "{said}");
}

#[test]
fn an_index_that_headers_contradict_is_no_whole_model_for_any_command() {
    let (_folder, run, step) = run();
    sharded(&step);
    let text = fs::read(step.join(INDEX)).unwrap();
    let index: Value = serde_json::from_slice(&text).unwrap();
    let places = |home: &dyn Fn(&str) -> &'static str, more: &[&str]| {
        let mut index = index.clone();
        let map = index["weight_map"].as_object_mut().unwrap();
        map.values_mut().for_each(|file| *file = home(file.as_str().unwrap()).into());
        map.extend(more.iter().map(|name| ((*name).to_owned(), SHARDS[0].into())));
        index.to_string()
    };
    let same = |file: &str| if file == SHARDS[0] { SHARDS[0] } else { SHARDS[1] };
    let other = |file: &str| if file == SHARDS[0] { SHARDS[1] } else { SHARDS[0] };
    for (index, said) in [
        (places(&same, &["not.there"]), "does not hold"),
        (places(&other, &[]), "does not hold"),
        (places(&|_| SHARDS[0], &[]), "names no \"model-00002-of-00002.safetensors\""),
        (places(&same, &["not.there", "neither"]), "does not hold"),
    ] {
        fs::write(step.join(INDEX), index).unwrap();
        is_not_whole(&run, said);
    }
    // A name that the index lacks is part of the model, as for transformers.
    fs::write(step.join(INDEX), &text).unwrap();
    dcp(["inspect", &step.display().to_string()]).ok();
    let shard = fs::read(step.join(SHARDS[1])).unwrap();
    fs::copy(step.join(SHARDS[0]), step.join(SHARDS[1])).unwrap();
    is_not_whole(&run, SHARDS[1]);
    fs::write(step.join(SHARDS[1]), shard).unwrap();
    dcp(["inspect", &step.display().to_string()]).ok();
}

#[test]
fn a_header_whose_tensors_overlap_or_leave_a_gap_is_no_whole_model_for_any_command() {
    let (_folder, run, step) = run();
    let file = step.join("model.safetensors");
    fs::write(&file, two_tensors(8)).unwrap();
    dcp(["inspect", &step.display().to_string()]).ok();
    for (start, said) in [(4, "share bytes"), (12, "no tensor at the bytes 8..12")] {
        fs::write(&file, two_tensors(start)).unwrap();
        is_not_whole(&run, said);
    }
}

#[test]
fn a_shape_that_contradicts_its_bytes_is_no_whole_model_for_any_command() {
    let (_folder, run, step) = run();
    let text = String::from_utf8_lossy(&two_tensors(8)).into_owned();
    // Of equal length, so that only the claim about one tensor is wrong.
    for (from, to) in [("\"U8\"", "\"I8\""), ("[8]", "[9]"), ("[8]", "-8 "), ("\"U8\"", "1234")] {
        fs::write(step.join("model.safetensors"), text.replacen(from, to, 1)).unwrap();
        match to {
            "\"I8\"" => _ = dcp(["inspect", &step.display().to_string()]).ok(),
            _ => is_not_whole(&run, "model.safetensors"),
        }
    }
}

#[test]
fn a_shard_of_another_ending_is_examined_as_well() {
    let (_folder, run, step) = run();
    sharded(&step);
    let text = fs::read_to_string(step.join(INDEX)).unwrap();
    fs::write(step.join(INDEX), text.replace(SHARDS[1], "blob")).unwrap();
    fs::rename(step.join(SHARDS[1]), step.join("blob")).unwrap();
    dcp(["inspect", &step.display().to_string()]).ok();
    let whole = fs::read(step.join("blob")).unwrap();
    for damaged in [&whole[..whole.len() - 1], &whole[..20], &[], &[0; 100]] {
        fs::write(step.join("blob"), damaged).unwrap();
        is_not_whole(&run, "blob");
    }
}

#[test]
fn inspect_shows_the_shards_of_a_model_whose_index_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let step = folder.path().join("model");
    sharded(&step);
    let (uri, target) = (path(&folder, "model"), path(&folder, "target"));
    let whole = dcp(["inspect", "--json", &uri]).json();
    let text = fs::read_to_string(step.join(INDEX)).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    for damaged in ["", &text[..text.len() / 2], pointer] {
        fs::write(step.join(INDEX), damaged).unwrap();
        let found = dcp(["inspect", "--json", &uri]).not_whole(&[INDEX]);
        let found: Value = serde_json::from_str(&found).unwrap();
        assert_eq!(found["keys"], whole["keys"], "{damaged:?}");
        let verified = dcp(["verify", &uri]);
        assert!(verified.code == 1 && verified.stdout.contains(INDEX), "{}", verified.stdout);
        dcp(["convert", &uri, &target, "--to", "dcp"]).fails(1, &[INDEX]);
    }
    // What is left is the index alone.
    SHARDS.iter().for_each(|name| fs::remove_file(step.join(name)).unwrap());
    dcp(["inspect", &uri]).fails(1, &[]);
}
