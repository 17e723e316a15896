//! One rank reads for all: any plans, any group, and any of them failing.

use std::sync::Arc;

use dcp_conformance::{CollectiveFault, FaultCollective};
use dcp_core::{CheckpointError, Collective, DType, Region, StateDict, StorageReader, Tensor};
use dcp_engine::{BroadcastReader, Loader, Saver, Settings};
use dcp_formats::dcp::DcpWriter;
use proptest::prelude::*;

use crate::harness::{
    blank, block_on, counting, counting_whole, memory, on_boxed_ranks, on_ranks, on_tcp_ranks,
    rows, same, sample, save_sample,
};
use crate::readers::{Failing, Probe, reader};

/// Loads `state`, of which only rank `reading` can read the storage.
fn load(
    group: Arc<dyn Collective>,
    state: &mut StateDict,
    inner: Option<Arc<dyn StorageReader>>,
    reading: u32,
) -> Result<(), CheckpointError> {
    let reader = BroadcastReader::new(inner, Arc::clone(&group), reading);
    block_on(Loader::with_settings(Settings::in_group(group)).load(state, &reader)).map(|_| ())
}

#[test]
fn one_rank_reads_and_every_rank_gets_its_own_shards() {
    for (saved_on, reading) in [(1, 0), (3, 2)] {
        let storage = memory();
        save_sample(saved_on, &storage, 7);
        let results = on_ranks(4, |rank, group| {
            let mut state = blank(rank, 4);
            let inner = (rank == reading).then(|| reader(&storage));
            load(group, &mut state, inner, reading).map(|()| same(&state, &sample(rank, 4, 7)))
        });
        assert!(results.into_iter().all(|result| result.unwrap()));
    }
}

#[test]
fn ranks_may_want_different_things_or_nothing() {
    let storage = memory();
    save_sample(2, &storage, 1);
    let probe = Arc::new(Probe::new(reader(&storage)));
    let results = on_ranks(3, |rank, group| {
        let mut state = StateDict::new();
        let mut model = StateDict::new();
        match rank {
            0 => {}
            1 => {
                let all = Region::full([7, 3]).unwrap();
                let zeros = Tensor::zeros_sharded(DType::Int32, [7, 3], [all]).unwrap();
                model.insert("weight", zeros);
                state.insert("model", model);
            }
            _ => {
                let part = Region::new([2, 1], [3, 2]).unwrap();
                let zeros = Tensor::zeros_sharded(DType::Int32, [7, 3], [part]).unwrap();
                model.insert("weight", zeros);
                state.insert("model", model);
                state.insert("note", "");
            }
        }
        let inner = (rank == 0).then(|| Arc::clone(&probe) as _);
        load(group, &mut state, inner, 0).map(|()| state)
    });
    let states: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert!(states[0].is_empty());
    let weight = |state: &StateDict| {
        let model = state.get("model").unwrap().as_dict().unwrap();
        model.get("weight").unwrap().as_tensor().unwrap().clone()
    };
    assert!(weight(&states[1]).same(&counting(&[7, 3], &[Region::full([7, 3]).unwrap()], 1)));
    let part = Region::new([2, 1], [3, 2]).unwrap();
    assert!(weight(&states[2]).same(&counting(&[7, 3], &[part], 1)));
    assert_eq!(states[2].get("note").unwrap().as_str(), Some("same everywhere"));
    assert_eq!(probe.bytes(), 4 * 21, "each element is read once for all ranks");
}

/// More than a message holds, in one tensor.
#[test]
fn large_tensors_come_in_segments() {
    let shape = [1500, 1001];
    let storage = memory();
    let mut state = StateDict::new();
    state.insert("w", counting_whole(&shape, 5));
    let writer = DcpWriter::new(Arc::clone(&storage));
    block_on(Saver::new().save(&state, &writer)).unwrap();
    let results = on_ranks(3, |rank, group| {
        let mine = rows(&shape, rank, 3);
        let zeros = Tensor::zeros_sharded(DType::Int32, shape, [mine.clone()]).unwrap();
        let mut state = StateDict::new();
        state.insert("w", zeros);
        load(group, &mut state, (rank == 1).then(|| reader(&storage)), 1)?;
        let expected = counting(&shape, &[mine], 5);
        Ok::<_, CheckpointError>(state.get("w").unwrap().as_tensor().unwrap().same(&expected))
    });
    assert!(results.into_iter().all(|result| result.unwrap()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_boxes_of_any_ranks_arrive(
        boxes in prop::collection::vec((0_u64..9, 0_u64..7, 0_u64..10, 0_u64..8), 1..5),
        saved_on in 1_u32..4,
    ) {
        let (shape, storage) = ([9, 7], memory());
        let saved = on_ranks(saved_on, |rank, group| {
            let mut state = StateDict::new();
            state.insert("w", counting(&shape, &[rows(&shape, rank, saved_on)], 3));
            let writer = DcpWriter::new(Arc::clone(&storage));
            block_on(Saver::with_settings(Settings::in_group(group)).save(&state, &writer)).map(|_| ())
        });
        prop_assert!(saved.into_iter().all(|result| result.is_ok()));
        let regions: Vec<_> = boxes
            .iter()
            .map(|(x, y, a, b)| Region::new([*x, *y], [*a.min(&(9 - x)), *b.min(&(7 - y))]).unwrap())
            .collect();
        let results = on_ranks(u32::try_from(regions.len()).unwrap(), |rank, group| {
            let mine = regions[rank as usize].clone();
            let zeros = Tensor::zeros_sharded(DType::Int32, shape, [mine.clone()]).unwrap();
            let mut state = StateDict::new();
            state.insert("w", zeros);
            load(group, &mut state, (rank == 0).then(|| reader(&storage)), 0)?;
            let expected = counting(&shape, &[mine], 3);
            Ok::<_, CheckpointError>(state.get("w").unwrap().as_tensor().unwrap().same(&expected))
        });
        for result in results {
            prop_assert!(result.unwrap());
        }
    }
}

#[test]
fn when_reading_fails_every_rank_has_the_same_error() {
    let storage = memory();
    save_sample(1, &storage, 1);
    for metadata in [true, false] {
        let results = on_ranks(3, |rank, group| {
            let inner = reader(&storage);
            let failing = Failing { inner, metadata };
            let inner = (rank == 1).then(|| Arc::new(failing) as _);
            load(group, &mut blank(rank, 3), inner, 1)
        });
        let errors: Vec<_> = results.into_iter().map(|r| r.unwrap_err().to_string()).collect();
        let expected = "failed on rank 1: the disk is on fire";
        assert!(errors.iter().all(|error| error.ends_with(expected)), "{errors:?}");
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
    // Nobody can read at all.
    let results = on_ranks(2, |rank, group| load(group, &mut blank(rank, 2), None, 0));
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("no reader"), "{error}");
    }
}

/// Memory that is lent elsewhere cannot be filled; the other ranks get the error, and wait for
/// nothing.
#[test]
fn a_rank_that_cannot_take_its_part_fails_all() {
    let storage = memory();
    save_sample(1, &storage, 1);
    let results = on_ranks(3, |rank, group| {
        let mut state = blank(rank, 3);
        let model = state.get("model").unwrap().as_dict().unwrap().clone();
        let bias = model.get("bias").unwrap().as_tensor().unwrap().clone();
        let lent = (rank == 2).then(|| bias.shards()[0].view().unwrap().memory().read().unwrap());
        let result = load(group, &mut state, (rank == 0).then(|| reader(&storage)), 0);
        drop(lent);
        result
    });
    for result in results {
        let error = result.unwrap_err();
        let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
        assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [2]);
    }
}

/// A rank that dies at any of its operations ends the load of all others.
#[test]
fn nobody_waits_for_a_dead_rank() {
    let storage = memory();
    save_sample(1, &storage, 1);
    for dying in [0, 2] {
        for operation in 1..7 {
            let results = on_boxed_ranks(3, |rank, group| {
                let group: Arc<dyn Collective> = if rank == dying {
                    Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die))
                } else {
                    group.into()
                };
                let inner = (rank == 0).then(|| reader(&storage));
                load(group, &mut blank(rank, 3), inner, 0)
            });
            assert!(results.iter().all(Result::is_err), "rank {dying} at {operation}");
            for error in results.iter().filter_map(|result| result.as_ref().err()) {
                let text = dcp_core::error::error_chain(error);
                assert!(!text.contains("did not answer"), "a rank waited for its deadline: {text}");
            }
        }
    }
}

#[test]
fn ranks_may_be_processes_apart() {
    let storage = memory();
    save_sample(2, &storage, 4);
    on_tcp_ranks(3, |rank, group| {
        let mut state = blank(rank, 3);
        load(group, &mut state, (rank == 2).then(|| reader(&storage)), 2).unwrap();
        assert!(same(&state, &sample(rank, 3, 4)));
    });
}
