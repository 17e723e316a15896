//! Offers: fingerprints of plans that ranks exchange before any plan is sent, to find which of them share.

use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, Rank, Region};

use super::cost_model::{Needed, Needs};
use crate::metadata_lookup::{bad_message, object_bytes, tensor_dtype};

/// A rank's first message to all others: [`LEN`](Self::LEN) bytes for a plan of any length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// A fingerprint of what the rank shares only as a whole; 0 if that is nothing.
    plan: u128,
    /// A fingerprint of its objects, if they are no part of `plan`.
    objects: u64,
    /// The bytes that the rank needs.
    byte_len: u64,
    machine: Option<u64>,
}

/// The ranks that share their reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sharers {
    /// The first rank with the same plan; `None` for a rank that reads by itself.
    pub(crate) plan_of: Vec<Option<Rank>>,
    /// By that first rank, whether all its sharers need the same objects.
    same_objects: HashMap<Rank, bool>,
}

impl Offer {
    pub(crate) const LEN: usize = 40;

    /// Makes the offer of a rank with this plan. With `replicas_only`, ranks with the same tensors share
    /// them, also where their objects differ: states of random generators and data loaders are of one rank.
    pub(crate) fn of(
        metadata: &CheckpointMetadata,
        plan: &LoadPlan,
        replicas_only: bool,
        machine: Option<u64>,
    ) -> Self {
        let byte_len = plan.items.iter().map(|item| byte_len(metadata, item));
        let byte_len = byte_len.fold(0, u64::saturating_add);
        let mut offer = Self { byte_len, machine, ..Self::default() };
        let of_kind = |tensors: bool| LoadPlan {
            items: stored(plan).filter(|item| is_tensor(item) == tensors).collect(),
        };
        let mut whole = match replicas_only {
            true => of_kind(true),
            false => LoadPlan { items: stored(plan).collect() },
        };
        if replicas_only {
            let objects = of_kind(false);
            // A collision makes a load fail, which misses an object then.
            offer.objects = objects.fingerprint() as u64;
            if whole.items.is_empty() {
                whole = objects;
            }
        }
        if !whole.items.is_empty() {
            offer.plan = whole.fingerprint();
        }
        offer
    }

    pub(crate) fn machine(&self) -> Option<u64> {
        self.machine
    }

    pub(crate) fn to_wire(self) -> Bytes {
        let mut out = Vec::with_capacity(Self::LEN + 1);
        out.extend_from_slice(&self.plan.to_le_bytes());
        for number in [self.objects, self.byte_len, self.machine.unwrap_or(0)] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.into()
    }

    pub(crate) fn from_wire(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let bad = || bad_message("the offer of a rank has another length");
        let (plan, rest) = bytes.split_first_chunk::<16>().ok_or_else(bad)?;
        let (numbers, rest) = rest.as_chunks::<8>();
        let ([objects, byte_len, machine], []) = (numbers, rest) else { return Err(bad()) };
        let [objects, byte_len, machine] =
            [objects, byte_len, machine].map(|n| u64::from_le_bytes(*n));
        let plan = u128::from_le_bytes(*plan);
        Ok(Self { plan, objects, byte_len, machine: Some(machine).filter(|name| *name != 0) })
    }
}

impl Sharers {
    /// With `replicas_only`, a rank shares if another one offers the same; else all do.
    pub(crate) fn of(offers: &[Offer], replicas_only: bool) -> Self {
        let mut firsts: HashMap<u128, (Rank, u32)> = HashMap::with_capacity(offers.len());
        let mut same_objects = HashMap::new();
        for (rank, offer) in (0..).zip(offers) {
            let (first, ranks) = firsts.entry(offer.plan).or_insert((rank, 0));
            *ranks += 1;
            let same =
                offers.get(*first as usize).map(|first| first.objects) == Some(offer.objects);
            *same_objects.entry(*first).or_insert(true) &= same;
        }
        let plan_of = offers.iter().map(|offer| {
            let (first, ranks) = firsts.get(&offer.plan)?;
            (!replicas_only || *ranks > 1 && offer.plan != 0).then_some(*first)
        });
        let plan_of: Vec<_> = plan_of.collect();
        same_objects.retain(|first, _| plan_of.get(*first as usize) == Some(&Some(*first)));
        Self { plan_of, same_objects }
    }

    /// Whether every rank reads by itself.
    pub(crate) fn is_empty(&self) -> bool {
        self.plan_of.iter().all(Option::is_none)
    }

    fn of_rank(&self, rank: Rank) -> Option<Rank> {
        self.plan_of.get(rank as usize).copied().flatten()
    }

    /// The plan that this rank sends for all with the same one, without the leaves of its state. `None` if
    /// another rank sends it, or nothing is shared.
    pub(crate) fn sent(&self, rank: Rank, plan: &LoadPlan) -> Option<LoadPlan> {
        let first = self.of_rank(rank).filter(|first| *first == rank)?;
        let all = self.same_objects.get(&first).copied().unwrap_or(true);
        Some(LoadPlan { items: stored(plan).filter(|item| all || is_tensor(item)).collect() })
    }

    /// Splits the plan of a rank into the part that it shares, and the part that it reads by itself.
    pub(crate) fn split<'a>(
        &self,
        rank: Rank,
        plan: &'a LoadPlan,
    ) -> (Cow<'a, LoadPlan>, LoadPlan) {
        let Some(first) = self.of_rank(rank) else {
            return (Cow::Owned(LoadPlan::default()), plan.clone());
        };
        if self.same_objects.get(&first).copied().unwrap_or(true) {
            return (Cow::Borrowed(plan), LoadPlan::default());
        }
        let (tensors, objects) = plan.items.iter().cloned().partition(is_tensor);
        (Cow::Owned(LoadPlan { items: tensors }), LoadPlan { items: objects })
    }

    /// The bytes of the ranks that read by themselves.
    pub(crate) fn alone(&self, offers: &[Offer]) -> Vec<(Rank, u64)> {
        let ranks = (0..).zip(self.plan_of.iter().zip(offers));
        let alone = ranks.filter(|(_, (plan, _))| plan.is_none());
        alone.map(|(rank, (_, offer))| (rank, offer.byte_len)).collect()
    }

    /// The least needs of a division: those of one in which all ranks with the same plan read as much.
    pub(crate) fn needs(&self, offers: &[Offer], machines: &[Rank]) -> Needs {
        let mut ranks_of: HashMap<Rank, Vec<Rank>> = HashMap::new();
        for (rank, plan) in (0..).zip(&self.plan_of) {
            if let Some(first) = plan {
                ranks_of.entry(*first).or_default().push(rank);
            }
        }
        let mut needed = Needed::new(machines);
        let (mut sent, mut to_send, mut kept) = (0_u64, 0, 0);
        for (first, ranks) in ranks_of {
            let byte_len = offers.get(first as usize).map_or(0, |offer| offer.byte_len);
            needed.add(byte_len, &ranks);
            sent = sent.saturating_add(byte_len);
            to_send = to_send.max(byte_len / ranks.len().max(1) as u64);
        }
        for (rank, byte_len) in self.alone(offers) {
            needed.add(byte_len, &[rank]);
            kept = kept.max(byte_len);
        }
        needed.needs(sent, to_send, kept)
    }
}

/// The items without their places in the state of a rank, and without those that have no elements:
/// what is left is the same for ranks that need the same, wherever they have it.
fn stored(plan: &LoadPlan) -> impl Iterator<Item = ReadItem> {
    plan.items.iter().filter_map(|item| {
        let kind = match &item.kind {
            ReadKind::Tensor { region, .. } if region.is_empty() => return None,
            ReadKind::Tensor { chunk, region, .. } => {
                ReadKind::Tensor { chunk: *chunk, shard: 0, region: Region::clone(region) }
            }
            other => other.clone(),
        };
        Some(ReadItem { entry: item.entry, leaf: 0, kind })
    })
}

fn is_tensor(item: &ReadItem) -> bool {
    matches!(item.kind, ReadKind::Tensor { .. })
}

fn byte_len(metadata: &CheckpointMetadata, item: &ReadItem) -> u64 {
    let ReadKind::Tensor { region, .. } = &item.kind else {
        return object_bytes(metadata, item.entry);
    };
    // A read or a division names the tensor that is not there.
    let size = tensor_dtype(metadata, item.entry).map_or(0, |dtype| dtype.size());
    region.volume().saturating_mul(size as u64)
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};

    use super::*;

    /// Two tensors of 100 bytes and two objects of unknown length.
    fn stored_here() -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for name in ["w0", "w1"] {
            let mut tensor = TensorEntry::new(DType::Int8, [100]);
            tensor.chunks.push(&[0], &[100], None).unwrap();
            metadata.insert(name, Entry::Tensor(tensor));
        }
        for name in ["o0", "o1"] {
            metadata.insert(name, Entry::Object(ObjectEntry::new(None)));
        }
        metadata
    }

    /// Of an entry, the first elements, or an object; the leaves count from `leaf`.
    fn plan(leaf: u32, items: &[(u32, Option<u64>)]) -> LoadPlan {
        let item = |(leaf, (entry, len)): (u32, &(u32, Option<u64>))| {
            let kind = match len {
                Some(len) => {
                    let region = Region::new([0], [*len]).unwrap();
                    ReadKind::Tensor { chunk: 0, shard: leaf, region }
                }
                None => ReadKind::Object,
            };
            ReadItem { entry: *entry, leaf, kind }
        };
        LoadPlan { items: (leaf..).zip(items).map(item).collect() }
    }

    fn offer(items: &[(u32, Option<u64>)], replicas_only: bool) -> Offer {
        Offer::of(&stored_here(), &plan(7, items), replicas_only, None)
    }

    const WHOLE: [(u32, Option<u64>); 3] = [(0, Some(100)), (1, Some(100)), (2, None)];

    #[test]
    fn offers_travel_in_40_bytes() {
        for machine in [None, Some(u64::MAX)] {
            let offer = Offer::of(&stored_here(), &plan(0, &WHOLE), true, machine);
            let wire = offer.to_wire();
            assert_eq!(wire.len(), Offer::LEN);
            assert_eq!(Offer::from_wire(&wire).unwrap(), offer);
            assert_eq!((offer.machine(), offer.byte_len), (machine, 200));
            assert!(Offer::from_wire(&wire[1..]).is_err());
            assert!(Offer::from_wire(&[&*wire, &[0]].concat()).is_err());
        }
    }

    #[test]
    fn ranks_offer_the_same_wherever_they_have_it() {
        let [here, there] = [0, 9].map(|leaf| plan(leaf, &WHOLE));
        for replicas_only in [true, false] {
            let of = |plan: &LoadPlan| Offer::of(&stored_here(), plan, replicas_only, None);
            assert_eq!(of(&here), of(&there));
            assert_eq!(of(&plan(0, &[(0, Some(0))])).plan, 0);
            assert_ne!(of(&here).plan, of(&plan(0, &WHOLE[1..])).plan);
        }
        // Other objects are no other tensors, but another plan.
        let other = [WHOLE[0], WHOLE[1], (3, None)];
        assert_eq!(offer(&WHOLE, true).plan, offer(&other, true).plan);
        assert_ne!(offer(&WHOLE, true).objects, offer(&other, true).objects);
        assert_ne!(offer(&WHOLE, false).plan, offer(&other, false).plan);
    }

    #[test]
    fn ranks_share_with_the_first_that_offers_the_same() {
        let part = [(0, Some(50))];
        let [whole, part, nothing] = [&WHOLE[..], &part, &[]].map(|items| offer(items, true));
        let sharers = Sharers::of(&[whole, part, nothing, whole, nothing], true);
        assert_eq!(sharers.plan_of, [Some(0), None, None, Some(0), None]);
        assert_eq!(sharers.alone(&[whole, part, nothing]), [(1, 50), (2, 0)]);
        assert!(!sharers.is_empty());
        let mine = plan(5, &WHOLE);
        assert_eq!(sharers.sent(0, &mine).map(|plan| plan.items.len()), Some(3));
        assert_eq!(sharers.sent(1, &mine), None);
        assert_eq!(sharers.sent(3, &mine), None);
        assert_eq!(sharers.split(3, &mine), (Cow::Borrowed(&mine), LoadPlan::default()));
        assert_eq!(sharers.split(1, &mine).1, mine);
        assert!(Sharers::of(&[whole, part, nothing, nothing], true).is_empty());
        // Without the option every rank takes part, each with a plan of its own.
        let all = Sharers::of(&[whole, part, whole], false);
        assert_eq!(all.plan_of, [Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn objects_are_shared_where_all_sharers_need_the_same() {
        let other = [WHOLE[0], WHOLE[1], (3, None)];
        let [one, other, objects] =
            [&WHOLE[..], &other, &[(3, None)]].map(|items| offer(items, true));
        let sharers = Sharers::of(&[one, one, other, objects, objects], true);
        assert_eq!(sharers.plan_of, [Some(0), Some(0), Some(0), Some(3), Some(3)]);
        let mine = plan(5, &WHOLE);
        assert_eq!(sharers.sent(0, &mine).map(|plan| plan.items.len()), Some(2));
        let (shared, alone) = sharers.split(1, &mine);
        assert_eq!((&shared.items[..], &alone.items[..]), (&mine.items[..2], &mine.items[2..]));
        let mine = plan(0, &[(3, None)]);
        assert_eq!(sharers.sent(3, &mine).map(|plan| plan.items.len()), Some(1));
        assert_eq!(sharers.split(4, &mine).0.items.len(), 1);
    }

    #[test]
    fn what_a_division_needs_is_known_before() {
        let part = [(0, Some(50))];
        let [whole, part] = [&WHOLE[..], &part].map(|items| offer(items, true));
        let offers = [whole, part, whole, part, whole, offer(&[(1, Some(90))], true)];
        let sharers = Sharers::of(&offers, true);
        let needs = sharers.needs(&offers, &[0, 0, 0, 0, 4, 5]);
        let expected =
            Needs { most: 200, first: 200, sent: 250, to_send: 66, kept: 90, spread: true };
        assert_eq!(needs, expected);
        assert!(!sharers.needs(&offers, &[0, 0, 0, 0, 0, 5]).spread);
    }
}
