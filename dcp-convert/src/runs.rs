//! Cutting a tensor's row-major elements into ranges, and such a range into boxes.

use std::ops::Range;

use dcp_core::{Dims, Region};

/// The boxes that hold exactly the row-major elements `range` of a tensor of `shape`, in order:
/// concatenated, their elements are the range's. At most `2 * ndim - 1` of them.
///
/// The range must lie within the tensor; what lies behind its end is left out.
pub(crate) fn boxes(shape: &[u64], range: Range<u64>) -> Vec<Region> {
    let total = dcp_core::checked_volume(shape).unwrap_or(0);
    let range = range.start.min(total)..range.end.min(total);
    let mut found = Vec::new();
    if range.start < range.end {
        let mut fixed = Vec::with_capacity(shape.len());
        descend(shape, &mut fixed, range, &mut found);
    }
    found
}

/// Adds the boxes of `range`, counted within the part of the tensor whose first indices are
/// `fixed`.
fn descend(shape: &[u64], fixed: &mut Vec<u64>, range: Range<u64>, found: &mut Vec<Region>) {
    let axis = fixed.len();
    let Some(inner) = shape.get(axis + 1..).map(|rest| rest.iter().product::<u64>()) else {
        push(shape, fixed, 0..1, found);
        return;
    };
    let (mut row, last) = (range.start / inner, range.end / inner);
    let (head, tail) = (range.start % inner, range.end % inner);
    if head > 0 {
        let end = if row == last { tail } else { inner };
        fixed.push(row);
        descend(shape, fixed, head..end, found);
        fixed.pop();
        if row == last {
            return;
        }
        row += 1;
    }
    if row < last {
        push(shape, fixed, row..last, found);
    }
    if tail > 0 {
        fixed.push(last);
        descend(shape, fixed, 0..tail, found);
        fixed.pop();
    }
}

fn push(shape: &[u64], fixed: &[u64], rows: Range<u64>, found: &mut Vec<Region>) {
    let mut offsets = Dims::from(fixed);
    let mut sizes = Dims::from(vec![1; fixed.len()]);
    if fixed.len() < shape.len() {
        let rest = shape.get(fixed.len() + 1..).unwrap_or_default();
        offsets =
            offsets.iter().copied().chain([rows.start]).chain(rest.iter().map(|_| 0)).collect();
        sizes = sizes
            .iter()
            .copied()
            .chain([rows.end - rows.start])
            .chain(rest.iter().copied())
            .collect();
    }
    // A part of a tensor whose volume fits cannot exceed 64 bits.
    found.extend(Region::new(offsets, sizes));
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
