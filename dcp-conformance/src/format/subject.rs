//! A format under test.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::format::{CheckpointFormat, FormatRegistry, OpenOptions, OpenedCheckpoint, Place};
use dcp_core::save_run::{RankWrite, SaveRun};
use dcp_core::storage::PutMode;
use dcp_core::{CheckpointError, Key, Storage, StorageWriter};
use futures_util::TryStreamExt as _;

use super::load::read_whole;
use super::sample::{Sample, sources};
use crate::MemoryStorage;
use crate::case::{Failure, Outcome, ensure};

/// An error of the author's code.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

type Filling = Pin<Box<dyn Future<Output = Result<Sample, BoxError>> + Send>>;
type MakeWriter = dyn Fn(Arc<dyn Storage>, bool) -> Arc<dyn StorageWriter> + Send + Sync;
type Fill = dyn Fn(Arc<dyn Storage>, Sample) -> Filling + Send + Sync;

/// The features of a format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    pub(super) objects: bool,
    pub(super) scalars: bool,
    pub(super) empty_tensors: bool,
    pub(super) checksums: bool,
    pub(super) index_checksum: bool,
}

#[derive(Clone)]
enum Made {
    Writer(Arc<MakeWriter>),
    Fill(Arc<Fill>),
}

/// A format under test, and how to create its checkpoints.
///
/// By default it stores objects, tensors without axes and tensors without elements, and has no
/// checksums.
#[derive(Clone)]
pub struct Subject {
    format: Arc<dyn CheckpointFormat>,
    made: Made,
    pub(super) features: Features,
    file: Option<Key>,
    own: Vec<String>,
}

impl Subject {
    /// A format with a writer. `make` returns the writer for a storage; its second argument says
    /// whether it replaces an existing checkpoint.
    #[must_use]
    pub fn with_writer(
        format: Arc<dyn CheckpointFormat>,
        make: impl Fn(Arc<dyn Storage>, bool) -> Arc<dyn StorageWriter> + Send + Sync + 'static,
    ) -> Self {
        Self::new(format, Made::Writer(Arc::new(make)))
    }

    /// A format without a writer. `fill` writes a checkpoint into an empty storage and returns its
    /// contents: the given state, or one of its own.
    #[must_use]
    pub fn filled<Fut>(
        format: Arc<dyn CheckpointFormat>,
        fill: impl Fn(Arc<dyn Storage>, Sample) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        Fut: Future<Output = Result<Sample, BoxError>> + Send + 'static,
    {
        let fill = move |storage, sample| Box::pin(fill(storage, sample)) as Filling;
        Self::new(format, Made::Fill(Arc::new(fill)))
    }

    fn new(format: Arc<dyn CheckpointFormat>, made: Made) -> Self {
        let features = Features {
            objects: true,
            scalars: true,
            empty_tensors: true,
            checksums: false,
            index_checksum: false,
        };
        Self { format, made, features, file: None, own: Vec::new() }
    }

    /// Declares that the format stores no objects.
    #[must_use]
    pub fn without_objects(mut self) -> Self {
        self.features.objects = false;
        self
    }

    /// Declares that the format stores no tensors without axes.
    #[must_use]
    pub fn without_scalars(mut self) -> Self {
        self.features.scalars = false;
        self
    }

    /// Declares that the format stores no tensors without elements.
    #[must_use]
    pub fn without_empty_tensors(mut self) -> Self {
        self.features.empty_tensors = false;
        self
    }

    /// Declares that the format has checksums of all stored tensors and objects.
    #[must_use]
    pub fn checksums(mut self) -> Self {
        self.features.checksums = true;
        self
    }

    /// Declares that the index has a checksum: a changed bit in a file that holds no tensor and no object is an
    /// error, or changes nothing that is read.
    #[must_use]
    pub fn index_checksum(mut self) -> Self {
        self.features.index_checksum = true;
        self
    }

    /// Declares that checkpoints are this one file, not a folder.
    #[must_use]
    pub fn in_file(mut self, file: Key) -> Self {
        self.file = Some(file);
        self
    }

    /// Declares an entry that the format adds to every checkpoint.
    #[must_use]
    pub fn own_entry(mut self, fqn: &str) -> Self {
        self.own.push(fqn.to_owned());
        self
    }

    pub(super) fn format(&self) -> &dyn CheckpointFormat {
        &*self.format
    }

    pub(super) fn file(&self) -> Option<&Key> {
        self.file.as_ref()
    }

    pub(super) fn has_writer(&self) -> bool {
        matches!(self.made, Made::Writer(_))
    }

    pub(super) fn is_own(&self, fqn: &str) -> bool {
        self.own.iter().any(|own| own == fqn)
    }

    /// The sample to save, for a seed.
    pub(super) fn sample(&self, seed: u64) -> Sample {
        Sample::generated(seed, &self.features)
    }

    /// The writer of `storage`.
    pub(super) fn writer(
        &self,
        storage: Arc<dyn Storage>,
        overwrite: bool,
    ) -> Result<Arc<dyn StorageWriter>, Failure> {
        match &self.made {
            Made::Writer(make) => Ok(make(storage, overwrite)),
            Made::Fill(_) => Err(Failure::new("the format has no writer")),
        }
    }

    /// A storage with a checkpoint, and its contents.
    pub(super) async fn checkpoint(&self) -> Result<(Arc<MemoryStorage>, Sample), Failure> {
        let storage = Arc::new(MemoryStorage::new());
        let mut sample = self.sample(1);
        match &self.made {
            Made::Writer(make) => {
                save(&*make(Arc::clone(&storage) as _, false), &sample).await?;
            }
            Made::Fill(fill) => {
                let filled = fill(Arc::clone(&storage) as _, sample).await;
                sample = filled.map_err(|error| Failure::new(error.to_string()))?;
            }
        }
        Ok((storage, sample))
    }

    fn registry(&self) -> FormatRegistry {
        FormatRegistry::empty().with(Arc::clone(&self.format))
    }

    /// Opens the checkpoint with this format alone.
    pub(super) async fn open(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let options = OpenOptions::default();
        match &self.file {
            Some(file) => self.registry().open_file(storage, file.clone(), &options).await,
            None => self.registry().open(storage, &options).await,
        }
    }

    /// The listed place of the folder, or of the file.
    pub(super) async fn place(&self, storage: &Arc<dyn Storage>) -> Result<Place, Failure> {
        match &self.file {
            Some(file) => Ok(Place::file_of(storage, file.clone())),
            None => Ok(self.registry().look(storage).await?),
        }
    }

    /// The reason why the checkpoint is not whole: by its names, on examination, or on opening.
    pub(super) async fn complaint(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<Option<String>, Failure> {
        let place = self.place(storage).await?;
        if self.file.is_none() {
            let found = self.format.recognize(&place.listing().root());
            let Some(found) = found.filter(|found| found.is_checkpoint()) else {
                return Ok(Some("it is not recognized as a checkpoint".to_owned()));
            };
            if found.problem.is_some() {
                return Ok(found.problem);
            }
        }
        match self.format.examine(&place).await {
            Ok(examined) if examined.problem.is_some() => return Ok(examined.problem),
            Ok(_) => {}
            Err(error) => return Ok(Some(error.to_string())),
        }
        Ok(self.open(storage).await.err().map(|error| error.to_string()))
    }

    /// Opens the checkpoint and compares its contents with `sample`.
    pub(super) async fn holds(&self, storage: &Arc<dyn Storage>, sample: &Sample) -> Outcome {
        let opened = self.open(storage).await?;
        read_whole(&*opened.reader, sample).await
    }

    /// Fails unless the checkpoint is one of `samples`, whole. Returns which one.
    pub(super) async fn holds_one(
        &self,
        storage: &Arc<dyn Storage>,
        samples: &[&Sample],
    ) -> Result<usize, Failure> {
        let mut reasons = Vec::new();
        for (at, sample) in samples.iter().enumerate() {
            match self.holds(storage, sample).await {
                Ok(()) => return Ok(at),
                Err(failure) => reasons.push(failure.message().to_owned()),
            }
        }
        Err(Failure::new(format!("it is none of those that were saved: {}", reasons.join("; "))))
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject")
            .field("format", &self.format)
            .field("features", &self.features)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// Saves `sample` as two ranks.
pub(super) async fn save(writer: &dyn StorageWriter, sample: &Sample) -> Outcome {
    save_from(writer, sample, None).await
}

/// Saves `sample`, with the data of one item, by rank and number, unavailable.
pub(super) async fn save_from(
    writer: &dyn StorageWriter,
    sample: &Sample,
    broken: Option<(usize, usize)>,
) -> Outcome {
    let written = Written::write(writer, sample, broken).await?;
    written.commit().await
}

/// A save that all ranks have written.
pub(super) struct Written<'a> {
    run: SaveRun<'a>,
    own: Vec<RankWrite<'a>>,
    reports: Vec<dcp_core::checkpoint::WriteReport>,
    metadata: dcp_core::CheckpointMetadata,
    pub(super) files: Vec<Key>,
    pub(super) generation: u64,
}

impl<'a> Written<'a> {
    /// Begins a save and writes it on all ranks; when one fails, all abandon it.
    pub(super) async fn write(
        writer: &'a dyn StorageWriter,
        sample: &Sample,
        broken: Option<(usize, usize)>,
    ) -> Result<Self, Failure> {
        Self::write_by([writer, writer], sample, broken).await
    }

    /// The same, with a writer for each rank, as processes have. The first one begins.
    pub(super) async fn write_by(
        [writer, second]: [&'a dyn StorageWriter; 2],
        sample: &Sample,
        broken: Option<(usize, usize)>,
    ) -> Result<Self, Failure> {
        let mut planned = sample.planned(writer)?;
        let run = SaveRun::begin(writer).await?;
        let plans = run.place(&planned.locals, &mut planned.global)?;
        let files = plans.iter().flat_map(|plan| plan.files.clone()).collect();
        let writers = std::iter::once(writer).chain(std::iter::repeat(second));
        let of_rank = |(writer, plan)| RankWrite::new(writer, Arc::new(plan));
        let own: Vec<_> = writers.zip(plans).map(of_rank).collect();
        let mut reports = Vec::new();
        let data = sources(planned.data, broken);
        for ((rank, local), data) in own.iter().zip(&planned.locals).zip(data) {
            match rank.write(local, data).await {
                Ok(report) => reports.push(report),
                Err(error) => {
                    for rank in own {
                        rank.abandon().await;
                    }
                    return Err(error.into());
                }
            }
        }
        let generation = run.session().generation;
        Ok(Self { run, own, reports, metadata: planned.global.metadata, files, generation })
    }

    /// The files of the second rank.
    pub(super) fn files_of_second(&self) -> Vec<Key> {
        let report = self.reports.get(1);
        report.map_or_else(Vec::new, |report| {
            report.files.iter().map(|(key, _)| key.clone()).collect()
        })
    }

    pub(super) async fn commit(self) -> Outcome {
        self.run.commit(self.own, &self.metadata, self.reports).await?;
        Ok(())
    }

    pub(super) async fn abandon(self) {
        for rank in self.own {
            rank.abandon().await;
        }
    }
}

/// All files of a storage.
pub(super) type Files = std::collections::BTreeMap<Key, Bytes>;

/// All files of `storage`, with their bytes.
pub(super) async fn files(storage: &dyn Storage) -> Result<Files, Failure> {
    let mut files = Files::new();
    for meta in storage.list(None).try_collect::<Vec<_>>().await? {
        files.insert(meta.key.clone(), storage.read_whole(&meta.key, u64::MAX).await?.bytes);
    }
    Ok(files)
}

/// A storage with these files.
pub(super) async fn storage_of(files: &Files) -> Result<Arc<dyn Storage>, Failure> {
    let storage = MemoryStorage::new();
    for (key, bytes) in files {
        storage.put(key, bytes.clone().into(), PutMode::Create).await?;
    }
    Ok(Arc::new(storage))
}

/// Fails unless both storages have the same files.
pub(super) fn same_files(before: &Files, after: &Files, when: &str) -> Outcome {
    for (key, bytes) in before {
        ensure!(after.contains_key(key), "{when}, {key} is gone");
        ensure!(after.get(key) == Some(bytes), "{when}, {key} has other bytes");
    }
    let added: Vec<_> = after.keys().filter(|key| !before.contains_key(key)).collect();
    ensure!(added.is_empty(), "{when}, there are other files: {added:?}");
    Ok(())
}
