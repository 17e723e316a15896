//! The commands that are stopped.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::{Case, WAYS, dcp, files, put, scratch, survives};

fn fixture(name: &str) -> String {
    let folder = dcp_testing::fixtures();
    folder.join(name).display().to_string()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

const SMALL: &str = "pytorch/t21_plain";
const MEGATRON: &str = "megatron/tp2_basic/ckpt";
const OTHER_MEGATRON: &str = "megatron/factories/ckpt";

/// `dcp convert` to one format, over what it wrote of another checkpoint with other options.
fn converts(source: &str, to: &str, old: (&str, &str)) -> Case {
    let from = |name: &str| vec!["convert".to_owned(), fixture(name)];
    Case {
        before: from(source),
        after: words(to),
        old: (from(old.0), words(old.1)),
        file: false,
        gap: false,
        lasting: false,
        inner: "",
    }
}

#[test]
fn to_safetensors() {
    let to = "--to safetensors --dtype bf16";
    let case = converts(SMALL, to, (SMALL, "--to safetensors"));
    survives(Case { file: true, ..case });
}

#[test]
fn to_torch_save() {
    let to = "--to torch-save --dtype bf16";
    let case = converts(SMALL, to, (SMALL, "--to torch-save"));
    survives(Case { file: true, ..case });
}

#[test]
fn to_legacy_torch_save() {
    let to = "--to torch-save --legacy --dtype bf16";
    let case = converts(SMALL, to, (SMALL, "--to torch-save --legacy"));
    survives(Case { file: true, ..case });
}

#[test]
fn to_dcp() {
    survives(converts(SMALL, "--to dcp --ranks 2 --dtype bf16", (SMALL, "--to dcp --ranks 3")));
}

#[test]
fn reshard() {
    let from = vec!["reshard".to_owned(), fixture(SMALL)];
    let case = converts(SMALL, "--ranks 2", (SMALL, "--to dcp --ranks 3 --dtype bf16"));
    survives(Case { before: from, ..case });
}

#[test]
fn to_hugging_face() {
    let to = "--to hf --max-shard-size 600 --dtype bf16";
    survives(converts(SMALL, to, (SMALL, "--to hf --max-shard-size 700")));
}

/// One file replaces several and their index, and one.
#[test]
fn to_hugging_face_in_one_file() {
    let to = "--to hf --dtype bf16";
    for old in ["--to hf --max-shard-size 700", "--to hf"] {
        survives(converts(SMALL, to, (SMALL, old)));
    }
}

/// The configuration of the new model is another one, so there is a moment without one.
#[test]
fn to_hugging_face_with_its_configuration() {
    let configs = tempfile::tempdir().unwrap();
    let config = |name: &str| {
        let folder = configs.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("config.json"), format!("{{\"model_type\": \"{name}\"}}")).unwrap();
        fs::write(folder.join("vocab.txt"), name).unwrap();
        folder.display().to_string()
    };
    let to = format!("--to hf --max-shard-size 600 --dtype bf16 --config {}", config("new"));
    let old = format!("--to hf --max-shard-size 700 --config {}", config("old"));
    survives(Case { gap: true, ..converts(SMALL, &to, (SMALL, &old)) });
    let to = to.replace("--max-shard-size 600", "");
    survives(Case { gap: true, ..converts(SMALL, &to, (SMALL, &old)) });
}

/// `common.pt` has one name only, so there is a moment in which it is read from the record.
#[test]
fn to_torch_dist() {
    survives(converts(MEGATRON, "--to torch-dist", (OTHER_MEGATRON, "--to torch-dist")));
}

#[test]
fn to_torch_dist_with_the_common_state_inside() {
    let to = "--to torch-dist --form newest --integrity";
    survives(converts(MEGATRON, to, (OTHER_MEGATRON, to)));
}

#[test]
fn reshard_of_megatron() {
    let case = converts(MEGATRON, "--tp 1 --pp 1", (OTHER_MEGATRON, "--to torch-dist"));
    survives(Case { before: vec!["reshard".to_owned(), fixture(MEGATRON)], ..case });
}

#[test]
fn average() {
    let sources = vec!["average".to_owned(), fixture(SMALL), "--non-float".into(), "first".into()];
    let before = sources.into_iter().chain(["--out".to_owned()]).collect();
    let case = converts(SMALL, "--to dcp --dtype bf16", (SMALL, "--to dcp"));
    survives(Case { before, ..case });
}

#[test]
fn merge() {
    let before = vec!["merge".to_owned(), fixture(SMALL), "--out".to_owned()];
    let case = converts(SMALL, "--to hf --max-shard-size 600 --dtype bf16", (SMALL, "--to hf"));
    survives(Case { before, ..case });
}

/// `dcp unshard` of one checkpoint, over what it wrote of another with other options.
fn unshards(to: &str, old: &str) -> Case {
    let from = |name: &str| vec!["unshard".to_owned(), fixture(name)];
    let case = converts(SMALL, to, (SMALL, old));
    let old = (from("pytorch/fsdp2_adam_2r"), words(old));
    Case { before: from(SMALL), old, gap: true, lasting: true, ..case }
}

#[test]
fn unshard_in_chunks() {
    let case = unshards("--strategy chunks --chunk-size 600", "--strategy chunks --chunk-size 700");
    survives(Case { inner: "model", ..case });
}

#[test]
fn unshard_with_the_optimizer() {
    let to = "--strategy one-file --optim --format safetensors";
    let case = unshards(to, to);
    let old = (vec!["unshard".to_owned(), fixture("olmo/any-4rank/ckpt")], words(to));
    survives(Case { old, ..case });
}

/// `dcp rewrite-metadata` replaces one file in place, which is the old or the new one.
#[test]
fn rewrite_metadata() {
    let folder = scratch();
    let index = Path::new(".metadata");
    let mut old = files(fixture(SMALL).as_ref());
    old.retain(|name, _| !name.to_string_lossy().starts_with("expected"));
    let target = folder.path().join("target");
    let shown = target.display().to_string();
    let args = ["rewrite-metadata", &shown, "--to=torch", "--profile=torch2.15"];
    put(&old, &target);
    dcp(&args, None).ok("undisturbed");
    let mut new = old.clone();
    new.insert(index.to_owned(), fs::read(target.join(index)).unwrap());
    assert!(files(&target) == new && old != new);
    for way in &WAYS {
        let mut seen = [false; 2];
        for n in 1.. {
            fs::remove_dir_all(&target).unwrap();
            put(&old, &target);
            let how = way.how;
            let ran = dcp(&args, Some(Arc::new(move |storage| how(storage, n))));
            let when = format!("{} at operation {n}: {:?}", way.name, ran.outcome);
            let left = files(&target);
            let is_new = left.get(index) == new.get(index);
            assert!(is_new || left.get(index) == old.get(index), "{when}");
            assert!(is_new || ran.outcome.is_err(), "{when}");
            let names: Vec<_> = left.keys().collect();
            assert!(way.dies || left.len() == old.len(), "{when}: {names:?}");
            dcp(&["verify", &shown, "--deep"], None).ok(&when);
            seen[usize::from(is_new)] = true;
            dcp(&args, None).ok(&format!("{when}: again"));
            assert!(files(&target) == new || is_new, "{when}: again");
            if (ran.effects.len() as u64) < n {
                break;
            }
        }
        assert!(seen[1] && (seen[0] || !(way.dies || way.undone)), "{}: {seen:?}", way.name);
    }
}
