//! The error of opening, checking or writing a checkpoint: a kind to match, a message, a hint.

mod foreign_callable;
mod job_error;
mod unmatched_pattern;

use std::error::Error as StdError;
use std::fmt;

use dcp_core::error::FailureKind;
use dcp_core::error::StorageOp;
use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, StorageError, StorageErrorKind};

pub use foreign_callable::ForeignCallable;
pub use job_error::{JobError, ReadRefusal};
pub use unmatched_pattern::UnmatchedPattern;

/// The kind of an error, for a program to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is nothing at the place.
    NotFound,
    /// The place has no checkpoint, or only one file of it.
    NotACheckpoint,
    /// The checkpoint is damaged or incomplete.
    Damaged,
    /// The save of the checkpoint did not finish.
    Unfinished,
    /// The mapping has no rule for what the checkpoint holds, or rules for what it does not hold.
    Unmapped,
    /// Objects name functions of Python that are not known to be harmless.
    Callables,
    /// The checkpoint has no key of that name.
    UnknownKey,
    /// The target exists, and replacing it was not requested.
    TargetExists,
    /// Source and target are the same place.
    SameTarget,
    /// The target is in the source, or files of the source lie in the target.
    Overlap,
    /// A checkpoint of another format, of a run, or of an unfinished save is at the target.
    OtherCheckpoint,
    /// Another process writes at the place.
    InUse,
    /// The place is a directory, a file or a device, and something else is needed.
    InvalidPlace,
    /// An option has no meaning, or does not apply to this checkpoint or format.
    InvalidOption,
    /// The checkpoint leaves a choice open, such as a rank or a family of models.
    Undecided,
    /// The checkpoints have other keys, shapes or values, and cannot be taken together.
    Disagreement,
    /// The format, layout or storage has no way to do it.
    Unsupported,
    /// Input or output failed.
    Io,
}

/// A job on a checkpoint failed, or was refused before anything was written.
///
/// [`source`](StdError::source) is the cause, if there is one; the message does not repeat it.
/// Messages and [`hint`](Self::hint)s name setters and jobs in backticks: `Destination::overwrite` is
/// [`Opener::rank`](crate::Opener::rank), and so on.
///
/// ```
/// use dcp_jobs::{ErrorKind, Opener};
/// use dcp_core::registry::StorageRegistry;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let error = Opener::new(StorageRegistry::empty()).open("tape://7").await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unsupported);
/// # }
/// ```
#[derive(Debug)]
pub struct Error(Box<Inner>);

type Source = Box<dyn StdError + Send + Sync>;

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    None,
    /// The error whose message this one has.
    Same(Source),
    /// The error that it follows from.
    Below(Source),
}

impl Error {
    /// An error of a kind, with what failed and on what.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let inner = Inner { kind, message: message.into(), hint: None, cause: Cause::None };
        Self(Box::new(inner))
    }

    /// An error of a kind with the message of `error`, which it keeps.
    #[must_use]
    pub fn of(kind: ErrorKind, error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let error = error.into();
        let message = error.to_string();
        Self(Box::new(Inner { kind, message, hint: None, cause: Cause::Same(error) }))
    }

    /// Whether the same job may succeed when it is repeated and nothing else is changed: a storage
    /// failed for the moment, or a rank of the group was lost.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        let cause: Option<&(dyn StdError + 'static)> = match &self.0.cause {
            Cause::None => None,
            Cause::Same(error) | Cause::Below(error) => Some(&**error),
        };
        // The source of an error with context is that of its own cause.
        cause.is_some_and(|cause| match cause.downcast_ref::<Self>() {
            Some(error) => error.is_retryable(),
            None => FailureKind::of(cause).is_retryable(),
        })
    }

    /// The message, without causes and advice.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The kind of the error, for a program.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The error of a storage, format or job that this one is or follows from.
    #[must_use]
    pub fn get_ref(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        match &self.0.cause {
            Cause::None => None,
            Cause::Same(error) | Cause::Below(error) => Some(&**error),
        }
    }

    /// Adds this advice.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Removes the advice.
    #[must_use]
    pub fn without_hint(mut self) -> Self {
        self.0.hint = None;
        self
    }

    /// Adds advice for damage because of which no command reads on, and else removes it.
    pub(crate) fn with_hint_of_damage(self) -> Self {
        match self.kind() {
            ErrorKind::Damaged => self.with_hint(
                "the file was cut short or changed after the save: copy it again from where it is \
                 whole, or take another checkpoint of the run, as `Opener::list` lists them",
            ),
            _ => self.without_hint(),
        }
    }

    /// Sets the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Sets the message.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// Sets `error` as the cause.
    #[must_use]
    pub fn because(mut self, error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.cause = Cause::Below(error.into());
        self
    }

    /// An error that says what was being done, because of this one.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        let hint = self.0.hint.take();
        let kind = self.0.kind;
        let inner = Inner { kind, message: message.into(), hint, cause: Cause::Below(self.into()) };
        Self(Box::new(inner))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Message(&self.0.message).fmt(f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.cause {
            Cause::None => None,
            Cause::Same(error) => error.source(),
            Cause::Below(error) => Some(&**error),
        }
    }
}

/// Several reasons, the first of which is the message and the others its sources.
#[derive(Debug)]
pub struct Reasons {
    message: String,
    next: Option<Box<Self>>,
}

impl Reasons {
    /// The chain of `reasons`; `None` of none.
    #[must_use]
    pub fn new(reasons: Vec<String>) -> Option<Self> {
        let chain = |next: Option<Self>, message| Some(Self { message, next: next.map(Box::new) });
        reasons.into_iter().rev().fold(None, chain)
    }
}

impl fmt::Display for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Message(&self.message).fmt(f)
    }
}

impl StdError for Reasons {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.next.as_deref().map(|next| next as &(dyn StdError + 'static))
    }
}

/// Bytes that are missing are the checkpoint's fault; a place with nothing there is found before
/// it is opened.
fn kind_of_storage(error: &StorageError) -> ErrorKind {
    let reads = matches!(error.op(), StorageOp::Read | StorageOp::Stat);
    match error.kind() {
        StorageErrorKind::Truncated => ErrorKind::Damaged,
        StorageErrorKind::NotFound if reads => ErrorKind::Damaged,
        // A name that cannot be is the checkpoint's, too.
        StorageErrorKind::Invalid if reads => ErrorKind::Damaged,
        // An option follows links.
        StorageErrorKind::Invalid | StorageErrorKind::Link => ErrorKind::InvalidOption,
        StorageErrorKind::AlreadyExists => ErrorKind::TargetExists,
        StorageErrorKind::Conflict if error.op() == StorageOp::Claim => ErrorKind::InUse,
        StorageErrorKind::Unsupported => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

/// Of another rank's failure the kind alone is known, so every failure of its storage is one of
/// input or output.
fn kind_of_ranks(kind: FailureKind) -> ErrorKind {
    match kind {
        FailureKind::NotACheckpoint => ErrorKind::NotACheckpoint,
        FailureKind::Damaged | FailureKind::InvalidPlan | FailureKind::Mismatch => {
            ErrorKind::Damaged
        }
        _ => ErrorKind::Io,
    }
}

impl From<StorageError> for Error {
    fn from(error: StorageError) -> Self {
        Self::of(kind_of_storage(&error), error)
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        let error = match error {
            // What a plug-in made of its own error for jobs.
            CheckpointError::Plugin(plugin) => match plugin.downcast::<Self>() {
                Ok(error) => return *error,
                Err(plugin) => match plugin.downcast::<JobError>() {
                    Ok(convert) => return (*convert).into(),
                    Err(plugin) => CheckpointError::Plugin(plugin),
                },
            },
            error => error,
        };
        let kind = match &error {
            CheckpointError::Storage(storage) => kind_of_storage(storage),
            CheckpointError::NotACheckpoint { .. } => ErrorKind::NotACheckpoint,
            CheckpointError::Format(_)
            | CheckpointError::Plan(_)
            | CheckpointError::Mismatch { .. }
            | CheckpointError::Plugin(_) => ErrorKind::Damaged,
            CheckpointError::Ranks { .. } => kind_of_ranks(error.kind()),
            _ => ErrorKind::Io,
        };
        let is_listed = matches!(error, CheckpointError::Format(_) | CheckpointError::Plan(_));
        let failure = Self::of(kind, error);
        if !is_listed {
            return failure;
        }
        failure.with_hint("`Verification::deep` lists everything that is wrong with the checkpoint")
    }
}

impl From<JobError> for Error {
    fn from(error: JobError) -> Self {
        let (kind, hint) = match error {
            JobError::Checkpoint(error) => return error.into(),
            JobError::UnknownFqn { ref similar, .. } => {
                let names: Vec<_> = similar.iter().map(|name| Quoted(name).to_string()).collect();
                let hint = match &*names {
                    [] => "`Checkpoint::inspect` lists the names there are".to_owned(),
                    names => format!("did you mean {}?", names.join(" or ")),
                };
                (ErrorKind::UnknownKey, Some(hint))
            }
            JobError::BadSlice { .. } => {
                let hint = "per axis START:STOP:STEP or an index, as in NumPy: 0:2,: or -1";
                (ErrorKind::InvalidOption, Some(hint.to_owned()))
            }
            JobError::UnknownPart { .. } => {
                let hint = "choose keys with `Keys::include` or `Keys::exclude` \
                            (`Checkpoint::inspect` lists them), or take all with \
                            `StatePart::Everything`";
                (ErrorKind::Undecided, Some(hint.to_owned()))
            }
            JobError::NothingSelected { ref unmatched, .. } => {
                let hint = match unmatched.iter().find_map(|one| one.nearest.as_ref()) {
                    Some(nearest) => format!("did you mean {}?", Quoted(nearest)),
                    None => "`Checkpoint::inspect` lists the names there are".to_owned(),
                };
                (ErrorKind::InvalidOption, Some(hint))
            }
            JobError::TargetExists { .. } => (
                ErrorKind::TargetExists,
                Some("pass `Destination::overwrite` to replace it".to_owned()),
            ),
            JobError::Callables { ref found } => (ErrorKind::Callables, Some(admitting(found))),
            JobError::SameTarget { .. } => {
                let hint = "write to another place, then remove the old one";
                (ErrorKind::SameTarget, Some(hint.to_owned()))
            }
            JobError::Disagreement { .. } => (ErrorKind::Disagreement, None),
            JobError::InvalidOption { .. } => (ErrorKind::InvalidOption, None),
            JobError::UnknownFqns { .. } => (ErrorKind::UnknownKey, None),
            JobError::Task { .. } => (ErrorKind::Io, None),
            _ => (ErrorKind::Unsupported, None),
        };
        let failure = Self::of(kind, error);
        match hint {
            Some(hint) => failure.with_hint(hint),
            None => failure,
        }
    }
}

/// Advises how to write objects all the same: the callables have to be named.
fn admitting(found: &[ForeignCallable]) -> String {
    let mut names: Vec<&str> = found.iter().map(|one| &*one.name).collect();
    names.sort_unstable();
    names.dedup();
    let options: Vec<_> =
        names.iter().map(|name| format!("`JobOptions::callables` {name}")).collect();
    let dangerous = found.iter().any(|one| one.dangerous);
    let trust = if dangerous {
        "do not load the checkpoint in Python; `Keys::exclude` leaves objects out, and"
    } else {
        "if these are classes of your own programs,"
    };
    format!("{trust} {} writes them as they are", options.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_the_moment_is_retryable_however_it_is_wrapped() {
        let error = |kind| StorageError::new(kind, StorageOp::Read, None);
        let transient = || error(StorageErrorKind::Transient);
        let plain = Error::from(transient());
        let wrapped = Error::from(JobError::from(CheckpointError::from(transient())));
        let named = Error::new(ErrorKind::Io, "cannot open").because(transient());
        let context = Error::from(transient()).context("cannot read \"run\"");
        for found in [plain, wrapped, named, context] {
            assert!(found.is_retryable(), "{found:?}");
        }
        assert!(!Error::from(error(StorageErrorKind::Full)).is_retryable());
        assert!(!Error::new(ErrorKind::InvalidOption, "no").is_retryable());
    }
}
