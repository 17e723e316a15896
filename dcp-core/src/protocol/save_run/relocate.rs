//! Moves placements to where items are stored, when that differs from the plan.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use crate::error::{PlanError, PlanProblem};
use crate::names::key::Key;
use crate::plans::metadata::{CheckpointMetadata, Entry, Placement};
use crate::protocol::checkpoint::WriteReport;

/// For each file of the metadata, where the items are that were planned at an offset.
type Stored<'r> = Vec<Option<(HashMap<u64, &'r Range<u64>>, u64)>>;

/// `metadata` with the places of [`WriteReport::stored`] instead of the planned ones.
///
/// # Errors
///
/// When a report has places of a file, but not of every item in it, or one past its end.
pub(super) fn relocated<'m>(
    metadata: &'m CheckpointMetadata,
    reports: &[WriteReport],
) -> Result<Cow<'m, CheckpointMetadata>, PlanError> {
    if reports.iter().all(|report| report.stored.is_empty()) {
        return Ok(Cow::Borrowed(metadata));
    }
    let lens: HashMap<&Key, u64> =
        reports.iter().flat_map(|r| &r.files).map(|(key, len)| (key, *len)).collect();
    let reported: HashMap<&Key, &Vec<_>> = reports.iter().flat_map(|r| &r.stored).collect();
    let of_file = |key: &Key| {
        let items = reported.get(key)?.iter().map(|(planned, range)| (*planned, range));
        Some((items.collect(), lens.get(key).copied().unwrap_or(0)))
    };
    let stored: Stored<'_> = metadata.files().iter().map(of_file).collect();
    let mut moved = metadata.clone();
    for index in 0..moved.len() {
        let Some((fqn, entry)) = moved.at_mut(index) else { continue };
        match entry {
            Entry::Tensor(tensor) => {
                for index in 0..tensor.chunks.len() {
                    let planned = tensor.chunks.get(index).and_then(|chunk| chunk.placement);
                    if let Some(planned) = planned {
                        tensor.chunks.place(index, relocate(&stored, fqn, planned)?);
                    }
                }
            }
            Entry::Object(object) => {
                if let Some(planned) = object.placement {
                    object.placement = Some(relocate(&stored, fqn, planned)?);
                }
            }
        }
    }
    Ok(Cow::Owned(moved))
}

fn relocate(stored: &Stored<'_>, fqn: &str, planned: Placement) -> Result<Placement, PlanError> {
    let Some((items, file_len)) = stored.get(planned.file.index()).and_then(Option::as_ref) else {
        return Ok(planned);
    };
    let misplaced =
        |problem: String| PlanError::Plan(PlanProblem::Misplaced { fqn: fqn.to_owned(), problem });
    let range = items.get(&planned.byte_offset).ok_or_else(|| {
        misplaced(format!(
            "no rank reported where it stored the item planned at byte {}",
            planned.byte_offset
        ))
    })?;
    let byte_len = range.end.checked_sub(range.start).filter(|_| range.end <= *file_len);
    let byte_len = byte_len.ok_or_else(|| {
        misplaced(format!(
            "a rank reported it at bytes {} to {} of a file of {file_len} bytes",
            range.start, range.end
        ))
    })?;
    Ok(Placement { byte_offset: range.start, byte_len, ..planned })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::metadata::{FileId, ObjectEntry};

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn metadata() -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for (fqn, file, byte_offset) in [("a", "x", 0), ("b", "x", 100), ("c", "y", 0)] {
            let file = metadata.intern_file(&key(file)).unwrap();
            let placement = Placement { file, encoding: 0, byte_offset, byte_len: 100 };
            let object = ObjectEntry { placement: Some(placement), path: None, tensor: None };
            metadata.insert(fqn, Entry::Object(object));
        }
        metadata
    }

    fn report(items: Vec<(u64, Range<u64>)>) -> WriteReport {
        let files = vec![(key("x"), 90), (key("y"), 100)];
        WriteReport::new(files).with_stored([(key("x"), items)].into())
    }

    #[test]
    fn placements_move_to_where_the_reports_say() {
        let metadata = metadata();
        let moved = relocated(&metadata, &[report(vec![(100, 40..90), (0, 0..40)])]).unwrap();
        let place = |fqn: &str| match moved.get(fqn).unwrap() {
            Entry::Object(object) => object.placement.unwrap(),
            Entry::Tensor(_) => unreachable!(),
        };
        assert_eq!((place("a").byte_offset, place("a").byte_len), (0, 40));
        assert_eq!((place("b").byte_offset, place("b").byte_len), (40, 50));
        assert_eq!((place("c").byte_offset, place("c").byte_len), (0, 100));
        assert_eq!(place("c").file, FileId::from_index(1).unwrap());
        let unmoved = relocated(&metadata, &[WriteReport::default()]).unwrap();
        assert!(matches!(unmoved, Cow::Borrowed(_)));
    }

    #[test]
    fn a_report_without_an_item_or_past_the_end_is_refused() {
        let metadata = metadata();
        let backwards = Range { start: 3, end: 2 };
        for items in [vec![(0, 0..40)], vec![(0, 0..40), (100, 40..91)], vec![(0, backwards)]] {
            let error = relocated(&metadata, &[report(items)]).unwrap_err();
            assert!(error.to_string().contains("report"), "{error}");
        }
    }
}
