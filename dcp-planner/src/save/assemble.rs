//! From chosen rows to the plan of the whole save.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};
use dcp_core::plan::{GlobalPlan, SelectedItem};
use dcp_core::{CheckpointMetadata, Dims, PlanError};

use super::dedup::Writer;
use super::merge::{Merged, MergedKey, none_of};
use crate::validate::check_chunks;

const NONE: u32 = u32::MAX;

/// The plan in which `writers` write the chunks of every name.
pub(super) fn assemble(
    merged: &Merged<'_>,
    mut writers: Vec<Vec<Writer>>,
    validate: bool,
) -> Result<GlobalPlan, PlanError> {
    for writers in &mut writers {
        writers.sort_unstable_by_key(Writer::position);
    }
    let mut order: Vec<usize> = (0..merged.keys.len()).collect();
    // Entries without a writer come last.
    order.sort_by_key(|at| match writers[*at].first() {
        Some(first) => (false, Some((first.rank, merged.keys[*at].origin(first.row).item))),
        None => (true, None),
    });
    let several = merged.world_size > 1;
    let mut errors = Vec::new();
    let mut metadata = CheckpointMetadata::new();
    let mut entries = vec![NONE; merged.keys.len()];
    // The last valid entry of a shape; most tensors of one shape are divided alike.
    let mut valid: HashMap<&Dims, usize> = HashMap::new();
    for at in order {
        let (key, writers) = (&merged.keys[at], &writers[at]);
        let Some(entry) = entry(key, writers)? else { continue };
        if let (true, Entry::Tensor(tensor)) = (validate, &entry) {
            let before = valid.get(&tensor.shape).and_then(|before| metadata.at(*before));
            let before = before.and_then(|(_, entry)| entry.as_tensor());
            if !before.is_some_and(|before| before.chunks.has_regions_of(&tensor.chunks)) {
                let rank = |chunk: usize| writers.get(chunk).map(|writer| writer.rank);
                check_chunks(key.fqn, &tensor.shape, &tensor.chunks, several, rank, &mut errors);
            }
        }
        let is_stored = !writers.is_empty() || has_no_elements(key);
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
fn entry(key: &MergedKey<'_>, writers: &[Writer]) -> Result<Option<Entry>, PlanError> {
    let Some(spec) = key.spec else {
        let mut object = ObjectEntry::new(None);
        object.path = key.path.cloned();
        return Ok((!writers.is_empty()).then_some(Entry::Object(object)));
    };
    let mut tensor = TensorEntry::new(spec.dtype, spec.shape.clone());
    tensor.path = key.path.cloned();
    for writer in writers {
        let (offsets, sizes) = key.row(writer.row);
        tensor
            .chunks
            .push(offsets, sizes, None)
            .map_err(|error| PlanError::from(error).with_fqn(&**key.fqn))?;
    }
    Ok(Some(Entry::Tensor(tensor)))
}

/// Goes through the items of all offers once more, with a finger in the rows of every name.
///
/// Row n of a name is its n-th item in the order of the offers, so a finger that counts the items of
/// its name finds their rows without a search. `next` is the row of the next chunk to write. Writers are in
/// the order of the chunks, by rank and row; where ranks share an offer, that is not the order of the
/// rows, which [`by_row`] provides.
fn select(merged: &Merged<'_>, writers: &[Vec<Writer>], entries: &[u32]) -> Vec<Vec<SelectedItem>> {
    struct Finger {
        row: u32,
        /// The number of chunks that are written by rows before it.
        written: u32,
        next: u32,
    }
    let replicated = merged.offers.len() < merged.world_size;
    let orders: Vec<Vec<u32>> =
        if replicated { writers.iter().map(|of| by_row(of)).collect() } else { Vec::new() };
    let chunk_after = |at: usize, written: u32| {
        let order = orders.get(at).and_then(|order| order.get(written as usize));
        order.copied().unwrap_or(written)
    };
    let next = |at: usize, chunk: u32| writers[at].get(chunk as usize).map_or(NONE, |of| of.row);
    let start = |at| Finger { row: 0, written: 0, next: next(at, chunk_after(at, 0)) };
    let mut fingers: Vec<Finger> = (0..writers.len()).map(start).collect();
    let mut selections = vec![Vec::new(); merged.world_size];
    let mut rest = merged.item_keys.as_slice();
    for offer in &merged.offers {
        let (mine, others) = rest.split_at(offer.len);
        rest = others;
        for (item, key) in (0..).zip(mine) {
            let at = *key as usize;
            let finger = &mut fingers[at];
            if finger.row == finger.next {
                let chunk = chunk_after(at, finger.written);
                let Writer { rank, .. } = writers[at][chunk as usize];
                selections[rank as usize].push(SelectedItem { item, entry: entries[at], chunk });
                finger.written += 1;
                finger.next = next(at, chunk_after(at, finger.written));
            }
            finger.row += 1;
        }
    }
    selections
}

/// The chunks in the order of the rows that are written; empty where that is their own order.
fn by_row(writers: &[Writer]) -> Vec<u32> {
    if writers.is_sorted_by_key(|writer| writer.row) {
        return Vec::new();
    }
    let mut order: Vec<u32> = (0..writers.len() as u32).collect();
    order.sort_unstable_by_key(|chunk| writers[*chunk as usize].row);
    order
}
