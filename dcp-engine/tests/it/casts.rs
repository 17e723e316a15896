//! Saving in another dtype than the state has.

use std::sync::Arc;

use dcp_core::{DType, HostMemory, Region, Shard, StateDict, Tensor, Value};
use dcp_engine::{BackgroundSaver, Casts, Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_planner::KeyFilter;

use crate::harness::{block_on, memory, on_ranks};

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn halves(bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn vector(dtype: DType, bytes: Vec<u8>) -> Tensor {
    let len = (bytes.len() / dtype.size()) as u64;
    Tensor::replicated(dtype, [len], bytes).unwrap()
}

#[test]
fn a_save_casts_floats_and_tells_what_was_lost() {
    let storage = memory();
    let w = vector(DType::Float32, floats(&[1.0, 1e30, 1e-30, 0.1]));
    let state = StateDict::from([
        ("w", Value::Tensor(w.clone())),
        ("kept", Value::Tensor(w.clone())),
        ("ids", Value::Tensor(vector(DType::Int64, vec![7; 16]))),
        ("optim.w.step", Value::Tensor(vector(DType::Float32, floats(&[1e30])))),
        ("note", Value::from("text")),
    ]);
    let casts = Casts::to(DType::Float16).keep(KeyFilter::any_of(["kept"]));
    let saver = Saver::with_settings(Settings::new().cast(casts));
    let summary = block_on(saver.save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let cast = &summary.cast.tensors;
    assert_eq!(cast.keys().map(|fqn| &**fqn).collect::<Vec<_>>(), ["w"]);
    let lost = cast["w"].counts;
    assert_eq!((cast["w"].from, cast["w"].to), ("float32", "float16"));
    assert_eq!((lost.elements, lost.out_of_range, lost.underflowed), (4, 1, 1));
    assert_eq!(summary.cast_total, lost);

    let dtype =
        |fqn: &str| summary.metadata().unwrap().get(fqn).unwrap().as_tensor().unwrap().dtype;
    assert_eq!(dtype("w"), DType::Float16);
    assert_eq!([dtype("kept"), dtype("optim.w.step")], [DType::Float32; 2]);
    assert_eq!(dtype("ids"), DType::Int64);
    let mut loaded = StateDict::from([
        ("w", vector(DType::Float16, vec![0; 8])),
        ("kept", vector(DType::Float32, vec![0; 16])),
    ]);
    block_on(Loader::new().load(&mut loaded, &DcpReader::new(storage))).unwrap();
    let expected = vector(DType::Float16, halves(&[0x3c00, 0x7c00, 0, 0x2e66]));
    assert!(loaded.get("w").unwrap().same(&Value::Tensor(expected)));
    assert!(loaded.get("kept").unwrap().same(&Value::Tensor(w)));
    assert!(matches!(state.get("w"), Some(Value::Tensor(w)) if w.dtype() == DType::Float32));
}

#[test]
fn every_rank_casts_what_it_writes_and_all_hear_the_sum() {
    let storage = memory();
    let summaries = on_ranks(3, |rank, group| {
        let rows = Region::new([u64::from(rank) * 2, 0], [2, 3]).unwrap();
        let numbers = floats(&[rank as f32 + 1.0; 6]);
        let shard = Shard::new(DType::Float32, rows, HostMemory::from_vec(numbers)).unwrap();
        let w = Tensor::sharded(DType::Float32, [6, 3], vec![shard]).unwrap();
        let state = StateDict::from([("w", w)]);
        let saver =
            Saver::with_settings(Settings::in_group(group).cast(Casts::to(DType::BFloat16)));
        let saver = BackgroundSaver::new(saver);
        let writer = Arc::new(DcpWriter::new(Arc::clone(&storage)));
        block_on(async { saver.start(&state, writer)?.wait().await })
    });
    for summary in summaries {
        let summary = summary.unwrap();
        assert_eq!(summary.cast.total().elements, 6);
        assert_eq!(summary.cast_total.elements, 18);
    }
    let mut loaded =
        StateDict::from([("w", Tensor::replicated(DType::BFloat16, [6, 3], vec![0; 36]).unwrap())]);
    block_on(Loader::new().load(&mut loaded, &DcpReader::new(storage))).unwrap();
    let rows = [0x3f80, 0x4000, 0x4040].into_iter().flat_map(|bits| [bits; 6]);
    let expected = halves(&rows.collect::<Vec<_>>());
    let expected = Tensor::replicated(DType::BFloat16, [6, 3], expected).unwrap();
    assert!(loaded.get("w").unwrap().same(&Value::Tensor(expected)));
}

#[test]
fn a_dtype_of_no_plain_numbers_is_refused_by_name() {
    let state = StateDict::from([("w", vector(DType::Float32, vec![0; 16]))]);
    let storage = memory();
    for to in [DType::Int8, DType::QInt8, DType::Complex64] {
        let saver = Saver::with_settings(Settings::new().cast(Casts::to(to)));
        let refused = block_on(saver.save(&state, &DcpWriter::new(Arc::clone(&storage))));
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("\"w\""), "{error}");
    }
}
