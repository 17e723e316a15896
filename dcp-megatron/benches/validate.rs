//! What the coordinator pays for a save of a large job: whether all ranks' shards make whole
//! tensors, and the plan of the save.
//!
//! `cargo bench -p dcp-megatron --bench validate`

#![allow(clippy::unwrap_used, reason = "a bench that fails may panic")]
#![allow(clippy::print_stdout, reason = "it says what it measures")]

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use criterion::{Criterion, SamplingMode, Throughput};
use dcp_core::plan::{LeafKind, PlanContext, SavePlan, StateIndex, StateLeaf};
use dcp_core::planner::SavePlanner;
use dcp_core::{DType, Region, Value};
use dcp_megatron::sharded::{
    LocalTensor, RankShards, ShardedLeaf, ShardedObject, ShardedTensor, ShardedValue,
    sharded_leaves, swiglu, validate_sharding_integrity,
};
use dcp_planner::DefaultSavePlanner;

const TP: u64 = 8;
const PP: u64 = 16;
const DP: u64 = 32;
const LAYERS: u64 = 96;
const HIDDEN: u64 = 12288;
const FFN: u64 = 4 * HIDDEN;
const VOCAB: u64 = 128 * 1024;

/// The weights and the three states of a per-parameter optimizer.
const STATES: [(&str, DType); 4] = [
    ("", DType::BFloat16),
    ("optimizer.state.fp32_param.", DType::Float32),
    ("optimizer.state.exp_avg.", DType::Float32),
    ("optimizer.state.exp_avg_sq.", DType::Float32),
];

#[derive(Clone, Copy)]
struct Rank {
    tp: u64,
    pp: u64,
    dp: u64,
}

impl Rank {
    /// Main replicas are spread over the data-parallel ranks, as a fully parallel save does.
    fn replica(self, number: u64, tp: u64) -> [u64; 3] {
        [0, tp, (self.dp + DP - number % DP) % DP]
    }

    /// Layer tensors `(name, local shape, axis cut by tensor parallelism, gated)`.
    fn layer(self, layer: u64, out: &mut Vec<ShardedValue>) {
        let tensors: [(&str, &[u64], Option<usize>, bool); 7] = [
            ("self_attention.linear_qkv.layer_norm_weight", &[HIDDEN], None, false),
            ("self_attention.linear_qkv.weight", &[3 * HIDDEN / TP, HIDDEN], Some(1), false),
            ("self_attention.linear_qkv.bias", &[3 * HIDDEN / TP], Some(1), false),
            ("self_attention.linear_proj.weight", &[HIDDEN, HIDDEN / TP], Some(2), false),
            ("mlp.linear_fc1.layer_norm_weight", &[HIDDEN], None, false),
            ("mlp.linear_fc1.weight", &[2 * FFN / TP, HIDDEN], Some(1), true),
            ("mlp.linear_fc2.weight", &[HIDDEN, FFN / TP], Some(2), false),
        ];
        for (state, (prefix, dtype)) in STATES.iter().enumerate() {
            for (number, (name, shape, cut, gated)) in tensors.iter().enumerate() {
                let key = format!("{prefix}decoder.layers.{name}");
                let local = LocalTensor::described(*dtype, *shape);
                let piece = layer + (state * tensors.len() + number) as u64;
                let replica = self.replica(piece, if cut.is_some() { 0 } else { self.tp });
                let mut shard = ShardedTensor::from_rank_offsets(key, local)
                    .prepended_axes(1)
                    .offset(0, layer, LAYERS)
                    .replica_id(replica);
                if let Some(axis) = cut {
                    shard = shard.offset(*axis, self.tp, TP);
                }
                let shard = shard.build().unwrap();
                out.push(if *gated {
                    swiglu(&shard).unwrap().build().unwrap()
                } else {
                    shard.into()
                });
            }
        }
        for name in [
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        ] {
            let key = format!("decoder.layers.{name}._extra_state");
            let object = ShardedObject::new(key, Value::None, [LAYERS], [layer]).unwrap();
            out.push(object.with_replica_id([0, self.tp, self.dp]).into());
        }
    }

    fn leaves(self) -> Vec<ShardedValue> {
        let mut out = Vec::new();
        for layer in self.pp * LAYERS / PP..(self.pp + 1) * LAYERS / PP {
            self.layer(layer, &mut out);
        }
        for (state, (prefix, dtype)) in STATES.iter().enumerate() {
            let edge = match self.pp {
                0 => "embedding.word_embeddings.weight",
                last if last == PP - 1 => "output_layer.weight",
                _ => continue,
            };
            let local = LocalTensor::described(*dtype, [VOCAB / TP, HIDDEN]);
            let shard = ShardedTensor::from_rank_offsets(format!("{prefix}{edge}"), local)
                .offset(0, self.tp, TP)
                .replica_id(self.replica(state as u64, 0));
            out.push(shard.build().unwrap().into());
        }
        out
    }
}

/// What the rank offers to write: its main replicas.
fn plan(rank: u32, leaves: &[ShardedLeaf<'_>]) -> SavePlan {
    let mut index = StateIndex::default();
    let mut known: std::collections::HashMap<&str, usize> = std::collections::HashMap::new();
    for leaf in leaves {
        match leaf {
            ShardedLeaf::Object(object) if object.replica_id().is_main() => {
                let (fqn, kind) = (object.unique_key().into(), LeafKind::Object { byte_len: 1264 });
                index.leaves.push(StateLeaf { fqn, path: None, kind });
            }
            ShardedLeaf::Tensor(tensor) if tensor.replica_id().is_main() => {
                let at = *known.entry(tensor.key()).or_insert_with(|| {
                    index.leaves.push(StateLeaf {
                        fqn: tensor.key().clone(),
                        path: None,
                        kind: LeafKind::Tensor {
                            dtype: tensor.dtype(),
                            shape: tensor.global_shape().clone(),
                            sharded: true,
                            regions: Vec::<Region>::new(),
                        },
                    });
                    index.leaves.len() - 1
                });
                if let LeafKind::Tensor { regions, .. } = &mut index.leaves[at].kind {
                    regions.push(tensor.region().clone());
                }
            }
            _ => {}
        }
    }
    let world = u32::try_from(TP * PP * DP).unwrap();
    DefaultSavePlanner::new().local_plan(&index, &PlanContext::new(rank, world)).unwrap()
}

/// What all ranks send: descriptions and plans, and how many shards and objects that are.
fn messages() -> (Vec<Bytes>, Vec<Bytes>, u64) {
    let (mut descriptions, mut plans, mut described) = (Vec::new(), Vec::new(), 0);
    for number in 0..u32::try_from(TP * PP * DP).unwrap() {
        let at = u64::from(number);
        let rank = Rank { tp: at % TP, dp: at / TP % DP, pp: at / TP / DP };
        let state = [("all", ShardedValue::List(rank.leaves()))].into_iter().collect();
        let leaves = sharded_leaves(&state);
        let description = RankShards::of(leaves.iter().copied());
        described += description.len() as u64;
        descriptions.push(description.to_wire());
        plans.push(plan(number, &leaves).to_wire());
    }
    (descriptions, plans, described)
}

fn validate(descriptions: &[Bytes]) {
    let ranks: Vec<RankShards> =
        descriptions.iter().map(|wire| RankShards::from_wire(wire).unwrap()).collect();
    validate_sharding_integrity(&ranks).unwrap();
}

fn make_plan(plans: &[Bytes]) {
    let locals: Vec<SavePlan> =
        plans.iter().map(|wire| SavePlan::from_wire(wire).unwrap()).collect();
    black_box(DefaultSavePlanner::new().global_plan(&locals).unwrap());
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let (descriptions, plans, described) = messages();
    let bytes: usize = descriptions.iter().map(Bytes::len).sum();
    println!("{described} shards and objects of {} ranks in {bytes} bytes", descriptions.len());
    let mut group = criterion.benchmark_group("tp8_pp16_dp32");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    group.throughput(Throughput::Elements(described));
    group.bench_function("validate", |bencher| bencher.iter(|| validate(black_box(&descriptions))));
    group.bench_function("plan", |bencher| bencher.iter(|| make_plan(black_box(&plans))));
    group.bench_function("validate_and_plan", |bencher| {
        bencher.iter(|| {
            validate(black_box(&descriptions));
            make_plan(black_box(&plans));
        });
    });
    group.finish();
    criterion.final_summary();
}
