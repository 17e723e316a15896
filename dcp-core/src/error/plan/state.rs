//! Problems of the state dict that a program saves, or of its request.

use super::PlanError;
use crate::error::text::container;
use crate::text::{Message, Quoted};

/// The reason why an entry of a state dict cannot be planned. The program changes the entry, or
/// requests it otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateProblem {
    /// Two entries flatten to this name.
    Duplicate,
    /// A process that saves alone holds a part of the tensor.
    Part {
        /// The elements of the tensor.
        expected: u64,
        /// The elements of the shards that the process holds.
        found: u64,
    },
    /// Ranks hold terms of a sum, which cannot be saved or loaded.
    PartialSum,
    /// A key of this dict has no text, so that what it leads to has no name. The name of the state
    /// dict itself is empty.
    UnnamedKey {
        /// The type of the key.
        kind: String,
    },
    /// The state dict has too many levels here.
    TooDeep {
        /// The number of levels that are possible.
        limit: usize,
    },
    /// The path has no place in the nested state dict.
    PathConflict {
        /// The entry or container that has the place.
        problem: String,
    },
    /// A tensor is needed and the entry is an object, or the reverse.
    NotA(WantedKind),
    /// The entry is of a kind that this version does not know.
    UnknownKind,
    /// The format has no form for the entry.
    NotStorable {
        /// The reason, and a form that can be stored instead.
        problem: String,
    },
    /// Elements have no conversion to the requested dtype.
    NotCastable {
        /// The dtypes, and why not.
        problem: String,
    },
}

/// The kind of entry that is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantedKind {
    /// A tensor.
    Tensor,
    /// A value that is no tensor.
    Object,
}

impl StateProblem {
    /// The error of the entry that has this problem.
    #[must_use]
    pub fn of(self, fqn: impl Into<String>) -> PlanError {
        PlanError::State { fqn: fqn.into(), problem: self }
    }

    pub(super) fn about(&self, name: &str) -> String {
        let fqn = Quoted(name);
        match self {
            Self::Duplicate => {
                format!("two entries of the state dict flatten to {fqn}; rename one of them")
            }
            Self::Part { expected, found } => format!(
                "this process saves alone and holds {found} of the {expected} elements of {fqn}, so \
                 the checkpoint would lack the others; save in the group of all ranks that hold \
                 parts, or allow parts"
            ),
            Self::PartialSum => format!(
                "{fqn} has a partial placement; reduce it to a sharded or replicated tensor first"
            ),
            Self::UnnamedKey { kind } => format!(
                "a key of type {kind} in {} has no text; use text or numbers as keys",
                container(name)
            ),
            Self::TooDeep { limit } => {
                format!("{fqn} is nested more than {limit} levels deep; flatten its containers")
            }
            Self::PathConflict { problem } => format!(
                "the path of {fqn} does not fit the state dict: {}; change one of the paths",
                Message(problem)
            ),
            Self::NotA(WantedKind::Tensor) => {
                format!("{fqn} is not a tensor; request a tensor, or read it as an object")
            }
            Self::NotA(WantedKind::Object) => {
                format!("{fqn} is not an object; request an object, or read it as a tensor")
            }
            Self::UnknownKind => {
                format!("{fqn} is of an unknown kind; use a newer version of dcp")
            }
            Self::NotStorable { problem } => {
                format!("the format cannot store {fqn}: {}", Message(problem))
            }
            Self::NotCastable { problem } => format!("cannot cast {fqn}: {}", Message(problem)),
        }
    }
}

impl PlanError {
    /// A tensor is needed, and the entry is an object.
    #[must_use]
    pub fn not_a_tensor(fqn: impl Into<String>) -> Self {
        StateProblem::NotA(WantedKind::Tensor).of(fqn)
    }

    /// An object is needed, and the entry is a tensor.
    #[must_use]
    pub fn not_an_object(fqn: impl Into<String>) -> Self {
        StateProblem::NotA(WantedKind::Object).of(fqn)
    }
}
