//! Any saved layout loads into any requested one.

use std::sync::Arc;

use dcp_conformance::{CountingStorage, MemoryStorage};
use dcp_core::{DType, Region, StateDict, Storage, Tensor};
use dcp_engine::{Loader, Saver};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use proptest::prelude::*;

use crate::harness::{
    block_on, counting, counting_whole, elements, load, memory, on_ranks, rows, save,
};

/// The boxes of a tensor that each rank holds: cuts per axis make a grid, every box goes to some ranks.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    pub(crate) world: u32,
    boxes: Vec<(Region, Vec<u32>)>,
}

impl Grid {
    pub(crate) fn of(&self, rank: u32) -> Vec<Region> {
        let mine = self.boxes.iter().filter(|(_, owners)| owners.contains(&rank));
        mine.map(|(region, _)| region.clone()).collect()
    }
}

fn grid(shape: Vec<u64>) -> impl Strategy<Value = Grid> {
    let cuts = shape
        .iter()
        .map(|&size| {
            prop::collection::btree_set(0..=size, 0..=3).prop_map(move |mut cuts| {
                cuts.extend([0, size]);
                let cuts: Vec<u64> = cuts.into_iter().collect();
                if cuts.len() == 1 { vec![(0, 0)] } else { spans(&cuts) }
            })
        })
        .collect::<Vec<_>>();
    (1..=4_u32, cuts).prop_flat_map(|(world, axes)| {
        let boxes = axes.iter().fold(vec![(vec![], vec![])], |boxes, spans| {
            boxes
                .into_iter()
                .flat_map(|(offsets, sizes): (Vec<u64>, Vec<u64>)| {
                    spans.iter().map(move |(start, len)| {
                        let mut next = (offsets.clone(), sizes.clone());
                        next.0.push(*start);
                        next.1.push(*len);
                        next
                    })
                })
                .collect()
        });
        let owners = prop::collection::vec(0..world, 1..=2);
        prop::collection::vec(owners, boxes.len()).prop_map(move |owners| Grid {
            world,
            boxes: boxes
                .iter()
                .zip(owners)
                .map(|((offsets, sizes), owners)| {
                    (Region::new(offsets.clone(), sizes.clone()).unwrap(), owners)
                })
                .collect(),
        })
    })
}

fn spans(cuts: &[u64]) -> Vec<(u64, u64)> {
    cuts.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
}

pub(crate) fn case() -> impl Strategy<Value = (Vec<u64>, Grid, Grid)> {
    prop::collection::vec(0..=6_u64, 0..=3)
        .prop_flat_map(|shape| (Just(shape.clone()), grid(shape.clone()), grid(shape)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_layout_loads_into_every_other((shape, saved, wanted) in case()) {
        let storage = memory();
        for result in on_ranks(saved.world, |rank, group| {
            let mut state = StateDict::new();
            state.insert("t", counting(&shape, &saved.of(rank), 7));
            save(group, &state, &storage)
        }) {
            result.unwrap();
        }
        for (rank, result) in on_ranks(wanted.world, |rank, group| {
            let tensor =
                Tensor::zeros_sharded(DType::Int32, &shape[..], wanted.of(rank)).unwrap();
            let mut state = StateDict::from([("t", tensor)]);
            let summary = load(group, &mut state, &storage)?;
            Ok::<_, dcp_core::CheckpointError>((state, summary))
        })
        .into_iter()
        .enumerate()
        {
            let (state, summary) = result.unwrap();
            let tensor = state.get("t").unwrap().as_tensor().unwrap();
            let mut needed = 0;
            for shard in tensor.shards() {
                let bytes = shard.view().unwrap().payload().unwrap().to_bytes();
                prop_assert_eq!(&bytes[..], &elements(&shape, shard.region(), 7)[..]);
                needed += bytes.len() as u64;
            }
            prop_assert_eq!(summary.read.bytes_needed, needed, "rank {}", rank);
        }
    }
}

#[test]
fn replicated_becomes_sharded_and_back() {
    let shape = [9, 4];
    let storage = memory();
    for result in on_ranks(3, |_, group| {
        save(group, &StateDict::from([("t", counting_whole(&shape, 0))]), &storage)
    }) {
        result.unwrap();
    }
    let again = memory();
    for result in on_ranks(4, |rank, group| {
        let region = rows(&shape, rank, 4);
        let tensor = Tensor::zeros_sharded(DType::Int32, shape, [region]).unwrap();
        let mut state = StateDict::from([("t", tensor)]);
        load(Arc::clone(&group), &mut state, &storage)?;
        save(group, &state, &again)
    }) {
        result.unwrap();
    }
    let mut state = StateDict::from([("t", Tensor::zeros(DType::Int32, shape).unwrap())]);
    block_on(Loader::new().load(&mut state, &DcpReader::new(again))).unwrap();
    assert!(state.get("t").unwrap().as_tensor().unwrap().same(&counting_whole(&shape, 0)));
}

/// PyTorch 2.15 reads the whole chunk for every slice of it; here a slice costs its own bytes.
#[test]
fn a_slice_of_a_large_chunk_reads_only_the_slice() {
    let counting = Arc::new(CountingStorage::new(Arc::new(MemoryStorage::new())));
    let storage: Arc<dyn Storage> = Arc::clone(&counting) as _;
    let shape = [4096, 4096];
    let state = StateDict::from([("t", counting_whole(&shape, 0))]);
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();

    let region = rows(&shape, 63, 64);
    let needed = region.volume() * 4;
    let tensor = Tensor::zeros_sharded(DType::Int32, shape, [region.clone()]).unwrap();
    let mut state = StateDict::from([("t", tensor)]);
    counting.reset();
    let summary =
        block_on(Loader::new().load(&mut state, &DcpReader::new(Arc::clone(&storage)))).unwrap();
    let read = counting.counts().bytes_read;
    assert_eq!(summary.read.bytes_needed, needed);
    assert!(read < needed + needed / 50, "read {read} bytes for {needed}");
    let tensor = state.get("t").unwrap().as_tensor().unwrap();
    let bytes = tensor.shards()[0].view().unwrap().payload().unwrap().to_bytes();
    assert_eq!(bytes, elements(&shape, &region, 0));
}
