//! Rules of what is stored, factories, and states that cannot be saved.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{Collective, DType, Region, Storage, Value};
use dcp_megatron::disk::Backend;
use dcp_megatron::sharded::{
    ExpertGrid, LocalNonpersistentObject, LocalTensor, ObjectKey, ShardedObject, ShardedStateDict,
    ShardedTensor, ShardedTensorFactory, ShardedValue, ShardingProblem, extract, grouped_experts,
    merge, named_split, swiglu,
};
use dcp_megatron::strategy::Strategies;
use dcp_megatron::{
    MegatronCheckpoint, MegatronError, MegatronLoadOptions, MegatronOpenOptions,
    MegatronSaveOptions, load, save,
};

use crate::small_model::{elements, held, memory, on_ranks, tensors, view};
use crate::support::{block_on, names};

fn part(key: &str, position: u64, of: u64) -> ShardedTensor {
    let region = Region::new([position * 2, 0], [2, 3]).unwrap();
    ShardedTensor::from_rank_offsets(key, view(&[2, 3], elements(&[of * 2, 3], &region, 0)))
        .offset(0, position, of)
        .build()
        .unwrap()
}

fn errors_of(states: &[ShardedStateDict], storage: &Arc<dyn Storage>) -> Vec<MegatronError> {
    on_ranks(u32::try_from(states.len()).unwrap(), |rank, group| {
        let state = &states[usize::try_from(rank).unwrap()];
        block_on(save(state, storage, &MegatronSaveOptions::new().group(group))).unwrap_err()
    })
}

/// Trap 11: in Megatron-Core rank 0 alone finds what is wrong, and the others hang.
#[test]
fn trap_11_every_rank_hears_of_every_bad_shard_before_anything_is_written() {
    let outside =
        ShardedTensor::builder("out", LocalTensor::described(DType::Int32, [3]), [4], [3]);
    let uneven =
        ShardedTensor::builder("grid", LocalTensor::described(DType::Int32, [3]), [7], [3])
            .axis_fragmentations([2]);
    let states: [ShardedStateDict; 3] = [
        [("double", part("double", 0, 1)), ("none", part("none", 0, 2))].into(),
        [("double", part("double", 0, 1)), ("outside", outside.build().unwrap())].into(),
        [("grid", uneven.build().unwrap())].into(),
    ];
    let storage = memory();
    let errors = errors_of(&states, &storage);
    let MegatronError::Integrity(first) = &errors[0] else { panic!("{}", errors[0]) };
    for error in &errors {
        assert!(matches!(error, MegatronError::Integrity(same) if same == first), "{error}");
    }
    let text = first.to_string();
    for part in [
        "\"double\" has several main replicas of shard [0:2, 0:3] (ranks 0, 1)",
        "\"none\" has no main replica of shard [2:4, 0:3]",
        "\"out\": shard [3:6] of rank 1 is outside global shape [4]",
        "\"grid\" on rank 2: 2 shards of 3 elements do not make the 7 of axis 0",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(first.problems.len(), 4);
    assert!(first.problems.iter().any(|p| matches!(p, ShardingProblem::Missing { count: 1, .. })));
    assert!(names(&*storage).is_empty(), "nothing was written");
}

/// A description that does not fit is refused, not cut.
#[test]
fn places_that_are_described_in_two_ways_are_refused() {
    let local = || LocalTensor::described(DType::Int32, [2]);
    let both = ShardedTensor::builder("w", local(), [4], [0]).offset(0, 1, 2);
    let error = both.build().unwrap_err().to_string();
    assert!(error.contains("\"w\"") && error.contains("from_rank_offsets"), "{error}");
    let both = ShardedTensor::from_rank_offsets("w", local()).axis_fragmentations([7]);
    let error = both.build().unwrap_err().to_string();
    assert!(error.contains("\"w\"") && error.contains("ShardedTensor::builder"), "{error}");
}

/// Megatron-Core's strict modes fail on names such as `x/shard__`.
#[test]
fn objects_without_a_grid_or_outside_of_it_are_refused() {
    let refused = |grid: &[u64], offset: &[u64], said: &str| {
        let error = ObjectKey::new("rng", grid, offset).unwrap_err().to_string();
        assert!(error.contains("\"rng\"") && error.contains(said), "{error}");
        assert!(ShardedObject::new("rng", 1, grid, offset).is_err());
    };
    refused(&[], &[], "at least one axis");
    refused(&[2], &[2], "[2]");
    refused(&[2, 0], &[1, 0], "[2, 0]");
    // An older name, of which the last axis of the grid is not known, keeps its place.
    let older = ShardedObject::request(ObjectKey::parse("optimizer/shard_3.7_24").unwrap());
    let renamed = older.with_key("other").unwrap();
    assert_eq!(renamed.at().offset(), &[3, 7].into());
}

/// Trap 13: in Megatron-Core that is a warning, and what other ranks have is lost.
#[test]
fn trap_13_a_common_state_that_differs_is_an_error_that_names_the_path() {
    let states: Vec<ShardedStateDict> = (0..3_u64)
        .map(|rank| {
            let mut args = Dict::from([("lr", Value::Float(0.1)), ("seed", Value::Int(1))]);
            args.insert("seed", i64::from(rank == 2));
            let mut state = ShardedStateDict::from([("w", part("w", rank, 3))]);
            state.insert("args", Value::from(args));
            state
        })
        .collect();
    let storage = memory();
    for error in errors_of(&states, &storage) {
        let MegatronError::CommonDiffers(differs) = &error else { panic!("{error}") };
        assert_eq!(differs.ranks.len(), 1);
        assert!(error.to_string().contains("rank 2 has other values at args.seed"), "{error}");
    }
    assert!(names(&*storage).is_empty());

    let saves = |options: &(dyn Fn() -> MegatronSaveOptions + Sync)| {
        let storage = memory();
        on_ranks(3, |rank, group| {
            let state = &states[usize::try_from(rank).unwrap()];
            block_on(save(state, &storage, &options().group(group))).unwrap();
        });
        let opened =
            block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
        opened.common().get("args").unwrap().as_dict().unwrap().get("seed").unwrap().as_int()
    };
    assert_eq!(saves(&|| MegatronSaveOptions::new().common_must_agree(false)), Some(0));
    let preprocessed = || {
        MegatronSaveOptions::new().preprocess_common_before_consistency_check(|common| {
            let mut common = common.clone();
            common.get_mut("args").and_then(|args| match args {
                Value::Dict(args) => args.remove("seed"),
                _ => None,
            });
            common
        })
    };
    assert_eq!(saves(&preprocessed), Some(0), "compared without it, stored with it");
}

#[test]
fn a_rank_that_cannot_make_its_state_fails_all() {
    let broken = ShardedTensorFactory::new(
        "f",
        LocalTensor::described(DType::Int32, [1]),
        |parts| {
            Err(dcp_megatron::sharded::ShardError::Factory {
                key: parts.key.to_string(),
                problem: "no such luck".to_owned(),
            })
        },
        |_, loaded| Ok(loaded),
    );
    let states: [ShardedStateDict; 2] = [[("w", part("w", 0, 1))].into(), [("f", broken)].into()];
    let storage = memory();
    for error in errors_of(&states, &storage) {
        assert!(error.to_string().contains("rank 1") && error.to_string().contains("no such luck"));
    }
    assert!(names(&*storage).is_empty());
}

/// Trap 14: Megatron-Core saves such lists and cannot load them.
#[test]
fn trap_14_lists_of_sharded_and_plain_elements_are_refused() {
    let list = |items: Vec<ShardedValue>| {
        ShardedStateDict::from([("outer", vec![ShardedStateDict::from([("list", items)]).into()])])
    };
    let mixed = list(vec![Value::Int(1).into(), part("w", 0, 1).into(), Value::Int(2).into()]);
    let storage = memory();
    let error = block_on(save(&mixed, &storage, &MegatronSaveOptions::new())).unwrap_err();
    assert!(error.to_string().contains("outer.0.list"), "{error}");
    let options = MegatronSaveOptions::new().allow_mixed_lists(true);
    block_on(save(&mixed, &storage, &options)).unwrap();
    let error =
        block_on(load(&mixed, &storage, &MegatronLoadOptions::new())).unwrap_err().to_string();
    assert!(error.contains("outer.0.list") && error.contains("2 and 1 elements"), "{error}");
    // Where every element is a dict with something of both, nothing moves.
    let each = |n: u64| -> ShardedValue {
        let mut dict = ShardedStateDict::from([("w", part("w", n, 2))]);
        dict.insert("n", Value::Int(1));
        dict.into()
    };
    let storage = memory();
    let fine = list(vec![each(0), each(1)]);
    block_on(save(&fine, &storage, &MegatronSaveOptions::new())).unwrap();
    let loaded = block_on(load(&fine, &storage, &MegatronLoadOptions::new())).unwrap();
    assert_eq!(tensors(&loaded.state).len(), 2);
}

#[test]
fn containers_go_where_they_hold_something() {
    let local = LocalNonpersistentObject(Value::Int(1));
    let mut state = ShardedStateDict::new();
    state.insert("only_sharded", ShardedStateDict::from([("w", part("w", 0, 1))]));
    state.insert("only_local", ShardedStateDict::from([("l", local.clone())]));
    state.insert("empty_dict", ShardedStateDict::new());
    state.insert("empty_list", Vec::<ShardedValue>::new());
    state.insert(
        "nested",
        vec![
            ShardedStateDict::from([("l", local)]).into(),
            Value::from("plain").into(),
            Vec::<ShardedValue>::new().into(),
        ],
    );
    let storage = memory();
    let error = block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap_err();
    let MegatronError::MixedLists { paths } = &error else { panic!("{error}") };
    assert_eq!(*paths, ["nested"], "a local object would not find its place again");
    let options = MegatronSaveOptions::new().allow_mixed_lists(true);
    block_on(save(&state, &storage, &options)).unwrap();
    let opened =
        block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
    let expected = Dict::from([
        ("empty_dict", Dict::new().into()),
        ("empty_list", Value::List(Vec::new())),
        ("nested", Value::List(vec!["plain".into(), Value::List(Vec::new())])),
    ]);
    assert!(Value::from(opened.common().clone()).same(&expected.into()), "{:?}", opened.common());
    let (tensors, _) = extract(state, |value| matches!(value, ShardedValue::Tensor(_)));
    assert_eq!(tensors.len(), 1);
}

#[test]
fn merging_unites_dicts_and_refuses_two_values_in_one_place() {
    let inner = |n: i64| Value::from(Dict::from([("n", n)]));
    let mut into = Dict::from([("l", Value::List(vec![inner(1)])), ("k", 1.into())]);
    let from = Dict::from([("l", Value::List(vec![Dict::from([("m", 2)]).into()]))]);
    merge(&mut into, from).unwrap();
    let Some(Value::List(items)) = into.get("l") else { panic!() };
    assert_eq!(items[0].as_dict().unwrap().len(), 2);
    for (from, said) in [
        (Dict::from([("l", Value::List(vec![inner(3)]))]), "l.0.n"),
        (Dict::from([("l", Value::List(Vec::new()))]), "1 and 0 elements"),
        (Dict::from([("k", Dict::new())]), "an int"),
    ] {
        let error = merge(&mut into.clone(), from).unwrap_err().to_string();
        assert!(error.contains(said) || error.contains("int"), "{error}");
    }
}

/// Saves with `t` tensor-parallel ranks and loads with others, with and without memory.
fn through(
    make: impl Fn(u64, u64, bool) -> ShardedTensorFactory + Sync,
    expected: impl Fn(u64, u64) -> Vec<u8> + Sync,
) {
    let storage = memory();
    on_ranks(2, |rank, group: Arc<dyn Collective>| {
        let state = ShardedStateDict::from([("f", make(rank, 2, true))]);
        block_on(save(&state, &storage, &MegatronSaveOptions::new().group(group))).unwrap();
    });
    for ranks in [1, 2, 4] {
        on_ranks(ranks, |rank, group: Arc<dyn Collective>| {
            let ranks = u64::from(ranks);
            for data in [false, true] {
                let request = ShardedStateDict::from([("f", make(rank, ranks, data))]);
                if data {
                    let ShardedValue::Factory(factory) = request.get("f").unwrap() else {
                        panic!()
                    };
                    let view = factory.parts().local.data().unwrap();
                    view.fill_from(&vec![0; view.byte_len().try_into().unwrap()]).unwrap();
                }
                let options = MegatronLoadOptions::new().group(Arc::clone(&group));
                let loaded = block_on(load(&request, &storage, &options)).unwrap();
                assert_eq!(tensors(&loaded.state)[0].1, expected(rank, ranks));
                if data {
                    assert_eq!(held(&request)[0].1, expected(rank, ranks), "filled in place");
                }
            }
        });
    }
}

fn local(shape: &[u64], bytes: Vec<u8>, data: bool) -> LocalTensor {
    if data { view(shape, bytes).into() } else { LocalTensor::described(DType::Int32, shape) }
}

#[test]
fn gates_are_stored_apart_from_up_whatever_the_tensor_parallelism() {
    let bytes = |rank: u64, ranks: u64| {
        let rows = 8 / ranks;
        let half = |from| Region::new([from + rank * rows, 0], [rows, 3]).unwrap();
        [elements(&[16, 3], &half(0), 0), elements(&[16, 3], &half(8), 0)].concat()
    };
    let make = |rank, ranks, data| {
        let local = local(&[16 / ranks, 3], bytes(rank, ranks), data);
        let shard = ShardedTensor::from_rank_offsets("fc1", local).offset(0, rank, ranks);
        swiglu(&shard.build().unwrap()).unwrap()
    };
    through(make, bytes);
    let odd = ShardedTensor::from_rank_offsets("fc1", LocalTensor::described(DType::Int32, [3, 2]));
    assert!(swiglu(&odd.build().unwrap()).is_err());
}

#[test]
fn named_parts_are_tensors_of_their_own() {
    let sizes = [("z", 8_u64), ("x", 4), ("dt", 4)];
    let bytes = |rank: u64, ranks: u64| {
        let part = |(_, size): &(&str, u64)| {
            let region = Region::new([rank * size / ranks, 0], [size / ranks, 2]).unwrap();
            elements(&[*size, 2], &region, i32::try_from(*size).unwrap())
        };
        sizes.iter().flat_map(part).collect::<Vec<u8>>()
    };
    let make = |rank, ranks, data| {
        let local = local(&[16 / ranks, 2], bytes(rank, ranks), data);
        let shard = ShardedTensor::from_rank_offsets("in_proj.weight", local);
        let shard = shard.offset(0, rank, ranks).build().unwrap();
        let parts: Vec<(&str, u64)> =
            sizes.iter().map(|(name, size)| (*name, size / ranks)).collect();
        named_split(&shard, &parts).unwrap()
    };
    through(make, bytes);
    let shard = part("w", 0, 1);
    assert!(named_split(&shard, &[("a", 1)]).is_err(), "the parts are too small");
}

#[test]
fn experts_of_one_tensor_are_stored_as_separate_ones() {
    // Two gated experts of [in 3, out 8] on each of two ranks, or four and one.
    let (total, rows, columns) = (4_u64, 3_u64, 8_u64);
    // Stored: [layers 1, experts, out, in]; held: [experts, in, out].
    let bytes = |rank: u64, ranks: u64| {
        let here = total / ranks;
        let mut held = Vec::new();
        for expert in rank * here..(rank + 1) * here {
            for row in 0..rows {
                for column in 0..columns {
                    let element = (expert * columns + column) * rows + row;
                    held.extend_from_slice(&i32::try_from(element).unwrap().to_le_bytes());
                }
            }
        }
        held
    };
    let make = |gated: bool| {
        move |rank: u64, ranks: u64, data: bool| {
            let here = total / ranks;
            let local = local(&[here, rows, columns], bytes(rank, ranks), data);
            let grid = ExpertGrid::new(rank * here, total).with_layer(0, 1).with_gated(gated);
            grouped_experts("experts.linear_fc1.weight", local, grid).unwrap()
        }
    };
    for gated in [false, true] {
        through(make(gated), bytes);
    }
    let storage = memory();
    let state = ShardedStateDict::from([("f", make(true)(0, 1, true))]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let whole = ShardedTensor::from_rank_offsets(
        "experts.linear_fc1.weight",
        LocalTensor::described(DType::Int32, [1, total, columns, rows]),
    );
    let request = ShardedStateDict::from([("all", whole.build().unwrap())]);
    let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new())).unwrap();
    let all = [1, total, columns, rows];
    assert_eq!(tensors(&loaded.state)[0].1, elements(&all, &Region::full(all).unwrap(), 0));
}

#[test]
fn unknown_backends_are_named_with_the_known_ones() {
    let state = ShardedStateDict::from([("w", part("w", 0, 1))]);
    let options =
        MegatronSaveOptions::new().strategy(Strategies::default(), Backend::first("zarr"));
    let error = block_on(save(&state, &memory(), &options)).unwrap_err().to_string();
    assert_eq!(
        error,
        "no registered strategy saves to \"zarr\" version 1; registered: \"torch_dist\" version 1"
    );
    let storage = memory();
    crate::support::put(
        &*storage,
        "metadata.json",
        br#"{"sharded_backend": "torch_dist", "sharded_backend_version": 3}"#.to_vec(),
    );
    let error =
        block_on(load(&state, &storage, &MegatronLoadOptions::new())).unwrap_err().to_string();
    assert!(error.contains("\"torch_dist\" version 3; registered: "), "{error}");
}

#[test]
fn keys_with_dots_and_slashes_keep_their_names() {
    let storage = memory();
    let odd = "optimizer (bucket 1.0, 2)/x.y";
    let mut state = ShardedStateDict::from([("w", part(odd, 0, 1))]);
    state.insert("o", ShardedObject::single("a.b c", 4).unwrap());
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let loaded = block_on(load(&state, &storage, &MegatronLoadOptions::new())).unwrap();
    assert_eq!(loaded.state.get("o").unwrap().as_int(), Some(4));
    assert_eq!(tensors(&loaded.state).len(), 1);
}

#[test]
fn a_tensor_and_an_object_cannot_share_a_name() {
    let mut state = ShardedStateDict::from([("w", part("rng/shard_0_1", 0, 1))]);
    state.insert("o", ShardedObject::single("rng", 4).unwrap());
    let error =
        block_on(save(&state, &memory(), &MegatronSaveOptions::new())).unwrap_err().to_string();
    assert!(error.contains("rename one of them"), "{error}");
}

/// A place that the common state has, too, is found before the memory of the request is touched,
/// and on all ranks.
#[test]
fn what_collides_with_the_common_state_is_refused_while_memory_is_as_it_was() {
    let storage = memory();
    let weight =
        |byte| ShardedTensor::from_rank_offsets("w", view(&[1], vec![byte; 4])).build().unwrap();
    let mut state = ShardedStateDict::from([("w", weight(1))]);
    let numbers = |n: i64| Value::List((0..n).map(Value::Int).collect());
    let inner = Dict::from([("lr", Value::Int(1)), ("steps", numbers(2))]);
    state.insert("nested", Value::Dict(inner));
    let object = ShardedObject::single("o", Dict::from([("seed", Value::Int(5))])).unwrap();
    state.insert("object", object.clone());
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let local = |value: Value| ShardedValue::from(LocalNonpersistentObject(value));
    let of = |key: &str, value: ShardedValue| {
        let inner: ShardedStateDict = [(key, value)].into_iter().collect();
        ShardedValue::from(inner)
    };
    for (key, value, said) in [
        ("nested", local(Value::Int(2)), "nested"),
        ("nested", weight(9).into(), "nested"),
        ("nested", of("lr", local(Value::None)), "nested.lr"),
        ("nested", of("lr", weight(9).into()), "nested.lr"),
        ("nested", of("lr", object.clone().into()), "nested.lr"),
        ("nested", of("steps", vec![local(Value::None)].into()), "nested.steps"),
        ("nested", of("steps", local(numbers(3))), "nested.steps"),
    ] {
        let mine = weight(9);
        let mut request = ShardedStateDict::from([("first", mine.clone())]);
        request.insert(key, value);
        let options = MegatronLoadOptions::new().validate_access_integrity(false);
        let error = block_on(load(&request, &storage, &options)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, MegatronError::Shard(_)) && text.contains(said), "{said}: {text}");
        let held = mine.data().unwrap().payload().unwrap().to_bytes();
        assert_eq!(*held, [9; 4], "{said}");
    }
    // Dicts are united, also with one that is only known when it is loaded.
    let request: ShardedStateDict =
        [("nested", ShardedValue::from(object)), ("other", local(Value::Int(2)))]
            .into_iter()
            .collect();
    let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new())).unwrap();
    let nested = loaded.state.get("nested").and_then(Value::as_dict).unwrap();
    assert_eq!(nested.len(), 3);
}
