//! Laws of regions, views and loans, against plain models.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;

use dcp_core::{Buffer, DType, HostMemory, Region, TensorView};
use proptest::prelude::*;

/// A shape and a box inside it.
fn boxed(max_ndim: usize) -> impl Strategy<Value = (Vec<u64>, Region)> {
    prop::collection::vec(0..=5_u64, 0..=max_ndim).prop_flat_map(|shape| {
        let axes = shape
            .iter()
            .map(|&size| (0..=size).prop_flat_map(move |o| (Just(o), 0..=size - o)))
            .collect::<Vec<_>>();
        (Just(shape), axes).prop_map(|(shape, axes)| {
            let (offsets, sizes): (Vec<_>, Vec<_>) = axes.into_iter().unzip();
            (shape, Region::new(offsets, sizes).unwrap())
        })
    })
}

/// The row-major positions of a box, element by element.
fn walk(shape: &[u64], region: &Region) -> Vec<u64> {
    let mut positions = vec![0];
    for (axis, size) in shape.iter().enumerate() {
        let range = region.offsets()[axis]..region.end(axis);
        positions = positions
            .iter()
            .flat_map(|at| range.clone().map(move |index| at * size + index))
            .collect();
    }
    positions
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn runs_are_the_elements_in_order((shape, region) in boxed(4)) {
        let runs: Vec<_> = region.runs_in(&shape).collect();
        let elements: Vec<u64> = runs.iter().flat_map(|(at, len)| *at..at + len).collect();
        prop_assert_eq!(elements, walk(&shape, &region));
        for pair in runs.windows(2) {
            prop_assert!(pair[0].0 + pair[0].1 < pair[1].0, "neighbors merge: {:?}", pair);
        }
    }

    #[test]
    fn an_intersection_is_what_both_hold((shape, a) in boxed(3), seed in any::<u64>()) {
        // A second box in the same shape, from the seed.
        let mut left = seed;
        let mut next = |bound: u64| { let n = left % (bound + 1); left /= bound + 1; n };
        let offsets: Vec<u64> = shape.iter().map(|&size| next(size)).collect();
        let sizes: Vec<u64> = shape.iter().zip(&offsets).map(|(s, o)| next(s - o)).collect();
        let b = Region::new(offsets, sizes).unwrap();
        let set = |r: &Region| walk(&shape, r).into_iter().collect::<BTreeSet<_>>();
        let common: BTreeSet<u64> = set(&a).intersection(&set(&b)).copied().collect();
        match a.intersect(&b) {
            Some(both) => {
                prop_assert_eq!(set(&both), common);
                prop_assert!(a.contains(&both) && b.contains(&both));
                prop_assert_eq!(b.intersect(&a), Some(both));
            }
            None => prop_assert!(common.is_empty()),
        }
    }

    #[test]
    fn a_narrowed_view_holds_the_elements_of_its_region((shape, region) in boxed(4)) {
        let count = shape.iter().product::<u64>() as usize;
        let elements: Vec<u8> = (0..count).flat_map(|n| (n as u16).to_le_bytes()).collect();
        let memory = HostMemory::from_vec(elements);
        let whole = TensorView::contiguous(memory, DType::Int16, &shape[..], 0).unwrap();
        let part = whole.narrow(&region).unwrap();
        let bytes = part.payload().unwrap().to_bytes();
        let read: Vec<u64> =
            bytes.chunks(2).map(|b| u64::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        prop_assert_eq!(&read, &walk(&shape, &region));
        drop(bytes);

        let filled: Vec<u8> = read.iter().flat_map(|n| (!(*n as u16)).to_le_bytes()).collect();
        part.fill_from(&filled).unwrap();
        prop_assert_eq!(&part.payload().unwrap().to_bytes()[..], &filled[..]);
    }

    #[test]
    fn loans_never_overlap(steps in prop::collection::vec((0..3_u8, 0..24_usize, 0..24_usize), 1..40)) {
        let memory = HostMemory::zeroed(24);
        let mut writers: Vec<(usize, usize, Buffer)> = Vec::new();
        let mut readers = Vec::new();
        for (step, a, b) in steps {
            let (start, end) = (a.min(b), a.max(b));
            match step {
                0 => {
                    let free = readers.is_empty()
                        && writers.iter().all(|(s, e, _)| end <= *s || *e <= start);
                    let loan = memory.lend(start..end);
                    prop_assert_eq!(loan.is_ok(), start == end || free);
                    if let Ok(buffer) = loan && start < end {
                        writers.push((start, end, buffer));
                    }
                }
                1 => {
                    let loan = memory.read();
                    prop_assert_eq!(loan.is_ok(), writers.is_empty());
                    readers.extend(loan);
                }
                _ if a % 2 == 0 => { writers.pop(); }
                _ => { readers.pop(); }
            }
        }
    }
}
