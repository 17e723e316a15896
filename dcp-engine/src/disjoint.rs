//! Boxes that ranks need, so that each element is read once.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::{Dims, Region};

/// The most different boxes of one chunk that are compared with each other; where there are more, all
/// between them is taken.
const BOXES_MAX: usize = 64;

/// Boxes without a common element that hold everything `regions` hold, and (for up to 64
/// different ones) nothing else.
pub(crate) fn disjoint(regions: Vec<Region>) -> Vec<Region> {
    let mut seen = BTreeSet::new();
    let key = |region: &Region| (region.offsets().to_vec(), region.sizes().to_vec());
    let different: Vec<Region> = regions
        .into_iter()
        .filter(|region| !region.is_empty() && seen.insert(key(region)))
        .collect();
    let Some(hull) = hull(&different) else { return different };
    if different.len() > BOXES_MAX {
        return vec![hull];
    }
    let mut found: Vec<Region> = Vec::with_capacity(different.len());
    for region in different {
        let mut open = vec![region];
        for known in &found {
            open = open.into_iter().flat_map(|part| without(&part, known)).collect();
        }
        found.extend(open);
    }
    let volume = found.iter().map(Region::volume).fold(0, u64::saturating_add);
    // Together they are one box, which is cheaper to read.
    if volume == hull.volume() { vec![hull] } else { found }
}

/// The most boxes of one chunk that are distinguished by the ranks that need them.
const PARTS_MAX: usize = 4096;

/// Boxes without a common element that hold everything `regions` hold, each with all whose regions
/// it is in, ascending. Of more than 512 different regions, or where they cut each other into
/// too many parts, it is the box around all of them, for every rank.
pub(crate) fn overlay(regions: Vec<(Region, u32)>) -> Vec<(Region, Vec<u32>)> {
    const DIFFERENT_MAX: usize = 512;
    let mut different: BTreeMap<(Dims, Dims), BTreeSet<u32>> = BTreeMap::new();
    for (region, who) in regions.into_iter().filter(|(region, _)| !region.is_empty()) {
        let key = (region.offsets().clone(), region.sizes().clone());
        different.entry(key).or_default().insert(who);
    }
    let count = different.len();
    let mut found: Vec<(Region, BTreeSet<u32>)> = Vec::with_capacity(count);
    let regions = different.into_iter().filter_map(|((offsets, sizes), who)| {
        Region::new(offsets, sizes).ok().map(|region| (region, who))
    });
    if count > DIFFERENT_MAX {
        return around_all(regions);
    }
    let regions: Vec<_> = regions.collect();
    for (region, who) in &regions {
        let mut open = vec![region.clone()];
        let mut cut = Vec::with_capacity(found.len() + 1);
        for (known, whose) in found {
            let Some(common) = known.intersect(region) else {
                cut.push((known, whose));
                continue;
            };
            open = open.into_iter().flat_map(|part| without(&part, &known)).collect();
            cut.extend(without(&known, region).into_iter().map(|part| (part, whose.clone())));
            cut.push((common, &whose | who));
        }
        cut.extend(open.into_iter().map(|part| (part, who.clone())));
        found = cut;
        if found.len() > PARTS_MAX {
            return around_all(regions.into_iter());
        }
    }
    found.into_iter().map(|(region, who)| (region, who.into_iter().collect())).collect()
}

fn around_all(regions: impl Iterator<Item = (Region, BTreeSet<u32>)>) -> Vec<(Region, Vec<u32>)> {
    let (regions, who): (Vec<_>, Vec<_>) = regions.unzip();
    let all: BTreeSet<u32> = who.into_iter().flatten().collect();
    hull(&regions).map(|hull| (hull, all.into_iter().collect())).into_iter().collect()
}

/// The smallest box around all regions.
fn hull(regions: &[Region]) -> Option<Region> {
    let (first, rest) = regions.split_first()?;
    let mut start = first.offsets().to_vec();
    let mut end: Vec<u64> = (0..first.ndim()).map(|axis| first.end(axis)).collect();
    for region in rest {
        for (axis, (start, end)) in start.iter_mut().zip(&mut end).enumerate() {
            *start = (*start).min(region.offsets().get(axis).copied().unwrap_or(0));
            *end = (*end).max(region.end(axis));
        }
    }
    let sizes: Dims = start.iter().zip(&end).map(|(start, end)| end - start).collect();
    Region::new(start, sizes).ok()
}

/// Returns the boxes of `region` that are outside of `hole`: at most two an axis.
fn without(region: &Region, hole: &Region) -> Vec<Region> {
    let Some(hole) = region.intersect(hole) else { return vec![region.clone()] };
    let (mut offsets, mut sizes) = (region.offsets().clone(), region.sizes().clone());
    let mut parts = Vec::new();
    for axis in 0..region.ndim() {
        let (start, end) = (offsets[axis], offsets[axis] + sizes[axis]);
        let (from, to) = (hole.offsets()[axis], hole.end(axis));
        for (from, to) in [(start, from), (to, end)] {
            if from < to {
                (offsets[axis], sizes[axis]) = (from, to - from);
                parts.extend(Region::new(offsets.clone(), sizes.clone()));
            }
        }
        (offsets[axis], sizes[axis]) = (from, to - from);
    }
    parts
}

/// Cuts a box, along rows where it can, into boxes of at most `volume` elements.
pub(crate) fn cut(region: Region, volume: u64) -> impl Iterator<Item = Region> {
    let volume = volume.max(1);
    let mut open = vec![region];
    std::iter::from_fn(move || {
        loop {
            let region = open.pop()?;
            if region.volume() <= volume {
                return Some(region);
            }
            // The outermost axis that can be cut; inside of it, rows stay whole.
            let axis = region.sizes().iter().position(|size| *size > 1)?;
            let row = region.volume() / region.sizes()[axis];
            let rows = (volume / row).max(1);
            let (mut offsets, mut sizes) = (region.offsets().clone(), region.sizes().clone());
            let rest = sizes[axis] - rows;
            sizes[axis] = rows;
            let first = Region::new(offsets.clone(), sizes.clone());
            offsets[axis] += rows;
            sizes[axis] = rest;
            // The rest comes after the first part, and is never in more pieces than axes.
            open.extend(Region::new(offsets, sizes));
            open.extend(first);
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn elements(regions: &[Region]) -> Vec<u64> {
        let shape = [6, 5, 4];
        let all = regions.iter().flat_map(|region| region.runs_in(&shape).collect::<Vec<_>>());
        let mut all: Vec<u64> = all.flat_map(|(at, len)| at..at + len).collect();
        all.sort_unstable();
        all
    }

    fn region() -> impl Strategy<Value = Region> {
        (0_u64..6, 0_u64..5, 0_u64..4, 0_u64..7, 0_u64..6, 0_u64..5).prop_map(
            |(x, y, z, a, b, c)| {
                Region::new([x, y, z], [a.min(6 - x), b.min(5 - y), c.min(4 - z)]).unwrap()
            },
        )
    }

    proptest! {
        #[test]
        fn every_element_is_in_exactly_one_box(regions in prop::collection::vec(region(), 0..6)) {
            let mut wanted = elements(&regions);
            wanted.dedup();
            prop_assert_eq!(elements(&disjoint(regions)), wanted);
        }

        #[test]
        fn everybody_finds_what_they_need_in_boxes_of_their_own(
            regions in prop::collection::vec((region(), 0_u32..4), 0..7),
        ) {
            let parts = overlay(regions.clone());
            let boxes: Vec<_> = parts.iter().map(|(region, _)| region.clone()).collect();
            let mut all = elements(&regions.iter().map(|r| r.0.clone()).collect::<Vec<_>>());
            all.dedup();
            prop_assert_eq!(elements(&boxes), all, "each element once");
            for rank in 0..4 {
                let of = |whose: Vec<Region>| {
                    let mut elements = elements(&whose);
                    elements.dedup();
                    elements
                };
                let mine = regions.iter().filter(|(_, who)| *who == rank);
                let marked = parts.iter().filter(|(_, who)| who.contains(&rank));
                prop_assert_eq!(
                    of(mine.map(|(region, _)| region.clone()).collect()),
                    of(marked.map(|(region, _)| region.clone()).collect())
                );
            }
        }

        #[test]
        fn pieces_are_small_and_whole(region in region(), volume in 1_u64..40) {
            let pieces: Vec<_> = cut(region.clone(), volume).collect();
            prop_assert!(pieces.iter().all(|piece| piece.volume() <= volume));
            prop_assert_eq!(elements(&pieces), elements(&[region]));
        }
    }

    #[test]
    fn rows_of_many_ranks_are_one_box() {
        let rows = |n: u64| (0..n).map(|at| Region::new([at, 0], [1, 3]).unwrap()).collect();
        let whole = |n| vec![Region::full([n, 3]).unwrap()];
        assert_eq!(disjoint(rows(5)), whole(5));
        assert_eq!(disjoint(rows(500)), whole(500));
        assert_eq!(disjoint(Vec::new()), Vec::new());
    }

    #[test]
    fn what_would_be_cut_too_finely_stays_one_box_for_all() {
        let rows =
            |n: u32| (0..n).map(|at| (Region::new([at.into(), 0], [1, 3]).unwrap(), at)).collect();
        assert_eq!(overlay(rows(500)).len(), 500, "neighbors need not share");
        let all = (Region::full([600, 3]).unwrap(), (0..600).collect());
        assert_eq!(overlay(rows(600)), [all]);
        assert_eq!(overlay(Vec::new()), []);
        // Crosses of bars, each pair of which has elements in common.
        let bars = (0..100_u32).flat_map(|at| {
            let at64 = u64::from(at) * 2;
            let bars = [Region::new([at64, 0], [1, 200]), Region::new([0, at64], [200, 1])];
            bars.map(|bar| (bar.unwrap(), at))
        });
        assert_eq!(overlay(bars.collect()).len(), 1);
    }

    #[test]
    fn the_longest_axis_is_cut_without_listing_its_rows() {
        let huge = Region::full([1 << 50, 8]).unwrap();
        let mut pieces = cut(huge, 3);
        assert_eq!(pieces.next(), Region::new([0, 0], [1, 3]).ok());
        assert_eq!(pieces.nth(2), Region::new([1, 0], [1, 3]).ok());
    }
}
