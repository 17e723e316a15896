//! A key pattern that matches no key, in reports and errors.

use std::sync::Arc;

use serde::Serialize;

/// A key pattern that matches no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnmatchedPattern {
    /// The name of its option: `include`, `exclude`, `rename`, `keep-dtype`, …
    pub option: String,
    /// The pattern as given.
    pub pattern: String,
    /// The nearest key, or beginning of a key, if one is similar.
    pub nearest: Option<Arc<str>>,
}

impl UnmatchedPattern {
    /// The message, with the nearest key: `include 'modle' matches no key; the nearest is "model"`.
    #[must_use]
    pub fn message(&self) -> String {
        let Self { option, pattern, nearest } = self;
        let nearest = match nearest {
            Some(nearest) => format!("; the nearest is {nearest:?}"),
            None => "; `Checkpoint::inspect` lists the keys".to_owned(),
        };
        format!("`{option}` '{pattern}' matches no key{nearest}")
    }
}
