//! Ranges of bytes, cut into copies.

use std::ops::Range;

/// The bytes of all ranges.
pub(crate) fn byte_len(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum()
}

/// The ranges in groups of at most `most` bytes, which is at least 1, in their order. All groups but
/// the last one have exactly as many.
pub(crate) fn cut(ranges: &[Range<u64>], most: u64) -> impl Iterator<Item = Vec<Range<u64>>> + '_ {
    let mut ranges = ranges.iter().cloned();
    let mut rest: Option<Range<u64>> = None;
    std::iter::from_fn(move || {
        let (mut group, mut room) = (Vec::new(), most.max(1));
        while room > 0 {
            let Some(next) = rest.take().or_else(|| ranges.next()) else { break };
            let middle = next.end.min(next.start + room);
            room -= middle - next.start;
            if middle < next.end {
                rest = Some(middle..next.end);
            }
            group.push(next.start..middle);
        }
        (!group.is_empty()).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_same_bytes_in_the_same_order() {
        let ranges = [0..3, 5..15, 20..21, 30..40];
        for most in 1..30 {
            let groups: Vec<_> = cut(&ranges, most).collect();
            let all = |ranges: &[Range<u64>]| ranges.iter().cloned().flatten().collect::<Vec<_>>();
            assert_eq!(all(&groups.concat()), all(&ranges));
            let (last, full) = groups.split_last().unwrap();
            assert!(full.iter().all(|group| byte_len(group) == most));
            assert!(byte_len(last) <= most);
        }
        assert_eq!(cut(&[], 4).count(), 0);
    }
}
