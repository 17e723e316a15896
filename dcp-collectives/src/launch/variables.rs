//! Typed values of environment variables.

use std::env::{self, VarError};

use super::error::EnvError;

type Get<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>, EnvError>;

pub(super) const PORT: &str = "a port number from 1 to 65535";
pub(super) const HOST: &str = "a host name or an IP address";
const RANK: &str = "a number from 0";
const COUNT: &str = "a number from 1";

/// Reads variables by name.
pub(super) struct Variables<'a>(Get<'a>);

impl<'a> Variables<'a> {
    pub(super) fn new(get: Get<'a>) -> Self {
        Self(get)
    }

    /// The variables of this process.
    pub(super) fn of_process() -> Self {
        Self(&|variable| match env::var(variable) {
            Ok(value) => Ok(Some(value)),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(value)) => {
                Err(invalid(variable, value.to_string_lossy().into_owned(), "UTF-8"))
            }
        })
    }

    pub(super) fn text(&self, variable: &'static str) -> Result<Option<String>, EnvError> {
        (self.0)(variable)
    }

    pub(super) fn is_set(&self, variable: &'static str) -> Result<bool, EnvError> {
        Ok(self.text(variable)?.is_some())
    }

    /// A number from 0.
    pub(super) fn rank(&self, variable: &'static str) -> Result<Option<u32>, EnvError> {
        let parse = |value: String| match value.trim().parse() {
            Ok(number) => Ok(number),
            Err(_) => Err(invalid(variable, value, RANK)),
        };
        self.text(variable)?.map(parse).transpose()
    }

    /// A number from 1.
    pub(super) fn count(&self, variable: &'static str) -> Result<Option<u32>, EnvError> {
        let parse = |value: String| match value.trim().parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(invalid(variable, value, COUNT)),
        };
        self.text(variable)?.map(parse).transpose()
    }

    pub(super) fn port(&self, variable: &'static str) -> Result<Option<u16>, EnvError> {
        let parse = |value: String| match value.trim().parse() {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(invalid(variable, value, PORT)),
        };
        self.text(variable)?.map(parse).transpose()
    }
}

pub(super) fn invalid(variable: &'static str, value: String, expected: &'static str) -> EnvError {
    EnvError::Invalid { variable, value, expected }
}
