//! OLMo-core's `unshard_checkpoint`: a sharded checkpoint as plain files.

mod export_marks;
mod files;
mod replace;
mod writing;
mod written;

use dcp_core::storage::StorageExt;
use std::num::NonZeroU64;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Key, Storage, StorageError};
use dcp_formats::torch_save::TorchSaveOptions;
use dcp_jobs::convert::{to_safetensors, to_torch_save};
use dcp_jobs::group::JobGroup;
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::write::{ConversionReport, Target};
use dcp_jobs::{JobError, JobOptions, Source};
use indexmap::IndexMap;
use serde::Serialize;

use self::export_marks::{mark, marks, remove_all, unmark};
use self::files::{Files, below, divide, is_exported};
use self::replace::{Nowhere, Old};
use self::writing::Writing;
use crate::rekeyed::{Origin, Shown};
use crate::roots::{MODEL, OPTIM};

/// The division of a checkpoint into files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnshardStrategy {
    /// `model.safetensors`, and `optim.safetensors`.
    #[default]
    OneFile,
    /// `model/model-blocks-0-w1-weight.safetensors`: dots of the name as dashes.
    OneFilePerTensor,
    /// `model/chunk-00000.safetensors`, …: tensors in the order of the checkpoint, at most this
    /// many bytes of them in each file; a larger tensor gets a file alone.
    Chunks(NonZeroU64),
}

/// The format of the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnshardFormat {
    /// safetensors, which hold tensors only.
    #[default]
    Safetensors,
    /// Files of `torch.save`: dicts by name, an optimizer in one file nested as it was saved.
    TorchSave,
}

impl UnshardFormat {
    fn ending(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::TorchSave => "pt",
        }
    }

    fn holds_objects(self) -> bool {
        self == Self::TorchSave
    }

    /// The name that Hugging Face's libraries look for.
    fn index_name(self) -> &'static str {
        match self {
            Self::Safetensors => "model.safetensors.index.json",
            Self::TorchSave => "pytorch_model.bin.index.json",
        }
    }

    async fn write(
        self,
        source: &Source,
        target: &Target,
        options: &JobOptions,
    ) -> Result<ConversionReport, JobError> {
        match self {
            Self::Safetensors => to_safetensors(source, target, options).await,
            Self::TorchSave => {
                to_torch_save(source, target, TorchSaveOptions::default(), options).await
            }
        }
    }
}

/// Options of an unshard.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnshardOptions {
    /// The division into files.
    pub(crate) strategy: UnshardStrategy,
    /// Their format.
    pub(crate) format: UnshardFormat,
    /// Whether the optimizer is written as well. OLMo-core (3.0) can only in one file of
    /// `torch.save`.
    pub(crate) optim: bool,
    /// Whether files that are there are replaced.
    pub(crate) save_overwrite: bool,
}

impl UnshardOptions {
    /// Sets the division into files.
    #[must_use]
    pub fn strategy(mut self, strategy: UnshardStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets the format of the files.
    #[must_use]
    pub fn format(mut self, format: UnshardFormat) -> Self {
        self.format = format;
        self
    }

    /// Sets whether the optimizer is written.
    #[must_use]
    pub fn optim(mut self, optim: bool) -> Self {
        self.optim = optim;
        self
    }

    /// Whether the optimizer's state is written, too.
    #[must_use]
    pub fn writes_optim(&self) -> bool {
        self.optim
    }

    /// Sets whether existing files are replaced.
    #[must_use]
    pub fn save_overwrite(mut self, overwrite: bool) -> Self {
        self.save_overwrite = overwrite;
        self
    }
}

/// The report of the files written. Serialized, it is the output of `dcp unshard --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UnshardReport {
    /// Whether this is only what would have been written.
    pub dry_run: bool,
    /// Tensors written.
    pub tensors: usize,
    /// Objects written.
    pub objects: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Each file and its bytes, in the order of writing.
    pub files: IndexMap<String, u64>,
    /// Files of the replaced export that the new one does not have, and that are gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// Keys that are neither of the model nor of an optimizer that is written.
    pub dropped: Vec<Arc<str>>,
    /// Objects that the format cannot hold. Those of the optimizer are in a JSON file beside it.
    pub left_out: Vec<Arc<str>>,
    /// Tensors of a dtype that the format has no name for; stored as bytes.
    pub raw: Vec<Arc<str>>,
}

/// Writes the model of a checkpoint, and its optimizer on request, as plain files under
/// the names that OLMo-core gives them, with keys that do not begin with `model.` or `optim.`.
/// Where there are several files, an index names the file of each key.
///
/// Data is streamed: memory does not grow with the checkpoint. Names are checked before anything
/// is written; a failure later removes the files that are new.
///
/// With [`UnshardOptions::save_overwrite`], what is there of a single file is replaced at once.
/// Where several files are replaced, all is read first, with its checksums, so that a damaged
/// checkpoint changes nothing. Then the old index is removed, or without one all old files but the
/// first, the files are replaced, and the new index is the last that is written. So whatever
/// happens, old and new files never look like one model; a failure in between leaves neither of
/// the two. Last, files that only the old index named are removed.
///
/// The ranks of a [group](JobOptions::group) divide the files by bytes, and rank 0 writes what makes them
/// one model; its report is the complete one.
///
/// While several files are written, a [`UNFINISHED_NAME`](dcp_formats::hf::UNFINISHED_NAME) is among
/// them: where a killed export left it without an index, every reader calls the folder unfinished.
///
/// # Errors
///
/// When there is no model in the checkpoint; when two keys would get the same file, or a file is
/// there already; and when reading or writing fails.
pub async fn unshard_checkpoint(
    source: &Source,
    target: &Arc<dyn Storage>,
    options: &UnshardOptions,
    job: &JobOptions,
) -> Result<UnshardReport, JobError> {
    let metadata = source.metadata().await?;
    // A dry run is done by each rank for itself.
    let group = job.group.as_ref().filter(|_| !job.dry_run);
    let is_coordinator = job.is_coordinator();
    let job = &job.of_one_rank();
    let mut report = UnshardReport { dry_run: job.dry_run, ..UnshardReport::default() };
    let parts = exported(&metadata, options)?;
    let taken: std::collections::HashSet<usize> =
        parts.iter().flat_map(|(_, shown)| shown).map(position).collect();
    let names = metadata.iter().enumerate().filter(|(at, _)| !taken.contains(at));
    report.dropped = names.map(|(_, (fqn, _))| Arc::clone(fqn)).collect();

    let mut total = 0_u64;
    let mut planned = Vec::new();
    for (root, shown) in parts {
        let (objects, tensors): (Vec<_>, Vec<_>) = shown
            .into_iter()
            .partition(|one| !options.format.holds_objects() && is_object(&metadata, one));

        let files = divide(&metadata, root, tensors, options.strategy, options.format)?;
        let byte_lens = files.data.iter().map(|file| file.byte_len(&metadata));
        total = byte_lens.fold(total, u64::saturating_add);
        planned.push((root, files, objects));
    }
    if !options.save_overwrite {
        for (root, files, objects) in &planned {
            let extra = (*root == OPTIM && !objects.is_empty()).then(|| objects_file(files));
            refuse_existing(&**target, files, extra.transpose()?).await?;
        }
    }
    let json = planned.iter().map(|(root, files, _)| {
        (*root == OPTIM && !options.format.holds_objects()).then(|| objects_file(files)).transpose()
    });
    let json: Vec<Option<Key>> = json.collect::<Result<_, _>>()?;
    let replaced = if options.save_overwrite && !job.dry_run {
        let files = planned.iter().map(|(_, files, _)| files).zip(json.iter().cloned());
        Old::look(&**target, &files.collect::<Vec<_>>()).await?
    } else {
        None
    };
    let parts = planned.into_iter().map(|(_, files, objects)| (files, objects)).zip(json);
    let parts = parts.map(|((files, objects), json)| Part { files, objects, json });
    let parts: Vec<Part> = parts.collect();
    let indexes: Vec<Key> = parts.iter().filter_map(|part| part.files.index.clone()).collect();
    let names: Vec<Key> = parts.iter().flat_map(Part::keys).cloned().collect();
    // A file alone is written by rank 0, when all have looked at the target.
    let alone = group.filter(|_| names.len() == 1);
    if let Some(group) = alone {
        group.same_files(names.iter()).await?;
        if !is_coordinator {
            return Ok(report);
        }
    }
    let group = group.filter(|_| alone.is_none());
    if let Some(progress) = &job.progress {
        progress.start(if replaced.is_some() { total.saturating_mul(2) } else { total });
        if let Some(group) = &job.group {
            let progress = Arc::clone(progress);
            group.on_progress(move |bytes| progress.advance(bytes));
        }
    }
    let writing = |report| {
        let (source, metadata) = (CheckedSource::new(source, job), Arc::clone(&metadata));
        let (is_final, own) = (true, Vec::new());
        Writing { source, metadata, target, options, job, group, is_final, report, own }
    };
    if replaced.is_some() {
        let nowhere: Arc<dyn Storage> = Arc::new(Nowhere);
        let rehearsal = writing(UnshardReport::default());
        let rehearsal = Writing { target: &nowhere, is_final: false, ..rehearsal };
        rehearsal.all(parts.clone()).await.1?;
    }
    let marks = if job.dry_run { Vec::new() } else { marks(&parts)? };
    if let Some(group) = group {
        // All have looked at the target, and read what replaces it.
        group.same_files(names.iter()).await?;
    }
    if is_coordinator {
        make_room(&**target, &marks, replaced.as_ref()).await?;
    }
    let (written, done) = writing(report).all(parts).await;
    let mut report = written.report;
    if let Err(error) = done {
        // What a rank has handed over, rank 0 removes.
        if group.is_some_and(JobGroup::has_handed_over) {
            return Err(error);
        }
        if !job.dry_run {
            // One whose write failed may be there. No index stays without the files that it names.
            if is_coordinator {
                remove_all(&**target, &indexes).await;
            }
            remove_all(&**target, &written.own).await;
        }
        // What is left of a replaced export is none, so it stays marked. Where nothing was, a file
        // whose write failed may be there all the same.
        if replaced.is_none() && !marks.is_empty() && is_coordinator {
            remove_all(&**target, &names).await;
            let _ = unmark(&**target, &marks).await;
        }
        return Err(error);
    }
    if !is_coordinator {
        return Ok(report);
    }
    unmark(&**target, &marks).await?;
    if let Some(old) = replaced {
        let is_new = |key: &Key| report.files.contains_key(key.as_str());
        report.removed = old.remove_stale(&**target, is_new).await;
    }
    Ok(report)
}

/// Marks the export as unfinished, and removes what would make new files and old ones a whole.
async fn make_room(
    target: &dyn Storage,
    marks: &[Key],
    replaced: Option<&Old>,
) -> Result<(), JobError> {
    if let Err(error) = mark(target, marks).await {
        unmark(target, marks).await?;
        return Err(error.into());
    }
    if let Some(old) = replaced
        && let Err(error) = old.break_up(target).await
    {
        if old.is_whole(target).await {
            unmark(target, marks).await?;
        }
        return Err(error.into());
    }
    Ok(())
}

/// Returns the entries below each part of the state that is exported.
fn exported(
    metadata: &CheckpointMetadata,
    options: &UnshardOptions,
) -> Result<Vec<(&'static str, Vec<Shown>)>, JobError> {
    let mut parts = Vec::new();
    for root in [MODEL, OPTIM].into_iter().filter(|root| is_exported(root, options.optim)) {
        let shown = below(metadata, root);
        if shown.is_empty() {
            let what = format!("{root:?}");
            let problem = match root {
                MODEL => {
                    "is not in this checkpoint; `Checkpoint::convert` writes whatever there is"
                }
                _ => "is not in this checkpoint: it was saved without its optimizer",
            };
            return Err(JobError::NoForm { what, problem: problem.to_owned() });
        }
        parts.push((root, shown));
    }
    Ok(parts)
}

/// Returns the file for the optimizer's objects that the format cannot hold.
fn objects_file(files: &Files) -> Result<Key, JobError> {
    let name = if files.index.is_some() { "optim/objects.json" } else { "optim.json" };
    Ok(Key::new(name).map_err(StorageError::from)?)
}

async fn refuse_existing(
    target: &dyn Storage,
    files: &Files,
    extra: Option<Key>,
) -> Result<(), JobError> {
    let data = files.data.iter().map(|file| &file.key);
    for key in data.chain(&files.index).chain(&extra) {
        if target.contains(key).await? {
            return Err(JobError::TargetExists { target: key.to_string() });
        }
    }
    Ok(())
}

/// The files and objects of one part of the state.
#[derive(Clone, Debug)]
struct Part {
    files: Files,
    /// The objects that the format cannot hold; `json` is the file for them.
    objects: Vec<Shown>,
    json: Option<Key>,
}

impl Part {
    fn keys(&self) -> impl Iterator<Item = &Key> {
        let data = self.files.data.iter().map(|file| &file.key);
        data.chain(&self.files.index).chain(&self.json)
    }
}

fn position(shown: &Shown) -> usize {
    let (Origin::Entry(at) | Origin::Made(at, _)) = shown.origin;
    at
}

fn is_object(metadata: &CheckpointMetadata, shown: &Shown) -> bool {
    matches!(metadata.at(position(shown)), Some((_, Entry::Object(_))))
}
