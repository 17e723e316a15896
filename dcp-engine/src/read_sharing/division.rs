//! Assigns reads to the ranks of a group in which all read and send.

use std::collections::{BTreeMap, HashMap};

use dcp_core::metadata::Entry;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Rank, Region};
use dcp_planner::{Holdings, RankSet, ShareRule};

use super::assignment::{Assignment, Schedule};
use super::cost_model::{Needed, Needs};
use super::machines::neighbors;
use super::measured_speeds::read_again;
use crate::disjoint::{cut, overlay};
use crate::metadata_lookup::{check_chunk, no_entry, out_of_step, tensor_dtype};

/// Objects in one message.
const OBJECTS_MAX: u32 = 64;
/// Messages' worth of one box that may fall to one rank; larger ones are divided.
const MESSAGES_OF_A_BOX: u64 = 4;

/// The settings of a division, the same on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    pub(crate) world_size: u32,
    /// The first rank on the machine of each rank.
    pub(crate) machines: Vec<Rank>,
    pub(crate) rule: ShareRule,
    /// The most bytes of tensors in one message.
    pub(crate) message_bytes: u64,
    /// The ranks that read by themselves and are in no plan, with what they need.
    pub(crate) alone: Vec<(Rank, u64)>,
}

/// A part of the checkpoint that is read once.
#[derive(Debug)]
struct Part {
    entry: u32,
    /// Of a tensor; nothing of an object.
    place: Option<(u32, Region)>,
    byte_len: u64,
}

/// The ranks that need some parts.
#[derive(Debug)]
struct Wanting {
    ranks: Vec<Rank>,
    holders: Option<RankSet>,
    byte_len: u64,
}

/// One rank's share so far.
#[derive(Debug, Default)]
struct Pile {
    send: LoadPlan,
    keep: LoadPlan,
    send_bytes: u64,
    keep_bytes: u64,
    /// The message that is being filled: its number, bytes, items, and whether they are objects.
    message: Option<(u32, u64, u32, bool)>,
}

impl Division {
    /// Divides the reads among ranks, by the different plans and for each rank which of them is its own;
    /// a rank that reads by itself gets nothing.
    pub(crate) fn divide(
        &self,
        metadata: &CheckpointMetadata,
        plans: &[LoadPlan],
        plan_of: &[Option<Rank>],
    ) -> Result<(Schedule, Vec<Assignment>), CheckpointError> {
        let mut ranks_of: Vec<Vec<Rank>> = vec![Vec::new(); plans.len()];
        for (rank, plan) in (0..).zip(plan_of) {
            let ranks = plan.and_then(|plan| ranks_of.get_mut(plan as usize));
            ranks.into_iter().for_each(|ranks| ranks.push(rank));
        }
        let mut holdings = Holdings::new(self.world_size);
        let mut wanting: HashMap<Vec<u32>, Wanting> = HashMap::new();
        let mut parts = Vec::new();
        for (part, who) in Self::parts(metadata, plans)? {
            let wanting = wanting.entry(who).or_insert_with_key(|who| {
                let ranks = who.iter().filter_map(|plan| ranks_of.get(*plan as usize)).flatten();
                let mut ranks: Vec<Rank> = ranks.copied().collect();
                ranks.sort_unstable();
                let holders = holdings.holders(ranks.iter().copied());
                Wanting { ranks, holders, byte_len: 0 }
            });
            wanting.byte_len = wanting.byte_len.saturating_add(part.byte_len);
            let holders = wanting
                .holders
                .ok_or_else(|| out_of_step("no rank has a plan that reads this part"))?;
            // What one rank alone needs it reads as it is.
            let shared = wanting.ranks.len() > 1;
            let most = if shared { self.message_bytes * MESSAGES_OF_A_BOX } else { u64::MAX };
            for part in part.cut(most, metadata)? {
                holdings.push(holders, part.byte_len, false);
                parts.push(part);
            }
        }
        let shares = holdings.share_out(self.rule);
        let mut piles: Vec<Pile> = (0..self.world_size).map(|_| Pile::default()).collect();
        for (at, part) in parts.into_iter().enumerate() {
            let owner = shares.owner(at).and_then(|owner| piles.get_mut(owner as usize));
            let Some(pile) = owner else { continue };
            match holdings.ranks(at) {
                [_] => pile.keep(part),
                _ => pile.send(part, metadata, self.message_bytes)?,
            }
        }
        let needs = self.needs(wanting.values(), &piles);
        let again = self.again(needs, &piles, metadata)?;
        let reads_again = again.iter().any(|again| !again.items.is_empty());
        let turns = piles.iter().map(Pile::messages).collect();
        let assign = |(pile, again): (Pile, LoadPlan)| Assignment {
            send: pile.send,
            keep: pile.keep,
            again,
        };
        let assignments = piles.into_iter().zip(again).map(assign).collect();
        Ok((Schedule { turns, needs, reads_again }, assignments))
    }

    fn needs<'a>(&self, wanting: impl Iterator<Item = &'a Wanting>, piles: &[Pile]) -> Needs {
        let (mut needed, mut sent) = (Needed::new(&self.machines), 0_u64);
        for wanting in wanting {
            needed.add(wanting.byte_len, &wanting.ranks);
            if wanting.ranks.len() > 1 {
                sent = sent.saturating_add(wanting.byte_len);
            }
        }
        for (rank, byte_len) in &self.alone {
            needed.add(*byte_len, &[*rank]);
        }
        let most_of = |bytes: fn(&Pile) -> u64| piles.iter().map(bytes).max().unwrap_or(0);
        let alone = self.alone.iter().map(|(_, byte_len)| *byte_len).max().unwrap_or(0);
        let kept = most_of(|pile| pile.keep_bytes).max(alone);
        needed.needs(sent, most_of(|pile| pile.send_bytes), kept)
    }

    /// Returns the items that each rank reads again if the load measures speeds.
    fn again(
        &self,
        needs: Needs,
        piles: &[Pile],
        metadata: &CheckpointMetadata,
    ) -> Result<Vec<LoadPlan>, CheckpointError> {
        if !needs.are_worth_measuring() {
            return Ok(vec![LoadPlan::default(); piles.len()]);
        }
        let firsts = piles.iter().map(|pile| read_again(&pile.send, metadata));
        let firsts = firsts.collect::<Result<Vec<_>, _>>()?;
        let of = |rank: Rank| firsts.get(rank as usize);
        let reads = |rank| of(rank).is_some_and(|plan| !plan.items.is_empty());
        let neighbors = neighbors(&self.machines, reads).into_iter();
        Ok(neighbors.map(|rank| rank.and_then(of).cloned().unwrap_or_default()).collect())
    }

    /// Everything that any plan reads, in parts that are read once, each with the plans that need
    /// it.
    fn parts(
        metadata: &CheckpointMetadata,
        plans: &[LoadPlan],
    ) -> Result<Vec<(Part, Vec<u32>)>, CheckpointError> {
        let mut chunks: BTreeMap<(u32, u32), Vec<(Region, u32)>> = BTreeMap::new();
        let mut objects: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (plan, who) in plans.iter().zip(0..) {
            for item in &plan.items {
                match &item.kind {
                    ReadKind::Tensor { chunk, region, .. } if !region.is_empty() => {
                        check_chunk(metadata, item.entry, *chunk, region)?;
                        let regions = chunks.entry((item.entry, *chunk)).or_default();
                        regions.push((region.clone(), who));
                    }
                    ReadKind::Object => objects.entry(item.entry).or_default().push(who),
                    _ => {}
                }
            }
        }
        let mut parts = Vec::new();
        for ((entry, chunk), regions) in chunks {
            let size = tensor_dtype(metadata, entry)?.size() as u64;
            for (region, who) in overlay(regions) {
                let byte_len = region.volume().saturating_mul(size);
                parts.push((Part { entry, place: Some((chunk, region)), byte_len }, who));
            }
        }
        for (entry, mut who) in objects {
            who.dedup();
            let byte_len = match metadata.at(entry as usize) {
                Some((_, Entry::Object(object))) => object.placement.map_or(0, |at| at.byte_len),
                Some((fqn, _)) => {
                    return Err(PlanError::not_an_object(fqn.to_string()).into());
                }
                None => return Err(no_entry(entry, None)),
            };
            parts.push((Part { entry, place: None, byte_len }, who));
        }
        Ok(parts)
    }
}

impl Part {
    /// Parts of at most `most` bytes; an object is not cut.
    fn cut(self, most: u64, metadata: &CheckpointMetadata) -> Result<Vec<Self>, CheckpointError> {
        let Some((chunk, region)) = &self.place else { return Ok(vec![self]) };
        let size = tensor_dtype(metadata, self.entry)?.size() as u64;
        let part = |region: Region| Self {
            entry: self.entry,
            byte_len: region.volume().saturating_mul(size),
            place: Some((*chunk, region)),
        };
        Ok(cut(region.clone(), (most / size).max(1)).map(part).collect())
    }

    fn item(&self, leaf: u32) -> ReadItem {
        let kind = match &self.place {
            Some((chunk, region)) => {
                ReadKind::Tensor { chunk: *chunk, shard: 0, region: region.clone() }
            }
            None => ReadKind::Object,
        };
        ReadItem { entry: self.entry, leaf, kind }
    }
}

impl Pile {
    fn keep(&mut self, part: Part) {
        self.keep_bytes = self.keep_bytes.saturating_add(part.byte_len);
        self.keep.items.push(part.item(0));
    }

    /// Puts a part into messages of at most `most` bytes; an object may be longer.
    fn send(
        &mut self,
        part: Part,
        metadata: &CheckpointMetadata,
        most: u64,
    ) -> Result<(), CheckpointError> {
        self.send_bytes = self.send_bytes.saturating_add(part.byte_len);
        for part in part.cut(most, metadata)? {
            let message = self.message_for(part.byte_len, part.place.is_none(), most);
            self.send.items.push(part.item(message));
        }
        Ok(())
    }

    fn message_for(&mut self, byte_len: u64, object: bool, most: u64) -> u32 {
        let filled = match self.message {
            Some((number, bytes, items, objects)) => {
                let fits = bytes.saturating_add(byte_len) <= most;
                if objects == object && fits && (!object || items < OBJECTS_MAX) {
                    (number, bytes.saturating_add(byte_len), items + 1, object)
                } else {
                    (number.saturating_add(1), byte_len, 1, object)
                }
            }
            None => (0, byte_len, 1, object),
        };
        self.message = Some(filled);
        filled.0
    }

    fn messages(&self) -> u32 {
        self.message.map_or(0, |(number, ..)| number.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{ObjectEntry, TensorEntry};

    use super::*;

    /// `tensors` tensors of `len` bytes, each one chunk, and as many objects.
    fn stored(tensors: u32, len: u64) -> (CheckpointMetadata, LoadPlan) {
        let (mut metadata, mut plan) = (CheckpointMetadata::new(), LoadPlan::default());
        for at in 0..tensors {
            let mut tensor = TensorEntry::new(DType::Int8, [len]);
            tensor.chunks.push(&[0], &[len], None).unwrap();
            metadata.insert(format!("w{at}"), Entry::Tensor(tensor));
            let region = Region::full([len]).unwrap();
            let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
            plan.items.push(ReadItem { entry: at, leaf: at, kind });
        }
        for at in 0..tensors {
            metadata.insert(format!("o{at}"), Entry::Object(ObjectEntry::new(None)));
            let entry = tensors + at;
            plan.items.push(ReadItem { entry, leaf: entry, kind: ReadKind::Object });
        }
        (metadata, plan)
    }

    fn division(machines: &[Rank], rule: ShareRule, message_bytes: u64) -> Division {
        let (world_size, machines) = (u32::try_from(machines.len()).unwrap(), machines.to_vec());
        Division { world_size, machines, rule, message_bytes, alone: Vec::new() }
    }

    fn bytes(plan: &LoadPlan) -> BTreeMap<u32, u64> {
        let mut messages = BTreeMap::new();
        for item in &plan.items {
            let len = match &item.kind {
                ReadKind::Tensor { region, .. } => region.volume(),
                _ => 0,
            };
            *messages.entry(item.leaf).or_default() += len;
        }
        messages
    }

    #[test]
    fn messages_are_bounded_and_counted_and_ranks_have_about_the_same() {
        let (metadata, plan) = stored(5, 3000);
        let division = division(&[0, 1, 2, 3], ShareRule::Balanced, 1000);
        let (schedule, all) = division.divide(&metadata, &[plan], &[Some(0); 4]).unwrap();
        let mut sum = 0;
        for (rank, assignment) in (0..).zip(&all) {
            let messages = bytes(&assignment.send);
            let count = u32::try_from(messages.len()).unwrap();
            assert_eq!(schedule.turns_of(rank), count, "rank {rank}");
            assert_eq!(messages.keys().copied().collect::<Vec<_>>(), Vec::from_iter(0..count));
            assert!(messages.values().all(|bytes| *bytes <= 1000), "{messages:?}");
            assert_eq!(assignment.keep.items, []);
            sum += messages.values().sum::<u64>();
            assert!(messages.values().sum::<u64>() <= 6000, "rank {rank}");
        }
        assert_eq!(sum, 15_000);
        let to_send = all.iter().map(|one| bytes(&one.send).values().sum()).max().unwrap();
        let expected =
            Needs { most: 15_000, first: 15_000, sent: 15_000, to_send, kept: 0, spread: true };
        assert_eq!(schedule.needs, expected);
    }

    #[test]
    fn what_one_rank_wants_stays_with_it() {
        let (metadata, plan) = stored(3, 10);
        let nothing = LoadPlan::default();
        let mut division = division(&[0, 0, 2], ShareRule::Megatron, 1000);
        let plans = [nothing, plan];
        let (schedule, all) =
            division.divide(&metadata, &plans, &[Some(0), Some(1), Some(0)]).unwrap();
        assert_eq!(all[1].keep.items.len(), 6);
        assert!(all.iter().all(|assignment| assignment.send.items.is_empty()));
        assert_eq!(schedule.turns, [0, 0, 0]);
        let expected = Needs { most: 30, first: 30, kept: 30, ..Needs::default() };
        assert_eq!(schedule.needs, expected);
        // Nobody sends the plan of a rank that shares with no other.
        division.alone = vec![(2, 70)];
        let (schedule, all) =
            division.divide(&metadata, &plans, &[Some(0), Some(1), None]).unwrap();
        assert_eq!(all[2], Assignment::default());
        let expected = Needs { most: 70, first: 70, kept: 70, ..Needs::default() };
        assert_eq!(schedule.needs, expected);
    }

    #[test]
    fn ranks_of_a_machine_read_again_what_a_neighbor_reads_first() {
        let (metadata, plan) = stored(4, 100 << 20);
        let message = 8 << 20;
        // Two machines with two ranks each, and one rank alone.
        let machines = [0, 1, 0, 1, 4];
        let all = division(&machines, ShareRule::Balanced, message);
        let all = all.divide(&metadata, std::slice::from_ref(&plan), &[Some(0); 5]).unwrap();
        let (schedule, all) = all;
        let most = 400 << 20;
        assert_eq!((schedule.needs.most, schedule.needs.first), (most, most));
        for (rank, neighbor) in [(0, 2), (1, 3), (2, 0), (3, 1)] {
            let again = &all[rank].again.items;
            assert_eq!(again.len(), 1, "rank {rank}");
            assert_eq!(again[0], all[neighbor].send.items[0], "rank {rank}");
        }
        assert_eq!(all[4].again.items, []);
        assert!(schedule.reads_again && schedule.needs.spread);
        // Ranks of one machine read each byte first once.
        let two = division(&[0, 0], ShareRule::Balanced, message);
        let two = two.divide(&metadata, std::slice::from_ref(&plan), &[Some(0); 2]).unwrap();
        let needs = two.0.needs;
        assert_eq!((needs.most, needs.first, needs.spread), (most, most / 2, false));
        // Nothing is read again where no speed is measured, or where all ranks are alone.
        let (small, little) = stored(4, 1 << 20);
        for (machines, metadata, plan) in [(&[0, 0], &small, &little), (&[0, 1], &metadata, &plan)]
        {
            let all = division(machines, ShareRule::Balanced, message);
            let plans = std::slice::from_ref(plan);
            let (schedule, all) = all.divide(metadata, plans, &[Some(0); 2]).unwrap();
            assert!(!schedule.reads_again && all.iter().all(|one| one.again.items.is_empty()));
        }
    }

    #[test]
    fn assignments_travel_and_damage_is_refused() {
        let (metadata, plan) = stored(2, 10);
        let division = division(&[0, 1], ShareRule::Megatron, 9);
        let (mut schedule, mut all) = division.divide(&metadata, &[plan], &[Some(0); 2]).unwrap();
        schedule.reads_again = true;
        let wire = schedule.to_wire();
        assert_eq!(Schedule::from_wire(&wire, 2).as_ref(), Ok(&schedule));
        assert!(Schedule::from_wire(&wire, 3).is_err());
        for len in 0..wire.len() {
            assert!(Schedule::from_wire(&wire[..len], 2).is_err(), "{len} bytes");
        }
        all[0].again = all[1].send.clone();
        for assignment in all {
            let wire = assignment.to_wire();
            assert_eq!(Assignment::from_wire(&wire), Ok(assignment));
            for len in 0..wire.len() {
                assert!(Assignment::from_wire(&wire[..len]).is_err(), "{len} bytes");
            }
        }
    }

    #[test]
    fn plans_that_read_what_is_not_there_are_refused() {
        let (metadata, plan) = stored(1, 10);
        let division = division(&[0, 1], ShareRule::Megatron, 9);
        for (at, kind) in [
            (0, ReadKind::Tensor { chunk: 1, shard: 0, region: Region::full([10]).unwrap() }),
            (0, ReadKind::Tensor { chunk: 0, shard: 0, region: Region::full([11]).unwrap() }),
            (0, ReadKind::Object),
            (7, ReadKind::Object),
        ] {
            let mut bad = plan.clone();
            bad.items.push(ReadItem { entry: at, leaf: 9, kind });
            assert!(division.divide(&metadata, &[bad], &[Some(0), Some(0)]).is_err());
        }
    }
}
