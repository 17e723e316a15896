//! What is in a checkpoint, under the names of Megatron-Core's functions.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{Storage, Value};
use dcp_megatron::contents::{
    ShardedEntry, check_is_distributed_checkpoint, load_common_state_dict, load_content_metadata,
    load_plain_tensors, load_sharded_metadata, load_tensors_metadata,
};
use dcp_megatron::disk::COMMON_OBJECT;

use crate::expected;
use crate::support::{block_on, expected_json, expected_tensors, stored};

#[test]
fn tensors_are_listed_in_their_logical_shape() {
    for name in ["v015_flattened", "v09_flattened_torch24", "v09_zarr", "tp2_basic"] {
        let listed = block_on(load_tensors_metadata(&stored(name))).unwrap();
        let expected = expected_tensors(name);
        assert_eq!(listed.len(), expected.len(), "{name}");
        for (key, tensor) in listed {
            assert_eq!(**tensor.global_shape(), *expected[&*key].0, "{name}: {key}");
            assert_eq!(tensor.local_shape(), tensor.global_shape());
            assert!(tensor.data().is_none());
        }
    }
}

#[test]
fn objects_are_listed_by_their_unique_keys() {
    let listed = block_on(load_sharded_metadata(&stored("head020_basic_integrity"))).unwrap();
    let json = expected_json("head020_basic_integrity");
    let objects = listed.iter().filter(|(_, d)| matches!(d, ShardedEntry::Object(_)));
    let mut objects: Vec<_> = objects.map(|(key, _)| key.to_string()).collect();
    objects.sort();
    let expected: Vec<_> = json["objects"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(objects, expected);
    assert!(objects.iter().any(|key| key == COMMON_OBJECT));
    let older = block_on(load_sharded_metadata(&stored("tp2_basic"))).unwrap();
    assert!(!older.contains_key(COMMON_OBJECT));
}

#[test]
fn the_common_state_and_what_it_says_of_the_content() {
    for name in ["tp2_basic", "head020_basic_integrity", "v06_zarr"] {
        let storage = stored(name);
        let common = block_on(load_common_state_dict(&storage)).unwrap();
        expected::dict(&common, &expected_json(name)["common"], name);
        let content = block_on(load_content_metadata(&storage)).unwrap();
        assert_eq!(content.is_some(), common.get("content_metadata").is_some(), "{name}");
    }
}

#[test]
fn plain_tensors_are_whole_beside_the_common_state() {
    let all = block_on(load_plain_tensors(&stored("v015_flattened"))).unwrap();
    for (key, (shape, bytes)) in expected_tensors("v015_flattened") {
        let tensor = all.get(&key).and_then(Value::as_tensor).unwrap();
        assert_eq!((&**tensor.shape(), tensor.to_vec().unwrap()), (&*shape, bytes), "{key}");
    }
    assert!(all.get("iteration").is_some());
}

#[test]
fn only_metadata_json_makes_a_checkpoint() {
    let check = |storage: &Arc<dyn Storage>| block_on(check_is_distributed_checkpoint(storage));
    assert!(check(&stored("tp2_basic")).unwrap());
    assert!(check(&stored("v06_zarr")).unwrap());
    assert!(!check(&stored("run_torch_dcp")).unwrap());
    let empty: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    assert!(!check(&empty).unwrap());
    crate::support::put(&*empty, "metadata.json", b"{".to_vec());
    assert!(check(&empty).is_err());
}
