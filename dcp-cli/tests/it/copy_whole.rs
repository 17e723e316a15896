//! What `dcp copy` must not leave out, change or leave behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use dcp::Storage;
use dcp::core::Key;
use dcp::core::storage::{PutMode, UploadOptions};
use dcp_storage_fs::FsStorage;

use crate::ranks::on_ranks;
use crate::ranks_write::files;
use crate::support::{copy_of, dcp, fixtures, path};

const SOURCE: &str = "fsdp2_adam_2r";

/// A run of two checkpoints.
fn run(folder: &Path) -> PathBuf {
    let run = folder.join("run");
    for step in ["step-10", "step-20"] {
        dcp_testing::copy_folder(copy_of(SOURCE).path(), &run.join(step));
    }
    run
}

/// The command on one process and on two refuses to copy, says this, and makes nothing.
#[track_caller]
fn refused(source: &Path, code: i32, texts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "target");
    let args = ["copy", source.to_str().unwrap(), &target];
    for run in [dcp(args), on_ranks(2, &args)] {
        run.fails(code, texts);
        assert!(!Path::new(&target).exists(), "{texts:?}");
    }
}

#[test]
fn links_out_of_the_source_are_copied_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path());
    let (data, disk) = (run.join("step-10/__1_0.distcp"), folder.path().join("disk"));
    fs::rename(&data, &disk).unwrap();
    symlink(&disk, &data).unwrap();
    refused(&run, 2, &["step-10/__1_0.distcp", "symbolic link", "--follow-links"]);
    refused(&run.join("step-10"), 2, &["__1_0.distcp", "--follow-links"]);

    fs::remove_file(&data).unwrap();
    fs::rename(&disk, &data).unwrap();
    let step = run.join("step-20");
    fs::rename(&step, &disk).unwrap();
    symlink(&disk, &step).unwrap();
    refused(&run, 2, &["step-20", "symbolic link", "--follow-links"]);
    let target = path(&folder, "target");
    dcp(["copy", run.to_str().unwrap(), &target, "--follow-links"]).ok();
    let copied = Path::new(&target);
    assert!(files(&copied.join("step-20")) == files(&disk));
    assert!(files(&copied.join("step-10")) == files(&run.join("step-10")));

    fs::remove_file(&step).unwrap();
    symlink(folder.path().join("nowhere"), &step).unwrap();
    refused(&run, 1, &["step-20", "leads nowhere"]);
    // A link to another file of the source is that file, and an empty folder loses nothing.
    fs::remove_file(&step).unwrap();
    symlink("__1_0.distcp", run.join("step-10/link")).unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    symlink(folder.path().join("empty"), run.join("step-10/empty")).unwrap();
    // A link to a step is no second step.
    symlink("step-10", run.join("latest")).unwrap();
    let target = path(&folder, "with-link");
    let copied = dcp(["copy", run.to_str().unwrap(), &target]);
    for said in ["not copying", "\"latest\" is a link to another folder of the source"] {
        assert!(copied.stderr.contains(said), "{}", copied.stderr);
    }
    copied.ok();
    assert!(Path::new(&target).join("step-10/link").is_file());
    assert!(!Path::new(&target).join("latest").exists());
    // So it is in a folder of runs, and where it leads to a folder in the folder of the run.
    symlink("run/step-10", folder.path().join("best")).unwrap();
    let target = tempfile::tempdir().unwrap();
    let copied = dcp(["copy", folder.path().to_str().unwrap(), &path(&target, "copy")]);
    for said in ["\"run/latest\" is a link", "\"best\" is a link"] {
        assert!(copied.stderr.contains(said), "{}", copied.stderr);
    }
    copied.ok();
}

/// The files of a damaged checkpoint are copied, and what would make it visible goes.
#[test]
fn a_copy_that_is_not_whole_is_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path());
    let data = run.join("step-20/__1_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    for at in (0..bytes.len()).step_by(256) {
        bytes[at] ^= 0x40;
    }
    fs::write(&data, bytes).unwrap();
    let target = path(&folder, "target");
    for _ in 0..2 {
        let copied = dcp(["copy", run.to_str().unwrap(), &target]);
        copied.fails(1, &["step-20", "not a whole checkpoint"]);
        let at = |file: &str| Path::new(&target).join(file).exists();
        assert!(at("step-10/.metadata") && at("step-20/__1_0.distcp"));
        assert!(!at("step-20/.metadata"));
        assert_eq!(dcp(["ls", "--json", &target]).json()["latest"], "step-10");
    }
}

#[test]
fn names_that_are_no_keys_are_refused() {
    for (name, reason) in
        [(&b"x\xff"[..], "not UTF-8"), (b"a\\b", "backslash"), (b"c:d", "drive letter")]
    {
        for is_folder in [false, true] {
            let source = copy_of(SOURCE);
            let path = source.path().join(OsStr::from_bytes(name));
            match is_folder {
                true => fs::create_dir(path).unwrap(),
                false => fs::write(path, "").unwrap(),
            }
            refused(source.path(), 2, &["cannot copy", reason]);
        }
    }
}

#[test]
fn a_copy_is_no_more_readable_than_its_source() {
    let source = copy_of(SOURCE);
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let names = [(".metadata", 0o600), ("__0_0.distcp", 0o400), ("__1_0.distcp", 0o640)];
    fs::create_dir(source.path().join("private")).unwrap();
    fs::write(source.path().join("private/state"), "x").unwrap();
    allow(&source.path().join("private/state"), 0o644);
    let folders = [(0o755, 0o755), (0o750, 0o750), (0o700, 0o700), (0o500, 0o700)];
    for (source_mode, expected) in folders {
        allow(&source.path().join("private"), source_mode);
        let target = tempfile::tempdir().unwrap();
        let copy = target.path().join("copy");
        for folder in [source.path(), &source.path().join("private")] {
            allow(folder, source_mode);
        }
        dcp(["copy", source.path().to_str().unwrap(), copy.to_str().unwrap()]).ok();
        let modes = [mode(copy.clone()), mode(copy.join("private"))];
        assert_eq!(modes, [expected; 2], "{source_mode:o}");
        // A folder that was there keeps its own.
        allow(&copy, 0o711);
        dcp(["copy", source.path().to_str().unwrap(), copy.to_str().unwrap()]).ok();
        assert_eq!(mode(copy), 0o711);
    }
    allow(source.path(), 0o755);
    for (folder, expected) in [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)] {
        allow(source.path(), 0o755);
        allow(&source.path().join("private"), folder);
        for (name, mode) in names {
            allow(&source.path().join(name), mode);
        }
        let target = tempfile::tempdir().unwrap();
        let copy = target.path().join("copy");
        dcp(["copy", source.path().to_str().unwrap(), copy.to_str().unwrap()]).ok();
        for (name, expected) in names {
            assert_eq!(mode(copy.join(name)), expected, "{name}");
        }
        assert_eq!(mode(copy.join("private/state")), expected);
        assert!(files(&copy) == files(source.path()));
    }
}

#[test]
fn a_copy_of_a_checkpoint_without_one_of_its_files_fails() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path());
    fs::remove_file(run.join("step-20/__1_0.distcp")).unwrap();
    for (at, how) in [&[][..], &["--lengths"]].into_iter().enumerate() {
        for world_size in [1, 2] {
            let target = path(&folder, &format!("{at}-{world_size}"));
            let args = [&["copy", run.to_str().unwrap(), &target], how].concat();
            on_ranks(world_size, &args).fails(1, &["step-20", "__1_0.distcp", "not a whole"]);
        }
    }
    // The rest of a save has no index, and is copied as what it is.
    fs::remove_file(run.join("step-20/.metadata")).unwrap();
    let target = path(&folder, "unfinished");
    dcp(["copy", run.to_str().unwrap(), &target]).ok();
    assert!(files(target.as_ref()) == files(&run));
}

#[test]
fn a_copy_of_a_damaged_checkpoint_fails() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    dcp(["convert", SOURCE, source.to_str().unwrap(), "--to", "dcp"]).ok();
    let data = source.join("__0_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&data, bytes).unwrap();
    for world_size in [1, 2] {
        let target = path(&folder, &world_size.to_string());
        let args = ["copy", source.to_str().unwrap(), &target];
        on_ranks(world_size, &args).fails(1, &["__0_0.distcp", "not a whole"]);
    }
}

/// At the target are a whole checkpoint, one that was being saved when it was copied, and a log.
#[test]
fn a_copy_goes_on_with_a_run_that_has_grown() {
    let folder = tempfile::tempdir().unwrap();
    let (run, target) = (run(folder.path()), folder.path().join("target"));
    fs::rename(run.join("step-20"), folder.path().join("later")).unwrap();
    fs::create_dir(run.join("step-20")).unwrap();
    fs::write(run.join("step-20/__0_0.distcp"), "half of it").unwrap();
    fs::write(run.join("log.txt"), "step 10").unwrap();
    let args = ["copy", run.to_str().unwrap(), target.to_str().unwrap()];
    dcp(args).ok();
    fs::remove_dir_all(run.join("step-20")).unwrap();
    fs::rename(folder.path().join("later"), run.join("step-20")).unwrap();
    dcp_testing::copy_folder(&run.join("step-20"), &run.join("step-30"));
    fs::write(run.join("log.txt"), "step 10, 20, 30").unwrap();
    dcp(args).ok();
    assert!(files(&target) == files(&run));
    // What is whole at the target stays as it is, and all that differs is named.
    let change = |file: &str| {
        let data = run.join(file);
        let mut bytes = fs::read(&data).unwrap();
        bytes[7] ^= 1;
        fs::write(&data, bytes).unwrap();
    };
    change("step-30/__0_0.distcp");
    fs::write(run.join("step-40"), "new").unwrap();
    dcp(args).fails(2, &["step-30/__0_0.distcp", "a checkpoint at the target"]);
    change("step-20/__1_0.distcp");
    change("step-20/.metadata");
    let said = "3 files with other bytes: \"step-20/.metadata\", \"step-20/__1_0.distcp\", \"step-30/__0_0";
    dcp(args).fails(2, &[said]);
    assert!(!target.join("step-40").exists(), "nothing is copied before all is compared");
    for at in 0..9 {
        fs::write(target.join(format!("extra{at}")), "").unwrap();
    }
    dcp(args).fails(2, &["9 files that the source has not: \"extra0\"", "\"extra7\" and 1 more"]);
}

#[test]
fn a_copy_goes_on_when_old_steps_are_gone_at_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let (run, target) = (run(folder.path()), folder.path().join("target"));
    let args = ["copy", run.to_str().unwrap(), target.to_str().unwrap()];
    dcp(args).ok();
    let old = files(&target.join("step-10"));
    dcp(["prune", args[1], "--keep-last", "1", "--by", "step", "--yes"]).ok();
    dcp_testing::copy_folder(&run.join("step-20"), &run.join("step-30"));
    for world_size in [1, 2] {
        let again = on_ranks(world_size, &args);
        let said = "has 1 checkpoint that the source has no more, which stays: \"step-10\"";
        assert!(again.stderr.contains(said), "{}", again.stderr);
        again.ok();
        assert!(files(&target.join("step-10")) == old);
        assert!(files(&target.join("step-30")) == files(&run.join("step-30")));
        dcp_testing::copy_folder(&run.join("step-20"), &run.join("step-40"));
    }
    // Another run, which has no step in common with the target, and a step that lacks a file.
    let other = folder.path().join("other");
    dcp_testing::copy_folder(copy_of(SOURCE).path(), &other.join("step-50"));
    dcp(["copy", other.to_str().unwrap(), args[2]]).fails(2, &["files that the source has not"]);
    fs::write(target.join("step-20/extra"), "").unwrap();
    dcp(args).fails(2, &["a file that the source has not: \"step-20/extra\""]);
}

#[test]
fn a_source_with_what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path());
    for at in ["pipe", "step-10/pipe"] {
        let pipe = run.join(at);
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        refused(&run, 2, &[at, "is no file and no folder", "move it out"]);
        let link = run.join("step-20/link");
        symlink(&pipe, &link).unwrap();
        fs::rename(&pipe, folder.path().join("pipe")).unwrap();
        fs::remove_file(&link).unwrap();
        symlink(folder.path().join("pipe"), &link).unwrap();
        refused(&run, 2, &["step-20/link", "to what is no file"]);
        fs::remove_file(&link).unwrap();
    }
}

#[test]
fn a_link_in_a_linked_folder_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path());
    let (disk, inner) = (folder.path().join("disk"), folder.path().join("inner"));
    fs::rename(run.join("step-20"), &disk).unwrap();
    symlink(&disk, run.join("step-20")).unwrap();
    dcp_testing::copy_folder(copy_of(SOURCE).path(), &inner);
    symlink(&inner, disk.join("model")).unwrap();
    let target = path(&folder, "target");
    let args = ["copy", run.to_str().unwrap(), &target, "--follow-links"];
    dcp(args).fails(2, &["step-20/model", "in a folder that a link leads to", "not followed"]);
    assert!(!Path::new(&target).exists());
}

/// The name of a temporary file of a process that is gone.
async fn name_of_the_dead() -> String {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let options = UploadOptions::new(PutMode::Create, 1 << 20);
    let upload = storage.start_upload(&Key::new("file").unwrap(), options).await.unwrap();
    let name = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().file_name();
    drop(upload);
    let mut child = Command::new("true").spawn().unwrap();
    let dead = child.id().to_string();
    child.wait().unwrap();
    let name =
        name.to_str().unwrap().replace(&format!(".{}.", std::process::id()), &format!(".{dead}."));
    assert!(name.starts_with(".dcp-tmp."));
    name
}

#[tokio::test]
async fn the_next_copy_removes_what_a_killed_one_left() {
    let folder = tempfile::tempdir().unwrap();
    let (run, target) = (run(folder.path()), folder.path().join("target"));
    let left = target.join("step-20").join(name_of_the_dead().await);
    dcp_testing::copy_folder(
        &fixtures().join("../hf/consolidated_index_4r/ckpt"),
        &run.join("checkpoint-30"),
    );
    let of_model = target.join("checkpoint-30").join(left.file_name().unwrap());
    for left in [&left, &of_model] {
        fs::create_dir_all(left.parent().unwrap()).unwrap();
        fs::write(left, "half of a file").unwrap();
    }
    // One of a process that runs.
    let storage = FsStorage::open(&target).unwrap();
    let options = UploadOptions::new(PutMode::Create, 1 << 20);
    let running = storage.start_upload(&Key::new("step-10/x").unwrap(), options).await.unwrap();
    dcp(["copy", run.to_str().unwrap(), target.to_str().unwrap()]).ok();
    assert!(!left.exists() && !of_model.exists());
    let temporary = |name: &String| name.contains(".dcp-tmp.");
    assert_eq!(files(&target).keys().filter(|name| temporary(name)).count(), 1);
    drop(running);
    assert!(files(&target) == files(&run));
}
