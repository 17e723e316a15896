//! Finds grids of sharded objects that are not complete.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Dims, Region};
use dcp_jobs::integrity::{Problem, ProblemKind};

use crate::sharded::ObjectKey;

/// Grids of objects that are not complete: Megatron-Core saves none such.
pub(crate) fn object_grids(metadata: &CheckpointMetadata) -> Vec<Problem> {
    let mut grids: BTreeMap<(Arc<str>, Dims), Vec<Dims>> = BTreeMap::new();
    let mut problems = Vec::new();
    for (fqn, entry) in metadata.iter() {
        let Entry::Object(_) = entry else { continue };
        let Some(at) = ObjectKey::parse(fqn) else { continue };
        let whole = Region::full(at.grid().clone());
        let one = Region::new(at.offset().clone(), vec![1; at.offset().ndim()]);
        if !whole.is_ok_and(|whole| one.is_ok_and(|one| whole.contains(&one))) {
            let message = format!("object {} is not in a grid of {}", at.offset(), at.grid());
            problems.push(index_problem(Some(Arc::clone(fqn)), message));
            continue;
        }
        let grid = (Arc::clone(at.key()), at.grid().clone());
        grids.entry(grid).or_default().push(at.offset().clone());
    }
    let mut last: Option<&Arc<str>> = None;
    for ((key, grid), offsets) in &grids {
        if last == Some(key) {
            let message = format!("there are objects of several grids, one of them {grid}");
            problems.push(index_problem(Some(Arc::clone(key)), message));
        }
        last = Some(key);
        // Unique keys are names in an index, so no object is counted twice.
        let (expected, found) = (grid.checked_volume().unwrap_or(u64::MAX), offsets.len() as u64);
        if found < expected {
            let missing = first_missing(grid, offsets);
            let missing = missing.map_or_else(String::new, |at| format!(", the first at {at}"));
            let message = format!(
                "of {expected} objects in a grid of {grid} {} are missing{missing}",
                expected - found
            );
            problems.push(index_problem(Some(Arc::clone(key)), message));
        }
    }
    problems
}

/// The first cell of a grid in row-major order that is not among `offsets`, which has fewer than
/// all.
fn first_missing(grid: &[u64], offsets: &[Dims]) -> Option<Dims> {
    let mut offsets = offsets.to_vec();
    offsets.sort_unstable();
    let mut cell = vec![0_u64; grid.len()];
    for offset in offsets {
        if *offset != *cell {
            break;
        }
        let mut carried = true;
        for (at, len) in cell.iter_mut().zip(grid).rev() {
            *at += 1;
            if *at < *len {
                carried = false;
                break;
            }
            *at = 0;
        }
        if carried {
            return None;
        }
    }
    Some(cell.into())
}

pub(crate) fn index_problem(key: Option<Arc<str>>, message: String) -> Problem {
    let mut problem = Problem::default();
    problem.kind = ProblemKind::Index;
    problem.key = key;
    problem.message = message;
    problem
}

#[cfg(test)]
mod tests {
    use dcp_core::metadata::ObjectEntry;

    use super::*;

    fn problems(names: &[&str]) -> Vec<String> {
        let mut metadata = CheckpointMetadata::new();
        for name in names {
            metadata.insert(*name, Entry::Object(ObjectEntry::new(None)));
        }
        object_grids(&metadata).into_iter().map(|problem| problem.message).collect()
    }

    #[test]
    fn every_object_of_a_grid_must_be_there() {
        assert_eq!(problems(&["a/shard_0_1", "b/shard_0.0_1.2", "b/shard_0.1_1.2", "x"]), [""; 0]);
        let said = |names: &[&str], said: &str| {
            let problems = problems(names);
            assert!(matches!(&*problems, [one] if one.contains(said)), "{problems:?}");
        };
        said(
            &["b/shard_0.0_2.2", "b/shard_1.1_2.2"],
            "4 objects in a grid of [2, 2] 2 are missing",
        );
        said(&["b/shard_0.0_2.2", "b/shard_1.1_2.2"], "the first at [0, 1]");
        said(&["b/shard_1_2"], "the first at [0]");
        said(&["b/shard_2_2"], "not in a grid");
        said(&["b/shard_0_1", "b/shard_0_2", "b/shard_1_2"], "several grids");
        let huge = ["b/shard_0.0_4294967296.4294967296"];
        said(&huge, "not in a grid");
        said(&["b/shard_0_18446744073709551615"], "18446744073709551614 are missing");
    }
}
