//! The trait that a framework implements for its models.

use std::fmt;

use dcp_core::{CheckpointError, Tensor, Value};

/// A model of a framework: its parameters and buffers, by name.
///
/// The functions of this crate do the rest: they clean the names, follow tied parameters, and bring
/// the tensors to other ranks.
///
/// ```
/// use dcp_core::{CheckpointError, Tensor, Value};
/// use dcp_state::{HiddenModule, Model, ModelEntry, ParamId};
///
/// struct Linear {
///     weight: Tensor,
///     bias: Tensor,
/// }
///
/// impl Model for Linear {
///     fn entries(&self) -> Result<Vec<ModelEntry>, CheckpointError> {
///         // The clone of a tensor shares its memory, so a load fills it in place.
///         Ok(vec![
///             ModelEntry::parameter("weight", ParamId(0), self.weight.clone()),
///             ModelEntry::parameter("bias", ParamId(1), self.bias.clone()).with_frozen(true),
///         ])
///     }
///
///     fn hidden_modules(&self) -> Vec<HiddenModule> {
///         Vec::new()
///     }
///
///     fn load(&mut self, _loaded: Vec<(String, Value)>) -> Result<(), CheckpointError> {
///         Ok(())
///     }
/// }
/// ```
pub trait Model {
    /// Parameters, persistent buffers and extra state, in the order of the framework's own state
    /// dict. A tied parameter appears under each of its names. Tensors share the model's memory
    /// where they can.
    ///
    /// # Errors
    ///
    /// When the model has no state to save.
    fn entries(&self) -> Result<Vec<ModelEntry>, CheckpointError>;

    /// The children that are not in FQNs, such as the one of a data-parallel wrapper.
    fn hidden_modules(&self) -> Vec<HiddenModule>;

    /// Applies loaded values, by the names of [`entries`](Self::entries). A tensor is the model's
    /// own, filled in place, where its memory can be written; otherwise it has the dtype, shape and
    /// shards of the model's.
    ///
    /// # Errors
    ///
    /// When a value is refused.
    fn load(&mut self, loaded: Vec<(String, Value)>) -> Result<(), CheckpointError>;
}

/// The identity of a parameter in one process: entries with the same are tied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub u64);

impl fmt::Display for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A parameter, a buffer, or extra state of a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelEntry {
    /// The name in the model, with the components of wrappers, such as
    /// `module._orig_mod.layers.0.weight`.
    pub name: String,
    /// The tensor, or an object of extra state.
    pub value: Value,
    /// The parameter; `None` for a buffer and for extra state.
    pub param: Option<ParamId>,
    /// Whether the parameter is not trained: `requires_grad` is false.
    pub frozen: bool,
}

impl ModelEntry {
    /// A parameter that is trained.
    #[must_use]
    pub fn parameter(name: impl Into<String>, id: ParamId, tensor: Tensor) -> Self {
        Self { name: name.into(), value: tensor.into(), param: Some(id), frozen: false }
    }

    /// A buffer that is saved.
    #[must_use]
    pub fn buffer(name: impl Into<String>, tensor: Tensor) -> Self {
        Self { name: name.into(), value: tensor.into(), param: None, frozen: false }
    }

    /// State of a module besides its tensors: `get_extra_state` of PyTorch, whose names end in
    /// `_extra_state`.
    #[must_use]
    pub fn extra_state(name: impl Into<String>, value: impl Into<Value>) -> Self {
        Self { name: name.into(), value: value.into(), param: None, frozen: false }
    }

    /// Sets whether the parameter is not trained.
    #[must_use]
    pub fn with_frozen(mut self, frozen: bool) -> Self {
        self.frozen = frozen;
        self
    }
}

/// A child module whose name is not a part of FQNs.
#[doc(alias = "_fqn_modifiers")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HiddenModule {
    module: String,
    child: String,
}

impl HiddenModule {
    /// The child `child` of `module`, which has the name that the model gives it; the root is `""`.
    #[must_use]
    pub fn new(module: impl Into<String>, child: impl Into<String>) -> Self {
        Self { module: module.into(), child: child.into() }
    }

    /// The model in PyTorch's `DistributedDataParallel` at `module`: its child `module`.
    #[doc(alias = "DDP")]
    #[must_use]
    pub fn data_parallel(module: impl Into<String>) -> Self {
        Self::new(module, "module")
    }

    pub(crate) fn is(&self, module: &str, child: &str) -> bool {
        self.module == module && self.child == child
    }
}
