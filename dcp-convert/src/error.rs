//! Errors of offline jobs.

use std::sync::Arc;

use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, FormatError, PlanError, StorageError};

use crate::foreign_callable::ForeignCallable;

/// An offline job failed, or refused its input before it wrote anything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The checkpoint or its storage failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No entry has this name.
    #[error("there is no {fqn} in this checkpoint", fqn = Quoted(.fqn))]
    UnknownFqn {
        /// The requested name.
        fqn: String,
        /// Similar names in the checkpoint, most similar first.
        similar: Vec<Arc<str>>,
    },
    /// A slice that cannot be parsed or does not fit the tensor.
    #[error("bad slice {slice}: {problem}", slice = Quoted(.slice), problem = Message(.problem))]
    BadSlice {
        /// The slice as given.
        slice: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The target exists, and the job may not replace it.
    #[error("{target} exists already", target = Quoted(.target))]
    TargetExists {
        /// The target.
        target: String,
    },
    /// The source and the target are the same file or folder.
    #[error("source and target are the same: {target}", target = Quoted(.target))]
    SameTarget {
        /// The target.
        target: String,
    },
    /// Checkpoints that cannot be combined.
    #[error("the checkpoints are incompatible: {}", first_of(.problems))]
    Disagreement {
        /// One message for each key that prevents it.
        problems: Vec<String>,
        /// Whether keys, kinds or shapes differ; `false` when only values do.
        structure: bool,
    },
    /// A part of a training state was requested, and no key can be assigned to it.
    #[error("the parts of the state are ambiguous: {problem}")]
    UnknownPart {
        /// Which part, and the keys that are ambiguous.
        problem: String,
    },
    /// The objects to write name Python functions or classes that are not known to be harmless and
    /// that [`JobOptions::callables`](crate::JobOptions::callables) does not allow. Python would
    /// run them when it loads the target.
    #[error("loading the copy in Python would run code that is not known to be harmless: {}", first_of(&in_words(.found)))]
    Callables {
        /// The functions and classes, with their places.
        found: Vec<ForeignCallable>,
    },
    /// The target's format cannot store this, or the options contradict each other.
    #[error("{what} {problem}", what = Message(.what), problem = Message(.problem))]
    Unsupported {
        /// The tensor, object or option.
        what: String,
        /// Why it cannot be stored, and the alternative.
        problem: String,
    },
}

impl ConvertError {
    pub(crate) fn unsupported(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), problem: problem.into() }
    }

    /// Converts an error of planning a write. A value that the target's format cannot store is
    /// [`ConvertError::Unsupported`], not a bad checkpoint.
    pub(crate) fn unwritable(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Plan(PlanError::Unsupported { fqn, problem }) => {
                Self::unsupported(format!("{fqn:?}"), format!("cannot be written: {problem}"))
            }
            other => Self::Checkpoint(other),
        }
    }
}

impl From<StorageError> for ConvertError {
    fn from(error: StorageError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<PlanError> for ConvertError {
    fn from(error: PlanError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<FormatError> for ConvertError {
    fn from(error: FormatError) -> Self {
        Self::Checkpoint(error.into())
    }
}

fn in_words(found: &[ForeignCallable]) -> Vec<String> {
    found.iter().map(ToString::to_string).collect()
}

fn first_of(problems: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut text = problems.iter().take(SHOWN).map(|p| Message(p).to_string()).collect::<Vec<_>>();
    if problems.len() > SHOWN {
        text.push(format!("and {} more", problems.len() - SHOWN));
    }
    text.join("; ")
}
