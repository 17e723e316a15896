//! Errors as exceptions of Python.
//!
//! The classes are written in Python (`distcp/_errors.py`), because some have two parents (`KeyError` and
//! `CheckpointError`), which an extension of the stable ABI cannot declare. Rust says the kind; Python has the table
//! from kinds to classes.

use dcp::CheckpointError;
use dcp::core::Rank;
use dcp::jobs::ErrorKind;
use dcp::trace::TraceError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::terms;

/// The reasons for which a call returns no value.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A save or a load.
    Checkpoint(CheckpointError),
    /// A job.
    Job(dcp::jobs::Error),
    /// An argument that makes no sense.
    Argument(String),
    /// A file that is no trace.
    Damaged(String),
    /// A signal handler of Python raised, such as at Ctrl-C.
    Interrupted(PyErr),
    /// Code of Python that was called, such as a process group.
    Python(PyErr),
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(error)
    }
}

impl From<dcp::jobs::Error> for Failure {
    fn from(error: dcp::jobs::Error) -> Self {
        Self::Job(error)
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        match error {
            TraceError::Storage(error) => Self::Checkpoint(error.into()),
            other => Self::Damaged(other.to_string()),
        }
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) | Failure::Interrupted(error) => error,
            Failure::Argument(problem) => Parts::new("invalid-option", problem).raise(),
            Failure::Damaged(problem) => Parts::new("damaged", problem).raise(),
            Failure::Job(error) => of_job(&error).raise(),
            Failure::Checkpoint(error) => of_checkpoint(&error).raise(),
        }
    }
}

/// The parts of an exception.
struct Parts {
    kind: &'static str,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
    rank: Option<Rank>,
    retryable: bool,
}

impl Parts {
    fn new(kind: &'static str, message: String) -> Self {
        Self { kind, message, causes: Vec::new(), hint: None, rank: None, retryable: false }
    }

    fn raise(self) -> PyErr {
        Python::attach(|py| self.exception(py).unwrap_or_else(|error| error))
    }

    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let values = PyDict::new(py);
        let causes = self.causes.iter().map(|cause| terms::of_python(cause)).collect::<Vec<_>>();
        values.set_item("kind", self.kind)?;
        values.set_item("message", terms::of_python(&self.message))?;
        values.set_item("causes", causes)?;
        values.set_item("hint", self.hint.as_deref().map(terms::of_python))?;
        values.set_item("rank", self.rank)?;
        values.set_item("retryable", self.retryable)?;
        let exception = py.import("distcp._errors")?.getattr("of")?.call((), Some(&values))?;
        Ok(PyErr::from_value(exception))
    }
}

fn of_job(error: &dcp::jobs::Error) -> Parts {
    Parts {
        kind: job_kind(error.kind()),
        message: error.message().to_owned(),
        causes: causes(error),
        hint: error.hint().map(str::to_owned),
        rank: None,
        retryable: error.is_retryable(),
    }
}

fn of_checkpoint(error: &CheckpointError) -> Parts {
    let kind = error.kind();
    let (name, rank) = match error {
        CheckpointError::Ranks { failures, .. } => {
            (kind.name(), failures.first().map(|one| one.rank))
        }
        CheckpointError::Lost { source, .. } | CheckpointError::Collective(source) => {
            (kind.name(), source.rank())
        }
        _ => (kind.name(), None),
    };
    let (message, causes, retryable) = (error.to_string(), causes(error), kind.is_retryable());
    Parts { kind: name, message, causes, hint: None, rank, retryable }
}

/// The messages below an error, without those that repeat the one above.
fn causes(error: &(dyn std::error::Error + 'static)) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut above = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let message = error.to_string();
        if message != above {
            all.push(message.clone());
        }
        above = message;
        next = error.source();
    }
    all
}

/// The kind of a job's error, by the names of `FailureKind` where it has one.
fn job_kind(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "storage-not-found",
        ErrorKind::NotACheckpoint => "not-a-checkpoint",
        ErrorKind::Damaged => "damaged",
        ErrorKind::Unfinished => "unfinished",
        ErrorKind::Unmapped => "unmapped",
        ErrorKind::Callables => "callables",
        ErrorKind::UnknownKey => "unknown-key",
        ErrorKind::TargetExists => "storage-already-exists",
        ErrorKind::SameTarget => "same-target",
        ErrorKind::Overlap => "overlap",
        ErrorKind::OtherCheckpoint => "other-checkpoint",
        ErrorKind::InUse => "storage-conflict",
        ErrorKind::InvalidPlace => "invalid-place",
        ErrorKind::InvalidOption => "invalid-option",
        ErrorKind::Undecided => "undecided",
        ErrorKind::Disagreement => "disagreement",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Io => "io",
        _ => "other",
    }
}
