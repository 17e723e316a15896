//! Why an offline job could not be done.

use std::sync::Arc;

use dcp_core::{CheckpointError, FormatError, Message, PlanError, Quoted, StorageError};

use crate::foreign_callable::ForeignCallable;

/// An offline job failed, or was refused before anything was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The checkpoint, or the place it lies in.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// There is nothing of that name.
    #[error("there is no {fqn} in this checkpoint", fqn = Quoted(.fqn))]
    UnknownFqn {
        /// The name asked for.
        fqn: String,
        /// Names there are that look like it, best first.
        similar: Vec<Arc<str>>,
    },
    /// A slice that makes no sense for the tensor, or at all.
    #[error("bad slice {slice}: {problem}", slice = Quoted(.slice), problem = Message(.problem))]
    BadSlice {
        /// The slice as given.
        slice: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The target exists, and replacing it was not asked for.
    #[error("{target} exists already", target = Quoted(.target))]
    TargetExists {
        /// The target.
        target: String,
    },
    /// Source and target are the same place.
    #[error("source and target are the same: {target}", target = Quoted(.target))]
    SameTarget {
        /// The place.
        target: String,
    },
    /// Checkpoints that cannot be taken together.
    #[error("the checkpoints do not go together: {}", first_of(.problems))]
    Disagreement {
        /// Every key that stands in the way, in words.
        problems: Vec<String>,
        /// Whether keys, kinds or shapes differ, and not only values.
        structure: bool,
    },
    /// A part of a training state was asked for, and nothing tells which keys belong to it.
    #[error("cannot tell the parts of the state apart: {problem}")]
    UnknownPart {
        /// What is not known, with names.
        problem: String,
    },
    /// Objects that would be written name what Python would run when it loads them, and what is
    /// neither known to be harmless nor admitted by
    /// [`JobOptions::callables`](crate::JobOptions::callables).
    #[error("Python would run what is not known to be harmless when it loads the copy: {}", first_of(&in_words(.found)))]
    Callables {
        /// All of it.
        found: Vec<ForeignCallable>,
    },
    /// Something that the target's format has no way to hold, or that makes no sense.
    #[error("{what} {problem}", what = Message(.what), problem = Message(.problem))]
    Unsupported {
        /// What it is about, such as a tensor by name.
        what: String,
        /// Why it cannot be done, and what can.
        problem: String,
    },
}

impl ConvertError {
    pub(crate) fn unsupported(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), problem: problem.into() }
    }

    /// What went wrong in planning to write: what the format cannot hold is no fault of the
    /// checkpoint that is read.
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
