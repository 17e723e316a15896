//! Saves and loads in a group, from URLs.

mod open;
mod shown;
#[cfg(feature = "trace")]
mod trace;

use std::fmt;
use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;

use dcp_core::format::FormatRegistry;
use dcp_core::registry::StorageRegistry;
use dcp_core::{
    CheckpointError, Collective, PlanError, StateDict, Stateful, Storage, StorageReader,
    StorageWriter,
};
#[cfg(feature = "jobs")]
use dcp_engine::Group;
use dcp_engine::{
    BackgroundSaver, LoadMode, LoadSummary, Loader, ReadSharing, SaveHandle, SaveSummary, Saver,
    Settings, WhenBusy,
};
use dcp_formats::dcp::DcpWriter;

use self::open::Opened;

type MakeWriter = dyn Fn(Arc<dyn Storage>) -> Arc<dyn StorageWriter> + Send + Sync;
type MakeReader = dyn Fn(Arc<dyn Storage>) -> Arc<dyn StorageReader> + Send + Sync;

/// The way in which a trainer saves and loads by URLs: its [`Settings`], storages and formats.
///
/// Every rank makes one with the same settings and keeps it for the whole run. It remembers the
/// plan of the last save: while no rank's structure changes, a save exchanges a few bytes per rank
/// instead of plans. Clones share what is remembered.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp::collectives::LocalGroup;
/// use dcp::{Checkpointer, Collective, DType, Region, Settings, StateDict, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let run = folder.path().join("run").display().to_string();
/// // Two ranks as threads; processes use `TcpConfig::from_env()?.connect()?`.
/// let results = LocalGroup::new(2).run(|group| {
///     let rows = Region::new([u64::from(group.rank()) * 2, 0], [2, 8])?;
///     let mut state = StateDict::new();
///     state.insert("weight", Tensor::zeros_sharded(DType::Float32, [4, 8], [rows])?);
///
///     let settings = Settings::in_group(Arc::new(group)).cast(DType::BFloat16);
///     let checkpointer = Checkpointer::with_settings(settings);
///     for step in 1..=3 {
///         let saved = checkpointer.save(&state, format!("{run}/step_{step}")).blocking()?;
///         assert_eq!(saved.reused_plan, step > 1);
///     }
///     Ok::<_, dcp::CheckpointError>(())
/// });
/// # results.into_iter().collect::<Result<Vec<_>, _>>()?;
/// # Ok(())
/// # }
/// ```
///
/// A value without shards, such as a number or a tensor made with [`Tensor::replicated`](crate::Tensor::replicated),
/// is a replica: one rank saves it for all. State that differs by rank, such as that of a random generator or a data
/// loader, has a name with the rank (`rng/rank_3`). Under one name for all, the checkpoint holds that of one rank;
/// small values are compared, and [`SaveSummary::differing`] and a warning name those that differ.
///
/// One operation at a time uses the group. An operation that begins while background saves are
/// under way waits for them. Give it a group that training does not use meanwhile.
#[derive(Clone)]
pub struct Checkpointer {
    storages: StorageRegistry,
    formats: FormatRegistry,
    #[cfg(all(feature = "cache", unix))]
    upload_slots: Option<dcp_storage_cache::UploadSlots>,
    #[cfg(feature = "trace")]
    trace: Option<dcp_trace::TraceRecorder>,
    saver: Saver,
    background: BackgroundSaver,
    writer: Arc<MakeWriter>,
    /// Whether the writer is the default one, which can note the step of a save.
    notes_steps: bool,
    /// `None` for the default one.
    reader: Option<Arc<MakeReader>>,
    sharing: ReadSharing,
}

impl Default for Checkpointer {
    fn default() -> Self {
        Self::new()
    }
}

impl Checkpointer {
    /// Saves in PyTorch's format and loads every format of [`default_formats`](crate::plugins::default_formats),
    /// in this process alone, at the URLs of [`default_storages`](crate::default_storages).
    #[must_use]
    pub fn new() -> Self {
        Self::with_settings(Settings::new())
    }

    /// Saves and loads as [`new`](Self::new) does, together with the other ranks of `group`.
    #[must_use]
    #[doc(alias = "process_group")]
    pub fn in_group(group: Arc<dyn Collective>) -> Self {
        Self::with_settings(Settings::in_group(group))
    }

    /// Saves and loads as [`new`](Self::new) does, with these settings.
    #[must_use]
    pub fn with_settings(settings: Settings) -> Self {
        let saver = Saver::with_settings(settings);
        Self {
            storages: crate::default_storages(),
            formats: crate::plugins::default_formats(),
            #[cfg(all(feature = "cache", unix))]
            upload_slots: None,
            #[cfg(feature = "trace")]
            trace: None,
            background: BackgroundSaver::new(saver.clone()),
            saver,
            writer: Arc::new(|storage| Arc::new(DcpWriter::new(storage))),
            notes_steps: true,
            reader: None,
            sharing: ReadSharing::default(),
        }
    }

    /// The settings of its saves and loads.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        self.saver.settings()
    }

    /// The storages that serve URLs; those of [`default_storages`](crate::default_storages) by
    /// default.
    #[must_use]
    pub fn storages(self, storages: StorageRegistry) -> Self {
        Self { storages, ..self }
    }

    /// Lets only some of the processes of a node upload at a time, so that they do not share its
    /// network among too many: a process that is done lets the next one begin, without a barrier.
    /// Files below 1 MiB, the commit among them, wait for nobody.
    ///
    /// ```
    /// use dcp::Checkpointer;
    /// use dcp::cache::UploadSlots;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = tempfile::tempdir()?;
    /// # let folder = node.path().join("uploads");
    /// // Every process of the node names the same folder, on its local disk, and the same number.
    /// let checkpointer = Checkpointer::new().throttle_uploads(UploadSlots::open(folder, 2)?);
    /// # drop(checkpointer);
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(all(feature = "cache", unix))]
    #[must_use]
    pub fn throttle_uploads(self, slots: dcp_storage_cache::UploadSlots) -> Self {
        Self { upload_slots: Some(slots), ..self }
    }

    /// The plan of the last save, for the same rank after a restart ([`Saver::export_plans`]).
    #[must_use]
    pub fn export_plans(&self) -> Option<Vec<u8>> {
        self.saver.export_plans()
    }

    /// Remembers an exported plan ([`Saver::import_plans`]).
    ///
    /// # Errors
    ///
    /// When it is damaged, or of another rank, group, planner or version.
    pub fn import_plans(&self, plans: &[u8]) -> Result<(), PlanError> {
        self.saver.import_plans(plans)
    }

    /// Writes through another [`StorageWriter`], such as a `DcpWriter` with options or one of
    /// another format.
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    ///
    /// use dcp::Checkpointer;
    /// use dcp::formats::dcp::{DcpWriter, FileLayout};
    ///
    /// let four = FileLayout::SplitBySize(NonZeroUsize::new(4).unwrap());
    /// let checkpointer =
    ///     Checkpointer::new().writer(move |storage| DcpWriter::builder(storage).files(four).build());
    /// # drop(checkpointer);
    /// ```
    #[must_use]
    #[doc(alias = "storage_writer")]
    pub fn writer<W, F>(mut self, make: F) -> Self
    where
        W: StorageWriter + 'static,
        F: Fn(Arc<dyn Storage>) -> W + Send + Sync + 'static,
    {
        self.writer = Arc::new(move |storage| Arc::new(make(storage)));
        self.notes_steps = false;
        self
    }

    /// The same, whose saves note their step in the sidecar, unless the caller chose the writer.
    #[cfg(feature = "jobs")]
    pub(crate) fn noting_steps(&self, step: u64, parent_step: Option<u64>) -> Self {
        let mut noting = self.clone();
        if self.notes_steps {
            noting.writer = Arc::new(move |storage| {
                Arc::new(DcpWriter::builder(storage).steps(step, parent_step).build())
            });
        }
        noting
    }

    /// A save of `state` to `url`, which every rank calls with its own state.
    ///
    /// The state is taken now, and its tensors share their memory: they are read while the save
    /// runs, unless it is a [background](Save::background) save.
    pub fn save<S: Stateful + ?Sized>(&self, state: &S, url: impl Into<String>) -> Save {
        Save { with: self.clone(), state: state.state_dict(), url: url.into() }
    }

    /// A load of `url` into `state`, which every rank calls with its own state, in whatever
    /// layout: tensors in place, objects by replacing them. The checkpoint may be of any format, a
    /// folder, a file, or the folder of a run, which selects one.
    pub fn load<'a, S: Stateful + Send + ?Sized>(
        &self,
        state: &'a mut S,
        url: impl Into<String>,
    ) -> Load<'a, S> {
        Load { with: self.clone(), state, url: url.into(), mode: None }
    }
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpointer")
            .field("storages", &self.storages)
            .field("settings", self.settings())
            .finish_non_exhaustive()
    }
}

/// A save that runs when it is awaited, with [`blocking`](Self::blocking), or with
/// [`background`](Self::background); from [`save`](crate::save) or [`Checkpointer::save`].
///
/// After an error the place holds what it held before; see [`Saver::save`]. It returns the error of an
/// earlier background save whose [`SaveHandle`] was dropped, and saves nothing then. In a group, every rank
/// returns the same error, also when one rank has no state or cannot open the storage.
#[must_use = "a save does nothing until it is awaited"]
pub struct Save {
    with: Checkpointer,
    state: Result<StateDict, CheckpointError>,
    url: String,
}

impl Save {
    /// Saves on this thread, without a runtime; see [`block_on`](crate::block_on).
    ///
    /// # Errors
    ///
    /// As [`Saver::save`], and when the storage of the URL cannot be opened.
    #[cfg(feature = "blocking")]
    pub fn blocking(self) -> Result<SaveSummary, CheckpointError> {
        crate::block_on(self.into_future())?
    }

    /// Copies the state, then saves the copy on another thread while training goes on. Waits first
    /// for an earlier background save of this [`Checkpointer`].
    ///
    /// Dropping the last owner waits for the save. The next save of any kind returns an error whose
    /// [`SaveHandle`] was dropped.
    ///
    /// # Errors
    ///
    /// When the state cannot be copied, or an earlier background save failed and its [`SaveHandle`]
    /// was dropped. What fails later is returned by [`SaveHandle::wait`].
    #[doc(alias = "async_save")]
    pub fn background(self) -> Result<SaveHandle, CheckpointError> {
        match self.state {
            Ok(state) => {
                let background = self.with.background.place(&self.url);
                background.start_opening(&state, self.with.open_later(self.url))
            }
            Err(error) => Ok(self.with.background.fail(error)),
        }
    }

    /// As [`background`](Self::background), with a choice of what happens while an earlier background
    /// save is under way. Returns `None` for a save that is skipped.
    ///
    /// # Errors
    ///
    /// As [`background`](Self::background), and when the ranks of a group cannot agree to skip: they
    /// need a [`decision_group`](Settings::decision_group).
    pub fn background_when(self, busy: WhenBusy) -> Result<Option<SaveHandle>, CheckpointError> {
        match self.state {
            Ok(state) => {
                let background = self.with.background.place(&self.url);
                background.start_when(busy, &state, self.with.open_later(self.url))
            }
            Err(error) => self.with.background.fail_when(busy, error).map(Some),
        }
    }
}

impl IntoFuture for Save {
    type Output = Result<SaveSummary, CheckpointError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { with, state, url } = self;
        Box::pin(async move {
            with.background.settled().await;
            let earlier = with.background.earlier_failure();
            let state = earlier.map_or(state, Err);
            let opened = async { Ok((state?, with.open_writer(&url).await?)) };
            match opened.await {
                Ok((state, writer)) => with.saver.clone().place(&url).save(&state, &*writer).await,
                Err(error) => Err(with.saver.fail(error).await),
            }
        })
    }
}

/// A load that runs when it is awaited, or with [`blocking`](Self::blocking); from
/// [`load`](crate::load) or [`Checkpointer::load`].
///
/// Nothing is changed before every rank has found that the checkpoint fits; see [`Loader::load`].
/// In a group, every rank returns the same error, also that of one rank's
/// [`load_state_dict`](Stateful::load_state_dict), which comes last.
#[must_use = "a load does nothing until it is awaited"]
pub struct Load<'a, S: ?Sized> {
    with: Checkpointer,
    state: &'a mut S,
    url: String,
    /// `None` for that of the settings.
    mode: Option<LoadMode>,
}

impl<S: Stateful + Send + ?Sized> Load<'_, S> {
    /// Replaces [`Settings::load_mode`] for this load.
    pub fn mode(mut self, mode: LoadMode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Loads on this thread, without a runtime; see [`block_on`](crate::block_on).
    ///
    /// # Errors
    ///
    /// As [`Loader::load`], and when the storage of the URL cannot be opened.
    #[cfg(feature = "blocking")]
    pub fn blocking(self) -> Result<LoadSummary, CheckpointError> {
        crate::block_on(self.into_future())?
    }
}

impl<'a, S: Stateful + Send + ?Sized> IntoFuture for Load<'a, S> {
    type Output = Result<LoadSummary, CheckpointError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { with, state, url, mode } = self;
        Box::pin(async move {
            with.background.settled().await;
            let settings = with.settings().clone();
            let loader = Loader::with_settings(match mode {
                Some(mode) => settings.load_mode(mode),
                None => settings,
            });
            match with.open_reader(&url).await {
                Ok(Opened::Any(reader)) => loader.load_stateful(state, &*reader).await,
                Ok(Opened::Shared(reader)) => loader.load_shared(state, &reader).await,
                Err(error) => Err(loader.fail(error).await),
            }
        })
    }
}

#[cfg(feature = "jobs")]
impl Checkpointer {
    pub(crate) fn storage_registry(&self) -> StorageRegistry {
        self.traced_storages()
    }

    /// The group of the saves, when no background save uses it.
    pub(crate) async fn settled_group(&self) -> Result<Group, CheckpointError> {
        self.background.settled().await;
        self.settings().enter_group()
    }

    /// The group in which ranks decide while background saves go on, or that of the saves.
    pub(crate) async fn decisive_group(&self) -> Result<Group, CheckpointError> {
        match self.settings().enter_decision_group() {
            Some(group) => group,
            None => self.settled_group().await,
        }
    }
}
