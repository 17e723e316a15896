//! What went wrong, for people and for scripts: `error:`, `caused by:`, `hint:`, an exit code.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use dcp::convert::{ConvertError, ForeignCallable};
use dcp::core::{CheckpointError, Message, Quoted, StorageError, StorageErrorKind, StorageOp};
use dcp::mapping::{Mapping, MappingError};
use dcp::megatron::MegatronError;
use serde_json::json;

use crate::output::JsonText;
use crate::style::Style;

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

    /// Says what was being done; what was known so far becomes the cause.
    pub(crate) fn context(mut self, message: impl Into<String>) -> Self {
        let cause = std::mem::replace(&mut self.message, message.into());
        self.causes.insert(0, cause);
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

    /// The same without advice.
    pub(crate) fn without_hint(mut self) -> Self {
        self.hint = None;
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

/// Whose fault a storage's failure is: bytes that are missing are the checkpoint's.
fn storage_exit(error: &StorageError) -> Exit {
    match error.kind() {
        StorageErrorKind::Truncated => Exit::Bad,
        // Of a checkpoint that was opened; a path with nothing there is said before.
        StorageErrorKind::NotFound if matches!(error.op(), StorageOp::Read | StorageOp::Stat) => {
            Exit::Bad
        }
        // A name that cannot be is the checkpoint's, too; a link is one to be allowed.
        StorageErrorKind::Invalid
            if matches!(error.op(), StorageOp::Read | StorageOp::Stat)
                && !error.to_string().contains("--follow-links") =>
        {
            Exit::Bad
        }
        StorageErrorKind::Invalid
        | StorageErrorKind::AlreadyExists
        | StorageErrorKind::Unsupported => Exit::Usage,
        _ => Exit::Io,
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let exit = match &error {
            CheckpointError::Storage(storage) => storage_exit(storage),
            CheckpointError::Format(_)
            | CheckpointError::Plan(_)
            | CheckpointError::Mismatch { .. }
            | CheckpointError::NotACheckpoint { .. } => Exit::Bad,
            _ => Exit::Io,
        };
        let hint = match &error {
            CheckpointError::Format(_) | CheckpointError::Plan(_) => {
                Some("`dcp verify --deep` lists everything that is wrong with the checkpoint")
            }
            _ => None,
        };
        let failure = Self::of(exit, &error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        Self::of(storage_exit(&error), &error)
    }
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        let hint = match &error {
            ConvertError::Checkpoint(_) => None,
            ConvertError::UnknownFqn { similar, .. } if similar.is_empty() => {
                Some("`dcp inspect` lists the names there are".to_owned())
            }
            ConvertError::UnknownFqn { similar, .. } => {
                let names: Vec<_> = similar.iter().map(|name| Quoted(name).to_string()).collect();
                Some(format!("did you mean {}?", names.join(" or ")))
            }
            ConvertError::BadSlice { .. } => {
                Some("per axis START:STOP:STEP or an index, as in NumPy: 0:2,: or -1".to_owned())
            }
            ConvertError::UnknownPart { .. } => Some(
                "choose keys with --include or --exclude (`dcp inspect` lists them), or take all \
                 with --everything"
                    .to_owned(),
            ),
            ConvertError::TargetExists { .. } => Some("pass --overwrite to replace it".to_owned()),
            ConvertError::Callables { found } => Some(admitting(found)),
            ConvertError::SameTarget { .. } => {
                Some("write to another place, then remove the old one".to_owned())
            }
            _ => None,
        };
        let failure = match error {
            ConvertError::Checkpoint(error) => Self::from(error),
            callables @ ConvertError::Callables { .. } => Self::of(Exit::Bad, &callables),
            other => Self::of(Exit::Usage, &other),
        };
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// How to write objects all the same: what they name has to be named.
fn admitting(found: &[ForeignCallable]) -> String {
    let mut names: Vec<&str> = found.iter().map(|one| &*one.name).collect();
    names.sort_unstable();
    names.dedup();
    let options: Vec<_> = names.iter().map(|name| format!("--allow-callable {name}")).collect();
    let dangerous = found.iter().any(|one| one.dangerous);
    let trust = if dangerous {
        "do not load the checkpoint in Python; --exclude leaves objects out, and"
    } else {
        "if these are classes of your own programs,"
    };
    format!("{trust} {} writes them as they are", options.join(" "))
}

impl From<MegatronError> for Failure {
    fn from(error: MegatronError) -> Self {
        match error {
            MegatronError::Checkpoint(error) => error.into(),
            MegatronError::Convert(error) => error.into(),
            MegatronError::FlatOptimizer { .. } => Self::of(Exit::Usage, &error).hint(
                "--no-optimizer leaves it out; --optimizer per-parameter tells the parameters in \
                 the buffers apart by their values",
            ),
            MegatronError::Indivisible { what: "layers", .. } => Self::of(Exit::Usage, &error)
                .hint(
                    "choose another --pp, or say how many layers the first or the last stage has: \
                     --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
                ),
            MegatronError::Layout { .. } | MegatronError::Indivisible { .. } => {
                Self::of(Exit::Usage, &error).hint("choose other sizes for --tp, --pp and --ep")
            }
            other => Self::of(Exit::Bad, &other),
        }
    }
}

/// What helps where a checkpoint does not tell enough of its model.
const UNTOLD: &str = "`dcp inspect --args` shows what the checkpoint tells; --config DIR takes the \
                      rest from the model's config.json, and a mapping of your own may say it";

impl From<MappingError> for Failure {
    fn from(error: MappingError) -> Self {
        let (exit, hint) = match error {
            MappingError::Convert(error) => return error.into(),
            MappingError::Declaration { .. } => {
                (Exit::Usage, "`dcp arch llama` prints one that is right")
            }
            MappingError::Yaml { .. } => (
                Exit::Bad,
                "it is written beside the checkpoint and tells of its model; without it, --config \
                 DIR takes the model's config.json",
            ),
            MappingError::UnknownFamily { .. } => (
                Exit::Usage,
                "name one of them, or a TOML file of your own (`dcp arch llama > my.toml` is one \
                 to begin with)",
            ),
            MappingError::OtherFamily { .. } => {
                (Exit::Usage, "--arch names another family; `dcp arch` lists them")
            }
            MappingError::LeftOver { .. } => (
                Exit::Bad,
                "`dcp arch FAMILY > my.toml` prints a mapping to add rules to; --allow-left-over \
                 leaves them out, and a model that uses them is then another one",
            ),
            MappingError::Differs { .. } => (
                Exit::Usage,
                "--ignore-args goes on all the same, and says so; --config DIR takes the \
                 configuration that the model is opened with",
            ),
            MappingError::Unsaid { .. } => {
                (Exit::Usage, "pass --config DIR, the folder with the original model's config.json")
            }
            MappingError::UnknownFact { .. } => (Exit::Usage, UNTOLD),
            MappingError::Rule { ref problem, .. } if problem.ends_with("the shapes tell") => {
                (Exit::Usage, UNTOLD)
            }
            MappingError::BadFact { .. } => {
                (Exit::Bad, "`dcp inspect` shows what the checkpoint holds and tells of itself")
            }
            _ => (
                Exit::Bad,
                "`dcp inspect` lists what the checkpoint holds: it is not whole, or of another \
                 family, which --arch names",
            ),
        };
        let mut failure = Self::of(exit, &error);
        if let MappingError::Rule { file, line, rule, problem } = &error
            && let Some(family) = builtin(file)
        {
            failure.message = format!("`dcp arch {family}`, line {line}: rule {rule:?}: {problem}");
        }
        failure.hint(hint)
    }
}

/// The family that a mapping's file is of, if it comes with the command.
fn builtin(file: &str) -> Option<&str> {
    let family = file.strip_prefix("families/")?.strip_suffix(".toml")?;
    Mapping::families().contains(&family).then_some(family)
}

impl From<io::Error> for Failure {
    /// Output that nobody reads any more, as in `dcp … | head`, is no failure.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { silent: true, ..Self::new(Exit::Io, "") };
        }
        Self::of(Exit::Io, &error).context("cannot write the output")
    }
}

impl Failure {
    /// Whether the reader of the output went away.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.silent && self.exit == Exit::Io
    }
}
