//! Keys on one side only, other shapes and other types.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::{DType, HostMemory, Region, Storage, TensorView, Value};
use dcp_megatron::sharded::{
    LocalNonpersistentObject, LocalTensor, ObjectKey, ShardedObject, ShardedStateDict,
    ShardedTensor, ShardedValue, named_split, swiglu,
};
use dcp_megatron::{
    Loaded, MegatronError, MegatronLoadOptions, MegatronSaveOptions, StrictHandling, load, save,
};

use crate::small_model::{elements, memory, on_ranks, tensors, view};
use crate::support::block_on;

fn whole(key: &str, local: impl Into<LocalTensor>) -> ShardedTensor {
    ShardedTensor::from_rank_offsets(key, local).build().unwrap()
}

fn described(key: &str, shape: &[u64]) -> ShardedTensor {
    whole(key, LocalTensor::described(DType::Int32, shape))
}

fn counting(shape: &[u64]) -> TensorView {
    view(shape, elements(shape, &Region::full(shape).unwrap(), 0))
}

/// Tensors `a` and `b`, an object `rng` of two, and a common state.
fn stored() -> Arc<dyn Storage> {
    let storage = memory();
    let object = |at| ShardedObject::new("rng", Value::Int(at), [2], [at as u64]).unwrap();
    let state: ShardedStateDict = [
        ("a", whole("a", counting(&[4])).into()),
        ("b", whole("b", counting(&[2, 3])).into()),
        ("x", object(0).into()),
        ("y", object(1).into()),
        ("step", Value::Int(5).into()),
    ]
    .into_iter()
    .collect::<Vec<(&str, ShardedValue)>>()
    .into_iter()
    .collect();
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    storage
}

/// Requests `a`, which is stored, and `c`, which is not.
fn load_a_and_c(
    storage: &Arc<dyn Storage>,
    strict: StrictHandling,
) -> Result<Loaded, MegatronError> {
    let request =
        ShardedStateDict::from([("a", described("a", &[4])), ("c", described("c", &[4]))]);
    block_on(load(&request, storage, &MegatronLoadOptions::new().strict(strict)))
}

fn set(keys: &[&str]) -> BTreeSet<Arc<str>> {
    keys.iter().map(|key| Arc::from(*key)).collect()
}

#[test]
fn each_of_the_eight_modes_returns_what_megatron_returns() {
    let storage = stored();
    for strict in StrictHandling::ALL {
        let loaded = load_a_and_c(&storage, strict);
        match strict {
            StrictHandling::AssumeOkUnexpected => {
                let error = loaded.unwrap_err().to_string();
                assert!(error.contains("missing \"c\""), "{error}");
                continue;
            }
            StrictHandling::RaiseUnexpected => {
                let MegatronError::Keys(keys) = loaded.unwrap_err() else { panic!() };
                assert_eq!((keys.missing, keys.unexpected), (set(&[]), set(&["c"])));
                continue;
            }
            StrictHandling::RaiseAll => {
                let error = loaded.unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "request and checkpoint have different keys: requested but not in the \
                     checkpoint: \"c\"; in the checkpoint but requested by no rank: \"b\", \"rng\""
                );
                continue;
            }
            _ => {}
        }
        let loaded = loaded.unwrap();
        assert!(loaded.state.get("c").is_none(), "{strict}: what is unexpected is left out");
        assert_eq!(tensors(&loaded.state).len(), 1, "{strict}");
        assert_eq!(loaded.state.get("step").unwrap().as_int(), Some(5));
        let (missing, unexpected) = match strict {
            StrictHandling::ReturnUnexpected => (Some(set(&[])), Some(set(&["c"]))),
            StrictHandling::ReturnAll => (Some(set(&["b", "rng"])), Some(set(&["c"]))),
            _ => (None, None),
        };
        assert_eq!((loaded.missing, loaded.unexpected), (missing, unexpected), "{strict}");
    }
}

#[test]
fn missing_is_what_no_rank_asks_for_and_unexpected_is_this_rank_s() {
    let storage = stored();
    let found = on_ranks(2, |rank, group| {
        let mut request = ShardedStateDict::new();
        match rank {
            0 => request.insert("a", described("a", &[4])),
            _ => request.insert("b", described("b", &[2, 3])),
        };
        request.insert("own", described(&format!("own{rank}"), &[1]));
        let options = MegatronLoadOptions::new().group(group).strict(StrictHandling::ReturnAll);
        let loaded = block_on(load(&request, &storage, &options)).unwrap();
        (loaded.missing.unwrap(), loaded.unexpected.unwrap())
    });
    assert_eq!(found[0], (set(&["rng"]), set(&["own0"])));
    assert_eq!(found[1], (set(&["rng"]), set(&["own1"])));
    let raised = on_ranks(2, |rank, group| {
        let mut request =
            ShardedStateDict::from([("a", described("a", &[4]).with_replica_id(rank))]);
        if rank == 1 {
            request.insert("c", described("c", &[4]));
        }
        let options =
            MegatronLoadOptions::new().group(group).strict(StrictHandling::RaiseUnexpected);
        block_on(load(&request, &storage, &options)).unwrap_err().to_string()
    });
    assert_eq!(raised[0], raised[1], "what one rank must not request fails all");
}

/// Trap 16: Megatron-Core looks at keys of objects without their place.
#[test]
fn trap_16_an_object_of_another_grid_is_unexpected() {
    let storage = stored();
    let object = |grid: u64| ShardedObject::request(ObjectKey::new("rng", [grid], [0]).unwrap());
    let request = ShardedStateDict::from([("rng", object(4))]);
    let options = MegatronLoadOptions::new().validate_access_integrity(false);
    let returned = options.clone().strict(StrictHandling::ReturnUnexpected);
    let loaded = block_on(load(&request, &storage, &returned)).unwrap();
    assert_eq!(loaded.unexpected, Some(set(&["rng"])));
    assert!(loaded.state.get("rng").is_none());
    let error = block_on(load(&request, &storage, &options)).unwrap_err().to_string();
    assert!(error.contains("rng/shard_0_4"), "{error}");
}

/// Trap 14: the second request of one object is an assertion in Megatron-Core, and parts of
/// tensors with a layer axis fail when one process loads.
#[test]
fn trap_14_the_same_object_twice_and_parts_of_stacked_tensors_are_loaded() {
    let storage = memory();
    let layers = |from: u64, count: u64| -> ShardedStateDict {
        (from..from + count)
            .map(|layer| {
                let region = Region::new([layer, 0], [1, 4]).unwrap();
                let local = view(&[4], elements(&[3, 4], &region, 0));
                let shard = ShardedTensor::from_rank_offsets("stacked", local)
                    .prepended_axes(1)
                    .offset(0, layer, 3)
                    .build();
                (format!("layer{layer}"), shard.unwrap())
            })
            .collect()
    };
    let mut state = layers(0, 3);
    state.insert("rng", ShardedObject::single("rng", 9).unwrap());
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();

    let object = ShardedObject::request(ObjectKey::new("rng", [1], [0]).unwrap());
    let mut request = layers(1, 1);
    request.insert("once", object.clone());
    request.insert("again", object);
    let options = MegatronLoadOptions::new().validate_access_integrity(false);
    let loaded = block_on(load(&request, &storage, &options)).unwrap();
    for name in ["once", "again"] {
        assert_eq!(loaded.state.get(name).unwrap().as_int(), Some(9));
    }
    let region = Region::new([1, 0], [1, 4]).unwrap();
    assert_eq!(tensors(&loaded.state)[0].1, elements(&[3, 4], &region, 0));
}

/// Trap 15: Megatron-Core casts, fills and truncates silently.
#[test]
fn trap_15_casts_and_other_shapes_are_reported() {
    let storage = memory();
    let floats: Vec<u8> = [1.5_f32, -2.0, 3.25].iter().flat_map(|x| x.to_le_bytes()).collect();
    let floats = TensorView::contiguous(HostMemory::from_vec(floats), DType::Float32, [3], 0);
    let state = ShardedStateDict::from([
        ("f", whole("f", floats.unwrap())),
        ("m", whole("m", counting(&[3, 4]))),
    ]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();

    let request =
        ShardedStateDict::from([("f", whole("f", LocalTensor::described(DType::BFloat16, [3])))]);
    let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new())).unwrap();
    assert_eq!(tensors(&loaded.state)[0].1, [0xc0, 0x3f, 0x00, 0xc0, 0x50, 0x40]);
    assert_eq!(loaded.casts, [(Arc::from("f"), DType::Float32, DType::BFloat16)]);
    let refused = MegatronLoadOptions::new().cast(false);
    let error = block_on(load(&request, &storage, &refused)).unwrap_err().to_string();
    assert!(error.contains("float32") && error.contains("bfloat16"), "{error}");
    let truncated = ShardedStateDict::from([("f", described("f", &[3]))]);
    assert!(block_on(load(&truncated, &storage, &MegatronLoadOptions::new())).is_err());

    // Larger on one axis, smaller on the other, in memory that held something else.
    let old = view(&[5, 2], vec![0xff; 40]);
    let other = |allow| {
        let shard = ShardedTensor::from_rank_offsets("m", old.clone()).allow_shape_mismatch(allow);
        ShardedStateDict::from([("m", shard.build().unwrap())])
    };
    let error = block_on(load(&other(false), &storage, &MegatronLoadOptions::new())).unwrap_err();
    assert!(error.to_string().contains("stored [3, 4], wanted [5, 2]"), "{error}");
    assert_eq!(old.payload().unwrap().to_bytes()[..], [0xff; 40], "nothing was touched");
    let loaded = block_on(load(&other(true), &storage, &MegatronLoadOptions::new())).unwrap();
    let expected: Vec<u8> =
        [0, 1, 4, 5, 8, 9, 0, 0, 0, 0].iter().flat_map(|n: &i32| n.to_le_bytes()).collect();
    assert_eq!(tensors(&loaded.state)[0].1, expected);
    assert_eq!(loaded.reshaped, [(Arc::from("m"), [3, 4].into(), [5, 2].into())]);
}

#[test]
fn a_shard_wholly_outside_of_what_is_stored_is_zero() {
    let storage = memory();
    let state = ShardedStateDict::from([("v", whole("v", counting(&[4])))]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let loaded = on_ranks(3, |rank, group| {
        let shard = ShardedTensor::from_rank_offsets("v", view(&[3], vec![7; 12]))
            .offset(0, rank, 3)
            .allow_shape_mismatch(true)
            .build();
        let request = ShardedStateDict::from([("v", shard.unwrap())]);
        let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new().group(group)));
        tensors(&loaded.unwrap().state)[0].1.clone()
    });
    let ints = |ints: [i32; 3]| ints.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    assert_eq!(loaded, [ints([0, 1, 2]), ints([3, 0, 0]), ints([0, 0, 0])]);
}

#[test]
fn ranks_that_cast_other_tensors_see_the_same_checkpoint() {
    let storage = memory();
    let floats = |key| {
        let memory = HostMemory::zeroed(8);
        whole(key, TensorView::contiguous(memory, DType::Float32, [2], 0).unwrap())
    };
    let state = ShardedStateDict::from([("p", floats("p")), ("q", floats("q"))]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    on_ranks(2, |rank, group| {
        let key = ["p", "q"][usize::try_from(rank).unwrap()];
        let dtype = [DType::BFloat16, DType::Float32][usize::try_from(rank).unwrap()];
        let request =
            ShardedStateDict::from([("w", whole(key, LocalTensor::described(dtype, [2])))]);
        let loaded =
            block_on(load(&request, &storage, &MegatronLoadOptions::new().group(group))).unwrap();
        assert_eq!(loaded.casts.len(), usize::from(rank == 0));
    });
    let errors = on_ranks(2, |rank, group| {
        let dtype = [DType::BFloat16, DType::Float16][usize::try_from(rank).unwrap()];
        let request =
            ShardedStateDict::from([("w", whole("p", LocalTensor::described(dtype, [2])))]);
        let options = MegatronLoadOptions::new().group(group).validate_access_integrity(false);
        block_on(load(&request, &storage, &options)).unwrap_err().to_string()
    });
    assert!(
        errors[0] == errors[1] && errors[0].contains("on rank 0 but requested as"),
        "{errors:?}"
    );
}

#[test]
fn what_all_ranks_ask_for_must_make_whole_tensors() {
    let storage = stored();
    let half = || {
        let local = LocalTensor::described(DType::Int32, [2]);
        ShardedTensor::from_rank_offsets("a", local).offset(0, 1, 2).build().unwrap()
    };
    let request = ShardedStateDict::from([("a", half())]);
    let error = block_on(load(&request, &storage, &MegatronLoadOptions::new())).unwrap_err();
    assert!(matches!(&error, MegatronError::Integrity(_)), "{error}");
    let options = MegatronLoadOptions::new().validate_access_integrity(false);
    let loaded = block_on(load(&request, &storage, &options)).unwrap();
    assert_eq!(tensors(&loaded.state)[0].1, [2, 0, 0, 0, 3, 0, 0, 0]);
}

/// A tensor `b.x` of one row of three, `kept` of four rows and `other` of as many bytes.
fn parts_stored() -> Arc<dyn Storage> {
    let storage = memory();
    let state = ShardedStateDict::from([
        ("x", whole("b.x", counting(&[1, 3]))),
        ("kept", whole("kept", counting(&[4, 3]))),
        ("other", whole("other", view(&[4, 3], vec![7; 48]))),
    ]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    storage
}

#[test]
fn a_factory_goes_as_a_whole_when_a_part_is_not_stored() {
    let storage = parts_stored();
    let factory = || named_split(&described("b", &[4, 3]), &[("x", 1), ("y", 3)]).unwrap();
    let options = MegatronLoadOptions::new().strict(StrictHandling::ReturnUnexpected);
    let request: ShardedStateDict = [("b", factory())].into_iter().collect();
    let loaded = block_on(load(&request, &storage, &options)).unwrap();
    assert_eq!(loaded.unexpected, Some(set(&["b.y"])));
    assert_eq!(loaded.left_out, set(&["b.x"]));
    assert!(loaded.state.get("b").is_none());
    // What others request under the same key stays theirs.
    let request: ShardedStateDict =
        [("b", factory().into()), ("x", described("b.x", &[1, 3]).into())]
            .into_iter()
            .collect::<Vec<(&str, ShardedValue)>>()
            .into_iter()
            .collect();
    let options = options.validate_access_integrity(false);
    let loaded = block_on(load(&request, &storage, &options)).unwrap();
    assert_eq!(tensors(&loaded.state), [(".x".to_owned(), bytes_of(&[1, 3]))]);
    assert_eq!(loaded.left_out, set(&[]));
}

fn bytes_of(shape: &[u64]) -> Vec<u8> {
    elements(shape, &Region::full(shape).unwrap(), 0)
}

/// Lists close up over what is left out of them, and factories still merge where they lie.
#[test]
fn a_factory_in_a_list_merges_its_own_parts_when_others_are_left_out() {
    let storage = parts_stored();
    let options = MegatronLoadOptions::new().strict(StrictHandling::ReturnUnexpected);
    let absent = || ShardedValue::from(swiglu(&described("absent", &[4, 3])).unwrap());
    let mine = view(&[4, 3], vec![0xff; 48]);
    let kept = || ShardedValue::from(swiglu(&whole("kept", mine.clone())).unwrap());
    let theirs = view(&[4, 3], vec![0xff; 48]);
    let other = || ShardedValue::from(whole("other", theirs.clone()));
    let partly = || {
        ShardedValue::from(named_split(&described("b", &[4, 3]), &[("x", 1), ("y", 3)]).unwrap())
    };
    let held = |view: &TensorView| view.payload().unwrap().to_bytes().to_vec();
    for list in [
        vec![absent(), kept()],
        vec![absent(), kept(), other()],
        vec![partly(), kept(), absent(), other()],
        vec![Value::Int(1).into(), kept(), other()],
        vec![ShardedStateDict::new().into(), kept(), other()],
        vec![vec![absent()].into(), kept(), other()],
    ] {
        mine.fill_from(&[0xff; 48]).unwrap();
        theirs.fill_from(&[0xff; 48]).unwrap();
        let request = ShardedStateDict::from([("layers", ShardedValue::from(list.clone()))]);
        let loaded = block_on(load(&request, &storage, &options)).unwrap();
        let found = tensors(&loaded.state);
        assert_eq!(found[0], (".layers.0".to_owned(), bytes_of(&[4, 3])), "{list:?}");
        assert_eq!(held(&mine), bytes_of(&[4, 3]), "{list:?}");
        if let Some(second) = found.get(1) {
            assert_eq!(*second, (".layers.1".to_owned(), vec![7; 48]), "{list:?}");
            assert_eq!(held(&theirs), [7; 48], "{list:?}");
        }
    }
}

#[test]
fn local_objects_in_lists_go_back_to_their_places_or_are_refused_before_the_save() {
    let storage = memory();
    let local = || ShardedValue::from(LocalNonpersistentObject(Value::Int(3)));
    let tensor = || ShardedValue::from(whole("t", counting(&[4])));
    let with = |list: Vec<ShardedValue>| ShardedStateDict::from([("l", ShardedValue::from(list))]);
    for list in [vec![local(), tensor()], vec![local(), Value::Int(5).into()]] {
        let error = block_on(save(&with(list), &storage, &MegatronSaveOptions::new())).unwrap_err();
        let MegatronError::MixedLists { paths } = &error else { panic!("{error}") };
        assert_eq!(*paths, ["l"]);
    }
    // As the groups of an optimizer: something of each in every element.
    let group = |lr| {
        ShardedValue::from(
            [("params", local()), ("lr", Value::Int(lr).into())]
                .into_iter()
                .collect::<ShardedStateDict>(),
        )
    };
    let mut state = with(vec![group(1), group(2)]);
    state.insert("t", tensor());
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let loaded = block_on(load(&state, &storage, &MegatronLoadOptions::new())).unwrap();
    let Some(Value::List(groups)) = loaded.state.get("l") else { panic!() };
    let group = groups[1].as_dict().unwrap();
    assert_eq!(group.get("params").unwrap().as_int(), Some(3));
    assert_eq!(group.get("lr").unwrap().as_int(), Some(2));
    // The other entries of a tensor's dict come back with it.
    let beside = ShardedStateDict::from([("m", ShardedValue::from(vec![local(), tensor()]))]);
    let loaded = block_on(load(&beside, &storage, &MegatronLoadOptions::new())).unwrap();
    let Some(Value::List(list)) = loaded.state.get("m") else { panic!() };
    assert_eq!(list[0].as_int(), Some(3));
    assert_eq!(tensors(&loaded.state), [(".m.1".to_owned(), bytes_of(&[4]))]);
}

#[test]
fn types_of_other_ranks_count_where_one_of_them_is_the_stored_one() {
    let storage = memory();
    let half = TensorView::contiguous(HostMemory::zeroed(4), DType::BFloat16, [2], 0).unwrap();
    let state = ShardedStateDict::from([("w", whole("p", half))]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let errors = on_ranks(2, |rank, group| {
        let dtype = [DType::BFloat16, DType::Float32][usize::try_from(rank).unwrap()];
        let request =
            ShardedStateDict::from([("w", whole("p", LocalTensor::described(dtype, [2])))]);
        let options = MegatronLoadOptions::new().group(group).validate_access_integrity(false);
        block_on(load(&request, &storage, &options)).unwrap_err().to_string()
    });
    assert!(
        errors[0] == errors[1] && errors[0].contains("on rank 0 but requested as"),
        "{errors:?}"
    );
}

#[test]
fn a_misspelled_key_is_said_before_what_it_makes_of_the_request() {
    let storage = stored();
    let local = LocalTensor::described(DType::Int32, [2]);
    let half = ShardedTensor::from_rank_offsets("aa", local).offset(0, 1, 2).build().unwrap();
    let request = ShardedStateDict::from([("a", half)]);
    for strict in [StrictHandling::RaiseAll, StrictHandling::RaiseUnexpected] {
        let options = MegatronLoadOptions::new().strict(strict);
        let error = block_on(load(&request, &storage, &options)).unwrap_err();
        let MegatronError::Keys(keys) = &error else { panic!("{error}") };
        assert_eq!(keys.unexpected, set(&["aa"]));
    }
}
