//! Fixtures in memory, and state dicts made from them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use dcp_core::path::{PathItem, StatePath};
use dcp_core::value::Dict;
use dcp_core::{StateDict, Storage, StorageReader, Value};
use dcp_engine::{LoadMode, Loader, Settings};
use dcp_formats::dcp::DcpReader;
use dcp_planner::{FlattenRule, KeyFilter, Template};
pub(crate) use dcp_testing::{block_on, key, memory, put_folder};

pub(crate) const NESTED: &str = "fsdp2-2rank-nested";
pub(crate) const FLAT: &str = "fsdp2-2rank-flat";
pub(crate) const MODEL_ONLY: &str = "fsdp2-2rank-bf16-modelonly";
pub(crate) const ANY: &str = "any-4rank";

pub(crate) fn fixtures() -> PathBuf {
    dcp_testing::fixture("olmo")
}

/// The checkpoint of a fixture.
pub(crate) fn fixture(name: &str) -> Arc<dyn Storage> {
    let storage = memory();
    put_folder(&*storage, &fixtures().join(name).join("ckpt"), "");
    storage
}

pub(crate) fn reader(storage: &Arc<dyn Storage>) -> Arc<dyn StorageReader> {
    Arc::new(DcpReader::new(Arc::clone(storage)))
}

/// Everything that a reader shows: path, and value.
pub(crate) fn everything(reader: &dyn StorageReader) -> BTreeMap<String, (StatePath, Value)> {
    block_on(async {
        let metadata = reader.metadata().await.unwrap();
        let template = Template::whole(&metadata, &KeyFilter::all()).unwrap();
        let mut state: Dict = template
            .leaves()
            .iter()
            .map(|leaf| (Arc::clone(&leaf.fqn), leaf.value.clone()))
            .collect();
        let loader = Loader::with_settings(
            Settings::new().load_mode(LoadMode::Exact).flatten_rule(FlattenRule::TopLevel),
        );
        loader.load(&mut state, reader).await.unwrap();
        let paths = template.leaves().iter().map(|leaf| leaf.path.clone().unwrap());
        let values = state.into_iter().map(|(fqn, value)| (fqn.as_str().unwrap().into(), value));
        values.zip(paths).map(|((fqn, value), path)| (fqn, (path, value))).collect()
    })
}

#[track_caller]
pub(crate) fn assert_same(
    found: &BTreeMap<String, (StatePath, Value)>,
    expected: &BTreeMap<String, (StatePath, Value)>,
) {
    let names = |all: &BTreeMap<String, _>| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    for (fqn, (path, value)) in expected {
        let (found_path, found) = &found[fqn];
        assert_eq!(found_path, path, "{fqn}");
        assert!(found.view().same(value.view()), "{fqn}: {found:?}, expected {value:?}");
    }
}

/// The model and the optimizer of a checkpoint, as they would be in a trainer.
pub(crate) fn states(storage: &Arc<dyn Storage>) -> (StateDict, StateDict) {
    let all = everything(&*reader(storage));
    let state = dcp_planner::unflatten(all.into_values()).unwrap();
    let part = |name: &str| state.get(name).and_then(Value::as_dict).cloned().unwrap_or_default();
    (part("model"), part("optim"))
}

/// The same with zeros in tensors of their own and nothing else known, to load into.
pub(crate) fn blank(state: &StateDict) -> StateDict {
    fn value(old: &Value, keep: bool) -> Value {
        match old {
            Value::Tensor(tensor) => {
                dcp_core::Tensor::zeros(tensor.dtype(), tensor.shape().clone()).unwrap().into()
            }
            Value::Dict(dict) => Value::Dict(
                dict.iter()
                    .map(|(key, inner)| (key.clone(), value(inner, key.as_str() == Some("params"))))
                    .collect(),
            ),
            Value::List(items) if !keep => {
                Value::List(items.iter().map(|item| value(item, false)).collect())
            }
            kept if keep => kept.clone(),
            _ => Value::None,
        }
    }
    state.iter().map(|(key, inner)| (key.clone(), value(inner, false))).collect()
}

pub(crate) fn same_dict(a: &StateDict, b: &StateDict) -> bool {
    viewed(&Value::Dict(a.clone())).same(&viewed(&Value::Dict(b.clone())))
}

/// A value without its encoded form, dicts in the order of their keys.
fn viewed(value: &Value) -> Value {
    match value.view() {
        Value::Dict(dict) => {
            let entries = dict.iter().map(|(key, inner)| (key.as_str().unwrap(), viewed(inner)));
            Value::Dict(entries.collect::<BTreeMap<_, _>>().into_iter().collect())
        }
        Value::List(items) => Value::List(items.iter().map(viewed).collect()),
        other => other.clone(),
    }
}

pub(crate) fn path(steps: &[&str]) -> StatePath {
    steps
        .iter()
        .map(|step| match step.parse() {
            Ok(index) => PathItem::Index(index),
            Err(_) => PathItem::Key((*step).into()),
        })
        .collect()
}
