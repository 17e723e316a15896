//! Wrong use: clear words, the right exit code, nothing written.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use crate::support::{command, copy_of, dcp, finish, fixtures, path};

#[test]
fn t20_missing_source_is_an_error() {
    // `python -m torch.distributed.checkpoint.format_utils` prints a line and exits with 0.
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "x");
    let missing = path(&folder, "no_such_checkpoint");
    let commands: [&[&str]; 5] = [
        &["inspect", &missing],
        &["verify", &missing],
        &["get", &missing, "w"],
        &["convert", &missing, &target, "--to", "safetensors"],
        &["reshard", &missing, &target, "--ranks", "2"],
    ];
    for args in commands {
        dcp(args).fails(3, &["there is nothing at", "no_such_checkpoint"]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was written");
}

#[test]
fn a_folder_of_checkpoints_names_one() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs");
    for step in ["step_9", "step_10"] {
        fs::create_dir_all(runs.join(step)).unwrap();
        for entry in fs::read_dir(copy_of("zstd_2r").path()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), runs.join(step).join(entry.file_name())).unwrap();
        }
    }
    let uri = runs.display().to_string();
    for command in ["inspect", "verify"] {
        dcp([command, &uri]).fails(
            1,
            &["not a checkpoint", &format!("complete checkpoint below it is {uri}/step_10;")],
        );
    }
    fs::remove_dir_all(runs.join("step_9")).unwrap();
    dcp(["inspect", &uri])
        .fails(1, &[&format!("hint: there is a checkpoint below it: {uri}/step_10")]);
}

#[test]
fn other_things_are_no_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let uri = folder.path().display().to_string();
    dcp(["inspect", &uri]).fails(1, &["empty directory"]);
    fs::write(folder.path().join("__0_0.distcp"), "x").unwrap();
    dcp(["inspect", &uri]).fails(1, &["the save did not finish"]);
    dcp(["inspect", "fsdp2_adam_2r/expected.json"]).fails(1, &["is a file, but no checkpoint"]);
    dcp(["inspect", "fsdp2_adam_2r/.metadata"]).fails(1, &["hint: pass the directory"]);
    let archive = path(&folder, "model.pt");
    fs::write(&archive, b"PK\x03\x04....").unwrap();
    dcp(["inspect", &archive]).fails(1, &["torch archive", "model.pt"]);
    let lying = path(&folder, "model.safetensors");
    fs::write(&lying, [0xff; 64]).unwrap();
    dcp(["inspect", &lying]).fails(1, &["bad safetensors header"]);
    dcp(["inspect", "tape://0/x"]).fails(2, &["tape://0/x"]);
}

#[test]
fn names_and_slices_are_checked() {
    dcp(["get", "fsdp2_adam_2r", "model.embed.wieght"])
        .fails(2, &["there is no \"model.embed.wieght\"", "did you mean \"model.embed.weight\"?"]);
    dcp(["inspect", "fsdp2_adam_2r", "--shards", "embed.weight"])
        .fails(2, &["did you mean \"model.embed.weight\""]);
    dcp(["get", "fsdp2_adam_2r", "zzz"]).fails(2, &["`dcp inspect` lists the names"]);
    let slice = |slice: &str| {
        dcp(["get", "fsdp2_adam_2r", "model.embed.weight", &format!("--slice={slice}")])
    };
    slice("99").fails(2, &["99 is outside 10 elements on axis 0 of a tensor of shape [10, 8]"]);
    slice("0:1,0:1,0:1").fails(2, &["it has 3 axes"]);
    slice("::0").fails(2, &["a step of zero"]);
    slice("x").fails(2, &["\"x\" is not a number"]);
    dcp(["get", "fsdp2_adam_2r", "step", "--slice", "0"]).fails(2, &["is not a tensor"]);
    dcp(["inspect", "fsdp2_adam_2r", "--shards", "step"]).fails(2, &["is not a tensor"]);
}

#[test]
fn targets_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let output = path(&folder, "x.csv");
    dcp(["get", "zstd_2r", "w", "-o", &output]).fails(2, &["hint: end its name in .npy"]);
    dcp(["get", "zstd_2r", "obj.a", "-o", &path(&folder, "x.npy")]).fails(2, &["is an object"]);
    let place = folder.path().display().to_string();
    dcp(["convert", "zstd_2r", &place, "--to", "safetensors"]).fails(2, &["is a directory"]);
    dcp(["reshard", "zstd_2r", "./zstd_2r", "-n", "2", "--overwrite"])
        .fails(2, &["source and target are the same"]);
    dcp(["convert", "zstd_2r", "zstd_2r", "--to", "dcp"]).fails(2, &["the same"]);
    let file = path(&folder, "file");
    fs::write(&file, "x").unwrap();
    dcp(["reshard", "zstd_2r", &file, "-n", "2"]).fails(2, &["is a file, and a directory is"]);
    let npy = path(&folder, "taken.npy");
    fs::write(&npy, "x").unwrap();
    dcp(["get", "zstd_2r", "w", "-o", &npy]).fails(2, &["exists already"]);
    dcp(["get", "zstd_2r", "w", "-o", &npy, "--overwrite"]).ok();
}

#[test]
fn a_folder_is_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (hf, dcp_folder) = (path(&folder, "hf"), path(&folder, "dcp"));
    dcp(["convert", "nested", &hf, "--to", "hf", "--everything"]).ok();
    dcp(["convert", "nested", &dcp_folder, "--to", "dcp"]).ok();
    dcp(["convert", "nested", &path(&folder, "step/model_and_optim"), "--to", "dcp"]).ok();
    for more in [&[] as &[&str], &["--overwrite"], &["--dry-run"]] {
        let convert = |target: &str, to: &str| {
            dcp(["-q", "convert", "fsdp2_adam_2r", target, "--to", to].iter().chain(more))
        };
        convert(&hf, "dcp").fails(2, &["another checkpoint", ".safetensors", "another directory"]);
        convert(&dcp_folder, "hf").fails(2, &["is a PyTorch DCP checkpoint", "another directory"]);
        for to in ["hf", "dcp"] {
            convert(&path(&folder, "step"), to).fails(2, &["a checkpoint in model_and_optim"]);
        }
        let unshard = ["unshard", "fsdp2_adam_2r", &dcp_folder];
        dcp(unshard.iter().chain(more)).fails(2, &["is a PyTorch DCP checkpoint"]);
    }
    for place in [&hf, &dcp_folder] {
        let run = dcp(["verify", place]);
        assert!(run.code == 0 && !run.stderr.contains("note"), "{}", run.stderr);
    }
    let place = copy_of("nested");
    let uri = place.path().display().to_string();
    fs::copy(fixtures().join("nested/expected.safetensors"), path(&place, "model.safetensors"))
        .unwrap();
    for command in ["inspect", "verify", "ls"] {
        let run = dcp([command, &uri]);
        assert!(run.stderr.contains("model.safetensors"), "{command}: {}", run.stderr);
        for quiet in [&["-q", command, &uri] as &[&str], &[command, &uri, "--json"]] {
            assert_eq!(dcp(quiet).stderr, "");
        }
        assert_eq!(dcp([command, "nested"]).stderr, "");
    }
}

#[test]
fn what_fails_or_only_says_leaves_no_folders() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = copy_of("nested");
    for entry in fs::read_dir(damaged.path()).unwrap() {
        let at = entry.unwrap().path();
        if at.extension().is_some_and(|ending| ending == "distcp") {
            fs::OpenOptions::new().write(true).open(at).unwrap().set_len(10).unwrap();
        }
    }
    let bad = damaged.path().display().to_string();
    let file = |name: &str| path(&folder, &format!("new/a/{name}"));
    let tensors = dcp(["inspect", "nested", "--json"]).json()["keys"].clone();
    let tensor = tensors.as_object().unwrap().iter().find(|(_, key)| key["kind"] == "tensor");
    let tensor = tensor.unwrap().0;
    for (target, to) in
        [("z.safetensors", "safetensors"), ("z", "hf"), ("z.pt", "torch-save"), ("z", "dcp")]
    {
        dcp(["convert", "nested", &file(target), "--to", to, "--everything", "--dry-run"]).ok();
        let run = dcp(["convert", &bad, &file(target), "--to", to, "--everything"]);
        assert_eq!(run.code, 1, "{to}: {}", run.stderr);
        assert!(!folder.path().join("new").exists(), "{to}");
    }
    dcp(["unshard", &bad, &file("z")]);
    dcp(["report", &bad, "--stats", "-o", &file("page.html")]);
    dcp(["get", &bad, tensor, "-o", &file("t.safetensors")]);
    let left = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    for folder in left {
        assert!(folder.join("a/page.html").exists(), "{folder:?} is left behind");
    }
}

#[test]
fn options_of_another_format_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (option, of) in [
        (&["--legacy"] as &[&str], "torch-save"),
        (&["--ranks", "1"], "dcp"),
        (&["--max-shard-size", "5GB"], "hf"),
        (&["--config", "/nonexistent"], "hf"),
    ] {
        for to in ["safetensors", "hf", "torch-save", "dcp"].iter().filter(|to| **to != of) {
            let convert = ["convert", "nested", &path(&folder, "out"), "--to", to];
            let message = format!("{} is for {of}, and ", option[0]);
            dcp(convert.iter().chain(option)).fails(2, &[&message, &format!("--to {of}")]);
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn usage_errors_are_claps_and_exit_with_2() {
    for args in [
        &["inspekt"][..],
        &["inspect"],
        &["reshard", "a", "b"],
        &["reshard", "a", "b", "--ranks", "0"],
        &["convert", "a", "b", "--to", "gguf"],
        &["inspect", "a", "--json", "--shards", "w"],
    ] {
        let run = dcp(args);
        assert_eq!(run.code, 2, "{args:?}");
        assert!(run.stderr.contains("error") && run.stderr.contains("--help"), "{}", run.stderr);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_io_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = finish(command().args(["inspect", "fsdp2_adam_2r"]).stdout(full).output().unwrap());
    assert_eq!(run.code, 3);
    assert!(run.stderr.starts_with("error: cannot write the output"), "{}", run.stderr);
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut command = command();
    command.args(["inspect", "fsdp2_adam_2r", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((child.wait().unwrap().code(), &*stderr), (Some(0), ""));
}

#[test]
fn a_file_where_a_directory_is_needed_is_said_to_be_one() {
    let file = "all_dtypes/.metadata";
    dcp(["ls", file]).fails(2, &["is a file, and a directory is needed"]);
    dcp(["rewrite-metadata", file, "--to=torch"])
        .fails(2, &["is a file, and a directory is needed"]);
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "out");
    dcp(["copy", file, &out]).fails(2, &["is a file, and a directory is needed"]);
    for command in [&["ls", "/dev/null"][..], &["copy", "/dev/null", &out]] {
        dcp(command.iter().copied()).fails(
            2,
            &["\"/dev/null\" is a device, a pipe or a socket, and a directory is needed"],
        );
    }
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn a_format_that_may_be_several_is_refused_with_all_of_them() {
    for to in ["torch", "pytorch"] {
        let run = dcp(["convert", "t21_plain", "nowhere", "--to", to]);
        assert_eq!(run.code, 2);
        for format in ["torch-save", "dcp", "torch-dist"] {
            assert!(run.stderr.contains(format), "{}", run.stderr);
        }
        assert!(!run.stderr.contains("similar"), "{}", run.stderr);
    }
    let run = dcp(["convert", "t21_plain", "nowhere", "--to", "safetensor"]);
    assert!(run.stderr.contains("a similar value exists: 'safetensors'"), "{}", run.stderr);
}

#[test]
fn checkpoints_of_other_shapes_are_not_averaged_and_the_hint_helps() {
    let run = dcp(["average", "fsdp2_adam_2r", "t21_plain", "--out", "nowhere", "--to=dcp"]);
    assert!(!run.stderr.contains("--non-float"), "{}", run.stderr);
    run.fails(2, &["are incompatible", "--keys-only` lists the others"]);
}

#[test]
fn a_configuration_that_is_no_json_is_a_wrong_option_and_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let (config, target) = (path(&folder, "config"), path(&folder, "target"));
    fs::create_dir(&config).unwrap();
    let file = format!("{config}/config.json");
    let megatron = fixtures().join("../megatron/gpt_tp2pp2_swiglu/ckpt").display().to_string();
    for text in [&b"{\"a\": "[..], b"[1]", b"\xff\xfe", b""] {
        fs::write(&file, text).unwrap();
        for source in ["t21_plain", &megatron] {
            dcp(["-q", "convert", source, &target, "--to", "hf", "--config", &config])
                .fails(2, &[&format!("the configuration {file:?} is no JSON object")]);
        }
    }
    fs::write(&file, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap();
    dcp(["-q", "convert", "t21_plain", &target, "--to", "hf", "--config", &config])
        .fails(2, &["config.json", "is a pointer of Git LFS"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_log_that_cannot_be_written_is_lost_and_ends_no_command() {
    let ranks = fixtures().join("../rank_local/stale_replicated").display().to_string();
    for flags in [&["-v"][..], &["-vv"], &[]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut inspect = command();
        inspect.args(flags).args(["inspect", &ranks]).stderr(full);
        let status = inspect.stdout(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(0), "{flags:?}");
    }
}

/// Names and sizes of files as Orbax writes them, in a step and in the folder of a manager.
#[test]
fn a_folder_of_orbax_is_named_as_that() {
    let folder = tempfile::tempdir().unwrap();
    for (place, file) in [
        ("step", "_CHECKPOINT_METADATA"),
        ("ocdbt", "manifest.ocdbt"),
        ("manager/10", "_CHECKPOINT_METADATA"),
    ] {
        let step = folder.path().join(place);
        fs::create_dir_all(step.join("d")).unwrap();
        fs::write(step.join(file), "{}").unwrap();
        fs::write(step.join("d/0"), "x").unwrap();
    }
    for place in ["step", "ocdbt", "manager"] {
        let place = path(&folder, place);
        for arguments in [&["inspect", &*place][..], &["verify", &place], &["stats", &place]] {
            dcp(arguments).fails(1, &["is a checkpoint of Orbax"]);
        }
    }
}
