//! Names of a model's entries as FQNs, and parameters by their FQNs.

use std::collections::HashMap;

use dcp_core::CheckpointError;
use indexmap::IndexMap;

use crate::error::StateDictError;
use crate::model::{HiddenModule, Model, ModelEntry, ParamId};
use crate::options::StateDictOptions;

/// Components by which PyTorch's wrappers hold what they wrap: `torch.compile`, FSDP1, and
/// activation checkpointing. No module of a model has such a name.
const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];
const FLAT_PARAMETER: &str = "_flat_param";

/// The FQN of an entry: its name without the components of wrappers.
///
/// `_orig_mod` (`torch.compile`), `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` are left
/// out wherever they are. `module` is a legitimate name, too: the child of a
/// `DistributedDataParallel` is left out where `hidden` says so. The last component stays.
///
/// ```
/// use dcp_state::{HiddenModule, fqn_of};
///
/// let ddp = [HiddenModule::data_parallel("")];
/// let name = "module._orig_mod.layers.0._checkpoint_wrapped_module.module.weight";
/// assert_eq!(fqn_of(name, &ddp), "layers.0.module.weight");
/// ```
#[must_use]
pub fn fqn_of(name: &str, hidden: &[HiddenModule]) -> String {
    let mut kept = Vec::new();
    let mut start = 0;
    for component in name.split('.') {
        let module = name.get(..start.max(1) - 1).unwrap_or_default();
        start += component.len() + 1;
        let is_last = start > name.len();
        let is_hidden = WRAPPERS.contains(&component)
            || hidden.iter().any(|hidden| hidden.is(module, component));
        if is_last || !is_hidden {
            kept.push(component);
        }
    }
    kept.join(".")
}

/// The entries of a model by FQN, and the FQNs of its parameters.
#[derive(Debug)]
pub(crate) struct Fqns {
    pub(crate) entries: IndexMap<String, ModelEntry>,
    params: HashMap<ParamId, Parameter>,
}

#[derive(Debug)]
pub(crate) struct Parameter {
    /// Of a tied parameter all, in the order of the model.
    pub(crate) fqns: Vec<String>,
    pub(crate) frozen: bool,
}

impl Fqns {
    pub(crate) fn of(
        model: &(impl Model + ?Sized),
        options: &StateDictOptions,
    ) -> Result<Self, CheckpointError> {
        let mut hidden = model.hidden_modules();
        hidden.extend(options.hidden_modules.iter().cloned());
        let mut fqns = Self { entries: IndexMap::new(), params: HashMap::new() };
        for entry in model.entries()? {
            if entry.name.split('.').any(|component| component == FLAT_PARAMETER) {
                return Err(StateDictError::FlatParameter { name: entry.name }.into());
            }
            let fqn = fqn_of(&entry.name, &hidden);
            if let Some(id) = entry.param {
                let new = || Parameter { fqns: Vec::new(), frozen: entry.frozen };
                fqns.params.entry(id).or_insert_with(new).fqns.push(fqn.clone());
            }
            let second = entry.name.clone();
            if let Some(first) = fqns.entries.insert(fqn.clone(), entry) {
                let first = first.name;
                return Err(StateDictError::DuplicateFqn { fqn, first, second }.into());
            }
        }
        Ok(fqns)
    }

    pub(crate) fn parameter(&self, id: ParamId) -> Result<&Parameter, StateDictError> {
        self.params.get(&id).ok_or(StateDictError::UnknownParameter { id })
    }

    /// The name of a parameter in an optimizer's state dict: the first of a tied one.
    pub(crate) fn first(&self, id: ParamId) -> Result<&str, StateDictError> {
        let first = self.parameter(id)?.fqns.first();
        first.map(String::as_str).ok_or(StateDictError::UnknownParameter { id })
    }
}
