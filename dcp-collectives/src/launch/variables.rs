//! Typed values of environment variables.

use std::env::{self, VarError};
use std::net::IpAddr;

use super::error::EnvError;
use crate::tcp::Secret;

type Get<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>, EnvError>;

pub(super) const PORT: &str = "a port number from 1 to 65535";
pub(super) const HOST: &str = "a host name or an IP address";
/// Files of the certificate, its key and the authorities.
const TLS: [&str; 3] = ["DCP_TLS_CERT", "DCP_TLS_KEY", "DCP_TLS_CA"];
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
            Err(VarError::NotUnicode(_)) => {
                // Not shown: it may be a secret.
                Err(invalid(variable, "another encoding".to_owned(), "UTF-8"))
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

    pub(super) fn address(&self, variable: &'static str) -> Result<Option<IpAddr>, EnvError> {
        let parse = |value: String| match value.trim().parse() {
            Ok(address) => Ok(address),
            Err(_) => Err(invalid(variable, value, "an IP address of this host")),
        };
        self.text(variable)?.map(parse).transpose()
    }

    /// Returns the secret that the ranks of the job share.
    pub(super) fn secret(&self) -> Result<Option<Secret>, EnvError> {
        const FILE: &str = "DCP_SECRET_FILE";
        const TEXT: &str = "DCP_SECRET";
        let failed = |variable| move |source| EnvError::Secret { variable, source };
        match (self.text(FILE)?, self.text(TEXT)?) {
            (Some(path), _) => Secret::from_file(path).map(Some).map_err(failed(FILE)),
            (None, Some(text)) => Secret::new(text.trim()).map(Some).map_err(failed(TEXT)),
            (None, None) => Ok(None),
        }
    }

    /// Certificate, key and authority, if all of them are named.
    #[cfg(feature = "tls")]
    pub(super) fn tls(&self) -> Result<Option<crate::Tls>, EnvError> {
        let [certificate, key, authorities] = TLS;
        let names = [self.text(certificate)?, self.text(key)?, self.text(authorities)?];
        let missing = |variable| Err(EnvError::Missing { variable });
        match &names {
            [Some(own), Some(private), Some(roots)] => crate::Tls::from_files(own, private, roots)
                .map(Some)
                .map_err(|source| EnvError::Tls { source }),
            [None, None, None] => Ok(None),
            [None, ..] => missing(certificate),
            [_, None, _] => missing(key),
            [_, _, None] => missing(authorities),
        }
    }

    /// Connections that should be encrypted are not made without encryption.
    #[cfg(not(feature = "tls"))]
    pub(super) fn no_tls(&self) -> Result<(), EnvError> {
        for variable in TLS {
            if let Some(value) = self.text(variable)? {
                return Err(invalid(variable, value, "unset: this build has no TLS"));
            }
        }
        Ok(())
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
