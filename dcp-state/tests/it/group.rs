//! Whole tensors and broadcasts over groups of ranks.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Collective, DType, Region, Shard, StateDict, Tensor, Value};
use dcp_planner::mesh::{DeviceMesh, TensorPlacement, local_regions};
use dcp_state::{
    ModelEntry, Optimizer, ParamId, StateDictOptions, get_model_state_dict, get_state_dict,
    set_model_state_dict, set_state_dict,
};
use dcp_testing::{FakeDevice, Traffic, on_ranks};
use proptest::prelude::*;

use crate::toy::{ToyAdam, ToyModel, counting, now};

/// The shards of a rank of a tensor whose elements count up.
fn sharded(whole: &Tensor, rank: u32, world: u32, axis: usize) -> Tensor {
    let mesh = DeviceMesh::new([u64::from(world)]).unwrap();
    let placed = [TensorPlacement::Shard(axis)];
    let regions = local_regions(whole.shape(), &mesh, &[rank.into()], &placed).unwrap();
    let view = whole.shards()[0].view().unwrap();
    let shard = |region: Region| {
        let bytes = view.narrow(&region).unwrap().payload().unwrap().to_bytes().to_vec();
        Shard::new(whole.dtype(), region, bytes).unwrap()
    };
    let shards = regions.into_iter().map(shard).collect();
    Tensor::sharded(whole.dtype(), whole.shape().clone(), shards).unwrap()
}

fn shapes() -> [Vec<u64>; 5] {
    [vec![7, 3], vec![1], vec![2, 5, 3], vec![0, 4], vec![4000, 3]]
}

/// A model whose parameters are sharded and one of them replicated, on a device where `device`.
fn model(rank: u32, world: u32, start: u64, device: Option<&Arc<Traffic>>) -> ToyModel {
    let parameters = shapes().into_iter().zip(0..).map(|(shape, id)| {
        let whole = counting(&shape, start + id);
        let mut tensor = sharded(&whole, rank, world, shape.len() - 1);
        if let (Some(traffic), 2) = (device, id) {
            let shard = |shard: &Shard| {
                let bytes = shard.view().unwrap().payload().unwrap().to_bytes().to_vec();
                let memory = FakeDevice::new(bytes, traffic);
                Shard::on_device(DType::Float32, shard.region().clone(), memory).unwrap()
            };
            let shards = tensor.shards().iter().map(shard).collect();
            tensor = Tensor::sharded(DType::Float32, whole.shape().clone(), shards).unwrap();
        }
        ModelEntry::parameter(format!("p{id}"), ParamId(id), tensor)
    });
    let mut entries: Vec<_> = parameters.collect();
    entries.push(ModelEntry::buffer("count", counting(&[2000], start)));
    entries.push(ModelEntry::extra_state("_extra_state", start as i64));
    ToyModel { entries, ..ToyModel::default() }
}

fn options(group: Arc<dyn Collective>) -> StateDictOptions {
    StateDictOptions::new().full_state_dict(true).group(group)
}

fn assert_whole(state: &StateDict, start: u64) {
    for (shape, id) in shapes().into_iter().zip(0..) {
        let value = state.get(&format!("p{id}")).unwrap();
        assert!(value.same(&counting(&shape, start + id).into()), "p{id}");
    }
}

#[test]
fn every_rank_gets_whole_tensors() {
    let traffic = Arc::new(Traffic::default());
    on_ranks(3, |rank, group| {
        let model = model(rank, 3, 5, Some(&traffic));
        let whole = now(get_model_state_dict(&model, &options(Arc::clone(&group)))).unwrap();
        assert_whole(&whole, 5);
        assert!(!whole.get("p0").unwrap().as_tensor().unwrap().is_sharded());
        let offloaded = options(group).cpu_offload(true);
        let only_first = now(get_model_state_dict(&model, &offloaded)).unwrap();
        if rank == 0 {
            assert_whole(&only_first, 5);
        } else {
            assert!(only_first.is_empty());
        }
    });
}

#[test]
fn offload_leaves_nothing_on_devices() {
    let traffic = Arc::new(Traffic::default());
    let model = model(1, 2, 5, Some(&traffic));
    let options = StateDictOptions::new().cpu_offload(true);
    let state = now(get_model_state_dict(&model, &options)).unwrap();
    let host = state.get("p2").unwrap();
    assert!(host.same(&sharded(&counting(&[2, 5, 3], 7), 1, 2, 2).into()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn rank_0_s_state_reaches_the_shards_of_all(world in 1_u32..5, on_device: bool) {
        let traffic = Arc::new(Traffic::default());
        let device = on_device.then_some(&traffic);
        let full = on_ranks(world, |rank, group| {
            let model = model(rank, world, 1000, None);
            let mut adam = ToyAdam::of(&model);
            adam.groups[0].options.insert("lr", 0.125);
            let options = options(group).cpu_offload(true);
            now(get_state_dict(&model, &mut [&mut adam], &options)).unwrap()
        });
        on_ranks(world, |rank, group| {
            let mut target = model(rank, world, 0, device);
            let mut adam = ToyAdam::of(&target);
            let (model_state, optimizer_state) = full[rank as usize].clone();
            let options = options(Arc::clone(&group)).broadcast_from_rank0(true);
            let optimizers: &mut [&mut (dyn Optimizer + Send)] = &mut [&mut adam];
            let set = set_state_dict(&mut target, optimizers, model_state, optimizer_state, &options);
            prop_assert!(now(set).unwrap().is_empty());
            prop_assert!(adam.groups[0].options.get("lr").unwrap().same(&0.125.into()));
            prop_assert_eq!(adam.state.len(), 5);
            target.entries.pop();
            let state = now(get_model_state_dict(&target, &self::options(group))).unwrap();
            assert_whole(&state, 1000);
            prop_assert!(state.get("count").unwrap().same(&counting(&[2000], 1000).into()));
            Ok(())
        }).into_iter().collect::<Result<Vec<()>, TestCaseError>>()?;
    }
}

#[test]
fn each_rank_takes_its_shards_of_a_whole_state() {
    on_ranks(2, |rank, group| {
        let whole = now(get_model_state_dict(&model(0, 1, 9, None), &StateDictOptions::new()));
        let mut target = model(rank, 2, 0, None);
        now(set_model_state_dict(&mut target, whole.unwrap(), &StateDictOptions::new())).unwrap();
        let state = now(get_model_state_dict(&target, &options(group))).unwrap();
        assert_whole(&state, 9);
    });
}

#[test]
fn the_failure_of_one_rank_is_that_of_all() {
    // One rank has another key.
    let errors = on_ranks(3, |rank, group| {
        let mut model = model(rank, 3, 0, None);
        if rank == 2 {
            model.entries[1].name = "other".to_owned();
        }
        now(get_model_state_dict(&model, &options(group))).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 2 gathers \"other\""), "{error}");
    }
    // Rank 0 lacks a key, a tensor has another shape, a device fails, a rank has no names.
    for case in 0..4 {
        let traffic = Arc::new(Traffic::default());
        let errors = on_ranks(3, |rank, group| {
            let mut target = model(rank, 3, 0, (rank == 1).then_some(&traffic));
            let mut state = StateDict::new();
            if rank == 0 {
                let whole = model(0, 1, 9, None);
                state = now(get_model_state_dict(&whole, &StateDictOptions::new())).unwrap();
            }
            match (case, rank) {
                (0, 0) => drop(state.remove("p1")),
                (1, 2) => target.entries[0].value = counting(&[2, 2], 0).into(),
                (2, 1) => traffic.fail(),
                (3, 1) => target.entries[1].name = "p0".to_owned(),
                _ => {}
            }
            let options = options(group).broadcast_from_rank0(true);
            now(set_model_state_dict(&mut target, state, &options)).unwrap_err()
        });
        for error in errors {
            let expected = ["\"p1\"", "\"p0\"", "fell off the bus", "same FQN"][case];
            assert!(matches!(error, CheckpointError::Ranks { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{case}: {error}");
        }
    }
}

#[test]
fn values_that_ranks_share_travel_with_the_keys() {
    on_ranks(2, |rank, group| {
        let mut target = ToyModel {
            entries: vec![ModelEntry::extra_state("_extra_state", 0)],
            ..ToyModel::default()
        };
        let extra = Dict::from([("seed", Value::from(3)), ("name", "x".into())]);
        let state = StateDict::from([("_extra_state", vec![Value::from(extra)])]);
        let state = if rank == 0 { state } else { StateDict::new() };
        let options = options(group).broadcast_from_rank0(true).strict(false);
        now(set_model_state_dict(&mut target, state, &options)).unwrap();
    });
}
