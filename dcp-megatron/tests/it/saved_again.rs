//! The common state and the objects of real checkpoints are saved again as they were loaded,
//! whatever classes of Python are in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_collectives::LocalCollective;
use dcp_core::error::error_chain;
use dcp_core::value::{Dict, MadeBy};
use dcp_core::{Collective, Storage, Value};
use dcp_jobs::read::read_object;
use dcp_megatron::disk::COMMON_STATE;
use dcp_megatron::sharded::{ObjectKey, ShardedObject, ShardedStateDict};
use dcp_megatron::{
    MegatronBackgroundSaver, MegatronCheckpoint, MegatronError, MegatronForm, MegatronLoadOptions,
    MegatronOpenOptions, MegatronSaveOptions, async_save, load, save,
};

use crate::fixtures::OPENED;
use crate::small_model::{memory, on_ranks};
use crate::support::{block_on, stored};

const RANKS: u32 = 2;

/// The common state of a checkpoint, and its objects by their unique keys.
fn contents(storage: &Arc<dyn Storage>) -> (Dict, BTreeMap<Arc<str>, Value>) {
    let opened =
        block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default())).unwrap();
    let metadata = block_on(opened.source().metadata()).unwrap();
    let objects = metadata.iter().filter(|(fqn, entry)| {
        entry.as_tensor().is_none() && &***fqn != COMMON_STATE && ObjectKey::parse(fqn).is_some()
    });
    let objects = objects
        .map(|(fqn, _)| (Arc::clone(fqn), block_on(read_object(opened.source(), fqn)).unwrap()));
    (opened.common().clone(), objects.collect())
}

/// Loads the common state and every second object, and returns what is to be saved of it.
fn loaded(storage: &Arc<dyn Storage>, rank: u64, group: &Arc<dyn Collective>) -> ShardedStateDict {
    let (_, objects) = contents(storage);
    let mut request = ShardedStateDict::new();
    for (number, fqn) in objects.keys().enumerate() {
        if number as u64 % u64::from(RANKS) == rank {
            request.insert(Arc::clone(fqn), ShardedObject::request(ObjectKey::parse(fqn).unwrap()));
        }
    }
    let options =
        MegatronLoadOptions::new().group(Arc::clone(group)).validate_access_integrity(false);
    let mut state = block_on(load(&request, storage, &options)).unwrap().state;
    let mut objects = Vec::new();
    for (key, _) in request.iter() {
        let fqn = key.as_str().unwrap();
        let at = ObjectKey::parse(fqn).unwrap();
        let value = state.remove(fqn).unwrap();
        let (grid, offset) = (at.grid().clone(), at.offset().clone());
        objects.push((key.clone(), ShardedObject::new(at.key().clone(), value, grid, offset)));
    }
    let mut state = ShardedStateDict::from(state);
    for (key, object) in objects {
        state.insert(key, object.unwrap());
    }
    state
}

fn is_the_same(name: &str, storage: &Arc<dyn Storage>, again: &Arc<dyn Storage>) {
    let (first, second) = (contents(storage), contents(again));
    assert!(
        Value::from(second.0.clone()).same(&first.0.clone().into()),
        "{name}: {:?}\n{:?}",
        first.0,
        second.0
    );
    assert_eq!(first.1.len(), second.1.len(), "{name}");
    for (key, value) in &first.1 {
        assert!(second.1[key].view().same(value.view()), "{name}, {key}: {:?}", second.1[key]);
    }
}

fn options(group: &Arc<dyn Collective>, form: MegatronForm) -> MegatronSaveOptions {
    MegatronSaveOptions::new().group(Arc::clone(group)).form(form).validate_access_integrity(false)
}

#[test]
fn every_common_state_and_object_is_saved_again() {
    for (name, _) in OPENED {
        let storage = stored(name);
        for form in [MegatronForm::CommonFile, MegatronForm::CommonInside] {
            let again = memory();
            on_ranks(RANKS, |rank, group| {
                let state = loaded(&storage, rank, &group);
                let saved = block_on(save(&state, &again, &options(&group, form)));
                saved.unwrap_or_else(|error| panic!("{name}: {}", error_chain(&error)));
            });
            is_the_same(name, &storage, &again);
        }
    }
}

#[test]
fn the_common_state_of_a_run_is_saved_again_beside_training() {
    for name in ["run_torch_dist_dp2", "tp2_basic", "gpt_tp2pp2_swiglu"] {
        let storage = stored(name);
        for form in [MegatronForm::CommonFile, MegatronForm::CommonInside] {
            let again = memory();
            let writers: Vec<Arc<dyn Collective>> = LocalCollective::group(RANKS)
                .into_iter()
                .map(|group| Arc::new(group) as _)
                .collect();
            on_ranks(RANKS, |rank, group| {
                let state = loaded(&storage, rank, &group);
                let writer = Arc::clone(&writers[usize::try_from(rank).unwrap()]);
                block_on(async {
                    let background = MegatronBackgroundSaver::new(Some(writer));
                    let options = options(&group, form);
                    let pending = async_save(&state, &again, &options, &background).await.unwrap();
                    pending.wait().await.unwrap();
                });
            });
            is_the_same(name, &storage, &again);
        }
    }
}

/// The arguments of a real run, with one attribute set by `change`.
fn changed(common: &Dict, change: impl FnOnce(&mut Dict)) -> ShardedStateDict {
    let mut common = common.clone();
    let Some(Value::Object(mut args)) = common.get("args").cloned() else { panic!("no args") };
    let Some(Value::Dict(attributes)) = &mut args.state else { panic!("no attributes") };
    change(attributes);
    common.insert("args", Value::Object(args));
    common.into()
}

#[test]
fn an_object_that_differs_between_ranks_is_noticed() {
    let (common, _) = contents(&stored("run_torch_dist_dp2"));
    let again = memory();
    on_ranks(RANKS, |rank, group| {
        let state = changed(&common, |args| {
            let Some(Value::Object(backend)) = args.get("attention_backend").cloned() else {
                panic!("no attention_backend")
            };
            assert!(backend.class.is("megatron.core.transformer.enums", "AttnBackend"));
            let mut other = backend.clone();
            other.args = vec![Value::Int(1)];
            assert!(!other.args[0].same(&backend.args[0]));
            args.insert("attention_backend", *if rank == 1 { other } else { backend });
        });
        let error =
            block_on(save(&state, &again, &MegatronSaveOptions::new().group(group))).unwrap_err();
        let MegatronError::CommonDiffers(differs) = &error else { panic!("{error}") };
        assert_eq!(differs.ranks[0].1.values, ["args.attention_backend"]);
    });
}

#[test]
fn what_cannot_be_written_is_named_by_its_path() {
    let (common, _) = contents(&stored("run_torch_dist_dp2"));
    let state = changed(&common, |args| {
        let mut shown =
            dcp_core::value::Object::new(dcp_core::value::Global::new("m", "C"), Vec::new());
        shown.made_by = MadeBy::Unknown;
        args.insert("odd", Value::List(vec![1.into(), shown.into()]));
    });
    let again = memory();
    let error = block_on(save(&state, &again, &MegatronSaveOptions::new())).unwrap_err();
    let said = error_chain(&error);
    assert!(said.contains("args.odd.1: an object of class m.C"), "{said}");
    let part = dcp_core::Tensor::sharded(dcp_core::DType::Int8, [2], Vec::new()).unwrap();
    let state = changed(&common, |args| {
        args.insert("odd", Value::Tensor(part));
    });
    let said =
        error_chain(&block_on(save(&state, &again, &MegatronSaveOptions::new())).unwrap_err());
    assert!(said.contains("args.odd: "), "{said}");
}
