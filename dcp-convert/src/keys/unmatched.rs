//! Key patterns that match no key.

use std::sync::Arc;

use dcp_core::path::StatePath;
use dcp_planner::KeyFilter;
use serde::Serialize;

use crate::keys::suggest::nearest;

/// A key pattern that matches no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnmatchedPattern {
    /// The name of its command-line option: `include`, `exclude`, `rename`, `keep-dtype`, …
    pub option: String,
    /// The pattern as given.
    pub pattern: String,
    /// The nearest key, or beginning of a key, if one is similar.
    pub nearest: Option<Arc<str>>,
}

impl UnmatchedPattern {
    /// The message, with the nearest key: `--include 'modle' matches no key; the nearest is
    /// "model"`.
    #[must_use]
    pub fn message(&self) -> String {
        let Self { option, pattern, nearest } = self;
        let nearest = match nearest {
            Some(nearest) => format!("; the nearest is {nearest:?}"),
            None => "; `dcp inspect` lists the keys".to_owned(),
        };
        format!("--{option} '{pattern}' matches no key{nearest}")
    }
}

/// The patterns of `option` that match none of the keys.
#[must_use]
pub fn unmatched_patterns(
    option: &str,
    patterns: &[String],
    keys: &[(&str, Option<&StatePath>)],
) -> Vec<UnmatchedPattern> {
    let matches_none = |pattern: &&String| {
        let filter = KeyFilter::any_of([pattern.as_str()]);
        !keys.iter().any(|(fqn, path)| filter.selects(fqn, *path))
    };
    let unmatched = patterns.iter().filter(matches_none).map(|pattern| UnmatchedPattern {
        option: option.to_owned(),
        pattern: pattern.clone(),
        nearest: nearest(pattern, keys.iter().map(|(fqn, _)| *fqn)),
    });
    unmatched.collect()
}
