//! A load opens what `dcp::open` opens: every format, files, and the folders of runs.

use dcp::engine::ReadSharing;
use dcp::jobs::Keys;
use dcp::{CheckpointError, Checkpointer, Region, StateDict, Tensor, Value};
use dcp_testing::{fixture, on_ranks};

/// Checkpoints of all formats, each with the file of the values that its program recorded.
const CHECKPOINTS: [(&str, &str); 11] = [
    ("pytorch/fsdp2_adam_2r", "pytorch/fsdp2_adam_2r/expected.safetensors"),
    ("pytorch/zstd_2r", "pytorch/zstd_2r/expected.safetensors"),
    ("pytorch/safetensors_fmt_2r", "pytorch/safetensors_fmt_2r/expected.safetensors"),
    ("hf/rank0_index/ckpt", "hf/rank0_index/expected.safetensors"),
    ("hf/sharded_2r/ckpt", "hf/sharded_2r/expected.safetensors"),
    ("hf/rank0/ckpt/model-00001-of-00001.safetensors", "hf/rank0/expected.safetensors"),
    ("torch_save/t215/zip.pt", "torch_save/t215/expected.safetensors"),
    ("torch_save/t215/legacy.pt", "torch_save/t215/expected.safetensors"),
    ("olmo/fsdp2-2rank-nested/ckpt", "olmo/fsdp2-2rank-nested/expected.safetensors"),
    ("megatron/run_torch_dist_dp2", "megatron/run_torch_dist_dp2/expected.safetensors"),
    ("megatron/v09_zarr/ckpt", "megatron/v09_zarr/expected.safetensors"),
];

fn url(name: &str) -> String {
    fixture(name).display().to_string()
}

/// Every tensor and object at a URL, flat.
fn everything(url: &str) -> StateDict {
    let state = dcp::block_on(async { dcp::open(url).await?.load().run().await }).unwrap();
    state.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// The tensors of a state, by their names.
fn tensors(state: &StateDict) -> Vec<(String, Tensor)> {
    let rule = dcp::planner::FlattenRule::default();
    let flat = dcp::planner::flatten(state, rule).unwrap();
    let tensor = |entry: &dcp::planner::FlatEntry| Some(entry.value.as_tensor()?.clone());
    flat.iter().filter_map(|entry| Some((entry.fqn.to_string(), tensor(entry)?))).collect()
}

#[test]
fn a_load_fills_the_tensors_of_every_format() {
    for (checkpoint, expected) in CHECKPOINTS {
        let expected = everything(&url(expected));
        let mut found = 0;
        let mut state = StateDict::new();
        let all = tensors(&everything(&url(checkpoint)));
        for (fqn, tensor) in &all {
            if expected.get(fqn).is_some() {
                let zeros = Tensor::zeros(tensor.dtype(), tensor.shape().clone()).unwrap();
                state.insert(fqn.as_str(), zeros);
            }
        }
        dcp::load(&mut state, url(checkpoint)).blocking().unwrap();
        for (fqn, value) in state.iter() {
            let fqn = fqn.as_str().unwrap();
            assert!(value.same(expected.get(fqn).unwrap()), "{checkpoint}: {fqn}");
            found += 1;
        }
        assert!(found > 0, "{checkpoint}: {:?}", all.first());
        // The state of everything, which names no key, has the same values.
        let everything: StateDict = all
            .into_iter()
            .filter(|(fqn, _)| expected.get(fqn).is_some())
            .map(|(fqn, tensor)| (Value::from(fqn), Value::Tensor(tensor)))
            .collect();
        assert_eq!(everything.len(), found);
        assert!(
            everything
                .iter()
                .all(|(fqn, value)| { value.same(expected.get(fqn.as_str().unwrap()).unwrap()) })
        );
    }
}

#[test]
fn ranks_load_their_rows_of_every_format_and_share_reads() {
    for (checkpoint, expected) in CHECKPOINTS {
        let expected = everything(&url(expected));
        for sharing in [ReadSharing::Never, ReadSharing::Auto, ReadSharing::Always] {
            let filled = on_ranks(2, |rank, group| {
                let mut state = StateDict::new();
                for (fqn, tensor) in tensors(&expected) {
                    let Some(rows) = tensor.shape().first().copied().filter(|rows| *rows > 1)
                    else {
                        continue;
                    };
                    let half = rows / 2;
                    let mine = if rank == 0 { 0..half } else { half..rows };
                    let rest = tensor.shape()[1..].iter().map(|size| 0..*size);
                    let region = Region::of_ranges(std::iter::once(mine).chain(rest)).unwrap();
                    let shape = tensor.shape().clone();
                    let zeros = Tensor::zeros_sharded(tensor.dtype(), shape, [region]).unwrap();
                    state.insert(fqn.as_str(), zeros);
                }
                let checkpointer = Checkpointer::in_group(group).read_sharing(sharing);
                let load = checkpointer.load(&mut state, url(checkpoint));
                load.mode(dcp::LoadMode::AllowMissing).blocking().unwrap();
                state
            });
            let mut compared = 0;
            for (fqn, first) in filled[0].iter() {
                let fqn = fqn.as_str().unwrap();
                let both = [first, filled[1].get(fqn).unwrap()];
                let bytes: Vec<u8> = both
                    .into_iter()
                    .flat_map(|half| half.as_tensor().unwrap().shards())
                    .flat_map(|shard| shard.view().unwrap().payload().unwrap().to_bytes())
                    .collect();
                let whole = expected.get(fqn).unwrap().as_tensor().unwrap().to_vec().unwrap();
                compared += usize::from(bytes == whole && bytes.iter().any(|byte| *byte != 0));
            }
            assert!(compared > 0, "{checkpoint}, {sharing:?}: {} tensors", filled[0].len());
        }
    }
}

/// Of its tensors no file has the whole, so the reader computes them.
#[test]
fn merged_ranks_of_megatron_load() {
    let legacy = url("megatron/run_legacy_torch_tp2");
    let all = everything(&legacy);
    let loaded = tensors(&all);
    let mut state = StateDict::new();
    for (fqn, tensor) in &loaded {
        let zeros = Tensor::zeros(tensor.dtype(), tensor.shape().clone()).unwrap();
        state.insert(fqn.as_str(), zeros);
    }
    dcp::load(&mut state, &legacy).blocking().unwrap();
    assert_eq!((state.len(), loaded.len()), (8, 8));
    for (fqn, tensor) in loaded {
        let bytes = tensor.to_vec().unwrap();
        assert!(bytes.iter().any(|byte| *byte != 0), "{fqn}");
        assert_eq!(state.get(&fqn).unwrap().as_tensor().unwrap().to_vec(), Some(bytes), "{fqn}");
    }
}

#[test]
fn a_state_of_chosen_keys_is_nested_as_it_was_saved() {
    let state = dcp::block_on(async {
        let checkpoint = dcp::open(&url("pytorch/fsdp2_adam_2r")).await?;
        checkpoint.load().keys(Keys::all().include("model.*").exclude("*.bias")).run().await
    });
    let state = state.unwrap().unwrap();
    assert_eq!(state.len(), 1, "{state:?}");
    assert!(state.at("model.embed.weight").unwrap().as_tensor().is_some());
    let objects = everything(&url("pytorch/objects"));
    assert!(!objects.is_empty());
}

#[test]
fn what_is_no_checkpoint_fails_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes.txt"), b"no checkpoint").unwrap();
    let mut state = StateDict::new();
    let error = dcp::load(&mut state, folder.path().display().to_string()).blocking().unwrap_err();
    assert!(matches!(error, CheckpointError::NotACheckpoint { .. }), "{error:?}");
    let file = folder.path().join("notes.txt").display().to_string();
    let error = dcp::load(&mut state, file).blocking().unwrap_err();
    assert!(matches!(error, CheckpointError::NotACheckpoint { .. }), "{error:?}");
    let missing = folder.path().join("missing").display().to_string();
    let error = dcp::load(&mut state, missing).blocking().unwrap_err();
    let kind = dcp::core::error::FailureKind::Storage(dcp::core::StorageErrorKind::NotFound);
    assert_eq!(error.kind(), kind, "{error:?}");
}
