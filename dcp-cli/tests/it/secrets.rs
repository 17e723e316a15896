//! Secrets in arguments and options of the command are in none of its output.

use std::fs;

use crate::ranks_bucket::Bucket;
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

/// Traces are sent to others. The query of a web server's URL is a part of every request, not of a key.
#[test]
fn a_file_behind_a_signed_url_is_read_and_its_signature_is_in_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let bucket = Bucket::start();
    dcp(["convert", "t24_plain", &path("model"), "--to=hf"]).ok();
    bucket.alone(&["copy", &path("model"), "s3://bucket/model"]).ok();
    let web = |name: &str| format!("{}/bucket/{name}?sig={SECRET}", bucket.proxy.endpoint());
    let traced = |arguments: &[&str]| {
        let trace = path("trace.json");
        let ran = dcp([arguments, &["-vv", "--trace", &trace]].concat());
        let written = fs::read_to_string(&trace).unwrap();
        assert!(written.contains("model"), "{written}");
        for text in [&written, &ran.stdout, &ran.stderr] {
            assert!(!text.contains(SECRET), "{arguments:?}: {text}");
        }
        ran
    };
    let options = ["--storage-option=allow_http=true"];
    let file = web("model/model.safetensors");
    let read = |arguments: &[&str]| traced(&[arguments, &options].concat()).ok();
    read(&["inspect", &file]);
    read(&["verify", "--deep", &file]);
    read(&["diff", &file, &path("model/model.safetensors")]);
    read(&["convert", &file, &path("again.safetensors")]);
    let exchanges = bucket.proxy.exchanges();
    let of_file = exchanges.iter().filter(|one| one.target.contains("model.safetensors"));
    let query = format!("model.safetensors?sig={SECRET}");
    let targets: Vec<_> = of_file.map(|one| &one.target).collect();
    assert!(targets.iter().any(|target| target.ends_with(&query)), "{targets:?}");
    assert!(targets.iter().all(|target| !target.contains("%3F")), "{targets:?}");
    let copied = traced(&[&["copy", &file, &path("copy")][..], &options].concat());
    let has_reason =
        copied.stderr.contains("is a file") && copied.stderr.contains("name the folder");
    assert!(copied.code == 2 && has_reason, "{}", copied.stderr);
    let absent = web("model.absent");
    assert_eq!(traced(&[&["inspect", &absent][..], &options].concat()).code, 3);
    let key = format!("s3://bucket/model?sig={SECRET}");
    let arguments = bucket.args(&["inspect", &key], false);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    assert_ne!(traced(&arguments).code, 0);
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
