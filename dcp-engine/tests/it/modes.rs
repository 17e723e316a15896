//! What happens when checkpoint and state dict do not fit.

use std::sync::Arc;

use dcp_core::{CheckpointError, DType, StateDict, Storage, Tensor, Value};
use dcp_engine::{LoadMode, LoadSummary, Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::harness::{blank, block_on, counting_whole, load, memory, on_ranks, save_sample};

fn stored() -> Arc<dyn Storage> {
    let storage = memory();
    let mut state = StateDict::new();
    state.insert("a", counting_whole(&[4], 1));
    state.insert("b", counting_whole(&[2, 2], 2));
    state.insert("n", 3);
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    storage
}

fn load_as(mode: LoadMode, state: &mut StateDict) -> Result<LoadSummary, CheckpointError> {
    block_on(
        Loader::with_settings(Settings::new().load_mode(mode))
            .load(state, &DcpReader::new(stored())),
    )
}

fn zeros(dtype: DType, shape: &[u64]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

#[test]
fn a_subset_loads_strictly_and_tells_of_the_rest() {
    let mut state = StateDict::from([("a", zeros(DType::Int32, &[4]))]);
    let summary = load_as(LoadMode::Strict, &mut state).unwrap();
    assert_eq!(summary.report.unexpected, ["b".into(), "n".into()]);
    let error = load_as(LoadMode::Exact, &mut state).unwrap_err();
    assert!(error.to_string().contains("unexpected \"b\", \"n\""), "{error}");
}

/// T15: PyTorch 2.15 casts silently, keeps stale values where chunks are absent and replaces
/// tensors by objects.
#[test]
fn t15_every_difference_is_reported_and_nothing_is_touched() {
    let cases: [(&str, Value, &str); 4] = [
        ("a", zeros(DType::Float32, &[4]).into(), "dtype of \"a\" (stored int32, wanted float32)"),
        ("b", zeros(DType::Int32, &[4]).into(), "shape of \"b\" (stored [2, 2], wanted [4])"),
        ("n", zeros(DType::Int32, &[1]).into(), "kind of \"n\" (stored object, wanted tensor)"),
        ("c", Value::Int(0), "missing \"c\""),
    ];
    for (fqn, value, message) in cases {
        let good = zeros(DType::Int32, &[4]);
        let mut state = StateDict::new();
        state.insert("a", good.clone());
        state.insert(fqn, value);
        let error = load_as(LoadMode::Strict, &mut state).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(good.to_vec().unwrap(), [0; 16], "{fqn}");

        let summary = load_as(LoadMode::Partial, &mut state).unwrap();
        assert!(!summary.report.is_complete());
    }
}

#[test]
fn partial_loads_what_fits() {
    let mut state = StateDict::new();
    state.insert("a", zeros(DType::Int32, &[4]));
    state.insert("b", zeros(DType::Int32, &[3, 3]));
    state.insert("absent", 7);
    let summary = load_as(LoadMode::Partial, &mut state).unwrap();
    assert_eq!(summary.report.missing, ["absent".into()]);
    assert_eq!(summary.report.shapes.len(), 1);
    assert!(state.get("a").unwrap().as_tensor().unwrap().same(&counting_whole(&[4], 1)));
    assert!(matches!(state.get("absent"), Some(Value::Int(7))));
}

#[test]
fn missing_keys_are_allowed_without_other_shapes_and_dtypes() {
    let fitting = || StateDict::from([("a", Value::from(zeros(DType::Int32, &[4])))]);
    let mut state = fitting();
    state.insert("absent", 7);
    let summary = load_as(LoadMode::AllowMissing, &mut state).unwrap();
    assert_eq!(summary.report.missing, ["absent".into()]);
    assert!(state.get("a").unwrap().as_tensor().unwrap().same(&counting_whole(&[4], 1)));
    assert!(matches!(state.get("absent"), Some(Value::Int(7))));
    let others: [(&str, Value); 3] = [
        ("b", zeros(DType::Float32, &[2, 2]).into()),
        ("b", zeros(DType::Int32, &[4]).into()),
        ("n", zeros(DType::Int32, &[]).into()),
    ];
    for (fqn, value) in others {
        let mut state = fitting();
        state.insert("absent", 7);
        state.insert(fqn, value);
        let text = load_as(LoadMode::AllowMissing, &mut state).unwrap_err().to_string();
        assert!(text.contains(&format!("{fqn:?}")) && !text.contains("absent"), "{text}");
        assert_eq!(state.at("a").unwrap().as_tensor().unwrap().to_vec().unwrap(), [0; 16]);
    }
}

#[test]
fn a_mismatch_on_one_rank_stops_all_ranks_and_names_it() {
    let storage = memory();
    save_sample(2, &storage, 1);
    let results = on_ranks(3, |rank, group| {
        let mut state = blank(rank, 3);
        if rank == 1 {
            state.insert("extra", 0);
        }
        load(group, &mut state, &storage)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("missing \"extra\""), "{error}");
        assert!(!error.contains("rank 0"), "{error}");
    }
}

/// T22: in PyTorch 2.15, ranks that see the metadata late go another way and hang the others.
#[test]
fn t22_ranks_that_see_different_checkpoints_say_so() {
    let (old, new, none) = (memory(), memory(), memory());
    save_sample(1, &old, 1);
    let other = StateDict::from([("model", counting_whole(&[8], 0))]);
    block_on(Saver::new().save(&other, &DcpWriter::new(Arc::clone(&new)))).unwrap();

    let results = on_ranks(2, |rank, group| {
        let storage = if rank == 0 { &old } else { &none };
        load(group, &mut blank(rank, 2), storage)
    });
    assert!(results.iter().all(Result::is_err));

    let results = on_ranks(2, |rank, group| {
        let storage = if rank == 0 { &old } else { &new };
        load(group, &mut StateDict::new(), storage)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1: it sees another checkpoint"), "{error}");
    }
}

/// F16: an optimizer's `step` was a Python int in old PyTorch and is a 0-dim tensor now.
#[test]
fn f16_an_object_where_a_tensor_was_is_a_difference() {
    let storage = memory();
    let old = StateDict::from([("step", Value::Int(7))]);
    block_on(Saver::new().save(&old, &DcpWriter::new(Arc::clone(&storage)))).unwrap();

    let mut new = StateDict::from([("step", zeros(DType::Float32, &[]))]);
    let reader = DcpReader::new(Arc::clone(&storage));
    let error = block_on(Loader::new().load(&mut new, &reader)).unwrap_err();
    assert!(error.to_string().contains("\"step\" (stored object, wanted tensor)"), "{error}");

    let mut same = StateDict::from([("step", Value::Int(0))]);
    block_on(Loader::new().load(&mut same, &reader)).unwrap();
    assert!(matches!(same.get("step"), Some(Value::Int(7))));
}
