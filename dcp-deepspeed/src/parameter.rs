//! A parameter, and where its elements are.

use std::sync::Arc;

use dcp_core::Dims;
use indexmap::IndexMap;

use crate::flat::Run;

/// A parameter with master weights and the optimizer's state of it.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub(crate) shape: Dims,
    pub(crate) weights: State,
    /// By name, such as `exp_avg`.
    pub(crate) states: IndexMap<Arc<str>, State>,
}

/// A value that the optimizer has of a parameter.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// A tensor of the parameter's shape.
    Elements(Vec<Run>),
    /// An entry of a file, unchanged: a value of the whole group, such as `step`, or a whole tensor.
    Entry { part: usize, entry: usize },
}

/// The groups of an optimizer: the names of the parameters of each, and the entries that are settings.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    pub(crate) names: Vec<Vec<Arc<str>>>,
    /// The steps below `param_groups`, and the file and entry.
    pub(crate) settings: Vec<(Vec<String>, usize, usize)>,
}

/// All parameters with master weights.
#[derive(Debug, Default)]
pub(crate) struct Masters {
    pub(crate) parameters: IndexMap<Arc<str>, Parameter>,
    pub(crate) groups: Groups,
    /// The loss scaler: a file and an entry.
    pub(crate) loss_scaler: Option<(usize, usize)>,
}
