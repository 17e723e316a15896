//! Who writes a chunk that several ranks have.

use dcp_core::{Rank, TensorSpec};

use super::DedupPolicy;
use super::merge::{Chunk, Merged, Origin};

/// For every chunk the item that is written.
pub(super) fn choose(policy: DedupPolicy, merged: &Merged<'_>) -> Vec<Origin> {
    let mut writers: Vec<Origin> =
        merged.chunks.iter().map(|chunk| merged.owners_of(chunk)[0]).collect();
    let mut load = Load(vec![0; merged.locals.len()]);
    match policy {
        DedupPolicy::LowestRank => {}
        DedupPolicy::Balanced => {
            let mut shared = Vec::new();
            for (index, chunk) in merged.chunks.iter().enumerate() {
                match merged.owners_of(chunk) {
                    [only] => load.add(only.rank, chunk.byte_len),
                    _ => shared.push(index),
                }
            }
            shared.sort_by_key(|index| std::cmp::Reverse(merged.chunks[*index].byte_len));
            for index in shared {
                let chunk = &merged.chunks[index];
                writers[index] = load.least(merged.owners_of(chunk), writers[index]);
                load.add(writers[index].rank, chunk.byte_len);
            }
        }
        DedupPolicy::TorchCompatible => {
            let order = merged.in_order(writers.clone().into_iter());
            for index in order {
                let Some(chunk) = merged.chunks.get(index as usize) else { continue };
                let index = index as usize;
                writers[index] = load.least(merged.owners_of(chunk), writers[index]);
                load.add(writers[index].rank, torch_size(merged, chunk));
            }
        }
    }
    writers
}

/// What PyTorch counts for an item (`tensor_storage_size() or 1`): the bytes of the whole tensor,
/// even for a chunk.
fn torch_size(merged: &Merged<'_>, chunk: &Chunk) -> u64 {
    let bytes = |spec: &TensorSpec| {
        spec.shape.checked_volume().unwrap_or(u64::MAX).saturating_mul(spec.dtype.size() as u64)
    };
    merged.keys[chunk.key as usize].spec.map_or(0, bytes).max(1)
}

/// Bytes given to each rank so far.
struct Load(Vec<u64>);

impl Load {
    fn add(&mut self, rank: Rank, bytes: u64) {
        let load = &mut self.0[rank as usize];
        *load = load.saturating_add(bytes);
    }

    /// The owner with the least load, the lowest rank among equals. All calls together look at
    /// every offered item once, so no heap would be faster.
    fn least(&self, owners: &[Origin], default: Origin) -> Origin {
        owners.iter().copied().min_by_key(|owner| self.0[owner.rank as usize]).unwrap_or(default)
    }
}
