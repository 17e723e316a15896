//! Options of the functions that get and set state dicts.

use std::sync::Arc;

use dcp_core::Collective;

use crate::error::StateDictError;
use crate::model::HiddenModule;

/// Options to make and apply state dicts: PyTorch's `StateDictOptions`.
///
/// ```
/// use dcp_state::StateDictOptions;
///
/// let options = StateDictOptions::new().full_state_dict(true).cpu_offload(true);
/// # let _ = options;
/// ```
#[derive(Clone, Debug)]
pub struct StateDictOptions {
    pub(crate) full_state_dict: bool,
    pub(crate) cpu_offload: bool,
    pub(crate) ignore_frozen_params: bool,
    pub(crate) submodules: Vec<String>,
    pub(crate) keep_submodule_prefixes: bool,
    pub(crate) strict: bool,
    pub(crate) broadcast_from_rank0: bool,
    pub(crate) flatten_optimizer_state_dict: bool,
    pub(crate) hidden_modules: Vec<HiddenModule>,
    pub(crate) group: Option<Arc<dyn Collective>>,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        Self {
            full_state_dict: false,
            cpu_offload: false,
            ignore_frozen_params: false,
            submodules: Vec::new(),
            keep_submodule_prefixes: true,
            strict: true,
            broadcast_from_rank0: false,
            flatten_optimizer_state_dict: false,
            hidden_modules: Vec::new(),
            group: None,
        }
    }
}

impl StateDictOptions {
    /// PyTorch's defaults: every rank has its own shards, and keys have to fit.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The ranks that gather and broadcast; without them, this process alone.
    #[must_use]
    pub fn group(mut self, group: Arc<dyn Collective>) -> Self {
        self.group = Some(group);
        self
    }

    /// Gathers every sharded tensor, one at a time, into a whole one in host memory. A state dict
    /// that is set has whole tensors then, of which each rank takes its shards.
    #[must_use]
    pub fn full_state_dict(mut self, full: bool) -> Self {
        self.full_state_dict = full;
        self
    }

    /// Copies tensors on devices to host memory. With
    /// [`full_state_dict`](Self::full_state_dict), only rank 0 has a state dict then; the others
    /// get an empty one.
    #[must_use]
    pub fn cpu_offload(mut self, offload: bool) -> Self {
        self.cpu_offload = offload;
        self
    }

    /// Leaves parameters that are not trained out of the model's state dict, and does not miss
    /// them in one that is set. PyTorch keeps the second and further names of a tied one.
    #[must_use]
    pub fn ignore_frozen_params(mut self, ignore: bool) -> Self {
        self.ignore_frozen_params = ignore;
        self
    }

    /// Only these modules of the model, by FQN.
    #[must_use]
    pub fn submodules<S: Into<String>>(mut self, modules: impl IntoIterator<Item = S>) -> Self {
        self.submodules = modules.into_iter().map(Into::into).collect();
        self
    }

    /// Whether keys begin with the FQN of the [submodule](Self::submodules), as by default.
    #[must_use]
    pub fn keep_submodule_prefixes(mut self, keep: bool) -> Self {
        self.keep_submodule_prefixes = keep;
        self
    }

    /// Whether it is an error that a state dict that is set lacks keys or has others, as by default.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets the state dict of rank 0, which broadcasts its whole tensors one by one; other ranks
    /// pass an empty one. Needs [`full_state_dict`](Self::full_state_dict).
    #[must_use]
    pub fn broadcast_from_rank0(mut self, broadcast: bool) -> Self {
        self.broadcast_from_rank0 = broadcast;
        self
    }

    /// Gives the optimizer's state dict keys `state.<fqn>.<name>` and `param_groups.<fqn>.<option>`,
    /// which other groupings of parameters can load, instead of nested dicts. A state dict that is
    /// set may have either layout.
    #[must_use]
    pub fn flatten_optimizer_state_dict(mut self, flatten: bool) -> Self {
        self.flatten_optimizer_state_dict = flatten;
        self
    }

    /// Leaves the names of more modules out of FQNs, besides the model's own
    /// [`hidden_modules`](crate::Model::hidden_modules).
    #[doc(alias = "dsd_fqn_modifiers")]
    #[must_use]
    pub fn hidden_modules(mut self, modules: impl IntoIterator<Item = HiddenModule>) -> Self {
        self.hidden_modules = modules.into_iter().collect();
        self
    }

    pub(crate) fn check(&self) -> Result<(), StateDictError> {
        if self.broadcast_from_rank0 && !self.full_state_dict {
            return Err(StateDictError::InvalidOptions(
                "`broadcast_from_rank0` needs `full_state_dict(true)`",
            ));
        }
        Ok(())
    }

    /// Whether this rank gets a state dict, where only rank 0 does.
    pub(crate) fn is_kept_by_rank0(&self) -> bool {
        self.full_state_dict && self.cpu_offload
    }
}
