//! A small sharded checkpoint whose elements follow from its step.

use std::sync::Arc;

use dcp_collectives::LocalGroup;
use dcp_core::{
    CheckpointError, Collective, DType, HostMemory, Region, Shard, StateDict, Storage, Tensor,
    Value,
};
use dcp_engine::{Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::place::block_on;

const SHAPE: [u64; 2] = [60, 40];

type Result<T = ()> = std::result::Result<T, CheckpointError>;

/// The rows of a rank.
fn rows(rank: u32, world: u32) -> Region {
    let count = SHAPE[0] / u64::from(world);
    Region::new([count * u64::from(rank), 0], [count, SHAPE[1]]).unwrap()
}

/// The elements of a region in a step.
fn elements(region: &Region, step: i64) -> Vec<u8> {
    let runs = region.runs_in(&SHAPE);
    let elements = runs.flat_map(|(at, len)| at..at + len);
    elements.flat_map(|at| (step * 1_000_003 + i64::try_from(at).unwrap()).to_le_bytes()).collect()
}

fn state(step: i64, rank: u32, world: u32) -> StateDict {
    let region = rows(rank, world);
    let memory = HostMemory::from_vec(elements(&region, step));
    let shard = Shard::new(DType::Int64, region, memory).unwrap();
    let weight = Tensor::sharded(DType::Int64, SHAPE, vec![shard]).unwrap();
    let full = Region::full(SHAPE).unwrap();
    let bias = Tensor::replicated(DType::Int64, SHAPE, elements(&full, step + 7)).unwrap();
    let mut state = StateDict::new();
    state.insert("weight", weight);
    state.insert("bias", bias);
    state.insert("step", step);
    state
}

fn blank(rank: u32, world: u32) -> StateDict {
    let mut state = StateDict::new();
    let weight = Tensor::zeros_sharded(DType::Int64, SHAPE, [rows(rank, world)]).unwrap();
    state.insert("weight", weight);
    state.insert("bias", Tensor::zeros(DType::Int64, SHAPE).unwrap());
    state.insert("step", 0);
    state
}

fn alone() -> Arc<dyn Collective> {
    Arc::new(LocalGroup::new(1).build().pop().unwrap())
}

pub(crate) fn save(
    group: Arc<dyn Collective>,
    storage: &Arc<dyn Storage>,
    step: i64,
    rank: u32,
) -> Result {
    let state = state(step, rank, group.world_size());
    let writer = DcpWriter::new(Arc::clone(storage));
    block_on(Saver::with_settings(Settings::in_group(group)).save(&state, &writer)).map(drop)
}

pub(crate) fn save_on_one(storage: &Arc<dyn Storage>, step: i64) -> Result {
    save(alone(), storage, step, 0)
}

/// Loads a checkpoint, and returns its step when every element is of that step.
pub(crate) fn load(
    group: Arc<dyn Collective>,
    storage: &Arc<dyn Storage>,
    rank: u32,
) -> Result<i64> {
    let world = group.world_size();
    let mut loaded = blank(rank, world);
    let reader = DcpReader::new(Arc::clone(storage));
    block_on(Loader::with_settings(Settings::in_group(group)).load(&mut loaded, &reader))?;
    let step = loaded.get("step").and_then(Value::as_int).unwrap();
    let expected = state(step, rank, world);
    let is_same = Value::Dict(loaded).same(&Value::Dict(expected));
    assert!(is_same, "rank {rank} got bytes of another step than {step}");
    Ok(step)
}

/// The step of the checkpoint, loaded by one rank.
pub(crate) fn loaded(storage: &Arc<dyn Storage>) -> Result<i64> {
    load(alone(), storage, 0)
}
