//! What of the files in `mp_rank_*` folders is one rank's alone, and which of them are looked at.

use std::sync::Arc;

use dcp_conformance::{CountingStorage, MemoryStorage};
use dcp_core::value::Dict;
use dcp_core::{DType, Storage, Tensor, Value};
use dcp_jobs::JobOptions;

use crate::legacy::{RUN, RankFile, arguments, open, synthetic};
use crate::support::{block_on, stored};

/// An optimizer that is not distributed, as each rank has it.
fn optimizer(rank: u32) -> Value {
    let tensor = |shape: &[u64], byte: u8| {
        let volume: u64 = shape.iter().product();
        let bytes = vec![byte; volume as usize];
        Value::Tensor(Tensor::replicated(DType::UInt8, shape, bytes).unwrap())
    };
    let (state, master) = (tensor(&[3], rank as u8), tensor(&[2, 2], rank as u8));
    let of_parameter = Dict::from([("step", tensor(&[], 7)), ("exp_avg", state)]);
    let group = Dict::from([("lr", Value::Float(0.5))]);
    let mut states = Dict::new();
    states.insert(Value::Int(0), Value::Dict(of_parameter));
    let inner = Dict::from([
        ("state", Value::Dict(states)),
        ("param_groups", Value::List(vec![Value::Dict(group)])),
    ]);
    let scaler = Dict::from([("scale", tensor(&[1], 9))]);
    Value::Dict(Dict::from([
        ("optimizer", Value::Dict(inner)),
        ("grad_scaler", Value::Dict(scaler)),
        ("fp32_from_fp16_params", Value::List(vec![Value::List(vec![master])])),
    ]))
}

#[test]
fn state_of_one_ranks_optimizer_is_not_passed_off_as_that_of_all() {
    let storage = synthetic(|file, tp, pp, ep| {
        file.object("optimizer", optimizer(tp + 2 * pp + 4 * ep));
        file.object("num_floating_point_operations_so_far", Value::Int(i64::from(tp)));
        if tp == 1 {
            file.object("extra", Value::Int(1));
        }
    });
    let checkpoint = open(&storage).unwrap();
    let kept = checkpoint.common().get("optimizer").unwrap().as_dict().unwrap();
    let inner = kept.get("optimizer").unwrap().as_dict().unwrap();
    let groups = Value::List(vec![Value::Dict(Dict::from([("lr", Value::Float(0.5))]))]);
    assert!(inner.get("param_groups").unwrap().same(&groups));
    let has_parameters =
        inner.get("state").is_some_and(|state| !state.as_dict().unwrap().is_empty());
    assert!(!has_parameters, "{inner:?}");
    assert!(kept.get("grad_scaler").unwrap().as_dict().unwrap().get("scale").is_some());
    let text = format!("{:?}", kept.get("fp32_from_fp16_params"));
    assert!(!text.contains("Tensor("), "{text}");
    let said = checkpoint.warnings().join("; ");
    assert!(said.contains("optimizer's state in each"), "{said}");
    assert!(said.contains("alone: extra, num_floating"), "{said}");
}

#[test]
fn the_only_ranks_optimizer_is_kept() {
    let storage = Arc::new(MemoryStorage::new());
    let mut file = RankFile::default();
    file.object("args", arguments(1, 1, 1));
    file.object("optimizer", optimizer(3));
    file.tensor("model", "decoder.final_layernorm.weight", &[3], vec![1; 3]);
    file.write(&storage, "mp_rank_00");
    let checkpoint = open(&(storage as _)).unwrap();
    assert!(checkpoint.common().get("optimizer").unwrap().same(&optimizer(3)));
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
}

#[test]
fn a_report_of_what_is_put_together_names_no_file_that_never_was() {
    let checkpoint = open(&stored(RUN)).unwrap();
    let (job, limits) = (JobOptions::default(), dcp_jobs::report::ReportLimits::default());
    let report = dcp_jobs::report::report(checkpoint.source(), "run", &job, &limits);
    let report = block_on(report).unwrap();
    assert_eq!(report.totals.missing_files, 0, "{:?}", report.files);
}

#[test]
fn a_run_with_a_tracker_is_not_listed_as_a_whole() {
    let lists = |storage: Arc<dyn Storage>| {
        let counting = CountingStorage::new(storage);
        open(&(Arc::new(counting.clone()) as _)).unwrap();
        counting.counts().lists
    };
    // No more than the checkpoint's own folder.
    let of_checkpoint = lists(stored("run_torch_dist_dp2/iter_0000010"));
    assert_eq!(lists(stored("run_torch_dist_dp2")), of_checkpoint);
}
