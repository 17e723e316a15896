//! OLMo-core's `unshard_checkpoint`: a sharded checkpoint as plain files.

mod export_marks;
mod files;
mod replace;

use dcp_core::storage::StorageExt;
use std::num::NonZeroU64;
use std::sync::Arc;

use dcp_convert::element::{JsonLimits, ValueEncoder};
use dcp_convert::{
    CheckedSource, ConversionReport, ConvertError, JobOptions, JobProgress, Source, Target,
    to_safetensors, to_torch_save,
};
use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Key, Storage, StorageError};
use dcp_formats::hf::IndexFile;
use dcp_formats::torch_save::TorchSaveOptions;
use indexmap::IndexMap;
use serde::Serialize;

use self::export_marks::{mark, marks, remove_all, unmark};
use self::files::{Files, UnshardedFile, below, divide, is_exported};
use self::replace::{Nowhere, Old};
use crate::rekeyed::{Origin, Rekeyed, Shown};
use crate::roots::{MODEL, OPTIM};
use crate::values::read_values;

/// How a checkpoint is divided into files.
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
    ) -> Result<ConversionReport, ConvertError> {
        match self {
            Self::Safetensors => to_safetensors(source, target, options).await,
            Self::TorchSave => {
                to_torch_save(source, target, TorchSaveOptions::default(), options).await
            }
        }
    }
}

/// How a checkpoint is unsharded.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnshardOptions {
    /// How it is divided into files.
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
    /// The same, divided so.
    #[must_use]
    pub fn strategy(mut self, strategy: UnshardStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// The same, in this format.
    #[must_use]
    pub fn format(mut self, format: UnshardFormat) -> Self {
        self.format = format;
        self
    }

    /// The same, with the optimizer or without.
    #[must_use]
    pub fn optim(mut self, optim: bool) -> Self {
        self.optim = optim;
        self
    }

    /// The same, replacing files or not.
    #[must_use]
    pub fn save_overwrite(mut self, overwrite: bool) -> Self {
        self.save_overwrite = overwrite;
        self
    }
}

/// What was written. Serialized, it is the output of `dcp unshard --json`.
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
) -> Result<UnshardReport, ConvertError> {
    let metadata = source.metadata().await?;
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
        total = tensors.iter().fold(total, |sum, one| sum.saturating_add(byte_len(&metadata, one)));
        let files = divide(&metadata, root, tensors, options.strategy, options.format)?;
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
    if let Some(progress) = &job.progress {
        progress.start(if replaced.is_some() { total.saturating_mul(2) } else { total });
    }
    let parts = planned.into_iter().map(|(_, files, objects)| (files, objects)).zip(json);
    let parts = parts.map(|((files, objects), json)| Part { files, objects, json });
    let parts: Vec<Part> = parts.collect();
    let writing = |report| {
        let (source, metadata) = (CheckedSource::new(source, job), Arc::clone(&metadata));
        Writing { source, metadata, target, options, job, report }
    };
    if replaced.is_some() {
        let nowhere: Arc<dyn Storage> = Arc::new(Nowhere);
        let rehearsal = Writing { target: &nowhere, ..writing(UnshardReport::default()) };
        rehearsal.all(parts.clone()).await.1?;
    }
    let marks = if job.dry_run { Vec::new() } else { marks(&parts)? };
    if let Err(error) = mark(&**target, &marks).await {
        unmark(&**target, &marks).await?;
        return Err(error.into());
    }
    if let Some(old) = &replaced
        && let Err(error) = old.break_up(&**target).await
    {
        if old.is_whole(&**target).await {
            unmark(&**target, &marks).await?;
        }
        return Err(error.into());
    }
    let indexes: Vec<Key> = parts.iter().filter_map(|part| part.files.index.clone()).collect();
    let names: Vec<Key> = parts.iter().flat_map(Part::keys).cloned().collect();
    let (mut report, done) = writing(report).all(parts).await;
    if let Err(error) = done {
        if !job.dry_run {
            // One whose write failed may be there. No index stays without the files that it names.
            remove_all(&**target, &indexes).await;
            let written: Vec<Key> =
                report.files.keys().filter_map(|name| Key::new(name).ok()).collect();
            remove_all(&**target, &written).await;
        }
        // What is left of a replaced export is none, so it stays marked. Where nothing was, a file
        // whose write failed may be there all the same.
        if replaced.is_none() && !marks.is_empty() {
            remove_all(&**target, &names).await;
            let _ = unmark(&**target, &marks).await;
        }
        return Err(error);
    }
    unmark(&**target, &marks).await?;
    if let Some(old) = replaced {
        let is_new = |key: &Key| report.files.contains_key(key.as_str());
        report.removed = old.remove_stale(&**target, is_new).await;
    }
    Ok(report)
}

/// What is below each part of the state that is exported.
fn exported(
    metadata: &CheckpointMetadata,
    options: &UnshardOptions,
) -> Result<Vec<(&'static str, Vec<Shown>)>, ConvertError> {
    let mut parts = Vec::new();
    for root in [MODEL, OPTIM].into_iter().filter(|root| is_exported(root, options.optim)) {
        let shown = below(metadata, root);
        if shown.is_empty() {
            let what = format!("{root:?}");
            let problem = match root {
                MODEL => "is not in this checkpoint; `dcp convert` writes whatever there is",
                _ => "is not in this checkpoint: it was saved without its optimizer",
            };
            return Err(ConvertError::NoForm { what, problem: problem.to_owned() });
        }
        parts.push((root, shown));
    }
    Ok(parts)
}

/// Where the optimizer's objects go that the format cannot hold.
fn objects_file(files: &Files) -> Result<Key, ConvertError> {
    let name = if files.index.is_some() { "optim/objects.json" } else { "optim.json" };
    Ok(Key::new(name).map_err(StorageError::from)?)
}

async fn refuse_existing(
    target: &dyn Storage,
    files: &Files,
    extra: Option<Key>,
) -> Result<(), ConvertError> {
    let data = files.data.iter().map(|file| &file.key);
    for key in data.chain(&files.index).chain(&extra) {
        if target.contains(key).await? {
            return Err(ConvertError::TargetExists { target: key.to_string() });
        }
    }
    Ok(())
}

/// What is written of one part of the state.
#[derive(Clone, Debug)]
struct Part {
    files: Files,
    /// What the format cannot hold, and the file that it goes into.
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

fn byte_len(metadata: &CheckpointMetadata, shown: &Shown) -> u64 {
    let entry = metadata.at(position(shown)).and_then(|(_, entry)| entry.as_tensor());
    entry.and_then(|tensor| tensor.byte_len()).unwrap_or(0)
}

/// An export that is going on.
struct Writing<'a> {
    source: CheckedSource,
    metadata: Arc<CheckpointMetadata>,
    target: &'a Arc<dyn Storage>,
    options: &'a UnshardOptions,
    job: &'a JobOptions,
    report: UnshardReport,
}

impl Writing<'_> {
    /// All parts. A failure also says what was written.
    async fn all(mut self, parts: Vec<Part>) -> (UnshardReport, Result<(), ConvertError>) {
        for part in parts {
            if let Err(error) = self.part(part).await {
                return (self.report, Err(error));
            }
        }
        (self.report, Ok(()))
    }

    /// The files of one part of the state, and then their index.
    async fn part(&mut self, part: Part) -> Result<(), ConvertError> {
        let Part { files, objects, json } = part;
        let mut weights = IndexMap::new();
        let mut total = 0_u64;
        for file in files.data {
            let name = file.key.file_name().to_owned();
            let names: Vec<_> = file.shown.iter().map(|one| Arc::clone(&one.fqn)).collect();
            let bytes = file.shown.iter().map(|one| byte_len(&self.metadata, one));
            total = bytes.fold(total, u64::saturating_add);
            let written = self.file(file).await?;
            // A file of safetensors has one of several tied tensors, one of `torch.save` all.
            let all = self.options.format == UnshardFormat::TorchSave;
            let there = names.into_iter().filter(|name| all || !written.tied.contains_key(name));
            let name = Key::new(&name).map_err(StorageError::from)?;
            weights.extend(there.map(|fqn| (fqn, name.clone())));
        }
        let full_name = |one: &Shown| {
            self.metadata
                .at(position(one))
                .map_or_else(|| Arc::clone(&one.fqn), |e| Arc::clone(e.0))
        };
        match json.filter(|_| !objects.is_empty()) {
            Some(key) => {
                let values = self.objects(&objects).await?;
                self.report.objects += objects.len();
                self.put(key, values).await?;
            }
            None => self.report.left_out.extend(objects.iter().map(full_name)),
        }
        match files.index {
            Some(index) => self.put(index, IndexFile::new(total, weights).to_json()).await,
            None => Ok(()),
        }
    }

    async fn file(&mut self, file: UnshardedFile) -> Result<ConversionReport, ConvertError> {
        let inner = Arc::clone(&self.source.reader);
        let view = Rekeyed::new(inner, Arc::clone(&self.metadata), file.shown)?;
        let view = Source::derived(Arc::new(view), std::slice::from_ref(&self.source));
        let view = view.unwrap_or_else(|| Source::clone(&self.source));
        let target = Target::new(Arc::clone(self.target), file.key);
        let target = target.overwrite(self.options.save_overwrite);
        let mut job = self.job.clone();
        job.progress = job.progress.map(|all| Arc::new(OfMany(all)) as Arc<dyn JobProgress>);
        let written = self.options.format.write(&view, &target, &job).await?;
        self.report.tensors += written.tensors;
        self.report.objects += written.objects;
        self.report.raw.extend(written.raw.iter().cloned());
        for (name, bytes) in &written.files {
            self.report.bytes = self.report.bytes.saturating_add(*bytes);
            self.report.files.insert(name.clone(), *bytes);
        }
        Ok(written)
    }

    /// What safetensors cannot hold, as JSON by name.
    async fn objects(&self, objects: &[Shown]) -> Result<Vec<u8>, ConvertError> {
        let entries: Vec<usize> = objects.iter().map(position).collect();
        let values = read_values(&self.source.reader, &self.metadata, &entries).await?;
        let limits = JsonLimits::default();
        let mut encoder = ValueEncoder::new(&limits);
        let values = objects.iter().zip(&values);
        let values: serde_json::Map<_, _> =
            values.map(|(one, value)| (one.fqn.to_string(), encoder.json(value))).collect();
        let mut text = format!("{:#}", serde_json::Value::Object(values)).into_bytes();
        text.push(b'\n');
        Ok(text)
    }

    async fn put(&mut self, key: Key, content: Vec<u8>) -> Result<(), ConvertError> {
        let len = content.len() as u64;
        if !self.job.dry_run {
            let target = Target::new(Arc::clone(self.target), key.clone());
            let target = target.overwrite(self.options.save_overwrite);
            let read = CheckedSource::new(&self.source, self.job);
            target.put(content.into(), read.finish().await?).await?;
        }
        self.report.bytes = self.report.bytes.saturating_add(len);
        self.report.files.insert(key.to_string(), len);
        Ok(())
    }
}

/// The progress of one file of many: the whole was announced.
struct OfMany(Arc<dyn JobProgress>);

impl JobProgress for OfMany {
    fn start(&self, _total_bytes: u64) {}

    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }
}
