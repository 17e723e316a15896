//! Encodes save plans: an outline, which is mostly the same on many ranks, and the values that differ.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::plan_outline::{self, Outline};
use super::{MessageReader, MessageWriter, PlanSummary, bad, plan_keys, plan_values};
use crate::error::{PlanError, RanksProblem};
use crate::names::rank::Rank;
use crate::plans::plan::{PlanKey, SavePlan};
use crate::protocol::digest::fnv1a_128;

const SAVE_PLAN: &[u8; 4] = b"dsp3";
/// A plan without its outline.
const VALUES: &[u8; 4] = b"dsv1";

/// A save plan as messages.
///
/// The *outline* of a plan, its names, dtypes and shapes and which items have the same region, takes
/// most of the bytes and is the same on ranks that hold other parts of the same tensors. The *values*,
/// regions and lengths of objects, take some tens of bytes where tensors are divided regularly.
#[derive(Clone, Debug)]
pub struct PlanParts {
    outline: Vec<u8>,
    values: Vec<u8>,
    summary: PlanSummary,
    /// The half of the outline's hash that the summary does not have.
    outline_check: u64,
}

impl PlanParts {
    /// The hashes that identify the plan among those of a group.
    #[must_use]
    pub fn summary(&self) -> PlanSummary {
        self.summary
    }

    /// The whole plan, for [`SavePlan::from_wire`].
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*SAVE_PLAN);
        out.bytes(&self.outline);
        out.0.extend_from_slice(&self.values);
        out.finish()
    }

    /// The plan without its outline, for a receiver that has one from another rank.
    pub(super) fn values(&self) -> Bytes {
        let mut out = MessageWriter::new(*VALUES);
        out.0.extend_from_slice(&self.outline_check.to_le_bytes());
        out.0.extend_from_slice(&self.values);
        out.finish()
    }
}

/// Two independent halves of the hash of an outline.
fn halves(hash: u128) -> (u64, u64) {
    let (high, low) = ((hash >> 64) as u64, hash as u64);
    (high ^ low, low)
}

impl SavePlan {
    /// Encodes the plan.
    #[must_use]
    pub fn to_parts(&self) -> PlanParts {
        let (outline, values) = plan_outline::encode(self);
        let hash = fnv1a_128(&outline);
        let (id, outline_check) = halves(hash);
        let fingerprint = fnv1a_128(&[&hash.to_le_bytes(), &*values].concat());
        let summary = PlanSummary { fingerprint, outline: id };
        PlanParts { outline, values, summary, outline_check }
    }

    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        self.to_parts().to_wire()
    }

    /// A 128-bit fingerprint of the plan: equal for equal plans, on every machine. It covers dtypes
    /// and paths too; ranks compare it with that of the last save.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        self.to_parts().summary.fingerprint
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a plan of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        PlanReceiver::default().whole(bytes).map(|(plan, _)| plan)
    }
}

/// An error in the plan that `rank` sent.
pub(super) fn of_rank(error: PlanError, rank: usize) -> PlanError {
    let rank = Rank::try_from(rank).unwrap_or(Rank::MAX);
    match error {
        PlanError::Ranks(RanksProblem::Message { problem, .. }) => {
            PlanError::message(format!("the plan of rank {rank}"), problem)
        }
        other => other,
    }
}

/// Decodes the plans of a group. Memory for one rank's plan is at most a KiB for each byte of the
/// outline that it refers to.
#[derive(Debug, Default)]
pub(super) struct PlanReceiver<'a> {
    keys: HashMap<&'a [u8], Arc<Vec<PlanKey>>>,
}

impl<'a> PlanReceiver<'a> {
    /// Decodes a whole plan. Plans with the same keys share a table of them.
    pub(super) fn whole(&mut self, message: &'a [u8]) -> Result<(SavePlan, Outline), PlanError> {
        let mut input = MessageReader::new(message, *SAVE_PLAN)?;
        let outline = Outline::decode(input.bytes()?, &mut |encoded| {
            if let Some(keys) = self.keys.get(encoded) {
                return Ok(Arc::clone(keys));
            }
            let keys = Arc::new(plan_keys::decode(encoded)?);
            self.keys.insert(encoded, Arc::clone(&keys));
            Ok(keys)
        })?;
        Ok((plan_of(input, &outline)?, outline))
    }

    /// The half of a hash that begins the values for the outline of a whole plan.
    pub(super) fn outline_check(message: &[u8]) -> Result<u64, PlanError> {
        let outline = MessageReader::new(message, *SAVE_PLAN)?.bytes()?;
        Ok(halves(fnv1a_128(outline)).1)
    }

    /// Decodes values for an outline.
    pub(super) fn values(
        message: &[u8],
        outline: &Outline,
        outline_check: u64,
    ) -> Result<SavePlan, PlanError> {
        let mut input = MessageReader::new(message, *VALUES)?;
        if u64::from_le_bytes(input.array()?) != outline_check {
            return Err(bad("it is of another outline"));
        }
        plan_of(input, outline)
    }
}

fn plan_of(mut input: MessageReader<'_>, outline: &Outline) -> Result<SavePlan, PlanError> {
    let (values, unoffered) = plan_values::decode(&mut input, outline)?;
    input.finish()?;
    Ok(SavePlan {
        outline: Arc::clone(&outline.shared),
        values: Arc::new(values),
        unoffered: Arc::new(unoffered),
    })
}

#[cfg(test)]
mod tests {
    use super::super::PlanRequest;
    use super::*;
    use crate::names::key::Key;
    use crate::plans::metadata::{Encoding, FileId, Placement};
    use crate::plans::plan::{TensorSpec, Unoffered, WriteOrder, WritePlan};
    use crate::state::path::{PathItem, StatePath};
    use crate::tensors::dtype::DType;
    use crate::tensors::region::Region;

    fn plan() -> SavePlan {
        let mut plan = SavePlan::new();
        let spec = TensorSpec { dtype: DType::BFloat16, shape: [1 << 40, 3].into(), sharded: true };
        let path: StatePath = [PathItem::Key("a".into()), PathItem::Index(300)].into();
        let tensor =
            plan.push_key(PlanKey { fqn: "a.é".into(), path: Some(path), tensor: Some(spec) });
        let object = plan.push_key(PlanKey { fqn: "".into(), path: None, tensor: None });
        plan.push_chunk(tensor, &Region::new([5, 0], [1 << 33, 3]).unwrap()).unwrap();
        plan.push_object(object, 1261).unwrap();
        plan.push_chunk(tensor, &Region::new([0, 0], [5, 3]).unwrap()).unwrap();
        let region = Some(Region::new([7], [1 << 40]).unwrap());
        plan.unoffered = Arc::new(vec![
            Unoffered { fqn: "b".into(), region },
            Unoffered { fqn: "c".into(), region: None },
        ]);
        plan
    }

    #[test]
    fn save_plans_round_trip() {
        let plan = plan();
        let wire = plan.to_wire();
        let back = SavePlan::from_wire(&wire).unwrap();
        assert_eq!(back.keys(), plan.keys());
        assert_eq!(back.unoffered, plan.unoffered);
        assert_eq!(back.to_wire(), wire);
        assert_eq!(back.item(1).unwrap().byte_len, 1261);
        assert_eq!(back.item(2).unwrap().byte_len, 30);
        assert_eq!(back.fingerprint(), plan.fingerprint());
    }

    #[test]
    fn plans_with_the_same_keys_share_them() {
        let (one, mut divided, mut other) = (plan(), plan(), plan());
        divided.push_object(1, 7).unwrap();
        other.push_key(PlanKey { fqn: "z".into(), path: None, tensor: None });
        let plans = [&one, &one, &divided, &other];
        let parts = plans.map(SavePlan::to_parts);
        let summaries = parts.each_ref().map(PlanParts::summary);
        let request = PlanRequest::of(&summaries);
        let answers = [0, 1, 2, 3].map(|rank| request.answer(rank as Rank, &parts[rank]));
        let back = SavePlan::from_answers(&summaries, &answers).unwrap();
        let shares = |at: usize| back[0].shares_keys_with(&back[at]);
        assert_eq!([1, 2, 3].map(shares), [true, true, false]);
        for (back, plan) in back.iter().zip(plans) {
            assert_eq!(back.to_wire(), plan.to_wire());
        }
        let mut changed = back[1].clone();
        changed.push_key(PlanKey { fqn: "y".into(), path: None, tensor: None });
        assert_eq!(back[0].keys().len() + 1, changed.keys().len());
    }

    /// 73 kB in PyTorch 2.15.
    #[test]
    fn the_plan_of_500_shards_is_small() {
        let mut plan = SavePlan::new();
        let mut write =
            WritePlan { files: vec![Key::new("__37_0.distcp").unwrap()], ..WritePlan::default() };
        write.encodings.push(Encoding::default());
        let mut byte_offset = 0;
        for n in 0..500_u64 {
            let name = format!("layers.{}.mlp.part{}.weight", n / 5, n % 5);
            let shape = [8192, 4096 * (1 + n % 5)];
            let spec = TensorSpec { dtype: DType::BFloat16, shape: shape.into(), sharded: true };
            let path = [PathItem::Key("model".into()), PathItem::Key(name.as_str().into())];
            let fqn = format!("model.{name}").into();
            let key = plan.push_key(PlanKey { fqn, path: Some(path.into()), tensor: Some(spec) });
            let region = Region::new([8 * 37, 0], [8, shape[1]]).unwrap();
            plan.push_chunk(key, &region).unwrap();
            let byte_len = region.volume() * 2 + 1577;
            let file = FileId::from_index(0).unwrap();
            let placement = Placement { file, encoding: 0, byte_offset, byte_len };
            write.orders.push(WriteOrder { item: n as u32, placement });
            byte_offset += byte_len;
        }
        let (sent, received) = (plan.to_wire(), write.to_wire());
        assert_eq!(SavePlan::from_wire(&sent).unwrap().to_wire(), sent);
        assert_eq!(WritePlan::from_wire(&received), Ok(write));
        assert!(sent.len() + received.len() < 7300, "{} and {}", sent.len(), received.len());
    }

    #[test]
    fn damaged_messages_are_refused_without_a_panic() {
        let wire = plan().to_wire();
        for len in 0..wire.len() {
            assert!(SavePlan::from_wire(&wire[..len]).is_err(), "{len}");
        }
        for at in 0..wire.len() {
            for bit in 0..8 {
                let mut damaged = wire.to_vec();
                damaged[at] ^= 1 << bit;
                let _ = SavePlan::from_wire(&damaged);
                let _ = WritePlan::from_wire(&damaged);
            }
        }
        let huge = [&SAVE_PLAN[..], &[0xff; 9], &[1]].concat();
        assert!(SavePlan::from_wire(&huge).is_err());
    }
}
