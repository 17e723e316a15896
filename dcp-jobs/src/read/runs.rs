//! Cuts a tensor's row-major elements into ranges, and a range into boxes.

use std::cmp::Ordering;
use std::ops::Range;

use dcp_core::{Dims, Region};

/// The boxes that cover exactly the row-major elements `range` of a tensor of `shape`, in order. At
/// most `2 * ndim - 1` of them.
///
/// Elements beyond the end of the tensor are ignored.
#[must_use]
pub fn boxes(shape: &[u64], range: Range<u64>) -> Vec<Region> {
    let total = dcp_core::dims::checked_volume(shape).unwrap_or(0);
    let range = range.start.min(total)..range.end.min(total);
    // The number of elements that one step along each axis skips.
    let mut step = 1_u64;
    let mut steps = Vec::with_capacity(shape.len());
    for len in shape.iter().rev() {
        steps.push(step);
        step = step.saturating_mul(*len);
    }
    steps.reverse();
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let left = range.end - at;
        // The outermost axis along which a whole step begins here.
        let whole = |step: &u64| at.is_multiple_of(*step) && *step <= left;
        let Some((axis, step)) = steps.iter().copied().enumerate().find(|(_, step)| whole(step))
        else {
            // A tensor without axes has one element.
            found.extend(Region::full(Dims::from(shape)));
            break;
        };
        let place = steps.iter().zip(shape).map(|(step, len)| at / step % len);
        let offsets: Dims = place.collect();
        let rows = match (offsets.get(axis), shape.get(axis)) {
            (Some(row), Some(len)) => (left / step).min(len - row),
            _ => break,
        };
        let sizes: Dims = (0..)
            .zip(shape)
            .map(|(inner, len)| match inner.cmp(&axis) {
                Ordering::Less => 1,
                Ordering::Equal => rows,
                Ordering::Greater => *len,
            })
            .collect();
        // A part of a tensor whose volume fits 64 bits fits too.
        found.extend(Region::new(offsets, sizes));
        at += rows * step;
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn elements(shape: &[u64], regions: &[Region]) -> Vec<u64> {
        regions
            .iter()
            .flat_map(|region| region.runs_in(shape).collect::<Vec<_>>())
            .flat_map(|(at, len)| at..at + len)
            .collect()
    }

    #[test]
    fn scalars_and_empty_tensors() {
        assert_eq!(boxes(&[], 0..1), [Region::full([]).unwrap()]);
        assert_eq!(boxes(&[], 0..0), []);
        assert_eq!(boxes(&[3, 0], 0..1), []);
        assert_eq!(boxes(&[2, 3], 0..6), [Region::full([2, 3]).unwrap()]);
    }

    #[test]
    fn any_number_of_axes_is_handled_on_a_small_stack() {
        let mut shape = vec![1; 60_000];
        shape.push(4);
        let found = boxes(&shape, 1..4);
        assert_eq!(elements(&shape, &found), [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn boxes_hold_the_range_and_nothing_else(
            shape in prop::collection::vec(1_u64..5, 0..5),
            cut in (0_u64..700, 0_u64..700),
        ) {
            let total: u64 = shape.iter().product();
            let (a, b) = (cut.0 % (total + 1), cut.1 % (total + 1));
            let range = a.min(b)..a.max(b);
            let found = boxes(&shape, range.clone());
            prop_assert_eq!(elements(&shape, &found), range.collect::<Vec<_>>());
            prop_assert!(found.len() < (2 * shape.len()).max(2));
        }
    }
}
