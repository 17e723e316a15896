//! What is verified, and refused, of checkpoints of Megatron-Core.

use std::sync::Arc;

use dcp::convert::{JobOptions, Problem, ProblemKind, VerifyReport};
use dcp::megatron::optimizer::{CheckDepth, OptimizerReport, OptimizerVerdict, check_optimizer};
use dcp::megatron::{METADATA_JSON, MegatronCheckpoint, TRACKER, verify_opened};

use crate::failure::Failure;
use crate::incomplete_save::Unfinished;
use crate::open::Opened;
use crate::style::count;
use crate::summary::list;

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
    let unfinished = opened.unfinished.as_ref().map(Unfinished::note);
    add(ProblemKind::MissingFile, METADATA_JSON, &unfinished);
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
