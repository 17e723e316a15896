//! `rewrite-metadata`: the same checkpoint for another program.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::support::{dcp, fixtures, path};

/// A copy of a fixture that may be changed.
fn copy(name: &str, target: &str) {
    fs::create_dir_all(target).unwrap();
    for file in fs::read_dir(fixtures().join(name)).unwrap() {
        let file = file.unwrap();
        if !file.file_name().to_str().unwrap().starts_with("expected") {
            fs::copy(file.path(), Path::new(target).join(file.file_name())).unwrap();
        }
    }
}

#[test]
fn an_olmo_checkpoint_becomes_one_of_torch_and_one_of_olmo_again() {
    let folder = tempfile::tempdir().unwrap();
    let uri = path(&folder, "model_and_optim");
    copy("../olmo/any-4rank/ckpt", &uri);
    let before = dcp(["inspect", &uri, "--json"]).json();

    let dry = dcp(["rewrite-metadata", &uri, "--to", "torch", "--dry-run"]).ok();
    assert!(dry.contains("would be rewritten from olmo-torch2.15 to compat"), "{dry}");
    let run = dcp(["rewrite-metadata", &uri, "--to", "torch"]);
    assert!(run.stderr.contains("compat has no place for the strides"), "{}", run.stderr);
    assert!(run.ok().contains("rewritten from olmo-torch2.15 to compat"));
    let already = dcp(["rewrite-metadata", &uri, "--to", "torch"]).ok();
    assert!(already.contains("is compat already"), "{already}");
    let report =
        dcp(["rewrite-metadata", &uri, "--to", "torch", "--profile", "torch2.3", "--json"]).json();
    assert_eq!(report["changed"], true);
    assert_eq!(report["to"], "torch2.3");
    assert_eq!(report["entries"], 35);
    let report = dcp(["rewrite-metadata", &uri, "--to", "olmo", "--json"]).json();
    assert_eq!([&report["from"], &report["to"]], ["torch2.3", "olmo"]);
    assert_eq!(report["dropped"], json!([]));

    assert_eq!(dcp(["inspect", &uri, "--json"]).json(), before);
    dcp(["verify", &uri, "--deep"]).ok();
}

/// The form of the index does not make older versions undo a compression.
#[test]
fn the_version_that_compressed_data_needs_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let uri = path(&folder, "compressed");
    copy("zstd_2r", &uri);
    for profile in ["compat", "torch2.3"] {
        let args = ["rewrite-metadata", &uri, "--to=torch", "--profile", profile];
        let run = dcp(args.iter().chain(&["--dry-run"]).copied());
        assert!(run.stderr.contains("PyTorch 2.7 and later reads"), "{}", run.stderr);
        let report = dcp(args.iter().chain(&["--json"]).copied()).json();
        assert_eq!(report["oldest_torch"], "2.7");
    }
    let newest = ["rewrite-metadata", &uri, "--to=torch", "--profile=torch2.15", "--json"];
    assert!(dcp(newest).json().get("oldest_torch").is_none());
    dcp(["verify", "--deep", &uri]).ok();
    let plain = path(&folder, "plain");
    copy("t21_plain", &plain);
    let run = dcp(["rewrite-metadata", &plain, "--to=torch", "--profile=torch2.15"]);
    assert!(!run.stderr.contains("2.7"), "{}", run.stderr);
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let uri = path(&folder, "compressed");
    copy("zstd_2r", &uri);
    dcp(["rewrite-metadata", &uri, "--to", "olmo"]).fails(2, &["stream.zstd", "OLMo-core"]);
    let nowhere = path(&folder, "nowhere");
    dcp(["rewrite-metadata", &nowhere, "--to", "torch"]).fails(3, &["there is nothing at"]);
    assert!(!Path::new(&nowhere).exists());
    let empty = path(&folder, "empty");
    fs::create_dir(&empty).unwrap();
    dcp(["rewrite-metadata", &empty, "--to", "torch"]).fails(1, &["is empty"]);
    assert_eq!(dcp(["rewrite-metadata", &uri]).code, 2);
}
