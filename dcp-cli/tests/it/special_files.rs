//! Every option that takes a path, given a pipe, a device, a link to one, and a folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::support::{command, copy_of, dcp, finish, fixtures, path};

/// What is no file: its name in a folder that has all of them.
const KINDS: &[&str] = &["pipe", "device", "link", "folder", "loop"];

fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    symlink("/dev/zero", at("device")).unwrap();
    symlink("pipe", at("link")).unwrap();
    symlink("loop", at("loop")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    folder
}

/// A file that is read ends a command with an error that names it, and neither waits nor fills memory.
#[test]
fn an_option_that_reads_a_file_refuses_what_is_none() {
    let (place, target) = (place(), tempfile::tempdir().unwrap());
    for kind in KINDS {
        let file = path(&place, kind);
        let out = path(&target, "out");
        let options = [
            vec!["convert", "t21_plain", &out, "--to", "safetensors", "--map", &file],
            vec!["convert", "t21_plain", &out, "--to", "hf", "--arch", &file],
        ];
        for args in options {
            let run = dcp(&args);
            assert!(matches!(run.code, 2 | 3), "{args:?}: {} {}", run.code, run.stderr);
            assert!(run.stderr.contains(kind), "{args:?}: {}", run.stderr);
        }
        // What --config reads is in a folder.
        let config = tempfile::tempdir().unwrap();
        symlink(&file, config.path().join("config.json")).unwrap();
        let config = path(&config, "");
        let run = dcp(["convert", "t21_plain", &out, "--to", "hf", "--config", &config]);
        assert!(run.code != 0 && run.stderr.contains("config.json"), "{}", run.stderr);
        for variable in ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"] {
            let mut command = command();
            for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
                command.env_remove(name);
            }
            let run =
                finish(command.env(variable, &file).args(["ls", "s3://b/r"]).output().unwrap());
            assert!(run.code != 0 && run.stderr.contains(kind), "{variable}: {}", run.stderr);
        }
        let mut command = command();
        command.env("DCP_SECRET_FILE", &file).env("WORLD_SIZE", "2").env("RANK", "0");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "9");
        let run = finish(command.args(["verify", "--deep", "t21_plain"]).output().unwrap());
        assert!(run.code != 0 && run.stderr.contains(kind), "{}", run.stderr);
        assert!(fs::read_dir(target.path()).unwrap().next().is_none(), "{kind}");
    }
}

/// A checkpoint that is none is not waited for either.
#[test]
fn a_source_that_is_no_file_and_no_folder_is_refused() {
    let place = place();
    for kind in ["pipe", "device", "link", "loop"] {
        for verb in ["inspect", "verify", "ls", "stats", "trace"] {
            let run = dcp([verb, &path(&place, kind)]);
            assert!(matches!(run.code, 1..=3), "{verb} {kind}: {} {}", run.code, run.stdout);
        }
    }
}

/// What an option writes replaces nothing but a file of its own kind.
#[test]
fn an_option_that_writes_a_file_leaves_what_is_something_else() {
    let (place, checkpoint) = (place(), copy_of("t21_plain"));
    let metadata = checkpoint.path().join(".metadata");
    let before = fs::read(&metadata).unwrap();
    let data = fs::read_dir(checkpoint.path()).unwrap().map(|entry| entry.unwrap().path());
    let data = data.into_iter().find(|file| *file != metadata).unwrap();
    let bytes = fs::read(&data).unwrap();
    symlink(&data, place.path().join("into")).unwrap();
    let recorded = path(&checkpoint, "recorded.json");
    dcp(["inspect", "t21_plain", "--trace", &recorded]).ok();
    let files: Vec<String> = KINDS
        .iter()
        .chain(&["into"])
        .map(|kind| path(&place, kind))
        .chain([path(&checkpoint, ".metadata")])
        .collect();
    for file in &files {
        for args in [
            vec!["inspect", "t21_plain", "--trace", file],
            vec!["trace", &recorded, "--merge", file],
            vec!["inspect", "nothing/here", "--trace", file],
        ] {
            let run = dcp(&args);
            assert_eq!(run.code, 2, "{args:?}: {}", run.stderr);
            assert!(run.stderr.contains("only a trace is replaced"), "{args:?}: {}", run.stderr);
        }
    }
    assert!(fs::read(&metadata).unwrap() == before && fs::read(&data).unwrap() == bytes);
    for kind in ["pipe", "device", "link", "loop", "into"] {
        let at = place.path().join(kind);
        assert!(!fs::symlink_metadata(&at).unwrap().is_file(), "{kind}");
    }
    // A trace is replaced, and a command that failed has one.
    let run = dcp(["inspect", "nothing/here", "--trace", &recorded]);
    assert_eq!(run.code, 3, "{}", run.stderr);
    let json = dcp(["trace", &recorded, "--json"]).json();
    assert_eq!(json["is_cut"], false);
    let folder = Path::new(&recorded).with_extension("new");
    dcp(["inspect", "t21_plain", "--trace", &folder.display().to_string()]).ok();
}

#[test]
fn a_substitution_that_grows_names_without_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "out");
    let mut args = vec!["convert", "t21_plain", &out, "--to", "safetensors"];
    for _ in 0..40 {
        args.extend(["--rename", "s/.*/&&&&/"]);
    }
    dcp(args).fails(2, &["a name of more than"]);
}

/// `ulimit -f` has blocks of 1024 bytes.
#[test]
fn a_limit_of_file_sizes_is_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "out.safetensors");
    let limited = "ulimit -f 1 && exec \"$0\" convert fsdp2_adam_2r \"$1\"";
    let mut shell = Command::new("bash");
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_dcp"), &out]).current_dir(fixtures());
    finish(shell.output().unwrap()).fails(3, &["File too large"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
