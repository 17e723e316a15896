//! What folders and files are recognized as, by every format of the build, and what it costs.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail loudly")]

use std::path::Path;
use std::sync::Arc;

use dcp::core::format::{FormatRegistry, Listing, OpenOptions, OpenedCheckpoint};
use dcp::core::storage::{ObjectMeta, PutMode};
use dcp::core::{CheckpointError, Key, Storage};
use dcp::plugins::default_formats;
use dcp_conformance::{CountingStorage, Counts, MemoryStorage};
use dcp_testing::block_on;

/// The format, whether it is whole, and the folder with the data, of the folder `x`.
fn classified(names: &[&str]) -> Option<(&'static str, bool, Option<String>)> {
    let key = |name: &&str| Key::new(format!("x/{name}")).unwrap();
    let listing = Listing::new(names.iter().map(|name| ObjectMeta::new(key(name), 1)));
    let found = default_formats().classify(&listing.root().folder("x")?)?;
    Some((found.format.info().name, found.found.problem.is_none(), found.found.inner))
}

fn problem(names: &[&str]) -> String {
    let key = |name: &&str| Key::new(format!("x/{name}")).unwrap();
    let listing = Listing::new(names.iter().map(|name| ObjectMeta::new(key(name), 1)));
    let found = default_formats().classify(&listing.root().folder("x").unwrap()).unwrap();
    found.found.problem.unwrap()
}

#[test]
fn checkpoints_of_trainers() {
    let inner = |name: &str| Some(name.to_owned());
    let cases: [(&[&str], _); 15] = [
        (&[".metadata", "__0_0.distcp"], Some(("dcp", true, None))),
        (&["__0_0.distcp"], Some(("dcp", false, None))),
        (&[".metadata.tmp", "__0_0.distcp"], Some(("dcp", false, None))),
        (&["__0.metadata", "__1.metadata"], Some(("dcp", true, None))),
        (&["__0.metadata", "__2.metadata"], Some(("dcp", false, None))),
        (
            &["trainer_state.json", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
            Some(("dcp", true, inner("pytorch_model_fsdp_0"))),
        ),
        (&["weights/.metadata", "context/model.yaml"], Some(("megatron", true, inner("weights")))),
        (&["metadata.json", "common.pt", ".metadata"], Some(("megatron", true, None))),
        (&["metadata.json", "common.pt", "__0_0.distcp"], Some(("megatron", false, None))),
        (&["common.pt", ".metadata", "__0_0.distcp"], Some(("megatron", false, None))),
        (&["mp_rank_00/model_optim_rng.pt"], Some(("megatron", true, None))),
        (&["model.safetensors", "optimizer.pt"], Some(("huggingface", true, None))),
        (&["pytorch_model.bin", "config.json"], Some(("torch_save", true, None))),
        (&["events.out", "wandb/run.log", "a/b/c/d/e/.metadata"], None),
        (&["optimizer.pt", "rng_state_0.pth"], None),
    ];
    for (names, expected) in cases {
        assert_eq!(classified(names), expected, "{names:?}");
    }
}

#[test]
fn a_missing_shard_is_named() {
    let shards = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"];
    assert_eq!(problem(&shards), "model-00002-of-00003.safetensors is missing");
    assert!(problem(&["model.safetensors.index.json"]).contains("no safetensors file"));
    let hostile = ["a-1-of-4294967295.safetensors"];
    assert_eq!(classified(&hostile), Some(("huggingface", true, None)));
}

#[test]
fn a_model_that_was_not_written_to_its_end_is_not_whole() {
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert!(problem(&shards).contains("no index"));
    let whole = Some(("huggingface", true, None));
    let with = |name| [shards[0], shards[1], name];
    assert_eq!(classified(&with("model.safetensors.index.json")), whole);
    assert_eq!(classified(&with("model.safetensors")), whole);
    assert_eq!(classified(&["shard-00001-model-00001-of-00001.safetensors"]), whole);
    let aside = dcp::formats::hf::CONFIG_ASIDE;
    assert!(problem(&["model.safetensors", aside]).contains("died"));
    assert_eq!(classified(&["model.safetensors", "config.json", aside]), whole);
    let chunk = ["chunk-00000.safetensors", dcp::formats::hf::UNFINISHED_NAME];
    assert!(problem(&chunk).contains("not written to its end"));
    assert_eq!(classified(&[chunk[0], chunk[1], "model.safetensors.index.json"]), whole);
}

fn put(storage: &Arc<dyn Storage>, name: &str, bytes: &[u8]) {
    let key = Key::new(name).unwrap();
    block_on(storage.put(&key, bytes.to_vec().into(), PutMode::Overwrite)).unwrap();
}

/// What opening a folder with these files says.
fn refusal(files: &[(&str, &[u8])]) -> String {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    files.iter().for_each(|(name, bytes)| put(&storage, name, bytes));
    match block_on(default_formats().open(&storage, &OpenOptions::default())) {
        Err(CheckpointError::NotACheckpoint { message }) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_checkpoint_is_said() {
    for (files, said) in [
        (&[] as &[(&str, &[u8])], "is empty or does not exist"),
        (&[("x", b"y")], "has no .metadata"),
        (&[("config.json", b"{}")], "config.json of a model, and no weights"),
        (&[("a.pt", b"PK\x03\x04..."), ("b.bin", b"data")], "torch.save, such as \"a.pt\""),
        (&[("__0_0.distcp", b"")], "no .metadata: the save did not finish"),
        (&[(".metadata.tmp", b""), ("__0_0.distcp", b"")], "renaming it to .metadata"),
        (
            &[("step9/model_and_optim/.metadata", b""), ("step10/model_and_optim/.metadata", b"")],
            "there are 2 checkpoints in folders below it, such as \"step10/model_and_optim\"",
        ),
        (
            &[("latest_checkpointed_iteration.txt", b"5"), ("iter_0000005/.metadata", b"")],
            "the directory of a Megatron-LM run; there is a checkpoint in \"iter_0000005\"",
        ),
    ] {
        let message = refusal(files);
        assert!(message.contains(said), "{message}");
        assert!(message.starts_with("not a checkpoint: the directory "), "{message}");
    }
    // Another program's file of that name.
    assert!(refusal(&[("metadata.json", b"{\"a\": 1}")]).contains("has no .metadata"));
}

/// Fixtures in memory, and what opening it costs.
fn open(parts: &[(&str, &str)], formats: &FormatRegistry) -> (OpenedCheckpoint, Counts) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let fixtures = dcp_testing::fixtures();
    parts.iter().for_each(|(fixture, at)| fill(&storage, &fixtures.join(fixture), at));
    let counting = CountingStorage::new(storage);
    let storage: Arc<dyn Storage> = Arc::new(counting.clone());
    let opened = block_on(formats.open(&storage, &OpenOptions::default())).unwrap();
    block_on(opened.reader.metadata()).unwrap();
    (opened, counting.counts())
}

fn fill(storage: &Arc<dyn Storage>, folder: &Path, prefix: &str) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().into_string().unwrap());
        if entry.path().is_dir() {
            fill(storage, &entry.path(), &format!("{name}/"));
        } else if !name.starts_with("expected") {
            put(storage, &name, &std::fs::read(entry.path()).unwrap());
        }
    }
}

/// On a bucket every request takes its time: a folder is listed once, and what its format needs is
/// read once. Of safetensors files each has a header of its own.
#[test]
fn a_folder_is_opened_with_few_requests() {
    let formats = default_formats();
    let olmo = [("olmo/trainer/step3", ""), ("olmo/fsdp2-2rank-flat/ckpt", "model_and_optim/")];
    for (parts, reads) in [
        (&[("pytorch/fsdp2_adam_2r", "")] as &[(&str, &str)], 1),
        (&olmo, 1),
        (&[("megatron/gpt_dp2_dp_reshardable/ckpt", "")], 3),
        (&[("megatron/head020_gpt_dp2_dp_reshardable/ckpt", "")], 3),
        (&[("hf/rank0_index/ckpt", "")], 4),
    ] {
        let (_, counts) = open(parts, &formats);
        assert_eq!((counts.lists, counts.stats), (1, 0), "{parts:?}: {counts:?}");
        assert_eq!(counts.reads + counts.whole_reads, reads, "{parts:?}: {counts:?}");
    }
}
