//! Every fixture is loaded by ranks in a layout that no rank ever had, by the rules of `load`.

use std::sync::Arc;

use dcp_core::{Region, Storage, Value};
use dcp_megatron::disk::COMMON_STATE;
use dcp_megatron::sharded::{
    LocalTensor, ObjectKey, ShardedObject, ShardedStateDict, ShardedTensor, ShardedValue, extract,
};
use dcp_megatron::{
    Loaded, MegatronCheckpoint, MegatronLoadOptions, MegatronOpenOptions, MegatronSaveOptions,
    StrictHandling, load, save,
};

use crate::fixtures::OPENED;
use crate::small_model::{memory, on_ranks};
use crate::support::{block_on, expected_tensors, stored};

const RANKS: u64 = 3;

/// What one of three ranks requests: uneven slabs along the longest axis of every tensor, and
/// every third object.
fn request(storage: &Arc<dyn Storage>, rank: u64) -> ShardedStateDict {
    let opened =
        block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default())).unwrap();
    let metadata = block_on(opened.source().metadata()).unwrap();
    let mut request = ShardedStateDict::new();
    for (number, (fqn, entry)) in (0_u64..).zip(metadata.iter()) {
        let Some(tensor) = entry.as_tensor() else {
            if let Some(at) = ObjectKey::parse(fqn)
                && &**fqn != COMMON_STATE
            {
                let object =
                    ShardedObject::request(at).with_replica_id(number.abs_diff(rank) % RANKS);
                request.insert(Arc::clone(fqn), object);
            }
            continue;
        };
        let whole = Region::full(tensor.shape.clone()).unwrap();
        let region = slab(&whole, rank);
        let local = LocalTensor::described(tensor.dtype, region.sizes().clone());
        let replica = if tensor.shape.ndim() == 0 { rank } else { 0 };
        let offsets = region.offsets().clone();
        let shard = ShardedTensor::builder(Arc::clone(fqn), local, tensor.shape.clone(), offsets);
        request.insert(Arc::clone(fqn), shard.replica_id(replica).build().unwrap());
    }
    request
}

fn slab(whole: &Region, rank: u64) -> Region {
    let (mut offsets, mut sizes) = (whole.offsets().clone(), whole.sizes().clone());
    let longest = (0..sizes.len()).max_by_key(|axis| sizes[*axis]);
    if let Some(axis) = longest {
        let ends = [0, sizes[axis] / 4, sizes[axis] / 4 * 3, sizes[axis]];
        let at = usize::try_from(rank).unwrap();
        (offsets[axis], sizes[axis]) = (ends[at], ends[at + 1] - ends[at]);
    }
    Region::new(offsets, sizes).unwrap()
}

fn check(name: &str, loaded: &Loaded, rank: u64) {
    let mut expected = expected_tensors(name);
    for (key, value) in loaded.state.iter() {
        let Value::Tensor(tensor) = value else { continue };
        let Some((shape, bytes)) = expected.remove(key.as_str().unwrap()) else { continue };
        let region = slab(&Region::full(shape.clone()).unwrap(), rank);
        let size = tensor.dtype().size();
        let part: Vec<u8> = region
            .runs_in(&shape)
            .flat_map(|(at, len)| {
                let at = usize::try_from(at).unwrap() * size;
                bytes[at..at + usize::try_from(len).unwrap() * size].to_vec()
            })
            .collect();
        assert_eq!(tensor.to_vec().unwrap(), part, "{name}, {key:?} on rank {rank}");
    }
    assert!(expected.is_empty(), "{name}: {:?} were not loaded", expected.keys());
}

#[test]
fn every_fixture_is_loaded_strictly_in_three_uneven_parts() {
    for (name, _) in OPENED {
        let storage = stored(name);
        on_ranks(u32::try_from(RANKS).unwrap(), |rank, group| {
            let request = request(&storage, rank);
            // One rank requests objects as the main replica, others request copies.
            let options = MegatronLoadOptions::new().group(group).strict(StrictHandling::RaiseAll);
            let loaded = block_on(load(&request, &storage, &options));
            check(name, &loaded.unwrap_or_else(|error| panic!("{name}: {error}")), rank);
        });
    }
}

/// From every age into today's form: what was loaded is saved again, and loaded again.
#[test]
fn every_fixture_is_saved_again_by_three_ranks() {
    for (name, _) in OPENED {
        let (storage, again) = (stored(name), memory());
        on_ranks(u32::try_from(RANKS).unwrap(), |rank, group| {
            let request = request(&storage, rank);
            let options = MegatronLoadOptions::new().group(Arc::clone(&group));
            let options = options.validate_access_integrity(false);
            let loaded = block_on(load(&request, &storage, &options)).unwrap();
            let filled: ShardedStateDict = request
                .iter()
                .filter_map(|(key, leaf)| {
                    let ShardedValue::Tensor(shard) = leaf else {
                        return None;
                    };
                    let loaded = loaded.state.get_value(key)?.as_tensor()?;
                    let data = loaded.shards()[0].view().unwrap().clone();
                    Some((key.clone(), shard.clone().with_data(data).unwrap()))
                })
                .collect();
            let saving = MegatronSaveOptions::new().group(Arc::clone(&group));
            block_on(save(&filled, &again, &saving)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let (tensors, _) = extract(request, |leaf| matches!(leaf, ShardedValue::Tensor(_)));
            let loaded = block_on(load(&tensors, &again, &MegatronLoadOptions::new().group(group)));
            check(name, &loaded.unwrap(), rank);
        });
    }
}
