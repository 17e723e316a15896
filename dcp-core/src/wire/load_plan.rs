//! Encodes load plans.

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::plan::{LoadPlan, ReadItem, ReadKind};
use crate::region::Region;

const LOAD_PLAN: &[u8; 4] = b"dlp1";

impl LoadPlan {
    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*LOAD_PLAN);
        out.number(self.items.len() as u64);
        for item in &self.items {
            out.number(item.entry.into());
            out.number(item.leaf.into());
            match &item.kind {
                ReadKind::Object => out.number(0),
                ReadKind::Tensor { chunk, shard, region } => {
                    out.number(1);
                    out.number((*chunk).into());
                    out.number((*shard).into());
                    out.dims(region.offsets());
                    region.sizes().iter().for_each(|n| out.number(*n));
                }
            }
        }
        out.finish()
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a plan of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *LOAD_PLAN)?;
        let mut plan = Self::default();
        for _ in 0..input.count()? {
            let (entry, leaf) = (input.small()?, input.small()?);
            let kind = match input.number()? {
                0 => ReadKind::Object,
                1 => {
                    let (chunk, shard) = (input.small()?, input.small()?);
                    let offsets = input.dims()?;
                    let sizes = input.numbers(offsets.ndim())?;
                    let region =
                        Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))?;
                    ReadKind::Tensor { chunk, shard, region }
                }
                other => return Err(bad(format!("unknown kind of item {other}"))),
            };
            plan.items.push(ReadItem { entry, leaf, kind });
        }
        input.finish()?;
        Ok(plan)
    }

    /// A 128-bit fingerprint of the plan: equal for equal plans, on every machine. Ranks with equal
    /// fingerprints send only one plan.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        crate::digest::fnv1a_128(&self.to_wire())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
