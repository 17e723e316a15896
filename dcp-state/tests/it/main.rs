//! State dicts of a toy framework's models and optimizers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod group;
mod toy;

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, HostMemory, StateDict, Stateful, Tensor, Value};
use dcp_state::{
    HiddenModule, ModelEntry, Optimizer, ParamGroup, ParamId, StateDictError, StateDictOptions,
    TrainingState, fqn_of, get_model_state_dict, get_optimizer_state_dict, get_state_dict,
    set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};
use proptest::prelude::*;
use toy::{ToyAdam, ToyModel, counting, now};

/// A wrapped model with a tied and a frozen parameter.
fn wrapped(start: u64) -> ToyModel {
    let [first, frozen] = [counting(&[2, 3], start), counting(&[3], start + 10)];
    let tied = ParamId(7);
    ToyModel {
        entries: vec![
            ModelEntry::parameter("module._orig_mod.embed.weight", tied, first.clone()),
            ModelEntry::parameter("module._orig_mod.norm", ParamId(8), frozen).with_frozen(true),
            ModelEntry::buffer("module._orig_mod.module.mean", counting(&[1], start + 20)),
            ModelEntry::parameter("module._orig_mod.head.weight", tied, first),
            ModelEntry::extra_state("module._orig_mod._extra_state", "fp8"),
        ],
        hidden: vec![HiddenModule::data_parallel("")],
        loaded: Vec::new(),
    }
}

fn keys(dict: &Dict) -> Vec<&str> {
    dict.iter().map(|(key, _)| key.as_str().unwrap()).collect()
}

fn error<T: std::fmt::Debug>(result: Result<T, CheckpointError>) -> StateDictError {
    match result.unwrap_err() {
        CheckpointError::Plugin(error) => error.downcast_ref::<StateDictError>().unwrap().clone(),
        other => panic!("{other}"),
    }
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_tensor().unwrap().to_vec_of().unwrap()
}

#[test]
fn fqns_have_no_components_of_wrappers() {
    let ddp = [HiddenModule::data_parallel("")];
    for (name, fqn) in [
        ("weight", "weight"),
        ("module.weight", "weight"),
        ("module.module.weight", "module.weight"),
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("module.a._fsdp_wrapped_module.b", "a.b"),
        ("module.a._checkpoint_wrapped_module._orig_mod.module.b", "a.module.b"),
        ("module", "module"),
        ("a._orig_mod", "a._orig_mod"),
        ("", ""),
    ] {
        assert_eq!(fqn_of(name, &ddp), fqn);
    }
    assert_eq!(fqn_of("module.weight", &[]), "module.weight");
    let fusion = [HiddenModule::new("_orig_mod.layers.3", "layer")];
    assert_eq!(fqn_of("_orig_mod.layers.3.layer.w", &fusion), "layers.3.w");
    assert_eq!(fqn_of("_orig_mod.layers.4.layer.w", &fusion), "layers.4.layer.w");
}

proptest! {
    #[test]
    fn a_name_without_wrappers_is_its_fqn(name in "[a-z0-9_.]{0,24}") {
        prop_assume!(!name.contains("_orig_mod"));
        prop_assert_eq!(fqn_of(&name, &[]), name);
    }

    #[test]
    fn wrappers_anywhere_leave_no_trace(parts in prop::collection::vec("[a-z]{1,4}", 1..6), at in 0_usize..6) {
        let mut wrapped = parts.clone();
        wrapped.insert(at.min(parts.len() - 1), "_orig_mod".to_owned());
        prop_assert_eq!(fqn_of(&wrapped.join("."), &[]), parts.join("."));
    }
}

#[test]
fn a_model_has_its_values_by_fqn() {
    let model = wrapped(0);
    let options = StateDictOptions::new();
    let state = now(get_model_state_dict(&model, &options)).unwrap();
    let all = ["embed.weight", "norm", "module.mean", "head.weight", "_extra_state"];
    assert_eq!(keys(&state), all);
    assert_eq!(floats(state.get("norm").unwrap()), [10.0, 11.0, 12.0]);

    let trained = now(get_model_state_dict(&model, &options.clone().ignore_frozen_params(true)));
    assert_eq!(keys(&trained.unwrap()), [all[0], all[2], all[3], all[4]]);
    let only = options.submodules(["embed"]).keep_submodule_prefixes(false);
    assert_eq!(keys(&now(get_model_state_dict(&model, &only)).unwrap()), ["weight"]);
    let both = StateDictOptions::new().submodules(["embed", "head"]);
    let kept = now(get_model_state_dict(&model, &both)).unwrap();
    assert_eq!(keys(&kept), ["embed.weight", "head.weight"]);
    let clash = now(get_model_state_dict(&model, &both.keep_submodule_prefixes(false)));
    assert!(matches!(error(clash), StateDictError::DuplicateFqn { fqn, .. } if fqn == "weight"));
}

#[test]
fn names_that_mean_nothing_are_refused() {
    let of = |names: &[&str]| {
        let entry =
            |(id, name): (u64, &&str)| ModelEntry::parameter(*name, ParamId(id), counting(&[1], 0));
        let entries = (0..).zip(names).map(entry).collect();
        let model = ToyModel { entries, ..ToyModel::default() };
        error(now(get_model_state_dict(&model, &StateDictOptions::new())))
    };
    let clash = of(&["a._orig_mod.b", "a.b"]);
    assert!(clash.to_string().contains("\"a.b\""), "{clash}");
    assert!(matches!(of(&["a._flat_param"]), StateDictError::FlatParameter { .. }));
    let mut stray = ToyAdam { groups: vec![ParamGroup::new([ParamId(3)])], ..ToyAdam::default() };
    let options = StateDictOptions::new();
    let unknown = now(get_optimizer_state_dict(&wrapped(0), &mut [&mut stray], &options));
    assert_eq!(error(unknown), StateDictError::UnknownParameter { id: ParamId(3) });
    let options = StateDictOptions::new().broadcast_from_rank0(true);
    let alone = now(get_model_state_dict(&wrapped(0), &options));
    assert!(matches!(error(alone), StateDictError::InvalidOptions(_)));
}

#[test]
fn an_optimizer_has_its_state_by_fqn_in_both_layouts() {
    let model = wrapped(0);
    let mut adam = ToyAdam::of(&model);
    let options = StateDictOptions::new();
    let state = now(get_optimizer_state_dict(&model, &mut [&mut adam], &options)).unwrap();
    assert_eq!(keys(&state), ["state", "param_groups"]);
    // The state was created. Of a tied parameter, the first name counts; a frozen one has none.
    assert_eq!(keys(state.get("state").unwrap().as_dict().unwrap()), ["embed.weight"]);
    let Some(Value::List(groups)) = state.get("param_groups") else { panic!("{state:?}") };
    let group = groups[0].as_dict().unwrap();
    assert_eq!(keys(group), ["lr", "betas", "params"]);
    assert!(group.get("params").unwrap().same(&vec!["embed.weight", "norm"].into()));

    let flat = options.flatten_optimizer_state_dict(true);
    let flat = now(get_optimizer_state_dict(&model, &mut [&mut adam], &flat)).unwrap();
    assert_eq!(
        keys(&flat),
        [
            "state.embed.weight.step",
            "state.embed.weight.exp_avg",
            "param_groups.embed.weight.lr",
            "param_groups.embed.weight.betas",
            "param_groups.norm.lr",
            "param_groups.norm.betas",
        ]
    );
    adam.state.get_mut(&ParamId(7)).unwrap().insert("note", "text");
    let flat = StateDictOptions::new().flatten_optimizer_state_dict(true);
    let refused = error(now(get_optimizer_state_dict(&model, &mut [&mut adam], &flat)));
    assert!(refused.to_string().contains("state.embed.weight.note"), "{refused}");
}

/// Any number of parameters, in other groups when it is set.
#[test]
fn state_moves_between_groupings_in_both_layouts() {
    let params = 5_u64;
    let model = |start| {
        let entry =
            |n: u64| ModelEntry::parameter(format!("l.{n}"), ParamId(n), counting(&[n + 1], start));
        ToyModel { entries: (0..params).map(entry).collect(), ..ToyModel::default() }
    };
    let grouped = |model: &ToyModel, groups: &[&[u64]]| {
        let group =
            |ids: &&[u64]| ParamGroup::new(ids.iter().map(|id| ParamId(*id))).with("lr", 0.5);
        ToyAdam { groups: groups.iter().map(group).collect(), ..ToyAdam::of(model) }
    };
    for flat in [false, true] {
        let old = model(0);
        let (mut first, mut second) = (grouped(&old, &[&[0, 3]]), grouped(&old, &[&[1], &[2, 4]]));
        for adam in [&mut first, &mut second] {
            adam.trained.retain(|id, _| adam.groups.iter().any(|group| group.params.contains(id)));
            adam.init_state().unwrap();
            for (id, state) in &mut adam.state {
                let shape = [id.0 + 1];
                let nested = Dict::from([("0", counting(&shape, 300 + id.0))]);
                state.insert("exp_avg", counting(&shape, 100 * id.0));
                state.insert("factors", nested);
            }
            for group in &mut adam.groups {
                group.options.insert("lr", 0.25);
            }
        }
        let options = StateDictOptions::new().flatten_optimizer_state_dict(flat);
        let mut optimizers: [&mut (dyn Optimizer + Send); 2] = [&mut first, &mut second];
        let saved = now(get_optimizer_state_dict(&old, &mut optimizers, &options)).unwrap();

        let new = model(50);
        let mut one = grouped(&new, &[&[4, 2, 1], &[3, 0]]);
        // The layout is recognized, whatever the options say.
        let options = StateDictOptions::new();
        now(set_optimizer_state_dict(&new, &mut [&mut one], saved, &options)).unwrap();
        for (id, state) in &one.state {
            let moments = floats(state.get("exp_avg").unwrap());
            assert_eq!(moments[0], 100.0 * id.0 as f32, "{flat} {id}");
            let factor = state.at("factors.0").unwrap();
            assert_eq!(floats(factor)[0], 300.0 + id.0 as f32, "{flat} {id}");
        }
        for group in &one.groups {
            assert!(group.options.get("lr").unwrap().same(&0.25.into()));
        }
    }
}

#[test]
fn numbers_of_parameters_become_fqns() {
    let model = wrapped(0);
    let mut adam = ToyAdam::of(&model);
    let state = Dict::from([("exp_avg", counting(&[2, 3], 70))]);
    let group = Dict::from([("lr", Value::from(3.0)), ("params", vec![0, 1].into())]);
    for key in [Value::Int(0), "0".into()] {
        let states = Dict::from([(key, state.clone())]);
        let groups = Value::List(vec![group.clone().into()]);
        let saved = Dict::from([("state", Value::from(states)), ("param_groups", groups)]);
        adam.state.clear();
        let options = StateDictOptions::new();
        now(set_optimizer_state_dict(&model, &mut [&mut adam], saved, &options)).unwrap();
        assert_eq!(floats(adam.state[&ParamId(7)].get("exp_avg").unwrap())[0], 70.0);
        assert!(adam.groups[0].options.get("lr").unwrap().same(&3.0.into()));
    }
}

#[test]
fn what_is_set_is_in_the_model_s_memory() {
    let (old, mut new) = (wrapped(0), wrapped(500));
    let (mut from, mut to) = (ToyAdam::of(&old), ToyAdam::of(&new));
    let options = StateDictOptions::new();
    let (model, optimizer) = now(get_state_dict(&old, &mut [&mut from], &options)).unwrap();
    let keys = now(set_state_dict(&mut new, &mut [&mut to], model, optimizer, &options));
    assert!(keys.unwrap().is_empty());
    assert_eq!(floats(&new.entries[0].value), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let names: Vec<_> = new.loaded.iter().map(|(name, _)| &**name).collect();
    let own: Vec<_> = new.entries.iter().map(|entry| &*entry.name).collect();
    assert_eq!(names, own);
    // Memory that cannot be written is replaced.
    let bytes = counting(&[2, 3], 900).to_vec().unwrap();
    let fixed = HostMemory::from_bytes(bytes.into());
    let fixed = Tensor::replicated(dcp_core::DType::Float32, [2, 3], fixed).unwrap();
    new.entries.truncate(1);
    new.entries[0].value = fixed.into();
    let given = StateDict::from([("embed.weight", counting(&[2, 3], 40))]);
    now(set_model_state_dict(&mut new, given, &options)).unwrap();
    assert_eq!(floats(&new.loaded[0].1)[0], 40.0);
    assert_eq!(floats(&new.entries[0].value)[0], 900.0);
}

#[test]
fn keys_that_do_not_fit_are_listed() {
    let mut model = wrapped(0);
    let options = StateDictOptions::new();
    let mut state = now(get_model_state_dict(&model, &options)).unwrap();
    let norm = state.remove("norm").unwrap();
    let lenient = options.clone().ignore_frozen_params(true);
    assert!(now(set_model_state_dict(&mut model, state.clone(), &lenient)).unwrap().is_empty());
    state.insert("stranger", norm);
    let refused = error(now(set_model_state_dict(&mut model, state.clone(), &options)));
    let StateDictError::IncompatibleKeys(keys) = &refused else { panic!("{refused}") };
    assert_eq!(
        (&*keys.missing, &*keys.unexpected),
        (&["norm".into()][..], &["stranger".into()][..])
    );
    let allowed = now(set_model_state_dict(&mut model, state.clone(), &options.strict(false)));
    assert_eq!(allowed.unwrap(), *keys);

    let options = StateDictOptions::new();
    for wrong in [
        counting(&[3, 2], 0).into(),
        Tensor::from_slice(&[0_i32; 6], [2, 3]).unwrap().into(),
        Value::from(1),
    ] {
        let state = StateDict::from([("embed.weight", wrong)]);
        let lenient = StateDictOptions::new().strict(false);
        let unfit = error(now(set_model_state_dict(&mut model, state, &lenient)));
        assert!(matches!(unfit, StateDictError::Unfit { .. }), "{unfit}");
    }
    let mut adam = ToyAdam::of(&model);
    let empty = Value::List(vec![Dict::from([("params", Value::from(vec!["norm"]))]).into()]);
    let state = Dict::from([("param_groups", empty)]);
    let set = |adam: &mut ToyAdam, state, options: &StateDictOptions| {
        now(set_optimizer_state_dict(&model, &mut [adam], state, options))
    };
    let missing = error(set(&mut adam, state.clone(), &options)).to_string();
    assert!(missing.contains("state.embed.weight"), "{missing}");
    let lenient = options.strict(false);
    set(&mut adam, state, &lenient).unwrap();
}

#[test]
fn options_of_one_group_are_equal() {
    let model = wrapped(0);
    let mut adam = ToyAdam::of(&model);
    let group = |fqn: &str, lr: f64| {
        Value::from(Dict::from([("lr", Value::from(lr)), ("params", vec![fqn].into())]))
    };
    let groups = Value::List(vec![group("head.weight", 0.1), group("norm", 0.2)]);
    let state = Dict::from([("exp_avg", counting(&[2, 3], 0))]);
    let state = Value::from(Dict::from([("head.weight", state)]));
    let saved = Dict::from([("state", state), ("param_groups", groups)]);
    let options = StateDictOptions::new();
    let set = |adam: &mut ToyAdam, options: &StateDictOptions| {
        now(set_optimizer_state_dict(&model, &mut [adam], saved.clone(), options))
    };
    let differ = error(set(&mut adam, &options));
    assert!(matches!(&differ, StateDictError::GroupsDiffer { option, .. } if option == "lr"));
    let lenient = options.strict(false);
    set(&mut adam, &lenient).unwrap();
    assert!(adam.groups[0].options.get("lr").unwrap().same(&0.1.into()));
}

#[test]
fn a_training_state_is_stateful() {
    let (mut old, mut new) = (wrapped(0), wrapped(500));
    let (mut from, mut to) = (ToyAdam::of(&old), ToyAdam::of(&new));
    let saved = TrainingState::new(&mut old, vec![&mut from]).unwrap().state_dict().unwrap();
    let mut target = TrainingState::new(&mut new, vec![&mut to]).unwrap();
    assert_eq!(keys(&target.state_dict().unwrap()), ["model", "optimizer"]);
    target.load_state_dict(saved).unwrap();
    assert_eq!(floats(&new.entries[0].value)[5], 5.0);
    assert_eq!(new.loaded.len(), 5);
    let target = TrainingState::new(&mut new, vec![&mut to]).unwrap();
    assert!(target.options(StateDictOptions::new().full_state_dict(true)).is_err());
}
