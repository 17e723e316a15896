//! Errors of mappings as those of jobs.

use dcp_jobs::{Error, ErrorKind};
use serde_json::Value;

use crate::error::MappingError;
use crate::mapping::Mapping;

/// The advice where a checkpoint does not say enough of its model.
const UNSAID: &str = "`framework::arguments` shows what the checkpoint says; \
                      `Destination::config` reads the rest from the model's config.json, and a \
                      mapping of your own may say it";

impl From<MappingError> for Error {
    fn from(error: MappingError) -> Self {
        let (kind, hint) = match error {
            MappingError::Convert(error) => return error.into(),
            MappingError::Declaration { .. } => {
                (ErrorKind::InvalidOption, "`Mapping::declaration` prints one that is right")
            }
            MappingError::Yaml { .. } => (
                ErrorKind::Damaged,
                "the file describes the model of the checkpoint; without it, \
                 `Destination::config` reads the model's config.json",
            ),
            MappingError::UnknownFamily { .. } => (
                ErrorKind::InvalidOption,
                "name one of them, or a TOML file of your own (`Mapping::declaration` is one \
                 to begin with)",
            ),
            MappingError::OtherFamily { .. } => (
                ErrorKind::InvalidOption,
                "`MappingOptions::arch` names another family; `Mapping::families` lists them",
            ),
            MappingError::LeftOver { .. } => (
                ErrorKind::Unmapped,
                "`Mapping::declaration` prints a mapping to add rules to; \
                 `MappingOptions::allow_left_over` leaves them out, and a model that uses them \
                 is then another one",
            ),
            MappingError::Differs { .. } => (
                ErrorKind::Unsupported,
                "`MappingOptions::ignore_args` goes on all the same, and says so; \
                 `Destination::config` takes the configuration that the model is opened with",
            ),
            MappingError::Unsaid { .. } => (
                ErrorKind::Undecided,
                "pass `Destination::config`, the folder with the original model's config.json",
            ),
            MappingError::UnknownFact { .. } => (ErrorKind::Undecided, UNSAID),
            MappingError::Rule { ref problem, .. } if problem.ends_with("nor the shapes") => {
                (ErrorKind::Undecided, UNSAID)
            }
            MappingError::BadFact { .. } => (
                ErrorKind::Damaged,
                "`Checkpoint::inspect` shows what the checkpoint holds and says of its model",
            ),
            _ => (
                ErrorKind::Unmapped,
                "`Checkpoint::inspect` lists what the checkpoint holds: it is not whole, or of another \
                 family, which `MappingOptions::arch` names",
            ),
        };
        let message = match &error {
            MappingError::Rule { file, line, rule, problem } => builtin(file).map(|family| {
                format!("the mapping {family:?}, line {line}: rule {rule:?}: {problem}")
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

/// The error of a setting of `config.json` that tensors contradict.
pub(super) fn contradiction(setting: &str, stated: &Value, problem: &str) -> Error {
    other_model(format!("config.json has {setting} {stated}, and {problem}"))
}

/// Refuses a setting that is missing though the tensors show that there is one.
pub(super) fn missing(setting: &str, problem: &str) -> Error {
    other_model(format!("config.json has no {setting}, and {problem}"))
}

fn other_model(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message).with_hint(
        "pass `Destination::config` with the folder of this model, or correct the setting in a copy",
    )
}
