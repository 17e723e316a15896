//! What the coordinator pays for a save, and a rank for a load.
//!
//! `cargo bench -p dcp-planner --bench planning`

#![allow(clippy::unwrap_used, reason = "a bench that fails may panic")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use dcp_core::metadata::{Encoding, Entry, FileId, Layout, Placement, TensorEntry};
use dcp_core::plan::{LeafKind, PlanContext, SavePlan, StateIndex, StateLeaf};
use dcp_core::planner::{LoadPlanner, SavePlanner};
use dcp_core::{CheckpointMetadata, DType, Key, Region};
use dcp_planner::mesh::chunk_along;
use dcp_planner::{DefaultLoadPlanner, DefaultSavePlanner, Holdings, ShareRule};

/// How every tensor of the model is spread over the ranks.
#[derive(Clone, Copy)]
enum Spread {
    Rows,
    Replicated,
    /// Rows over groups of 8 ranks, which replicate each other.
    RowsTimesReplicas,
    /// Rows over the first half of the mesh, columns over the second.
    Grid,
}

fn regions(spread: Spread, rank: u32, world: u32) -> (Vec<u64>, Vec<Region>) {
    let shape = vec![8192, 4096];
    let regions = match spread {
        Spread::Rows => chunk_along(&shape, 0, world, rank),
        Spread::Replicated => Region::full(shape.clone()).ok(),
        Spread::RowsTimesReplicas => chunk_along(&shape, 0, world / 8, rank / 8),
        Spread::Grid => {
            let (rows, columns) = (chunk_along(&shape, 0, world / 8, rank / 8), rank % 8);
            let columns = chunk_along(&shape, 1, 8, columns);
            rows.zip(columns).and_then(|(rows, columns)| rows.intersect(&columns))
        }
    };
    (shape, Vec::from_iter(regions))
}

fn offers(spread: Spread, world: u32, keys: u32) -> Vec<SavePlan> {
    let planner = DefaultSavePlanner::new();
    let offer = |rank| {
        let (shape, regions) = regions(spread, rank, world);
        let leaf = |key| StateLeaf {
            fqn: format!("model.layers.{key}.self_attn.q_proj.weight").into(),
            path: None,
            kind: LeafKind::Tensor {
                dtype: DType::BFloat16,
                shape: shape.as_slice().into(),
                sharded: !matches!(spread, Spread::Replicated),
                regions: regions.clone(),
            },
        };
        let state = StateIndex { leaves: (0..keys).map(leaf).collect() };
        planner.local_plan(&state, &PlanContext::new(rank, world)).unwrap()
    };
    (0..world).map(offer).collect()
}

fn global_plans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("global_plan");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_secs(2));
    let planner = DefaultSavePlanner::new();
    for (world, keys) in [(64, 1000), (1024, 500), (4096, 250)] {
        for (name, spread) in [
            ("rows", Spread::Rows),
            ("replicated", Spread::Replicated),
            ("rows_x_replicas", Spread::RowsTimesReplicas),
            ("grid", Spread::Grid),
        ] {
            let offers = offers(spread, world, keys);
            group.throughput(Throughput::Elements(u64::from(world) * u64::from(keys)));
            let id = BenchmarkId::new(name, format!("{world}x{keys}"));
            group.bench_with_input(id, &offers, |bencher, offers| {
                bencher.iter_with_large_drop(|| planner.global_plan(black_box(offers)).unwrap());
            });
        }
    }
    group.finish();
}

/// What the engine does with the plan of any planner.
fn checks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("check_against");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_secs(2));
    for (world, keys) in [(1024, 500), (4096, 250)] {
        for (name, spread) in
            [("rows", Spread::Rows), ("replicated", Spread::Replicated), ("grid", Spread::Grid)]
        {
            let offers = offers(spread, world, keys);
            let global = DefaultSavePlanner::new().global_plan(&offers).unwrap();
            let id = BenchmarkId::new(name, format!("{world}x{keys}"));
            group.bench_with_input(id, &offers, |bencher, offers| {
                bencher.iter(|| black_box(&global).check_against(offers, "bench").unwrap());
            });
        }
    }
    group.finish();
}

/// One tensor of 4096 columns, each a chunk.
fn columns(count: u32) -> CheckpointMetadata {
    let shape = [1024, u64::from(count)];
    let mut metadata = CheckpointMetadata::new();
    metadata.intern_file(&Key::new("data").unwrap());
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
    let file = FileId::from_index(0).unwrap();
    let mut tensor = TensorEntry::new(DType::Float32, shape);
    for column in 0..count {
        let chunk = chunk_along(&shape, 1, count, column).unwrap();
        let byte_len = chunk.volume() * 4;
        let byte_offset = u64::from(column) * byte_len;
        let placement = Placement { file, encoding, byte_offset, byte_len };
        tensor.chunks.push(chunk.offsets(), chunk.sizes(), Some(placement)).unwrap();
    }
    metadata.insert("w", Entry::Tensor(tensor));
    metadata
}

fn many_columns(criterion: &mut Criterion) {
    let metadata = columns(4096);
    criterion.bench_function("validate/4096_columns", |bencher| {
        bencher.iter(|| dcp_planner::validate_metadata(black_box(&metadata)));
    });
    let shape = [1024, 4096];
    let wanted = |regions: Vec<Region>| {
        let shape = shape.into();
        let kind = LeafKind::Tensor { dtype: DType::Float32, shape, sharded: true, regions };
        StateIndex { leaves: vec![StateLeaf { fqn: "w".into(), path: None, kind }] }
    };
    let one_row = wanted(vec![chunk_along(&shape, 0, 64, 3).unwrap()]);
    let tiles = (0..64).map(|part| chunk_along(&shape, 1, 64, part).unwrap()).collect();
    let tiles = wanted(tiles);
    for (name, wanted) in [("one_row_shard", one_row), ("64_column_shards", tiles)] {
        criterion.bench_function(&format!("load_plan/4096_columns/{name}"), |bencher| {
            bencher.iter(|| {
                let planner = DefaultLoadPlanner::new();
                planner.local_plan(black_box(&wanted), &metadata, &PlanContext::solo()).unwrap()
            });
        });
    }
}

/// Replicas of 100 000 chunks in a group of 4096 ranks, each held by `width` of them.
fn replicas(width: u32) -> Holdings {
    let mut holdings = Holdings::new(4096);
    let groups: Vec<_> = (0..4096 / width)
        .map(|group| holdings.holders(group * width..(group + 1) * width).unwrap())
        .collect();
    for piece in 0..100_000_u64 {
        let group = groups[usize::try_from(piece).unwrap() % groups.len()];
        holdings.push(group, piece * 7919 % 65_536 * 64, false);
    }
    holdings
}

fn sharing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("share_out");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    for width in [8, 512, 4096] {
        let holdings = replicas(width);
        for rule in [ShareRule::Megatron, ShareRule::Balanced] {
            let id = BenchmarkId::new(format!("{rule:?}"), format!("4096x100000/{width}"));
            group.bench_with_input(id, &holdings, |bencher, holdings| {
                bencher.iter(|| black_box(holdings).share_out(rule));
            });
        }
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    global_plans(&mut criterion);
    checks(&mut criterion);
    many_columns(&mut criterion);
    sharing(&mut criterion);
    criterion.final_summary();
}
