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

    let told = dcp(["rewrite-metadata", &uri, "--to", "torch", "--dry-run"]).ok();
    assert!(told.contains("would be rewritten from olmo-torch2.15 to compat"), "{told}");
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
