//! `dcp copy` between folders.

use std::fs;
use std::path::Path;

use crate::support::{copy_of, dcp, fixtures, path};

const SOURCE: &str = "fsdp2_adam_2r";

#[test]
fn a_copy_has_the_same_files_and_a_second_one_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (copy_of(SOURCE), path(&folder, "copy"));
    let source = source.path().display().to_string();
    let files = fs::read_dir(&source).unwrap().count() as u64;
    let planned = dcp(["copy", &source, &target, "--dry-run", "--json"]).json();
    assert_eq!((&planned["copied_files"], &planned["dry_run"]), (&files.into(), &true.into()));
    assert!(!Path::new(&target).exists());

    let first = dcp(["copy", &source, &target, "--json"]).json();
    assert_eq!((&first["copied_files"], &first["kept_files"]), (&files.into(), &0.into()));
    for entry in fs::read_dir(&source).unwrap() {
        let entry = entry.unwrap();
        let copy = Path::new(&target).join(entry.file_name());
        assert_eq!(fs::read(entry.path()).unwrap(), fs::read(copy).unwrap());
    }
    for how in [&["--json"][..], &["--json", "--lengths"]] {
        let again = dcp([&["copy", &source, &target], how].concat()).json();
        assert_eq!((&again["copied_files"], &again["kept_files"]), (&0.into(), &files.into()));
    }
    dcp(["verify", &target, "--deep"]).ok();
    let text = dcp(["copy", &source, &target]).ok();
    assert!(text.contains("there already"), "{text}");
}

#[test]
fn a_checkpoint_at_the_target_is_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "copy");
    let source = copy_of(SOURCE);
    let source = source.path().display().to_string();
    dcp(["copy", &source, &target]).ok();
    let files = fs::read_dir(&target).unwrap().count();
    dcp(["copy", "tp_fsdp_2x2", &target]).fails(2, &["checkpoints at the target"]);
    assert_eq!(fs::read_dir(&target).unwrap().count(), files);
    let extra = Path::new(&target).join("extra");
    fs::write(&extra, "").unwrap();
    dcp(["copy", &source, &target]).fails(2, &["has a file that the source has not", "extra"]);
    fs::remove_file(extra).unwrap();

    // Same names and lengths, other bytes: the index that is there names the old ones.
    let other = copy_of(SOURCE);
    let data = other.path().join("__0_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&data, bytes).unwrap();
    let before = fs::read(Path::new(&target).join("__0_0.distcp")).unwrap();
    let other = other.path().display().to_string();
    dcp(["copy", &other, &target]).fails(2, &["__0_0.distcp", "at the target"]);
    assert_eq!(fs::read(Path::new(&target).join("__0_0.distcp")).unwrap(), before);
}

/// The files of two steps of one model have the same lengths.
#[test]
fn lengths_alone_do_not_make_another_checkpoint_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "copy");
    dcp(["copy", SOURCE, &target]).ok();
    let other = copy_of(SOURCE);
    for file in fs::read_dir(&target).unwrap().map(|file| file.unwrap()) {
        let copy = other.path().join(file.file_name());
        if !copy.exists() {
            fs::copy(file.path(), copy).unwrap();
        }
    }
    let index = other.path().join(".metadata");
    let mut bytes = fs::read(&index).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&index, bytes).unwrap();
    let other = other.path().display().to_string();
    dcp(["copy", &other, &target, "--lengths"])
        .fails(2, &[".metadata", "a checkpoint at the target"]);
}

#[test]
fn a_run_that_has_grown_is_copied_again() {
    let folder = tempfile::tempdir().unwrap();
    let (run, target) = (path(&folder, "run"), path(&folder, "copy"));
    let fixture = fixtures().join("../megatron/gpt_tp2pp2_swiglu/ckpt").display().to_string();
    let save = |step: u32| {
        let name = format!("iter_{step:07}");
        dcp(["copy", &fixture, &format!("{run}/{name}")]).ok();
        fs::write(format!("{run}/latest_checkpointed_iteration.txt"), step.to_string()).unwrap();
    };
    save(1);
    dcp(["copy", &run, &target]).ok();
    save(2);
    dcp(["copy", &run, &target]).ok();
    let tracker = fs::read(format!("{target}/latest_checkpointed_iteration.txt")).unwrap();
    assert_eq!(tracker, b"2");
    dcp(["diff", &run, &target]).ok();
}

#[test]
fn places_that_touch_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["copy", SOURCE, &at("a")]).ok();
    dcp(["copy", &at("a"), &at("a")]).fails(2, &["the same"]);
    dcp(["copy", &at("a"), &at("a/b")]).fails(2, &["lie in each other"]);
    dcp(["copy", &at("a"), &at(".")]).fails(2, &["lie in each other"]);
    dcp(["copy", &at("none"), &at("b")]).fails(3, &["none"]);
    fs::create_dir(at("empty")).unwrap();
    dcp(["copy", &at("empty"), &at("b")]).fails(3, &["has no files"]);
}
