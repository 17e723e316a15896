//! Finds the chunks that intersect a box without testing all of them.

use std::collections::HashMap;

use dcp_core::{Dims, Region};

/// The boxes of a tensor's chunks, indexed by position.
///
/// Tensors of many layers and experts have one or more chunks for each index of their first axes;
/// the index maps those to chunks. Chunks with the same first indices are sorted along the next
/// axis.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChunkIndex {
    /// The number of leading axes on which every chunk has size 1.
    unit_axes: usize,
    buckets: HashMap<Dims, Bucket>,
}

/// Chunks with the same leading indices, ordered by their start on the next axis.
#[derive(Clone, Debug, Default)]
struct Bucket {
    chunks: Vec<(u32, Region)>,
    /// The furthest end of this chunk and all before it.
    ends: Vec<u64>,
}

impl ChunkIndex {
    /// Builds an index of chunks and their positions in the table. All have the same number of
    /// axes.
    pub(crate) fn new(chunks: Vec<(u32, Region)>) -> Self {
        let ndim = chunks.iter().map(|(_, region)| region.ndim()).min().unwrap_or(0);
        let is_unit = |axis: usize| chunks.iter().all(|(_, region)| region.sizes()[axis] == 1);
        let unit_axes = (0..ndim).take_while(|axis| is_unit(*axis)).count();
        let mut buckets: HashMap<Dims, Bucket> = HashMap::new();
        for (chunk, region) in chunks {
            let prefix = region.offsets().iter().take(unit_axes).copied().collect();
            buckets.entry(prefix).or_default().chunks.push((chunk, region));
        }
        for bucket in buckets.values_mut() {
            bucket.sort(unit_axes);
        }
        Self { unit_axes, buckets }
    }

    /// The chunks that intersect `wanted`, and the intersections, in the order of the table.
    pub(crate) fn find(&self, wanted: &Region) -> Vec<(u32, Region)> {
        let mut found = Vec::new();
        let sizes: Dims = wanted.sizes().iter().take(self.unit_axes).copied().collect();
        let indices = sizes.checked_volume().unwrap_or(u64::MAX);
        if wanted.is_empty() {
            return found;
        }
        if indices > self.buckets.len() as u64 {
            for bucket in self.buckets.values() {
                bucket.find(self.unit_axes, wanted, &mut found);
            }
        } else {
            for at in 0..indices {
                if let Some(bucket) = self.buckets.get(&index(wanted, &sizes, at)) {
                    bucket.find(self.unit_axes, wanted, &mut found);
                }
            }
        }
        found.sort_unstable_by_key(|(chunk, _)| *chunk);
        found
    }
}

/// Row-major index number `at` of a region's leading axes.
fn index(region: &Region, sizes: &Dims, mut at: u64) -> Dims {
    let mut index: Dims = region.offsets().iter().take(sizes.ndim()).copied().collect();
    for axis in (0..sizes.ndim()).rev() {
        index[axis] += at % sizes[axis];
        at /= sizes[axis];
    }
    index
}

impl Bucket {
    fn sort(&mut self, axis: usize) {
        let start = |region: &Region| region.offsets().get(axis).copied().unwrap_or(0);
        self.chunks.sort_by_key(|(_, region)| start(region));
        let mut furthest = 0;
        for (_, region) in &self.chunks {
            let end = if axis < region.ndim() { region.end(axis) } else { 1 };
            furthest = furthest.max(end);
            self.ends.push(furthest);
        }
    }

    fn find(&self, axis: usize, wanted: &Region, found: &mut Vec<(u32, Region)>) {
        let (start, end) = match wanted.offsets().get(axis) {
            Some(start) => (*start, wanted.end(axis)),
            None => (0, 1),
        };
        let begins_before =
            |(_, region): &(u32, Region)| region.offsets().get(axis).is_none_or(|at| *at < end);
        let behind = self.chunks.partition_point(begins_before);
        let candidates = self.chunks.iter().zip(&self.ends).take(behind).rev();
        for ((chunk, region), _) in candidates.take_while(|(_, furthest)| **furthest > start) {
            found.extend(region.intersect(wanted).map(|shared| (*chunk, shared)));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region() -> impl Strategy<Value = Region> {
        let axis = || (0_u64..6, 1_u64..4);
        (0_u64..4, 1_u64..2, axis(), axis()).prop_map(|(layer, one, (a, m), (b, n))| {
            Region::new([layer, a, b], [one, m, n]).unwrap()
        })
    }

    proptest! {
        #[test]
        fn it_finds_what_a_walk_over_all_finds(
            chunks in proptest::collection::vec(region(), 0..24),
            unit in any::<bool>(),
            wanted in (0_u64..4, 0_u64..3, region()),
        ) {
            let (layer, layers, inner) = wanted;
            let (at, sizes) = (inner.offsets(), inner.sizes());
            let wanted = Region::new([layer, at[1], at[2]], [layers, sizes[1], sizes[2]]).unwrap();
            let mut chunks: Vec<(u32, Region)> = (0..).zip(chunks).collect();
            if !unit {
                chunks.push((24, Region::new([0, 0, 0], [2, 2, 2]).unwrap()));
            }
            let all: Vec<_> = chunks
                .iter()
                .filter_map(|(at, region)| Some((*at, region.intersect(&wanted)?)))
                .collect();
            prop_assert_eq!(ChunkIndex::new(chunks).find(&wanted), all);
        }
    }

    #[test]
    fn tensors_without_axes_have_one_chunk() {
        let scalar = Region::full([]).unwrap();
        let index = ChunkIndex::new(vec![(0, scalar.clone())]);
        assert_eq!(index.find(&scalar), [(0, scalar)]);
        assert_eq!(ChunkIndex::default().find(&Region::full([2]).unwrap()), []);
    }
}
