//! Answers of a server that this crate refuses.

use std::fmt;

use object_store::client::{HttpError, HttpErrorKind};

/// The reason why an answer is not read, or a redirect not followed. Another attempt gets the same.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl Refused {
    pub(crate) fn error(reason: impl Into<String>) -> HttpError {
        HttpError::new(HttpErrorKind::Unknown, Self(reason.into()))
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}
