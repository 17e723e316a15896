//! Files that only have the name of a format's file in the folder of a whole checkpoint of another one: every command
//! gives one answer, and no prune deletes what a reader opens.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::incomplete_sources::{accelerate, bins, copy, olmo, shards};
use crate::support::{dcp, fixtures, path};

/// The `metadata.json` of Megatron-Core.
const MEGATRON: &[u8] = br#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1}"#;
const ZARR: &[u8] = br#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#;
/// A checkpoint of Megatron-Core whose common state is an object of its index.
const INSIDE: &str = "../megatron/head020_basic_integrity/ckpt";
const LEGACY: &str = "../megatron/run_legacy_torch_tp2/iter_0000010";
const INCOMPLETE: [&str; 3] = ["--incomplete", "--min-age", "0s"];

/// Makes a whole step in a folder.
type Make = fn(&Path);

const FORMATS: [(&str, Make); 14] = [
    ("dcp", |step| copy("fsdp2_adam_2r", step)),
    ("dcp without paths", |step| copy("flatten_off_2r", step)),
    ("dcp by ranks", |step| copy("no_collectives_2r", step)),
    ("dcp of safetensors", |step| copy("safetensors_fmt_2r", step)),
    ("hf", single),
    ("hf in shards", shards),
    ("hf by ranks", |step| copy("../hf/sharded_2r/ckpt", step)),
    ("bin", bins),
    ("olmo", olmo),
    ("accelerate", accelerate),
    ("torch_dist", |step| copy("../megatron/tp2_basic/ckpt", step)),
    ("torch_dist with its common state inside", |step| copy(INSIDE, step)),
    ("zarr", |step| copy("../megatron/v09_zarr/ckpt", step)),
    ("legacy", |step| copy(LEGACY, step)),
];

fn single(step: &Path) {
    let to = step.display().to_string();
    dcp(["convert", "-q", "t21_plain", &to, "--to", "hf"]).ok();
}

/// A file of `torch.save` that holds a dict.
fn torch() -> Vec<u8> {
    fs::read(fixtures().join("../torch_save/t21/zip.pt")).unwrap()
}

/// The index of another checkpoint of PyTorch.
fn index() -> Vec<u8> {
    fs::read(fixtures().join("t21_plain/.metadata")).unwrap()
}

/// Names of files that dcp writes beside others while it overwrites a checkpoint, here links of the user.
const LINK_TO_RECORD: &str = ".dcp-commit -> /dev/null";
const LINK_TO_CONFIG: &str = "config.json.replaced -> /dev/null";

/// Names that some format reads, each with contents of the user.
fn strays() -> Vec<(&'static str, Vec<u8>)> {
    let text = |name, bytes: &[u8]| (name, bytes.to_vec());
    let mut all = vec![
        ("common.pt", torch()),
        text("metadata.json", MEGATRON),
        text("metadata.json", ZARR),
        text("metadata.json", b"{\"step\": 10}"),
        text("metadata.json", b"hello"),
        text("integrity.json", b"{}"),
        text(".dcp-commit", b"hello world"),
        text(".dcp-commit", b"dmc1 and more"),
        text(".metadata.json", b"{}"),
        text("cache.safetensors", b"cut"),
        ("mp_rank_00/x.pt", torch()),
        text("weights/z.bin", &[0; 4096]),
        text("train/rank1.pt", b"PK\x03\x04 cut"),
        text("model_and_optim/notes.txt", b"hello"),
        ("model_and_optim/x.pt", torch()),
        text("model_and_optim/.metadata", b"hello"),
        ("model_and_optim/.metadata", index()),
        text("model_and_optim/__0_0.distcp", b"hello"),
        text(".metadata", b"hello"),
        (".metadata", index()),
        (LINK_TO_RECORD, Vec::new()),
        (LINK_TO_CONFIG, Vec::new()),
    ];
    for name in [
        "common.pt",
        "metadata.json",
        "integrity.json",
        ".dcp-commit",
        ".metadata.json",
        ".metadata.tmp",
        "mp_rank_00/x.pt",
        "mp_rank_01/y.bin",
        "weights/z.bin",
        "cache.safetensors",
        "sub/cache.safetensors",
        "done.pt",
        "model.unfinished",
        "train/rank1.pt",
        "latest_checkpointed_iteration.txt",
        "x/.zarray",
    ] {
        all.push((name, Vec::new()));
    }
    all
}

fn put(step: &Path, name: &str, bytes: &[u8]) {
    if let Some((name, to)) = name.split_once(" -> ") {
        std::os::unix::fs::symlink(to, step.join(name)).unwrap();
        return;
    }
    let file = step.join(name);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, bytes).unwrap();
}

fn entries(run: &TempDir) -> Vec<Value> {
    dcp(["ls", "--json", &path(run, "")]).json()["entries"].as_array().unwrap().clone()
}

fn entry(run: &TempDir, name: &str) -> Value {
    entries(run).into_iter().find(|entry| entry["name"] == name).unwrap_or_default()
}

/// The steps that a prune deletes, and its plan.
fn pruned(run: &TempDir, options: &[&str]) -> (Vec<String>, Value) {
    let uri = path(run, "");
    let args = [&["prune", &uri, "--by", "step", "--json"], options].concat();
    let plan = dcp([&args[..], &["--dry-run"]].concat()).json();
    let done = dcp([&args[..], &["--yes"]].concat()).json();
    let gone = done["deleted"].as_array().unwrap().iter();
    (gone.map(|one| one["name"].as_str().unwrap().to_owned()).collect(), plan)
}

fn in_words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(20)]).into_owned()
}

/// One run of each format has a step for each stray file, and one without.
#[test]
fn a_file_with_the_name_of_a_format_costs_no_whole_checkpoint_of_another() {
    let strays = strays();
    let mut wrong = Vec::new();
    for (format, make) in FORMATS {
        let run = tempfile::tempdir().unwrap();
        let mut made = Vec::new();
        for (number, (name, bytes)) in strays.iter().enumerate() {
            let folder = format!("step{}", number + 10);
            let step = run.path().join(&folder);
            make(&step);
            // These say that the files of an unindexed model are not all, and that there is one more array.
            let is_mark = *name == "model.unfinished" && format == "hf by ranks"
                || *name == "x/.zarray" && format == "zarr";
            if is_mark || step.join(name).exists() {
                fs::remove_dir_all(&step).unwrap();
                continue;
            }
            put(&step, name, bytes);
            made.push((folder, format!("{format} with {name:?}, {:?}", in_words(bytes)), *name));
        }
        make(&run.path().join("step999"));
        assert!(made.len() > 20, "{format}");
        let listed = entries(&run);
        for (folder, shown, name) in &made {
            let found = listed.iter().find(|entry| entry["name"] == **folder);
            let found = found.cloned().unwrap_or_default();
            let verified = dcp(["verify", "--json", &path(&run, folder)]);
            if (found["complete"] == true) != (verified.code == 0) {
                wrong.push(format!("{shown}: {found}\n  {} {}", verified.code, verified.stdout));
            }
            // What counts is read, and only the stray file has a problem.
            if found["strays"].is_array() {
                let said = format!("{}{}", verified.stdout, verified.stderr);
                if !said.contains(name) || verified.code != 1 {
                    wrong.push(format!("{shown}: {found}\n  {} {said}", verified.code));
                }
            }
        }
        let (gone, plan) = pruned(&run, &INCOMPLETE);
        for folder in &gone {
            let (_, shown, _) = made.iter().find(|(name, ..)| name == folder).unwrap();
            let steps = plan["steps"].as_array().unwrap();
            let step = steps.iter().find(|step| step["name"] == **folder).unwrap();
            wrong.push(format!("deleted: {shown}: {step}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The newest step keeps the older ones from being the last, so it has to be one that opens.
#[test]
fn a_step_that_nothing_opens_is_never_the_one_that_is_kept() {
    for (format, make) in FORMATS {
        for (name, bytes) in [
            ("metadata.json", MEGATRON),
            ("metadata.json", ZARR),
            (".dcp-commit", b""),
            (".dcp-commit", b"dmc1 and more"),
            ("common.pt", b""),
            ("mp_rank_00/x.pt", b""),
            (".metadata.json", b""),
            (LINK_TO_RECORD, b""),
            (LINK_TO_CONFIG, b""),
            (".metadata", b"hello"),
            ("model_and_optim/.metadata", b"hello"),
        ] {
            let shown = format!("{format} with {name:?} {:?}", in_words(bytes));
            let run = tempfile::tempdir().unwrap();
            ["step10", "step20"].iter().for_each(|step| make(&run.path().join(step)));
            if run.path().join("step20").join(name).exists() {
                continue;
            }
            put(&run.path().join("step20"), name, bytes);
            let (gone, plan) = pruned(&run, &["--keep-last", "1"]);
            assert!(gone.is_empty() || gone == ["step10"], "{shown}: {gone:?}");
            if !gone.is_empty() {
                let out = path(&run, "out");
                let to = if format == "accelerate" { "hf" } else { "safetensors" };
                let ranks: &[_] = if format == "dcp by ranks" { &["--rank", "0"] } else { &[] };
                let args = ["-q", "convert", &path(&run, "step20"), &out, "--to", to];
                let written = dcp(args.iter().chain(ranks));
                assert_eq!(written.code, 0, "{shown}: {}\n{plan:#}", written.stderr);
            }
        }
    }
}

#[test]
fn a_whole_step_beside_a_stray_file_is_the_latest_and_counts_for_a_policy() {
    for (format, make) in [
        ("dcp", FORMATS[0].1),
        ("dcp by ranks", FORMATS[2].1),
        ("accelerate", accelerate),
        ("torch_dist", FORMATS[10].1),
        ("zarr", FORMATS[12].1),
    ] {
        let run = tempfile::tempdir().unwrap();
        let steps = ["step10", "step20", "step30"];
        steps.iter().for_each(|step| make(&run.path().join(step)));
        // Of every step, as a callback writes it, and of one.
        ["step10", "step30"].iter().for_each(|step| put(&run.path().join(step), "done.pt", b""));
        put(&run.path().join("step30"), "sub/x.bin", b"");
        let listing = dcp(["ls", "--json", &path(&run, "")]).json();
        assert_eq!(listing["latest"], "step30", "{format}: {listing:#}");
        assert_eq!(listing["entries"][2]["complete"], Value::Null, "{format}: {listing:#}");
        let (gone, plan) = pruned(&run, &["--keep-last", "1"]);
        assert_eq!(gone, ["step10", "step20"], "{format}: {plan:#}");
        // What all others have whole may be needed for a resume.
        let run = tempfile::tempdir().unwrap();
        steps.iter().for_each(|step| make(&run.path().join(step)));
        let whole = torch();
        ["step10", "step20"]
            .iter()
            .for_each(|step| put(&run.path().join(step), "data_0.pt", &whole));
        put(&run.path().join("step30"), "data_0.pt", &whole[..whole.len() / 2]);
        let (gone, plan) = pruned(&run, &["--keep-last", "1"]);
        assert_eq!(gone, ["step10"], "{format}: {plan:#}");
    }
}

#[test]
fn a_legacy_step_is_read_beside_a_metadata_json_of_the_user() {
    for json in [&b"{\"step\": 10}"[..], b"[1]", b"hello", b"", MEGATRON, ZARR] {
        let run = tempfile::tempdir().unwrap();
        ["step10", "step20"].iter().for_each(|step| copy(LEGACY, &run.path().join(step)));
        let shown = in_words(json);
        put(&run.path().join("step10"), "metadata.json", json);
        let listed = entry(&run, "step10");
        assert_eq!(listed["complete"], true, "{shown}: {listed:#}");
        let uri = path(&run, "step10");
        dcp(["inspect", &uri]).ok();
        dcp(["verify", "--deep", &uri]).ok();
        dcp(["diff", &uri, &path(&run, "step20")]).ok();
        dcp(["convert", &uri, &path(&run, "out"), "--to", "torch-dist"]).ok();
        fs::remove_file(run.path().join("step10/mp_rank_01/model_optim_rng.pt")).unwrap();
        assert_eq!(entry(&run, "step10")["complete"], false, "{shown}");
        assert_eq!(pruned(&run, &INCOMPLETE).0, ["step10"], "{shown}");
    }
}

/// Only the index says whose save a folder is.
#[test]
fn a_common_pt_beside_an_index_that_shows_no_owner_is_named_and_the_step_stays() {
    let run = tempfile::tempdir().unwrap();
    ["step10", "step20"].iter().for_each(|step| copy("flatten_off_2r", &run.path().join(step)));
    put(&run.path().join("step10"), "common.pt", &torch());
    let listed = entry(&run, "step10");
    assert_eq!(listed["complete"], Value::Null, "{listed:#}");
    let problem = listed["problem"].as_str().unwrap();
    assert!(problem.contains("common.pt") && problem.contains("moved away"), "{problem}");
    let (gone, plan) = pruned(&run, &INCOMPLETE);
    assert_eq!(gone, [""; 0], "{plan:#}");
    assert!(plan["steps"][0]["reason"].as_str().unwrap().contains("common.pt"), "{plan:#}");
    // A killed save of Megatron-Core has its objects.
    let megatron = run.path().join("step30");
    copy("../megatron/tp2_basic/ckpt", &megatron);
    fs::remove_file(megatron.join("metadata.json")).unwrap();
    assert_eq!(entry(&run, "step30")["complete"], false);
    assert_eq!(pruned(&run, &INCOMPLETE).0, ["step30"]);
}

#[test]
fn a_common_pt_that_holds_no_common_state_is_damage_for_every_command() {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("step10");
    copy("../megatron/tp2_basic/ckpt", &step);
    let list = fixtures().join("../torch_save/kinds/root_list.pt");
    fs::copy(list, step.join("common.pt")).unwrap();
    let listed = entry(&run, "step10");
    assert_eq!(listed["complete"], false, "{listed:#}");
    assert!(listed["problem"].as_str().unwrap().contains("not a dict"), "{listed:#}");
    assert_eq!(dcp(["verify", &path(&run, "step10")]).code, 1);
}

#[test]
fn a_lost_file_of_the_trainer_does_not_make_a_committed_step_of_olmo_deletable() {
    let run = tempfile::tempdir().unwrap();
    ["step10", "step20"].iter().for_each(|step| olmo(&run.path().join(step)));
    fs::remove_file(run.path().join("step10/train/rank0.pt")).unwrap();
    let (gone, plan) = pruned(&run, &INCOMPLETE);
    assert_eq!(gone, [""; 0], "{plan:#}");
    let reason = plan["steps"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("model_and_optim") && reason.contains("train/rank0.pt"), "{reason}");
    // Without its commit the save did not finish, and a lost data file is lost.
    fs::remove_file(run.path().join("step10/.metadata.json")).unwrap();
    assert_eq!(pruned(&run, &INCOMPLETE).0, ["step10"]);
    let run = tempfile::tempdir().unwrap();
    ["step10", "step20"].iter().for_each(|step| olmo(&run.path().join(step)));
    fs::remove_file(run.path().join("step10/train/rank0.pt")).unwrap();
    fs::remove_file(run.path().join("step10/model_and_optim/__1_0.distcp")).unwrap();
    assert_eq!(pruned(&run, &INCOMPLETE).0, ["step10"]);
}

/// Each rank writes data files under its number, so that those of a rank without an index show that it is lost.
#[test]
fn a_rank_whose_index_is_lost_leaves_no_whole_checkpoint() {
    for (lost, said) in [("__1.metadata", "rank 1"), ("__0.metadata", "rank 0")] {
        let run = tempfile::tempdir().unwrap();
        let make = |step: &str| copy("no_collectives_2r", &run.path().join(step));
        ["step10", "step20"].into_iter().for_each(make);
        fs::remove_file(run.path().join("step20").join(lost)).unwrap();
        let said = format!("the metadata of {said} is missing");
        let listed = entry(&run, "step20");
        assert_eq!(listed["complete"], false, "{listed:#}");
        assert_eq!(listed["problem"], *said, "{listed:#}");
        let uri = path(&run, "step20");
        let opened = dcp(["inspect", &uri]);
        assert!(opened.stderr.contains(&said), "{}", opened.stderr);
        opened.not_whole(&[&said]);
        let verified = dcp(["verify", &uri]);
        assert!(verified.code == 1 && verified.stdout.contains(&said), "{}", verified.stdout);
        assert_eq!(pruned(&run, &["--keep-last", "1"]).0, [""; 0]);
        assert_eq!(pruned(&run, &INCOMPLETE).0, ["step20"]);
    }
}
