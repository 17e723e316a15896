//! Damage, and what is said about it.

use std::fs::{self, OpenOptions};
use std::path::Path;

use dcp::formats::metadata::decode;
use serde_json::Value;

use crate::support::{copy_of, dcp};

/// Where the elements of the second half of this tensor are: the chunk begins at byte 31539 of
/// the file, its elements at byte 704 of the chunk.
const TENSOR: &str = "model.norm.bias";
const FILE: &str = "__1_0.distcp";
const CHUNK: u64 = 31539;

fn flip(file: &Path, at: u64) {
    let mut bytes = fs::read(file).unwrap();
    bytes[usize::try_from(at).unwrap()] ^= 0x10;
    fs::write(file, bytes).unwrap();
}

fn verify(folder: &tempfile::TempDir, args: &[&str]) -> (i32, Value) {
    let uri = folder.path().display().to_string();
    let run = dcp([&["verify", &uri, "--json"], args].concat());
    assert_eq!(run.stderr, "");
    (run.code, serde_json::from_str(&run.stdout).unwrap())
}

#[test]
fn a_flipped_bit_is_found_by_reading() {
    let folder = copy_of("fsdp2_adam_2r");
    flip(&folder.path().join(FILE), CHUNK + 704);
    let (code, report) = verify(&folder, &[]);
    assert_eq!((code, &report["ok"]), (0, &Value::Bool(true)));
    let (code, report) = verify(&folder, &["--deep"]);
    assert_eq!((code, &report["ok"]), (1, &Value::Bool(false)));
    let problems = report["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 1, "{report}");
    assert_eq!(problems[0]["kind"], "corrupt");
    assert_eq!(problems[0]["key"], TENSOR);
    assert_eq!(problems[0]["file"], FILE);
    assert_eq!(problems[0]["byte_offset"], CHUNK + 704);
}

/// One place, in bytes of the file, whichever command finds the damage.
#[test]
fn every_command_says_the_same_place_of_damage() {
    let (folder, target) = (copy_of("fsdp2_adam_2r"), tempfile::tempdir().unwrap());
    flip(&folder.path().join(FILE), CHUNK + 704);
    let (uri, place) = (folder.path().display().to_string(), format!("at byte {}", CHUNK + 704));
    let target = |name: &str| target.path().join(name).display().to_string();
    let (model, saved) = (target("model.safetensors"), target("model.pt"));
    for args in [
        &["convert", &uri, &model, "--to", "safetensors", "--everything"][..],
        &["convert", &uri, &saved, "--to", "torch-save", "--everything"],
        &["convert", &uri, &target("dcp"), "--to", "dcp"],
        &["reshard", &uri, &target("resharded"), "--ranks", "3"],
        &["get", &uri, TENSOR],
        &["stats", &uri],
    ] {
        let run = dcp(args);
        assert!(run.stderr.contains(&place), "{args:?}: {}", run.stderr);
        assert_eq!(run.stderr.matches("at byte").count(), 1, "{args:?}: {}", run.stderr);
    }
}

/// Each byte of the archive of an object is one of a record with a checksum, or one that has one right value.
#[test]
fn what_a_conversion_of_a_damaged_object_calls_done_verifies() {
    let (folder, target) = (copy_of("nested"), tempfile::tempdir().unwrap());
    let index = decode(&fs::read(folder.path().join(".metadata")).unwrap()).unwrap();
    let (_, entry) = index.iter().find(|(_, entry)| entry.as_object().is_some()).unwrap();
    let object = entry.as_object().unwrap().placement.unwrap();
    let name = index.file(object.file).unwrap().to_string();
    let (source, file) = (folder.path().display().to_string(), folder.path().join(&name));
    let whole = fs::read(&file).unwrap();
    let start = usize::try_from(object.byte_offset).unwrap();
    let end = start + usize::try_from(object.byte_len).unwrap();
    let is_padding = |at: usize| whole[at - 2..at + 3] == *b"ZZZZZ";
    let mut padding = 0;
    for at in (start + 2..end - 2).step_by(11) {
        flip(&file, at as u64);
        let out = target.path().join("out");
        let convert = ["-q", "convert", &source, &out.display().to_string(), "--to", "dcp"];
        let run = dcp(convert);
        if is_padding(at) {
            padding += 1;
            assert!(run.stderr.contains("another padding"), "{at}: {}", run.stderr);
            assert!(run.stderr.contains(&format!("{name:?} at byte ")), "{at}: {}", run.stderr);
        }
        if run.code == 0 {
            let verified = dcp(["verify", "--deep", &out.display().to_string()]);
            assert_eq!(verified.code, 0, "{at}: {}", verified.stdout);
            fs::remove_dir_all(&out).unwrap();
        }
        assert!(!out.exists(), "{at}");
        fs::write(&file, &whole).unwrap();
    }
    assert!(padding > 5, "{padding}");
}

#[test]
fn a_refused_target_is_not_left_as_an_empty_folder() {
    let folder = copy_of("fsdp2_adam_2r");
    flip(&folder.path().join(FILE), CHUNK + 704);
    let source = folder.path().display().to_string();
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("new/target");
    let uri = target.display().to_string();
    dcp(["reshard", &source, &uri, "--ranks", "2"]).fails(1, &[TENSOR, FILE, "CRC-32"]);
    assert!(!place.path().join("new").exists());
    dcp(["convert", &source, &uri, "--to", "dcp"]).fails(1, &[TENSOR]);
    assert!(!place.path().join("new").exists());
    // A folder that was there before stays.
    fs::create_dir_all(&target).unwrap();
    dcp(["reshard", &source, &uri, "--ranks", "2"]).fails(1, &[TENSOR]);
    assert!(target.is_dir());
}

#[test]
fn every_flipped_bit_of_a_record_is_found() {
    let clean = copy_of("zstd_2r");
    let (code, report) = verify(&clean, &["--deep"]);
    assert_eq!(code, 0, "{report}");
    // Bytes of a tensor's pickle, of its data, and of the central directory.
    for at in [64, 70, 150, 704, 720, 723, 1100, 1300] {
        let folder = copy_of("strided_4r");
        flip(&folder.path().join("__0_0.distcp"), at);
        let (code, report) = verify(&folder, &["--deep"]);
        let found = report["problems"].as_array().unwrap();
        assert!(code == 1 && found.len() == 1, "a flip at {at} gave {report}");
        assert_eq!(found[0]["file"], "__0_0.distcp");
    }
}

#[test]
fn a_damaged_stream_is_found_too() {
    let folder = copy_of("zstd_2r");
    flip(&folder.path().join("__0_0.distcp"), 1000);
    let (code, report) = verify(&folder, &["--deep"]);
    assert_eq!(code, 1, "{report}");
    assert_eq!(report["problems"][0]["key"], "w");
}

#[test]
fn a_missing_file_is_named_once() {
    let folder = copy_of("fsdp2_adam_2r");
    fs::remove_file(folder.path().join(FILE)).unwrap();
    let (code, report) = verify(&folder, &["--deep"]);
    assert_eq!(code, 1);
    let problems = report["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 1, "{report}");
    assert_eq!(problems[0]["kind"], "missing_file");
    assert_eq!(problems[0]["file"], FILE);

    let uri = folder.path().display().to_string();
    let found = dcp(["inspect", &uri, "--json"]).not_whole(&[FILE]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["files"][FILE], Value::Null);
    assert!(dcp(["inspect", &uri]).not_whole(&[FILE]).contains("missing"));
    dcp(["get", &uri, TENSOR]).fails(1, &[FILE]);
    // What is in the other file can still be read.
    dcp(["get", &uri, TENSOR, "--slice", "0:4"]).ok();
}

#[test]
fn a_short_file_is_found_without_reading_it() {
    let folder = copy_of("fsdp2_adam_2r");
    let file = OpenOptions::new().write(true).open(folder.path().join(FILE)).unwrap();
    file.set_len(CHUNK + 100).unwrap();
    let (code, report) = verify(&folder, &[]);
    assert_eq!(code, 1);
    let problems = report["problems"].as_array().unwrap();
    assert!(problems.len() > 10 && problems.iter().all(|p| p["kind"] == "short_file"));
    assert!(problems.iter().any(|p| p["key"] == TENSOR && p["byte_offset"] == CHUNK));
    let uri = folder.path().display().to_string();
    dcp(["get", &uri, TENSOR]).fails(1, &[FILE]);
}

#[test]
fn bad_metadata_is_refused() {
    let folder = copy_of("fsdp2_adam_2r");
    let metadata = folder.path().join(".metadata");
    let whole = fs::read(&metadata).unwrap();
    let uri = folder.path().display().to_string();
    for len in [0, 1, 100, whole.len() - 1] {
        fs::write(&metadata, &whole[..len]).unwrap();
        for command in ["inspect", "verify"] {
            let said = ["cannot read", ".metadata", "cut short or changed", "copy it again"];
            dcp([command, &uri]).fails(1, &said);
        }
    }
    // Runs `echo` if it were executed.
    fs::write(&metadata, b"cos\nsystem\n(S'echo owned'\ntR.").unwrap();
    let run = dcp(["inspect", &uri]);
    assert!(!run.stdout.contains("owned"));
    run.fails(1, &[".metadata"]);
}

#[test]
fn leftovers_are_noted() {
    let folder = copy_of("fsdp2_adam_2r");
    fs::write(folder.path().join("__7_0.distcp"), "stale").unwrap();
    let (code, report) = verify(&folder, &[]);
    assert_eq!(code, 0);
    let note = report["notes"][0].as_str().unwrap();
    assert!(note.contains("__7_0.distcp") && note.contains("5 bytes"), "{note}");
}

#[test]
fn t02_a_failed_overwrite_is_found_by_reading_deep() {
    // What PyTorch leaves when a second save into the same folder dies: old metadata over new
    // data.
    let folder = copy_of("t24_plain");
    let other = copy_of("t21_plain");
    fs::copy(other.path().join("__0_0.distcp"), folder.path().join("__0_0.distcp")).unwrap();
    let (code, report) = verify(&folder, &["--deep"]);
    assert_eq!(code, 1, "{report}");
}
