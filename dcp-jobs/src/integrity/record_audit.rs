//! Compares the records of a format with their checksums, as its [`CheckpointAudit`] reads them.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::format::{CheckpointAudit, RecordLimits, StoredRecord};
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageErrorKind};
use futures_util::{StreamExt as _, stream};

use crate::error::JobError;
use crate::integrity::archive_audit::Checked;
use crate::integrity::problem::{Problem, ProblemKind, judge};
use crate::options::JobOptions;
use crate::read::objects::ObjectBatches;
use crate::read::stored_items::Placed;
use crate::source::Source;

/// The number of tensors named per damaged record.
const NAMED: usize = 3;

/// The records of each file, in order of their places: start, end, position.
#[derive(Debug)]
pub(crate) struct RecordMap(HashMap<Key, Vec<(u64, u64, usize)>>);

impl RecordMap {
    pub(crate) fn new(records: &[StoredRecord]) -> Self {
        let mut files: HashMap<Key, Vec<_>> = HashMap::new();
        for (at, record) in records.iter().enumerate() {
            let place = (record.bytes.start, record.bytes.end, at);
            files.entry(record.file.clone()).or_default().push(place);
        }
        files.values_mut().for_each(|places| places.sort_unstable());
        Self(files)
    }

    /// The record that holds all bytes of an item.
    pub(crate) fn holder(&self, metadata: &CheckpointMetadata, item: &Placed) -> Option<usize> {
        let places = self.0.get(metadata.file(item.placement.file)?)?;
        let before = places.partition_point(|(start, ..)| *start <= item.placement.byte_offset);
        let (_, end, at) = places.get(before.checked_sub(1)?)?;
        (*end >= item.end()).then_some(*at)
    }
}

/// Divides items into those that are checked with `records`, and those that are checked alone.
/// Objects that `share_bytes` are decoded together: every read of a file of `torch.save` parses all
/// of its pickle.
pub(crate) fn divide(
    metadata: &CheckpointMetadata,
    items: Vec<Placed>,
    records: &[StoredRecord],
    share_bytes: bool,
) -> (Vec<Placed>, Vec<Placed>) {
    let map = RecordMap::new(records);
    let is_inside =
        |item: &Placed| share_bytes && item.chunk.is_none() || map.holder(metadata, item).is_some();
    items.into_iter().partition(is_inside)
}

/// The records of a checkpoint; none of a format without records.
pub(crate) async fn records(
    audit: Option<&Arc<dyn CheckpointAudit>>,
) -> Result<Vec<StoredRecord>, CheckpointError> {
    match audit.and_then(|audit| audit.records()) {
        Some(audit) => audit.records().await,
        None => Ok(Vec::new()),
    }
}

/// Compares `records` with their checksums.
pub(crate) async fn check(
    audit: &Arc<dyn CheckpointAudit>,
    records: Vec<StoredRecord>,
    options: &JobOptions,
) -> Result<Checked, JobError> {
    let segment_bytes = options.segment_bytes(2 * options.parallelism);
    let mut results = stream::iter(records)
        .map(|record| {
            let (audit, options) = (Arc::clone(audit), options.clone());
            // Checksums take a processor each: on a runtime of several threads they run at once.
            tokio::spawn(async move {
                let progress = |bytes| options.advance(bytes);
                let limits = RecordLimits::new(segment_bytes, &progress);
                let result = match (options.check_group(), audit.records()) {
                    (Err(error), _) => Err(error),
                    (Ok(()), Some(audit)) => audit.check_record(&record, limits).await,
                    (Ok(()), None) => Ok(()),
                };
                (record, result)
            })
        })
        .buffered(options.parallelism.max(1));
    let mut checked = Checked::default();
    while let Some(done) = results.next().await {
        let (record, result) =
            done.map_err(|error| JobError::task("compares checksums", &error))?;
        match result {
            Ok(()) => {
                let byte_len = record.bytes.end.saturating_sub(record.bytes.start);
                checked.bytes = checked.bytes.saturating_add(byte_len);
            }
            Err(error) => checked.problems.push(problem(error, &record)?),
        }
    }
    Ok(checked)
}

/// Compares what is between the records.
pub(crate) async fn structure(
    audit: &Arc<dyn CheckpointAudit>,
) -> Result<Checked, CheckpointError> {
    let mut checked = Checked::default();
    if let Some(audit) = audit.records() {
        checked.problems.extend(audit.check_structure().await?.into_iter().map(Problem::from));
    }
    Ok(checked)
}

/// Decodes the objects among `items`, whose bytes are in records.
pub(crate) async fn objects(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    items: &[Placed],
) -> Result<Checked, JobError> {
    let objects: Vec<_> = items.iter().filter(|item| item.chunk.is_none()).collect();
    let entries: Vec<_> = objects.iter().map(|item| item.entry).collect();
    let mut bad = HashMap::new();
    let mut batches = ObjectBatches::new(source, metadata, &entries);
    while let Some(batch) = batches.next().await {
        bad.extend(batch.into_iter().filter_map(|(entry, value)| Some((entry, value.err()?))));
    }
    let mut checked = Checked::default();
    for item in objects {
        if let Some(error) = bad.remove(&item.entry) {
            checked.problems.push(judge(error, metadata, item)?);
        }
    }
    Ok(checked)
}

/// A damaged record as a problem of the tensors that are in it.
fn problem(error: CheckpointError, record: &StoredRecord) -> Result<Problem, CheckpointError> {
    let (kind, message) = match &error {
        CheckpointError::Format(error) => (ProblemKind::Corrupt, error.problem().to_owned()),
        CheckpointError::Storage(storage) => match storage.kind() {
            StorageErrorKind::Truncated => {
                (ProblemKind::ShortFile, "the file ends before".to_owned())
            }
            StorageErrorKind::NotFound => {
                (ProblemKind::MissingFile, "the file is missing".to_owned())
            }
            _ => return Err(error),
        },
        _ => return Err(error),
    };
    let others = match &*record.keys {
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
    problem.key = record.keys.first().cloned();
    problem.file = Some(record.file.to_string());
    problem.byte_offset = Some(record.bytes.start);
    Ok(problem)
}
