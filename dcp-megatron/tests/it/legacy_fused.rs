//! What modules hold in one tensor, and experts that are shared by other numbers of ranks than
//! layers, in folders `mp_rank_*`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::value::Dict;
use dcp_core::{Storage, Value};
use dcp_jobs::read::read_object;
use dcp_megatron::MegatronError;

use crate::legacy::{RankFile, arguments, open, tensors};
use crate::support::block_on;

fn with(args: Value, more: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let Value::Dict(mut args) = args else { panic!() };
    for (name, value) in more {
        args.insert(name, value);
    }
    Value::Dict(args)
}

fn experts(all: i64, shared_by: i64) -> [(&'static str, Value); 2] {
    [("num_experts", Value::Int(all)), ("expert_tensor_parallel_size", Value::Int(shared_by))]
}

/// An element of the first matrix of an expert, `[8, 3]`, or of the second one, `[3, 4]`.
fn element(expert: u64, row: u64, column: u64) -> u8 {
    (expert << 6 | row << 3 | column) as u8
}

/// A matrix of experts, by rows and columns, `[experts, rows, columns]`.
fn matrix(experts: &[u64], rows: &[u64], columns: &[u64]) -> Vec<u8> {
    let of =
        |e: u64| rows.iter().flat_map(move |r| columns.iter().map(move |c| element(e, *r, *c)));
    experts.iter().flat_map(|e| of(*e)).collect()
}

/// The same with every expert's matrix transposed.
fn transposed(experts: &[u64], rows: &[u64], columns: &[u64]) -> Vec<u8> {
    let of =
        |e: u64| columns.iter().flat_map(move |c| rows.iter().map(move |r| element(e, *r, *c)));
    experts.iter().flat_map(|e| of(*e)).collect()
}

fn whole() -> [Vec<u8>; 2] {
    let rows: Vec<u64> = (0..8).collect();
    [matrix(&[0, 1, 2, 3], &rows, &[0, 1, 2]), matrix(&[0, 1, 2, 3], &[0, 1, 2], &[0, 1, 2, 3])]
}

const FIRST: &str = "decoder.layers.mlp.experts.experts.linear_fc1.weight";
const SECOND: &str = "decoder.layers.mlp.experts.experts.linear_fc2.weight";

fn both(found: &BTreeMap<String, (Vec<u64>, Vec<u8>)>) {
    let [first, second] = whole();
    assert_eq!(found[FIRST], (vec![1, 4, 8, 3], first));
    assert_eq!(found[SECOND], (vec![1, 4, 3, 4], second));
}

/// Four experts in two groups, each shared by two ranks, in the matrices of `GroupedMLP`.
fn grouped(router: bool, all: i64) -> Arc<dyn Storage> {
    let storage = Arc::new(MemoryStorage::new());
    for (tp, ep) in (0..2_u64).flat_map(|tp| (0..2_u64).map(move |ep| (tp, ep))) {
        let mut file = RankFile::default();
        file.object("args", with(arguments(2, 1, 2), experts(all, 2)));
        let (layer, own) = ("decoder.layers.0.mlp.", [ep * 2, ep * 2 + 1]);
        let half = [tp * 2, tp * 2 + 1];
        let rows = [half[0], half[1], half[0] + 4, half[1] + 4];
        let first = transposed(&own, &rows, &[0, 1, 2]);
        file.tensor("model", &format!("{layer}experts.weight1"), &[3, 8], first);
        let second = transposed(&own, &[0, 1, 2], &half);
        file.tensor("model", &format!("{layer}experts.weight2"), &[4, 3], second);
        if router {
            file.tensor("model", &format!("{layer}router.weight"), &[4, 1], vec![7; 4]);
        }
        file.write(&storage, &format!("mp_rank_{tp:02}_{ep:03}"));
    }
    storage
}

#[test]
fn grouped_experts_are_taken_apart() {
    let checkpoint = open(&grouped(true, 64)).unwrap();
    both(&tensors(checkpoint.source()));
    // Megatron-Core requests a state of each, and has none.
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let states = metadata.iter().filter(|(fqn, _)| fqn.contains("._extra_state/shard_0."));
    assert_eq!(states.count(), 2 * 4);
    let last = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.3_1.4";
    let last = block_on(read_object(checkpoint.source(), last)).unwrap();
    assert!(last.same(&Value::List(vec![Value::None])));
    // Without a router the arguments have the number.
    both(&tensors(open(&grouped(false, 4)).unwrap().source()));
    for unknown in [3, 7, 0, i64::MAX] {
        let error = open(&grouped(false, unknown)).unwrap_err();
        assert!(error.to_string().contains("all experts of the rank"), "{error}");
    }
}

/// Four experts in `groups` that are each shared by `shared_by` ranks, layers by `layers` ranks:
/// every rank that is the first of replicas of layers or of experts saves.
fn apart(layers: u64, groups: u64, shared_by: u64, skip: Option<&str>) -> Arc<dyn Storage> {
    let (storage, mut seen) = (Arc::new(MemoryStorage::new()), BTreeSet::new());
    for rank in 0..layers.max(groups * shared_by) {
        let (tp, ep, part) = (rank % layers, rank / shared_by % groups, rank % shared_by);
        let folder = format!("mp_rank_{tp:02}_{ep:03}");
        if skip == Some(&folder) || !seen.insert(folder.clone()) {
            continue;
        }
        let mut file = RankFile::default();
        let args = arguments(layers as i64, 1, groups as i64);
        file.object("args", with(args, experts(4, shared_by as i64)));
        let name = "decoder.layers.0.self_attention.linear_qkv.weight";
        file.tensor("model", name, &[1, 2], vec![tp as u8; 2]);
        let each = 4 / shared_by;
        for local in 0..4 / groups {
            let own = [ep * (4 / groups) + local];
            let gate = part * each..(part + 1) * each;
            let rows: Vec<u64> = gate.clone().chain(gate.clone().map(|row| row + 4)).collect();
            let columns: Vec<u64> = gate.collect();
            let experts = format!("decoder.layers.0.mlp.experts.local_experts.{local}.");
            let first = matrix(&own, &rows, &[0, 1, 2]);
            file.tensor("model", &format!("{experts}linear_fc1.weight"), &[2 * each, 3], first);
            let second = matrix(&own, &[0, 1, 2], &columns);
            file.tensor("model", &format!("{experts}linear_fc2.weight"), &[3, each], second);
        }
        file.write(&storage, &folder);
    }
    storage
}

#[test]
fn experts_may_be_shared_by_other_numbers_of_ranks_than_layers() {
    for (layers, groups, shared_by) in [(2, 2, 1), (2, 4, 1), (4, 2, 1), (4, 2, 2), (2, 2, 2)] {
        let found = tensors(open(&apart(layers, groups, shared_by, None)).unwrap().source());
        both(&found);
        let (shape, bytes) = &found["decoder.layers.self_attention.linear_qkv.weight"];
        let rows: Vec<u8> = (0..layers).flat_map(|tp| [tp as u8; 2]).collect();
        assert_eq!((shape, bytes), (&vec![1, layers, 2], &rows));
    }
    let error = open(&apart(2, 2, 1, Some("mp_rank_01_001"))).unwrap_err();
    assert!(error.to_string().contains("mp_rank_01_001"), "{error}");
    // Two ranks of one name, with different parts.
    let error = open(&apart(1, 2, 2, None)).unwrap_err();
    assert!(matches!(error, MegatronError::Legacy { .. }), "{error:?}");
    assert!(error.to_string().contains("several ranks have this name"), "{error}");
}

#[test]
fn fused_projections_are_taken_apart() {
    // Inner 4, two states of two, heads 2 in all; or keys of 2, values of 4, heads of values 2.
    let mamba = [("z", 4), ("x", 4), ("B", 4), ("C", 4), ("dt", 2)];
    let delta = [("query", 2), ("key", 2), ("value", 4), ("z", 4), ("beta", 2), ("alpha", 2)];
    for (sections, convolved) in
        [(&mamba[..], ["x", "B", "C"]), (&delta, ["query", "key", "value"])]
    {
        let storage = Arc::new(MemoryStorage::new());
        for tp in 0..2_u8 {
            let mut file = RankFile::default();
            file.object("args", arguments(2, 1, 1));
            let rows = |of: &[(&str, u8)]| -> Vec<u8> {
                let of = of.iter().enumerate();
                of.flat_map(|(at, (_, rows))| {
                    (0..rows / 2).map(move |row| (at as u8) << 4 | (tp * rows / 2 + row))
                })
                .collect()
            };
            let mut add = |name: &str, rows: Vec<u8>, back: bool| {
                let name = format!("decoder.layers.0.mixer.{name}");
                let len = rows.len() as u64;
                let shape = if back { [1, len] } else { [len, 1] };
                file.tensor("model", &name, &shape, rows);
            };
            add("in_proj.weight", rows(sections), false);
            let convolved: Vec<_> = convolved
                .map(|name| *sections.iter().find(|(own, _)| *own == name).unwrap())
                .into();
            add("conv1d.weight", rows(&convolved), false);
            add("dt_bias", vec![tp], false);
            add("out_proj.weight", vec![tp; 2], true);
            file.write(&storage, &format!("mp_rank_{tp:02}"));
        }
        let found = tensors(open(&(storage as _)).unwrap().source());
        for (at, (name, rows)) in sections.iter().enumerate() {
            // Hybrid models keep layers one by one.
            let name = format!("decoder.layers.0.mixer.in_proj.weight.{name}");
            let expected: Vec<u8> = (0..*rows).map(|row| (at as u8) << 4 | row).collect();
            assert_eq!(found[&name], (vec![u64::from(*rows), 1], expected), "{name}");
        }
        let names: Vec<_> = found.keys().filter_map(|k| k.rsplit_once("conv1d.weight.")).collect();
        assert_eq!(names.len(), 3, "{found:?}");
    }
}

#[test]
fn layers_that_may_differ_keep_their_numbers() {
    for (name, value) in [
        ("moe_layer_freq", Value::List(vec![Value::Int(1)])),
        ("moe_layer_freq", Value::Int(2)),
        ("hybrid_override_pattern", Value::from("M*")),
    ] {
        let storage = Arc::new(MemoryStorage::new());
        let mut file = RankFile::default();
        file.object(
            "args",
            with(arguments(1, 1, 1), [(name, value), ("x", Value::Dict(Dict::new()))]),
        );
        file.tensor("model", "decoder.layers.0.mlp.linear_fc2.weight", &[1, 1], vec![0]);
        file.write(&storage, "mp_rank_00");
        let found = tensors(open(&(storage as _)).unwrap().source());
        assert_eq!(found.keys().collect::<Vec<_>>(), ["decoder.layers.0.mlp.linear_fc2.weight"]);
    }
}
