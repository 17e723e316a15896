//! The binomial tree along which messages travel.

use dcp_core::Rank;

/// A binomial tree over all ranks of a group, seen from one of them.
///
/// Ranks are numbered from the root (`place`, 0 for the root). The subtree of a place is a run of
/// places, so the messages of a subtree in order of place are those of its own rank followed by
/// those of each child's subtree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tree {
    world_size: u32,
    root: Rank,
    place: u32,
}

/// A child and the number of ranks in its subtree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Child {
    pub(crate) rank: Rank,
    pub(crate) span: u32,
}

impl Tree {
    /// The tree with this root, seen from `rank`; both are below `world_size`.
    pub(crate) fn new(world_size: u32, root: Rank, rank: Rank) -> Self {
        let place = if rank >= root { rank - root } else { world_size - root + rank };
        Self { world_size, root, place }
    }

    /// The rank at a place.
    pub(crate) fn rank_at(self, place: u32) -> Rank {
        let to_end = self.world_size - self.root;
        if place >= to_end { place - to_end } else { self.root + place }
    }

    pub(crate) fn parent(self) -> Option<Rank> {
        (self.place != 0).then(|| self.rank_at(self.place & (self.place - 1)))
    }

    /// The number of ranks below this one, itself included.
    pub(crate) fn span(self) -> u32 {
        span(self.place, self.world_size)
    }

    /// The children in order of place, that is from the smallest subtree to the largest.
    pub(crate) fn children(self) -> impl DoubleEndedIterator<Item = (u32, Child)> {
        let reach = match self.place {
            0 => u32::BITS,
            place => place.trailing_zeros(),
        };
        (0..reach).filter_map(move |bit| {
            let place = self.place.checked_add(1 << bit).filter(|at| *at < self.world_size)?;
            Some((place, Child { rank: self.rank_at(place), span: span(place, self.world_size) }))
        })
    }
}

fn span(place: u32, world_size: u32) -> u32 {
    let rest = world_size - place;
    if place == 0 { rest } else { rest.min(1 << place.trailing_zeros()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_below_the_root_exactly_once_and_not_deep() {
        for world_size in 1..=70 {
            for root in [0, 1, world_size / 2, world_size - 1] {
                let root = root.min(world_size - 1);
                let mut seen = Vec::new();
                walk(world_size, root, root, 0, &mut seen);
                let expected = (0..world_size).map(|place| (root + place) % world_size);
                assert_eq!(seen, expected.collect::<Vec<_>>());
            }
        }
    }

    fn walk(world_size: u32, root: Rank, rank: Rank, depth: u32, seen: &mut Vec<Rank>) {
        assert!(depth <= u32::BITS - (world_size - 1).leading_zeros());
        seen.push(rank);
        let tree = Tree::new(world_size, root, rank);
        let before = seen.len();
        for (place, child) in tree.children() {
            assert_eq!(tree.rank_at(place), child.rank);
            let below = Tree::new(world_size, root, child.rank);
            assert_eq!((below.parent(), below.span()), (Some(rank), child.span));
            walk(world_size, root, child.rank, depth + 1, seen);
        }
        assert_eq!(seen.len() - before + 1, tree.span() as usize);
    }

    #[test]
    fn the_largest_group_does_not_overflow() {
        let tree = Tree::new(u32::MAX, u32::MAX - 1, u32::MAX - 2);
        assert_eq!(tree.parent().map(|parent| parent < u32::MAX), Some(true));
        let root = Tree::new(u32::MAX, u32::MAX - 1, u32::MAX - 1);
        assert_eq!(
            root.children().map(|(_, child)| u64::from(child.span)).sum::<u64>(),
            (1 << 32) - 2
        );
    }
}
