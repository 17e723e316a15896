//! Verifies a checkpoint: its index, its files, and every stored byte.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::error::ChunksProblem;
use dcp_core::format::{Findings, StoredRecord};
use dcp_core::metadata::Entry;
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, StorageErrorKind};
use dcp_planner::validate_metadata;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::error::JobError;
use crate::integrity::archive_audit::Checked;
use crate::integrity::problem::{Problem, ProblemKind};
use crate::integrity::{VerifyReport, archive_audit, callables, record_audit};
use crate::options::JobOptions;
use crate::read::stored_items::{Placed, placed_items, shared_bytes};
use crate::source::Source;

/// Verifies a checkpoint and collects all of its problems.
///
/// Always checked: chunks are inside their tensors, do not overlap and cover them; files exist and
/// are long enough; no two items claim the same bytes; no object runs commands when Python loads
/// it. With `deep` also: the CRC-32 of every record, the dtype and shape of every blob, the
/// decoding of every object. Memory stays within [`JobOptions::max_memory`] for tensors of any
/// size. The ranks of a [group](JobOptions::group) divide the deep check by bytes, and the report of
/// rank 0 has what all of them found; the others' is not complete.
///
/// # Errors
///
/// When there is no checkpoint, its index cannot be read at all, or the storage fails for its own
/// reasons, such as permissions. Problems of the checkpoint are in the report.
pub async fn verify(
    source: &Source,
    deep: bool,
    options: &JobOptions,
) -> Result<VerifyReport, JobError> {
    let metadata = source.metadata().await?;
    let mut report = VerifyReport { deep, ..VerifyReport::default() };
    report.format = metadata.provenance().format.as_deref().unwrap_or("unknown").to_owned();
    for (_, entry) in metadata.iter() {
        match entry {
            Entry::Tensor(_) => report.tensors += 1,
            _ => report.objects += 1,
        }
    }
    report.files = metadata.files().len();
    for error in validate_metadata(&metadata) {
        index_problems(error, &mut report.problems);
    }
    let items = placed_items(&metadata);
    let audit = source.audit();
    let findings = match audit {
        Some(audit) => audit.findings().await?,
        None => Findings::default(),
    };
    if !findings.shares_bytes {
        report.problems.extend(shared_bytes(&items).into_iter().map(|(item, message)| {
            Problem::new(ProblemKind::SharedBytes, message).at(&metadata, item)
        }));
    }
    let sizes = file_sizes(source, &metadata, options).await?;
    let readable = files(&metadata, &items, &sizes, &mut report.problems);
    report.problems.extend(findings.problems.into_iter().map(Problem::from));
    report.notes = findings.notes;
    let objects: HashSet<usize> =
        readable.iter().filter(|item| item.chunk.is_none()).map(|item| item.entry).collect();
    if options.is_coordinator() {
        let is_read = |at| objects.contains(&at);
        let foreign = callables::in_checkpoint(source, &metadata, is_read).await?;
        let file = source.single_pickle().map(ToString::to_string);
        report.judge_callables(foreign, file.as_deref());
    }
    if deep {
        let records = record_audit::records(audit).await?;
        let (inside, alone) =
            record_audit::divide(&metadata, readable, &records, findings.shares_bytes);
        let work = DeepWork { source, metadata: &metadata, records, inside, alone };
        for checked in work.run(options).await? {
            report.add(checked);
        }
        report.notes.extend(findings.unchecked);
    }
    report.ok = report.problems.is_empty();
    Ok(report)
}

/// The reads of a deep check.
struct DeepWork<'a> {
    source: &'a Source,
    metadata: &'a Arc<CheckpointMetadata>,
    records: Vec<StoredRecord>,
    /// Items that are checked with the records.
    inside: Vec<Placed>,
    /// The other items.
    alone: Vec<Placed>,
}

impl DeepWork<'_> {
    /// Does the share of this rank. Rank 0 returns the results of all ranks, in the order in which
    /// one process finds them.
    async fn run(mut self, options: &JobOptions) -> Result<Vec<Checked>, JobError> {
        let (source, metadata, audit) = (self.source, self.metadata, self.source.audit());
        let record_bytes =
            self.records.iter().map(|one| one.bytes.end.saturating_sub(one.bytes.start));
        let item_bytes = self.alone.iter().map(|item| item.placement.byte_len);
        let byte_lens: Vec<u64> = record_bytes.chain(item_bytes).collect();
        options.start(byte_lens.iter().copied().fold(0, u64::saturating_add));
        if let Some(group) = &options.group {
            let share = group.share(&byte_lens);
            let records = self.records.len();
            let items = share.start.saturating_sub(records)..share.end.saturating_sub(records);
            self.alone = self.alone.drain(items).collect();
            self.records =
                self.records.drain(share.start.min(records)..share.end.min(records)).collect();
        }
        let mut found = Vec::new();
        if let Some(audit) = audit {
            found.push(record_audit::check(audit, self.records, options).await?);
            if options.is_coordinator() {
                found.push(record_audit::structure(audit).await?);
                found.push(record_audit::objects(source, metadata, &self.inside).await?);
            } else {
                found.extend([Checked::default(), Checked::default()]);
            }
        }
        found.push(archive_audit::check(source, metadata, self.alone, options).await?);
        match &options.group {
            None => Ok(found),
            Some(group) => {
                let mine = serde_json::to_vec(&found).map_err(CheckpointError::application)?;
                let all = group.gather(mine.into()).await?.unwrap_or_default();
                let all: Result<Vec<Vec<Checked>>, _> =
                    all.iter().map(|one| serde_json::from_slice(one)).collect();
                Ok(in_order(all.map_err(CheckpointError::application)?))
            }
        }
    }
}

/// The parts of all ranks' checks: the first of each rank, then the second of each.
fn in_order(ranks: Vec<Vec<Checked>>) -> Vec<Checked> {
    let mut ranks: Vec<_> = ranks.into_iter().map(Vec::into_iter).collect();
    let mut ordered = Vec::new();
    loop {
        let before = ordered.len();
        ordered.extend(ranks.iter_mut().filter_map(Iterator::next));
        if ordered.len() == before {
            return ordered;
        }
    }
}

/// Converts the planner's findings to problems.
fn index_problems(error: PlanError, problems: &mut Vec<Problem>) {
    let message = error.to_string();
    let key = error.fqn().map(Into::into);
    let kind = match error {
        PlanError::Many(all) => {
            all.into_iter().for_each(|error| index_problems(error, problems));
            return;
        }
        PlanError::Chunks { problem: ChunksProblem::Outside { .. }, .. } => {
            ProblemKind::OutOfBounds
        }
        PlanError::Chunks { problem: ChunksProblem::Overlap { .. }, .. } => ProblemKind::Overlap,
        PlanError::Chunks { problem: ChunksProblem::Uncovered { .. }, .. } => {
            ProblemKind::Uncovered
        }
        _ => ProblemKind::Index,
    };
    let mut problem = Problem::new(kind, message);
    problem.key = key;
    problems.push(problem);
}

/// The length of each file, by its position in the index; `None` for a missing one.
async fn file_sizes(
    source: &Source,
    metadata: &CheckpointMetadata,
    options: &JobOptions,
) -> Result<Vec<Option<u64>>, CheckpointError> {
    let stats = metadata.files().iter().map(|key| async move {
        match source.storage.stat(key).await {
            Ok(meta) => Ok(Some(meta.byte_len)),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::from(error)),
        }
    });
    // A stream over the closure itself would not be `Send`.
    let stats: Vec<_> = stats.collect();
    stream::iter(stats).buffered(options.parallelism.max(1)).try_collect().await
}

/// Compares placements with files, and returns the items whose bytes exist.
fn files(
    metadata: &CheckpointMetadata,
    items: &[Placed],
    sizes: &[Option<u64>],
    problems: &mut Vec<Problem>,
) -> Vec<Placed> {
    let mut missing: HashMap<usize, (usize, &Placed)> = HashMap::new();
    let mut readable = Vec::with_capacity(items.len());
    for item in items {
        let index = item.placement.file.index();
        match sizes.get(index).copied().flatten() {
            None => missing.entry(index).or_insert((0, item)).0 += 1,
            Some(len) if len < item.end() => {
                let message = format!(
                    "the file has {len} bytes, but bytes {}..{} should be in it",
                    item.placement.byte_offset,
                    item.end()
                );
                problems.push(Problem::new(ProblemKind::ShortFile, message).at(metadata, item));
            }
            Some(_) => readable.push(item.clone()),
        }
    }
    let mut missing: Vec<_> = missing.into_iter().collect();
    missing.sort_by_key(|(index, _)| *index);
    for (index, (count, first)) in missing {
        let others = match count {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let message = format!("the file is missing; it should hold {:?}{others}", first.fqn);
        let mut problem = Problem::new(ProblemKind::MissingFile, message);
        problem.file = metadata.files().get(index).map(ToString::to_string);
        problems.push(problem);
    }
    readable
}
