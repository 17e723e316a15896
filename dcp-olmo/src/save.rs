//! OLMo-core's `save_model_and_optim_state` and `save_state_dict`, over any storage and group.

use std::num::NonZeroUsize;
use std::sync::Arc;

use dcp_core::{CheckpointError, StateDict, Storage};
use dcp_engine::{BackgroundSaver, SaveHandle, SaveSummary, Saver};
use dcp_formats::dcp::{DcpWriter, FileLayout};
use dcp_formats::metadata::Profile;

use crate::layout::OptimizerLayout;
use crate::state::{flatten_optim, whole};

/// Options of a save.
#[derive(Clone, Copy, Debug)]
pub struct OlmoSaveOptions {
    /// Whether an existing checkpoint is replaced. It stays loadable until the new one is
    /// complete, and is removed then; OLMo-core (3.0) clears the folder first.
    pub(crate) save_overwrite: bool,
    /// Whether a nested optimizer state is saved by parameter, as OLMo-core's trainer does.
    pub(crate) flatten_optimizer_state: bool,
    /// Files of each rank, with about the same number of bytes in each.
    pub(crate) thread_count: NonZeroUsize,
    /// The form of `.metadata`. PyTorch's is the default, because OLMo-core reads it too.
    pub(crate) profile: Profile,
}

impl Default for OlmoSaveOptions {
    /// Nothing is replaced, the optimizer is saved as it is, one file for each rank, in
    /// PyTorch's form.
    fn default() -> Self {
        Self {
            save_overwrite: false,
            flatten_optimizer_state: false,
            thread_count: NonZeroUsize::MIN,
            profile: Profile::Compat,
        }
    }
}

impl OlmoSaveOptions {
    /// Sets whether an existing checkpoint is replaced.
    #[must_use]
    pub fn save_overwrite(mut self, overwrite: bool) -> Self {
        self.save_overwrite = overwrite;
        self
    }

    /// Sets whether a nested optimizer state is saved by parameter, or as it is.
    #[must_use]
    pub fn flatten_optimizer_state(mut self, flatten: bool) -> Self {
        self.flatten_optimizer_state = flatten;
        self
    }

    /// Sets the number of files of each rank.
    #[must_use]
    pub fn thread_count(mut self, files: NonZeroUsize) -> Self {
        self.thread_count = files;
        self
    }

    /// Sets the form of `.metadata`.
    #[must_use]
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// A writer of checkpoints of these options.
    #[must_use]
    pub fn writer(&self, storage: Arc<dyn Storage>) -> DcpWriter {
        let files = match self.thread_count.get() {
            1 => FileLayout::OnePerRank,
            _ => FileLayout::SplitBySize(self.thread_count),
        };
        DcpWriter::builder(storage)
            .profile(self.profile)
            .files(files)
            .overwrite(self.save_overwrite)
            .build()
    }

    fn state(
        &self,
        model: &StateDict,
        optim: Option<&StateDict>,
    ) -> Result<StateDict, CheckpointError> {
        let flattened = match optim {
            Some(optim)
                if self.flatten_optimizer_state
                    && OptimizerLayout::of_state(optim) == Some(OptimizerLayout::Nested) =>
            {
                Some(flatten_optim(optim)?)
            }
            _ => None,
        };
        Ok(whole(model, flattened.as_ref().or(optim)))
    }
}

/// Saves a model, and its optimizer if there is one, with the other ranks of the saver's group.
///
/// `model` maps names of parameters to tensors; `optim` is `{"state": {FQN: {field: value}},
/// "param_groups": [{field: value, "params": [FQN, …]}]}`, or flat already. `storage` is the
/// folder that OLMo-core calls `model_and_optim`.
///
/// # Errors
///
/// As [`Saver::save`], and when `optim` is of no such form. Without `save_overwrite`, also when
/// there is a checkpoint in the folder; other files there are left alone.
pub async fn save_model_and_optim_state(
    saver: &Saver,
    storage: &Arc<dyn Storage>,
    model: &StateDict,
    optim: Option<&StateDict>,
    options: &OlmoSaveOptions,
) -> Result<SaveSummary, CheckpointError> {
    let state = options.state(model, optim)?;
    saver.save(&state, &options.writer(Arc::clone(storage))).await
}

/// Saves in the background: the state is copied before this returns, so that training may go on.
/// The saver needs a group of its own, and the call a tokio runtime.
///
/// # Errors
///
/// When the state cannot be copied; what fails later is reported by [`SaveHandle::wait`].
pub fn async_save_model_and_optim_state(
    saver: &BackgroundSaver,
    storage: &Arc<dyn Storage>,
    model: &StateDict,
    optim: Option<&StateDict>,
    options: &OlmoSaveOptions,
) -> Result<SaveHandle, CheckpointError> {
    let state = options.state(model, optim)?;
    saver.start(&state, Arc::new(options.writer(Arc::clone(storage))))
}
