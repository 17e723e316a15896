//! Key patterns that match no key.

use dcp_core::path::StatePath;
use dcp_planner::KeyFilter;

use crate::keys::suggest::nearest;

pub use crate::error::UnmatchedPattern;

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
