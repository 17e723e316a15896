//! The trait that a framework implements for its optimizers.

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Value};

use crate::model::ParamId;

/// An optimizer of a framework: parameter groups, and a state per parameter.
///
/// Names of options and of state are the framework's; those that PyTorch loads are the ones of
/// `torch.optim`, such as `lr`, `betas`, `exp_avg` and a `step` that is a float32 tensor without
/// axes.
pub trait Optimizer {
    /// The parameter groups.
    ///
    /// # Errors
    ///
    /// When they are not available.
    fn param_groups(&self) -> Result<Vec<ParamGroup>, CheckpointError>;

    /// The state of each parameter that has one. Tensors share the optimizer's memory where they
    /// can. A state may be nested.
    ///
    /// # Errors
    ///
    /// When it is not available.
    fn state(&self) -> Result<Vec<(ParamId, Dict)>, CheckpointError>;

    /// Creates the state of each trained parameter, without a change of parameters or options. It
    /// is called where no parameter has a state: before a load, which needs its memory, and before
    /// a save. An optimizer without state does nothing.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    fn init_state(&mut self) -> Result<(), CheckpointError>;

    /// Applies loaded groups, in the order of [`param_groups`](Self::param_groups), and states.
    /// Tensors are the optimizer's own, filled in place, where it has them and their memory can be
    /// written.
    ///
    /// # Errors
    ///
    /// When a value is refused.
    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        state: Vec<(ParamId, Dict)>,
    ) -> Result<(), CheckpointError>;
}

/// Parameters with the same options.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ParamGroup {
    /// The parameters.
    pub params: Vec<ParamId>,
    /// Learning rate and other options, by name.
    pub options: Dict,
}

impl ParamGroup {
    /// Parameters without options.
    #[must_use]
    pub fn new(params: impl IntoIterator<Item = ParamId>) -> Self {
        Self { params: params.into_iter().collect(), options: Dict::new() }
    }

    /// Adds an option.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.options.insert(name, value);
        self
    }
}
