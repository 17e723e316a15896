//! Descriptions of shards that no rank would send.

use dcp_core::DType;
use dcp_megatron::sharded::{
    LocalTensor, RankShards, ShardedObject, ShardedStateDict, ShardedTensor, sharded_leaves,
};
use proptest::prelude::*;

use crate::targets;

fn seed() -> Vec<u8> {
    let local = || LocalTensor::described(DType::BFloat16, [2, 3]);
    let mut state = ShardedStateDict::new();
    for at in 0..4 {
        let shard = ShardedTensor::from_rank_offsets("layers.weight", local());
        let shard = shard.prepended_axes(1).offset(0, at, 4).replica_id(at % 2).build();
        state.insert(format!("regular{at}"), shard.unwrap());
        let shard = ShardedTensor::builder("uneven", local(), [2, 12], [0, at * 3]).build();
        state.insert(format!("irregular{at}"), shard.unwrap());
        let object = ShardedObject::new("rng", 0, [4], [at]).unwrap();
        state.insert(format!("object{at}"), object);
    }
    let flat = ShardedTensor::from_rank_offsets("flat", LocalTensor::described(DType::Int8, [4]));
    state.insert("flat", flat.flattened_range(2..6, [2, 3]).build().unwrap());
    RankShards::of(sharded_leaves(&state)).to_wire().to_vec()
}

#[test]
fn the_seed_is_read() {
    assert!(RankShards::from_wire(&seed()).is_ok());
    targets::shards(&seed());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_changed_description_is_refused_or_checked(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        cuts in prop::bool::weighted(0.2),
    ) {
        let mut bytes = seed();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if cuts {
            bytes.truncate(cut.index(bytes.len()));
        }
        targets::shards(&bytes);
    }

    #[test]
    fn noise_is_refused_or_checked(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        targets::shards(&[b"msd1".as_slice(), &noise].concat());
    }
}
