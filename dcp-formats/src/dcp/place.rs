//! Computes the placement of every item from lengths that are known before the first byte: those
//! before compression, which [`WriteReport::stored`](dcp_core::checkpoint::WriteReport) corrects.

use std::collections::HashMap;

use dcp_core::error::{PlanMaker, PlanProblem};
use dcp_core::metadata::{Encoding, Entry, FileId, Placement};
use dcp_core::plan::{GlobalPlan, SavePlan, SelectedItem, WriteItem, WriteOrder, WritePlan};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Dims, Key, PlanError, StorageError};

use super::compression::Compression;
use super::names::data_file;
use super::split::{FileLayout, ItemSize};
use super::write::encoded_len;
use crate::expansion::ItemKind;

pub(super) fn place(
    layout: FileLayout,
    compression: &Compression,
    generation: u64,
    locals: &[SavePlan],
    global: &mut GlobalPlan,
) -> Result<Vec<WritePlan>, CheckpointError> {
    let GlobalPlan { metadata, selections, .. } = global;
    let (expected, found) = (locals.len(), selections.len());
    if expected != found {
        let made_by = PlanMaker::Planner(None);
        return Err(PlanError::Plan(PlanProblem::Count { made_by, expected, found }).into());
    }
    let encodings = compression.encodings();
    let mut lens = Lengths::default();
    let mut plans = Vec::with_capacity(locals.len());
    for (rank, (local, selected)) in locals.iter().zip(&*selections).enumerate() {
        let sizes = selected
            .iter()
            .map(|selected| lens.size(item(local, selected)?))
            .collect::<Result<Vec<_>, CheckpointError>>()?;
        let mut plan = WritePlan { encodings: encodings.clone(), ..WritePlan::default() };
        for (n, items) in layout.split(&sizes).into_iter().enumerate() {
            let key = data_file(rank, n, generation).map_err(StorageError::from)?;
            let file = FileId::from_index(plan.files.len()).ok_or_else(too_many)?;
            let mut at = 0_u64;
            for index in items {
                let (Some(size), Some(selected)) = (sizes.get(index), selected.get(index)) else {
                    continue;
                };
                let end = at.checked_add(size.byte_len).ok_or_else(too_many)?;
                let number = compression.encoding_of(ItemKind::of(size.is_tensor), size.byte_len);
                let placement =
                    Placement { file, encoding: number, byte_offset: at, byte_len: size.byte_len };
                plan.orders.push(WriteOrder { item: selected.item, placement });
                if let Some(encoding) = encodings.get(usize::from(number)) {
                    record(metadata, selected, &key, encoding, placement)?;
                }
                at = end;
            }
            plan.files.push(key);
        }
        plans.push(plan);
    }
    Ok(plans)
}

fn item<'a>(local: &'a SavePlan, selected: &SelectedItem) -> Result<WriteItem<'a>, PlanError> {
    let (number, items) = (selected.item.into(), local.len() as u64);
    local.item(selected.item as usize).ok_or(PlanError::no_item(number, items))
}

/// Records an item's placement in the metadata, whose file ids are its own.
fn record(
    metadata: &mut CheckpointMetadata,
    selected: &SelectedItem,
    key: &Key,
    encoding: &Encoding,
    placement: Placement,
) -> Result<(), PlanError> {
    let file = metadata.intern_file(key).ok_or_else(too_many)?;
    let encoding = metadata.intern_encoding(encoding).ok_or_else(too_many)?;
    let placement = Placement { file, encoding, ..placement };
    match metadata.at_mut(selected.entry as usize) {
        Some((_, Entry::Tensor(tensor))) if (selected.chunk as usize) < tensor.chunks.len() => {
            tensor.chunks.place(selected.chunk as usize, placement);
            Ok(())
        }
        Some((_, Entry::Object(object))) => {
            object.placement = Some(placement);
            Ok(())
        }
        _ => Err(PlanError::no_entry(selected.entry.into(), Some(selected.chunk.into()))),
    }
}

/// Encoded lengths, each computed once: most chunks of a sharded tensor have one size.
#[derive(Default)]
struct Lengths(HashMap<(DType, Dims), u64>);

impl Lengths {
    fn size(&mut self, item: WriteItem<'_>) -> Result<ItemSize, CheckpointError> {
        let Some(spec) = &item.key.tensor else {
            let byte_len = item.byte_len;
            return Ok(ItemSize { is_tensor: false, byte_len, chunk_bytes: 0, global_bytes: 0 });
        };
        let key = (spec.dtype, Dims::from(item.sizes));
        let byte_len = match self.0.get(&key) {
            Some(len) => *len,
            None => {
                let len = encoded_len(&item.key.fqn, spec.dtype, item.sizes)?;
                self.0.insert(key, len);
                len
            }
        };
        let volume = spec.shape.checked_volume().unwrap_or(u64::MAX);
        let global_bytes = volume.saturating_mul(spec.dtype.size() as u64);
        Ok(ItemSize { is_tensor: true, byte_len, chunk_bytes: item.byte_len, global_bytes })
    }
}

fn too_many() -> PlanError {
    let what = "the number of files, or the length of a file in bytes,".to_owned();
    PlanError::TooLarge { what, limit: u32::MAX.into() }
}
