//! The files of an export, one after the other, and their indexes.

use std::ops::Range;
use std::sync::Arc;

use dcp_core::{CheckpointMetadata, Key, Storage, StorageError};
use dcp_formats::hf::IndexFile;
use dcp_jobs::element::{JsonLimits, ValueEncoder};
use dcp_jobs::group::JobGroup;
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::options::JobProgress;
use dcp_jobs::write::Target;
use dcp_jobs::{JobError, JobOptions, Source};
use indexmap::IndexMap;

use super::files::UnshardedFile;
use super::written::{WrittenFile, gather, room_made};
use super::{Part, UnshardFormat, UnshardOptions, UnshardReport, position};
use crate::rekeyed::{Rekeyed, Shown};
use crate::values::read_values;

/// An export that is going on.
pub(super) struct Writing<'a> {
    pub(super) source: CheckedSource,
    pub(super) metadata: Arc<CheckpointMetadata>,
    pub(super) target: &'a Arc<dyn Storage>,
    pub(super) options: &'a UnshardOptions,
    /// The options of this process's own reads and writes.
    pub(super) job: &'a JobOptions,
    /// The ranks that write files together, if there are several.
    pub(super) group: Option<&'a JobGroup>,
    /// Whether this is the last look at the files, after which they are an export.
    pub(super) is_final: bool,
    pub(super) report: UnshardReport,
    /// The files that this process has written.
    pub(super) own: Vec<Key>,
}

impl Writing<'_> {
    /// All parts. A failure also says what was written.
    pub(super) async fn all(mut self, parts: Vec<Part>) -> (Self, Result<(), JobError>) {
        // Rank 0 has made room.
        let ready = match self.group {
            Some(group) => room_made(group).await,
            None => Ok(()),
        };
        if let Err(error) = ready {
            return (self, Err(error.into()));
        }
        let files = parts.iter().flat_map(|part| &part.files.data);
        let byte_lens: Vec<u64> = files.map(|file| file.byte_len(&self.metadata)).collect();
        let share = self.group.map_or(0..byte_lens.len(), |group| group.share(&byte_lens));
        let (mut before, count) = (0, parts.len());
        for (at, part) in (1..).zip(parts) {
            let end = before + part.files.data.len();
            let own =
                share.start.clamp(before, end) - before..share.end.clamp(before, end) - before;
            before = end;
            if let Err(error) = self.part(part, own, at == count).await {
                return (self, Err(error));
            }
        }
        (self, Ok(()))
    }

    /// The files of one part of the state, and then their index. The ranks of a group write files,
    /// and rank 0 the rest.
    async fn part(&mut self, part: Part, own: Range<usize>, is_last: bool) -> Result<(), JobError> {
        let Part { files, objects, json } = part;
        let mut written = Vec::with_capacity(own.len());
        for file in files.data.iter().take(own.end).skip(own.start) {
            written.push(self.file(file.clone()).await?);
        }
        if let Some(group) = self.group {
            let of_all = gather(group, &written).await?;
            if is_last && self.is_final {
                group.hand_over().await?;
            }
            match of_all {
                Some(of_all) => written = of_all,
                None => return Ok(()),
            }
        }
        let mut weights = IndexMap::new();
        let mut total = 0_u64;
        for (file, written) in files.data.iter().zip(written) {
            total = total.saturating_add(file.byte_len(&self.metadata));
            // A file of safetensors has one of several tied tensors, one of `torch.save` all.
            let all = self.options.format == UnshardFormat::TorchSave;
            let names = file.shown.iter().map(|one| Arc::clone(&one.fqn));
            let there = names.filter(|name| all || !written.tied.contains(name));
            let name = Key::new(file.key.file_name()).map_err(StorageError::from)?;
            weights.extend(there.map(|fqn| (fqn, name.clone())));
            self.report.tensors += written.tensors;
            self.report.objects += written.objects;
            self.report.raw.extend(written.raw);
            self.report.bytes = self.report.bytes.saturating_add(written.bytes);
            self.report.files.insert(written.name, written.bytes);
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

    async fn file(&mut self, file: UnshardedFile) -> Result<WrittenFile, JobError> {
        let inner = Arc::clone(&self.source.reader);
        let view = Rekeyed::new(inner, Arc::clone(&self.metadata), file.shown)?;
        let view = Source::derived(Arc::new(view), std::slice::from_ref(&self.source));
        let view = view.unwrap_or_else(|| Source::clone(&self.source));
        let target = Target::new(Arc::clone(self.target), file.key.clone());
        let target = target.overwrite(self.options.save_overwrite);
        let mut job = self.job.clone();
        job.progress = job.progress.map(|all| Arc::new(OfMany(all)) as Arc<dyn JobProgress>);
        let written = self.options.format.write(&view, &target, &job).await?;
        let name = file.key.to_string();
        self.own.push(file.key);
        Ok(WrittenFile::new(name, written))
    }

    /// Encodes the objects that safetensors cannot hold as JSON, by name.
    async fn objects(&self, objects: &[Shown]) -> Result<Vec<u8>, JobError> {
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

    async fn put(&mut self, key: Key, content: Vec<u8>) -> Result<(), JobError> {
        let len = content.len() as u64;
        if !self.job.dry_run {
            let target = Target::new(Arc::clone(self.target), key.clone());
            let target = target.overwrite(self.options.save_overwrite);
            let read = CheckedSource::new(&self.source, self.job);
            target.put(content.into(), read.finish().await?).await?;
        }
        self.own.push(key.clone());
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
