//! Errors of OLMo-core's optimizer layouts and key mappings.

use std::error::Error;
use std::fmt;

use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, PlanError};

/// An optimizer or a key mapping does not fit the checkpoint. The training program acts: it changes its
/// optimizer, its groups or the mapping.
///
/// It reaches callers as [`PlanError::Plugin`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OlmoError {
    /// The state of an optimizer is not laid out as one.
    Optimizer {
        /// The key or the part of the optimizer.
        key: String,
        /// The problem of that key or part.
        problem: String,
    },
    /// Parameters of one group have different settings in the checkpoint.
    MixedGroup {
        /// The group of the optimizer that is loaded.
        group: String,
        /// One parameter.
        first: String,
        /// The other.
        second: String,
        /// The setting.
        field: String,
    },
    /// A key mapping names parameters that are not in the checkpoint.
    MappedToNothing {
        /// The names in the checkpoint.
        keys: Vec<String>,
    },
    /// A key mapping gives parameters names that others in the checkpoint have.
    MappedToTaken {
        /// The names.
        keys: Vec<String>,
    },
}

impl fmt::Display for OlmoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = |keys: &[String]| {
            keys.iter().map(|key| Quoted(key).to_string()).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Optimizer { key, problem } => {
                let (key, problem) = (Quoted(key), Message(problem));
                write!(f, "the optimizer state is invalid at {key}: {problem}")
            }
            Self::MixedGroup { group, first, second, field } => write!(
                f,
                "{} and {} of {} have different {} in the checkpoint; load them in groups of their \
                 own",
                Quoted(first),
                Quoted(second),
                Quoted(group),
                Quoted(field)
            ),
            Self::MappedToNothing { keys } => write!(
                f,
                "the key mapping names parameters that are not in the checkpoint: {}",
                listed(keys)
            ),
            Self::MappedToTaken { keys } => write!(
                f,
                "the key mapping gives parameters names that others in the checkpoint have: {}",
                listed(keys)
            ),
        }
    }
}

impl Error for OlmoError {}

impl From<OlmoError> for PlanError {
    fn from(error: OlmoError) -> Self {
        Self::plugin(error)
    }
}

impl From<OlmoError> for CheckpointError {
    fn from(error: OlmoError) -> Self {
        PlanError::from(error).into()
    }
}
