//! Errors as scripts see them, and whose fault they are.

use std::fs;
use std::path::Path;

use dcp_testing::{loopback, reserved_port};
use serde_json::{Value, json};

use crate::megatron::megatron;
use crate::support::{Run, command, copy_of, dcp, finish, fixtures, path};

/// The error of a run with `--json`: the only thing on stderr, where there are no notes.
#[track_caller]
fn error(run: &Run) -> Value {
    assert_eq!(run.stdout, "", "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    let error = serde_json::from_str::<Value>(&run.stderr).unwrap()["error"].clone();
    assert_eq!(error["exit_code"], json!(run.code), "{error}");
    error
}

#[test]
fn an_error_with_json_is_one_json_object() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, target) = (path(&folder, "missing"), path(&folder, "x.npy"));
    let gone = error(&dcp(["inspect", &missing, "--json"]));
    assert_eq!((&gone["kind"], &gone["hint"]), (&json!("io"), &Value::Null));
    assert!(gone["message"].as_str().unwrap().contains("there is nothing at"), "{gone}");
    let typo = error(&dcp(["get", "fsdp2_adam_2r", "model.embed.wieght", "--json"]));
    assert_eq!(typo["kind"], json!("usage"));
    assert!(typo["hint"].as_str().unwrap().contains("model.embed.weight"), "{typo}");
    fs::write(&target, "x").unwrap();
    let taken = error(&dcp(["get", "zstd_2r", "w", "-o", &target, "--json"]));
    assert_eq!((&taken["kind"], &taken["causes"]), (&json!("usage"), &json!([])));
    let empty = error(&dcp(["verify", &folder.path().display().to_string(), "--json"]));
    assert_eq!(empty["kind"], json!("bad_checkpoint"));
    // Of arguments that are not understood, too.
    let wrong = error(&dcp(["inspect", "--json", "zstd_2r", "--no-such"]));
    assert_eq!((&wrong["kind"], &wrong["exit_code"]), (&json!("usage"), &json!(2)));
    assert!(wrong["message"].as_str().unwrap().contains("--no-such"), "{wrong}");
    // What a command found is its output.
    let damaged = copy_of("zstd_2r");
    fs::remove_file(damaged.path().join("__0_0.distcp")).unwrap();
    let found = dcp(["verify", &damaged.path().display().to_string(), "--json"]);
    assert_eq!((found.code, found.stderr.as_str()), (1, ""));
    assert_eq!(serde_json::from_str::<Value>(&found.stdout).unwrap()["ok"], json!(false));
    // Without the option, and after `--`, it is text.
    for args in [&["inspect", &*missing][..], &["inspect", "--no-such", "--", "--json"]] {
        assert!(dcp(args).stderr.starts_with("error: "), "{args:?}");
    }
}

#[test]
fn an_index_that_names_an_impossible_file_is_a_bad_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (uri, target) = (folder.path().display().to_string(), tempfile::tempdir().unwrap());
    fs::create_dir(folder.path().join("folder.safetensors")).unwrap();
    fs::write(folder.path().join("file"), "x").unwrap();
    for name in
        ["n".repeat(300) + ".safetensors", "folder.safetensors".into(), "file/x.safetensors".into()]
    {
        let index = json!({ "metadata": {}, "weight_map": { "w": name } }).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let out = path(&target, "out.safetensors");
        for args in [
            &["inspect", &*uri][..],
            &["verify", &uri],
            &["stats", &uri],
            &["convert", &uri, &out, "--to", "safetensors"],
        ] {
            let run = dcp(args);
            let shows = run.code == 0 && args[0] == "inspect";
            assert!(
                run.code == 1 || shows,
                "{args:?} of {name:.20} ended with {}: {}",
                run.code,
                run.stderr
            );
        }
    }
}

#[test]
fn a_damaged_metadata_json_is_a_bad_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let newest = megatron("head020_gpt_dp2_dp_reshardable/ckpt");
    let config = folder.path().join("metadata.json");
    let uri = folder.path().display().to_string();
    dcp_testing::copy_folder(newest.as_ref(), folder.path());
    dcp(["inspect", &uri, "--common"]).ok();
    let whole = fs::read(&config).unwrap();
    let mut flipped = whole.clone();
    flipped[2] ^= 1;
    for damaged in
        [whole[..whole.len() / 2].to_vec(), b"{}".to_vec(), b"[]".to_vec(), Vec::new(), flipped]
    {
        fs::write(&config, &damaged).unwrap();
        for option in ["--common", "--args"] {
            let run = dcp(["inspect", &uri, option]);
            let text = String::from_utf8_lossy(&damaged).into_owned();
            assert_eq!(run.code, 1, "{text:?} {option}: {}{}", run.stdout, run.stderr);
            assert!(run.stderr.contains("metadata.json"), "{}", run.stderr);
        }
    }
    // A checkpoint of PyTorch's has no common state, and that is no damage.
    dcp(["inspect", "zstd_2r", "--common"]).fails(2, &["is for checkpoints of Megatron-Core"]);
}

#[test]
fn a_tracker_that_names_what_is_not_there_is_told_of() {
    let run = tempfile::tempdir().unwrap();
    let uri = run.path().display().to_string();
    let newest = megatron("head020_gpt_dp2_dp_reshardable/ckpt");
    dcp_testing::copy_folder(newest.as_ref(), &run.path().join("iter_0000010"));
    let tracker = run.path().join("latest_checkpointed_iteration.txt");
    for (says, problem) in [
        ("20", Some("names iter_0000020, which is not there")),
        ("release", Some("names release, which is not there")),
        ("\x1b[31m", Some("says \"\\u{1b}[31m\", which is not an iteration")),
        ("10", None),
    ] {
        fs::write(&tracker, says).unwrap();
        let text = dcp(["ls", &uri]);
        assert_eq!(text.code, 0);
        let json = dcp(["ls", &uri, "--json"]).json();
        match problem {
            Some(problem) => {
                assert!(text.stderr.contains(problem), "{says}: {}", text.stderr);
                assert!(json["tracker_problem"].as_str().unwrap().contains(problem), "{json}");
            }
            None => assert_eq!((&*text.stderr, json.get("tracker_problem")), ("", None)),
        }
    }
}

#[test]
fn get_tells_where_the_common_state_is() {
    let uri = megatron("head020_gpt_dp2_dp_reshardable/ckpt");
    dcp(["get", &uri, "iteration"])
        .fails(2, &["there is no \"iteration\"", "`dcp inspect --common`"]);
    dcp(["get", &uri, "args.lr"]).fails(2, &["`dcp inspect --args`"]);
    dcp(["get", &uri, "no_such"]).fails(2, &["`dcp inspect` lists the names"]);
}

#[test]
fn slices_are_numpys() {
    let get = |slice: &str| {
        let slice = format!("--slice={slice}");
        let found = dcp(["get", "fsdp2_adam_2r", "model.embed.weight", &slice, "--json"]).json();
        found["values"].clone()
    };
    let Value::Array(all) = get("") else { panic!() };
    let rows = |at: &[usize]| Value::Array(at.iter().map(|at| all[*at].clone()).collect());
    assert_eq!(all.len(), 10);
    assert_eq!(get("3:-8"), json!([]));
    assert_eq!(get("6:3"), json!([]));
    assert_eq!(get("2:99"), rows(&[2, 3, 4, 5, 6, 7, 8, 9]));
    assert_eq!(get("1::4"), rows(&[1, 5, 9]));
    assert_eq!(get("::-3"), rows(&[9, 6, 3, 0]));
    let columns =
        |row: &Value, at: &[usize]| -> Value { at.iter().map(|at| row[*at].clone()).collect() };
    assert_eq!(get("5,::3"), columns(&all[5], &[0, 3, 6]));
    assert_eq!(get("..., -2::-5"), all.iter().map(|row| columns(row, &[6, 1])).collect::<Value>());
    let picked: Value = [8, 4, 0].iter().map(|row| columns(&all[*row], &[7, 5, 3, 1])).collect();
    assert_eq!(get("8::-4,::-2"), picked);
    assert_eq!(
        get("::2,-1"),
        [0, 2, 4, 6, 8].iter().map(|row| all[*row][7].clone()).collect::<Value>()
    );
    // Into files, too, and as text.
    let folder = tempfile::tempdir().unwrap();
    let (npy, st) = (path(&folder, "x.npy"), path(&folder, "x.safetensors"));
    let file = |out: &str| {
        dcp(["get", "fsdp2_adam_2r", "model.embed.weight", "--slice=8::-4,::-2", "-o", out]).ok();
        fs::read(out).unwrap()
    };
    let expected: Vec<u8> = picked
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .flat_map(|x| (x.as_f64().unwrap() as f32).to_le_bytes())
        .collect();
    assert!(file(&npy).ends_with(&expected) && file(&st).ends_with(&expected));
    let text = dcp(["get", "fsdp2_adam_2r", "model.embed.weight", "--slice=::9,::7"]).ok();
    assert!(text.starts_with("tensor([[") && text.lines().count() == 2, "{text}");
}

#[test]
fn verify_and_inspect_count_an_old_run_alike() {
    let uri = megatron("run_legacy_torch_tp2");
    let inspected = dcp(["inspect", &uri, "--json"]).json();
    let (keys, files) = (&inspected["keys"], inspected["files"].as_object().unwrap());
    let kind = |kind: &str| {
        let keys = keys.as_object().unwrap().values();
        keys.filter(|key| key["kind"] == json!(kind)).count()
    };
    let verified = dcp(["verify", &uri, "--json"]).json();
    let counted = (&verified["tensors"], &verified["objects"]);
    assert_eq!(counted, (&json!(kind("tensor")), &json!(kind("object"))));
    assert_eq!(verified["files"], json!(files.len()));
    assert!(files.len() == 4 && files.values().all(Value::is_u64), "{files:?}");
    let stats = dcp(["stats", &uri, "--json"]).json();
    assert_eq!(stats["objects"]["count"], verified["objects"]);
}

#[test]
fn a_nested_tensor_is_not_written_where_pytorch_cannot_load_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = fixtures().join("../torch_save/nested/nested.pt").display().to_string();
    let (zip, stream) = (path(&folder, "zip.pt"), path(&folder, "stream.pt"));
    dcp(["convert", &file, &zip, "--to", "torch-save"]).ok();
    dcp(["diff", &file, &zip]).ok();
    for more in [&[] as &[&str], &["--exclude", "w"]] {
        let args = [&["convert", &file, &stream, "--to", "torch-save", "--legacy"], more].concat();
        finish(command().args(args).output().unwrap()).fails(2, &["nested tensor", "zip form"]);
        assert!(!Path::new(&stream).exists());
    }
    dcp(["convert", &file, &stream, "--to", "torch-save", "--legacy", "--exclude", "n"]).ok();
}

/// A store that nobody runs takes a minute to give up: each retry is said, and to the end.
#[test]
fn a_store_that_refuses_connections_is_named_at_each_retry() {
    let (_reserved, port) = reserved_port();
    let host = format!("{}:{port}", loopback());
    let run = |flags: &[&str]| {
        let mut command = command();
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
            command.env_remove(name);
        }
        command.env("AWS_ENDPOINT", format!("http://{host}")).env("AWS_ALLOW_HTTP", "true");
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.env("AWS_REGION", "us-east-1").env("NO_PROXY", "*");
        let args = ["ls", "s3://bucket/run", "--storage-option", "attempts_max=2"];
        finish(command.args(args).args(flags).output().unwrap())
    };
    let said = format!("note: cannot connect to {host}: retrying, 1 of 1\n");
    let loud = run(&[]);
    assert_eq!(loud.stderr.matches(&said).count(), 1, "{}", loud.stderr);
    assert_eq!(loud.code, 3);
    assert!(loud.stderr.contains("after 2 attempts"), "{}", loud.stderr);
    let quiet = run(&["--quiet"]);
    assert!(!quiet.stderr.contains("retrying"), "{}", quiet.stderr);
    assert_eq!(quiet.code, 3);
}
