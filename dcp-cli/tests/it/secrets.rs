//! Secrets in arguments and options of the command are in none of its output.

use std::fs;

use crate::support::{dcp, fixtures};

const SECRET: &str = "5ec7e7";

/// The query of a URL is a part of the path on a disk, so a folder can have it.
#[test]
fn output_does_not_repeat_the_query_of_a_url() {
    let folder = tempfile::tempdir().unwrap();
    let url = |name: &str| format!("file://{}/{name}?sig={SECRET}", folder.path().display());
    let plain = |name: &str| folder.path().join(name).display().to_string();
    let (source, run) = (url("ckpt"), url("run"));
    for place in [&source, &format!("{run}/step1")] {
        let place = place.strip_prefix("file://").unwrap();
        fs::create_dir_all(place).unwrap();
        for file in fs::read_dir(fixtures().join("fsdp2_adam_2r")).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                fs::copy(file.path(), format!("{place}/{}", file.file_name().display())).unwrap();
            }
        }
    }
    let tensor = "model.layers.0.weight";
    let absent = url("absent");
    let commands: &[&[&str]] = &[
        &["ls", &run],
        &["ls", &absent],
        &["inspect", &source],
        &["inspect", &absent],
        &["inspect", &run],
        &["verify", &source, "--deep"],
        &["stats", &source],
        &["stats", &source, "--filter", "nothing"],
        &["diff", &source, &source],
        &["diff", &source, &absent],
        &["get", &source, tensor],
        &["get", &source, tensor, "-o", &url("tensor.npy")],
        &["get", &source, "nothing"],
        &["convert", &source, &url("a.safetensors"), "--to", "safetensors"],
        &["convert", &source, &plain("a.safetensors"), "--to", "safetensors"],
        // No storage that takes writes has a query, so names of written files may have it.
        &["convert", &source, &plain("b.pt"), "--to", "torch-save", "--dry-run"],
        &["convert", &source, &source],
        &["copy", &source, &url("copy")],
        &["copy", &source, &run],
        &["reshard", &source, &url("resharded"), "--ranks", "3"],
        &["average", &source, &source, "-o", &url("average")],
        &["merge", &source, &source, "-o", &url("merged")],
        &["rewrite-metadata", &source, "--to", "torch", "--dry-run"],
        &["report", &source, "-o", &url("report.html")],
        &["unshard", &source, &url("unsharded")],
    ];
    for arguments in commands {
        for json in [&[][..], &["--json"]] {
            let ran = dcp(arguments.iter().chain(json));
            for (text, stream) in [(&ran.stdout, "stdout"), (&ran.stderr, "stderr")] {
                assert!(!text.contains(SECRET), "{arguments:?} {json:?}, {stream}: {text}");
            }
        }
    }
    // The page has a title.
    let page = url("report.html");
    let page = fs::read_to_string(page.strip_prefix("file://").unwrap()).unwrap();
    assert!(!page.contains(SECRET));
}

#[test]
fn a_storage_option_is_not_repeated() {
    for arguments in [
        &["--storage-option", SECRET][..],
        &["--storage-option=5ec7e7"],
        &["--storage-option", "=5ec7e7"],
        &["--storage-option", "no_such_name=5ec7e7"],
    ] {
        for json in [&[][..], &["--json"]] {
            let ran = dcp(["inspect", "fsdp2_adam_2r"].iter().chain(arguments).chain(json));
            assert_eq!(ran.code, 2, "{arguments:?}: {}", ran.stderr);
            assert!(!ran.stderr.contains(SECRET) && ran.stdout.is_empty(), "{}", ran.stderr);
            assert!(ran.stderr.contains("storage") && ran.stderr.contains("option"));
        }
    }
}
