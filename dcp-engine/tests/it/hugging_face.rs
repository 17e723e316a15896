//! Shards of ranks in files of Hugging Face.

use std::sync::Arc;

use dcp_core::error::StorageErrorKind;
use dcp_core::{CheckpointError, DType, Region, StateDict, Storage, StorageWriter, Tensor, Value};
use dcp_engine::{Loader, Saver, Settings};
use dcp_formats::hf::{HfLayout, HfRankWriter, HfReader, IndexFile};
use dcp_testing::{get, names};
use proptest::prelude::*;

use crate::harness::{block_on, elements, memory, on_ranks};

const SHAPES: [&[u64]; 6] = [&[7, 3], &[2, 5, 4], &[1], &[4, 6], &[], &[3]];

/// Rows of the first, columns of the second, a shard of some ranks, replicas of the others.
fn regions(tensor: usize, rank: u32, world: u32) -> Option<Region> {
    let shape = SHAPES[tensor];
    let axis = [Some(0), Some(2), Some(0), Some(1), None, None][tensor]?;
    let (rank, world) = (u64::from(rank), u64::from(world));
    let each = shape[axis].div_ceil(world);
    let start = (each * rank).min(shape[axis]);
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    offsets[axis] = start;
    sizes[axis] = (each * (rank + 1)).min(shape[axis]) - start;
    Some(Region::new(offsets, sizes).unwrap())
}

fn state(rank: u32, world: u32) -> StateDict {
    let tensors = SHAPES.iter().enumerate().map(|(number, shape)| {
        let whole = Region::full(*shape).unwrap();
        let tensor = match regions(number, rank, world) {
            Some(region) => {
                let bytes = elements(shape, &region, 100 * number as i32);
                let shard = dcp_core::Shard::new(DType::Int32, region, bytes).unwrap();
                Tensor::sharded(DType::Int32, *shape, vec![shard])
            }
            None => {
                let bytes = elements(shape, &whole, 100 * number as i32);
                Tensor::replicated(DType::Int32, *shape, bytes)
            }
        };
        (format!("t{number}"), tensor.unwrap())
    });
    tensors.collect()
}

fn blank() -> StateDict {
    let tensors = SHAPES.iter().enumerate();
    tensors
        .map(|(n, shape)| (format!("t{n}"), Tensor::zeros(DType::Int32, *shape).unwrap()))
        .collect()
}

type Build = fn(Arc<dyn Storage>) -> HfRankWriter;

fn save(world: u32, storage: &Arc<dyn Storage>, build: Build) -> Vec<Result<(), CheckpointError>> {
    on_ranks(world, |rank, group| {
        let writer = build(Arc::clone(storage));
        block_on(Saver::with_settings(Settings::in_group(group)).save(&state(rank, world), &writer))
            .map(drop)
    })
}

fn assert_holds_state(storage: &Arc<dyn Storage>) {
    let mut loaded = blank();
    let reader = HfReader::new(Arc::clone(storage));
    block_on(Loader::new().load(&mut loaded, &reader)).unwrap();
    assert!(Value::from(loaded.clone()).same(&state(0, 1).into()) || same_elements(&loaded));
}

/// Shards aside, of which one rank has one.
fn same_elements(loaded: &StateDict) -> bool {
    state(0, 1).iter().all(|(key, value)| {
        let bytes = |value: &Value| value.as_tensor().unwrap().to_vec();
        loaded.get_value(key).is_some_and(|found| bytes(found) == bytes(value))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn ranks_save_shards_that_make_whole_tensors(world in 1_u32..6, many in 1_u64..120, consolidate: bool) {
        let storage = memory();
        let writes = on_ranks(world, |rank, group| {
            let layout = HfLayout::MaxFileBytes(many);
            let writer = HfRankWriter::builder(Arc::clone(&storage)).layout(layout);
            let writer = writer.consolidate(consolidate).files_at_once(2).build();
            block_on(Saver::with_settings(Settings::in_group(group)).save(&state(rank, world), &writer)).map(drop)
        });
        writes.into_iter().for_each(|write| write.unwrap());
        assert_holds_state(&storage);
        let files = names(&*storage);
        let sharded = files.iter().filter(|name| name.contains("shard-")).count();
        prop_assert!(sharded >= 1);
        prop_assert_eq!(consolidate, files.iter().any(|name| !name.contains("shard-")));
    }
}

#[test]
fn files_are_named_and_numbered_as_by_pytorch() {
    let storage = memory();
    let written = save(2, &storage, |storage| {
        let numbers = (0..6).map(|n| (Arc::from(format!("t{n}")), 1 + n % 2)).collect();
        let layout = HfLayout::Mapping(numbers);
        HfRankWriter::builder(storage).layout(layout).consolidate(true).build()
    });
    written.into_iter().for_each(|one| one.unwrap());
    let found = names(&*storage);
    for name in [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "sharded/shard-00001-model-00001-of-00002.safetensors",
        "sharded/shard-00002-model-00002-of-00002.safetensors",
    ] {
        assert!(found.iter().any(|found| found == name), "{name} of {found:?}");
    }
    let index = get(&*storage, "model.safetensors.index.json");
    let index = IndexFile::parse(&index).unwrap();
    assert_eq!(index.weight_map.len(), 6);
}

#[test]
fn a_folder_has_one_save_of_tensors() {
    let plain: Build = |storage| HfRankWriter::builder(storage).build();
    let storage = memory();
    save(2, &storage, plain).into_iter().for_each(|one| one.unwrap());
    let before = names(&*storage);
    for again in save(2, &storage, plain) {
        let again = again.unwrap_err();
        let kind = dcp_core::error::FailureKind::Storage(StorageErrorKind::AlreadyExists);
        assert_eq!(again.kind(), kind, "{again}");
    }
    assert_eq!(names(&*storage), before);

    let writer = plain(memory());
    let refused = writer.encode_object("step", &Value::from(3)).unwrap_err().to_string();
    assert!(refused.contains("\"step\"") && refused.contains("tensors only"), "{refused}");
    // Two shards of a tensor on one rank would have one name.
    let halves = [(0, 1), (1, 1)].map(|(at, len)| Region::new([at], [len]).unwrap());
    let tensor = Tensor::zeros_sharded(DType::Int32, [2], halves).unwrap();
    let state = StateDict::from([("twice", tensor)]);
    let storage = memory();
    let writer = plain(Arc::clone(&storage));
    let refused = block_on(Saver::new().save(&state, &writer)).unwrap_err().to_string();
    assert!(refused.contains("\"twice\"") && refused.contains("rank 0"), "{refused}");
    assert!(names(&*storage).is_empty());
}
