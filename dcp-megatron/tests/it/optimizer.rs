//! Optimizer state of real checkpoints by parameter, damaged by Megatron and not.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::metadata::Entry;
use dcp_core::{Region, Storage, Value};
use dcp_jobs::get::{Found, find};
use dcp_jobs::view::{Assembled, Piece, PieceFrom};
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::optimizer::{
    CheckDepth, OptimizerFormat, OptimizerVerdict, PerParameter, check_optimizer, is_optimizer_key,
    per_parameter, per_parameter_of_legacy, restart_optimizer,
};
use dcp_megatron::partition::ParallelLayout;
use dcp_megatron::{MegatronCheckpoint, MegatronError, MegatronOpenOptions, MegatronWriter};
use dcp_megatron::{disk::COMMON_STATE, jobs::to_torch_dist};

use crate::support::{Tensors, block_on, expected_json, expected_tensors, stored};

pub(crate) fn open(fixture: &str) -> MegatronCheckpoint {
    block_on(MegatronCheckpoint::open(&stored(fixture), &MegatronOpenOptions::default())).unwrap()
}

pub(crate) fn shown(fixture: &str) -> PerParameter {
    let checkpoint = open(fixture);
    let (source, common) = (checkpoint.source(), checkpoint.common());
    block_on(per_parameter(source, common, &JobOptions::default())).unwrap()
}

/// The tensors of a checkpoint for whose names `keep` holds: shape and bytes.
pub(crate) fn tensors(source: &Source, keep: impl Fn(&str) -> bool) -> Tensors {
    let metadata = block_on(source.metadata()).unwrap();
    let names = metadata.iter().filter(|(fqn, entry)| entry.as_tensor().is_some() && keep(fqn));
    let read = |fqn: &str| match block_on(find(source, fqn, None)).unwrap() {
        Found::Tensor(tensor) => {
            (tensor.shape().to_vec(), block_on(tensor.read()).unwrap().to_vec())
        }
        other => panic!("{other:?}"),
    };
    names.map(|(fqn, _)| (fqn.to_string(), read(fqn))).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn verdict(source: &Source, common: &dcp_core::value::Dict, depth: CheckDepth) -> OptimizerVerdict {
    block_on(check_optimizer(source, common, depth, &JobOptions::default())).unwrap().verdict
}

const FORMATS: &[(&str, OptimizerFormat)] = &[
    ("factories", OptimizerFormat::None),
    ("gpt_async", OptimizerFormat::None),
    ("gpt_dp2_dp_reshardable", OptimizerFormat::DpReshardable),
    ("gpt_dp2_dp_reshardable_multibucket", OptimizerFormat::DpReshardable),
    ("gpt_dp_zero_gather_scatter", OptimizerFormat::DpZeroGatherScatter),
    ("gpt_float16_optimizer", OptimizerFormat::NonDistributed),
    ("gpt_fully_reshardable_multibucket_CORRUPT", OptimizerFormat::FullyReshardable),
    ("gpt_moe_chained_dp_reshardable", OptimizerFormat::DpReshardable),
    ("gpt_separation_hint", OptimizerFormat::FullyReshardable),
    ("gpt_tp2dp2_fully_reshardable", OptimizerFormat::FullyReshardable),
    ("head020_fully_reshardable_multibucket", OptimizerFormat::FullyReshardable),
    ("head020_gpt_dp2_dp_reshardable", OptimizerFormat::DpReshardable),
    ("run_torch_dist_dp2", OptimizerFormat::DpReshardable),
    ("v015_gpt_tp2dp2_swiglu_fs_model_space", OptimizerFormat::FullyShardedModelSpace),
];

#[test]
fn formats_are_told_apart() {
    for (fixture, format) in FORMATS {
        let checkpoint = open(fixture);
        let metadata = block_on(checkpoint.source().metadata()).unwrap();
        assert_eq!(OptimizerFormat::of(&metadata, checkpoint.common()), *format, "{fixture}");
    }
}

#[test]
fn trap_21_shifted_optimizer_state_is_found_and_nothing_else() {
    for (fixture, format) in FORMATS {
        let checkpoint = open(fixture);
        for depth in [CheckDepth::Full, CheckDepth::Sampled] {
            let expected = match (fixture.ends_with("CORRUPT"), format.is_by_parameter()) {
                (true, _) => OptimizerVerdict::ShiftedBuckets,
                (false, true) => OptimizerVerdict::Sound,
                (false, false) => OptimizerVerdict::NotComparable,
            };
            let found = verdict(checkpoint.source(), checkpoint.common(), depth);
            assert_eq!(found, expected, "{fixture}");
        }
    }
}

#[test]
fn trap_20_flat_buffers_hold_what_the_same_run_saved_by_parameter() {
    // Saved after the same step of the same model, in other formats and by other versions.
    let by_parameter = expected_tensors("head020_fully_reshardable_multibucket");
    for fixture in [
        "gpt_dp2_dp_reshardable_multibucket",
        "gpt_dp_zero_gather_scatter",
        "head020_gpt_dp2_dp_reshardable",
    ] {
        let shown = shown(fixture);
        assert!(shown.report.is_complete(), "{fixture}: {:?}", shown.report);
        assert_eq!(shown.report.params, 8, "{fixture}");
        let found = tensors(&shown.source, |_| true);
        assert_eq!(found.len(), by_parameter.len(), "{fixture}");
        for (fqn, expected) in &by_parameter {
            assert_eq!(&found[fqn], expected, "{fixture}: {fqn}");
        }
        let metadata = block_on(shown.source.metadata()).unwrap();
        let format = OptimizerFormat::of(&metadata, &shown.common);
        assert_eq!(format, OptimizerFormat::FullyReshardable);
    }
}

#[test]
fn the_common_state_becomes_that_of_fully_reshardable() {
    let expected = expected_json("head020_fully_reshardable_multibucket");
    for fixture in ["gpt_dp2_dp_reshardable_multibucket", "gpt_dp_zero_gather_scatter"] {
        let shown = shown(fixture);
        let optimizer = shown.common.get("optimizer").unwrap();
        crate::expected::check(optimizer, &expected["common"]["optimizer"], fixture);
        let content = shown.common.get("content_metadata").unwrap();
        crate::expected::check(content, &expected["common"]["content_metadata"], fixture);
        let Found::Object(stored) = block_on(find(&shown.source, COMMON_STATE, None)).unwrap()
        else {
            panic!("{fixture}: no common state")
        };
        assert!(stored.to_string().contains("fully_reshardable"), "{fixture}");
    }
}

/// The values that the fixtures' generator gives gradients: they rise by a fortieth of a
/// hundredth, and begin elsewhere for every parameter.
fn assert_is_one_parameters(moments: &[f32], what: &str) {
    let wrap = |from: f32, to: f32| {
        let step = to - from;
        (step - 0.00025).abs() < 1e-6 || (step + 0.03175).abs() < 1e-6
    };
    for pair in moments.windows(2) {
        assert!(wrap(pair[0], pair[1]), "{what}: {pair:?}");
    }
}

#[test]
fn moments_lie_where_master_parameters_do() {
    for (fixture, params) in [
        ("gpt_dp2_dp_reshardable", 8),
        ("gpt_moe_chained_dp_reshardable", 9),
        ("run_torch_dist_dp2", 8),
    ] {
        let shown = shown(fixture);
        assert!(shown.report.is_complete(), "{fixture}: {:?}", shown.report);
        assert_eq!(shown.report.params, params, "{fixture}");
        let job = JobOptions::default();
        let check = check_optimizer(&shown.source, &shown.common, CheckDepth::Full, &job);
        let check = block_on(check).unwrap();
        assert_eq!((check.verdict, check.compared), (OptimizerVerdict::Sound, params), "{fixture}");
        for (fqn, (shape, bytes)) in tensors(&shown.source, |fqn| fqn.contains(".exp_avg.")) {
            // Every expert is a parameter of its own, and so is each half of a gated matrix.
            let experts = if fqn.contains("experts") { shape[1] as usize } else { 1 };
            let moments = floats(&bytes);
            for of_one in moments.chunks(moments.len() / experts) {
                assert_is_one_parameters(of_one, &format!("{fixture}: {fqn}"));
            }
        }
        for (fqn, (_, squares)) in tensors(&shown.source, |fqn| fqn.contains(".exp_avg_sq.")) {
            let of_moments = fqn.replace("exp_avg_sq", "exp_avg");
            let moments = tensors(&shown.source, |fqn| fqn == of_moments);
            let (_, moments) = &moments[&of_moments];
            for (square, moment) in floats(&squares).iter().zip(floats(moments)) {
                let expected = (moment * 10.0).powi(2) * 0.001;
                assert!((square - expected).abs() < 1e-8, "{fqn}: {square} and {expected}");
            }
        }
    }
}

#[test]
fn experts_of_a_chain_come_from_their_own_groups() {
    let shown = shown("gpt_moe_chained_dp_reshardable");
    let layout = shown.report.layout.as_ref().unwrap();
    // Seven dense parameters, and two of each of two experts.
    assert_eq!((layout.by_value, layout.by_order.len()), (11, 0));
    let optimizer = shown.common.get("optimizer").unwrap().as_dict().unwrap();
    for chained in 0..2_i64 {
        let part = optimizer.get_value(&Value::Int(chained)).unwrap().as_dict().unwrap();
        let inner = part.get("optimizer").unwrap().as_dict().unwrap();
        let Some(Value::List(groups)) = inner.get("param_groups") else { panic!("no groups") };
        let is_expert = groups[0].as_dict().unwrap().get("is_expert_parallel").unwrap();
        assert!(is_expert.same(&Value::Bool(chained == 1)));
    }
    let metadata = block_on(shown.source.metadata()).unwrap();
    assert!(metadata.iter().all(|(fqn, _)| !fqn.contains("chained_") && !fqn.contains("bucket")));
}

#[test]
fn formats_with_names_are_renamed() {
    for fixture in ["gpt_float16_optimizer", "v015_gpt_tp2dp2_swiglu_fs_model_space"] {
        let shown = shown(fixture);
        let expected = expected_tensors(fixture);
        let found = tensors(&shown.source, |_| true);
        assert_eq!(found.len(), expected.len(), "{fixture}");
        for (fqn, expected) in &expected {
            let canonical = fqn.replace(".fp32_param.", ".param.");
            assert_eq!(&found[&canonical], expected, "{fixture}: {fqn}");
        }
        let optimizer = shown.common.get("optimizer").unwrap().as_dict().unwrap();
        assert!(optimizer.get("param_state").is_none());
        let inner = optimizer.get("optimizer").unwrap().as_dict().unwrap();
        let Some(Value::List(groups)) = inner.get("param_groups") else { panic!("no groups") };
        for group in groups {
            let step = group.as_dict().unwrap().get("step").unwrap();
            assert_eq!(step.as_float(), Some(1.0), "{fixture}");
        }
    }
}

#[test]
fn trap_21_a_damaged_optimizer_begins_anew_from_the_weights() {
    let fixture = "gpt_fully_reshardable_multibucket_CORRUPT";
    let checkpoint = open(fixture);
    let job = JobOptions::default();
    let made = restart_optimizer(checkpoint.source(), checkpoint.common(), &job);
    let made = block_on(made).unwrap();
    assert_eq!((made.params, made.kept.len()), (8, 0));
    assert_eq!(verdict(&made.source, &made.common, CheckDepth::Full), OptimizerVerdict::Sound);
    let expected = expected_tensors(fixture);
    let found = tensors(&made.source, |_| true);
    assert_eq!(found.len(), expected.len());
    for (fqn, (shape, bytes)) in &found {
        assert_eq!(shape, &expected[fqn].0, "{fqn}");
        if let Some(weight) = fqn.strip_prefix("optimizer.state.param.") {
            let weight = &expected[weight].1;
            let exact: Vec<u8> = weight.chunks(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
            assert_eq!(bytes, &exact, "{fqn}");
        } else if is_optimizer_key(fqn) {
            assert!(bytes.iter().all(|byte| *byte == 0), "{fqn}");
        } else {
            assert_eq!(bytes, &expected[fqn].1, "{fqn}");
        }
    }
    let inner = made.common.get("optimizer").unwrap().as_dict().unwrap();
    let inner = inner.get("optimizer").unwrap().as_dict().unwrap();
    let Some(Value::List(groups)) = inner.get("param_groups") else { panic!("no groups") };
    for group in groups {
        assert_eq!(group.as_dict().unwrap().get("step").unwrap().as_float(), Some(0.0));
    }
}

#[test]
fn moments_without_a_master_parameter_begin_anew_too() {
    let checkpoint = open("head020_fully_reshardable_multibucket");
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let job = JobOptions::default();
    let mut view = block_on(Assembled::builder(&[checkpoint.source().clone()], &job)).unwrap();
    let param = "embedding.word_embeddings.weight";
    let (gone, master) = (param, format!("optimizer.state.param.{param}"));
    for (at, (fqn, entry)) in metadata.iter().enumerate().filter(|(_, (fqn, _))| &***fqn != gone) {
        view.pass(&**fqn, entry.path().cloned(), 0, at).unwrap();
    }
    let source = view.finish().unwrap();
    let made = block_on(restart_optimizer(&source, checkpoint.common(), &job)).unwrap();
    assert_eq!((made.params, &*made.kept), (7, &[master.as_str().into()][..]));
    let moments = tensors(&made.source, |fqn| fqn.contains(".exp_avg"));
    assert_eq!(moments.len(), 16);
    for (fqn, (_, bytes)) in moments {
        assert!(bytes.iter().all(|byte| *byte == 0), "{fqn}");
    }
}

#[test]
fn flat_state_cannot_begin_anew() {
    let checkpoint = open("gpt_dp2_dp_reshardable");
    let job = JobOptions::default();
    let made = block_on(restart_optimizer(checkpoint.source(), checkpoint.common(), &job));
    let Err(MegatronError::Optimizer { what, problem }) = made else { panic!("{made:?}") };
    assert_eq!(what, "dp_reshardable");
    assert!(problem.contains("leave the optimizer out"), "{problem}");
}

/// The checkpoint of `gpt_dp2_dp_reshardable`, with the elements of both matrices of the MLP, and
/// of their master parameters, the first one's; their names are changed by `name`.
fn with_equal_matrices(name: impl Fn(&str) -> String) -> (MegatronCheckpoint, Source) {
    let checkpoint = open("gpt_dp2_dp_reshardable");
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let job = JobOptions::default();
    let parts = [checkpoint.source().clone()];
    let mut view = block_on(Assembled::builder(&parts, &job)).unwrap();
    let first = metadata.index_of("decoder.layers.mlp.linear_fc1.weight").unwrap();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let fqn = &**fqn;
        let Entry::Tensor(tensor) = entry else {
            view.pass(fqn, None, 0, at).unwrap();
            continue;
        };
        let range = |from: u64, len: u64| Region::new([from], [len]).unwrap();
        let pieces: Vec<_> = if fqn.ends_with("linear_fc2.weight") {
            let whole = |shape: &[u64]| Region::full(shape).unwrap();
            let from = PieceFrom::Reshaped { part: 0, entry: first, region: whole(&[1, 12, 8]) };
            vec![Piece { region: whole(&[1, 8, 12]), from }]
        } else if fqn.ends_with("bucket_idx_0.param") {
            // linear_fc2 is at 64..160, linear_fc1 at 192..288.
            let chunks = tensor.chunks.iter().map(|chunk| {
                let (start, len) = (chunk.offsets[0], chunk.sizes[0]);
                let from = if start == 64 { 192 } else { start };
                Piece::same(range(start, len), 0, at, range(from, len))
            });
            chunks.collect()
        } else {
            view.pass(name(fqn), None, 0, at).unwrap();
            continue;
        };
        view.tensor(name(fqn), None, tensor.dtype, tensor.shape.clone(), pieces).unwrap();
    }
    let source = view.finish().unwrap();
    (checkpoint, source)
}

#[test]
fn equal_parameters_are_told_by_the_order_of_registration() {
    let (checkpoint, source) = with_equal_matrices(str::to_owned);
    let job = JobOptions::default();
    let shown = block_on(per_parameter(&source, checkpoint.common(), &job)).unwrap();
    let layout = shown.report.layout.as_ref().unwrap();
    assert!(layout.is_complete(), "{layout:?}");
    let placed: Vec<_> = layout.by_order.iter().map(|one| (&*one.param, one.element)).collect();
    let expected = [
        ("decoder.layers.mlp.linear_fc2.weight", 64),
        ("decoder.layers.mlp.linear_fc1.weight", 192),
    ];
    assert_eq!((placed, layout.by_value), (expected.to_vec(), 6));
    // The moments, which are not equal, are those of the parameters they were saved for.
    let by_value = self::shown("gpt_dp2_dp_reshardable");
    let moments = |source: &Source| tensors(source, |fqn| fqn.contains(".exp_avg"));
    assert_eq!(moments(&shown.source), moments(&by_value.source));
}

#[test]
fn trap_20_equal_parameters_of_unknown_modules_are_ambiguous() {
    let rename = |fqn: &str| fqn.replace("decoder.layers.mlp.linear_", "custom.");
    let (checkpoint, source) = with_equal_matrices(rename);
    let job = JobOptions::default();
    let shown = block_on(per_parameter(&source, checkpoint.common(), &job)).unwrap();
    let layout = shown.report.layout.as_ref().unwrap();
    assert!(!shown.report.is_complete());
    let places: Vec<_> =
        layout.ambiguous.iter().map(|place| (place.element, place.elements)).collect();
    assert_eq!(places, [(64, 96), (192, 96)]);
    let candidates: Vec<_> = layout.ambiguous[0].candidates.iter().map(|(key, _)| &**key).collect();
    assert_eq!(candidates, ["custom.fc1.weight", "custom.fc2.weight"]);
    let problems = layout.problems().join("\n");
    assert!(problems.contains("elements 64 to 160"), "{problems}");
    assert!(problems.contains("of custom.fc1.weight or of custom.fc2.weight"), "{problems}");
    // What is stored is still there, and so are the parameters that were found.
    let names = |source| tensors(source, |_| true).into_keys().collect::<Vec<_>>();
    let found = names(&shown.source);
    assert!(names(&source).iter().all(|fqn| found.contains(fqn)));
    assert!(found.contains(&"optimizer.state.param.embedding.word_embeddings.weight".to_owned()));
    let is_equal_one = |fqn: &&String| {
        fqn.contains(".state.") && (fqn.ends_with("fc1.weight") || fqn.ends_with("fc2.weight"))
    };
    let of_custom = found.iter().filter(is_equal_one);
    assert_eq!(of_custom.collect::<Vec<_>>(), Vec::<&String>::new());
    assert!(
        shown.common.get("optimizer").unwrap().same(checkpoint.common().get("optimizer").unwrap())
    );
}

/// A sound checkpoint in which these tensors are rows of another one, from that row on, or are
/// zeros: of weights the second half.
fn with_elements_of(
    changes: &[(&str, Option<(&str, u64)>)],
    depth: CheckDepth,
) -> dcp_megatron::optimizer::OptimizerReport {
    let checkpoint = open("head020_fully_reshardable_multibucket");
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let job = JobOptions::default();
    let parts = [checkpoint.source().clone()];
    let mut view = block_on(Assembled::builder(&parts, &job)).unwrap();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let change = changes.iter().find(|(name, _)| **name == **fqn);
        let (Entry::Tensor(tensor), Some((_, from))) = (entry, change) else {
            view.pass(&**fqn, None, 0, at).unwrap();
            continue;
        };
        let whole = Region::full(tensor.shape.clone()).unwrap();
        let piece = match from {
            None if fqn.starts_with("optimizer.") => Piece::zeros(whole),
            None => {
                let (mut start, mut sizes) = (vec![0; tensor.shape.ndim()], tensor.shape.to_vec());
                sizes[0] /= 2;
                let kept = Region::new(start.clone(), sizes.clone()).unwrap();
                start[0] = sizes[0];
                let rest = Region::new(start, sizes).unwrap();
                let pieces = vec![Piece::same(kept.clone(), 0, at, kept), Piece::zeros(rest)];
                view.tensor(&**fqn, None, tensor.dtype, tensor.shape.clone(), pieces).unwrap();
                continue;
            }
            Some((other, row)) => {
                let from = metadata.index_of(other).unwrap();
                let mut sizes = metadata.get(other).unwrap().as_tensor().unwrap().shape.to_vec();
                let mut start = vec![0; sizes.len()];
                // Whole rows: the last axis but one is cut.
                let axis = sizes.len().saturating_sub(2);
                let of_row: u64 = sizes[axis + 1..].iter().product();
                start[axis] = *row;
                sizes[axis] = whole.volume() / of_row;
                let region = Region::new(start, sizes).unwrap();
                Piece { region: whole, from: PieceFrom::Reshaped { part: 0, entry: from, region } }
            }
        };
        view.tensor(&**fqn, None, tensor.dtype, tensor.shape.clone(), vec![piece]).unwrap();
    }
    let source = view.finish().unwrap();
    block_on(check_optimizer(&source, checkpoint.common(), depth, &job)).unwrap()
}

#[test]
fn trap_21_a_shift_that_is_longer_than_every_parameter_is_not_missed() {
    use OptimizerVerdict as V;
    let master = |name: &str| format!("optimizer.state.param.{name}");
    let qkv = master("decoder.layers.self_attention.linear_qkv.weight");
    let proj = master("decoder.layers.self_attention.linear_proj.weight");
    let fc1 = master("decoder.layers.mlp.linear_fc1.weight");
    let (qkv, proj, fc1) = (&*qkv, &*proj, &*fc1);
    for depth in [CheckDepth::Full, CheckDepth::Sampled] {
        let verdict = |changes: &[_]| with_elements_of(changes, depth);
        // Behind the end of the buffer there are zeros.
        let report = verdict(&[(qkv, None), (proj, None)]);
        assert_eq!((report.verdict, report.is_corrupt()), (V::PossiblyShifted, false));
        assert!(report.is_suspect());
        // What was cut out of the buffer begins in the middle of another parameter.
        let report = verdict(&[(proj, Some((qkv, 4))), (fc1, None)]);
        assert_eq!(report.verdict, V::ShiftedBuckets, "{report:?}");
        // One alone may be so by chance.
        let report = verdict(&[(proj, Some((qkv, 4)))]);
        assert_eq!(report.verdict, V::PossiblyShifted, "{report:?}");
    }
}

#[test]
fn weights_that_were_replaced_are_not_taken_for_the_defect() {
    let report = with_elements_of(&[("decoder.final_layernorm.weight", None)], CheckDepth::Full);
    assert_eq!(report.verdict, OptimizerVerdict::Different, "{report:?}");
    assert!(!report.is_suspect());
    let [mismatch] = &*report.mismatches else { panic!("{:?}", report.mismatches) };
    assert_eq!((mismatch.differing, mismatch.elements), (4, 8));
    assert!(mismatch.to_string().contains("4 of 8 elements differ"), "{mismatch}");
}

#[test]
fn optimizers_of_legacy_folders_are_shown_by_parameter() {
    let checkpoint = open("run_legacy_torch_tp2");
    let (source, files) = (checkpoint.source(), checkpoint.optimizer_files());
    assert_eq!(files.len(), 2);
    let job = JobOptions::default();
    let shown = per_parameter_of_legacy(source, checkpoint.common(), files, &job);
    let shown = block_on(shown).unwrap();
    assert_eq!(shown.report.from, OptimizerFormat::LegacyDistributed);
    assert!(shown.report.is_complete(), "{:?}", shown.report);
    let check = check_optimizer(&shown.source, &shown.common, CheckDepth::Full, &job);
    let check = block_on(check).unwrap();
    assert_eq!((check.verdict, check.compared), (OptimizerVerdict::Sound, 8));
    let moments = tensors(&shown.source, |fqn| fqn.contains(".exp_avg."));
    assert_eq!(moments.len(), 8);
    let (shape, bytes) = &moments["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"];
    assert_eq!(shape, &[1, 24, 8]);
    // Gradients run through what a rank has: a part of the gate, then that of the other matrix.
    let numbers = floats(bytes);
    for rank in 0..2 {
        let part = |which: usize| &numbers[(which * 12 + rank * 6) * 8..][..48];
        assert_is_one_parameters(&[part(0), part(1)].concat(), &format!("rank {rank}"));
    }
    let optimizer = shown.common.get("optimizer").unwrap().as_dict().unwrap();
    let kind = optimizer.get("param_state_sharding_type").unwrap();
    assert_eq!(kind.as_str(), Some("fully_reshardable"));
}

#[test]
fn what_was_flat_is_written_for_ranks_of_another_layout() {
    let checkpoint = open("gpt_dp2_dp_reshardable_multibucket");
    let job = JobOptions::default();
    let shown = block_on(per_parameter(checkpoint.source(), checkpoint.common(), &job)).unwrap();
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&storage));
    let layout = ParallelLayout::new(2, 1);
    block_on(to_torch_dist(&shown.source, writer, layout, &job)).unwrap();
    let open = MegatronOpenOptions::default();
    let written = block_on(MegatronCheckpoint::open(&storage, &open)).unwrap();
    let found = tensors(written.source(), |_| true);
    assert_eq!(found, expected_tensors("head020_fully_reshardable_multibucket"));
    let verdict = verdict(written.source(), written.common(), CheckDepth::Full);
    assert_eq!(verdict, OptimizerVerdict::Sound);
    let expected = expected_json("head020_fully_reshardable_multibucket");
    let optimizer = written.common().get("optimizer").unwrap();
    crate::expected::check(optimizer, &expected["common"]["optimizer"], "written");
    assert!(written.common().get("args").is_some());
}
