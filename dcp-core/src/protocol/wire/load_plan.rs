//! Encodes load plans, as columns: reads of layers repeat those of layers before.

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::plans::plan::{LoadPlan, ReadItem, ReadKind};
use crate::tensors::dims::Dims;
use crate::tensors::region::Region;

const LOAD_PLAN: &[u8; 4] = b"dlp2";
/// In place of the number of axes and one more.
const OBJECT: u64 = 0;

/// From number to number of a column; back through zero.
fn step(from: u32, to: u32) -> u64 {
    to.wrapping_sub(from).into()
}

impl LoadPlan {
    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*LOAD_PLAN);
        out.number(self.items.len() as u64);
        let [mut entries, mut leaves, mut kinds, mut chunks, mut shards] =
            [const { Vec::new() }; 5];
        let mut numbers = Vec::new();
        let (mut last_entry, mut last_leaf, mut last_chunk) = (0, 0, 0);
        for item in &self.items {
            entries.push(step(last_entry, item.entry));
            leaves.push(step(last_leaf, item.leaf));
            (last_entry, last_leaf) = (item.entry, item.leaf);
            let ReadKind::Tensor { chunk, shard, region } = &item.kind else {
                kinds.push(OBJECT);
                continue;
            };
            kinds.push(region.ndim() as u64 + 1);
            chunks.push(step(last_chunk, *chunk));
            last_chunk = *chunk;
            shards.push((*shard).into());
            numbers.extend_from_slice(region.offsets());
            numbers.extend_from_slice(region.sizes());
        }
        [entries, leaves, kinds, chunks, shards, numbers].iter().for_each(|all| out.column(all));
        out.finish()
    }

    /// Decodes a message. Takes at most some KiB of memory for each of its bytes.
    ///
    /// # Errors
    ///
    /// When the bytes are not a plan of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *LOAD_PLAN)?;
        let count = usize::try_from(input.number()?).map_err(|_| bad("too many items"))?;
        let mut columns = || input.column(count);
        let (entries, leaves, kinds) = (columns()?, columns()?, columns()?);
        let ndims = kinds.iter().filter_map(|kind| kind.checked_sub(1));
        let (mut tensors, mut axes) = (0, 0);
        for ndim in ndims {
            let ndim = usize::try_from(ndim).ok().filter(|ndim| *ndim <= Dims::MAX_AXES);
            axes += ndim.ok_or_else(|| bad("a region of too many axes"))?;
            tensors += 1;
        }
        let (chunks, shards) = (input.column(tensors)?, input.column(tensors)?);
        let numbers = input.column(2 * axes)?;
        input.finish()?;
        let small = |n: u64| u32::try_from(n).map_err(|_| bad("a number of more than 32 bits"));
        let short = || bad("it ends too early");
        let (mut entry, mut leaf, mut chunk) = (0_u32, 0_u32, 0_u32);
        let mut parts = chunks.into_iter().zip(shards);
        let mut rest = numbers.as_slice();
        let mut plan = Self { items: Vec::with_capacity(count) };
        for ((to_entry, to_leaf), kind) in entries.into_iter().zip(leaves).zip(&kinds) {
            entry = entry.wrapping_add(small(to_entry)?);
            leaf = leaf.wrapping_add(small(to_leaf)?);
            let kind = match kind.checked_sub(1) {
                None => ReadKind::Object,
                Some(ndim) => {
                    let (to_chunk, shard) = parts.next().ok_or_else(short)?;
                    chunk = chunk.wrapping_add(small(to_chunk)?);
                    let row = rest.split_at_checked(2 * ndim as usize);
                    let (row, after) = row.ok_or_else(short)?;
                    rest = after;
                    let (offsets, sizes) = row.split_at(ndim as usize);
                    let region = Region::new(offsets, sizes);
                    let region = region.map_err(|error| bad(error.to_string()))?;
                    ReadKind::Tensor { chunk, shard: small(shard)?, region }
                }
            };
            plan.items.push(ReadItem { entry, leaf, kind });
        }
        Ok(plan)
    }

    /// A 128-bit fingerprint of the plan: equal for equal plans, on every machine. Ranks with equal
    /// fingerprints send only one plan.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        crate::protocol::digest::fnv1a_128(&self.to_wire())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reads_of_1000_tensors_take_tens_of_bytes() {
        let item = |n: u32| {
            let rows = 8 * (1 + u64::from(n % 9));
            let region = Region::new([37 * rows, 0], [rows, 4096]).unwrap();
            let kind = ReadKind::Tensor { chunk: 37, shard: 0, region };
            ReadItem { entry: n, leaf: n, kind }
        };
        let plan = LoadPlan { items: (0..1000).map(item).collect() };
        let wire = plan.to_wire();
        assert!(wire.len() <= 256, "{} bytes", wire.len());
        assert_eq!(LoadPlan::from_wire(&wire), Ok(plan));
    }

    #[test]
    fn load_plans_round_trip_and_damage_is_refused() {
        let region = Region::new([5, 0], [1 << 33, 3]).unwrap();
        let kind = ReadKind::Tensor { chunk: 300, shard: 1, region };
        let plan = LoadPlan {
            items: vec![
                ReadItem { entry: 7, leaf: 2, kind },
                ReadItem { entry: 0, leaf: 9, kind: ReadKind::Object },
            ],
        };
        let wire = plan.to_wire();
        assert_eq!(
            LoadPlan::from_wire(&wire).map(|back| back.fingerprint()),
            Ok(plan.fingerprint())
        );
        assert_ne!(LoadPlan::default().fingerprint(), plan.fingerprint());
        assert_eq!(LoadPlan::from_wire(&wire), Ok(plan));
        for len in 0..wire.len() {
            assert!(LoadPlan::from_wire(&wire[..len]).is_err(), "{len}");
        }
        for at in 0..8 * wire.len() {
            let mut damaged = wire.to_vec();
            damaged[at / 8] ^= 1 << (at % 8);
            let _ = LoadPlan::from_wire(&damaged);
        }
    }
}
