//! Listing what runs leave: every kind, whole and not, and nothing that is no checkpoint.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail loudly")]

use std::sync::Arc;

use dcp::core::format::Listing;
use dcp::core::storage::{ObjectMeta, PutMode};
use dcp::core::{Key, Storage};
use dcp::jobs::listing::{RunEntry, RunListing};
use dcp_conformance::{CountingStorage, FaultStorage, MemoryStorage};
use dcp_testing::block_on;

fn list_run(storage: &Arc<dyn Storage>) -> RunListing {
    block_on(dcp::jobs::listing::list_run(storage, &dcp::plugins::default_formats())).unwrap()
}

fn run(files: &[(&str, &str)]) -> RunListing {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    fill(&storage, files);
    list_run(&storage)
}

fn fill(storage: &Arc<dyn Storage>, files: &[(&str, &str)]) {
    for (name, content) in files {
        let key = Key::new(name).unwrap();
        let content = match *content {
            "EMPTY" => include_bytes!("../../fixtures/pytorch/state_empty/.metadata").to_vec(),
            "TORCH" => TORCH.to_vec(),
            "TENSORS" => b"\x02\0\0\0\0\0\0\0{}".to_vec(),
            content => content.as_bytes().to_vec(),
        };
        block_on(storage.put(&key, content.into(), PutMode::Create)).unwrap();
    }
}

/// A whole file of torch.save.
const TORCH: &[u8] = include_bytes!("../../fixtures/torch_save/tied/model.pt");
const NOTE: &str = r#"{"ephemeral": true, "version": "3.0.0"}"#;

fn short(entry: &RunEntry) -> (&str, &str, Option<bool>, Option<&str>) {
    (&entry.name, entry.kind.format(), entry.complete, entry.checkpoint.as_deref())
}

#[test]
fn a_run_of_olmo() {
    let listing = run(&[
        ("step10/.metadata.json", NOTE),
        ("step10/train/rank0.pt", "TORCH"),
        ("step10/model_and_optim/.metadata", "EMPTY"),
        ("step9/.metadata.json", r#"{"ephemeral": false, "version": "3.0.0"}"#),
        ("step9/train/rank0.pt", "TORCH"),
        ("step9/model_and_optim/.metadata", "EMPTY"),
        // An asynchronous save that failed.
        ("step11/.metadata.json", NOTE),
        ("step11/train/rank0.pt", "TORCH"),
        ("step11/model_and_optim/__0_0.distcp", "123"),
        ("step12-tmp/train/rank0.pt", "TORCH"),
        ("step12-tmp/model_and_optim/__0_0.distcp", "123"),
        ("logs/train.log", ""),
        ("config.yaml", ""),
    ]);
    let inner = |step: &str| format!("{step}/model_and_optim");
    let (nine, ten) = (inner("step9"), inner("step10"));
    assert_eq!(
        listing.entries.iter().map(short).collect::<Vec<_>>(),
        [
            ("step9", "olmo", Some(true), Some(&*nine)),
            ("step10", "olmo", Some(true), Some(&*ten)),
            ("step11", "olmo", Some(false), None),
            ("step12-tmp", "olmo", Some(false), None),
        ]
    );
    assert_eq!((listing.latest.as_deref(), listing.other), (Some("step10"), 2));
    let step10 = &listing.entries[1];
    assert_eq!((step10.ephemeral, step10.version.as_deref()), (Some(true), Some("3.0.0")));
    assert_eq!((step10.step, step10.files), (Some(10), 3));
    assert_eq!(step10.bytes, (TORCH.len() + 345 + NOTE.len()) as u64);
    assert_eq!(listing.entries[0].ephemeral, Some(false));
    assert!(listing.entries[2].problem.as_ref().unwrap().contains("although"));
}

#[test]
fn runs_of_other_trainers() {
    let listing = run(&[
        ("step_2/.metadata", "EMPTY"),
        ("step_2/__0_0.distcp", "12"),
        ("step_10/__0_0.distcp", "12"),
        ("checkpoint-100/model-00001-of-00002.safetensors", ""),
        ("checkpoint-100/optimizer.pt", "TORCH"),
        ("checkpoint-200/model.safetensors", "TENSORS"),
        ("checkpoint-300/pytorch_model_fsdp_0/.metadata", "EMPTY"),
        ("checkpoint-300/optimizer_0/.metadata", "EMPTY"),
        ("last.pt", "TORCH"),
        ("notes.pt", "text"),
        ("README.md", ""),
    ]);
    assert_eq!(
        listing.entries.iter().map(short).collect::<Vec<_>>(),
        [
            ("checkpoint-100", "huggingface", Some(false), None),
            ("checkpoint-200", "huggingface", Some(true), Some("checkpoint-200")),
            ("checkpoint-300", "dcp", Some(true), Some("checkpoint-300/pytorch_model_fsdp_0")),
            ("last.pt", "torch_save", Some(true), Some("last.pt")),
            ("step_2", "dcp", Some(true), Some("step_2")),
            ("step_10", "dcp", Some(false), None),
        ]
    );
    assert_eq!((listing.latest.as_deref(), listing.other), (Some("checkpoint-300"), 2));
    let json = serde_json::to_value(&listing).unwrap();
    assert_eq!(json["entries"][5]["problem"], "there is no .metadata: the save did not finish");
}

#[test]
fn megatron_says_itself_what_is_finished() {
    let listing = run(&[
        ("latest_checkpointed_iteration.txt", "100\n"),
        ("iter_0000050/mp_rank_00/model_optim_rng.pt", "TORCH"),
        ("iter_0000100/metadata.json", r#"{"sharded_backend": "torch_dist"}"#),
        ("iter_0000100/common.pt", "TORCH"),
        ("iter_0000100/.metadata", "EMPTY"),
        ("iter_0000150/mp_rank_00/model_optim_rng.pt", "TORCH"),
    ]);
    let complete: Vec<_> = listing.entries.iter().map(|entry| entry.complete).collect();
    assert_eq!(complete, [Some(true), Some(true), Some(false)]);
    assert_eq!(listing.latest.as_deref(), Some("iter_0000100"));
    assert!(listing.entries[2].problem.as_ref().unwrap().contains("is at 100"));
    let opens: Vec<_> = listing.entries.iter().map(|entry| entry.checkpoint.as_deref()).collect();
    assert_eq!(opens[1], Some("iter_0000100"));

    let released = run(&[
        ("latest_checkpointed_iteration.txt", "release"),
        ("iter_0000050/mp_rank_00/model_optim_rng.pt", "TORCH"),
        ("release/mp_rank_00/model_optim_rng.pt", "TORCH"),
    ]);
    assert_eq!(released.latest.as_deref(), Some("release"));
}

#[test]
fn a_checkpoint_itself_is_listed_as_the_directory() {
    let dcp = run(&[(".metadata", "EMPTY"), ("__0_0.distcp", ""), ("ema/.metadata", "EMPTY")]);
    let shown: Vec<_> = dcp.entries.iter().map(short).collect();
    assert_eq!(
        shown,
        [(".", "dcp", Some(true), Some(".")), ("ema", "dcp", Some(true), Some("ema"))]
    );
    let step = run(&[
        (".metadata.json", NOTE),
        ("train/rank0.pt", "TORCH"),
        ("model_and_optim/.metadata", "EMPTY"),
    ]);
    let shown: Vec<_> = step.entries.iter().map(short).collect();
    assert_eq!(shown, [(".", "olmo", Some(true), Some("model_and_optim"))]);
    assert_eq!(step.entries[0].ephemeral, Some(true));
    assert!(run(&[]).entries.is_empty());
}

/// Notes, indexes, headers and directories are read, whatever the checkpoints hold.
#[test]
fn checkpoints_are_not_read() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let large = "x".repeat(1 << 20);
    fill(
        &memory,
        &[
            ("step1/.metadata.json", NOTE),
            ("step1/train/rank0.pt", &large),
            ("step1/model_and_optim/.metadata", "EMPTY"),
            ("step1/model_and_optim/__0_0.distcp", &large),
            ("x.pt", &large),
            ("step2/.metadata.json", &large),
            ("step2/model_and_optim/.metadata", "EMPTY"),
        ],
    );
    let counting = CountingStorage::new(memory);
    let storage: Arc<dyn Storage> = Arc::new(counting.clone());
    let listing = list_run(&storage);
    assert_eq!(listing.entries.len(), 2);
    // Of a file of torch.save its first bytes.
    // The note of the second step is none, so it is not whole whatever its index says.
    let indexes = 345;
    assert_eq!(counting.counts().bytes_read, NOTE.len() as u64 + 64 + 512 + indexes);
}

/// The files of a fixture that is a checkpoint, below `name`.
fn put_fixture(storage: &Arc<dyn Storage>, name: &str, fixture: &str, without: &[&str]) {
    let root = dcp_testing::fixtures();
    for file in std::fs::read_dir(root.join(fixture)).unwrap() {
        let file = file.unwrap();
        let inner = file.file_name().into_string().unwrap();
        if file.path().is_dir() || inner.starts_with("expected") || without.contains(&&*inner) {
            continue;
        }
        let key = Key::new(format!("{name}/{inner}")).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        block_on(storage.put(&key, bytes.into(), PutMode::Overwrite)).unwrap();
    }
}

#[test]
fn what_an_index_names_must_be_there() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let (dcp, hf) = ("pytorch/fsdp2_adam_2r", "hf/rank0_index/ckpt");
    let shard = "model-00002-of-00003.safetensors";
    put_fixture(&storage, "step1", dcp, &[]);
    put_fixture(&storage, "step2", hf, &[]);
    put_fixture(&storage, "step3", dcp, &["__0_0.distcp", "__1_0.distcp"]);
    put_fixture(&storage, "step4", dcp, &["__1_0.distcp"]);
    put_fixture(&storage, "step5", dcp, &[]);
    put_fixture(&storage, "step6", hf, &[shard]);
    let whole = std::fs::read(dcp_testing::fixture("torch_save/tied/model.pt"));
    let whole = whole.unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let key = Key::new(name).unwrap();
        block_on(storage.put(&key, bytes.to_vec().into(), PutMode::Overwrite)).unwrap();
    };
    put("step5/__0_0.distcp", &[0; 100]);
    put("step7/.metadata", b"");
    put("step7/__0_0.distcp", b"");
    put("step8.pt", &whole[..whole.len() - 30]);
    put("whole.pt", &whole);
    let index = br#"{"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}"#;
    put("step9/model.safetensors.index.json", index);
    put("step9/x.safetensors", b"\x02\0\0\0\0\0\0\0{}");
    put("step10/.metadata", &[0; 1 << 20]);
    let listing = list_run(&storage);
    let problem = |name: &str| {
        let entry = listing.entries.iter().find(|entry| entry.name == name).unwrap();
        assert_eq!(entry.complete, Some(entry.problem.is_none()), "{entry:?}");
        entry.problem.as_deref()
    };
    assert_eq!((problem("step1"), problem("step2"), problem("whole.pt")), (None, None, None));
    for (name, said) in [
        ("step3", "there are no data files"),
        ("step4", "__1_0.distcp is missing"),
        ("step5", "__0_0.distcp has 100 bytes"),
        ("step6", "model-00002-of-00003.safetensors is missing"),
        ("step7", "the .metadata cannot be read"),
        ("step8.pt", "step8.pt was cut short"),
        ("step10", "the .metadata cannot be read"),
        ("step9", "y.safetensors is missing"),
    ] {
        assert!(problem(name).is_some_and(|problem| problem.contains(said)), "{:?}", problem(name));
    }
    assert_eq!(listing.latest.as_deref(), Some("step2"));
}

/// Of checkpoints whose files have the same names and lengths one index is read.
#[test]
fn a_run_of_a_hundred_steps_is_listed_with_few_requests() {
    let megatron = "megatron/gpt_dp2_dp_reshardable/ckpt";
    let olmo = "olmo/fsdp2-2rank-flat/ckpt";
    let hf = "hf/rank0_index/ckpt";
    for (fixture, inner, reads) in [
        // The index of one and the beginnings of its files, and the beginning of the index of each other
        // that is examined.
        ("pytorch/fsdp2_adam_2r", "", 64 + 2),
        // Its metadata.json, its common.pt, and the ends of that: for the format, and with all other files.
        (megatron, "", 67 + 7),
        // The headers of its files, and the index that places their tensors.
        (hf, "", 71),
        // A note and the trainer's state of each.
        (olmo, "/model_and_optim", 192 + 4),
    ] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        for step in 1..=100 {
            put_fixture(&storage, &format!("step{step}{inner}"), fixture, &[]);
            if !inner.is_empty() {
                let (note, rank) = (format!("step{step}/.metadata.json"), "x".repeat(step % 7 + 1));
                fill(&storage, &[(&*note, NOTE), (&*format!("step{step}/train/rank0.pt"), &*rank)]);
            }
        }
        let counting = CountingStorage::new(storage);
        let listing = list_run(&(Arc::new(counting.clone()) as _));
        assert_eq!(listing.entries.len(), 100);
        assert!(listing.entries.iter().all(|entry| entry.complete == Some(true)), "{fixture}");
        let counts = counting.counts();
        assert_eq!((counts.lists, counts.folder_lists, counts.stats), (1, 0, 0), "{fixture}");
        assert_eq!(counts.reads + counts.whole_reads, reads, "{fixture}: {counts:?}");
    }
}

/// The headers that show whether a tensor is in two files show whether each is whole, too.
#[test]
fn headers_of_a_model_without_an_index_are_read_once() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let root = dcp_testing::fixtures().join("hf/consolidated_index_4r/ckpt");
    for (name, number) in [("a", 1), ("b", 2), ("c", 3)] {
        let shard = format!("model-0000{number}-of-00003.safetensors");
        let bytes = std::fs::read(root.join(shard)).unwrap();
        let key = Key::new(format!("step1/{name}.safetensors")).unwrap();
        block_on(storage.put(&key, bytes.into(), PutMode::Create)).unwrap();
    }
    let counting = CountingStorage::new(storage);
    let listing = list_run(&(Arc::new(counting.clone()) as _));
    assert_eq!(listing.entries[0].complete, Some(true), "{listing:?}");
    let counts = counting.counts();
    assert_eq!((counts.lists, counts.reads + counts.whole_reads), (1, 3), "{counts:?}");
}

/// What is examined for others is only what they have, too.
#[test]
fn a_step_with_other_files_is_examined_itself() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let (dcp, olmo) = ("pytorch/fsdp2_adam_2r", "olmo/fsdp2-2rank-flat/ckpt");
    for step in 1..=5 {
        let without: &[&str] = if step == 3 { &["__1_0.distcp"] } else { &[] };
        put_fixture(&storage, &format!("step{step}"), dcp, without);
        put_fixture(&storage, &format!("olmo{step}/model_and_optim"), olmo, without);
        let (note, rank) =
            (format!("olmo{step}/.metadata.json"), format!("olmo{step}/train/rank0.pt"));
        fill(&storage, &[(&*note, NOTE), (&*rank, "TORCH")]);
    }
    let key = Key::new("step4/__0_0.distcp").unwrap();
    block_on(storage.put(&key, vec![0; 100].into(), PutMode::Overwrite)).unwrap();
    let listing = list_run(&storage);
    let bad = listing.entries.iter().filter(|entry| entry.complete != Some(true));
    let bad: Vec<_> = bad.map(|entry| (&*entry.name, entry.problem.as_deref().unwrap())).collect();
    let [(a, of_a), (b, of_b), (c, of_c)] = *bad else { panic!("{bad:?}") };
    assert_eq!((a, b, c), ("olmo3", "step3", "step4"));
    assert!(of_a.contains("__1_0.distcp is missing") && of_b.contains("__1_0.distcp is missing"));
    assert!(of_c.contains("has 100 bytes"), "{of_c}");
    assert!(
        listing
            .entries
            .iter()
            .filter(|one| one.name.starts_with("olmo"))
            .all(|one| { one.ephemeral == Some(true) })
    );
}

/// What is in folders of a checkpoint is compared with its own index.
#[test]
fn the_folders_of_a_checkpoint_are_examined() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let dcp = "pytorch/fsdp2_adam_2r";
    for (name, without) in [
        ("checkpoint-1/model_0", &[][..]),
        ("checkpoint-1/optimizer_0", &[]),
        ("checkpoint-2/model_0", &["__1_0.distcp"]),
        ("checkpoint-2/optimizer_0", &[]),
        ("checkpoint-3/model_0", &[]),
        ("checkpoint-3/optimizer_0", &["__1_0.distcp"]),
        ("nemo--step=4/weights", &[]),
        ("nemo--step=5/weights", &["__0_0.distcp", "__1_0.distcp"]),
        ("nemo--step=6/weights", &["__1_0.distcp"]),
        ("nemo--step=7/weights", &[]),
    ] {
        put_fixture(&storage, name, dcp, without);
    }
    let json = r#"{"sharded_backend": "torch_dist"}"#;
    fill(
        &storage,
        &[
            ("nemo--step=6/weights/metadata.json", json),
            ("nemo--step=6/weights/common.pt", "TORCH"),
            // Its save did not come to its last step.
            ("nemo--step=7/weights/common.pt", "TORCH"),
        ],
    );
    let listing = list_run(&storage);
    let shown: Vec<_> = listing
        .entries
        .iter()
        .map(|entry| (&*entry.name, entry.complete, entry.problem.as_deref()))
        .collect();
    let missing = |problem| (Some(false), Some(problem));
    assert_eq!(
        shown.iter().map(|(_, complete, problem)| (*complete, *problem)).collect::<Vec<_>>(),
        [
            (Some(true), None),
            missing("model_0: __1_0.distcp is missing"),
            missing("optimizer_0: __1_0.distcp is missing"),
            (Some(true), None),
            missing("weights: there are no data files"),
            missing("weights: __1_0.distcp is missing"),
            missing("weights: there is no metadata.json: the save did not finish"),
        ],
        "{shown:?}"
    );
    assert_eq!(listing.latest.as_deref(), Some("nemo--step=4"));
}

/// A storage that fails says nothing against what names say.
#[test]
fn a_failed_look_leaves_what_is_known_to_be_incomplete() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    fill(
        &memory,
        &[
            ("step1/.metadata.json", NOTE),
            ("step1/train/rank0.pt", "TORCH"),
            ("step1/model_and_optim/.metadata", "EMPTY"),
            ("step2/.metadata.json", NOTE),
            ("step2/model_and_optim/.metadata", "EMPTY"),
        ],
    );
    // After the listing.
    let faults: Arc<dyn Storage> = Arc::new(FaultStorage::new(memory).dying_after(1));
    let listing = list_run(&faults);
    let [one, two] = &*listing.entries else { panic!("{listing:?}") };
    assert_eq!((one.complete, two.complete), (None, Some(false)));
    assert_eq!(two.problem.as_deref(), Some("there is no train/rank0.pt"));
}

/// Every iteration that the tracker has not reached is marked, however many there are.
#[test]
fn all_iterations_beyond_the_tracker_are_unfinished() {
    const ITERATIONS: usize = 5_000;
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    fill(&storage, &[("latest_checkpointed_iteration.txt", "0")]);
    for iteration in 1..=ITERATIONS {
        let key = Key::new(format!("iter_{iteration:07}/mp_rank_00/model_optim_rng.pt")).unwrap();
        block_on(storage.put(&key, vec![0].into(), PutMode::Create)).unwrap();
    }
    let listing = list_run(&storage);
    assert_eq!(listing.entries.len(), ITERATIONS);
    assert!(listing.entries.iter().all(|entry| entry.complete == Some(false)));
}

#[test]
fn every_checkpoint_below_a_folder_is_counted() {
    let names = (0..200).map(|step| format!("step{step}/.metadata"));
    let metas = names.map(|name| ObjectMeta::new(Key::new(name).unwrap(), 1));
    let listing = Listing::new(metas.collect::<Vec<_>>());
    let formats = dcp::jobs::listing::formats();
    assert_eq!(formats.checkpoints_below(&listing.root()).len(), 200);
    let message = formats.explain(&listing.root());
    let said = "200 checkpoints in folders below it, such as \"step199\"";
    assert!(message.ends_with(said), "{message}");
}
