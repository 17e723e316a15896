//! "Did you mean": names that look like one that is not there.

use std::sync::Arc;

use dcp_core::CheckpointMetadata;

use crate::error::ConvertError;

/// Names to suggest at most.
const SHOWN: usize = 3;
/// Names to compare at most, so that a typo costs no second on a huge checkpoint.
const COMPARED: usize = 50_000;

/// The error for a name that is not there, with the names that look like it.
#[must_use]
pub fn unknown_fqn(metadata: &CheckpointMetadata, fqn: &str) -> ConvertError {
    let mut scored: Vec<(usize, &Arc<str>)> = metadata
        .iter()
        .take(COMPARED)
        .filter_map(|(name, _)| Some((distance(fqn, name)?, name)))
        .collect();
    scored.sort();
    // A name that is much further away than the best one is no help beside it.
    let far = scored.first().map_or(0, |(best, _)| best + 1);
    let near = scored.into_iter().take(SHOWN).filter(|(distance, _)| *distance <= far);
    let similar = near.map(|(_, name)| Arc::clone(name)).collect();
    ConvertError::UnknownFqn { fqn: fqn.to_owned(), similar }
}

/// How far apart two names are, or `None` when they have little in common. A name that is a
/// whole part of the other is close, however much longer the other is.
fn distance(asked: &str, name: &str) -> Option<usize> {
    const MAX_LEN: usize = 256;
    if asked.is_empty() || asked.len() > MAX_LEN || name.len() > MAX_LEN {
        return None;
    }
    if asked.len() >= 3 && (ends(name, asked) || starts(name, asked)) {
        return Some(1);
    }
    let edits = edits(asked, name);
    (edits <= asked.chars().count().max(3) / 3).then_some(edits)
}

fn ends(name: &str, part: &str) -> bool {
    name.strip_suffix(part).is_some_and(|rest| rest.ends_with('.'))
}

fn starts(name: &str, part: &str) -> bool {
    name.strip_prefix(part.trim_end_matches('.')).is_some_and(|rest| rest.starts_with(['.', '/']))
}

/// Insertions, deletions and replacements between two texts.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, to) in row.iter_mut().skip(1).zip(&b) {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = *cell;
            left = replaced.min(left + 1).min(diagonal + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or(0)
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
}
