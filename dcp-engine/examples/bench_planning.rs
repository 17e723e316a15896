//! The Rust half of `cargo xtask bench plan`: one measurement per run, printed as a line of JSON.
//!
//! - `make-plans LAYOUT RANKS KEYS FILE`: the messages of all ranks of a first save, in one file.
//! - `plan FILE`: what the coordinator computes, from those messages to the validated global plan. The
//!   functions are those of `dcp-engine/src/save/coordinator.rs`, and equal plans are sent once.
//! - `bytes LAYOUT RANKS KEYS`: the bytes of the messages of a first save, also those of whole plans.
//! - `make-metadata LAYOUT RANKS KEYS FILE`: the `.metadata` of that save.
//! - `decode FILE`: its index; `decode-one FILE`: one tensor of it; `encode FILE`: the reverse.
//!
//! The code that is measured runs below a function named `measured`, by which callgrind finds it.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_core::format::WantedKeys;
use dcp_core::metadata::{Encoding, Entry, FileId, Placement};
use dcp_core::path::PathItem;
use dcp_core::plan::{
    GlobalPlan, LeafKind, PlanContext, SavePlan, StateIndex, StateLeaf, WriteOrder, WritePlan,
};
use dcp_core::planner::SavePlanner;
use dcp_core::wire::{MessageWriter, PlanParts, PlanRequest, PlanSummary};
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
            let Sent { summaries, answers, .. } = sent(layout, ranks, keys)?;
            for (summary, answer) in summaries.iter().zip(answers) {
                out.extend(summary.fingerprint.to_le_bytes());
                out.extend(summary.outline.to_le_bytes());
                out.extend((answer.len() as u64).to_le_bytes());
                out.extend_from_slice(&answer);
            }
            Ok(std::fs::write(file, out)?)
        }
        ["bytes", layout, ranks, keys] => bytes_of(&sent(layout, ranks.parse()?, keys.parse()?)?),
        ["make-metadata", layout, ranks, keys, file] => {
            let (ranks, keys) = (ranks.parse()?, keys.parse()?);
            let Sent { summaries, answers, .. } = sent(layout, ranks, keys)?;
            let plans = SavePlan::from_answers(&summaries, &answers)?;
            Ok(std::fs::write(file, encode(&placed(&plans)?, Profile::default())?)?)
        }
        ["plan", file] => {
            let (summaries, answers) = received(std::fs::read(file)?.into())?;
            let (plan, time) = timed(|| planned(&summaries, &answers));
            report(time, chunks(&plan?.metadata))
        }
        ["decode", file] => {
            let bytes = std::fs::read(file)?;
            let (metadata, time) = timed(|| decode(&bytes));
            report(time, chunks(&metadata?))
        }
        ["decode-one", file] => {
            let bytes = std::fs::read(file)?;
            let wanted = WantedKeys::one(ONE);
            let (decoded, time) = timed(|| decode_selected(&bytes, &wanted));
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
fn planned(
    summaries: &[PlanSummary],
    answers: &[Bytes],
) -> std::result::Result<GlobalPlan, PlanError> {
    let plans = SavePlan::from_answers(summaries, answers)?;
    let global = DefaultSavePlanner::new().global_plan(&plans)?;
    global.check_against(&plans, "bench")?;
    Ok(global)
}

/// What the ranks of a first save send for their plans.
struct Sent {
    summaries: Vec<PlanSummary>,
    request: PlanRequest,
    answers: Vec<Bytes>,
    /// The bytes of the whole plans of all.
    whole: u64,
}

fn sent(layout: &str, ranks: u32, keys: u32) -> Result<Sent> {
    let mut parts = Vec::new();
    for rank in 0..ranks {
        parts.push(local_plan(layout, rank, ranks, keys)?.to_parts());
    }
    let summaries: Vec<PlanSummary> = parts.iter().map(PlanParts::summary).collect();
    let request = PlanRequest::of(&summaries);
    let answers = (0..).zip(&parts).map(|(rank, parts)| request.answer(rank, parts)).collect();
    let whole = parts.iter().map(|parts| parts.to_wire().len() as u64).sum();
    Ok(Sent { summaries, request, answers, whole })
}

/// Prints how many bytes of plans the coordinator receives and sends, without those of the group.
fn bytes_of(sent: &Sent) -> Result {
    let Sent { summaries, request, answers, whole } = sent;
    let plans = SavePlan::from_answers(summaries, answers)?;
    let mut global = DefaultSavePlanner::new().global_plan(&plans)?;
    let places = places(&mut global)?;
    let places: usize = places.iter().map(|plan| plan.to_wire().len()).sum();
    let mut message = MessageWriter::new(*b"size");
    request.write_to(&mut message);
    let request = message.finish().len() - 4;
    let lens = || answers.iter().map(Bytes::len);
    let (received, most) = (lens().sum::<usize>(), lens().skip(1).max().unwrap_or(0));
    println!(
        "{{\"whole\": {whole}, \"request\": {request}, \"received\": {received}, \
          \"most\": {most}, \"places\": {places}}}"
    );
    Ok(())
}

fn received(mut bytes: Bytes) -> Result<(Vec<PlanSummary>, Vec<Bytes>)> {
    let (mut summaries, mut answers) = (Vec::new(), Vec::new());
    while !bytes.is_empty() {
        let fingerprint = u128::from_le_bytes(bytes.split_to(16).as_ref().try_into()?);
        let mut number =
            || Ok::<_, Box<dyn Error>>(u64::from_le_bytes(bytes.split_to(8).as_ref().try_into()?));
        let (outline, len) = (number()?, number()?);
        summaries.push(PlanSummary { fingerprint, outline });
        answers.push(bytes.split_to(usize::try_from(len)?));
    }
    Ok((summaries, answers))
}

fn chunks(metadata: &CheckpointMetadata) -> usize {
    metadata.iter().map(|(_, entry)| entry.as_tensor().map_or(1, |t| t.chunks.len())).sum()
}

/// The parts of the tensor `key` that a rank holds.
fn regions(layout: &str, (rank, ranks): (u32, u32), key: u32) -> Result<Vec<Region>> {
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
        // Tensor parallelism over 8 ranks, by columns or by rows as the key is, and rows over the
        // ranks of one of four pipeline stages.
        "mixed" => {
            let (stage, rank) = (ranks / 4, rank % (ranks / 4));
            if key.is_multiple_of(2) {
                let rows = chunk_along(&SHAPE, 0, stage / 8, rank / 8);
                let columns = chunk_along(&SHAPE, 1, 8, rank % 8);
                rows.zip(columns).and_then(|(rows, columns)| rows.intersect(&columns))
            } else {
                chunk_along(&SHAPE, 0, stage, rank)
            }
        }
        // As a grid, but no two tensors are cut at the same rows.
        "irregular" => {
            let parts = u64::from(ranks / 8);
            let cut = |at: u64| match at {
                0 => 0,
                at if at == parts => SHAPE[0],
                at => {
                    let random = (at << 32 | u64::from(key)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    at * SHAPE[0] / parts + (random ^ random >> 29) % 3
                }
            };
            let at = u64::from(rank / 8);
            let rows = Region::new([cut(at), 0], [cut(at + 1) - cut(at), SHAPE[1]])?;
            chunk_along(&SHAPE, 1, 8, rank % 8).and_then(|columns| rows.intersect(&columns))
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
    let leaf = |key: u32| -> Result<StateLeaf> {
        let module = MODULES[key as usize % MODULES.len()];
        let stage = if layout == "mixed" { rank / (ranks / 4) * 1000 } else { 0 };
        let layer = key as usize / MODULES.len() + stage as usize;
        let name = format!("layers.{layer}.{module}.weight");
        let path = [PathItem::Key("model".into()), PathItem::Key(name.as_str().into())];
        Ok(StateLeaf {
            fqn: format!("model.{name}").into(),
            path: Some(path.into()),
            kind: LeafKind::Tensor {
                dtype: DType::BFloat16,
                shape: SHAPE.into(),
                sharded: layout != "replicated",
                regions: regions(layout, (rank, ranks), key)?,
            },
        })
    };
    let state = StateIndex { leaves: (0..keys).map(leaf).collect::<Result<_>>()? };
    let context = PlanContext::new(rank, ranks);
    let mut plan = DefaultSavePlanner::new().local_plan(&state, &context)?;
    plan.check_against(&state, "bench")?;
    Ok(plan)
}

/// The index of a save, with one file for each rank and a place for every chunk.
fn placed(plans: &[SavePlan]) -> Result<CheckpointMetadata> {
    let mut global = DefaultSavePlanner::new().global_plan(plans)?;
    places(&mut global)?;
    Ok(global.metadata)
}

/// Places every chunk in the file of its rank. Returns what each rank writes.
fn places(global: &mut GlobalPlan) -> Result<Vec<WritePlan>> {
    let metadata = &mut global.metadata;
    let encoding = metadata.intern_encoding(&Encoding::default()).ok_or("no encoding")?;
    let mut plans = Vec::new();
    for (rank, selected) in global.selections.iter().enumerate() {
        let name = Key::new(format!("__{rank}_0.distcp"))?;
        let file = metadata.intern_file(&name).ok_or("no file")?;
        let mut plan = WritePlan {
            files: vec![name],
            encodings: vec![Encoding::default()],
            ..WritePlan::default()
        };
        let mut byte_offset = 0;
        for item in selected {
            let Some((_, Entry::Tensor(tensor))) = metadata.at_mut(item.entry as usize) else {
                continue;
            };
            let chunk = tensor.chunks.get(item.chunk as usize).ok_or("no chunk")?;
            let byte_len = chunk.region()?.volume() * 2 + 1577;
            let placement = Placement { file, encoding, byte_offset, byte_len };
            tensor.chunks.place(item.chunk as usize, placement);
            let file = FileId::from_index(0).ok_or("no file")?;
            let placement = Placement { file, encoding: 0, ..placement };
            plan.orders.push(WriteOrder { item: item.item, placement });
            byte_offset += byte_len;
        }
        plans.push(plan);
    }
    Ok(plans)
}
