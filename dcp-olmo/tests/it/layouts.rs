//! Nested and flat optimizers, read as each other.

use std::sync::Arc;

use dcp_conformance::CountingStorage;
use dcp_core::{Storage, StorageReader, Value};
use dcp_formats::dcp::DcpWriter;
use dcp_jobs::reshard::reshard;
use dcp_jobs::verify::verify;
use dcp_jobs::{JobOptions, Source};
use dcp_olmo::{OlmoSaveOptions, OptimizerLayout, source_with_layout, with_layout};

use crate::support::{
    ANY, FLAT, MODEL_ONLY, NESTED, assert_same, block_on, everything, fixture, memory, path, reader,
};

#[test]
fn layouts_are_told_by_paths() {
    for (name, layout) in [
        (NESTED, Some(OptimizerLayout::Nested)),
        (FLAT, Some(OptimizerLayout::Flat)),
        (ANY, Some(OptimizerLayout::Nested)),
        (MODEL_ONLY, None),
    ] {
        let metadata = block_on(reader(&fixture(name)).metadata()).unwrap();
        assert_eq!(OptimizerLayout::of(&metadata), layout, "{name}");
    }
}

/// OLMo-core saved the same model and optimizer in both layouts.
#[test]
fn one_layout_is_read_as_the_other() {
    let (nested, flat) = (reader(&fixture(NESTED)), reader(&fixture(FLAT)));
    let as_flat = block_on(with_layout(Arc::clone(&nested), OptimizerLayout::Flat)).unwrap();
    assert_same(&everything(&*as_flat), &everything(&*flat));
    let as_nested = block_on(with_layout(Arc::clone(&flat), OptimizerLayout::Nested)).unwrap();
    assert_same(&everything(&*as_nested), &everything(&*nested));
    let order = |reader: &Arc<dyn StorageReader>| {
        let metadata = block_on(reader.metadata()).unwrap();
        let mut names: Vec<_> = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect();
        // OLMo-core gives the list of parameters last, and so is it made here.
        names.retain(|name| name.starts_with("optim.param_groups"));
        names
    };
    assert_eq!(order(&as_nested), order(&nested));
    assert_eq!(order(&as_flat), order(&flat));
    for layout in [OptimizerLayout::Nested, OptimizerLayout::Flat] {
        let own = if layout == OptimizerLayout::Nested { &nested } else { &flat };
        let same = block_on(with_layout(Arc::clone(own), layout)).unwrap();
        assert!(Arc::ptr_eq(&same, own), "nothing is in between when nothing changes");
    }
}

#[test]
fn what_is_below_a_field_stays_below_it() {
    let any = reader(&fixture(ANY));
    let flat = block_on(with_layout(Arc::clone(&any), OptimizerLayout::Flat)).unwrap();
    let all = everything(&*flat);
    assert_eq!(all["optim.param_groups.shard2d.weight.lr"].0, {
        path(&["optim", "param_groups.shard2d.weight.lr"])
    });
    assert_eq!(all["extra.nested.list.2.a"].0, path(&["extra", "nested", "list", "2", "a"]));
    assert!(!all.contains_key("optim.param_groups.0.params"));
    let again = block_on(with_layout(flat, OptimizerLayout::Nested)).unwrap();
    assert_same(&everything(&*again), &everything(&*any));
}

/// Saving with other values in one parameter's settings makes it a group of its own.
#[test]
fn groups_are_parameters_with_the_same_settings() {
    let storage = memory();
    let tensor = || dcp_core::Tensor::zeros(dcp_core::DType::Float32, [2]).unwrap();
    let model = ["a.w", "b", "c"].map(|name| (name, tensor())).into_iter().collect();
    let optim = [("a.w", 0.1), ("b", 0.0), ("c", 0.1)]
        .into_iter()
        .flat_map(|(name, decay)| {
            [
                (format!("state.{name}.exp_avg"), Value::from(tensor())),
                (format!("param_groups.{name}.weight_decay"), decay.into()),
                (format!("param_groups.{name}.lr"), 0.5.into()),
            ]
        })
        .collect();
    let (saver, options) = (dcp_engine::Saver::new(), OlmoSaveOptions::default());
    let save =
        dcp_olmo::save_model_and_optim_state(&saver, &storage, &model, Some(&optim), &options);
    block_on(save).unwrap();
    let nested = block_on(with_layout(reader(&storage), OptimizerLayout::Nested)).unwrap();
    let all = everything(&*nested);
    let list = |names: &[&str]| Value::List(names.iter().map(|name| Value::from(*name)).collect());
    assert!(all["optim.param_groups.0.params"].1.same(&list(&["a.w", "c"])));
    assert!(all["optim.param_groups.1.params"].1.same(&list(&["b"])));
    assert!(all["optim.param_groups.1.weight_decay"].1.view().same(&0.0.into()));
    assert_eq!(all["optim.state.a.w.exp_avg"].0, path(&["optim", "state", "a.w", "exp_avg"]));
}

#[test]
fn a_job_writes_the_other_layout() {
    let job = JobOptions::default();
    let source = Source::dcp(fixture(NESTED), false);
    let flat = block_on(source_with_layout(&source, OptimizerLayout::Flat, &job)).unwrap();
    let written = memory();
    block_on(reshard(&flat, &DcpWriter::new(Arc::clone(&written)), 3, &job)).unwrap();
    assert_same(&everything(&*reader(&written)), &everything(&*reader(&fixture(FLAT))));
    let verified = block_on(verify(&Source::dcp(written, false), true, &job)).unwrap();
    assert!(verified.ok, "{verified:?}");
}

#[test]
fn no_tensor_is_read_to_tell_groups() {
    for (name, layout) in [(NESTED, OptimizerLayout::Flat), (FLAT, OptimizerLayout::Nested)] {
        let counting = CountingStorage::new(fixture(name));
        let storage: Arc<dyn Storage> = Arc::new(counting.clone());
        let reader = reader(&storage);
        let index = block_on(reader.metadata()).unwrap();
        let tensors: u64 =
            index.iter().filter_map(|(_, entry)| entry.as_tensor()?.byte_len()).sum();
        counting.reset();
        block_on(with_layout(reader, layout)).unwrap();
        let objects = index.iter().filter_map(|(_, entry)| entry.as_object()?.placement);
        let objects: u64 = objects.map(|placement| placement.byte_len).sum();
        let read = counting.counts().bytes_read;
        assert!(read <= objects + 4096 && read < objects + tensors, "{name}: {read}");
    }
}
