//! What is verified, and refused, of checkpoints of Megatron-Core.

use std::sync::Arc;

use dcp::convert::{JobOptions, Problem, ProblemKind, VerifyReport};
use dcp::megatron::optimizer::{CheckDepth, OptimizerReport, OptimizerVerdict, check_optimizer};
use dcp::megatron::{
    COMMON_FILE, CheckpointingConfig, METADATA_JSON, MegatronCheckpoint, TRACKER, verify_opened,
};

use crate::failure::{Exit, Failure};
use crate::open::Opened;
use crate::style::count;
use crate::tell::list;

/// Checks a checkpoint: what is stored, and whether the optimizer's state is that of the model.
pub(crate) async fn verify(
    checkpoint: &MegatronCheckpoint,
    deep: bool,
    options: &JobOptions,
) -> Result<VerifyReport, Failure> {
    let mut report = verify_opened(checkpoint, deep, options).await?;
    report.format = format!("megatron_{}", checkpoint.describe().await?.format);
    let depth = if deep { CheckDepth::Full } else { CheckDepth::Sampled };
    // What cannot be read is no evidence of anything else.
    if report.ok {
        let (source, common) = (checkpoint.source(), checkpoint.common());
        add_optimizer(&check_optimizer(source, common, depth, options).await?, &mut report);
    }
    report.ok = report.problems.is_empty();
    Ok(report)
}

/// Refuses to make something that looks whole of a checkpoint whose save did not finish, and whose
/// common state would be gone.
pub(crate) fn refuse_unfinished(opened: &Opened) -> Result<(), Failure> {
    if opened.unfinished.is_none() {
        return Ok(());
    }
    let message = format!(
        "{:?} has a {COMMON_FILE} but no {METADATA_JSON}, which Megatron-Core writes last: the save \
         did not finish, or the file was not copied",
        opened.uri
    );
    let whole = CheckpointingConfig::torch_dist().to_json();
    Err(Failure::new(Exit::Bad, message).hint(format!(
        "take another iteration; if only the file was lost, put it back: {whole}; its tensors alone \
         can be had with --to safetensors"
    )))
}

/// Adds that the save did not finish, and what is wrong with the tracker of the run.
pub(crate) fn add_surroundings(opened: &Opened, report: &mut VerifyReport) {
    let mut add = |kind, file: &str, message: &Option<String>| {
        let Some(message) = message else { return };
        let mut problem = Problem::default();
        problem.kind = kind;
        problem.file = Some(file.to_owned());
        problem.message = message.clone();
        report.problems.push(problem);
        report.ok = false;
    };
    add(ProblemKind::MissingFile, METADATA_JSON, &opened.unfinished);
    add(ProblemKind::Index, TRACKER, &opened.wrong_tracker);
}

/// Adds what was found in the optimizer's state.
fn add_optimizer(found: &OptimizerReport, report: &mut VerifyReport) {
    match found.verdict {
        OptimizerVerdict::ShiftedBuckets | OptimizerVerdict::PossiblyShifted => {}
        OptimizerVerdict::Different => {
            let names: Vec<_> = found.mismatches.iter().map(|m| Arc::clone(&m.param)).collect();
            let differ = count(names.len(), "master parameter");
            report.notes.push(format!(
                "the optimizer has {differ} other than the weights, as when weights were replaced: {}",
                list(&names)
            ));
            return;
        }
        _ => return,
    }
    for mismatch in &found.mismatches {
        let mut problem = Problem::default();
        problem.kind = ProblemKind::Corrupt;
        problem.key = Some(Arc::clone(&mismatch.master));
        problem.message = mismatch.to_string();
        report.problems.push(problem);
    }
    report.notes.push(format!(
        "{}; the model is sound. `dcp convert --to torch-dist --repair-optimizer` takes the master \
         parameters from the weights and resets the moments",
        found.verdict
    ));
}
