//! Errors of offline jobs.

use std::sync::Arc;

use dcp_core::error::StateProblem;
use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, FormatError, PlanError, StorageError};

use crate::error::{ForeignCallable, UnmatchedPattern};

/// A source cannot be read in the way that a view or a job needs. The caller of the job acts: it reads
/// less at once, or takes another view.
///
/// It reaches callers as [`PlanError::Plugin`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadRefusal {
    /// A tensor cannot be assembled from the pieces that a view gives it.
    #[error("cannot assemble {key} from its pieces: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Assembly {
        /// The assembled tensor.
        key: String,
        /// The piece that does not fit, and the reason.
        problem: String,
    },
    /// Objects that share memory in a file need too much of it when each is read by itself.
    #[error(
        "cannot read {key}: the objects before it need more than {limit} bytes when each is read \
         by itself, because they share memory in the file; read fewer of them, or the whole file",
        key = Quoted(.key)
    )]
    ObjectMemory {
        /// The first object that is not read.
        key: String,
        /// The limit in bytes.
        limit: u64,
    },
}

impl From<ReadRefusal> for CheckpointError {
    fn from(error: ReadRefusal) -> Self {
        PlanError::plugin(error).into()
    }
}

/// An offline job failed, or refused its input before it wrote anything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
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
        /// The problem with it.
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
    /// A selection takes no key.
    #[error("the selection leaves nothing of {of}{}", without_match(.unmatched))]
    NothingSelected {
        /// The checkpoint, or both.
        of: String,
        /// The patterns that match no key.
        unmatched: Vec<UnmatchedPattern>,
    },
    /// The objects to write name Python functions or classes that are not known to be harmless and
    /// that [`JobOptions::callables`](crate::JobOptions::callables) does not allow. Python would
    /// run them when it loads the target.
    #[error("loading the copy in Python would run code that is not known to be harmless: {}", first_of(&in_words(.found)))]
    Callables {
        /// The functions and classes, with their places.
        found: Vec<ForeignCallable>,
    },
    /// The target's format cannot store a tensor or an object.
    #[error("{fqn} {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    NotStorable {
        /// The tensor or object.
        fqn: String,
        /// The reason that it cannot be stored, and the alternative; a predicate.
        problem: String,
    },
    /// The target's format can store no part of the checkpoint, or not in this form.
    #[error("{what} {problem}", what = Message(.what), problem = Message(.problem))]
    NoForm {
        /// The checkpoint, its objects or its metadata.
        what: String,
        /// The reason that it cannot be stored, and the alternative; a predicate.
        problem: String,
    },
    /// Elements have no conversion to the requested dtype.
    #[error("tensor {fqn} {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    NotCastable {
        /// The tensor.
        fqn: String,
        /// The dtypes, and why not; a predicate.
        problem: String,
    },
    /// A request for something that only tensors have.
    #[error("{fqn} is not a tensor, so it has no {part}; leave that option out", fqn = Quoted(.fqn))]
    NotATensor {
        /// The object.
        fqn: String,
        /// The requested part of it, such as "slices".
        part: &'static str,
    },
    /// There is more than a form of output, or the memory of a job, is for.
    #[error("{what} has more than {limit}; {instead}", what = Message(.what))]
    TooLarge {
        /// The tensor or checkpoint.
        what: String,
        /// The possible maximum, with the unit.
        limit: String,
        /// Another way to the same data.
        instead: &'static str,
    },
    /// An option is invalid by itself, or does not fit the checkpoint or the other options.
    #[error("{option} {problem}", option = Message(.option), problem = Message(.problem))]
    InvalidOption {
        /// The option, or its value.
        option: String,
        /// The reason that it is invalid, and what is valid; a predicate.
        problem: String,
    },
    /// The names of a selection or mapping match no entry.
    #[error("the keys match nothing in this checkpoint: {}", first_of(.fqns))]
    UnknownFqns {
        /// The names, in quotes.
        fqns: Vec<String>,
    },
    /// A task of a job panicked, or its runtime is shutting down.
    #[error("a task that {task} did not finish: {problem}", problem = Message(.problem))]
    Task {
        /// The work of the task, such as "compares elements".
        task: &'static str,
        /// The panic, or the reason of the runtime.
        problem: String,
    },
}

impl JobError {
    /// `fqn` cannot be stored: the predicate `problem`.
    pub(crate) fn not_storable(fqn: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::NotStorable { fqn: fqn.into(), problem: problem.into() }
    }

    /// `what`, which is more than one entry, cannot be stored: the predicate `problem`.
    pub(crate) fn no_form(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::NoForm { what: what.into(), problem: problem.into() }
    }

    /// `option` is invalid: the predicate `problem`.
    pub(crate) fn invalid_option(option: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::InvalidOption { option: option.into(), problem: problem.into() }
    }

    pub(crate) fn task(task: &'static str, error: &tokio::task::JoinError) -> Self {
        Self::Task { task, problem: error.to_string() }
    }

    /// Converts an error of planning a write. A value that the target's format cannot store is
    /// [`JobError::NotStorable`], not a bad checkpoint.
    pub(crate) fn unwritable(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Plan(PlanError::State {
                fqn,
                problem: StateProblem::NotStorable { problem },
            }) => Self::not_storable(fqn, format!("cannot be written: {problem}")),
            other => Self::Checkpoint(other),
        }
    }
}

impl From<StorageError> for JobError {
    fn from(error: StorageError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<PlanError> for JobError {
    fn from(error: PlanError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<FormatError> for JobError {
    fn from(error: FormatError) -> Self {
        Self::Checkpoint(error.into())
    }
}

fn in_words(found: &[ForeignCallable]) -> Vec<String> {
    found.iter().map(ToString::to_string).collect()
}

fn without_match(unmatched: &[UnmatchedPattern]) -> String {
    let patterns = unmatched.iter().map(|one| Quoted(&one.pattern).to_string());
    let patterns: Vec<_> = patterns.collect();
    match &*patterns {
        [] => String::new(),
        patterns => format!(": no name matches {}", patterns.join(" or ")),
    }
}

fn first_of(problems: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut text = problems.iter().take(SHOWN).map(|p| Message(p).to_string()).collect::<Vec<_>>();
    if problems.len() > SHOWN {
        text.push(format!("and {} more", problems.len() - SHOWN));
    }
    text.join("; ")
}
