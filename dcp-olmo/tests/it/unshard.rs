//! `unshard_checkpoint`, beside what OLMo-core's wrote.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::pin::pin;
use std::sync::Arc;

use dcp_collectives::LocalGroup;
use dcp_conformance::{Fault, FaultStorage};
use dcp_core::storage::StorageExt;
use dcp_core::{Storage, StorageErrorKind, Value};
use dcp_jobs::group::JobGroup;
use dcp_jobs::{JobError, JobOptions, Source};
use dcp_olmo::{UnshardFormat, UnshardOptions, UnshardReport, UnshardStrategy, unshard_checkpoint};
use futures_util::{FutureExt, StreamExt};
use serde_json::Value as Json;

use crate::support::{
    ANY, FLAT, MODEL_ONLY, NESTED, block_on, everything, fixture, fixtures, key, memory,
};

const SAFETENSORS: UnshardFormat = UnshardFormat::Safetensors;
const TORCH_SAVE: UnshardFormat = UnshardFormat::TorchSave;

pub(crate) fn chunks(bytes: u64) -> UnshardStrategy {
    UnshardStrategy::Chunks(NonZeroU64::new(bytes).unwrap())
}

pub(crate) fn unshard(
    name: &str,
    target: &Arc<dyn Storage>,
    options: UnshardOptions,
) -> Result<UnshardReport, JobError> {
    let source = Source::dcp(fixture(name), false);
    block_on(unshard_checkpoint(&source, target, &options, &JobOptions::default()))
}

pub(crate) fn names(storage: &Arc<dyn Storage>) -> Vec<String> {
    let all = block_on(storage.list(None).collect::<Vec<_>>());
    let mut names: Vec<_> = all.into_iter().map(|meta| meta.unwrap().key.to_string()).collect();
    names.sort();
    names
}

fn source(storage: &Arc<dyn Storage>, name: &str) -> Source {
    if name.ends_with(".pt") {
        Source::torch_save(Arc::clone(storage), key(name))
    } else {
        Source::safetensors(Arc::clone(storage), key(name))
    }
}

/// Path, joined by a separator that no key has, to dtype, shape and checksum, or to the value.
pub(crate) fn contents(storage: &Arc<dyn Storage>, name: &str) -> BTreeMap<String, Json> {
    let source = source(storage, name);
    let metadata = block_on(source.metadata()).unwrap();
    let values = everything_of(&source);
    let mut all = BTreeMap::new();
    for (fqn, entry) in metadata.iter() {
        let path = entry.path().map(|path| {
            let steps = path.iter().map(|step| match step {
                dcp_core::path::PathItem::Key(key) => key.to_string(),
                dcp_core::path::PathItem::Index(n) => n.to_string(),
            });
            steps.collect::<Vec<_>>().join("\x1f")
        });
        let value = match &values[&**fqn] {
            Value::Tensor(tensor) => serde_json::json!({
                "dtype": tensor.dtype().name(),
                "shape": tensor.shape().to_vec(),
                "bytes": tensor.to_vec().unwrap(),
            }),
            other => plain(other),
        };
        all.insert(path.unwrap_or_else(|| fqn.to_string()), value);
    }
    all
}

fn everything_of(source: &Source) -> BTreeMap<String, Value> {
    let metadata = block_on(source.metadata()).unwrap();
    let names = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect::<Vec<_>>();
    let load = async {
        let values = dcp_olmo::load_keys(Arc::clone(&source.reader), names).await.unwrap();
        values.map(|value| value.unwrap()).collect().await
    };
    block_on(load)
}

fn plain(value: &Value) -> Json {
    match value.view() {
        Value::None => Json::Null,
        Value::Bool(b) => (*b).into(),
        Value::Int(n) => (*n).into(),
        Value::Float(x) => (*x).into(),
        Value::Str(text) => (**text).into(),
        Value::List(items) => items.iter().map(plain).collect(),
        Value::Tuple(items) => {
            serde_json::json!({ "tuple": items.iter().map(plain).collect::<Vec<_>>() })
        }
        other => panic!("{other:?}"),
    }
}

/// What the checkpoint holds below a root, in the same form.
fn stored(name: &str) -> BTreeMap<String, Value> {
    let all = everything(&*crate::support::reader(&fixture(name)));
    all.into_iter().map(|(fqn, (_, value))| (fqn, value)).collect()
}

/// Compares every file with what `expected-unshard.json` says of it: the same files, the same
/// keys in each, the same dtypes and shapes; and the bytes with those of the checkpoint.
fn compare(fixture_name: &str, strategy: &str, format: UnshardFormat, options: UnshardOptions) {
    let text = std::fs::read(fixtures().join(fixture_name).join("expected-unshard.json")).unwrap();
    let expected: Json = serde_json::from_slice(&text).unwrap();
    let ending = if format == TORCH_SAVE { "pt" } else { "safetensors" };
    let expected = expected[format!("{strategy}-{ending}")]["files"].as_object().unwrap().clone();
    assert!(!expected.is_empty());
    let target = memory();
    let report = unshard(fixture_name, &target, options).unwrap();
    let state = stored(fixture_name);
    let data: Vec<_> = names(&target).into_iter().filter(|name| !name.ends_with(".json")).collect();
    assert_eq!(data, expected.keys().cloned().collect::<Vec<_>>(), "{fixture_name} {strategy}");
    for (file, expected) in &expected {
        let root = if file.starts_with("optim") { "optim" } else { "model" };
        let found = contents(&target, file);
        let entries = expected["entries"].as_array().unwrap();
        assert_eq!(found.len(), entries.len(), "{fixture_name} {strategy} {file}");
        for entry in entries {
            let steps = entry["path"].as_array().unwrap();
            let steps: Vec<_> = steps.iter().map(|step| step.as_str().unwrap()).collect();
            let value = &found[&steps.join("\x1f")];
            if entry["dtype"].is_null() {
                assert_eq!(value, &entry["value"], "{file} {steps:?}");
                continue;
            }
            assert_eq!([&value["dtype"], &value["shape"]], [&entry["dtype"], &entry["shape"]]);
            let tensor = state[&format!("{root}.{}", steps.join("."))].as_tensor().unwrap();
            assert_eq!(value["bytes"], serde_json::json!(tensor.to_vec().unwrap()), "{steps:?}");
        }
        assert!(report.files.contains_key(file));
    }
}

#[test]
fn files_keys_and_contents_are_those_of_olmo_core() {
    for format in [SAFETENSORS, TORCH_SAVE] {
        let options = UnshardOptions::default().format(format);
        for (name, optim) in [(NESTED, true), (MODEL_ONLY, false), (ANY, true)] {
            // OLMo-core writes the optimizer into one file of torch.save only.
            compare(name, "one_file", format, options.optim(optim && format == TORCH_SAVE));
            for (strategy, bytes) in
                [("chunks_2000", 2000), ("chunks_1", 1), ("chunks_1e9", 1_000_000_000)]
            {
                compare(name, strategy, format, options.strategy(chunks(bytes)));
            }
            if name != ANY {
                compare(
                    name,
                    "per_tensor",
                    format,
                    options.strategy(UnshardStrategy::OneFilePerTensor),
                );
            }
        }
    }
}

#[test]
fn several_files_have_an_index() {
    for (format, index) in [
        (SAFETENSORS, "model/model.safetensors.index.json"),
        (TORCH_SAVE, "model/pytorch_model.bin.index.json"),
    ] {
        for strategy in [chunks(600), UnshardStrategy::OneFilePerTensor] {
            let target = memory();
            let options = UnshardOptions::default().format(format).strategy(strategy);
            unshard(NESTED, &target, options).unwrap();
            let text = block_on(target.read_all(&key(index))).unwrap();
            let json: Json = serde_json::from_slice(&text).unwrap();
            let weights = json["weight_map"].as_object().unwrap();
            assert_eq!(weights.len(), 14);
            for (fqn, file) in weights {
                let file = format!("model/{}", file.as_str().unwrap());
                assert!(contents(&target, &file).contains_key(fqn), "{file} {fqn}");
            }
            let bytes: u64 = stored(NESTED)
                .iter()
                .filter(|(fqn, _)| fqn.starts_with("model."))
                .map(|(_, value)| value.as_tensor().unwrap().to_vec().unwrap().len() as u64)
                .sum();
            assert_eq!(json["metadata"]["total_size"], bytes);
        }
    }
}

#[test]
fn an_optimizer_in_safetensors_has_its_settings_beside_it() {
    for (name, tensors) in [(NESTED, 39), (FLAT, 39)] {
        let target = memory();
        let report = unshard(name, &target, UnshardOptions::default().optim(true)).unwrap();
        assert_eq!(names(&target), ["model.safetensors", "optim.json", "optim.safetensors"]);
        assert_eq!(report.tensors, 14 + tensors);
        assert!(report.dropped.is_empty() && report.left_out.is_empty());
        let optim = contents(&target, "optim.safetensors");
        assert_eq!(optim.len(), tensors);
        assert!(optim.contains_key("state.tiny.exp_avg"));
        let json = block_on(target.read_all(&key("optim.json"))).unwrap();
        let json: Json = serde_json::from_slice(&json).unwrap();
        let lr = if name == NESTED { "param_groups.0.lr" } else { "param_groups.tiny.lr" };
        assert_eq!(json[lr], 0.001);
        let chunked = UnshardOptions::default().optim(true).strategy(chunks(1000));
        unshard(name, &target, chunked).unwrap();
        assert!(names(&target).contains(&"optim/objects.json".to_owned()));
        assert!(names(&target).contains(&"optim/model.safetensors.index.json".to_owned()));
    }
}

#[test]
fn what_is_not_exported_is_said() {
    let target = memory();
    let report = unshard(ANY, &target, UnshardOptions::default()).unwrap();
    assert_eq!(report.tensors, 20);
    let dropped: Vec<_> = report.dropped.iter().map(|fqn| &**fqn).collect();
    assert_eq!(dropped.len(), 15);
    assert!(dropped.contains(&"extra.tuple") && dropped.contains(&"optim.param_groups.0.lr"));
    // fp8 has a name in safetensors.
    assert!(report.raw.is_empty(), "{:?}", report.raw);
    let bare = unshard(MODEL_ONLY, &memory(), UnshardOptions::default().optim(true));
    let error = bare.unwrap_err().to_string();
    assert!(error.contains("saved without its optimizer"), "{error}");
}

#[test]
fn keys_that_share_a_file_name_are_refused_before_anything_is_written() {
    let target = memory();
    let options = UnshardOptions::default().strategy(UnshardStrategy::OneFilePerTensor);
    let error = unshard(ANY, &target, options).unwrap_err().to_string();
    assert!(error.contains("\"with-dash.x\" and \"with.dash-x\""), "{error}");
    assert!(names(&target).is_empty());
}

#[test]
fn files_that_are_there_are_refused_before_anything_is_written() {
    for (there, strategy) in [
        ("model.safetensors", UnshardStrategy::OneFile),
        ("optim.json", UnshardStrategy::OneFile),
        ("model/chunk-00002.safetensors", chunks(1000)),
        ("optim/model.safetensors.index.json", chunks(1000)),
        ("model/model-tiny.safetensors", UnshardStrategy::OneFilePerTensor),
    ] {
        let target = memory();
        let there = key(there);
        block_on(target.put(&there, "old".into(), dcp_core::storage::PutMode::Create)).unwrap();
        let options = UnshardOptions::default().optim(true).strategy(strategy);
        let error = unshard(NESTED, &target, options).unwrap_err();
        assert!(matches!(&error, JobError::TargetExists { target } if *target == there.as_str()));
        assert_eq!(names(&target), [there.as_str()]);
        unshard(NESTED, &target, options.save_overwrite(true)).unwrap();
        assert_ne!(block_on(target.read_all(&there)).unwrap(), "old");
    }
}

#[test]
fn a_failure_leaves_nothing() {
    let fault = Fault::Fail(StorageErrorKind::Full);
    for operation in 1.. {
        let place = memory();
        let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, fault);
        let target: Arc<dyn Storage> = Arc::new(faulty.clone());
        let result = unshard(NESTED, &target, UnshardOptions::default().strategy(chunks(1000)));
        if faulty.operations() < operation {
            result.unwrap();
            assert!(operation > 10, "{operation}");
            break;
        }
        let left = names(&place);
        // The mark of an unfinished export is removed at the second try.
        if result.is_ok() {
            assert!(left.iter().any(|name| name.ends_with("index.json")), "{operation}: {left:?}");
            assert!(
                !left.iter().any(|name| name.ends_with(".unfinished")),
                "{operation}: {left:?}"
            );
            continue;
        }
        assert!(left.is_empty(), "{operation}: {left:?}");
    }
}

#[test]
fn a_dry_run_tells_what_would_be_written() {
    for format in [SAFETENSORS, TORCH_SAVE] {
        let options = UnshardOptions::default().format(format).optim(true).strategy(chunks(3000));
        let (dry_target, target) = (memory(), memory());
        let source = Source::dcp(fixture(FLAT), false);
        let dry = JobOptions::default().with_dry_run(true);
        let plan = block_on(unshard_checkpoint(&source, &dry_target, &options, &dry)).unwrap();
        assert!(names(&dry_target).is_empty() && plan.dry_run);
        let done = unshard(FLAT, &target, options).unwrap();
        assert_eq!((plan.files, plan.bytes, plan.tensors), (done.files, done.bytes, done.tensors));
    }
}

#[test]
fn a_file_alone_is_written_when_all_ranks_have_looked_at_the_target() {
    let (source, target) = (Source::dcp(fixture(NESTED), false), memory());
    let jobs = LocalGroup::new(2).build().into_iter().map(|collective| {
        let group = JobGroup::start(Arc::new(collective)).unwrap();
        JobOptions::default().with_group(group)
    });
    let jobs: Vec<_> = jobs.collect();
    let options = UnshardOptions::default();
    block_on(async {
        let mut first = pin!(unshard_checkpoint(&source, &target, &options, &jobs[0]));
        // It cannot end before rank 1 has begun, however long that takes.
        for _ in 0..1000 {
            assert!(first.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        assert!(target.list(None).next().await.is_none());
        let second = unshard_checkpoint(&source, &target, &options, &jobs[1]);
        let (first, second) = tokio::join!(first, second);
        assert_eq!(first.unwrap().files.len(), 1);
        second.unwrap();
    });
}
