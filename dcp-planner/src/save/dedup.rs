//! Chooses the rank that writes a chunk that several ranks have.

use std::cmp::Reverse;

use dcp_core::Rank;

use super::DedupPolicy;
use super::merge::{Merged, MergedKey};

/// For every name, the rows that are written: one for each chunk, in the order of the chunks.
pub(super) fn choose(policy: DedupPolicy, merged: &Merged<'_>) -> Vec<Vec<u32>> {
    let mut writers: Vec<Vec<u32>> = merged
        .keys
        .iter()
        .map(|key| key.chunks.iter().map(|chunk| key.owners_of(chunk)[0]).collect())
        .collect();
    let mut load = Load(vec![0; merged.lens.len()]);
    let keys = || merged.keys.iter().enumerate();
    match policy {
        DedupPolicy::LowestRank => {}
        DedupPolicy::Balanced => {
            let mut shared = Vec::new();
            for (at, key) in keys() {
                for (position, chunk) in key.chunks.iter().enumerate() {
                    match key.owners_of(chunk) {
                        [only] => load.add(key.origin(*only).rank, chunk.byte_len),
                        _ => shared.push((Reverse(chunk.byte_len), at, position)),
                    }
                }
            }
            shared.sort_unstable();
            for (Reverse(byte_len), at, position) in shared {
                let key = &merged.keys[at];
                let row = load.least(key, key.owners_of(&key.chunks[position]));
                load.add(key.origin(row).rank, byte_len);
                writers[at][position] = row;
            }
        }
        DedupPolicy::TorchCompatible => {
            let firsts = keys().flat_map(|(at, key)| {
                let first = |chunk| key.origin(key.owners_of(chunk)[0]);
                key.chunks.iter().enumerate().map(move |(n, chunk)| (first(chunk), at, n))
            });
            let mut order: Vec<_> = firsts.collect();
            order.sort_unstable();
            for (_, at, position) in order {
                let key = &merged.keys[at];
                let row = load.least(key, key.owners_of(&key.chunks[position]));
                load.add(key.origin(row).rank, torch_size(key));
                writers[at][position] = row;
            }
        }
    }
    writers
}

/// What PyTorch counts for an item (`tensor_storage_size() or 1`): the bytes of the whole tensor,
/// even for a chunk.
fn torch_size(key: &MergedKey<'_>) -> u64 {
    let bytes = key.spec.map_or(0, |spec| {
        spec.shape.checked_volume().unwrap_or(u64::MAX).saturating_mul(spec.dtype.size() as u64)
    });
    bytes.max(1)
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
    fn least(&self, key: &MergedKey<'_>, owners: &[u32]) -> u32 {
        let load = |row: &u32| self.0[key.origin(*row).rank as usize];
        owners.iter().copied().min_by_key(load).unwrap_or(0)
    }
}
