//! What went wrong, for people and for scripts: `error:`, `caused by:`, `hint:`, an exit code.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use dcp::checkpoint::{self, ErrorKind};
use dcp::convert::ConvertError;
use dcp::core::{CheckpointError, Message, StorageError};
use dcp::mapping::MappingError;
use dcp::megatron::MegatronError;
use serde_json::json;

use crate::output::JsonText;
use crate::output::style::Style;

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
    fn kind(self) -> &'static str {
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
    exit: Exit,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
    silent: bool,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), causes: Vec::new(), hint: None, silent: false }
    }

    /// Nothing more to say: what is wrong was printed already.
    pub(crate) fn reported(exit: Exit) -> Self {
        Self { silent: true, ..Self::new(exit, "") }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With reasons, each of which is told as a cause.
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

    /// The same with the exit code `other`, if it has `exit`.
    pub(crate) fn instead_of(mut self, exit: Exit, other: Exit) -> Self {
        if self.exit == exit {
            self.exit = other;
        }
        self
    }

    /// Prints the error to stderr.
    pub(crate) fn report(&self, style: Style) -> ExitCode {
        if !self.silent {
            let mut text = format!("{} {}\n", style.bad("error:"), Message(&self.message));
            for cause in &self.causes {
                text.push_str(&format!("  {} {}\n", style.dim("caused by:"), Message(cause)));
            }
            if let Some(hint) = &self.hint {
                text.push_str(&format!("{} {}\n", style.good("hint:"), Message(hint)));
            }
            // There is nowhere left to say that stderr is closed.
            let _ = io::stderr().write_all(text.as_bytes());
        }
        ExitCode::from(self.exit as u8)
    }

    /// Prints the error to stderr as one line of JSON.
    pub(crate) fn report_json(&self) -> ExitCode {
        if !self.silent {
            let shown = |text: &String| Message(text).to_string();
            let error = json!({
                "kind": self.exit.kind(),
                "message": shown(&self.message),
                "causes": self.causes.iter().map(shown).collect::<Vec<_>>(),
                "hint": self.hint.as_ref().map(shown),
                "exit_code": self.exit as u8,
            });
            let text = format!("{}\n", json!({ "error": error }));
            let _ = JsonText(io::stderr()).write_all(text.as_bytes());
        }
        ExitCode::from(self.exit as u8)
    }

    /// Arguments that cannot be understood.
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
    /// Output that nobody reads any more, as in `dcp … | head`, is no failure.
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
