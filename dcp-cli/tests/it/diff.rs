//! `diff`: what is printed, and the exit codes that scripts rely on.

use std::fs;

use crate::look::snapshot;
use crate::support::{copy_of, dcp, fixtures, path};

#[test]
fn it_looks_like_this() {
    for columns in ["60", "80", "120"] {
        let name = format!("diff_{columns}.txt");
        snapshot(&name, &["diff", "fsdp2_adam_2r", "tp_fsdp_2x2", "--limit", "14"], columns);
    }
    snapshot("diff_equal.txt", &["diff", "fsdp2_adam_2r", "fsdp2_adam_2r"], "80");
    snapshot("diff_objects.txt", &["diff", "nested", "objects", "--limit", "8"], "80");
    snapshot(
        "diff_keys_only.txt",
        &["diff", "fsdp2_adam_2r", "all_dtypes", "--keys-only", "--limit", "3"],
        "80",
    );
    snapshot("help_diff.txt", &["diff", "--help"], "100");
}

#[test]
fn exit_codes_are_those_of_diff() {
    let same = dcp(["diff", "fsdp2_adam_2r", "fsdp2_adam_2r"]).ok();
    assert!(same.starts_with("= no difference: 39 tensors and "), "{same}");
    let run = dcp(["diff", "fsdp2_adam_2r", "tp_fsdp_2x2"]);
    assert_eq!((run.code, &*run.stderr), (1, ""));
    assert!(!run.stdout.contains('\x1b'));
    let run = dcp(["diff", "fsdp2_adam_2r", "tp_fsdp_2x2", "--quiet"]);
    assert_eq!((run.code, &*run.stdout, &*run.stderr), (1, "", ""));
    assert_eq!(dcp(["diff", "fsdp2_adam_2r"]).code, 2);
    assert_eq!(dcp(["diff", "objects", "objects", "--rtol", "-1"]).code, 2);
    let run = ["diff", "objects", "objects", "--include", "nobody"];
    dcp(run).fails(2, &["no name matches \"nobody\""]);
    dcp(["diff", "objects", "nowhere"]).fails(3, &["nothing at \"nowhere\""]);
}

#[test]
fn a_damaged_checkpoint_is_not_a_different_one() {
    let folder = copy_of("fsdp2_adam_2r");
    let file = folder.path().join("__1_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    bytes[31539 + 704] ^= 0x10;
    fs::write(&file, bytes).unwrap();
    let damaged = folder.path().display().to_string();
    for args in [["diff", "fsdp2_adam_2r", &damaged], ["diff", &damaged, "fsdp2_adam_2r"]] {
        dcp(args).fails(3, &["model.norm.bias", "__1_0.distcp", "CRC-32"]);
    }
}

#[test]
fn a_converted_checkpoint_equals_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let (file, ranks) = (path(&folder, "model.safetensors"), path(&folder, "four"));
    dcp(["convert", "fsdp2_adam_2r", &file, "--everything"]).ok();
    dcp(["reshard", "fsdp2_adam_2r", &ranks, "--ranks", "4"]).ok();
    dcp(["diff", "fsdp2_adam_2r", &ranks]).ok();
    let run = dcp(["diff", "fsdp2_adam_2r", &file, "--json"]);
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let differences = report["differences"].as_array().unwrap();
    assert!(
        differences.iter().all(|d| d["difference"] == "only_in_a" && d["a"]["kind"] == "object")
    );
    assert_eq!((run.code, &report["equal"]), (1, &false.into()));
    let expected = fixtures().join("fsdp2_adam_2r/expected.safetensors");
    let expected = expected.display().to_string();
    dcp(["diff", &file, &expected]).ok();
    let model = path(&folder, "only.safetensors");
    dcp(["convert", "fsdp2_adam_2r", &model, "--model-only"]).ok();
    dcp(["diff", "fsdp2_adam_2r", &model, "--model-only"]).ok();
    let args = ["diff", &expected, &model, "--strip-a", "model.", "--exclude", "optimizer"];
    dcp(args).ok();
}
