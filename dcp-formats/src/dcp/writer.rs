//! Writes PyTorch DCP checkpoints.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::error::{PlanProblem, StorageOp};
use dcp_core::format::{self, StreamTransform};
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, PlanError, Storage, StorageError,
    StorageErrorKind, StorageWriter, Value,
};
use futures_util::TryStreamExt as _;
use futures_util::future::join;

use super::commit;
use super::compression::Compression;
use super::names::{self, METADATA, Named, generation_of};
use super::place;
use super::sidecar::Origin;
use super::split::FileLayout;
use super::write::FileJob;
#[cfg(feature = "zstd")]
use super::zstd_encoder::Zstd;
use crate::metadata::Profile;
use crate::stop::Stop;
use crate::upload::{ByteProgress, FileOptions, upload_bytes};

/// Writes checkpoints as PyTorch's `FileSystemWriter` does: `__{rank}_{n}.distcp` files of
/// `torch.save` archives, and a `.metadata` pickle that PyTorch 2.1 and later load.
///
/// A save into a directory with an earlier save uses new file names
/// (`__{rank}_{n}.g{generation}.distcp`); loaders take names from the metadata. So the old
/// checkpoint stays loadable until one step replaces `.metadata`. Only then does the save remove
/// the old files, and only those with names of PyTorch's or this writer's pattern.
///
/// A directory has one save at a time. [`begin`](StorageWriter::begin) claims `.metadata`, and the
/// session holds the claim until the clean-up ends: a second saver gets an error that names the
/// first. The commit creates files exclusively and, right before the replacement, checks that
/// `.metadata` is unchanged. That detects savers that claim nothing, such as PyTorch, and serves
/// storages without [claims](dcp_core::storage::Capabilities::claims), where two commits at the
/// same moment can both pass the check. Where the storage replaces by
/// [version](dcp_core::storage::Capabilities::conditional_put), it detects every change itself, and
/// the check runs while the sidecar is written.
pub struct DcpWriter {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) options: Options,
    /// Files that this writer created and may remove.
    created: Mutex<HashSet<Key>>,
}

/// The default of [`DcpWriterBuilder::upload_bytes`] for data that is not in memory: with the
/// segments of which the next part is made, 64 MiB.
const MADE_BYTES: u64 = 48 << 20;

/// The CRC-32 of the `.metadata` that [`begin`](StorageWriter::begin) found, if there was one.
struct Replaced(Option<u32>);

#[derive(Clone)]
pub(super) struct Options {
    pub(super) profile: Profile,
    pub(super) layout: FileLayout,
    pub(super) overwrite: bool,
    pub(super) sidecar: bool,
    pub(super) checksums: bool,
    pub(super) completed_by: Option<Key>,
    pub(super) origin: Origin,
    pub(super) progress: Option<ByteProgress>,
    pub(super) upload_bytes: Option<u64>,
    pub(super) compression: Compression,
}

/// Options of a [`DcpWriter`].
#[must_use = "call `build`"]
pub struct DcpWriterBuilder {
    storage: Arc<dyn Storage>,
    options: Options,
}

impl DcpWriter {
    /// A writer with PyTorch's defaults.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self::builder(storage).build()
    }

    /// A writer with options.
    pub fn builder(storage: Arc<dyn Storage>) -> DcpWriterBuilder {
        let options = Options {
            profile: Profile::default(),
            layout: FileLayout::default(),
            overwrite: true,
            sidecar: true,
            checksums: true,
            completed_by: None,
            origin: Origin::default(),
            progress: None,
            upload_bytes: None,
            compression: Compression::None,
        };
        DcpWriterBuilder { storage, options }
    }

    fn created(&self) -> std::sync::MutexGuard<'_, HashSet<Key>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn write_one(
        &self,
        job: &FileJob,
        data: &Arc<dyn DataSource>,
        options: FileOptions,
    ) -> Result<(Key, u64, Duration), CheckpointError> {
        let started = Instant::now();
        let progress = self.options.progress.as_ref();
        let byte_len = job.write(&*self.storage, data, options, progress).await?;
        self.created().insert(job.key().clone());
        Ok((job.key().clone(), byte_len, started.elapsed()))
    }
}

impl DcpWriterBuilder {
    /// The form of the `.metadata` pickle. The default is the one that PyTorch 2.1 and later load.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.options.profile = profile;
        self
    }

    /// The number of files per rank; one by default.
    pub fn files(mut self, layout: FileLayout) -> Self {
        self.options.layout = layout;
        self
    }

    /// Whether an existing checkpoint is replaced (the default) or an error.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.options.overwrite = overwrite;
        self
    }

    /// Whether to write a [`Sidecar`](super::Sidecar); the default is true.
    pub fn sidecar(mut self, sidecar: bool) -> Self {
        self.options.sidecar = sidecar;
        self
    }

    /// Whether archives contain the CRC-32 of tensor data (the default), or 0 for "not computed",
    /// as PyTorch writes with `set_crc32_options(False)`.
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.options.checksums = checksums;
        self
    }

    /// The file that the caller writes after the commit to complete the checkpoint, if the format
    /// has one. A save that died before that file may be replaced without
    /// [`overwrite`](Self::overwrite); only the [`Sidecar`](super::Sidecar) distinguishes it from
    /// other checkpoints.
    pub fn completed_by(mut self, file: Key) -> Self {
        self.options.completed_by = Some(file);
        self
    }

    /// The step of the training run, and the step of the checkpoint that the run was resumed from
    /// or saved before, for the [`Sidecar`](super::Sidecar).
    pub fn steps(mut self, step: u64, parent_step: Option<u64>) -> Self {
        self.options.origin.step = Some(step);
        self.options.origin.parent_step = parent_step;
        self
    }

    /// The names and sizes of the dimensions of the device mesh, the outermost first, such as
    /// `("dp", 8), ("tp", 4)`, for the [`Sidecar`](super::Sidecar).
    pub fn mesh<N: Into<String>>(mut self, dimensions: impl IntoIterator<Item = (N, u64)>) -> Self {
        let dimensions = dimensions.into_iter().map(|(name, size)| (name.into(), size));
        self.options.origin.mesh = dimensions.collect();
        self
    }

    /// The bytes of parts in flight to the storage, over all files of a rank; two parts of each
    /// file are the minimum. By default as many parts as the storage handles concurrently, in 64 to
    /// 256 MiB, and the next one: a save lends the memory of its tensors. Data that is made or
    /// copied, such as that of casts and devices, needs memory for its parts, so by default it has
    /// 48 MiB and one file at a time.
    pub fn upload_bytes(mut self, bytes: u64) -> Self {
        self.options.upload_bytes = Some(bytes);
        self
    }

    /// Compresses items with zstd. All ranks need the same setting. The default is none, as in
    /// PyTorch.
    ///
    /// The lengths of items are then not known before they are written: each rank reports them to
    /// the coordinator, in a few bytes for each item.
    #[cfg(feature = "zstd")]
    pub fn zstd(mut self, zstd: impl Into<Option<Zstd>>) -> Self {
        self.options.compression = zstd.into().map_or(Compression::None, Compression::Zstd);
        self
    }

    /// Writes items through a transform of a plug-in, such as encryption, instead of a compression. All ranks need the
    /// same one. Lengths are reported as those of compressed items are. Readers, PyTorch's too, need the transform under
    /// its name.
    pub fn transform(mut self, transform: Arc<dyn StreamTransform>) -> Self {
        self.options.compression = Compression::Transform(transform);
        self
    }

    /// Compresses items, if there is a compression.
    ///
    /// # Errors
    ///
    /// For a compression that this build does not have.
    pub fn compression(
        self,
        compression: impl Into<Option<format::Compression>>,
    ) -> Result<Self, CheckpointError> {
        match compression.into() {
            None => Ok(self),
            #[cfg(feature = "zstd")]
            Some(format::Compression::Zstd(level)) => Ok(self.zstd(Zstd::new().level(level))),
            Some(format::Compression::Transform(transform)) => Ok(self.transform(transform)),
            Some(other) => {
                let problem = format!("this build does not have {other:?}; enable its feature");
                Err(FormatError::new("compression", problem).into())
            }
        }
    }

    /// Receives the number of bytes written, part by part.
    pub fn progress(mut self, progress: ByteProgress) -> Self {
        self.options.progress = Some(progress);
        self
    }

    /// Builds the writer.
    #[must_use]
    pub fn build(self) -> DcpWriter {
        DcpWriter { storage: self.storage, options: self.options, created: Mutex::default() }
    }
}

#[async_trait]
impl StorageWriter for DcpWriter {
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        crate::torch_save::encode_value(value, "archive").map_err(|error| {
            FormatError::new("object to save", format!("{fqn:?}: {}", error.problem()))
                .with_source(error)
                .into()
        })
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        let claim = commit::claim(&*self.storage);
        let look = join(
            commit::current(&*self.storage),
            self.storage.list_files(None).try_collect::<Vec<_>>(),
        );
        let (claim, (metadata, files)) = if commit::replaces_by_version(&*self.storage) {
            // The commit compares `.metadata` with what is read here, which may be older.
            join(claim, look).await
        } else {
            // Before the first read, so that its results stay valid.
            (claim.await, look.await)
        };
        let metadata = match (metadata, claim.is_ok()) {
            // Another saver may be replacing it right now; the claim shows that.
            (Err(_), false) => None,
            (metadata, _) => metadata?,
        };
        let mut rank_metadata = None;
        let mut highest = None;
        let mut stale = Vec::new();
        for meta in files? {
            let Some(named) = Named::parse(meta.key.as_str()) else { continue };
            highest = highest.max(Some(generation_of(&meta.key).unwrap_or(0)));
            match named {
                Named::Metadata => {}
                Named::RankMetadata { .. } => {
                    rank_metadata = Some(meta.key.clone());
                    stale.push(meta.key);
                }
                _ => stale.push(meta.key),
            }
        }
        let unfinished = match (&metadata, &self.options.completed_by) {
            (Some(bytes), Some(last)) if !self.options.overwrite => {
                commit::is_unfinished(&*self.storage, bytes, last).await?
            }
            _ => false,
        };
        let there = match metadata {
            Some(_) if unfinished => None,
            Some(_) => Some(Key::new(METADATA).map_err(StorageError::from)?),
            None => rank_metadata,
        };
        if let (Some(key), false) = (there, self.options.overwrite) {
            let message = "there is a checkpoint here, and overwriting is off";
            return Err(StorageError::new(
                StorageErrorKind::AlreadyExists,
                StorageOp::Put,
                Some(key),
            )
            .with_message(message)
            .into());
        }
        // An existing checkpoint is a better reason to refuse than another saver at work.
        let claim = claim?;
        stale.sort_unstable();
        let generation = highest.map_or(0, |highest| highest.saturating_add(1));
        let replaced = Replaced(metadata.map(|bytes| crc32fast::hash(&bytes)));
        let session = SaveSession::new(generation, stale).with_claim(claim).with_state(replaced);
        let Options { layout, compression, .. } = &self.options;
        Ok(session.with_layout(layout.fingerprint() ^ compression.fingerprint() << 32))
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        let Options { layout, compression, .. } = &self.options;
        place::place(*layout, compression, session.generation, locals, global)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        names::renamed(file, generation)
            .ok_or_else(|| PlanError::Plan(PlanProblem::FileName { file: file.to_string() }).into())
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        let jobs =
            FileJob::for_plan(local, plan, self.options.checksums, &self.options.compression)?;
        // Files of earlier saves are settled: committed or removed.
        let own = plan.files.first().and_then(generation_of);
        self.created().retain(|key| generation_of(key) == own);
        let mut parallelism = usize::from(self.storage.capabilities().parallelism);
        // Parts of lent memory cost nothing, others do.
        let is_compressed = !self.options.compression.is_none();
        let is_lent = data.segment_bytes() == u64::MAX && !is_compressed;
        let in_flight = match self.options.upload_bytes {
            Some(bytes) => bytes,
            None if is_lent => upload_bytes(&*self.storage),
            None => {
                parallelism = 1;
                MADE_BYTES
            }
        };
        let stop = Stop::new();
        let data = stop.guard(data);
        let at_once = jobs.len().min(parallelism).max(1) as u64;
        let options = FileOptions::new(PutMode::Create).with_upload_bytes(in_flight / at_once);
        let writes = jobs.iter().map(|job| self.write_one(job, &data, options.clone()));
        let mut written = stop.run(writes, parallelism).await?;
        written.sort_unstable();
        let durations = written.iter().map(|(key, _, time)| (key.clone(), *time)).collect();
        let files = written.into_iter().map(|(key, len, _)| (key, len)).collect();
        let mut report = WriteReport::new(files).with_durations(durations);
        if is_compressed {
            let stored = jobs.iter().map(|job| (job.key().clone(), job.stored()));
            report = report.with_stored(stored.collect());
        }
        if !self.options.sidecar {
            return Ok(report);
        }
        let checksums = jobs.iter().map(|job| (job.key().clone(), job.checksums()));
        Ok(report.with_checksums(checksums.filter(|(_, all)| !all.is_empty()).collect()))
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        let seen = session.state::<Replaced>().map(|replaced| replaced.0);
        let own = self.created().clone();
        let files = commit::Files { reports, own };
        commit::commit(&*self.storage, &self.options, session, seen, metadata, files).await?;
        self.created().clear();
        Ok(())
    }

    async fn abandon(&self, plan: &WritePlan) {
        let own: Vec<Key> = {
            let mut created = self.created();
            plan.files.iter().filter(|key| created.remove(*key)).cloned().collect()
        };
        if !own.is_empty() {
            commit::remove_unreferenced(&*self.storage, own).await;
        }
    }
}

impl fmt::Debug for DcpWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcpWriter")
            .field("storage", &self.storage)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DcpWriterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcpWriterBuilder")
            .field("storage", &self.storage)
            .field("options", &self.options)
            .finish()
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("profile", &self.profile)
            .field("layout", &self.layout)
            .field("overwrite", &self.overwrite)
            .field("sidecar", &self.sidecar)
            .field("checksums", &self.checksums)
            .field("compression", &self.compression)
            .finish_non_exhaustive()
    }
}
