//! Reads every byte of a `torch.save` file once, record by record.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointError, CheckpointMetadata, StorageErrorKind};
use dcp_formats::torch_save::{FileRecord, TorchSaveReader};
use futures_util::{StreamExt, stream};

use crate::error::ConvertError;
use crate::integrity::archive_audit::{Checked, Job};
use crate::integrity::problem::{Problem, ProblemKind, judge};
use crate::job::JobOptions;
use crate::read::objects::ObjectBatches;
use crate::read::stored_items::Placed;
use crate::source::Source;

/// The number of tensors named per damaged storage.
const NAMED: usize = 3;

/// Compares all records with their checksums, referenced or not, compares the bytes between them
/// with the directory, and decodes all objects. A file from before the zip format has no checksums
/// and is only read.
pub(crate) async fn check(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    save: &TorchSaveReader,
    items: &[Placed],
    options: &JobOptions,
) -> Result<Checked, ConvertError> {
    let job = &Arc::new(Job::new(source, metadata, options));
    let records = save.records().await?;
    job.options.start(records.iter().map(|r| r.record.byte_len).fold(0, u64::saturating_add));
    let mut results = stream::iter(records)
        .map(|record| {
            let (job, file) = (Arc::clone(job), save.key().clone());
            // Checksums are CPU-bound; the tasks run in parallel on a runtime with several threads.
            tokio::spawn(async move {
                let result = job.record(&file, &record.record).await;
                (record, result)
            })
        })
        .buffered(job.options.parallelism.max(1));
    let mut checked = Checked::default();
    while let Some(done) = results.next().await {
        let (record, result) = done.map_err(|error| {
            ConvertError::unsupported("a checking task", format!("failed: {error}"))
        })?;
        match result {
            Ok(()) => checked.bytes = checked.bytes.saturating_add(record.record.byte_len),
            Err(error) => checked.problems.push(problem(error, &record, save.key().as_str())?),
        }
    }
    let mut around = Vec::new();
    save.check_structure(|error| around.push(error)).await?;
    checked.problems.extend(around.into_iter().map(|error| {
        let mut problem = Problem::new(ProblemKind::Corrupt, error.problem());
        problem.file = Some(save.key().to_string());
        problem.byte_offset = error.byte_offset();
        problem
    }));
    let objects: Vec<_> = items.iter().filter(|item| item.chunk.is_none()).collect();
    let entries: Vec<_> = objects.iter().map(|item| item.entry).collect();
    let mut bad = HashMap::new();
    let mut batches = ObjectBatches::new(&job.source, &job.metadata, &entries);
    while let Some(batch) = batches.next().await {
        bad.extend(batch.into_iter().filter_map(|(entry, value)| Some((entry, value.err()?))));
    }
    for item in objects {
        if let Some(error) = bad.remove(&item.entry) {
            checked.problems.push(judge(error, &job.metadata, item)?);
        }
    }
    Ok(checked)
}

/// Reports a damaged record as a problem of the tensors in it.
fn problem(
    error: CheckpointError,
    record: &FileRecord,
    file: &str,
) -> Result<Problem, CheckpointError> {
    let (kind, message) = match &error {
        CheckpointError::Format(error) => (ProblemKind::Corrupt, error.problem().to_owned()),
        CheckpointError::Storage(storage) if storage.kind() == StorageErrorKind::Truncated => {
            (ProblemKind::ShortFile, "the file ends before".to_owned())
        }
        _ => return Err(error),
    };
    let others = match &*record.tensors {
        [] | [_] => String::new(),
        [_, others @ ..] => {
            let named = others.iter().take(NAMED).map(|fqn| format!("{fqn:?}"));
            let named = named.collect::<Vec<_>>().join(", ");
            let more = others.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("; {named}{more} share it")
        }
    };
    let mut problem = Problem::new(kind, format!("{}: {message}{others}", record.name));
    problem.key = record.tensors.first().cloned();
    problem.file = Some(file.to_owned());
    problem.byte_offset = Some(record.record.data.start);
    Ok(problem)
}
