//! The settings with which ranks save and load.

use std::fmt;
use std::sync::Arc;

use dcp_core::planner::{LoadPlanner, SavePlanner};
use dcp_core::{CheckpointError, Collective, Rank};
use dcp_planner::{DefaultLoadPlanner, DefaultSavePlanner, FlattenRule};

use crate::cast::Casts;
use crate::device::STAGING_BYTES;
use crate::event::{CheckpointObserver, Observers};
use crate::group::Group;
use crate::stage::Stager;

/// The settings with which ranks save and load: their group, planners, casts and observers.
///
/// A [`Saver`](crate::Saver), a [`Loader`](crate::Loader) and a
/// [`BackgroundSaver`](crate::BackgroundSaver) are made of one, and so is whatever saves and loads by them.
/// Every rank of a group has the same, but for its own place in the group.
///
/// ```
/// use dcp_core::DType;
/// use dcp_engine::{LoadMode, Loader, Saver, Settings};
///
/// let settings = Settings::new().cast(DType::BFloat16).load_mode(LoadMode::AllowMissing);
/// let saver = Saver::with_settings(settings.clone());
/// let loader = Loader::with_settings(settings);
/// # drop((saver, loader));
/// ```
#[derive(Clone)]
pub struct Settings {
    group: Option<Arc<dyn Collective>>,
    coordinator: Rank,
    pub(crate) observers: Observers,
    pub(crate) staging_bytes: u64,
    pub(crate) flatten_rule: Option<FlattenRule>,
    pub(crate) save_planner: Arc<dyn SavePlanner>,
    pub(crate) casts: Option<Casts>,
    pub(crate) remember_plans: bool,
    pub(crate) allow_parts: bool,
    /// By default each background saver has one of its own.
    pub(crate) stager: Option<Arc<dyn Stager>>,
    decision_group: Option<Arc<dyn Collective>>,
    pub(crate) load_planner: Arc<dyn LoadPlanner>,
    pub(crate) load_mode: LoadMode,
}

/// The differences between checkpoint and state dict that a load allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadMode {
    /// Both must hold the same names, shapes and dtypes.
    Exact,
    /// Everything in the state dict must be in the checkpoint, whole, with the same shape and
    /// dtype; what else is stored is reported.
    #[default]
    Strict,
    /// The checkpoint may lack keys of the state dict: their values keep what they hold, and are
    /// reported. What it has must be whole, with the same shape, dtype and kind.
    #[doc(alias = "allow_partial_load")]
    AllowMissing,
    /// Loads what fits and reports the rest. Values that do not fit keep what they hold.
    Partial,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            group: None,
            coordinator: 0,
            observers: Observers::default(),
            staging_bytes: STAGING_BYTES,
            flatten_rule: None,
            save_planner: Arc::new(DefaultSavePlanner::default()),
            casts: None,
            remember_plans: true,
            allow_parts: false,
            stager: None,
            decision_group: None,
            load_planner: Arc::new(DefaultLoadPlanner::new()),
            load_mode: LoadMode::default(),
        }
    }
}

impl Settings {
    /// This process alone, with the default planners.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The default settings of a rank of `group`.
    #[must_use]
    pub fn in_group(group: Arc<dyn Collective>) -> Self {
        Self::new().group(group)
    }

    /// Saves and loads together with the other ranks of `group`.
    #[must_use]
    #[doc(alias = "process_group")]
    pub fn group(mut self, group: Arc<dyn Collective>) -> Self {
        self.group = Some(group);
        self
    }

    /// The rank that merges plans and commits; 0 by default.
    #[must_use]
    #[doc(alias = "coordinator_rank")]
    pub fn coordinator(mut self, rank: Rank) -> Self {
        self.coordinator = rank;
        self
    }

    /// Reports the steps of every save and load to `observer` too, for progress bars and metrics.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn CheckpointObserver>) -> Self {
        self.observers.add(observer);
        self
    }

    /// The host memory through which elements on devices
    /// ([`DeviceMemory`](dcp_core::device::DeviceMemory)) are copied, in segments of at most a quarter of
    /// it; 64 MiB by default.
    #[must_use]
    pub fn staging_bytes(mut self, bytes: u64) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// Flattens nested state by this rule. By default saves use PyTorch's since 2.4. In loads the
    /// checkpoint's keys decide, as in PyTorch since 2.5: by today's rule, unless only that of 2.0 to 2.3
    /// finds them.
    #[must_use]
    pub fn flatten_rule(mut self, rule: FlattenRule) -> Self {
        self.flatten_rule = Some(rule);
        self
    }

    /// Plans saves with another policy.
    #[must_use]
    pub fn save_planner(mut self, planner: Arc<dyn SavePlanner>) -> Self {
        self.save_planner = planner;
        self
    }

    /// Saves tensors in another dtype than they have in memory, in segments on the way to the file;
    /// the state is not changed. A dtype casts all wide floats; [`Casts`] chooses among them.
    /// [`SaveSummary::cast`](crate::SaveSummary::cast) counts what was lost.
    #[must_use]
    pub fn cast(mut self, casts: impl Into<Casts>) -> Self {
        self.casts = Some(casts.into());
        self
    }

    /// Whether to remember plans between saves. On by default; may differ between ranks.
    #[must_use]
    pub fn remember_plans(mut self, remember: bool) -> Self {
        self.remember_plans = remember;
        self
    }

    /// Whether a save of this process alone stores tensors of which it holds only parts; by default it
    /// fails, because no reader finds the others. It is for programs whose processes each save a checkpoint
    /// of their own.
    #[must_use]
    pub fn allow_parts(mut self, allow: bool) -> Self {
        self.allow_parts = allow;
        self
    }

    /// Copies the state of background saves by `stager`; by default with a
    /// [`BlockingStager`](crate::stage::BlockingStager), which keeps its memory for the next save.
    #[must_use]
    #[doc(alias = "async_stager")]
    pub fn stager(mut self, stager: Arc<dyn Stager>) -> Self {
        self.stager = Some(stager);
        self
    }

    /// The group in which ranks decide while background saves go on, as to [skip](crate::WhenBusy::Skip)
    /// one, on the thread that starts it. It is another one than [`group`](Self::group), which an earlier
    /// save may use at that time.
    #[must_use]
    pub fn decision_group(mut self, group: Arc<dyn Collective>) -> Self {
        self.decision_group = Some(group);
        self
    }

    /// Plans loads with another policy.
    #[must_use]
    pub fn load_planner(mut self, planner: Arc<dyn LoadPlanner>) -> Self {
        self.load_planner = planner;
        self
    }

    /// Sets how closely a checkpoint must fit the state dict; by default [`LoadMode::Strict`].
    #[must_use]
    pub fn load_mode(mut self, mode: LoadMode) -> Self {
        self.load_mode = mode;
        self
    }

    /// The collective of the group; none for this process alone.
    #[must_use]
    pub fn collective(&self) -> Option<&Arc<dyn Collective>> {
        self.group.as_ref()
    }

    /// The collective of the [`decision_group`](Self::decision_group), if there is one.
    #[must_use]
    pub fn decision_collective(&self) -> Option<&Arc<dyn Collective>> {
        self.decision_group.as_ref()
    }

    /// This process in the group.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.group.as_ref().map_or(0, |group| group.rank())
    }

    /// The number of processes in the group.
    pub(crate) fn world_size(&self) -> u32 {
        self.group.as_ref().map_or(1, |group| group.world_size())
    }

    pub(crate) fn coordinator_rank(&self) -> Rank {
        self.coordinator
    }

    /// Whether this rank merges plans and commits.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.rank() == self.coordinator)
    }

    /// The group for one operation of its ranks.
    ///
    /// # Errors
    ///
    /// As [`Group::new`].
    pub fn enter_group(&self) -> Result<Group, CheckpointError> {
        Group::new(self.group.clone(), self.coordinator)
    }

    /// The [`decision_group`](Self::decision_group) for one operation of its ranks, if there is one.
    ///
    /// # Errors
    ///
    /// As [`Group::new`].
    pub fn enter_decision_group(&self) -> Option<Result<Group, CheckpointError>> {
        let group = self.decision_group.clone()?;
        Some(Group::new(Some(group), self.coordinator))
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("group", &self.group)
            .field("coordinator", &self.coordinator)
            .field("save_planner", &self.save_planner)
            .field("load_planner", &self.load_planner)
            .field("casts", &self.casts)
            .field("flatten_rule", &self.flatten_rule)
            .field("load_mode", &self.load_mode)
            .finish_non_exhaustive()
    }
}
