//! The Rust half of `cargo xtask bench plan`: one measurement per run, printed as a line of JSON.
//!
//! - `make-plans LAYOUT RANKS KEYS FILE`: the messages of all ranks of a first save, in one file.
//! - `plan FILE`: what the coordinator computes, from those messages to the validated global plan.
//! - `make-metadata LAYOUT RANKS KEYS FILE`: the `.metadata` of that save.
//! - `decode FILE`: its index; `decode-one FILE`: one tensor of it; `encode FILE`: the reverse.
//!
//! The code that is measured runs below a function named `measured`, by which callgrind finds it.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_core::metadata::{Encoding, Entry, Placement};
use dcp_core::path::PathItem;
use dcp_core::plan::{GlobalPlan, LeafKind, PlanContext, SavePlan, StateIndex, StateLeaf};
use dcp_core::planner::SavePlanner;
use dcp_core::{CheckpointMetadata, DType, Key, PlanError, Region};
use dcp_formats::metadata::{Profile, decode, decode_selected, encode};
use dcp_planner::DefaultSavePlanner;
use dcp_planner::mesh::chunk_along;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const SHAPE: [u64; 2] = [8192, 4096];
/// The tensor that `decode-one` reads.
const ONE: &str = "model.layers.1.mlp.up_proj.weight";

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match *args {
        ["make-plans", layout, ranks, keys, file] => {
            let (ranks, keys) = (ranks.parse()?, keys.parse()?);
            let mut out = Vec::new();
            for rank in 0..ranks {
                let message = local_plan(layout, rank, ranks, keys)?.to_wire();
                out.extend((message.len() as u64).to_le_bytes());
                out.extend_from_slice(&message);
            }
            Ok(std::fs::write(file, out)?)
        }
        ["make-metadata", layout, ranks, keys, file] => {
            let (ranks, keys) = (ranks.parse()?, keys.parse()?);
            let plans = (0..ranks).map(|rank| Ok(local_plan(layout, rank, ranks, keys)?.to_wire()));
            let plans = SavePlan::from_wires(&plans.collect::<Result<Vec<_>>>()?)?;
            Ok(std::fs::write(file, encode(&placed(&plans)?, Profile::default())?)?)
        }
        ["plan", file] => {
            let messages = messages(std::fs::read(file)?.into())?;
            let (plan, time) = timed(|| planned(&messages));
            report(time, chunks(&plan?.metadata))
        }
        ["decode", file] => {
            let bytes = std::fs::read(file)?;
            let (metadata, time) = timed(|| decode(&bytes));
            report(time, chunks(&metadata?))
        }
        ["decode-one", file] => {
            let bytes = std::fs::read(file)?;
            let is_wanted = |fqn: &str| fqn == ONE;
            let (decoded, time) = timed(|| decode_selected(&bytes, &is_wanted));
            report(time, chunks(&decoded?.metadata))
        }
        ["encode", file] => {
            let metadata = decode(&std::fs::read(file)?)?;
            let (bytes, time) = timed(|| encode(&metadata, Profile::default()));
            drop(bytes?);
            report(time, chunks(&metadata))
        }
        _ => Err(format!("unknown measurement {args:?}").into()),
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    // The peak of what was done before does not count; where it cannot be reset, it does.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let start = Instant::now();
    let result = measured(work);
    (result, start.elapsed())
}

#[inline(never)]
fn measured<T>(work: impl FnOnce() -> T) -> T {
    black_box(work())
}

fn report(time: Duration, items: usize) -> Result {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
    let peak_kib: u64 = peak.and_then(|kib| kib.parse().ok()).unwrap_or(0);
    let seconds = time.as_secs_f64();
    println!("{{\"seconds\": {seconds}, \"items\": {items}, \"peak_kib\": {peak_kib}}}");
    Ok(())
}

/// What the coordinator of a first save computes, before the format assigns places.
fn planned(messages: &[Bytes]) -> std::result::Result<GlobalPlan, PlanError> {
    let plans = SavePlan::from_wires(messages)?;
    let global = DefaultSavePlanner::new().global_plan(&plans)?;
    global.check_against(&plans, "bench")?;
    Ok(global)
}

fn messages(mut bytes: Bytes) -> Result<Vec<Bytes>> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let len = u64::from_le_bytes(bytes.split_to(8).as_ref().try_into()?);
        messages.push(bytes.split_to(usize::try_from(len)?));
    }
    Ok(messages)
}

fn chunks(metadata: &CheckpointMetadata) -> usize {
    metadata.iter().map(|(_, entry)| entry.as_tensor().map_or(1, |t| t.chunks.len())).sum()
}

/// The parts of a tensor that a rank holds.
fn regions(layout: &str, rank: u32, ranks: u32) -> Result<Vec<Region>> {
    let region = match layout {
        "rows" => chunk_along(&SHAPE, 0, ranks, rank),
        "replicated" => Region::full(SHAPE).ok(),
        // Rows over groups of 8 ranks, which replicate each other.
        "replicas" => chunk_along(&SHAPE, 0, ranks / 8, rank / 8),
        // Rows over the first axis of the mesh, columns over the second.
        "grid" => {
            let rows = chunk_along(&SHAPE, 0, ranks / 8, rank / 8);
            let columns = chunk_along(&SHAPE, 1, 8, rank % 8);
            rows.zip(columns).and_then(|(rows, columns)| rows.intersect(&columns))
        }
        _ => return Err(format!("unknown layout {layout}").into()),
    };
    Ok(Vec::from_iter(region))
}

/// What a rank offers: its parts of so many tensors.
fn local_plan(layout: &str, rank: u32, ranks: u32, keys: u32) -> Result<SavePlan> {
    const MODULES: [&str; 9] = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ];
    let regions = regions(layout, rank, ranks)?;
    let leaf = |key: u32| {
        let module = MODULES[key as usize % MODULES.len()];
        let name = format!("layers.{}.{module}.weight", key as usize / MODULES.len());
        let path = [PathItem::Key("model".into()), PathItem::Key(name.as_str().into())];
        StateLeaf {
            fqn: format!("model.{name}").into(),
            path: Some(path.into()),
            kind: LeafKind::Tensor {
                dtype: DType::BFloat16,
                shape: SHAPE.into(),
                sharded: layout != "replicated",
                regions: regions.clone(),
            },
        }
    };
    let state = StateIndex { leaves: (0..keys).map(leaf).collect() };
    let context = PlanContext::new(rank, ranks);
    let mut plan = DefaultSavePlanner::new().local_plan(&state, &context)?;
    plan.check_against(&state, "bench")?;
    Ok(plan)
}

/// The index of a save, with one file for each rank and a place for every chunk.
fn placed(plans: &[SavePlan]) -> Result<CheckpointMetadata> {
    let global = DefaultSavePlanner::new().global_plan(plans)?;
    let mut metadata = global.metadata;
    let encoding = metadata.intern_encoding(&Encoding::default()).ok_or("no encoding")?;
    for (rank, selected) in global.selections.iter().enumerate() {
        let file = Key::new(format!("__{rank}_0.distcp"))?;
        let file = metadata.intern_file(&file).ok_or("no file")?;
        let mut byte_offset = 0;
        for item in selected {
            let Some((_, Entry::Tensor(tensor))) = metadata.at_mut(item.entry as usize) else {
                continue;
            };
            let chunk = tensor.chunks.get(item.chunk as usize).ok_or("no chunk")?;
            let byte_len = chunk.region()?.volume() * 2 + 1577;
            let placement = Placement { file, encoding, byte_offset, byte_len };
            tensor.chunks.place(item.chunk as usize, placement);
            byte_offset += byte_len;
        }
    }
    Ok(metadata)
}
