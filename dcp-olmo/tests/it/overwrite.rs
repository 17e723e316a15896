//! Exports that replace others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::{Fault, FaultStorage};
use dcp_core::checkpoint::DataSource;
use dcp_core::path::PathItem;
use dcp_core::storage::{OwnThreads, PutMode, StorageExt};
use dcp_core::{CheckpointError, DType, Payload, Storage, StorageErrorKind};
use dcp_formats::torch_save::{TorchSaveContent, TorchSaveItem, TorchSaveOptions, TorchSavePlan};
use dcp_jobs::{JobOptions, Source};
use dcp_olmo::{UnshardFormat, UnshardOptions, UnshardStrategy, unshard_checkpoint};
use serde_json::Value as Json;

use crate::support::{FLAT, MODEL_ONLY, NESTED, block_on, fixture, key, memory};
use crate::unshard::{chunks, contents, names, unshard};

const INDEX: &str = "model/model.safetensors.index.json";

fn per_tensor() -> UnshardOptions {
    UnshardOptions::default().strategy(UnshardStrategy::OneFilePerTensor).save_overwrite(true)
}

fn files(storage: &Arc<dyn Storage>) -> BTreeMap<String, Vec<u8>> {
    let all = names(storage).into_iter();
    all.map(|name| (name.clone(), block_on(storage.read_all(&key(&name))).unwrap().to_vec()))
        .collect()
}

/// The two exports that a test replaces by one another.
fn exports(options: UnshardOptions) -> [BTreeMap<String, Vec<u8>>; 2] {
    let both = [NESTED, MODEL_ONLY].map(|name| {
        let target = memory();
        unshard(name, &target, options).unwrap();
        files(&target)
    });
    assert_ne!(both[0], both[1]);
    both
}

#[test]
fn a_damaged_checkpoint_replaces_nothing() {
    for options in [per_tensor(), UnshardOptions::default().optim(true).save_overwrite(true)] {
        let target = memory();
        unshard(NESTED, &target, options).unwrap();
        let before = files(&target);
        let damaged = fixture(FLAT);
        let source = Source::dcp(Arc::clone(&damaged), false);
        let metadata = block_on(source.metadata()).unwrap();
        let (_, entry) =
            metadata.iter().filter(|(fqn, _)| fqn.starts_with("model.")).nth(1).unwrap();
        let place = entry.as_tensor().unwrap().chunks.iter().next().unwrap().placement.unwrap();
        let file = metadata.file(place.file).unwrap();
        let mut bytes = block_on(damaged.read_all(file)).unwrap().to_vec();
        let start = usize::try_from(place.byte_offset).unwrap();
        bytes[start..start + usize::try_from(place.byte_len).unwrap()].fill(0x10);
        block_on(damaged.put(file, bytes.into(), PutMode::Overwrite)).unwrap();
        let source = Source::dcp(damaged, false);
        let options_of_job = JobOptions::default();
        let result = block_on(unshard_checkpoint(&source, &target, &options, &options_of_job));
        assert!(result.is_err());
        assert!(files(&target) == before, "{:?}", names(&target));
    }
}

/// Wherever it fails or is cut off, what an index names is of one model.
#[test]
fn old_and_new_files_never_look_like_one_model() {
    let options = per_tensor();
    let [old, new] = exports(options);
    for fault in [Fault::Fail(StorageErrorKind::Full), Fault::Tear] {
        for operation in 1.. {
            let place = memory();
            unshard(NESTED, &place, options).unwrap();
            let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, fault);
            let target: Arc<dyn Storage> = Arc::new(faulty.clone());
            let result = unshard(MODEL_ONLY, &target, options);
            let found = files(&place);
            if faulty.operations() < operation {
                result.unwrap();
                assert!(found == new && operation > 20, "{operation}");
                break;
            }
            if let Some(index) = found.get(INDEX) {
                let whole = if *index == old[INDEX] { &old } else { &new };
                let same = |(name, bytes): (&String, &Vec<u8>)| found.get(name) == Some(bytes);
                assert!(whole.iter().all(same), "{fault:?} {operation}");
            }
        }
    }
}

/// Without an index, the files of model and optimizer are never of two checkpoints.
#[test]
fn a_model_never_has_the_optimizer_of_another() {
    let options = UnshardOptions::default().format(UnshardFormat::TorchSave).optim(true);
    let options = options.save_overwrite(true);
    for operation in 1.. {
        let place = memory();
        unshard(NESTED, &place, options).unwrap();
        let old = files(&place);
        let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, Fault::Tear);
        let target: Arc<dyn Storage> = Arc::new(faulty.clone());
        let result = unshard(crate::support::ANY, &target, options);
        if faulty.operations() < operation {
            result.unwrap();
            assert!(operation > 4, "{operation}");
            break;
        }
        let found = files(&place);
        let of_old = |name: &str| found.get(name).map(|bytes| *bytes == old[name]);
        if let (Some(model), Some(optim)) = (of_old("model.pt"), of_old("optim.pt")) {
            assert_eq!(model, optim, "{operation}");
        }
    }
}

#[test]
fn files_that_only_the_old_index_names_are_removed() {
    let target = memory();
    unshard(NESTED, &target, per_tensor()).unwrap();
    let mine = key("model/model-mine.safetensors");
    block_on(target.put(&mine, "mine".into(), PutMode::Create)).unwrap();
    let options = UnshardOptions::default().strategy(chunks(600)).save_overwrite(true);
    let report = unshard(MODEL_ONLY, &target, options).unwrap();
    assert_eq!(report.removed.len(), 14, "{:?}", report.removed);
    let mut expected: Vec<String> = report.files.keys().cloned().collect();
    expected.push(mine.to_string());
    expected.sort();
    assert_eq!(names(&target), expected);
}

#[test]
fn an_old_index_removes_nothing_that_no_export_writes() {
    let target = memory();
    let foreign =
        ["model/mine.safetensors", "model/sub/model-x.safetensors", "chunk-0.safetensors"];
    for name in foreign {
        block_on(target.put(&key(name), "mine".into(), PutMode::Create)).unwrap();
    }
    let index = br#"{"metadata": {"total_size": 4}, "weight_map": {
        "a": "mine.safetensors", "b": "sub/model-x.safetensors", "c": "model-gone.safetensors"}}"#;
    block_on(target.put(&key(INDEX), index.to_vec().into(), PutMode::Create)).unwrap();
    let report = unshard(NESTED, &target, per_tensor()).unwrap();
    assert!(report.removed.is_empty(), "{:?}", report.removed);
    assert!(foreign.iter().all(|name| names(&target).contains(&(*name).to_owned())));
}

#[derive(Debug)]
struct Zeros;

#[async_trait]
impl DataSource for Zeros {
    async fn resolve(&self, _: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
        Ok(vec![0; usize::try_from(range.end - range.start).unwrap()].into())
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

/// A file of torch.save with `{"model": {"a": w, "b": w}}`.
fn tied() -> Source {
    let storage = memory();
    let item = |name: &str, same_as| TorchSaveItem {
        name: format!("model.{name}").into(),
        path: Some([PathItem::Key("model".into()), PathItem::Key(name.into())].into()),
        content: TorchSaveContent::Tensor { dtype: DType::Float32, shape: [4].into(), same_as },
    };
    let items = [item("a", None), item("b", Some(0))];
    let plan = TorchSavePlan::new(&key("tied.pt"), &items, &TorchSaveOptions::default()).unwrap();
    block_on(plan.write(&*storage, Arc::new(Zeros), None)).unwrap();
    Source::torch_save(storage, key("tied.pt"))
}

#[test]
fn an_index_names_every_key_that_the_files_have() {
    for (format, index, file, keys) in [
        (
            UnshardFormat::TorchSave,
            "model/pytorch_model.bin.index.json",
            "model/chunk-00000.pt",
            &["a", "b"][..],
        ),
        (UnshardFormat::Safetensors, INDEX, "model/chunk-00000.safetensors", &["a"]),
    ] {
        let target = memory();
        let options = UnshardOptions::default().format(format).strategy(chunks(1000));
        block_on(unshard_checkpoint(&tied(), &target, &options, &JobOptions::default())).unwrap();
        let json = block_on(target.read_all(&key(index))).unwrap();
        let json: Json = serde_json::from_slice(&json).unwrap();
        let named: Vec<_> = json["weight_map"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(named, keys);
        // Of safetensors the header says that `b` is `a`, which only few loaders know.
        assert_eq!(contents(&target, file).into_keys().collect::<Vec<_>>(), ["a", "b"]);
    }
}
