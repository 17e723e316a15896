//! Saving and loading as a trainer does.

use std::sync::Arc;

use dcp_collectives::LocalCollective;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, DType, StateDict, Storage, Tensor, Value};
use dcp_engine::{BackgroundSaver, Loader, Saver, Settings};
use dcp_formats::metadata::Profile;
use dcp_olmo::{
    KeyMapping, LoadedState, OlmoLoadOptions, OlmoSaveOptions, OptimizerLayout,
    async_save_model_and_optim_state, flatten_optim, get_checkpoint_metadata,
    load_model_and_optim_state, save_model_and_optim_state,
};

use crate::support::{
    ANY, FLAT, MODEL_ONLY, NESTED, blank, block_on, fixture, fixtures, key, memory, put_folder,
    reader, same_dict, states,
};

fn load(
    storage: &Arc<dyn Storage>,
    model: &mut StateDict,
    optim: Option<&mut StateDict>,
    options: &OlmoLoadOptions,
) -> Result<LoadedState, CheckpointError> {
    let loader = Loader::new();
    block_on(load_model_and_optim_state(&loader, reader(storage), model, optim, options))
}

#[test]
fn whatever_the_file_has_the_target_gets_its_layout() {
    let (model, nested) = states(&fixture(NESTED));
    let (_, flat) = states(&fixture(FLAT));
    for (file, stored) in [(NESTED, OptimizerLayout::Nested), (FLAT, OptimizerLayout::Flat)] {
        for optim in [&nested, &flat] {
            let (mut new_model, mut new_optim) = (blank(&model), blank(optim));
            let storage = fixture(file);
            let options = OlmoLoadOptions::default();
            let loaded = load(&storage, &mut new_model, Some(&mut new_optim), &options).unwrap();
            assert_eq!(loaded.stored_layout, Some(stored));
            assert!(loaded.report.is_complete() && loaded.report.unexpected.is_empty(), "{file}");
            assert!(same_dict(&new_model, &model), "{file}");
            assert!(same_dict(&new_optim, optim), "{file}: {new_optim:?}");
        }
    }
}

#[test]
fn saved_and_loaded_again_in_every_combination() {
    let (model, nested) = states(&fixture(NESTED));
    let flat = flatten_optim(&nested).unwrap();
    assert!(same_dict(&flat, &states(&fixture(FLAT)).1));
    for flatten in [false, true] {
        for profile in [Profile::Compat, Profile::Olmo] {
            let storage = memory();
            let options =
                OlmoSaveOptions::default().flatten_optimizer_state(flatten).profile(profile);
            let options = options.thread_count(3.try_into().unwrap());
            let saver = Saver::new();
            let save =
                save_model_and_optim_state(&saver, &storage, &model, Some(&nested), &options);
            block_on(save).unwrap();
            let (stored_model, stored) = states(&storage);
            assert!(same_dict(&stored_model, &model));
            assert!(same_dict(&stored, if flatten { &flat } else { &nested }));
            let again = save_model_and_optim_state(&saver, &storage, &model, None, &options);
            assert!(block_on(again).unwrap_err().to_string().contains("overwriting is off"));
            let options = options.save_overwrite(true);
            let again = save_model_and_optim_state(&saver, &storage, &model, None, &options);
            block_on(again).unwrap();
            assert!(states(&storage).1.is_empty());
        }
    }
}

#[test]
fn what_is_missing_is_all_named_or_left_alone() {
    let storage = fixture(NESTED);
    let (model, optim) = states(&storage);
    let mut wanted = blank(&model);
    for n in 0..20 {
        wanted.insert(format!("new.{n}"), Tensor::zeros(DType::Float32, [2]).unwrap());
    }
    let error = load(&storage, &mut wanted.clone(), None, &OlmoLoadOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!((0..20).all(|n| text.contains(&format!("\"model.new.{n}\""))), "{text}");

    let options = OlmoLoadOptions::default().strict(false);
    let loaded = load(&storage, &mut wanted, None, &options).unwrap();
    assert_eq!(loaded.report.missing.len(), 20);
    assert_eq!(loaded.report.unexpected.len(), 39 + 24, "the optimizer was not requested");
    assert!(wanted.get("tiny").unwrap().same(model.get("tiny").unwrap()));

    let bare = fixture(MODEL_ONLY);
    let (model, _) = states(&bare);
    let (mut model, mut optim) = (blank(&model), blank(&optim));
    let error = load(&bare, &mut model, Some(&mut optim), &OlmoLoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("optim.state.tiny.exp_avg"), "{error}");
}

#[test]
fn other_dtypes_are_cast_only_if_asked() {
    let storage = fixture(MODEL_ONLY);
    let (model, _) = states(&storage);
    let float = |value: &Value| {
        let tensor = value.as_tensor().unwrap();
        Tensor::zeros(DType::Float32, tensor.shape().clone()).unwrap()
    };
    let mut wide: Dict = model.iter().map(|(key, value)| (key.clone(), float(value))).collect();
    let error = load(&storage, &mut wide, None, &OlmoLoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("bfloat16"), "{error}");
    load(&storage, &mut wide, None, &OlmoLoadOptions::default().cast(true)).unwrap();
    let bytes = |state: &StateDict| state.get("tiny").unwrap().as_tensor().unwrap().to_vec();
    let (narrow, wide) = (bytes(&model).unwrap(), bytes(&wide).unwrap());
    let widened: Vec<u8> = narrow.chunks(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
    assert_eq!(wide, widened);
}

/// The state dicts of a model whose `tiny` is called `small`.
fn renamed(model: &StateDict, optim: &StateDict) -> (StateDict, StateDict) {
    fn name(text: &str) -> String {
        match text {
            "tiny" => "small".to_owned(),
            other => other.replace(".tiny.", ".small."),
        }
    }
    fn value(inner: &Value) -> Value {
        match inner.view() {
            Value::Dict(dict) => Value::Dict(
                dict.iter().map(|(k, v)| (name(k.as_str().unwrap()), value(v))).collect(),
            ),
            Value::List(items) => Value::List(items.iter().map(value).collect()),
            Value::Str(text) => name(text).into(),
            other => other.clone(),
        }
    }
    let dict = |dict: &StateDict| value(&Value::Dict(dict.clone())).as_dict().unwrap().clone();
    (dict(model), dict(optim))
}

#[test]
fn key_mapping_renames_model_state_and_groups_in_both_layouts() {
    for file in [NESTED, FLAT] {
        let storage = fixture(file);
        let (model, optim) = states(&storage);
        let (model, optim) = renamed(&model, &optim);
        let (mut new_model, mut new_optim) = (blank(&model), blank(&optim));
        let plain = OlmoLoadOptions::default();
        let error = load(&storage, &mut new_model, Some(&mut new_optim), &plain).unwrap_err();
        assert!(error.to_string().contains("\"model.small\""), "{error}");
        let mapping: KeyMapping = [("small".to_owned(), "tiny".to_owned())].into();
        let options = OlmoLoadOptions::default().key_mapping(mapping);
        load(&storage, &mut new_model, Some(&mut new_optim), &options).unwrap();
        assert!(same_dict(&new_model, &model), "{file}");
        assert!(same_dict(&new_optim, &optim), "{file}: {new_optim:?}");
    }
}

#[test]
fn wrong_mappings_are_reported() {
    let storage = fixture(NESTED);
    let (model, _) = states(&storage);
    let mapping = |pairs: &[(&str, &str)]| -> KeyMapping {
        pairs.iter().map(|(now, then)| ((*now).to_owned(), (*then).to_owned())).collect()
    };
    let options = OlmoLoadOptions::default();
    let absent = options.clone().key_mapping(mapping(&[("tiny", "nope"), ("freqs", "neither")]));
    let error = load(&storage, &mut blank(&model), None, &absent).unwrap_err().to_string();
    assert!(error.contains("nope") && error.contains("neither"), "{error}");
    let lenient = absent.strict(false);
    let loaded = load(&storage, &mut blank(&model), None, &lenient).unwrap();
    assert_eq!(loaded.unmapped, ["tiny", "freqs"]);
    // The name is that of another parameter, which would be lost.
    let taken = options.clone().key_mapping(mapping(&[("freqs", "tiny")]));
    let error = load(&storage, &mut blank(&model), None, &taken).unwrap_err().to_string();
    assert!(error.contains("others in the checkpoint have: \"freqs\""), "{error}");
    // Swapped, and one for two, they are all right.
    let (a, b) = ("blocks.0.norm.weight", "blocks.1.norm.weight");
    let swapped = options.clone().key_mapping(mapping(&[(a, b), (b, a)]));
    let mut new = blank(&model);
    load(&storage, &mut new, None, &swapped).unwrap();
    assert!(new.get(a).unwrap().same(model.get(b).unwrap()));
    assert!(new.get(b).unwrap().same(model.get(a).unwrap()));
    let mut two = StateDict::from([("x", blank(&model).get("tiny").unwrap().clone())]);
    two.insert("y", blank(&model).get("tiny").unwrap().clone());
    let both = options.key_mapping(mapping(&[("x", "tiny"), ("y", "tiny")]));
    load(&storage, &mut two, None, &both).unwrap();
    assert!(two.get("x").unwrap().same(two.get("y").unwrap()));
    assert!(two.get("x").unwrap().same(model.get("tiny").unwrap()));
}

#[test]
fn groups_that_disagree_are_refused() {
    let storage = fixture(FLAT);
    let (model, _) = states(&storage);
    let (_, nested) = states(&fixture(NESTED));
    let mut optim = blank(&nested);
    // One group of parameters that have different weight decay in the checkpoint.
    let Some(Value::List(groups)) = optim.get_mut("param_groups") else { panic!() };
    let second = groups.pop().unwrap();
    let more = second.as_dict().unwrap().get("params").unwrap().clone();
    let Some(Value::Dict(first)) = groups.first_mut() else { panic!() };
    let (Some(Value::List(params)), Value::List(more)) = (first.get_mut("params"), more) else {
        panic!()
    };
    params.extend(more);
    let mut model = blank(&model);
    let error = load(&storage, &mut model, Some(&mut optim), &OlmoLoadOptions::default());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("optim.param_groups.0") && error.contains("weight_decay"), "{error}");
}

/// Two ranks that load different halves of the parameters, one of them with a wrong mapping: both
/// get the same error, and none waits for the other.
#[test]
fn what_one_rank_finds_wrong_ends_the_load_on_all() {
    let storage = fixture(FLAT);
    let (model, _) = states(&storage);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let tasks: Vec<_> = LocalCollective::group(2)
        .into_iter()
        .enumerate()
        .map(|(rank, group)| {
            let (storage, mut model) = (Arc::clone(&storage), blank(&model));
            runtime.spawn(async move {
                let loader = Loader::with_settings(Settings::in_group(Arc::new(group)));
                let then = if rank == 0 { "tiny" } else { "nope" };
                let mapping: KeyMapping = [("tiny".to_owned(), then.to_owned())].into();
                let options = OlmoLoadOptions::default().key_mapping(mapping);
                let reader = reader(&storage);
                let loaded =
                    load_model_and_optim_state(&loader, reader, &mut model, None, &options).await;
                loaded.unwrap_err().to_string()
            })
        })
        .collect();
    for task in tasks {
        let error = runtime.block_on(task).unwrap();
        assert!(error.contains("rank 1") && error.contains("nope"), "{error}");
    }
}

#[test]
fn background_saves_copy_first() {
    let (model, optim) = states(&fixture(NESTED));
    let storage = memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let saver = BackgroundSaver::new(Saver::new());
        let options = OlmoSaveOptions::default().flatten_optimizer_state(true);
        let pending =
            async_save_model_and_optim_state(&saver, &storage, &model, Some(&optim), &options);
        pending.unwrap().wait().await.unwrap();
    });
    assert!(same_dict(&states(&storage).1, &states(&fixture(FLAT)).1));
}

#[test]
fn the_index_is_found_with_a_hint() {
    let index = block_on(get_checkpoint_metadata(&fixture(ANY))).unwrap();
    assert_eq!(index.len(), 35);
    let step = memory();
    put_folder(&*step, &fixtures().join(NESTED).join("ckpt"), "model_and_optim/");
    let error = block_on(get_checkpoint_metadata(&step)).unwrap_err().to_string();
    assert!(error.contains("did you mean") && error.contains("model_and_optim"), "{error}");
    block_on(step.delete(&[key("model_and_optim/.metadata")])).unwrap();
    let error = block_on(get_checkpoint_metadata(&step)).unwrap_err().to_string();
    assert_eq!(error, "it is not a distributed checkpoint folder");
}
