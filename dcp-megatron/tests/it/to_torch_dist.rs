//! Resharded checkpoints hold the same values.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::error::error_chain;
use dcp_core::metadata::Entry;
use dcp_core::{DType, Key, Storage, Value};
use dcp_formats::torch_save::{
    TorchSaveContent, TorchSaveItem, TorchSaveOptions, TorchSaveReader, write,
};
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::disk::CommonPlace;
use dcp_megatron::jobs::to_torch_dist;
use dcp_megatron::partition::ParallelLayout;
use dcp_megatron::{
    MegatronCheckpoint, MegatronError, MegatronForm, MegatronOpenOptions, MegatronWriter,
    StoredFormat,
};

use crate::expected;
use crate::fixtures::{OPENED, objects, tensors};
use crate::support::{block_on, expected_json, get, names, put, stored};

fn open(storage: &Arc<dyn Storage>) -> MegatronCheckpoint {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default())).unwrap()
}

/// The layout that a fixture was saved with.
fn layout_of(name: &str, checkpoint: &MegatronCheckpoint) -> ParallelLayout {
    let args = checkpoint.args();
    let size = |size: Option<u64>| u32::try_from(size.unwrap_or(1)).unwrap();
    let tp = size(args.as_ref().and_then(|args| args.tensor_model_parallel_size()));
    let pp = size(args.as_ref().and_then(|args| args.pipeline_model_parallel_size()));
    let dp = size(args.as_ref().and_then(|args| args.data_parallel_size()));
    let ep = if name.contains("moe") { 2 } else { 1 };
    ParallelLayout::new(tp, pp).with_ep(ep).with_dp(dp.max(ep))
}

fn convert(
    source: &Source,
    form: MegatronForm,
    layout: ParallelLayout,
) -> Result<Arc<dyn Storage>, MegatronError> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&storage)).form(form);
    block_on(to_torch_dist(source, writer, layout, &JobOptions::default()))?;
    Ok(storage)
}

/// Arguments in the expected contents that `common.pt` holds as plain values.
fn with_plain_args(common: &mut serde_json::Value) {
    let Some(args) = common.pointer_mut("/args/__namespace__") else { return };
    for (_, argument) in args.as_object_mut().unwrap() {
        if argument.get("__enum__").is_some() {
            *argument = argument["value"].clone();
        }
    }
}

/// Whether a checkpoint holds what the fixture should.
fn equals(name: &str, storage: &Arc<dyn Storage>) {
    let checkpoint = open(storage);
    assert_eq!(checkpoint.warnings(), [""; 0], "{name}");
    tensors(name, checkpoint.source());
    let mut common = expected_json(name)["common"].clone();
    if *checkpoint.format() == (StoredFormat::TorchDist { common: CommonPlace::File }) {
        with_plain_args(&mut common);
    }
    objects(name, &common, checkpoint.source());
    expected::dict(checkpoint.common(), &common, &format!("{name}, common"));
    let raw = checkpoint.raw().unwrap();
    let report = block_on(dcp_jobs::verify::verify(raw, true, &JobOptions::default())).unwrap();
    assert!(report.problems.is_empty(), "{name}: {:?}", report.problems);
}

#[test]
fn every_fixture_goes_through_both_forms() {
    for (name, _) in OPENED {
        let checkpoint = open(&stored(name));
        let layout = layout_of(name, &checkpoint);
        let inside = convert(checkpoint.source(), MegatronForm::CommonInside, layout);
        let inside = inside.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(
            *open(&inside).format(),
            StoredFormat::TorchDist { common: CommonPlace::Inside },
            "{name}"
        );
        equals(name, &inside);
        let in_file = convert(open(&inside).source(), MegatronForm::CommonFile, layout).unwrap();
        equals(name, &in_file);
    }
}

/// Megatron-Core 0.16.1 fails on the common.pt of a run of 0.19 that keeps the enumerations of 0.19.
#[test]
fn arguments_in_a_common_file_have_no_class_that_an_older_version_lacks() {
    let source = open(&stored("run_torch_dist_v019"));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&storage));
    let written = block_on(to_torch_dist(
        source.source(),
        writer,
        ParallelLayout::new(1, 1),
        &JobOptions::default(),
    ))
    .unwrap();
    let replaced: Vec<_> = written.replaced.iter().map(|object| &*object.path).collect();
    assert_eq!(
        replaced,
        ["args.attention_backend", "args.inference_cuda_graph_scope", "args.exit_signal"]
    );
    assert!(written.replaced.iter().all(|object| !object.left_out));
    let args = open(&storage).args().unwrap();
    assert_eq!(args.count("exit_signal"), Some(15));
    assert_eq!(args.count("attention_backend"), Some(5));
    assert_eq!(args.dict().len(), source.args().unwrap().dict().len());
    let file = block_on(dcp_core::storage::StorageExt::read_all(
        &*storage,
        &Key::new("common.pt").unwrap(),
    ))
    .unwrap();
    let text = String::from_utf8_lossy(&file);
    for class in ["AttnBackend", "InferenceCudaGraphScope", "Signals"] {
        assert!(!text.contains(class), "{class}");
    }

    // Written once more there is nothing to replace, and the file is the same.
    let again =
        convert(open(&storage).source(), MegatronForm::CommonFile, ParallelLayout::new(1, 1));
    let again = again.unwrap();
    let key = Key::new("common.pt").unwrap();
    assert_eq!(block_on(dcp_core::storage::StorageExt::read_all(&*again, &key)).unwrap(), file);
}

/// The boxes of all tensors with the rank that wrote them, and the ranks of all objects.
fn grid(source: &Source, only: impl Fn(&str) -> bool, with_ranks: bool) -> BTreeSet<String> {
    let metadata = block_on(source.metadata()).unwrap();
    let rank = |placement: Option<dcp_core::metadata::Placement>| {
        let name = metadata.file(placement.unwrap().file).unwrap().to_string();
        let name = name.split_once("__").unwrap().1.split('_').next().unwrap().to_owned();
        if with_ranks { name } else { String::new() }
    };
    let mut found = BTreeSet::new();
    for (fqn, entry) in metadata.iter().filter(|(fqn, _)| only(fqn)) {
        match entry {
            Entry::Tensor(tensor) => {
                for chunk in tensor.chunks.iter() {
                    let region = chunk.region().unwrap();
                    found.insert(format!("{fqn} {region} {}", rank(chunk.placement)));
                }
            }
            Entry::Object(object) => {
                found.insert(format!("{fqn} {}", rank(object.placement)));
            }
            _ => unreachable!(),
        }
    }
    found
}

/// The rules cut every tensor as Megatron-Core did, and give it to the same rank.
#[test]
fn trap_04_the_grids_of_real_models_are_those_of_the_rules() {
    let everything = |_: &str| true;
    let parameters = |fqn: &str| !fqn.starts_with("optimizer.") && !fqn.starts_with("chained_");
    for (name, only, with_ranks) in [
        ("gpt_tp2pp2_swiglu", &everything as &dyn Fn(&str) -> bool, true),
        ("gpt_moe_ep2_swiglu", &everything, true),
        ("gpt_float16_optimizer", &everything, true),
        ("gpt_async", &everything, true),
        ("gpt_separation_hint", &parameters, true),
        ("gpt_dp2_dp_reshardable", &everything, true),
        ("gpt_moe_chained_dp_reshardable", &parameters, true),
        ("gpt_dp_zero_gather_scatter", &everything, true),
        // A fully parallel save spreads the parts over data-parallel ranks.
        ("gpt_tp2dp2_fully_reshardable", &everything, false),
        ("gpt_fully_reshardable_multibucket_CORRUPT", &everything, false),
        ("head020_fully_reshardable_multibucket", &everything, false),
        ("run_torch_dist_dp2", &parameters, false),
        ("v015_gpt_tp2dp2_swiglu_fs_model_space", &parameters, true),
        ("v015_moe_singleton", &everything, true),
    ] {
        let original = open(&stored(name));
        let layout = layout_of(name, &original);
        let form = match original.format() {
            StoredFormat::TorchDist { common: CommonPlace::Inside } => MegatronForm::CommonInside,
            _ => MegatronForm::CommonFile,
        };
        let again = convert(original.source(), form, layout).unwrap();
        let found = grid(open(&again).raw().unwrap(), only, with_ranks);
        let expected = grid(original.raw().unwrap(), only, with_ranks);
        assert!(!found.is_empty());
        let difference: Vec<_> = found.symmetric_difference(&expected).collect();
        assert!(difference.is_empty(), "{name}: {difference:#?}");
    }
}

#[test]
fn other_sizes_hold_the_same_bit_for_bit() {
    let name = "gpt_tp2pp2_swiglu";
    let mut storage = stored(name);
    for (tp, pp, files) in [(1, 1, 1), (4, 1, 4), (1, 2, 2), (4, 2, 8), (2, 2, 4)] {
        let source = open(&storage);
        let layout = ParallelLayout::new(tp, pp);
        storage = convert(source.source(), MegatronForm::CommonFile, layout).unwrap();
        equals(name, &storage);
        let data: Vec<_> =
            names(&*storage).into_iter().filter(|name| name.ends_with(".distcp")).collect();
        let expected: Vec<_> = (0..files).map(|rank| format!("__{rank}_0.distcp")).collect();
        assert_eq!(data, expected);
    }
    let name = "gpt_moe_ep2_swiglu";
    let mut storage = stored(name);
    for layout in [
        ParallelLayout::new(1, 1),
        ParallelLayout::new(2, 1).with_ep(4).with_etp(1),
        ParallelLayout::new(1, 2).with_ep(2),
        ParallelLayout::new(2, 2).with_ep(2),
    ] {
        storage = convert(open(&storage).source(), MegatronForm::CommonInside, layout).unwrap();
        equals(name, &storage);
    }
}

#[test]
fn what_does_not_divide_is_named() {
    let dense = open(&stored("gpt_tp2pp2_swiglu"));
    let moe = open(&stored("gpt_moe_ep2_swiglu"));
    let refused = |checkpoint: &MegatronCheckpoint, layout: ParallelLayout| {
        convert(checkpoint.source(), MegatronForm::CommonFile, layout).unwrap_err()
    };
    let MegatronError::Indivisible { key, axis, len, parts, .. } =
        refused(&dense, ParallelLayout::new(3, 1))
    else {
        panic!()
    };
    assert_eq!((&*key, axis, len, parts), ("embedding.word_embeddings.weight", Some(0), 16, 3));
    let error = refused(&dense, ParallelLayout::new(1, 3)).to_string();
    assert_eq!(error, "\"decoder.layers\" cannot be divided into 3 equal parts: it has 2 layers");
    let error = refused(&moe, ParallelLayout::new(1, 1).with_ep(3)).to_string();
    assert!(error.contains("4 experts along axis 1"), "{error}");
    let error = refused(&dense, ParallelLayout::new(0, 1)).to_string();
    assert!(error.contains("TP0"), "{error}");
}

#[test]
fn flat_optimizer_state_stays_with_its_layout() {
    let name = "gpt_dp2_dp_reshardable";
    let checkpoint = open(&stored(name));
    let error = convert(checkpoint.source(), MegatronForm::CommonFile, ParallelLayout::new(2, 1));
    let error = error.unwrap_err();
    assert!(matches!(error, MegatronError::FlatOptimizer { groups: 1, .. }), "{error:?}");
    // Another number of data-parallel ranks changes nothing for it.
    let layout = ParallelLayout::new(1, 1).with_dp(4);
    let storage = convert(checkpoint.source(), MegatronForm::CommonFile, layout).unwrap();
    equals(name, &storage);
    // Two ranks had parts of the buffers; the others have nothing to write, and no file.
    let mut files = names(&*storage);
    files.retain(|name| name.ends_with(".distcp"));
    assert_eq!(files, ["__0_0.distcp", "__1_0.distcp"]);
}

#[test]
fn a_dry_run_writes_nothing_and_says_everything() {
    let source = open(&stored("gpt_tp2pp2_swiglu"));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let options = JobOptions::default().with_dry_run(true);
    let writer = MegatronWriter::builder(Arc::clone(&storage));
    let layout = ParallelLayout::new(4, 2);
    let report = block_on(to_torch_dist(source.source(), writer, layout, &options)).unwrap();
    assert!(report.dry_run);
    assert_eq!(report.files.len(), 8);
    assert_eq!(
        report.tensors,
        expected_json("gpt_tp2pp2_swiglu")["tensors"].as_object().unwrap().len()
    );
    assert_eq!(names(&*storage), Vec::<String>::new());
}

#[test]
fn damage_is_not_carried_over() {
    let storage = stored("gpt_tp2pp2_swiglu");
    let mut bytes = get(&*storage, "__1_0.distcp").unwrap();
    let metadata = block_on(open(&storage).raw().unwrap().metadata()).unwrap();
    let (_, chunk) = metadata
        .iter()
        .filter_map(|(fqn, entry)| Some((fqn, entry.as_tensor()?)))
        .flat_map(|(fqn, tensor)| tensor.chunks.iter().map(move |chunk| (fqn, chunk)))
        .find(|(_, chunk)| {
            metadata.file(chunk.placement.unwrap().file).unwrap().as_str() == "__1_0.distcp"
        })
        .unwrap();
    // The data of an archive begin behind headers and the pickle, and end before the directory.
    let placement = chunk.placement.unwrap();
    let at = placement.byte_offset as usize + placement.byte_len as usize / 2;
    bytes[at] ^= 1;
    put(&*storage, "__1_0.distcp", bytes);
    let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&target));
    let source = open(&storage);
    let layout = ParallelLayout::new(4, 1);
    let options = JobOptions::default();
    let error = block_on(to_torch_dist(source.source(), writer, layout, &options)).unwrap_err();
    assert!(error_chain(&error).contains("__1_0.distcp"), "{error:?}");
    assert_eq!(get(&*target, "metadata.json"), None);
    assert_eq!(names(&*target), Vec::<String>::new());
}

#[test]
fn a_checkpoint_of_anything_becomes_one_of_megatron() {
    // A safetensors file, and an object of plain PyTorch.
    let storage = Arc::new(MemoryStorage::new());
    let tensors = [("decoder.final_layernorm.weight", 4_u64), ("some.thing", 6)];
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, len)| TorchSaveItem {
            name: (*name).into(),
            path: None,
            content: TorchSaveContent::Object(Value::Tensor(
                dcp_core::Tensor::replicated(DType::UInt8, [*len], vec![7; *len as usize]).unwrap(),
            )),
        })
        .chain([TorchSaveItem {
            name: "epoch".into(),
            path: None,
            content: TorchSaveContent::Object(Value::Int(3)),
        }])
        .collect();
    let key = Key::new("model.pt").unwrap();
    let (nothing, options) = (Arc::new(Nothing), TorchSaveOptions::default());
    let written = write(&*storage, &key, &items, nothing, &options, None);
    block_on(written).unwrap();
    let source = Source::torch_save(storage, key);
    let layout = ParallelLayout::new(2, 1);
    let target = convert(&source, MegatronForm::CommonFile, layout).unwrap();
    let checkpoint = open(&target);
    assert!(checkpoint.common().is_empty());
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let mut keys: Vec<_> = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect();
    keys.sort();
    assert_eq!(
        keys,
        ["common_state", "decoder.final_layernorm.weight", "epoch/shard_0_1", "some.thing"]
    );
    let epoch = dcp_jobs::read::read_object(checkpoint.source(), "epoch/shard_0_1");
    let epoch = block_on(epoch).unwrap();
    assert!(epoch.same(&Value::List(vec![Value::Int(3)])), "{epoch:?}");
}

/// Data of files that have all of it in their objects.
#[derive(Debug)]
struct Nothing;

#[async_trait::async_trait]
impl dcp_core::checkpoint::DataSource for Nothing {
    async fn resolve(
        &self,
        _: usize,
        _: std::ops::Range<u64>,
    ) -> Result<dcp_core::Payload, dcp_core::CheckpointError> {
        Ok(dcp_core::Payload::from(""))
    }

    fn segment_bytes(&self) -> u64 {
        1
    }

    fn own_threads(&self) -> Option<Arc<dyn dcp_core::storage::OwnThreads>> {
        None
    }
}

#[test]
fn what_went_through_another_format_comes_back() {
    for name in ["tp2_basic", "gpt_moe_ep2_swiglu", "objects_grid", "head020_basic_integrity"] {
        let original = open(&stored(name));
        let layout = layout_of(name, &original);
        let options = JobOptions::default();
        let file: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let key = Key::new("all.pt").unwrap();
        let target = dcp_jobs::write::Target::new(Arc::clone(&file), key.clone());
        let form = dcp_formats::torch_save::TorchSaveForm::default();
        let saved =
            dcp_jobs::convert::to_torch_save(original.source(), &target, form.into(), &options);
        block_on(saved).unwrap();
        let through = Source::torch_save(Arc::clone(&file), key.clone());
        equals(name, &convert(&through, MegatronForm::CommonFile, layout).unwrap());
        if name == "gpt_moe_ep2_swiglu" {
            // By the names of its parts alone, which know no empty containers.
            let reader = TorchSaveReader::new(Arc::clone(&file), key);
            let through = Source::new(file, Arc::new(reader));
            equals(name, &convert(&through, MegatronForm::CommonFile, layout).unwrap());
        }

        let folder: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = dcp_formats::dcp::DcpWriter::new(Arc::clone(&folder));
        block_on(dcp_jobs::reshard::reshard(original.source(), &writer, 3, &options)).unwrap();
        let through = Source::dcp(folder, false);
        equals(name, &convert(&through, MegatronForm::CommonInside, layout).unwrap());
    }
}

/// The rows behind the last token hold what training left there, and how many there are depends
/// on the layout: only the arguments distinguish rows of tokens.
#[test]
fn trap_07_rows_of_padding_are_kept_and_never_made_up() {
    let name = "gpt_tp2pp2_swiglu";
    let source = open(&stored(name));
    let key = "embedding.word_embeddings.weight";
    assert_eq!(source.args().unwrap().padded_vocab_size(), Some(16));
    let expected = crate::support::expected_tensors(name).remove(key).unwrap();
    for tp in [1, 2, 4] {
        let layout = ParallelLayout::new(tp, 1);
        let again = open(&convert(source.source(), MegatronForm::CommonFile, layout).unwrap());
        let found = block_on(dcp_jobs::get::find(again.source(), key, None)).unwrap();
        let dcp_jobs::get::Found::Tensor(found) = found else { panic!() };
        assert!(*block_on(found.read()).unwrap() == *expected.1);
    }
    let error = convert(source.source(), MegatronForm::CommonFile, ParallelLayout::new(5, 1));
    let error = error.unwrap_err().to_string();
    assert!(error.contains(key) && error.contains("16 elements along axis 0"), "{error}");
}
