//! Commands that write to one place at the same time: one writes, and the others change nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use dcp::Storage;
use dcp::core::Key;
use dcp::core::storage::Claim;
use dcp_storage_fs::FsStorage;

use crate::ranks::on_ranks;
use crate::ranks_write::{files, tensors};
use crate::support::{Run, command, dcp, finish, path};

const OLMO: &str = "../olmo/fsdp2-2rank-nested/ckpt";

/// Every command that writes a folder, with SOURCE and TARGET in their places.
const WRITERS: [&[&str]; 8] = [
    &["copy", "SOURCE", "TARGET"],
    &["reshard", "SOURCE", "TARGET", "--ranks", "3"],
    &["convert", "SOURCE", "TARGET", "--to", "dcp"],
    &["convert", "SOURCE", "TARGET", "--to", "hf", "--everything"],
    &["average", "SOURCE", "SOURCE", "--out", "TARGET", "--to", "hf", "--everything"],
    &["average", "SOURCE", "SOURCE", "--out", "TARGET", "--to", "dcp"],
    &["merge", "SOURCE", "SOURCE", "--identical", "--out", "TARGET", "--to", "dcp"],
    &["unshard", OLMO, "TARGET", "--strategy", "per-tensor"],
];

fn filled(args: &[&str], source: &str, target: &str) -> Vec<String> {
    let fill = |arg: &&str| arg.replace("SOURCE", source).replace("TARGET", target);
    args.iter().map(fill).collect()
}

/// What another process that writes there holds.
async fn held(folder: &Path, name: &str) -> Arc<dyn Claim> {
    let storage = FsStorage::builder(folder).create(true).open().unwrap();
    storage.claim(&Key::new(name).unwrap()).await.unwrap()
}

fn all_files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = files(folder);
    all.retain(|name, _| !name.contains(".dcp-lock."));
    all
}

#[tokio::test]
async fn a_place_that_another_process_writes_is_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let names_holder = format!("process {}", std::process::id());
    for (at, writer) in WRITERS.into_iter().enumerate() {
        let target = path(&folder, &at.to_string());
        let claim = held(target.as_ref(), ".metadata").await;
        fs::write(Path::new(&target).join("__0_0.distcp"), "of the other").unwrap();
        let before = all_files(target.as_ref());
        let args = filled(writer, "fsdp2_adam_2r", &target);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        for run in [dcp(args.iter().copied()), on_ranks(2, &args)] {
            run.fails(1, &["cannot write to", &names_holder, ".dcp-lock.metadata"]);
            assert_eq!(all_files(target.as_ref()), before, "{writer:?}");
        }
        drop(claim);
    }
}

#[tokio::test]
async fn a_file_that_another_process_writes_is_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    for format in ["safetensors", "torch-save"] {
        let claim = held(folder.path(), format).await;
        let target = path(&folder, format);
        let args = ["convert", "fsdp2_adam_2r", &target, "--to", format, "--overwrite"];
        let names_holder = format!("process {}", std::process::id());
        dcp(args).fails(1, &["cannot write to", &names_holder]);
        assert!(all_files(folder.path()).is_empty());
        drop(claim);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A saver has one step of the run at the target, and a copy of the run is refused before it writes.
#[tokio::test]
async fn a_copy_of_a_run_claims_its_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (run, target) = (path(&folder, "run"), path(&folder, "target"));
    for step in ["step-1", "step-2"] {
        dcp(["copy", "fsdp2_adam_2r", &format!("{run}/{step}")]).ok();
    }
    let claim = held(&Path::new(&target).join("step-2"), ".metadata").await;
    dcp(["copy", &run, &target]).fails(1, &["cannot write to", "step-2/.metadata"]);
    assert!(all_files(target.as_ref()).is_empty());
    assert!(!Path::new(&target).join("step-1").exists());
    drop(claim);
    dcp(["copy", &run, &target]).ok();
    assert!(all_files(target.as_ref()) == all_files(run.as_ref()));
    let locks = files(target.as_ref()).keys().filter(|name| name.contains("lock")).count();
    assert_eq!(locks, 0);
}

fn start(args: &[String]) -> std::process::Child {
    command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Two processes write to one new folder: what is there is what the one that succeeds writes alone.
#[test]
fn of_two_writers_of_one_place_one_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let model = tensors(folder.path(), 4, [64, 1024]);
    let (one, two) = (path(&folder, "one"), path(&folder, "two"));
    dcp(["convert", &model, &one, "--to", "dcp"]).ok();
    dcp(["average", &one, &one, "--weights", "0.25,0.5", "--out", &two, "--to", "dcp"]).ok();
    let writers = &WRITERS[..7];
    let alone: Vec<BTreeMap<String, Vec<u8>>> = (0..writers.len() * 2)
        .map(|at| {
            let target = path(&folder, &format!("alone-{at}"));
            let source = if at % 2 == 0 { &one } else { &two };
            dcp(filled(writers[at / 2], source, &target)).ok();
            all_files(target.as_ref())
        })
        .collect();
    for first in 0..writers.len() {
        for (at, second) in [0, first, (first + 1) % writers.len()].into_iter().enumerate() {
            let target = path(&folder, &format!("{first}-{second}-{at}"));
            let starts = [
                start(&filled(writers[first], &one, &target)),
                start(&filled(writers[second], &two, &target)),
            ];
            let runs: Vec<Run> = starts
                .into_iter()
                .map(|process| finish(process.wait_with_output().unwrap()))
                .collect();
            let case = format!("{:?} beside {:?}: {runs:?}", writers[first], writers[second]);
            let there = all_files(target.as_ref());
            match (runs[0].code, runs[1].code) {
                (0, 0) => panic!("both succeed: {case}"),
                (0, _) => assert!(there == alone[first * 2], "{case}"),
                (_, 0) => assert!(there == alone[second * 2 + 1], "{case}"),
                _ => panic!("none succeeds: {case}"),
            }
            dcp(["verify", "--deep", &target]).ok();
        }
    }
}
