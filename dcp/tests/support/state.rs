//! A state whose every byte shows its save.

use dcp::{DType, Region, StateDict, Tensor, Value};

/// Rows of the sharded tensor, in elements.
const SHAPE: [u64; 2] = [24, 4096];

/// The state of save number `step`, as `rank` of `world` holds it.
pub(crate) fn state(step: u8, rank: u32, world: u32) -> StateDict {
    let state = blank(rank, world);
    for (_, value) in state.iter() {
        if let Value::Tensor(tensor) = value {
            for shard in tensor.shards() {
                shard
                    .view()
                    .unwrap()
                    .fill_from(&vec![step; shard.view().unwrap().byte_len() as usize])
                    .unwrap();
            }
        }
    }
    let mut state = state;
    state.insert("step", i64::from(step));
    state
}

/// The same, empty.
pub(crate) fn blank(rank: u32, world: u32) -> StateDict {
    let rows = SHAPE[0] / u64::from(world);
    let region = Region::new([rows * u64::from(rank), 0], [rows, SHAPE[1]]).unwrap();
    let mut state = StateDict::new();
    state.insert("sharded", Tensor::zeros_sharded(DType::Int32, SHAPE, [region]).unwrap());
    state.insert("replicated", Tensor::zeros(DType::UInt8, [70_000]).unwrap());
    state.insert("step", 0);
    state
}

/// Which save a loaded state is from; panics when it is from more than one.
pub(crate) fn step_of(state: &StateDict) -> u8 {
    let step = u8::try_from(state.get("step").unwrap().as_int().unwrap()).unwrap();
    for name in ["sharded", "replicated"] {
        let tensor = state.get(name).unwrap().as_tensor().unwrap();
        for shard in tensor.shards() {
            let bytes = shard.view().unwrap().payload().unwrap().to_bytes();
            assert!(bytes.iter().all(|byte| *byte == step), "{name} is from another save");
        }
    }
    step
}

/// Loads on this process alone.
pub(crate) fn load(url: &str) -> Result<u8, dcp::CheckpointError> {
    let mut state = blank(0, 1);
    dcp::load(&mut state, url).blocking()?;
    Ok(step_of(&state))
}
