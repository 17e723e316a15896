//! From chosen rows to the plan of the whole save.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};
use dcp_core::plan::{GlobalPlan, SelectedItem};
use dcp_core::{CheckpointMetadata, Dims, PlanError};

use super::merge::{Merged, MergedKey, none_of};
use crate::validate::check_chunks;

const NONE: u32 = u32::MAX;

/// The plan in which `writers`, rows of every name, are written.
pub(super) fn assemble(
    merged: &Merged<'_>,
    mut writers: Vec<Vec<u32>>,
    validate: bool,
) -> Result<GlobalPlan, PlanError> {
    // Rows are numbered in the order of ranks and items, which is the order of chunks.
    writers.iter_mut().for_each(|rows| rows.sort_unstable());
    let mut order: Vec<usize> = (0..merged.keys.len()).collect();
    // Entries without a writer come last.
    order.sort_by_key(|at| match writers[*at].first() {
        Some(row) => (false, Some(merged.keys[*at].origin(*row))),
        None => (true, None),
    });
    let several = merged.lens.len() > 1;
    let mut errors = Vec::new();
    let mut metadata = CheckpointMetadata::new();
    let mut entries = vec![NONE; merged.keys.len()];
    // The last valid entry of a shape; most tensors of one shape are divided alike.
    let mut valid: HashMap<&Dims, usize> = HashMap::new();
    for at in order {
        let (key, rows) = (&merged.keys[at], &writers[at]);
        let Some(entry) = entry(key, rows)? else { continue };
        if let (true, Entry::Tensor(tensor)) = (validate, &entry) {
            let before = valid.get(&tensor.shape).and_then(|before| metadata.at(*before));
            let before = before.and_then(|(_, entry)| entry.as_tensor());
            if !before.is_some_and(|before| before.chunks.has_regions_of(&tensor.chunks)) {
                let rank = |chunk: usize| rows.get(chunk).map(|row| key.origin(*row).rank);
                check_chunks(key.fqn, &tensor.shape, &tensor.chunks, several, rank, &mut errors);
            }
        }
        let is_stored = !rows.is_empty() || has_no_elements(key);
        if is_stored {
            let number = metadata.insert(Arc::clone(key.fqn), entry);
            entries[at] = number as u32;
            if let (true, Some(spec)) = (errors.is_empty(), key.spec) {
                valid.insert(&spec.shape, number);
            }
        }
    }
    none_of(errors)?;
    let selections = select(merged, &writers, &entries);
    Ok(GlobalPlan { metadata, selections, ..GlobalPlan::default() })
}

/// A tensor without elements stays in the checkpoint although no rank holds a chunk of it.
fn has_no_elements(key: &MergedKey<'_>) -> bool {
    key.spec.is_some_and(|spec| spec.shape.contains(&0))
}

/// The entry of a name; `None` for an object that no rank has.
fn entry(key: &MergedKey<'_>, rows: &[u32]) -> Result<Option<Entry>, PlanError> {
    let Some(spec) = key.spec else {
        let mut object = ObjectEntry::new(None);
        object.path = key.path.cloned();
        return Ok((!rows.is_empty()).then_some(Entry::Object(object)));
    };
    let mut tensor = TensorEntry::new(spec.dtype, spec.shape.clone());
    tensor.path = key.path.cloned();
    for row in rows {
        let (offsets, sizes) = key.row(*row);
        tensor
            .chunks
            .push(offsets, sizes, None)
            .map_err(|error| PlanError::from(error).with_fqn(&**key.fqn))?;
    }
    Ok(Some(Entry::Tensor(tensor)))
}

/// Goes through all items once more, with a finger in the written rows of every name.
fn select(merged: &Merged<'_>, writers: &[Vec<u32>], entries: &[u32]) -> Vec<Vec<SelectedItem>> {
    struct Finger {
        row: u32,
        chunk: u32,
        next: u32,
    }
    let next = |at: usize, chunk: u32| writers[at].get(chunk as usize).copied().unwrap_or(NONE);
    let mut fingers: Vec<Finger> =
        (0..writers.len()).map(|at| Finger { row: 0, chunk: 0, next: next(at, 0) }).collect();
    let mut rest = merged.item_keys.as_slice();
    let of_rank = |len: &usize| {
        let (mine, others) = rest.split_at(*len);
        rest = others;
        let mut selected = Vec::new();
        for (item, at) in mine.iter().enumerate() {
            let finger = &mut fingers[*at as usize];
            if finger.row == finger.next {
                let (entry, chunk) = (entries[*at as usize], finger.chunk);
                selected.push(SelectedItem { item: item as u32, entry, chunk });
                finger.chunk += 1;
                finger.next = next(*at as usize, finger.chunk);
            }
            finger.row += 1;
        }
        selected
    };
    merged.lens.iter().map(of_rank).collect()
}
