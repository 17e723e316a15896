//! Errors of planning: a state that cannot be saved or loaded, or a plan that is invalid.

mod chunks;
mod contract;
mod plugin;
mod ranks;
mod state;
mod subject;

pub use self::chunks::ChunksProblem;
pub use self::contract::{DataProblem, PlanMaker, PlanProblem, PlannerProblem};
pub use self::plugin::PluginError;
pub use self::ranks::{PlanSubject, RanksProblem};
pub use self::state::{StateProblem, WantedKind};
use super::TensorError;
use super::text::{list, quoted};
use crate::text::{Message, Quoted};

/// A plan cannot be made, or makes no sense. Each variant says who can act on it.
///
/// | variant | who acts |
/// |---|---|
/// | [`State`](Self::State), [`Placement`](Self::Placement), [`Missing`](Self::Missing), [`Tensor`](Self::Tensor) | the program: it changes its state dict or its request |
/// | [`Chunks`](Self::Chunks) | who divides the tensor among ranks; for a stored checkpoint, who wrote it |
/// | [`Ranks`](Self::Ranks) | who starts the ranks: one program, one version, the same settings |
/// | [`Index`](Self::Index) | who has another copy of the checkpoint: this one is damaged |
/// | [`Planner`](Self::Planner), [`Plan`](Self::Plan) | the author of the planner or the writer |
/// | [`Data`](Self::Data) | the author of the reader, or of the source or destination of data |
/// | [`TooLarge`](Self::TooLarge) | who chose the number of ranks, keys or files |
/// | [`Plugin`](Self::Plugin) | as the error of the plug-in says |
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An entry of the state dict, or a request for one, cannot be planned. The program acts.
    #[error("{}", .problem.about(.fqn))]
    State {
        /// The tensor, object or container.
        fqn: String,
        /// Its problem.
        problem: StateProblem,
    },
    /// Mesh, coordinate, placements and shape do not fit together. The program acts.
    #[error("invalid placement: {problem}", problem = Message(.problem))]
    Placement {
        /// The contradiction among mesh, coordinate, placements and shape.
        problem: String,
    },
    /// Names that must be in the checkpoint are not; all of them. The program acts.
    #[error("the checkpoint has no {}", quoted(.fqns))]
    Missing {
        /// The names.
        fqns: Vec<String>,
    },
    /// A tensor cannot be made, or its elements cannot be had. The program acts.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Chunks do not make up their tensor. Whoever divides it acts.
    #[error("{}", .problem.about(.fqn))]
    Chunks {
        /// The tensor.
        fqn: String,
        /// The problem of its chunks.
        problem: ChunksProblem,
    },
    /// Ranks do not agree. Whoever starts them acts.
    #[error(transparent)]
    Ranks(#[from] RanksProblem),
    /// An entry of a checkpoint's index contradicts itself. The checkpoint is damaged.
    #[error("the index of the checkpoint is invalid for {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    Index {
        /// The tensor or object.
        fqn: String,
        /// The contradiction.
        problem: String,
    },
    /// A planner's plan does not describe what ranks hold. The author of the planner acts.
    #[error("planner {planner} {}", .problem.about(.fqn))]
    Planner {
        /// The planner.
        planner: String,
        /// The tensor or object.
        fqn: String,
        /// The difference.
        problem: PlannerProblem,
    },
    /// A plan does not fit its index, its rank or its file. The author of the planner or of the
    /// writer acts.
    #[error(transparent)]
    Plan(#[from] PlanProblem),
    /// A reader, or a source or destination of data, breaks its contract. Its author acts.
    #[error(transparent)]
    Data(#[from] DataProblem),
    /// A plan, a message or an index has more of something than its tables can count.
    #[error("{what} exceeds the limit of {limit}", what = Message(.what))]
    TooLarge {
        /// The quantity that is too large, such as "the number of keys".
        what: String,
        /// The largest number that is possible.
        limit: u64,
    },
    /// A plug-in, such as a planner, a format or a framework, refuses for a reason of its own.
    #[error(transparent)]
    Plugin(PluginError),
    /// Several problems at once.
    #[error("{}", list(.0))]
    Many(Vec<PlanError>),
}

impl PlanError {
    /// The refusal of a plug-in, by an error type of its own.
    ///
    /// ```
    /// use dcp_core::PlanError;
    ///
    /// #[derive(Debug, thiserror::Error)]
    /// #[error("node 3 has no spare memory; plan without it")]
    /// struct NoSpare;
    ///
    /// let PlanError::Plugin(error) = PlanError::plugin(NoSpare) else { unreachable!() };
    /// assert!(error.downcast_ref::<NoSpare>().is_some());
    /// ```
    #[must_use]
    pub fn plugin(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Plugin(PluginError::new(error))
    }
}
