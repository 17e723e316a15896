//! Which rank does what of a job.

use std::ops::Range;

use dcp_core::Rank;

/// The items that `rank` of `world_size` does: a contiguous range of them, so that all ranks have about
/// the same number of bytes and each reads its files from front to back.
pub(crate) fn contiguous_share(byte_lens: &[u64], rank: Rank, world_size: u32) -> Range<usize> {
    let total = byte_lens.iter().fold(0_u128, |sum, len| sum + u128::from(*len));
    let (mut before, mut at) = (0_u128, 0..0);
    let limit = |rank: u32| total * u128::from(rank) / u128::from(world_size.max(1));
    let (first, last) = (limit(rank), limit(rank.saturating_add(1)));
    for len in byte_lens {
        // An item is done where its middle is.
        let middle = before + u128::from(*len) / 2;
        at.start += usize::from(middle < first);
        at.end += usize::from(middle < last);
        before += u128::from(*len);
    }
    if rank.saturating_add(1) >= world_size {
        at.end = byte_lens.len();
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_by_one_rank() {
        let cases: [&[u64]; 6] =
            [&[], &[0, 0, 0], &[5], &[1, 2, 3, 4, 5, 6], &[100, 1, 1, 1], &[u64::MAX; 5]];
        for lens in cases {
            for world_size in 1..9 {
                let mut next = 0;
                for rank in 0..world_size {
                    let share = contiguous_share(lens, rank, world_size);
                    assert_eq!(share.start, next, "{lens:?} {rank}/{world_size}");
                    assert!(share.end >= share.start, "{lens:?} {rank}/{world_size}");
                    next = share.end;
                }
                assert_eq!(next, lens.len(), "{lens:?} of {world_size}");
            }
        }
    }

    #[test]
    fn ranks_get_about_the_same_number_of_bytes() {
        let lens: Vec<u64> = (0..1000).map(|n| 1000 + n * 37 % 500).collect();
        let total: u64 = lens.iter().sum();
        for rank in 0..7 {
            let mine: u64 = lens[contiguous_share(&lens, rank, 7)].iter().sum();
            assert!(mine.abs_diff(total / 7) <= 1500, "rank {rank} has {mine} of {total}");
        }
    }
}
