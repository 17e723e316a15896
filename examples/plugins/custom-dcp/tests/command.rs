//! The command on a storage and a format that are registered.

use std::process::Command;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fixtures/pytorch/t21_plain");

/// Runs the command and returns what it prints.
#[track_caller]
fn dcp(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_custom-dcp")).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn commands_work_on_a_registered_scheme_and_format() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("opendal-fs://{}", folder.path().join(name).display());

    dcp(&["copy", FIXTURE, &at("run/step_1")]);
    assert!(dcp(&["ls", &at("run")]).contains("step_1"));

    dcp(&["convert", &at("run/step_1"), &at("toy"), "--to", "toy"]);
    assert!(folder.path().join("toy/index.toy").exists());
    assert!(dcp(&["inspect", &at("toy")]).contains("toy"));
    dcp(&["verify", "--deep", &at("toy")]);
    dcp(&["diff", FIXTURE, &at("toy")]);
    dcp(&["copy", &at("toy"), &at("copy")]);
    dcp(&["diff", &at("toy"), &at("copy")]);
    let help = dcp(&["convert", "--help"]);
    assert!(help.contains("toy-ranks") && help.contains("torch-dist"), "{help}");
}

#[test]
fn a_framework_describes_its_checkpoints_and_is_a_target() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();

    dcp(&["convert", FIXTURE, &at("toy"), "--to", "toy-ranks"]);
    let shown = dcp(&["inspect", &at("toy")]);
    assert!(shown.contains("files") && shown.contains('1'), "{shown}");
    let json = dcp(&["inspect", "--json", &at("toy")]);
    assert!(json.contains("\"toy\": {"), "{json}");
    dcp(&["verify", "--deep", &at("toy")]);
    dcp(&["diff", FIXTURE, &at("toy")]);
}

#[test]
fn a_failure_keeps_its_exit_code() {
    let missing = "opendal-fs:///no/such/run";
    let output = Command::new(env!("CARGO_BIN_EXE_custom-dcp")).args(["inspect", missing]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}
