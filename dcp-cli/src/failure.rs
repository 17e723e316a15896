//! Errors of the command, and their exit codes.

use std::error::Error;
use std::io;

use dcp::core::{CheckpointError, StorageError};
use dcp::jobs;
use dcp::jobs::ErrorKind;
use dcp::jobs::JobError;
use dcp::mapping::MappingError;
use dcp::megatron::MegatronError;
use serde_json::{Value, json};

use crate::terms::of_command;

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
    /// The exit code that another rank has.
    fn of_code(code: Option<u64>) -> Self {
        match code {
            Some(1) => Self::Bad,
            Some(2) => Self::Usage,
            Some(129) => Self::HungUp,
            Some(130) => Self::Interrupted,
            Some(143) => Self::Terminated,
            _ => Self::Io,
        }
    }

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
    /// Whether the reader of the output went away, which is no failure.
    broken_pipe: bool,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: of_command(&message.into()).into_owned(),
            causes: Vec::new(),
            hint: None,
            silent: false,
            broken_pipe: false,
        }
    }

    /// A failure whose report was printed already.
    pub(crate) fn reported(exit: Exit) -> Self {
        Self { silent: true, ..Self::new(exit, "") }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(of_command(&hint.into()).into_owned());
        self
    }

    /// Adds causes.
    pub(crate) fn because(mut self, reasons: Vec<String>) -> Self {
        self.causes.extend(reasons.iter().map(|reason| of_command(reason).into_owned()));
        self
    }

    fn of(exit: Exit, error: &(dyn Error + 'static)) -> Self {
        let mut failure = Self::new(exit, error.to_string());
        let mut cause = error.source();
        while let Some(error) = cause {
            failure.causes.push(of_command(&error.to_string()).into_owned());
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
        | ErrorKind::InUse
        | ErrorKind::Callables => Exit::Bad,
        _ => Exit::Usage,
    }
}

impl From<jobs::Error> for Failure {
    fn from(error: jobs::Error) -> Self {
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
                jobs::Error::from(error).into()
            }
        })*
    };
}

from_below!(CheckpointError, StorageError, JobError, MegatronError, MappingError);

impl From<io::Error> for Failure {
    /// Output without a reader, as in `dcp … | head`, is no failure.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { silent: true, broken_pipe: true, ..Self::new(Exit::Io, "") };
        }
        Self::new(Exit::Io, "cannot write the output").because(vec![error.to_string()])
    }
}

impl Failure {
    /// Whether the reader of the output went away.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.broken_pipe
    }

    /// Whether a signal ended the command.
    pub(crate) fn is_interruption(&self) -> bool {
        matches!(self.exit, Exit::Interrupted | Exit::HungUp | Exit::Terminated)
    }

    /// The same, of which another rank prints the report.
    pub(crate) fn said_elsewhere(mut self) -> Self {
        self.silent = true;
        self
    }

    /// What the other ranks learn of this failure.
    pub(crate) fn to_message(&self) -> String {
        let Self { exit, message, causes, hint, silent, .. } = self;
        let exit = *exit as u8;
        json!({ "exit": exit, "message": message, "causes": causes, "hint": hint, "silent": silent })
            .to_string()
    }

    /// The failure of another rank, or of this one as all ranks say it.
    pub(crate) fn from_message(rank: u32, message: &str) -> Self {
        let Ok(known) = serde_json::from_str::<Value>(message) else {
            return Self::new(Exit::Io, format!("rank {rank}: {message}"));
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let exit = Exit::of_code(known["exit"].as_u64());
        Self {
            causes: known["causes"].as_array().into_iter().flatten().map(text).collect(),
            hint: known["hint"].as_str().map(ToOwned::to_owned),
            silent: known["silent"] == true,
            ..Self::new(exit, format!("rank {rank}: {}", text(&known["message"])))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_learn_the_whole_failure_of_another() {
        let codes =
            [Exit::Bad, Exit::Usage, Exit::Io, Exit::Interrupted, Exit::HungUp, Exit::Terminated];
        for exit in codes {
            let failure = Failure::new(exit, "the disk \"a\" is full")
                .because(vec!["quota".to_owned(), "node 7".to_owned()])
                .hint("free some");
            let learned = Failure::from_message(3, &failure.to_message());
            assert_eq!(learned.exit, exit);
            assert_eq!(learned.message, "rank 3: the disk \"a\" is full");
            assert_eq!((learned.causes, learned.hint), (failure.causes, failure.hint));
            assert!(!learned.silent);
        }
        assert!(Failure::from_message(0, &Failure::reported(Exit::Bad).to_message()).silent);
        assert_eq!(Failure::from_message(1, "it ended").message, "rank 1: it ended");
    }
}
