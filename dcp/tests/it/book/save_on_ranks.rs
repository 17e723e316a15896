//! A save of several ranks.

use std::error::Error;
use std::sync::Arc;

use dcp::{Checkpointer, Collective, DType, Region, Shard, StateDict, Tensor};

/// The rows of each rank of a weight of 1024 × 64.
pub fn save(group: Arc<dyn Collective>, url: &str) -> Result<(), Box<dyn Error>> {
    let (rank, ranks) = (u64::from(group.rank()), u64::from(group.world_size()));
    let rows = Region::of_ranges([1024 * rank / ranks..1024 * (rank + 1) / ranks, 0..64])?;
    let weights = vec![rank as f32; (1024 * 64 / ranks) as usize];
    let shard = Shard::from_vec(weights, rows)?;

    let mut state = StateDict::new();
    state.insert("step", 1000);
    state.insert("weight", Tensor::sharded(DType::Float32, [1024, 64], vec![shard])?);
    Checkpointer::in_group(group).save(&state, url).blocking()?;
    Ok(())
}
