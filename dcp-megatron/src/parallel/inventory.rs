//! The inventory of a rank: its shards, without data.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::digest::Sha256;
use dcp_core::error::TensorError;
use dcp_core::plan::{PlanKey, SavePlan, TensorSpec};
use dcp_core::{DType, Dims, PlanError, Region};

use crate::error::MegatronError;
use crate::sharded::ShardedTensor;

/// The shards of one rank, without data, in the order in which they were pushed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The names and boxes of all shards: what all replicas have alike.
    pub(super) shards: SavePlan,
    /// By shard, whether this rank has the main replica: what replicas do not have alike.
    pub(super) main: Vec<bool>,
}

/// 128 bits that are equal for equal inventories.
pub(super) type Fingerprint = [u8; 16];

impl Inventory {
    /// The shards of a rank, in the order given.
    ///
    /// # Errors
    ///
    /// When a shard is a flattened one of Megatron-Core 0.15 or earlier, which no version from 0.16
    /// on saves.
    pub fn of<'a>(
        tensors: impl IntoIterator<Item = &'a ShardedTensor>,
    ) -> Result<Self, MegatronError> {
        let mut inventory = Self::default();
        let mut keys: HashMap<(Arc<str>, DType, Dims), usize> = HashMap::new();
        for tensor in tensors {
            if tensor.flattened_range().is_some() {
                return Err(TensorError::Invalid {
                    fqn: Some(tensor.key().to_string()),
                    problem: "it is a flattened shard; pass the shard with its region".into(),
                }
                .into());
            }
            let (dtype, shape) = (tensor.dtype(), tensor.global_shape().clone());
            let known = (Arc::clone(tensor.key()), dtype, shape.clone());
            let key = *keys.entry(known).or_insert_with(|| {
                let fqn = Arc::clone(tensor.key());
                let tensor = Some(TensorSpec { dtype, shape, sharded: true });
                inventory.shards.push_key(PlanKey { fqn, path: None, tensor })
            });
            inventory.push(key, tensor.region(), tensor.replica_id().is_main())?;
        }
        Ok(inventory)
    }

    fn push(&mut self, key: usize, region: &Region, main: bool) -> Result<(), PlanError> {
        self.shards.push_chunk(key, region)?;
        self.main.push(main);
        Ok(())
    }

    /// The number of shards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.main.len()
    }

    /// Whether the rank holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.main.is_empty()
    }

    /// Bytes of the shards that `which` has at their positions.
    pub(super) fn byte_len(&self, which: &[bool]) -> u64 {
        let chosen = self.shards.items().zip(which).filter(|(_, chosen)| **chosen);
        chosen.map(|(item, _)| item.byte_len).fold(0, u64::saturating_add)
    }

    /// Of all but what is a main replica.
    pub(super) fn shards_fingerprint(&self) -> Fingerprint {
        digest([&*self.shards.to_wire()])
    }

    pub(super) fn fingerprint(&self) -> Fingerprint {
        digest([&*self.shards.to_wire(), &pack(&self.main)])
    }

    /// The message with this inventory; without the shards where the receiver has the same ones of
    /// another rank.
    pub(super) fn to_wire(&self, with_shards: bool) -> Bytes {
        let main = pack(&self.main);
        let shards = if with_shards { self.shards.to_wire() } else { Bytes::new() };
        [&(main.len() as u64).to_le_bytes()[..], &main, &shards].concat().into()
    }

    /// The main replicas, of which there are `len`, and the shards where they were sent.
    pub(super) fn from_wire(
        bytes: &[u8],
        len: usize,
    ) -> Result<(Vec<bool>, Option<SavePlan>), PlanError> {
        let bad = || PlanError::message("the shards of a rank", "it ends too early");
        let (main_len, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
        let main_len = usize::try_from(u64::from_le_bytes(*main_len)).map_err(|_| bad())?;
        let (main, shards) = rest.split_at_checked(main_len).ok_or_else(bad)?;
        let main = unpack(main, len).ok_or_else(bad)?;
        let shards = match shards {
            [] => None,
            _ => Some(SavePlan::from_wire(shards)?),
        };
        if shards.as_ref().is_some_and(|shards| shards.len() != len) {
            return Err(bad());
        }
        Ok((main, shards))
    }
}

/// The first half of the SHA-256 of all parts.
pub(super) fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Fingerprint {
    let mut hash = Sha256::new();
    parts.into_iter().for_each(|part| hash.update_with_length(part));
    let mut half = Fingerprint::default();
    half.iter_mut().zip(hash.finish()).for_each(|(to, from)| *to = from);
    half
}

/// Eight to a byte.
pub(super) fn pack(bits: &[bool]) -> Vec<u8> {
    let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
    bits.chunks(8).map(byte).collect()
}

/// The `len` bits of [`pack`]; `None` when there are more or fewer bytes than that takes.
pub(super) fn unpack(bytes: &[u8], len: usize) -> Option<Vec<bool>> {
    if bytes.len() != len.div_ceil(8) {
        return None;
    }
    let bits = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
    Some(bits.take(len).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_come_back(bits in prop::collection::vec(any::<bool>(), 0..40)) {
            prop_assert_eq!(unpack(&pack(&bits), bits.len()), Some(bits.clone()));
            prop_assert_eq!(unpack(&pack(&bits), bits.len() + 8), None);
        }
    }

    #[test]
    fn inventories_travel_and_damage_is_refused() {
        let mut inventory = Inventory::default();
        let spec = TensorSpec { dtype: DType::Float32, shape: [4, 6].into(), sharded: true };
        let key = PlanKey { fqn: "a".into(), path: None, tensor: Some(spec) };
        let key = inventory.shards.push_key(key);
        for column in 0..3 {
            let region = Region::new([0, column * 2], [4, 2]).unwrap();
            inventory.push(key, &region, column == 1).unwrap();
        }
        let (main, shards) = (inventory.main.clone(), inventory.shards.clone());
        let wire = inventory.to_wire(true);
        assert_eq!(Inventory::from_wire(&wire, 3), Ok((main.clone(), Some(shards))));
        assert_eq!(Inventory::from_wire(&inventory.to_wire(false), 3), Ok((main, None)));
        assert!(Inventory::from_wire(&wire, 4).is_err());
        assert!(Inventory::from_wire(&wire, 9).is_err());
        for len in 0..9 {
            assert!(Inventory::from_wire(&wire[..len], 3).is_err(), "{len} bytes");
        }
        let mut other = inventory.clone();
        other.main[0] = true;
        assert_eq!(other.shards_fingerprint(), inventory.shards_fingerprint());
        assert_ne!(other.fingerprint(), inventory.fingerprint());
    }
}
