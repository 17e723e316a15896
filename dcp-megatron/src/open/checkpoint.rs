//! A checkpoint of Megatron-Core of any age, opened for every job.

use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::storage::StorageExt as _;
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointError, Key, Storage, StorageError, StorageErrorKind, StorageReader as _, Value,
};
use dcp_jobs::{JobOptions, Source};
use futures_util::StreamExt as _;

use crate::args::MegatronArgs;
use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT, CommonPlace};
use crate::disk::config::{Backend, CheckpointingConfig, METADATA_JSON};
use crate::disk::file_hashes::INTEGRITY_FILE;
use crate::disk::tracker::Tracked;
use crate::error::MegatronError;
use crate::open::backend::{ShardedBackend, known_backend};
use crate::open::common_state::Common;
use crate::open::legacy::{Legacy, LegacyFolders};
use crate::open::strategy::{LoadStrategy, Opened, Strategies};
use crate::open::zarr::ZarrCheckpoint;
use crate::open::{common_state, logical_view};

/// A checkpoint of Megatron-Core.
///
/// Its [`source`](Self::source) shows, whatever the age: every sharded tensor under its key with
/// the shape that it has for Megatron-Core; every sharded object under its unique key
/// `key/shard_<offsets>_<grid>` as a list of one; and the common state, one object named
/// [`COMMON_STATE`](crate::disk::COMMON_STATE).
#[derive(Debug)]
pub struct MegatronCheckpoint {
    storage: Arc<dyn Storage>,
    which: Option<Tracked>,
    format: StoredFormat,
    source: Source,
    stored: Source,
    common: Common,
    args: Option<MegatronArgs>,
    /// Of legacy folders.
    optimizer_files: Vec<Source>,
    damage: Vec<String>,
    warnings: Vec<String>,
}

/// The format in which a checkpoint of Megatron-Core was written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredFormat {
    /// On top of PyTorch's distributed checkpoints (Megatron-Core 0.6 and later).
    TorchDist {
        /// The place of the common state.
        common: CommonPlace,
    },
    /// In arrays of zarr (Megatron-Core up to 0.15); only read.
    Zarr,
    /// In a folder `mp_rank_*` for each rank of the model, as `--ckpt-format torch` of every
    /// version has it; only read.
    Legacy {
        /// Ranks that share a layer's matrices.
        tp: u32,
        /// Ranks that share the layers.
        pp: u32,
        /// Ranks that share the experts.
        ep: u32,
    },
    /// As a plug-in's [`LoadStrategy`] reads it.
    Plugged {
        /// The sharded backend in `metadata.json`.
        backend: Backend,
    },
}

impl StoredFormat {
    /// A short name, such as `torch_dist`.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Plugged { backend } => &backend.name,
            Self::TorchDist { .. } => "torch_dist",
            Self::Zarr => "zarr",
            Self::Legacy { .. } => "torch",
        }
    }
}

/// Options to open a checkpoint.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MegatronOpenOptions {
    /// Whether to look at a damaged one as far as it is whole; what is wrong is then
    /// [`MegatronCheckpoint::damage`], or an error when such a part is read.
    pub tolerant: bool,
    /// Options of jobs that read it.
    pub job: JobOptions,
    /// The strategies by backend, those of plug-ins included.
    pub strategies: Strategies,
}

impl MegatronOpenOptions {
    /// Sets whether a damaged checkpoint is opened too.
    #[must_use]
    pub fn with_tolerant(mut self, tolerant: bool) -> Self {
        self.tolerant = tolerant;
        self
    }

    /// Sets the options of jobs that read it.
    #[must_use]
    pub fn with_job(mut self, job: JobOptions) -> Self {
        self.job = job;
        self
    }

    /// Sets the strategies by backend.
    #[must_use]
    pub fn with_strategies(mut self, strategies: Strategies) -> Self {
        self.strategies = strategies;
        self
    }

    /// Returns the options for a plug-in, with the default strategies: a plug-in that opens
    /// something by them must not get itself again.
    pub(crate) fn for_plug_in(&self) -> Self {
        Self { tolerant: self.tolerant, job: self.job.clone(), strategies: Strategies::default() }
    }
}

impl MegatronCheckpoint {
    /// Opens the checkpoint in a folder that is not that of a run.
    pub(crate) async fn open_folder(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        let storage = &crate::disk::recovery::recovered(storage).await?;
        let error = match CheckpointingConfig::read(&**storage).await {
            Ok(Some(config)) => match Self::described(storage, config, options).await {
                // Other programs write files of that name, too.
                Err(error) if !is_machines(&error) && !is_dcp(storage).await? => error,
                opened => return opened,
            },
            Ok(None) => MegatronError::NotACheckpoint { message: no_config(storage).await? },
            Err(error @ CheckpointError::Format(_)) if !is_dcp(storage).await? => error.into(),
            Err(error) => return Err(error.into()),
        };
        match LegacyFolders::find(&**storage).await? {
            Some(folders) => Self::legacy(storage, folders, options).await,
            None => Err(error),
        }
    }

    /// Opens the checkpoint that a `metadata.json` describes.
    async fn described(
        storage: &Arc<dyn Storage>,
        config: CheckpointingConfig,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        if let Some(strategy) = options.strategies.plugged(&config.sharded) {
            return Self::plugged(storage, strategy, config.sharded, options).await;
        }
        let backend = known_backend(&config)?;
        options.strategies.load(&config.sharded)?;
        match backend {
            ShardedBackend::TorchDist => Self::torch_dist(storage, options).await,
            ShardedBackend::Zarr => Self::zarr(storage, options).await,
        }
    }

    /// Marks the checkpoint as one of a run, with a warning about the choice if there is one.
    pub(crate) fn of_run(mut self, which: Tracked, warning: Option<String>) -> Self {
        self.which = Some(which);
        self.warnings.extend(warning);
        self
    }

    async fn torch_dist(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        let raw = Source::dcp(Arc::clone(storage), options.tolerant);
        let metadata = match raw.metadata().await {
            Ok(metadata) => metadata,
            Err(CheckpointError::NotACheckpoint { .. }) => {
                let message = promised_but_absent(storage).await?;
                return Err(MegatronError::NotACheckpoint { message });
            }
            Err(error) => return Err(error.into()),
        };
        let mut warnings = Vec::new();
        let in_file = common_state::is_in_file(&**storage).await?;
        let is_inside = metadata.get(COMMON_OBJECT).is_some();
        let place = match (in_file, is_inside) {
            (true, _) => CommonPlace::File,
            (false, true) => CommonPlace::Inside,
            (false, false) => CommonPlace::Nowhere,
        };
        if in_file && is_inside {
            warnings.push(format!(
                "there are both a {} and an object {COMMON_OBJECT:?}; the file is taken, as \
                 Megatron-Core does",
                COMMON_FILE
            ));
        }
        let found = match place {
            CommonPlace::File => common_state::from_file(storage).await,
            _ => common_state::from_inside(&raw).await,
        };
        let format = StoredFormat::TorchDist { common: place };
        let parts = (format, raw);
        Self::assemble(storage, options, parts, found, Vec::new(), warnings).await
    }

    async fn zarr(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        let reader = ZarrCheckpoint::open(Arc::clone(storage), options.tolerant).await?;
        if reader.metadata().await?.is_empty() && is_dcp(storage).await? {
            return Err(MegatronError::NotACheckpoint {
                message: format!(
                    "{METADATA_JSON} says that this is a checkpoint of \"zarr\", but there are \
                     files of \"torch_dist\" and no array: one of the two is of another checkpoint"
                ),
            });
        }
        if reader.metadata().await?.is_empty() && LegacyFolders::find(&**storage).await?.is_some() {
            let message = format!("{METADATA_JSON} says \"zarr\", and there is no array");
            return Err(MegatronError::NotACheckpoint { message });
        }
        let (damage, warnings) = (reader.damage().to_vec(), reader.warnings().to_vec());
        let stored = Source::new(Arc::clone(storage), Arc::new(reader));
        let found = common_state::from_file(storage).await;
        let parts = (StoredFormat::Zarr, stored);
        Self::assemble(storage, options, parts, found, damage, warnings).await
    }

    async fn legacy(
        storage: &Arc<dyn Storage>,
        folders: LegacyFolders,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        let Legacy { source, common, optimizers, tp, pp, ep, damage, warnings } =
            Legacy::open(storage, folders, &options.job).await?;
        let lost = |(folder, problem)| MegatronError::Legacy { folder, problem };
        let mut damage = damage.into_iter().map(lost);
        if !options.tolerant
            && let Some(error) = damage.next()
        {
            return Err(error);
        }
        let damage = damage.map(|error| error_chain(&error)).collect();
        let format = StoredFormat::Legacy { tp, pp, ep };
        let common = Ok(Common { value: Value::Dict(common.clone()), dict: common });
        let parts = (format, source);
        let opened = Self::assemble(storage, options, parts, common, damage, warnings).await?;
        Ok(Self { optimizer_files: optimizers, ..opened })
    }

    async fn plugged(
        storage: &Arc<dyn Storage>,
        strategy: &Arc<dyn LoadStrategy>,
        backend: Backend,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        let opened = strategy.open(storage, &options.for_plug_in()).await?;
        let Opened { reader, common, damage, warnings, .. } = opened;
        let common = Ok(Common { value: Value::Dict(common.clone()), dict: common });
        let parts = (StoredFormat::Plugged { backend }, Source::new(Arc::clone(storage), reader));
        Self::assemble(storage, options, parts, common, damage, warnings).await
    }

    /// Puts what was found together.
    async fn assemble(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
        (format, stored): (StoredFormat, Source),
        common: Result<Common, MegatronError>,
        mut damage: Vec<String>,
        warnings: Vec<String>,
    ) -> Result<Self, MegatronError> {
        let common = match common {
            // A failure of the machine says nothing of the checkpoint.
            Err(error) if options.tolerant && !is_machines(&error) => {
                damage.push(error_chain(&error));
                Common::empty()
            }
            found => found?,
        };
        let shown = common.value.clone();
        let source = logical_view::view(&stored, &format, shown, options, &mut damage).await?;
        let args = common.dict.get("args").and_then(MegatronArgs::from_value);
        let storage = Arc::clone(storage);
        let (which, optimizer_files) = (None, Vec::new());
        let opened = Self {
            storage,
            which,
            format,
            source,
            stored,
            common,
            args,
            optimizer_files,
            damage,
            warnings,
        };
        Ok(opened)
    }

    /// The folder of the checkpoint.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Returns the iteration or release of the run whose folder was opened; `None` when the
    /// checkpoint's own folder was opened.
    #[must_use]
    pub fn which(&self) -> Option<Tracked> {
        self.which
    }

    /// Returns the format in which it was written.
    #[must_use]
    pub fn format(&self) -> &StoredFormat {
        &self.format
    }

    /// The checkpoint as it is meant, for every job.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The checkpoint of PyTorch beneath one of `torch_dist`, as it is stored.
    #[must_use]
    pub fn raw(&self) -> Option<&Source> {
        matches!(self.format, StoredFormat::TorchDist { .. }).then_some(&self.stored)
    }

    /// Returns the stored entries and their places, whatever the format.
    pub(crate) fn stored(&self) -> &Source {
        &self.stored
    }

    /// The common state: all that is not sharded, such as arguments, iteration and schedule.
    #[must_use]
    pub fn common(&self) -> &Dict {
        &self.common.dict
    }

    /// The common state as it was stored: the dict, or, when it holds what is no plain data, a
    /// [`Value::Opaque`] that shows it and can be written again.
    #[must_use]
    pub fn common_value(&self) -> &Value {
        &self.common.value
    }

    /// The arguments of the run, when they were saved.
    #[must_use]
    pub fn args(&self) -> Option<MegatronArgs> {
        self.args.clone()
    }

    /// Returns the content metadata that Megatron-Core (0.13 and later) stores, such as the optimizer's
    /// layout.
    #[must_use]
    pub fn content_metadata(&self) -> Option<&Dict> {
        self.common().get("content_metadata")?.as_dict()
    }

    /// The files of a distributed optimizer in legacy folders, `distrib_optim.pt`, by rank of the
    /// model: flat buffers, which name no parameters and so are not in [`source`](Self::source).
    #[must_use]
    pub fn optimizer_files(&self) -> &[Source] {
        &self.optimizer_files
    }

    /// Returns the damage beyond what the index and the lengths of files show, which was overlooked because
    /// the checkpoint was opened tolerantly.
    #[must_use]
    pub fn damage(&self) -> &[String] {
        &self.damage
    }

    /// Whether there is an `integrity.json`, against which
    /// [`verify_integrity`](crate::disk::verify_integrity) compares the files.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn has_integrity(&self) -> Result<bool, StorageError> {
        self.storage.contains(&Key::new(INTEGRITY_FILE)?).await
    }

    /// Returns the warnings about oddities that did not keep the checkpoint from being opened.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// The message for a place that was opened as a checkpoint of Megatron-Core and has no
/// `metadata.json`.
async fn no_config(storage: &Arc<dyn Storage>) -> Result<String, MegatronError> {
    let formats = dcp_jobs::listing::formats();
    let place = formats.look(storage).await?;
    let folder = place.listing().root();
    if !folder.has(".metadata") {
        return Ok(formats.explain(&folder));
    }
    Ok(format!(
        "not a checkpoint of Megatron-Core: there is a .metadata but no {METADATA_JSON}, which is \
         written last; either the save did not finish, or it was one of --ckpt-format torch_dcp or \
         fsdp_dtensor, which is to be opened as a checkpoint of PyTorch"
    ))
}

/// Whether a failure is one of the storage and not of what is stored.
fn is_machines(error: &MegatronError) -> bool {
    let MegatronError::Checkpoint(CheckpointError::Storage(error)) = error else { return false };
    is_machine(error)
}

/// Whether an error of a storage is a failure of the storage and not of what is stored.
pub(crate) fn is_machine(error: &StorageError) -> bool {
    !matches!(error.kind(), StorageErrorKind::NotFound | StorageErrorKind::Truncated)
}

/// Whether the files of a checkpoint of PyTorch are there, or some of them.
async fn is_dcp(storage: &Arc<dyn Storage>) -> Result<bool, MegatronError> {
    if storage.contains(&Key::new(".metadata").map_err(StorageError::from)?).await? {
        return Ok(true);
    }
    let mut objects = storage.list_files(None);
    while let Some(meta) = objects.next().await {
        if meta?.key.as_str().ends_with(".distcp") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the message for a `metadata.json` of a `torch_dist` checkpoint without `.metadata`.
async fn promised_but_absent(storage: &Arc<dyn Storage>) -> Result<String, MegatronError> {
    let formats = dcp_jobs::listing::formats();
    let place = formats.look(storage).await?;
    let found = formats.recognize(&place.listing().root());
    let found = found.first().map_or("has no .metadata", |first| &first.found.description);
    Ok(format!(
        "{METADATA_JSON} says that this is a checkpoint of \"torch_dist\", but there is no .metadata: \
         it was removed, or never copied here; the directory {found}"
    ))
}
