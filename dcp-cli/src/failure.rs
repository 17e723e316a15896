//! Errors of the command, and their exit codes.

use std::error::Error;
use std::io;

use dcp::checkpoint::{self, ErrorKind};
use dcp::convert::ConvertError;
use dcp::core::{CheckpointError, StorageError};
use dcp::mapping::MappingError;
use dcp::megatron::MegatronError;

/// Why the command stopped. Documented in `dcp --help`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The checkpoint is bad.
    Bad = 1,
    /// The command was used wrongly.
    Usage = 2,
    /// Input or output failed.
    Io = 3,
    /// Ctrl-C; as a shell says of a command that SIGINT ended.
    Interrupted = 130,
    /// The terminal was closed.
    HungUp = 129,
    /// The same of SIGTERM.
    Terminated = 143,
}

impl Exit {
    /// What `kind` an error is of, as `--json` says it.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Bad => "bad_checkpoint",
            Self::Usage => "usage",
            Self::Io => "io",
            Self::Interrupted | Self::HungUp | Self::Terminated => "interrupted",
        }
    }
}

/// An error on its way to the user.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) message: String,
    pub(crate) causes: Vec<String>,
    pub(crate) hint: Option<String>,
    pub(crate) silent: bool,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), causes: Vec::new(), hint: None, silent: false }
    }

    /// A failure whose report was printed already.
    pub(crate) fn reported(exit: Exit) -> Self {
        Self { silent: true, ..Self::new(exit, "") }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds causes.
    pub(crate) fn because(mut self, reasons: Vec<String>) -> Self {
        self.causes.extend(reasons);
        self
    }

    fn of(exit: Exit, error: &(dyn Error + 'static)) -> Self {
        let mut failure = Self::new(exit, error.to_string());
        let mut cause = error.source();
        while let Some(error) = cause {
            failure.causes.push(error.to_string());
            cause = error.source();
        }
        failure
    }

    /// Replaces the exit code `exit` by `other`.
    pub(crate) fn instead_of(mut self, exit: Exit, other: Exit) -> Self {
        if self.exit == exit {
            self.exit = other;
        }
        self
    }

    /// An error of the arguments.
    pub(crate) fn of_arguments(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let (message, rest) = text.split_once("\n\n").unwrap_or((text, ""));
        let joined = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let failure = Self::new(Exit::Usage, joined(message));
        match joined(rest) {
            hint if hint.is_empty() => failure,
            hint => failure.hint(hint),
        }
    }
}

/// The exit code of a kind of error.
fn exit(kind: ErrorKind) -> Exit {
    match kind {
        ErrorKind::NotFound | ErrorKind::Io => Exit::Io,
        ErrorKind::NotACheckpoint
        | ErrorKind::Damaged
        | ErrorKind::Unfinished
        | ErrorKind::Unmapped
        | ErrorKind::Callables => Exit::Bad,
        _ => Exit::Usage,
    }
}

impl From<checkpoint::Error> for Failure {
    fn from(error: checkpoint::Error) -> Self {
        let failure = Self::of(exit(error.kind()), &error);
        match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// Errors of the libraries below, as the one above them sees them.
macro_rules! from_below {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                checkpoint::Error::from(error).into()
            }
        })*
    };
}

from_below!(CheckpointError, StorageError, ConvertError, MegatronError, MappingError);

impl From<io::Error> for Failure {
    /// Output without a reader, as in `dcp … | head`, is no failure.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { silent: true, ..Self::new(Exit::Io, "") };
        }
        Self::new(Exit::Io, "cannot write the output").because(vec![error.to_string()])
    }
}

impl Failure {
    /// Whether the reader of the output went away.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.silent && self.exit == Exit::Io
    }
}
