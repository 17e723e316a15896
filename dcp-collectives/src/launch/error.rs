//! Errors of the environment of a launcher.

use dcp_core::CollectiveError;
use dcp_core::text::Quoted;

use super::Launcher;
use crate::tcp::SecretError;

/// A variable of the environment is missing or wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// The variable is not set.
    #[error("{variable} is not set; a launcher such as torchrun sets it, or set it by hand")]
    Missing {
        /// Its name.
        variable: &'static str,
    },
    /// The variable has no usable value.
    #[error("{variable} is {value}, it should be {expected}", value = Quoted(.value))]
    Invalid {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The form that the value should have.
        expected: &'static str,
    },
    /// Two variables give different numbers.
    #[error("{variable} is {value}, but {other} is {other_value}; unset one of them")]
    Contradiction {
        /// One variable.
        variable: &'static str,
        /// Its value.
        value: u32,
        /// The other variable.
        other: &'static str,
        /// Its value.
        other_value: u32,
    },
    /// The secret of the job cannot be used.
    #[error("{variable} gives no secret: {source}")]
    Secret {
        /// The variable.
        variable: &'static str,
        /// The error of the secret.
        source: SecretError,
    },
    /// The files of TLS cannot be used.
    #[cfg(feature = "tls")]
    #[error("TLS (DCP_TLS_CERT, DCP_TLS_KEY, DCP_TLS_CA): {source}")]
    Tls {
        /// The error of the files.
        source: crate::TlsError,
    },
    /// The launcher sets nothing that says where rank 0 listens.
    #[error("{launcher} does not say where rank 0 listens; set {variable}, the same on all ranks")]
    NoMeetingPoint {
        /// The launcher.
        launcher: Launcher,
        /// The variable to set.
        variable: &'static str,
    },
}

impl From<EnvError> for CollectiveError {
    fn from(error: EnvError) -> Self {
        Self::Rendezvous { message: error.to_string() }
    }
}
