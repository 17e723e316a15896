//! Folders of runs.

use std::sync::Arc;

use dcp_core::storage::PutMode;
use dcp_core::{Storage, StorageReader, Value};
use dcp_olmo::{OptimizerLayout, RunDir, StepDir};

use crate::support::{FLAT, block_on, everything, fixture, fixtures, key, memory, put_folder};

/// Steps 3 and 20, and a step 100 without its `.metadata`.
fn run() -> Arc<dyn Storage> {
    let storage = memory();
    for step in ["step3", "step20", "step100"] {
        put_folder(&*storage, &fixtures().join("trainer/step3"), &format!("{step}/"));
        let model = fixtures().join(FLAT).join("ckpt");
        put_folder(&*storage, &model, &format!("{step}/model_and_optim/"));
    }
    block_on(storage.delete(&[key("step100/model_and_optim/.metadata")])).unwrap();
    storage
}

fn put(storage: &Arc<dyn Storage>, name: &str, text: &str) {
    let payload = text.as_bytes().to_vec().into();
    block_on(storage.put(&key(name), payload, PutMode::Overwrite)).unwrap();
}

#[test]
fn steps_are_in_order_and_the_latest_is_whole() {
    let storage = run();
    put(&storage, "step21-tmp/train/rank0.pt", "");
    put(&storage, "step21-tmp/model_and_optim/__0_0.distcp", "");
    put(&storage, "logs/out.txt", "");
    let dir = RunDir::new(storage);
    let steps = block_on(dir.steps()).unwrap();
    let steps: Vec<_> = steps.iter().map(|step| (&*step.name, step.complete.unwrap())).collect();
    let expected = [("step3", true), ("step20", true), ("step21-tmp", false), ("step100", false)];
    assert_eq!(steps, expected);
    let latest = block_on(dir.latest_checkpoint()).unwrap().unwrap();
    let reader = block_on(latest.reader()).unwrap();
    assert_eq!(everything(&reader).len(), 14 + 39 + 143);
    assert!(block_on(RunDir::new(memory()).latest_checkpoint()).unwrap().is_none());
}

#[test]
fn a_step_tells_what_is_in_it() {
    let dir = RunDir::new(run());
    let step = dir.step(3).unwrap();
    assert!(block_on(step.dir_is_checkpoint()).unwrap());
    assert!(!block_on(dir.step(100).unwrap().dir_is_checkpoint()).unwrap());
    assert!(!block_on(dir.step(7).unwrap().dir_is_checkpoint()).unwrap());
    let note = block_on(step.note()).unwrap().unwrap();
    assert_eq!((note.ephemeral, note.version.as_deref()), (true, Some("3.0.0")));
    let config = block_on(step.config()).unwrap().unwrap();
    assert_eq!(config["model"]["d_model"], 32);
    assert_eq!(block_on(step.train_ranks()).unwrap(), [0]);
    let index = block_on(block_on(step.reader()).unwrap().metadata()).unwrap();
    assert_eq!(OptimizerLayout::of(&index), Some(OptimizerLayout::Flat));

    let missing = dir.step(7).unwrap();
    assert!(block_on(missing.note()).unwrap().is_none());
    assert!(block_on(missing.config()).unwrap().is_none());
    assert!(block_on(missing.train(0)).unwrap().is_none());
    assert!(dir.folder("../elsewhere").is_err());
}

#[test]
fn the_folder_of_the_model_is_a_checkpoint_too() {
    let step = StepDir::new(fixture(FLAT));
    assert!(block_on(step.dir_is_checkpoint()).unwrap());
    let index = block_on(block_on(step.reader()).unwrap().metadata()).unwrap();
    assert_eq!(index.len(), 14 + 39 + 143);
}

/// A rank without a file of its own takes that of rank 0.
#[test]
fn the_state_of_the_trainer_is_read() {
    let dir = RunDir::new(run());
    let expected = std::fs::read(fixtures().join("trainer/step3/expected-train.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
    for rank in [0, 5] {
        let train = block_on(dir.step(3).unwrap().train(rank)).unwrap().unwrap();
        let all = everything_without_paths(&train);
        let step = all.iter().find(|(name, _)| name == "global_step").unwrap();
        assert_eq!(step.1.view().as_int(), expected["rank0.pt"]["global_step"].as_i64());
        assert!(all.iter().any(|(name, _)| name == "world_size"));
    }
}

fn everything_without_paths(reader: &dyn StorageReader) -> Vec<(String, Value)> {
    let metadata = block_on(reader.metadata()).unwrap();
    let names: Vec<_> = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect();
    assert!(names.iter().any(|name| name.starts_with("rng")), "{names:?}");
    everything(reader).into_iter().map(|(name, (_, value))| (name, value)).collect()
}

#[test]
fn damaged_notes_are_named() {
    let storage = run();
    put(&storage, "step3/.metadata.json", "{");
    put(&storage, "step20/config.json", "no");
    let dir = RunDir::new(storage);
    let error = block_on(dir.step(3).unwrap().note()).unwrap_err().to_string();
    assert!(error.contains(".metadata.json"), "{error}");
    let error = block_on(dir.step(20).unwrap().config()).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    // It still lists, and a commit that was cut short is not whole.
    let steps = block_on(dir.steps()).unwrap();
    assert_eq!((steps[0].complete, steps[0].ephemeral), (Some(false), None));
    assert!(steps[0].problem.as_ref().unwrap().contains(".metadata.json cannot be read"));
}
