//! Work that several ranks of a group could do, each piece given to one of them: the write
//! of a replica, a read for all.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use dcp_core::Rank;

/// Pieces of work and the ranks that can do them, in columns; lists of ranks are kept once.
///
/// Pieces are pushed in the order of their names, which every rule falls back on, so that the
/// same pieces are shared out alike wherever that happens.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    world_size: u32,
    sets: Vec<Box<[Rank]>>,
    known: HashMap<Box<[Rank]>, u32>,
    holders: Vec<u32>,
    byte_lens: Vec<u64>,
    foreign: Vec<bool>,
}

/// A list of ranks in a [`Holdings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankSet(u32);

/// The rule by which pieces are divided among ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShareRule {
    /// As Megatron-Core 0.7 and later: first what the group answers for itself, before what others
    /// do, then what fewest ranks hold, then the largest; each goes to the holder that has fewest
    /// bytes so far, the lowest rank among equals. Chosen where the same rank has to write the same
    /// chunk as with Megatron, and the same file to have the same name.
    Megatron,
    /// By what the work really costs: every piece counts its bytes and the
    /// [fixed part](ShareRule::PIECE_COST) that each stored item brings to a file, and to a read of
    /// it, so that many small ones are spread too. What only one rank can do comes first, then the
    /// most expensive, and at last pieces move from the busiest rank to others while that helps.
    /// No rank gets more than the busiest has under Megatron's rule.
    #[default]
    Balanced,
}

/// The rank that does each piece of work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    owners: Vec<Rank>,
    loads: Vec<u64>,
}

impl Holdings {
    /// Nothing yet, in a group of `world_size` ranks.
    #[must_use]
    pub fn new(world_size: u32) -> Self {
        Self { world_size, ..Self::default() }
    }

    /// The list of these ranks, in whatever order; `None` when it is empty or names a rank outside
    /// of the group.
    pub fn holders(&mut self, ranks: impl IntoIterator<Item = Rank>) -> Option<RankSet> {
        let mut ranks: Vec<Rank> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        if ranks.last().is_none_or(|last| *last >= self.world_size) {
            return None;
        }
        let ranks = ranks.into_boxed_slice();
        if let Some(known) = self.known.get(&ranks) {
            return Some(RankSet(*known));
        }
        let id = u32::try_from(self.sets.len()).ok()?;
        self.sets.push(ranks.clone());
        self.known.insert(ranks, id);
        Some(RankSet(id))
    }

    /// Adds a piece of `byte_len` bytes. `foreign` says that another group answers for it, too.
    pub fn push(&mut self, holders: RankSet, byte_len: u64, foreign: bool) {
        self.holders.push(holders.0);
        self.byte_lens.push(byte_len);
        self.foreign.push(foreign);
    }

    /// The number of pieces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether there is no piece.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// The ranks that can do a piece, ascending; none for a piece that is not there.
    #[must_use]
    pub fn ranks(&self, piece: usize) -> &[Rank] {
        let set = self.holders.get(piece).and_then(|set| self.sets.get(*set as usize));
        set.map_or(&[], |set| set)
    }

    /// Gives every piece to one of its holders. The result depends on nothing but the pieces and
    /// their order. It takes time for sorting the pieces; the number of holders of each hardly
    /// counts.
    #[must_use]
    pub fn share_out(&self, rule: ShareRule) -> Shares {
        match rule {
            ShareRule::Megatron => self.megatron(0),
            ShareRule::Balanced => {
                let (theirs, mut ours) = (self.megatron(ShareRule::PIECE_COST), self.largest());
                self.relieve(&mut ours);
                if theirs.busiest() < ours.busiest() { theirs } else { ours }
            }
        }
    }

    fn megatron(&self, piece_cost: u64) -> Shares {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&at| {
            (self.foreign[at], self.ranks(at).len(), Reverse(self.byte_lens[at]), at)
        });
        self.greedy(order, piece_cost)
    }

    /// The longest processing time first.
    fn largest(&self) -> Shares {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&at| {
            let holders = self.ranks(at).len();
            (holders > 1, Reverse(self.byte_lens[at]), holders, at)
        });
        self.greedy(order, ShareRule::PIECE_COST)
    }

    fn greedy(&self, order: Vec<usize>, piece_cost: u64) -> Shares {
        let mut shares =
            Shares { owners: vec![0; self.len()], loads: vec![0; self.world_size as usize] };
        // A queue for each list of ranks, the least busy first. Loads only grow, so that an entry
        // is corrected when it comes up, and the one that is right then is the least.
        let mut queues: Vec<BinaryHeap<Reverse<(u64, Rank)>>> =
            vec![BinaryHeap::new(); self.sets.len()];
        for at in order {
            let set = self.holders[at] as usize;
            let queue = &mut queues[set];
            if queue.is_empty() {
                queue
                    .extend(self.sets[set].iter().map(|rank| Reverse((shares.load(*rank), *rank))));
            }
            let cost = self.byte_lens[at].saturating_add(piece_cost);
            while let Some(mut top) = queue.peek_mut() {
                let Reverse((load, rank)) = *top;
                let now = shares.load(rank);
                if load == now {
                    shares.give(at, rank, cost);
                    *top = Reverse((shares.load(rank), rank));
                    break;
                }
                *top = Reverse((now, rank));
            }
        }
        shares
    }

    /// Moves pieces from the busiest rank to others that can do them, while that makes it less
    /// busy and the others not as busy as it was.
    fn relieve(&self, shares: &mut Shares) {
        let cost = |at: usize| self.byte_lens[at].saturating_add(ShareRule::PIECE_COST);
        let mut pieces: Vec<Vec<usize>> = vec![Vec::new(); shares.loads.len()];
        for at in (0..self.len()).filter(|&at| self.ranks(at).len() > 1) {
            pieces[shares.owners[at] as usize].push(at);
        }
        let mut ranks: BTreeSet<(u64, Rank)> = shares.loads.iter().copied().zip(0..).collect();
        // Enough to even out what is uneven, and a bound on the time for the rest.
        let mut looks = 16 * (self.len() + ranks.len()) + 4096;
        while let Some(&(busiest, from)) = ranks.last() {
            let mut best: Option<(u64, Rank, usize)> = None;
            for (position, &at) in pieces[from as usize].iter().enumerate() {
                let Some(left) = looks.checked_sub(self.ranks(at).len()) else { return };
                looks = left;
                let others = self.ranks(at).iter().filter(|rank| **rank != from);
                let Some(to) = others.min_by_key(|rank| (shares.load(**rank), **rank)) else {
                    continue;
                };
                let then = shares.load(*to).saturating_add(cost(at)).max(busiest - cost(at));
                if then < best.map_or(busiest, |(best, ..)| best) {
                    best = Some((then, *to, position));
                }
            }
            let Some((_, to, position)) = best else { return };
            let at = pieces[from as usize].swap_remove(position);
            pieces[to as usize].push(at);
            ranks.remove(&(busiest, from));
            ranks.remove(&(shares.load(to), to));
            shares.loads[from as usize] -= cost(at);
            shares.give(at, to, cost(at));
            ranks.extend([from, to].map(|rank| (shares.load(rank), rank)));
        }
    }
}

impl ShareRule {
    /// The cost of a piece in addition to its bytes, in bytes: the headers of one `torch.save` archive.
    pub const PIECE_COST: u64 = 1536;
}

impl Shares {
    /// The rank that does a piece.
    #[must_use]
    pub fn owner(&self, piece: usize) -> Option<Rank> {
        self.owners.get(piece).copied()
    }

    /// The rank of every piece, in the order in which they were pushed.
    #[must_use]
    pub fn owners(&self) -> &[Rank] {
        &self.owners
    }

    /// The work of every rank, in bytes, as the rule counts them.
    #[must_use]
    pub fn loads(&self) -> &[u64] {
        &self.loads
    }

    fn busiest(&self) -> u64 {
        self.loads.iter().copied().max().unwrap_or(0)
    }

    fn load(&self, rank: Rank) -> u64 {
        self.loads.get(rank as usize).copied().unwrap_or(0)
    }

    fn give(&mut self, piece: usize, rank: Rank, cost: u64) {
        let load = &mut self.loads[rank as usize];
        *load = load.saturating_add(cost);
        self.owners[piece] = rank;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces as bytes, holders, and whether another group answers for them.
    fn holdings(world: u32, pieces: &[(u64, Vec<Rank>, bool)]) -> Holdings {
        let mut all = Holdings::new(world);
        for (bytes, ranks, foreign) in pieces {
            let holders = all.holders(ranks.iter().copied()).unwrap();
            all.push(holders, *bytes, *foreign);
        }
        all
    }

    /// The rule as it is written down, without any cleverness.
    fn by_the_book(all: &Holdings) -> Vec<Rank> {
        let mut order: Vec<usize> = (0..all.len()).collect();
        let key =
            |at: usize| (all.foreign[at], all.ranks(at).len(), u64::MAX - all.byte_lens[at], at);
        order.sort_by_key(|at| key(*at));
        let mut load = vec![0; all.world_size as usize];
        let mut owners = vec![0; all.len()];
        for at in order {
            let owner = *all.ranks(at).iter().min_by_key(|r| (load[**r as usize], **r)).unwrap();
            owners[at] = owner;
            load[owner as usize] += all.byte_lens[at];
        }
        owners
    }

    fn pieces() -> impl Strategy<Value = (u32, Vec<(u64, Vec<Rank>, bool)>)> {
        (1_u32..9).prop_flat_map(|world| {
            let ranks = prop::collection::vec(0..world, 1..6);
            let bytes = prop_oneof![0_u64..40, 0_u64..100_000];
            (Just(world), prop::collection::vec((bytes, ranks, any::<bool>()), 0..60))
        })
    }

    proptest! {
        #[test]
        fn every_piece_has_one_owner_that_holds_it((world, pieces) in pieces()) {
            let all = holdings(world, &pieces);
            for rule in [ShareRule::Megatron, ShareRule::Balanced] {
                let shares = all.share_out(rule);
                prop_assert_eq!(shares.owners().len(), pieces.len());
                let mut loads = vec![0; world as usize];
                for (at, owner) in shares.owners().iter().enumerate() {
                    prop_assert!(pieces[at].1.contains(owner));
                    let fixed = if rule == ShareRule::Megatron { 0 } else { ShareRule::PIECE_COST };
                    loads[*owner as usize] += pieces[at].0 + fixed;
                }
                prop_assert_eq!(shares.loads(), loads);
            }
        }

        #[test]
        fn the_order_of_holders_does_not_matter((world, pieces) in pieces()) {
            let turned: Vec<_> = pieces
                .iter()
                .map(|(bytes, ranks, foreign)| {
                    let twice = ranks.iter().rev().chain(ranks).copied().collect();
                    (*bytes, twice, *foreign)
                })
                .collect();
            for rule in [ShareRule::Megatron, ShareRule::Balanced] {
                let left = holdings(world, &pieces).share_out(rule);
                prop_assert_eq!(left, holdings(world, &turned).share_out(rule));
            }
        }

        #[test]
        fn the_queues_choose_as_a_search_does((world, pieces) in pieces()) {
            let all = holdings(world, &pieces);
            let shares = all.share_out(ShareRule::Megatron);
            prop_assert_eq!(shares.owners(), by_the_book(&all));
        }

        #[test]
        fn balanced_is_never_worse_than_megatron((world, pieces) in pieces()) {
            let all = holdings(world, &pieces);
            let ours = all.share_out(ShareRule::Balanced).busiest();
            prop_assert!(ours <= all.megatron(ShareRule::PIECE_COST).busiest());
        }

        /// Graham's bound for items that every rank can take.
        #[test]
        fn what_all_hold_is_spread_evenly(
            world in 1_u32..9,
            bytes in prop::collection::vec(0_u64..100_000, 1..60),
        ) {
            let pieces: Vec<_> = bytes.iter().map(|n| (*n, (0..world).collect(), false)).collect();
            let shares = holdings(world, &pieces).share_out(ShareRule::Balanced);
            let cost = |n: &u64| n + ShareRule::PIECE_COST;
            let total: u64 = bytes.iter().map(cost).sum();
            let (ranks, largest) = (u64::from(world), bytes.iter().map(cost).max().unwrap());
            prop_assert!(ranks * shares.busiest() <= total + (ranks - 1) * largest);
        }
    }

    #[test]
    fn small_pieces_are_spread_by_number() {
        // Bytes alone would give all the small ones to one rank.
        let mut pieces = vec![(3_000, vec![0, 1], false)];
        pieces.extend((0..99).map(|_| (1, vec![0, 1], false)));
        let all = holdings(2, &pieces);
        let count = |rule| {
            let shares = all.share_out(rule);
            shares.owners().iter().filter(|owner| **owner == 1).count()
        };
        assert_eq!(count(ShareRule::Megatron), 99);
        assert_eq!(count(ShareRule::Balanced), 51);
    }

    #[test]
    fn what_was_given_away_too_early_moves() {
        // The largest piece first, to rank 0, which alone can take two more afterwards.
        let pieces =
            [(9_000, vec![0, 1], false), (9_000, vec![0, 2], false), (9_000, vec![0], false)];
        let shares = holdings(3, &pieces).share_out(ShareRule::Balanced);
        assert_eq!(shares.owners(), [1, 2, 0]);
    }

    #[test]
    fn ranks_outside_of_the_group_hold_nothing() {
        let mut all = Holdings::new(2);
        assert_eq!(all.holders([]), None);
        assert_eq!(all.holders([0, 2]), None);
        assert_eq!(all.holders([1, 0]), all.holders([0, 1, 1]));
        assert_eq!(all.share_out(ShareRule::Megatron).loads(), [0, 0]);
    }

    /// Everything on every rank, and groups of 8: what is quadratic in either does not end here.
    #[test]
    fn thousands_of_ranks_and_a_hundred_thousand_pieces_take_a_moment() {
        for width in [4096, 8] {
            let mut all = Holdings::new(4096);
            for piece in 0..100_000_u32 {
                let first = piece % (4096 / width) * width;
                let holders = all.holders(first..first + width).unwrap();
                all.push(holders, u64::from(piece * 7919 % 65_536) * 64, false);
                if width == 4096 && piece == 9_999 {
                    break;
                }
            }
            for rule in [ShareRule::Megatron, ShareRule::Balanced] {
                let shares = all.share_out(rule);
                assert!(shares.loads().iter().all(|load| *load > 0));
            }
        }
    }
}
