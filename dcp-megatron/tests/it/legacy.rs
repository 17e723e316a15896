//! Folders `mp_rank_*` are shown as the whole tensors that they are parts of.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::checkpoint::DataSource;
use dcp_core::error::error_chain;
use dcp_core::path::PathItem;
use dcp_core::storage::OwnThreads;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, DType, Key, Payload, Storage, Value};
use dcp_formats::torch_save::{TorchSaveContent, TorchSaveItem, TorchSaveOptions, write};
use dcp_jobs::get::{Found, find};
use dcp_jobs::read::read_object;
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::jobs::to_torch_dist;
use dcp_megatron::optimizer::per_parameter_of_legacy;
use dcp_megatron::partition::ParallelLayout;
use dcp_megatron::{
    MegatronCheckpoint, MegatronError, MegatronOpenOptions, MegatronWriter, StoredFormat,
};

use crate::expected;
use crate::support::{block_on, copy, expected_json, expected_tensors, get, put, stored};

pub(crate) const RUN: &str = "run_legacy_torch_tp2";

pub(crate) fn open(storage: &Arc<dyn Storage>) -> Result<MegatronCheckpoint, MegatronError> {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default()))
}

pub(crate) fn tensors(source: &Source) -> BTreeMap<String, (Vec<u64>, Vec<u8>)> {
    let metadata = block_on(source.metadata()).unwrap();
    let tensors = metadata.iter().filter_map(|(fqn, entry)| Some((fqn, entry.as_tensor()?)));
    let tensors = tensors.map(|(fqn, tensor)| {
        let Found::Tensor(found) = block_on(find(source, fqn, None)).unwrap() else { panic!() };
        (fqn.to_string(), (tensor.shape.to_vec(), block_on(found.read()).unwrap().to_vec()))
    });
    tensors.collect()
}

/// Two matrices of the same number of rows side by side.
fn beside(a: &[u8], b: &[u8], rows: usize) -> Vec<u8> {
    let rows_of = |m: &[u8]| m.chunks(m.len() / rows).map(<[u8]>::to_vec).collect::<Vec<_>>();
    rows_of(a).into_iter().zip(rows_of(b)).flat_map(|(a, b)| [a, b].concat()).collect()
}

#[test]
fn the_fixture_is_merged_under_the_names_of_distributed_checkpoints() {
    let checkpoint = open(&stored(RUN)).unwrap();
    assert_eq!(*checkpoint.format(), StoredFormat::Legacy { tp: 2, pp: 1, ep: 1 });
    assert_eq!(checkpoint.optimizer_files().len(), 2);
    assert!(checkpoint.warnings()[0].contains("2 of distrib_optim.pt"));
    let of_rank = |rank: usize, name: &str| {
        let name = format!("mp_rank_{rank:02}/model_optim_rng.pt.model.{name}");
        expected_tensors(RUN).remove(&name).unwrap().1
    };
    let ranks = |name: &str| [of_rank(0, name), of_rank(1, name)];
    let layer = "decoder.layers.0.";
    let stacked = |name: &str| ranks(&format!("{layer}{name}"));
    let halves = |m: &[u8]| [m[..m.len() / 2].to_vec(), m[m.len() / 2..].to_vec()];
    let [fc1_0, fc1_1] = stacked("mlp.linear_fc1.weight").map(|m| halves(&m));
    let [fc2_0, fc2_1] = stacked("mlp.linear_fc2.weight");
    let [proj_0, proj_1] = stacked("self_attention.linear_proj.weight");
    let expected = [
        (
            "embedding.word_embeddings.weight",
            vec![16, 8],
            ranks("embedding.word_embeddings.weight").concat(),
        ),
        (
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            vec![1, 8],
            of_rank(0, "decoder.layers.0.input_layernorm.weight"),
        ),
        (
            "decoder.layers.self_attention.linear_proj.weight",
            vec![1, 8, 8],
            beside(&proj_0, &proj_1, 8),
        ),
        (
            "decoder.layers.self_attention.linear_qkv.weight",
            vec![1, 24, 8],
            stacked("self_attention.linear_qkv.weight").concat(),
        ),
        (
            "decoder.layers.mlp.linear_fc1.layer_norm_weight",
            vec![1, 8],
            of_rank(0, "decoder.layers.0.pre_mlp_layernorm.weight"),
        ),
        (
            "decoder.layers.mlp.linear_fc1.weight",
            vec![1, 24, 8],
            [&*fc1_0[0], &fc1_1[0], &fc1_0[1], &fc1_1[1]].concat(),
        ),
        ("decoder.layers.mlp.linear_fc2.weight", vec![1, 8, 12], beside(&fc2_0, &fc2_1, 8)),
        ("decoder.final_layernorm.weight", vec![8], of_rank(0, "decoder.final_layernorm.weight")),
    ];
    let expected: BTreeMap<_, _> =
        expected.map(|(name, shape, bytes)| (name.to_owned(), (shape, bytes))).into();
    assert!(tensors(checkpoint.source()) == expected);
    // What is no tensor of the model.
    let json = expected_json(RUN);
    let mut first = json["content"]["mp_rank_00/model_optim_rng.pt"].clone();
    let file = first.as_object_mut().unwrap();
    file.remove("model");
    file.remove("rng_state");
    expected::dict(checkpoint.common(), &first, "common");
    assert_eq!(checkpoint.args().unwrap().tensor_model_parallel_size(), Some(2));
    for rank in 0..2 {
        let name = format!("rng_state/shard_0.{rank}_1.2");
        let state = block_on(read_object(checkpoint.source(), &name)).unwrap();
        let Value::List(list) = state else { panic!() };
        assert_eq!(list.len(), 1);
        let Value::List(states) = list[0].view() else { panic!() };
        let tuple = states[0].as_dict().unwrap().get("random_rng_state").unwrap();
        let file = format!("mp_rank_{rank:02}/model_optim_rng.pt");
        expected::check(tuple, &json["content"][&file]["rng_state"][0]["random_rng_state"], "rng");
    }
    let state = "decoder.layers.mlp.linear_fc2._extra_state/shard_0_1";
    let state = block_on(read_object(checkpoint.source(), state)).unwrap();
    assert!(state.same(&Value::List(vec![Value::None])));
}

#[test]
fn the_fixture_becomes_one_of_torch_dist() {
    let checkpoint = open(&stored(RUN)).unwrap();
    let expected = tensors(checkpoint.source());
    for (tp, pp) in [(1, 1), (2, 1), (4, 1)] {
        let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = MegatronWriter::builder(Arc::clone(&target));
        let (layout, options) = (ParallelLayout::new(tp, pp), JobOptions::default());
        let source = checkpoint.source();
        block_on(to_torch_dist(source, writer, layout, &options)).unwrap();
        let again = open(&target).unwrap();
        assert!(tensors(again.source()) == expected);
        assert_eq!(again.args().unwrap().padded_vocab_size(), Some(16));
        let keys = |source: &Source| {
            let metadata = block_on(source.metadata()).unwrap();
            let mut keys: Vec<_> = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect();
            keys.sort();
            keys
        };
        assert_eq!(keys(again.source()), keys(source));
    }
}

#[test]
fn the_optimizer_of_the_fixture_is_found_by_parameter() {
    let checkpoint = open(&stored(RUN)).unwrap();
    let (files, job) = (checkpoint.optimizer_files(), JobOptions::default());
    let found = per_parameter_of_legacy(checkpoint.source(), checkpoint.common(), files, &job);
    let found = block_on(found).unwrap();
    assert!(found.report.is_complete(), "{:?}", found.report);
    let all = tensors(&found.source);
    let (shape, master) = &all["optimizer.state.param.decoder.layers.mlp.linear_fc1.weight"];
    assert_eq!(*shape, [1, 24, 8]);
    // A weight is its master parameter, rounded to the half of its bits that counts.
    let (_, weight) = &all["decoder.layers.mlp.linear_fc1.weight"];
    for (master, weight) in master.chunks(4).zip(weight.chunks(2)) {
        let master = u32::from_le_bytes(master.try_into().unwrap());
        let weight = u16::from_le_bytes(weight.try_into().unwrap());
        let rounded = (u64::from(master) + 0x7fff + u64::from(master >> 16 & 1)) >> 16;
        assert_eq!(rounded, u64::from(weight));
    }
}

#[test]
fn a_missing_folder_or_another_checkpoints_is_named() {
    let without = |name: &str| {
        let storage = copy(&*stored(RUN));
        let key = Key::new(format!("iter_0000010/{name}/model_optim_rng.pt")).unwrap();
        block_on(storage.delete(&[key])).unwrap();
        open(&(storage as _)).unwrap_err().to_string()
    };
    let error = without("mp_rank_01");
    assert!(error.contains("1 tensor-parallel ranks") && error.contains("say 2"), "{error}");
    let error = without("mp_rank_00");
    assert!(error.starts_with("mp_rank_00: there is no model_optim_rng.pt"), "{error}");
}

#[test]
fn a_damaged_file_is_named() {
    let whole = stored(RUN);
    let name = "iter_0000010/mp_rank_01/model_optim_rng.pt";
    let bytes = get(&*whole, name).unwrap();
    for damaged in [bytes[..bytes.len() / 2].to_vec(), vec![0; 100], Vec::new()] {
        let storage = copy(&*whole);
        put(&*storage, name, damaged);
        let error = open(&(storage as _)).unwrap_err();
        assert!(error_chain(&error).contains("mp_rank_01/model_optim_rng.pt"), "{error:?}");
    }
}

/// Data of a file at hand, by the position of its item.
#[derive(Debug)]
struct Data(Vec<Vec<u8>>);

#[async_trait]
impl DataSource for Data {
    async fn resolve(&self, item: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
        let bytes = &self.0[item];
        Ok(Payload::from(bytes[range.start as usize..range.end as usize].to_vec()))
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

/// A rank's file in the making.
#[derive(Default)]
pub(crate) struct RankFile {
    items: Vec<TorchSaveItem>,
    data: Vec<Vec<u8>>,
}

impl RankFile {
    pub(crate) fn tensor(&mut self, model: &str, name: &str, shape: &[u64], bytes: Vec<u8>) {
        let path: Vec<_> = [model, name].iter().map(|key| PathItem::Key((*key).into())).collect();
        self.items.push(TorchSaveItem {
            name: format!("{model}.{name}").into(),
            path: Some(path.into()),
            content: TorchSaveContent::Tensor {
                dtype: DType::UInt8,
                shape: shape.into(),
                same_as: None,
            },
        });
        self.data.push(bytes);
    }

    pub(crate) fn object(&mut self, name: &str, value: Value) {
        self.items.push(TorchSaveItem {
            name: name.into(),
            path: Some(vec![PathItem::Key(name.into())].into()),
            content: TorchSaveContent::Object(value),
        });
        self.data.push(Vec::new());
    }

    pub(crate) fn write(self, storage: &MemoryStorage, folder: &str) {
        let key = Key::new(format!("{folder}/model_optim_rng.pt")).unwrap();
        let options = TorchSaveOptions::default();
        let data = Arc::new(Data(self.data));
        block_on(write(storage, &key, &self.items, data, &options, None)).unwrap();
    }
}

pub(crate) fn arguments(tp: i64, pp: i64, ep: i64) -> Value {
    Value::Dict(Dict::from([
        ("tensor_model_parallel_size", Value::Int(tp)),
        ("pipeline_model_parallel_size", Value::Int(pp)),
        ("expert_model_parallel_size", Value::Int(ep)),
        ("transformer_impl", Value::from("transformer_engine")),
        ("untie_embeddings_and_output_weights", Value::Bool(false)),
    ]))
}

/// The number that a row of a whole matrix is filled with.
fn row(layer: u64, what: u8, n: usize) -> u8 {
    (layer as u8) << 6 | what << 4 | n as u8
}

/// Four layers over two stages with two chunks each, two experts in each of two groups, TP2: every
/// row of a matrix shows its origin.
pub(crate) fn synthetic(change: impl Fn(&mut RankFile, u32, u32, u32)) -> Arc<dyn Storage> {
    let storage = Arc::new(MemoryStorage::new());
    for (tp, pp, ep) in
        (0..2).flat_map(|tp| (0..2).flat_map(move |pp| (0..2).map(move |ep| (tp, pp, ep))))
    {
        let mut file = RankFile::default();
        file.object("args", arguments(2, 2, 2));
        file.object("iteration", Value::Int(7));
        for chunk in 0..2 {
            let model = format!("model{chunk}");
            let layer = u64::from(chunk * 2 + pp);
            let rows = |what: u8, rows: Range<usize>| -> Vec<u8> {
                rows.flat_map(|n| [row(layer, what, n); 3]).collect()
            };
            let name = "decoder.layers.0.self_attention.linear_qkv.weight";
            let half = tp as usize * 2..tp as usize * 2 + 2;
            file.tensor(&model, name, &[2, 3], rows(0, half.clone()));
            file.tensor(
                &model,
                "decoder.layers.0.input_layernorm.weight",
                &[3],
                vec![layer as u8; 3],
            );
            for local in 0..2 {
                let what = (ep * 2 + local) as u8;
                let experts = format!("decoder.layers.0.mlp.experts.local_experts.{local}.");
                // Gate rows 0..4 and up rows 4..8, of which this rank has two each.
                let mut first = rows(what, half.clone());
                first.extend(rows(what, half.start + 4..half.end + 4));
                file.tensor(&model, &format!("{experts}linear_fc1.weight"), &[4, 3], first);
                let second = vec![row(layer, what, tp as usize); 3 * 2];
                file.tensor(&model, &format!("{experts}linear_fc2.weight"), &[3, 2], second);
            }
        }
        if pp == 0 {
            let rows = vec![tp as u8; 2 * 3];
            file.tensor("model0", "embedding.word_embeddings.weight", &[2, 3], rows);
        } else {
            // The tied copy, and what only the last stage has.
            file.tensor("model1", "output_layer.weight", &[2, 3], vec![tp as u8; 2 * 3]);
            file.tensor("model1", "decoder.final_layernorm.weight", &[3], vec![9; 3]);
        }
        change(&mut file, tp, pp, ep);
        file.write(&storage, &format!("mp_rank_{tp:02}_{pp:03}_{ep:03}"));
    }
    storage
}

#[test]
fn stages_chunks_experts_and_gates_come_together() {
    let checkpoint = open(&synthetic(|_, _, _, _| {})).unwrap();
    assert_eq!(*checkpoint.format(), StoredFormat::Legacy { tp: 2, pp: 2, ep: 2 });
    let found = tensors(checkpoint.source());
    let whole = |layer: u64, what: u8, rows: usize| -> Vec<u8> {
        (0..rows).flat_map(|n| [row(layer, what, n); 3]).collect()
    };
    let layers = 0..4_u64;
    let of_experts = |of: &dyn Fn(u64, u8) -> Vec<u8>| -> Vec<u8> {
        layers.clone().flat_map(|layer| (0..4).flat_map(move |e| of(layer, e))).collect()
    };
    let expected: BTreeMap<String, (Vec<u64>, Vec<u8>)> = [
        (
            "decoder.layers.self_attention.linear_qkv.weight",
            vec![4, 4, 3],
            layers.clone().flat_map(|l| whole(l, 0, 4)).collect(),
        ),
        // Transformer Engine's own norm is not fused.
        (
            "decoder.layers.input_layernorm.weight",
            vec![4, 3],
            layers.clone().flat_map(|l| [l as u8; 3]).collect(),
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            vec![4, 4, 8, 3],
            of_experts(&|l, e| whole(l, e, 8)),
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            vec![4, 4, 3, 4],
            of_experts(&|l, e| {
                (0..3).flat_map(|_| (0..2).flat_map(|tp| [row(l, e, tp); 2])).collect()
            }),
        ),
        ("embedding.word_embeddings.weight", vec![4, 3], [[0; 6], [1; 6]].concat()),
        ("decoder.final_layernorm.weight", vec![3], vec![9; 3]),
    ]
    .map(|(name, shape, bytes): (&str, Vec<u64>, Vec<u8>)| (name.to_owned(), (shape, bytes)))
    .into();
    assert_eq!(found, expected);
}

#[test]
fn layers_that_differ_keep_their_numbers() {
    let storage = synthetic(|file, tp, pp, ep| {
        if (pp, ep) == (1, 0) {
            let name = "decoder.layers.0.mlp.linear_fc2.weight";
            file.tensor("model1", name, &[3, 1], vec![tp as u8; 3]);
        }
    });
    let found = tensors(open(&storage).unwrap().source());
    assert_eq!(
        found["decoder.layers.3.mlp.linear_fc2.weight"],
        (vec![3, 2], vec![0, 1, 0, 1, 0, 1])
    );
    let (shape, _) = &found["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"];
    assert_eq!(*shape, [4, 8, 3]);
}

#[test]
fn what_does_not_go_together_is_named_with_its_folder() {
    let refused = |change: &dyn Fn(&mut RankFile, u32, u32, u32), said: &[&str]| {
        let error = open(&synthetic(change)).unwrap_err();
        assert!(matches!(error, MegatronError::Legacy { .. }), "{error:?}");
        let error = error.to_string();
        assert!(said.iter().all(|said| error.contains(said)), "{error}");
    };
    let last = |tp, pp, _: u32| (tp, pp) == (1, 1);
    let norm = "decoder.layers.0.mlp.router.weight";
    refused(
        &|file, tp, pp, ep| {
            let rows = if last(tp, pp, ep) { 2 } else { 1 };
            file.tensor("model1", norm, &[rows, 3], vec![0; rows as usize * 3]);
        },
        &["mp_rank_01_001_000", "decoder.layers.3.mlp.router.weight", "[2, 3]", "[1, 3]"],
    );
    refused(
        &|file, tp, pp, ep| {
            if !last(tp, pp, ep) {
                file.tensor("model1", norm, &[3], vec![0; 3]);
            }
        },
        &["mp_rank_01_001_000", "router.weight", "not in it"],
    );
    refused(
        &|file, _, _, _| file.tensor("model0", "decoder.mystery", &[3], vec![0; 3]),
        &["mp_rank_00_000_000", "decoder.mystery", "no rule"],
    );
    refused(
        &|file, tp, pp, ep| {
            if last(tp, pp, ep) {
                file.items.retain(|item| &*item.name != "iteration");
                file.data.remove(1);
                file.object("iteration", Value::Int(8));
            }
        },
        &["mp_rank_01_001_000", "iteration 8", "iteration 7"],
    );
}

#[test]
fn experts_without_numbers_are_refused_not_dropped() {
    let refused = |change: &dyn Fn(&mut RankFile, u32, u32, u32), said: &[&str]| {
        let error = open(&synthetic(change)).unwrap_err();
        assert!(matches!(error, MegatronError::Legacy { .. }), "{error:?}");
        let error = error.to_string();
        assert!(said.iter().all(|said| error.contains(said)), "{error}");
    };
    for name in ["experts.weight1", "experts.weight2", "experts.linear_fc1.adapter.a.weight"] {
        let name = format!("decoder.layers.0.mlp.{name}");
        refused(
            &|file, _, _, _| file.tensor("model0", &name, &[3, 4], vec![0; 12]),
            &["mp_rank_00_000_000", "mlp.experts.", "torch_dist"],
        );
    }
    // A copy that is none.
    let norm = "decoder.layers.0.pre_mlp_layernorm.weight";
    refused(
        &|file, _, _, ep| {
            let len = if ep == 0 { 3 } else { 4 };
            file.tensor("model0", norm, &[len], vec![0; len as usize]);
        },
        &["mp_rank_00_000_001", "pre_mlp_layernorm.weight", "[3]", "[4]"],
    );
    refused(
        &|file, _, _, ep| {
            if ep == 1 {
                file.tensor("model0", norm, &[3], vec![0; 3]);
            }
        },
        &["mp_rank_00_000_001", "pre_mlp_layernorm.weight", "first group"],
    );
    // Groups of different size: numbers of one would be those of another.
    refused(
        &|file, _, _, ep| {
            if ep == 0 {
                let name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight";
                file.tensor("model0", name, &[4, 3], vec![0; 12]);
            }
        },
        &["mp_rank_0", "different numbers of experts"],
    );
}

#[test]
fn extra_states_of_a_ranks_experts_are_left_out_and_said_to_be() {
    let storage = synthetic(|file, _, _, _| {
        let name = "decoder.layers.0.mlp.experts.linear_fc1._extra_state";
        file.tensor("model0", name, &[2], vec![0; 2]);
    });
    let checkpoint = open(&storage).unwrap();
    let said = checkpoint.warnings().join("; ");
    assert!(said.contains("8 extra states"), "{said}");
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    assert!(metadata.iter().all(|(fqn, _)| !fqn.contains("experts.linear_fc1._extra")));
}
