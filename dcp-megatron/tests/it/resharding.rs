//! Saved in one layout, loaded in another, bit for bit.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{Collective, DType, Region, Storage, Value};
use dcp_megatron::parallel::{ParallelReader, ReadSharing};
use dcp_megatron::sharded::{LocalTensor, ShardedStateDict, ShardedTensor};
use dcp_megatron::{
    Loaded, MegatronBackgroundSaver, MegatronError, MegatronForm, MegatronLoadOptions,
    MegatronSaveOptions, async_save, load, save,
};
use proptest::prelude::*;

use crate::ranks::on_mesh;
use crate::small_model::{
    Fill, Layout, elements, held, memory, model, on_ranks, rng, tensors, view,
};
use crate::support::{block_on, names};

fn save_model(
    storage: &Arc<dyn Storage>,
    tp: u64,
    pp: u64,
    dp: u64,
    options: &MegatronSaveOptions,
) {
    let ranks = u32::try_from(tp * pp * dp).unwrap();
    on_ranks(ranks, |rank, group| {
        let at = Layout::of(rank, tp, pp);
        let mut state = model(at, Fill::Model);
        state.insert("rng_state", rng(at));
        let options = options.clone().group(group);
        block_on(save(&state, storage, &options)).unwrap();
    });
}

fn load_model(storage: &Arc<dyn Storage>, tp: u64, pp: u64, fill: Fill) {
    let ranks = u32::try_from(tp * pp).unwrap();
    on_ranks(ranks, |rank, group| {
        let at = Layout::of(rank, tp, pp);
        let request = model(at, fill);
        let loaded =
            block_on(load(&request, storage, &MegatronLoadOptions::new().group(group))).unwrap();
        let expected = held(&model(at, Fill::Model));
        assert_eq!(tensors(&loaded.state), expected, "{at:?}");
        if fill == Fill::Zeros {
            assert_eq!(held(&request), expected, "memory of the request is filled, {at:?}");
        }
        assert_eq!(loaded.state.get("iteration").unwrap().as_int(), Some(7));
        let args = loaded.state.get("args").unwrap().as_dict().unwrap();
        assert_eq!(args.get("hidden_size").unwrap().as_int(), Some(8));
        assert_eq!(loaded.state.get("handle").unwrap().as_str(), Some("of this process"));
    });
}

#[test]
fn tp2_pp2_is_loaded_as_tp1_pp4_and_as_tp4() {
    for form in [MegatronForm::CommonFile, MegatronForm::CommonInside] {
        let storage = memory();
        save_model(&storage, 2, 2, 1, &MegatronSaveOptions::new().form(form));
        for (tp, pp) in [(1, 4), (4, 1), (2, 2), (1, 1)] {
            for fill in [Fill::Zeros, Fill::Nothing] {
                load_model(&storage, tp, pp, fill);
            }
        }
    }
}

#[test]
fn replicas_share_what_they_read() {
    let storage = memory();
    save_model(&storage, 2, 1, 1, &MegatronSaveOptions::new());
    let bytes_read = |shared: bool| -> u64 {
        let read = on_mesh(2, 3, |mesh| {
            let at = Layout::of(mesh.rank.into(), 2, 1);
            let request = model(at, Fill::Zeros);
            let (replicas, rank) = (Arc::clone(&mesh.replicas), mesh.rank);
            let mut options = MegatronLoadOptions::new().group(Arc::clone(&mesh.world));
            if shared {
                options = options.reader(move |inner| {
                    Arc::new(
                        ParallelReader::new(inner, Arc::clone(&replicas))
                            .sharing(ReadSharing::Always)
                            .world_rank(rank),
                    )
                });
            }
            let loaded = block_on(load(&request, &storage, &options)).unwrap();
            assert_eq!(tensors(&loaded.state), held(&model(at, Fill::Model)), "{at:?}");
            loaded.read.bytes_read
        });
        read.into_iter().sum()
    };
    let (shared, alone) = (bytes_read(true), bytes_read(false));
    assert!(shared * 2 < alone, "{shared} bytes were read, {alone} without sharing");
}

#[test]
fn replicas_are_written_once() {
    let (once, often) = (memory(), memory());
    save_model(&once, 2, 1, 1, &MegatronSaveOptions::new());
    save_model(&often, 2, 1, 3, &MegatronSaveOptions::new());
    load_model(&often, 2, 1, Fill::Nothing);
    let data = |storage: &Arc<dyn Storage>| {
        names(&**storage).into_iter().filter(|name| name.ends_with(".distcp")).collect::<Vec<_>>()
    };
    assert_eq!(data(&once), data(&often), "ranks without a main replica write no file");
}

#[test]
fn objects_come_back_where_the_grid_is_the_same() {
    let storage = memory();
    save_model(&storage, 2, 2, 1, &MegatronSaveOptions::new());
    on_ranks(4, |rank, group| {
        let at = Layout::of(rank, 2, 2);
        let request = ShardedStateDict::from([("rng", rng(at).without_data())]);
        let options = MegatronLoadOptions::new().group(group);
        let loaded = block_on(load(&request, &storage, &options)).unwrap();
        let expected = i64::try_from(100 * at.pp.0 + at.tp.0).unwrap();
        assert_eq!(loaded.state.get("rng").unwrap().as_int(), Some(expected));
    });
}

#[test]
fn a_background_save_keeps_what_it_was_given() {
    let storage = memory();
    let writers = dcp_collectives::LocalCollective::group(4);
    let writers: Vec<Arc<dyn Collective>> =
        writers.into_iter().map(|group| Arc::new(group) as Arc<dyn Collective>).collect();
    on_ranks(4, |rank, group| {
        let background = Arc::clone(&writers[usize::try_from(rank).unwrap()]);
        let at = Layout::of(rank, 2, 2);
        let state = model(at, Fill::Model);
        block_on(async {
            let background = MegatronBackgroundSaver::new(Some(background));
            let options = MegatronSaveOptions::new().group(group);
            let pending = async_save(&state, &storage, &options, &background).await.unwrap();
            overwrite(&state);
            pending.wait().await.unwrap();
        });
    });
    load_model(&storage, 1, 2, Fill::Zeros);
}

fn overwrite(state: &ShardedStateDict) {
    use dcp_megatron::sharded::ShardedValue;
    fn clear(value: &ShardedValue) {
        let data = match value {
            ShardedValue::Dict(dict) => return dict.iter().for_each(|(_, value)| clear(value)),
            ShardedValue::List(items) => return items.iter().for_each(clear),
            ShardedValue::Tensor(tensor) => tensor.data().cloned(),
            ShardedValue::Factory(factory) => factory.parts().local.data().cloned(),
            _ => None,
        };
        if let Some(data) = data {
            data.fill_from(&vec![0xff; data.byte_len().try_into().unwrap()]).unwrap();
        }
    }
    clear(&state.clone().into());
}

#[test]
fn flattened_ranges_are_loaded_from_whole_tensors() {
    let storage = memory();
    let whole = [6, 5];
    let all = view(&whole, elements(&whole, &Region::full(whole).unwrap(), 0));
    let state = ShardedStateDict::from([(
        "w",
        ShardedTensor::from_rank_offsets("w", all).build().unwrap(),
    )]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    // Two shards of rows, each in three ranges that begin and end within rows.
    let parts = [(0, 0, 4), (0, 4, 13), (0, 13, 15), (1, 0, 7), (1, 7, 7), (1, 7, 15)];
    on_ranks(6, |rank, group| {
        let (shard, start, end) = parts[usize::try_from(rank).unwrap()];
        let local = LocalTensor::described(DType::Int32, [end - start]);
        let flat = ShardedTensor::from_rank_offsets("w", local)
            .offset(0, shard, 2)
            .flattened_range(start..end, [3, 5])
            .build()
            .unwrap();
        let request = ShardedStateDict::from([("w", flat.clone())]);
        let loaded =
            block_on(load(&request, &storage, &MegatronLoadOptions::new().group(group))).unwrap();
        let block = elements(&whole, &Region::new([shard * 3, 0], [3, 5]).unwrap(), 0);
        let range = usize::try_from(start * 4).unwrap()..usize::try_from(end * 4).unwrap();
        assert_eq!(tensors(&loaded.state)[0].1, block[range]);
    });
    let flat = ShardedTensor::from_rank_offsets("w", view(&[4], vec![0; 16]))
        .flattened_range(0..4, [2, 2])
        .build()
        .unwrap();
    let state = ShardedStateDict::from([("w", flat)]);
    let options = MegatronSaveOptions::new().validate_access_integrity(false);
    let error = block_on(save(&state, &memory(), &options)).unwrap_err();
    assert!(error.to_string().contains("no longer saved"), "{error}");
}

/// A layout in which each rank has all cells that it owns as main replica, and some more.
fn grid_state(
    shape: &[u64],
    grid: &[u64],
    rank: usize,
    ranks: usize,
    owners: &[usize],
) -> ShardedStateDict {
    let sizes: Vec<u64> = shape.iter().zip(grid).map(|(n, parts)| n / parts).collect();
    let cells = grid.iter().product::<u64>();
    let tensors = (0..cells).filter_map(|cell| {
        let mut rest = cell;
        let mut at = vec![0; grid.len()];
        for axis in (0..grid.len()).rev() {
            at[axis] = rest % grid[axis];
            rest /= grid[axis];
        }
        let owner = owners[usize::try_from(cell).unwrap() % owners.len()] % ranks;
        let copy = owners[usize::try_from(cell + 1).unwrap() % owners.len()] % ranks;
        if owner != rank && copy != rank {
            return None;
        }
        let offsets: Vec<u64> = at.iter().zip(&sizes).map(|(at, size)| at * size).collect();
        let region = Region::new(offsets, sizes.clone()).unwrap();
        let mut shard =
            ShardedTensor::from_rank_offsets("w", view(&sizes, elements(shape, &region, 5)))
                .replica_id(u64::from(owner != rank));
        for (axis, (at, of)) in at.into_iter().zip(grid).enumerate() {
            shard = shard.offset(axis, at, *of);
        }
        Some((Value::Int(i64::try_from(cell).unwrap()), shard.build().unwrap()))
    });
    tensors.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_grid_is_loaded_in_any_other_layout(
        axes in prop::collection::vec((1_u64..4, 1_u64..4), 1..4),
        ranks in 1_u32..4,
        owners in prop::collection::vec(0_usize..8, 7),
        load_ranks in 1_u32..4,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 2),
    ) {
        let grid: Vec<u64> = axes.iter().map(|(parts, _)| *parts).collect();
        let shape: Vec<u64> = axes.iter().map(|(parts, size)| parts * size).collect();
        let storage = memory();
        let saved = on_ranks(ranks, |rank, group| {
            let (rank, ranks) = (usize::try_from(rank).unwrap(), usize::try_from(ranks).unwrap());
            let state = grid_state(&shape, &grid, rank, ranks, &owners);
            block_on(save(&state, &storage, &MegatronSaveOptions::new().group(group))).map(drop)
        });
        for saved in saved {
            saved.unwrap();
        }
        // Uneven slabs along the last axis, some of them empty.
        let last = shape.len() - 1;
        let mut ends: Vec<u64> = cuts[..usize::try_from(load_ranks).unwrap() - 1]
            .iter()
            .map(|cut| cut.index(usize::try_from(shape[last]).unwrap() + 1) as u64)
            .collect();
        ends.sort_unstable();
        ends.push(shape[last]);
        let loaded = on_ranks(load_ranks, |rank, group| {
            let rank = usize::try_from(rank).unwrap();
            let start = if rank == 0 { 0 } else { ends[rank - 1] };
            let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.clone());
            (offsets[last], sizes[last]) = (start, ends[rank] - start);
            let local = LocalTensor::described(DType::Int32, sizes.clone());
            let part = ShardedTensor::builder("w", local, shape.clone(), offsets.clone());
            let request = ShardedStateDict::from([("part", part.build().unwrap())]);
            let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new().group(group)));
            let region = Region::new(offsets, sizes).unwrap();
            loaded.map(|loaded: Loaded| (tensors(&loaded.state)[0].1.clone(), region))
        });
        for loaded in loaded {
            let (bytes, region) = loaded.unwrap();
            prop_assert_eq!(bytes, elements(&shape, &region, 5));
        }
    }
}

#[test]
fn a_plan_serves_again_while_nothing_changes() {
    let places = [memory(), memory()];
    on_ranks(2, |rank, group| {
        let options = MegatronSaveOptions::new().group(group);
        let state = model(Layout::of(rank, 2, 1), Fill::Model);
        let reused = places
            .each_ref()
            .map(|storage| block_on(save(&state, storage, &options)).unwrap().reused_plan);
        assert_eq!(reused, [false, true]);
    });
    load_model(&places[1], 2, 1, Fill::Nothing);
}

#[test]
fn every_rank_has_the_same_error_when_the_checkpoint_is_none() {
    let storage = memory();
    let errors = on_ranks(2, |rank, group| {
        let request = model(Layout::of(rank, 2, 1), Fill::Nothing);
        let options = MegatronLoadOptions::new().group(group);
        block_on(load(&request, &storage, &options)).unwrap_err().to_string()
    });
    assert_eq!(errors[0], errors[1]);
    let alone = block_on(load(&ShardedStateDict::new(), &storage, &MegatronLoadOptions::new()));
    assert!(matches!(alone, Err(MegatronError::NotACheckpoint { .. })));
}

#[test]
fn common_state_alone_makes_a_checkpoint() {
    let storage = memory();
    let state = ShardedStateDict::from(Dict::from([("iteration", 3)]));
    let content = Dict::from([("layout", Value::from("flat")), ("dp_cp_group", 5.into())]);
    let options = MegatronSaveOptions::new().content_metadata(content);
    block_on(save(&state, &storage, &options)).unwrap();
    let loaded =
        block_on(load(&ShardedStateDict::new(), &storage, &MegatronLoadOptions::new())).unwrap();
    assert_eq!(loaded.state.get("iteration").unwrap().as_int(), Some(3));
    let content = loaded.state.get("content_metadata").unwrap().as_dict().unwrap();
    assert_eq!(content.len(), 1, "what only the job means is not stored");
}
