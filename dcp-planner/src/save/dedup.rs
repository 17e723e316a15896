//! Chooses the rank that writes a chunk that several ranks have.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use dcp_core::Rank;

use super::DedupPolicy;
use super::merge::{Merged, MergedKey, Offer};

/// The rank that writes a chunk or an object, and its row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer {
    pub(super) rank: Rank,
    pub(super) row: u32,
}

impl Writer {
    /// The key by which the chunks of a tensor are sorted: the rank, then the item.
    pub(super) fn position(&self) -> u64 {
        u64::from(self.rank) << 32 | u64::from(self.row)
    }
}

/// Chooses the writers of every name: one for each chunk, in the order of the chunks.
pub(super) fn choose(policy: DedupPolicy, merged: &Merged<'_>) -> Vec<Vec<Writer>> {
    let lowest = |key: &MergedKey<'_>, owners: &[u32]| {
        let row = owners[0];
        Writer { rank: merged.offer(key, row).lowest, row }
    };
    let lowest_of = |key: &MergedKey<'_>| {
        key.chunks().iter().map(|chunk| lowest(key, key.owners_of(chunk))).collect()
    };
    let mut writers: Vec<Vec<Writer>> = merged.keys.iter().map(lowest_of).collect();
    let mut loads = Loads::new(merged);
    let keys = || merged.keys.iter().enumerate();
    match policy {
        DedupPolicy::LowestRank => {}
        DedupPolicy::Balanced => {
            let mut shared = Vec::new();
            for (at, key) in keys() {
                for (position, chunk) in key.chunks().iter().enumerate() {
                    match key.owners_of(chunk) {
                        [row] if merged.offer(key, *row).others.is_empty() => {
                            loads.add(writers[at][position].rank, chunk.byte_len);
                        }
                        _ => shared.push((Reverse(chunk.byte_len), at, position)),
                    }
                }
            }
            shared.sort_unstable();
            for (Reverse(byte_len), at, position) in shared {
                let key = &merged.keys[at];
                let writer = loads.least(key, key.owners_of(&key.chunks()[position]));
                loads.add(writer.rank, byte_len);
                writers[at][position] = writer;
            }
        }
        DedupPolicy::TorchCompatible => {
            let firsts = keys().flat_map(|(at, key)| {
                let first = |chunk| {
                    let Writer { rank, row } = lowest(key, key.owners_of(chunk));
                    (rank, key.origin(row).item)
                };
                key.chunks().iter().enumerate().map(move |(n, chunk)| (first(chunk), at, n))
            });
            let mut order: Vec<_> = firsts.collect();
            order.sort_unstable();
            for (_, at, position) in order {
                let key = &merged.keys[at];
                let writer = loads.least(key, key.owners_of(&key.chunks()[position]));
                loads.add(writer.rank, torch_size(key));
                writers[at][position] = writer;
            }
        }
    }
    writers
}

/// The size that PyTorch counts for an item (`tensor_storage_size() or 1`): the bytes of the whole
/// tensor, even for a chunk.
fn torch_size(key: &MergedKey<'_>) -> u64 {
    let bytes = key.spec.map_or(0, |spec| {
        spec.shape.checked_volume().unwrap_or(u64::MAX).saturating_mul(spec.dtype.size() as u64)
    });
    bytes.max(1)
}

/// Bytes given to each rank so far.
struct Loads<'a> {
    offers: &'a [Offer],
    bytes: Vec<u64>,
    /// The ranks of each offer of several, the least busy first.
    queues: Vec<BinaryHeap<Reverse<(u64, Rank)>>>,
}

impl<'a> Loads<'a> {
    fn new(merged: &'a Merged<'_>) -> Self {
        let offers = &merged.offers;
        let queues = offers.iter().map(|_| BinaryHeap::new()).collect();
        Self { offers, bytes: vec![0; merged.world_size], queues }
    }

    fn add(&mut self, rank: Rank, bytes: u64) {
        let load = &mut self.bytes[rank as usize];
        *load = load.saturating_add(bytes);
    }

    /// The owner with the least load, the lowest rank among equals. All calls together look at
    /// every row once.
    fn least(&mut self, key: &MergedKey<'_>, owners: &[u32]) -> Writer {
        let of_row = |row: &u32| (self.least_of(key.origin(*row).offer as usize), *row);
        let ((_, rank), row) = owners.iter().map(of_row).min().unwrap_or_default();
        Writer { rank, row }
    }

    /// The least load of an offer's ranks, and the lowest rank that has it.
    fn least_of(&mut self, offer: usize) -> (u64, Rank) {
        let Offer { lowest, others, .. } = &self.offers[offer];
        if others.is_empty() {
            return (self.bytes[*lowest as usize], *lowest);
        }
        let queue = &mut self.queues[offer];
        if queue.is_empty() {
            let ranks = std::iter::once(lowest).chain(others);
            queue.extend(ranks.map(|rank| Reverse((self.bytes[*rank as usize], *rank))));
        }
        // Loads only grow, so that an entry is corrected when it comes up, and the one that is right
        // then is the least.
        while let Some(mut top) = queue.peek_mut() {
            let Reverse((load, rank)) = *top;
            let now = self.bytes[rank as usize];
            if load == now {
                return (load, rank);
            }
            *top = Reverse((now, rank));
        }
        (0, 0)
    }
}
