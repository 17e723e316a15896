//! Verifies a Megatron-Core checkpoint: PyTorch's files, the common state, the optimizer.

use std::sync::Arc;

use dcp_core::text::{Message, counted};
use dcp_core::{CheckpointError, CheckpointMetadata, Storage};
use dcp_jobs::integrity::{Problem, ProblemKind, foreign_callables};
use dcp_jobs::verify::VerifyReport;
use dcp_jobs::{JobError, JobOptions, Source};
use futures_util::StreamExt as _;

use crate::disk::common_state::{COMMON_FILE, COMMON_STATE, CommonPlace};
use crate::disk::manifest::{problem, verify_manifest};
use crate::error::MegatronError;
use crate::object_grids::{index_problem, object_grids};
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, StoredFormat};
use crate::optimizer::{CheckDepth, OptimizerReport, OptimizerVerdict, check_optimizer};

/// The files that Megatron-Core hashes are only read in a deep check.
const NOT_COMPARED: &str =
    "there is an integrity.json; a deep check compares the files with its SHA-256 sums";

/// Checks a checkpoint, or the latest one of a run, and collects everything that is wrong with it.
///
/// Always: `metadata.json`, the index and the lengths of files as
/// [`dcp_jobs::verify::verify`] does it, that the common state can be read, that every grid of objects
/// is complete, that nothing in it runs commands where Python loads it, that flattened tensors make
/// up their logical shapes, that every file is there that `integrity.json` names. Where all of this
/// holds, samples of the optimizer's state are compared with the model: Megatron-Core 0.15 to 0.19
/// may have shifted it. With `deep`, too: every stored byte against its checksum, every file
/// against `integrity.json` where there is one, and all of the optimizer's state.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`] of a tolerant reader: when there is no checkpoint that could be
/// checked, or the storage fails.
pub async fn verify(
    storage: &Arc<dyn Storage>,
    deep: bool,
    job: &JobOptions,
) -> Result<VerifyReport, MegatronError> {
    verify_with(storage, deep, &MegatronOpenOptions::default().with_job(job.clone())).await
}

/// Verifies a checkpoint that is opened with `options`, such as a plug-in's strategy, though always
/// tolerantly.
///
/// # Errors
///
/// As [`verify`].
pub async fn verify_with(
    storage: &Arc<dyn Storage>,
    deep: bool,
    options: &MegatronOpenOptions,
) -> Result<VerifyReport, MegatronError> {
    let checkpoint =
        MegatronCheckpoint::open(storage, &options.clone().with_tolerant(true)).await?;
    verify_opened(&checkpoint, deep, &options.job).await
}

/// Verifies a checkpoint that was opened tolerantly. The ranks of a [group](JobOptions::group)
/// divide the comparison of stored bytes; rank 0 does the rest, and its report is the complete one.
///
/// # Errors
///
/// When the storage fails.
pub async fn verify_opened(
    checkpoint: &MegatronCheckpoint,
    deep: bool,
    job: &JobOptions,
) -> Result<VerifyReport, MegatronError> {
    let mut report = match checkpoint.format() {
        StoredFormat::Legacy { .. } => {
            let files = verify_files(checkpoint.storage(), deep, job).await?;
            counted_as_merged(files, &*checkpoint.source().metadata().await?)
        }
        _ => dcp_jobs::verify::verify(checkpoint.stored(), deep, job).await?,
    };
    // Rank 0 of a group has what all ranks found.
    let Some(job) = &job.of_coordinator() else { return Ok(report) };
    report.format = checkpoint.format().name().to_owned();
    for damage in checkpoint.damage() {
        let known = report.problems.iter().any(|problem| damage.contains(&*problem.message));
        if !known {
            report.problems.push(index_problem(None, damage.clone()));
        }
    }
    let metadata = checkpoint.source().metadata().await?;
    report.problems.extend(object_grids(&metadata));
    // The versions with other formats wrote no manifest.
    let has_manifest =
        !matches!(checkpoint.format(), StoredFormat::Legacy { .. } | StoredFormat::Zarr);
    if has_manifest && let Some(problems) = verify_manifest(checkpoint.storage(), deep, job).await?
    {
        if !deep && problems.is_empty() {
            report.notes.push(NOT_COMPARED.to_owned());
        }
        report.problems.extend(problems);
    }
    let in_file = match checkpoint.format() {
        StoredFormat::TorchDist { common } => *common == CommonPlace::File,
        StoredFormat::Zarr => true,
        StoredFormat::Legacy { .. } | StoredFormat::Plugged { .. } => false,
    };
    // Elsewhere it was among the objects, in the ranks' files, or wherever a plug-in has it.
    if in_file {
        let found = foreign_callables(&COMMON_STATE.into(), checkpoint.common_value())?;
        report.judge_callables(found, Some(COMMON_FILE));
    }
    report.notes.extend(checkpoint.warnings().iter().cloned());
    // Damage that was found makes a comparison meaningless.
    if report.problems.is_empty() {
        let depth = if deep { CheckDepth::Full } else { CheckDepth::Sampled };
        let (source, common) = (checkpoint.source(), checkpoint.common());
        add_optimizer(&check_optimizer(source, common, depth, job).await?, &mut report);
    }
    report.ok = report.problems.is_empty();
    Ok(report)
}

/// Adds what was found in the optimizer's state.
fn add_optimizer(found: &OptimizerReport, report: &mut VerifyReport) {
    match found.verdict {
        OptimizerVerdict::ShiftedBuckets | OptimizerVerdict::PossiblyShifted => {}
        OptimizerVerdict::Different => {
            let differ = counted(found.mismatches.len() as u64, "master parameter");
            let names = found.mismatches.iter().map(|mismatch| &*mismatch.param);
            report.notes.push(format!(
                "the optimizer has {differ} other than the weights, as when weights were replaced: {}",
                first_of(names)
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
        "{}; the model is sound. `OptimizerOptions::repair` takes the master \
         parameters from the weights and resets the moments",
        found.verdict
    ));
}

/// The first of some names, and how many more there are.
fn first_of<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 5;
    let more = names.len().saturating_sub(SHOWN);
    let mut shown: Vec<_> = names.take(SHOWN).map(|name| Message(name).to_string()).collect();
    if more > 0 {
        shown.push(format!("and {more} more"));
    }
    shown.join(", ")
}

/// The report with the tensors and objects that the checkpoint has, where the files of its ranks
/// have parts of them.
fn counted_as_merged(mut report: VerifyReport, metadata: &CheckpointMetadata) -> VerifyReport {
    report.tensors = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some()).count();
    report.objects = metadata.len() - report.tensors;
    report
}

/// Checks the files of the ranks of the format `torch`, each a checkpoint of its own.
async fn verify_files(
    storage: &Arc<dyn Storage>,
    deep: bool,
    job: &JobOptions,
) -> Result<VerifyReport, MegatronError> {
    let mut files = Vec::new();
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        if key.as_str().starts_with("mp_rank_") && key.as_str().ends_with(".pt") {
            files.push(key);
        }
    }
    files.sort();
    let mut report = VerifyReport::default();
    report.deep = deep;
    report.files = files.len();
    for key in files {
        let source = Source::torch_save(Arc::clone(storage), key.clone());
        match dcp_jobs::verify::verify(&source, deep, job).await {
            Ok(one) => {
                report.bytes_checked += one.bytes_checked;
                report.problems.extend(one.problems);
                report.notes.extend(one.notes);
            }
            Err(JobError::Checkpoint(CheckpointError::Format(error))) => {
                let error = error.in_file(key.as_str(), 0).to_string();
                report.problems.push(problem(ProblemKind::Corrupt, key.as_str(), error));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(report)
}
