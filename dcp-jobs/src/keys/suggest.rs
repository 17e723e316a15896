//! Suggests similar names for one that does not exist.

use std::sync::Arc;

use dcp_core::CheckpointMetadata;

use crate::error::JobError;

/// The maximum number of suggestions.
const SHOWN: usize = 3;
/// The maximum number of names to compare, so that a typo stays cheap on a huge checkpoint.
const COMPARED: usize = 50_000;
/// The maximum length of a name or pattern to compare, in bytes.
const MAX_LEN: usize = 256;

/// The error for a name that does not exist, with similar names.
#[must_use]
pub fn unknown_fqn(metadata: &CheckpointMetadata, fqn: &str) -> JobError {
    let mut scored: Vec<(usize, &Arc<str>)> = metadata
        .iter()
        .take(COMPARED)
        .filter_map(|(name, _)| Some((distance(fqn, name)?, name)))
        .collect();
    scored.sort();
    // A name much further away than the nearest one is no useful suggestion.
    let far = scored.first().map_or(0, |(best, _)| best + 1);
    let near = scored.into_iter().take(SHOWN).filter(|(distance, _)| *distance <= far);
    let similar = near.map(|(_, name)| Arc::clone(name)).collect();
    JobError::UnknownFqn { fqn: fqn.to_owned(), similar }
}

/// The distance of two names; `None` when they have little in common. A name that is a whole part
/// of the other is near, regardless of the other's length.
fn distance(requested: &str, name: &str) -> Option<usize> {
    if requested.is_empty() || requested.len() > MAX_LEN || name.len() > MAX_LEN {
        return None;
    }
    if requested.len() >= 3 && (ends(name, requested) || starts(name, requested)) {
        return Some(1);
    }
    let edits = edits_to_prefixes(requested, name, false).last().copied()?;
    (edits <= requested.chars().count().max(3) / 3).then_some(edits)
}

fn ends(name: &str, part: &str) -> bool {
    name.strip_suffix(part).is_some_and(|rest| rest.ends_with('.'))
}

fn starts(name: &str, part: &str) -> bool {
    name.strip_prefix(part.trim_end_matches('.')).is_some_and(|rest| rest.starts_with(['.', '/']))
}

/// The key nearest to a pattern that matches none. For a pattern without wildcards, it may also be
/// the beginning of a key up to a dot.
pub(crate) fn nearest<'a>(pattern: &str, names: impl Iterator<Item = &'a str>) -> Option<Arc<str>> {
    let is_glob = pattern.contains(['*', '?']);
    let literal = pattern.chars().filter(|c| !"*?".contains(*c)).count();
    if literal == 0 || pattern.len() > MAX_LEN {
        return None;
    }
    let names = names.take(COMPARED).filter(|name| name.len() <= MAX_LEN);
    let best = names.filter_map(|name| nearest_part(pattern, is_glob, name)).min()?;
    (best.0 <= literal.div_ceil(3)).then(|| best.1.into())
}

/// The distance of a pattern to the nearest part of a name that it could select.
fn nearest_part<'a>(pattern: &str, is_glob: bool, name: &'a str) -> Option<(usize, &'a str)> {
    if is_glob {
        let inside = || edits(&format!("*.{pattern}"), name).saturating_add(1);
        return Some((edits(pattern, name).min(inside()), name));
    }
    if pattern.len() >= 3 && ends(name, pattern) {
        return Some((1, name));
    }
    let row = edits_to_prefixes(pattern, name, false);
    let ends_part =
        |at: usize| name.get(at..).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let indices = name.char_indices().map(|(at, _)| at).chain([name.len()]);
    let parts = indices.zip(row).filter(|(at, _)| ends_part(*at));
    parts.filter_map(|(at, edits)| Some((edits, name.get(..at)?))).min()
}

/// The number of insertions, deletions and replacements between two texts. The first may be a glob,
/// for which `strsim` has no distance; nor has it one to all prefixes in one pass.
fn edits(a: &str, b: &str) -> usize {
    edits_to_prefixes(a, b, true).last().copied().unwrap_or(0)
}

/// Returns the distance of `a` to each prefix of `b`.
fn edits_to_prefixes(a: &str, b: &str, is_glob: bool) -> Vec<usize> {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for from in a.chars() {
        if is_glob && from == '*' {
            let mut least = usize::MAX;
            for cell in &mut row {
                least = least.min(*cell);
                *cell = least;
            }
            continue;
        }
        let mut diagonal = row.first().copied().unwrap_or(0);
        let mut left = diagonal.saturating_add(1);
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, to) in row.iter_mut().skip(1).zip(&b) {
            let same = from == *to || (is_glob && from == '?');
            let replaced = diagonal + usize::from(!same);
            diagonal = *cell;
            left = replaced.min(left + 1).min(diagonal + 1);
            *cell = left;
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_levenshteins() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("abc", ""), 3);
        assert_eq!(edits("same", "same"), 0);
        assert_eq!(edits("s*e", "same"), 0);
        assert_eq!(edits("x?m*", "same"), 1);
        assert_eq!(edits_to_prefixes("ab", "abc", true), [2, 1, 0, 1]);
    }

    #[test]
    fn parts_and_typos_are_close() {
        assert_eq!(distance("weight", "model.norm.weight"), Some(1));
        assert_eq!(distance("model.norm", "model.norm.weight"), Some(1));
        assert_eq!(distance("model.nrom.weight", "model.norm.weight"), Some(2));
        assert_eq!(distance("rng_state", "rng_state/shard_0.1_1.2"), Some(1));
        assert_eq!(distance("eight", "model.weight"), None);
        assert_eq!(distance("", "x"), None);
    }

    #[test]
    fn a_pattern_is_near_to_what_it_could_select() {
        let names = ["model.embed.weight", "model.norm.weight", "optim.lr"];
        let nearest = |pattern| nearest(pattern, names.into_iter());
        for (pattern, expected) in [
            ("modle", Some("model")),
            ("model.nrom", Some("model.norm")),
            ("norm.weight", Some("model.norm.weight")),
            ("modle.*", Some("model.embed.weight")),
            ("norm.*", Some("model.norm.weight")),
            ("*.wieght", Some("model.embed.weight")),
            ("something else", None),
            ("*", None),
        ] {
            assert_eq!(nearest(pattern).as_deref(), expected, "{pattern}");
        }
    }
}
