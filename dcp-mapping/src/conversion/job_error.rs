//! Errors of mappings as those of jobs.

use dcp_checkpoint::{Error, ErrorKind};

use crate::error::MappingError;
use crate::mapping::Mapping;

/// The advice where a checkpoint does not say enough of its model.
const UNSAID: &str = "`dcp inspect --args` shows what the checkpoint says; --config DIR reads the \
                      rest from the model's config.json, and a mapping of your own may say it";

impl From<MappingError> for Error {
    fn from(error: MappingError) -> Self {
        let (kind, hint) = match error {
            MappingError::Convert(error) => return error.into(),
            MappingError::Declaration { .. } => {
                (ErrorKind::InvalidOption, "`dcp arch llama` prints one that is right")
            }
            MappingError::Yaml { .. } => (
                ErrorKind::Damaged,
                "the file describes the model of the checkpoint; without it, --config DIR reads the \
                 model's config.json",
            ),
            MappingError::UnknownFamily { .. } => (
                ErrorKind::InvalidOption,
                "name one of them, or a TOML file of your own (`dcp arch llama > my.toml` is one \
                 to begin with)",
            ),
            MappingError::OtherFamily { .. } => {
                (ErrorKind::InvalidOption, "--arch names another family; `dcp arch` lists them")
            }
            MappingError::LeftOver { .. } => (
                ErrorKind::Unmapped,
                "`dcp arch FAMILY > my.toml` prints a mapping to add rules to; --allow-left-over \
                 leaves them out, and a model that uses them is then another one",
            ),
            MappingError::Differs { .. } => (
                ErrorKind::Unsupported,
                "--ignore-args goes on all the same, and says so; --config DIR takes the \
                 configuration that the model is opened with",
            ),
            MappingError::Unsaid { .. } => (
                ErrorKind::Undecided,
                "pass --config DIR, the folder with the original model's config.json",
            ),
            MappingError::UnknownFact { .. } => (ErrorKind::Undecided, UNSAID),
            MappingError::Rule { ref problem, .. } if problem.ends_with("nor the shapes") => {
                (ErrorKind::Undecided, UNSAID)
            }
            MappingError::BadFact { .. } => (
                ErrorKind::Damaged,
                "`dcp inspect` shows what the checkpoint holds and says of its model",
            ),
            _ => (
                ErrorKind::Unmapped,
                "`dcp inspect` lists what the checkpoint holds: it is not whole, or of another \
                 family, which --arch names",
            ),
        };
        let message = match &error {
            MappingError::Rule { file, line, rule, problem } => builtin(file).map(|family| {
                format!("`dcp arch {family}`, line {line}: rule {rule:?}: {problem}")
            }),
            _ => None,
        };
        let failure = Self::of(kind, error).with_hint(hint);
        match message {
            Some(message) => failure.with_message(message),
            None => failure,
        }
    }
}

/// The family that a mapping's file is of, if it is built in.
fn builtin(file: &str) -> Option<&str> {
    let family = file.strip_prefix("families/")?.strip_suffix(".toml")?;
    Mapping::declaration(family).map(|_| family)
}
