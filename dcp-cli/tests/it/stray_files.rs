//! Files of other programs and of the user in the folder of a checkpoint: every command gives one answer, and no prune
//! deletes what is whole without them.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::incomplete_sources::{accelerate, copy, olmo};
use crate::support::{dcp, fixtures, path};

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n";
/// The beginning of an archive.
const CUT: &[u8] = b"PK\x03\x04 cut";
/// A checkpoint of Megatron-Core whose common state is an object of its index.
const INSIDE: &str = "../megatron/head020_basic_integrity/ckpt";

/// Makes a step in a folder.
type Make<'a> = &'a dyn Fn(&Path);

fn bin(step: &Path) {
    fs::create_dir_all(step).unwrap();
    let file = step.join("pytorch_model.bin").display().to_string();
    dcp(["convert", "-q", "t21_plain", &file, "--to", "torch-save"]).ok();
}

fn model(step: &Path) {
    let to = step.display().to_string();
    dcp(["convert", "-q", "t21_plain", &to, "--to", "hf", "--max-shard-size", "600"]).ok();
}

/// A run of two steps.
fn run_of(make: Make<'_>) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    ["step10", "step20"].iter().for_each(|name| make(&run.path().join(name)));
    run
}

fn entry(run: &TempDir, name: &str) -> Value {
    let listing = dcp(["ls", "--json", &path(run, "")]).json();
    let entries = listing["entries"].as_array().unwrap();
    entries.iter().find(|entry| entry["name"] == name).cloned().unwrap_or_default()
}

/// The options of a conversion, where ranks differ.
fn rank_of(fixture: &str) -> &'static [&'static str] {
    if fixture.starts_with("no_collectives") { &["--rank", "0"] } else { &[] }
}

/// The steps that a prune deletes.
fn pruned(run: &TempDir, options: &[&str]) -> Vec<String> {
    let uri = path(run, "");
    let args = [&["prune", &uri, "--by", "step", "--json", "--yes"], options].concat();
    let done = dcp(args).json();
    let gone = done["deleted"].as_array().unwrap().iter();
    gone.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

const INCOMPLETE: [&str; 3] = ["--incomplete", "--min-age", "0s"];

#[test]
fn a_metadata_json_that_names_no_backend_is_not_one_of_megatron() {
    for fixture in ["fsdp2_adam_2r", "no_collectives_2r"] {
        for json in ["{\"step\": 10, \"loss\": 1.5}", "[1]", "null", "hello", ""] {
            let run = run_of(&|step| copy(fixture, step));
            let add = |name: &str| fs::write(run.path().join(name).join("metadata.json"), json);
            add("step20").unwrap();
            let listed = entry(&run, "step20");
            assert_eq!(listed["complete"], true, "{fixture} {json}: {listed:#}");
            assert_eq!(listed["kind"], "dcp", "{fixture} {json}: {listed:#}");
            let (step, out) = (path(&run, "step20"), tempfile::tempdir().unwrap());
            dcp(["inspect", &step]).ok();
            dcp(["verify", "--deep", &step]).ok();
            let out = path(&out, "out");
            dcp(["convert", &step, &out, "--to", "dcp"].iter().chain(rank_of(fixture))).ok();
            assert_eq!(pruned(&run, &INCOMPLETE), [""; 0], "{fixture} {json}");
            // Also where one is examined for several with files of the same lengths.
            add("step10").unwrap();
            assert_eq!(entry(&run, "step10")["kind"], "dcp", "{fixture} {json}");
            assert_eq!(pruned(&run, &INCOMPLETE), [""; 0], "{fixture} {json}");
            fs::remove_file(run.path().join("step10/metadata.json")).unwrap();
            assert_eq!(pruned(&run, &["--keep-last", "1"]), ["step10"], "{fixture} {json}");
        }
    }
}

#[test]
fn a_damaged_metadata_json_of_megatron_is_damage_for_every_command() {
    for json in [&b"{}"[..], b"[]", b"null", b"", b"{\"sharded", LFS] {
        for fixture in [INSIDE, "../megatron/tp2_basic/ckpt"] {
            let run = run_of(&|step| copy(fixture, step));
            let step = run.path().join("step20");
            let _ = fs::remove_file(step.join("integrity.json"));
            fs::write(step.join("metadata.json"), json).unwrap();
            let listed = entry(&run, "step20");
            let shown = format!("{fixture} {}: {listed:#}", String::from_utf8_lossy(json));
            assert_eq!(listed["complete"], false, "{shown}");
            let said = if json == LFS { "Git LFS" } else { "metadata.json" };
            assert!(listed["problem"].as_str().unwrap().contains(said), "{shown}");
            let uri = path(&run, "step20");
            for command in [&["inspect", &*uri][..], &["verify", &uri], &["verify", "--deep", &uri]]
            {
                let run = dcp(command);
                assert_eq!(run.code, 1, "{command:?} {shown}{}", run.stdout);
                assert!(format!("{}{}", run.stdout, run.stderr).contains(said), "{shown}");
            }
            let out = path(&run, "out");
            for to in ["dcp", "torch-dist"] {
                let convert = ["-q", "convert", &uri, &out, "--to", to];
                dcp(convert).fails(1, &[said]);
                assert!(!Path::new(&out).exists(), "{shown}");
            }
            assert_eq!(pruned(&run, &INCOMPLETE), ["step20"], "{shown}");
        }
    }
}

#[test]
fn a_metadata_json_that_cannot_be_parsed_hides_no_checkpoint() {
    for (name, make) in
        [("hf", model as fn(&Path)), ("bin", bin), ("accelerate", accelerate), ("olmo", olmo)]
    {
        for file in ["metadata.json", "latest_checkpointed_iteration.txt"] {
            let run = run_of(&make);
            let text = if file == "metadata.json" { "hello" } else { "10" };
            fs::write(run.path().join("step20").join(file), text).unwrap();
            assert_eq!(entry(&run, "step20")["complete"], true, "{name} {file}");
            let (uri, out) = (path(&run, "step20"), tempfile::tempdir().unwrap());
            for command in [&["inspect", &*uri][..], &["verify", &uri]] {
                let run = dcp(command);
                assert_eq!(run.code, 0, "{name} {file}: {}{}", run.stdout, run.stderr);
            }
            dcp(["convert", &uri, &path(&out, "out"), "--to", "hf"]).ok();
        }
    }
}

#[test]
fn a_stray_file_is_no_reason_to_lose_a_whole_checkpoint() {
    let zeros = vec![0; 4096];
    let cut = fs::read(fixtures().join("../torch_save/t21/zip.pt")).unwrap();
    let cut = &cut[..cut.len() / 2];
    let formats: [(&str, Make<'_>); 7] = [
        ("dcp", &|step| copy("fsdp2_adam_2r", step)),
        ("no_collectives", &|step| copy("no_collectives_2r", step)),
        ("olmo", &olmo),
        ("accelerate", &accelerate),
        ("torch_dist", &|step| copy("../megatron/tp2_basic/ckpt", step)),
        ("zarr", &|step| copy("../megatron/v09_zarr/ckpt", step)),
        ("legacy", &|step| copy("../megatron/run_legacy_torch_tp2/iter_0000010", step)),
    ];
    for (format, make) in formats {
        for (file, bytes) in [
            ("done.pt", &b""[..]),
            ("mask.bin", &zeros),
            ("data/x.bin", b""),
            ("extra.bin", LFS),
            ("meta.pt", cut),
            ("dataloader_0.pt", cut),
            ("train/rank1.pt", b""),
        ] {
            let shown = format!("{format} {file}");
            let run = run_of(make);
            let step = run.path().join("step10");
            fs::create_dir_all(step.join(file).parent().unwrap()).unwrap();
            fs::write(step.join(file), bytes).unwrap();
            let (uri, out) = (path(&run, "step10"), tempfile::tempdir().unwrap());
            let listed = entry(&run, "step10");
            assert_eq!(listed["complete"], Value::Null, "{shown}: {listed:#}");
            assert!(listed["problem"].as_str().unwrap().starts_with(file), "{listed:#}");
            dcp(["inspect", &uri]).not_whole(&[file]);
            let verified = dcp(["verify", &uri]);
            assert!(verified.code == 1 && verified.stdout.contains(file), "{}", verified.stdout);
            // Of several parts, a model alone is written.
            let to = if format == "accelerate" { "hf" } else { "safetensors" };
            let convert = ["convert", &uri, &path(&out, "out"), "--to", to];
            let written = dcp(convert.iter().chain(rank_of(format)));
            let note =
                written.stderr.contains(&format!("not whole, but what is read of it: {file}"));
            assert!(note, "{shown}: {}", written.stderr);
            written.ok();
            let copied = dcp(["copy", &uri, &path(&out, "copy")]);
            let said = format!("may be incomplete, and so may be its copy: {file}");
            // Of a folder with parts `ls` lists the parts.
            let has_note = copied.stderr.contains(&said) || format == "accelerate";
            assert!(has_note, "{shown}: {}", copied.stderr);
            copied.ok();
            let last = ["--keep-last", "1"];
            let all = [&INCOMPLETE[..], &last, &["--deep"]].concat();
            assert_eq!(pruned(&run, &INCOMPLETE), [""; 0], "{shown}");
            // It is one of the complete steps, and this is not the last one. What the format owns it may need, and one
            // without an index is not deleted in parts.
            let is_owned = format == "olmo" && file.starts_with("train/");
            // A note of Lightning that cannot be read may name the best step.
            let is_note = file == "meta.pt";
            let stays = is_owned || is_note || format == "legacy";
            let gone: &[_] = if stays { &[] } else { &["step10"] };
            let options = if file == "done.pt" { &all[..] } else { &last };
            assert_eq!(pruned(&run, options), gone, "{shown} {options:?}");
        }
    }
}

#[test]
fn a_stray_file_does_not_protect_what_is_damaged() {
    let formats: [(&str, Make<'_>, &str, &[u8]); 8] = [
        ("dcp", &|step| copy("fsdp2_adam_2r", step), "__1_0.distcp", CUT),
        ("no_collectives", &|step| copy("no_collectives_2r", step), "__1_0.distcp", CUT),
        ("images", &|step| copy("safetensors_fmt_2r", step), "__0_0.distcp", CUT),
        ("olmo", &olmo, "model_and_optim/__0_0.distcp", CUT),
        ("torch_dist", &|step| copy("../megatron/tp2_basic/ckpt", step), "common.pt", CUT),
        ("torch_dist", &|step| copy("../megatron/tp2_basic/ckpt", step), "common.pt", b""),
        ("zarr", &|step| copy("../megatron/v09_zarr/ckpt", step), "common.pt", b""),
        (
            "legacy",
            &|step| copy("../megatron/run_legacy_torch_tp2/iter_0000010", step),
            "mp_rank_01/model_optim_rng.pt",
            CUT,
        ),
    ];
    for (format, make, file, bytes) in formats {
        let run = run_of(make);
        let step = run.path().join("step10");
        assert!(step.join(file).exists(), "{format} {file}");
        fs::write(step.join(file), bytes).unwrap();
        fs::write(step.join("done.pt"), "").unwrap();
        assert_eq!(entry(&run, "step10")["complete"], false, "{format} {file}");
        let out = path(&run, "out");
        let convert = dcp(["-q", "convert", &path(&run, "step10"), &out, "--to", "safetensors"]);
        assert!(convert.code == 1 && !Path::new(&out).exists(), "{format} {}", convert.stderr);
        assert_eq!(pruned(&run, &INCOMPLETE), ["step10"], "{format} {file}");
    }
}

#[test]
fn a_tensor_in_two_files_without_an_index_is_no_whole_model_for_any_command() {
    let run = tempfile::tempdir().unwrap();
    let steps = ["step10", "step20"].map(|name| run.path().join(name));
    copy("fsdp2_adam_2r", &steps[0]);
    fs::create_dir(&steps[1]).unwrap();
    let one = steps[1].join("a.safetensors");
    let to = one.display().to_string();
    dcp(["convert", "-q", "t21_plain", &to, "--to", "safetensors"]).ok();
    assert_eq!(entry(&run, "step20")["complete"], true);
    fs::copy(&one, steps[1].join("b.safetensors")).unwrap();
    let listed = entry(&run, "step20");
    assert_eq!(listed["complete"], Value::Null, "{listed:#}");
    let said = "it is also in \"a.safetensors\"";
    assert!(listed["problem"].as_str().unwrap().contains(said), "{listed:#}");
    let uri = path(&run, "step20");
    dcp(["inspect", &uri]).not_whole(&[said]);
    assert_eq!(dcp(["verify", &uri]).code, 1);
    assert_eq!(pruned(&run, &["--keep-last", "1"]), [""; 0]);
    assert_eq!(pruned(&run, &INCOMPLETE), [""; 0]);
}

#[test]
fn items_that_claim_the_bytes_of_others_are_no_whole_checkpoint_for_any_command() {
    let run = run_of(&|step| copy("../megatron/tp2_basic/ckpt", step));
    let index = run.path().join("step20/.metadata");
    let mut bytes = fs::read(&index).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&index, bytes).unwrap();
    let (said, uri) = ("also claimed by", path(&run, "step20"));
    let verified = dcp(["verify", &uri]);
    assert!(verified.code == 1 && verified.stdout.contains(said), "{}", verified.stdout);
    let listed = entry(&run, "step20");
    assert_eq!(listed["complete"], false, "{listed:#}");
    assert!(listed["problem"].as_str().unwrap().contains(said), "{listed:#}");
    dcp(["inspect", &uri]).not_whole(&[said]);
}

#[test]
fn a_copy_of_what_ls_calls_incomplete_says_so() {
    let cases: [(Make<'_>, &str, &str); 4] = [
        (&|step| copy("t24_dtensor_4r", step), ".metadata", "no .metadata"),
        (
            &|step| copy("../hf/consolidated_index_4r/ckpt", step),
            "model.safetensors.index.json",
            "index",
        ),
        (&|step| copy("../megatron/tp2_basic/ckpt", step), "metadata.json", "metadata.json"),
        (&bin, "", "cut short"),
    ];
    for (make, file, said) in cases {
        let run = run_of(make);
        let target = tempfile::tempdir().unwrap();
        let whole = dcp(["copy", &path(&run, "step20"), &path(&target, "whole")]);
        assert!(!whole.stderr.contains("incomplete"), "{}", whole.stderr);
        whole.ok();
        match file {
            "" => fs::write(run.path().join("step20/pytorch_model.bin"), "PK\x03\x04 cut").unwrap(),
            file => fs::remove_file(run.path().join("step20").join(file)).unwrap(),
        }
        for (source, to) in [("step20", "one"), ("", "run")] {
            let copied = dcp(["copy", &path(&run, source), &path(&target, to)]);
            // A format without an index is checked by no file.
            assert_eq!(copied.code, 0, "{file}: {}", copied.stderr);
            let note = copied.stderr.contains("is incomplete, and so is its copy: ");
            assert!(note && copied.stderr.contains(said), "{file}: {}", copied.stderr);
        }
    }
}
