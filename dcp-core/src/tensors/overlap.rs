//! Finds overlapping boxes, in `O(n log n)` for the layouts that sharding produces.
//!
//! One sort proves that boxes split axis by axis, evenly or not, are disjoint. Other arrangements
//! go to a divide-and-conquer search over intervals and starting points (Zomorodian and
//! Edelsbrunner, 2000): `O(n log^d n)` for boxes that differ on `d` axes. A work limit, linear in
//! the number of boxes, bounds hostile arrangements on many axes; real ones stay far below it.

use crate::tensors::dims::Dims;

/// A box: offsets and sizes.
type Row<'a> = (&'a [u64], &'a [u64]);

/// Search steps per box, far above the `log^2 n` of three axes.
const WORK_PER_BOX: u64 = 4096;
/// The number of pairs that are compared directly.
const FEW_PAIRS: usize = 64;

/// The boxes are too many, on too many axes, and too irregular for the work limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the boxes are too many and too irregular to look for overlaps")]
pub struct TooIrregular;

/// Finds two boxes, each given by offsets and sizes, that share an element. Returns their
/// positions. Empty boxes share none.
///
/// All boxes must have the same number of axes.
///
/// # Errors
///
/// When the work limit is reached, which no sharding causes.
pub fn find_overlap(rows: &[(&[u64], &[u64])]) -> Result<Option<(usize, usize)>, TooIrregular> {
    let all: Vec<usize> = (0..rows.len()).filter(|index| !rows[*index].1.contains(&0)).collect();
    let [first, second, ..] = *all else { return Ok(None) };
    let (lead_offsets, lead_sizes) = rows[first];
    if (0..lead_offsets.len()).any(|axis| ascend(rows, &all, axis)) {
        return Ok(None);
    }
    let axes: Vec<usize> = (0..lead_offsets.len())
        .filter(|&axis| {
            let lead = (lead_offsets[axis], lead_sizes[axis]);
            all.iter().any(|&index| (rows[index].0[axis], rows[index].1[axis]) != lead)
        })
        .collect();
    if axes.is_empty() {
        return Ok(Some((first, second)));
    }
    if axes.len() > Dims::MAX_AXES {
        return Err(TooIrregular);
    }
    let mut search = Search { rows, axes, work: WORK_PER_BOX.saturating_mul(all.len() as u64) };
    let mut sorted = all.clone();
    sorted.sort_by(|&a, &b| {
        let starts = |index: usize| search.axes.iter().map(move |&axis| rows[index].0[axis]);
        starts(a).cmp(starts(b))
    });
    if search.is_split(&sorted, 0) {
        return Ok(None);
    }
    let last = search.axes.len() - 1;
    search.join(&all, &all, last)
}

/// Whether each box begins after the one before it, as the shards of ranks in order do.
fn ascend(rows: &[Row<'_>], indices: &[usize], axis: usize) -> bool {
    let mut free_from = 0;
    indices.iter().all(|&index| {
        let (start, size) = (rows[index].0[axis], rows[index].1[axis]);
        let apart = start >= free_from;
        free_from = start.saturating_add(size);
        apart
    })
}

struct Search<'a> {
    rows: &'a [Row<'a>],
    /// The axes on which the boxes differ.
    axes: Vec<usize>,
    work: u64,
}

type Found = Result<Option<(usize, usize)>, TooIrregular>;

impl Search<'_> {
    fn start(&self, index: usize, level: usize) -> u64 {
        self.rows[index].0[self.axes[level]]
    }

    fn end(&self, index: usize, level: usize) -> u64 {
        let axis = self.axes[level];
        self.rows[index].0[axis].saturating_add(self.rows[index].1[axis])
    }

    /// Whether boxes, sorted by their starts, are split axis by axis from `level` on. False does
    /// not mean that they overlap.
    fn is_split(&self, sorted: &[usize], level: usize) -> bool {
        if level == self.axes.len() {
            return sorted.len() <= 1;
        }
        let mut free_from = 0;
        sorted.chunk_by(|&a, &b| self.start(a, level) == self.start(b, level)).all(|slab| {
            let begins = slab.first().map_or(0, |&index| self.start(index, level));
            let apart = begins >= free_from;
            free_from = slab.iter().map(|&index| self.end(index, level)).max().unwrap_or(0);
            apart && self.is_split(slab, level + 1)
        })
    }

    fn overlap(&self, a: usize, b: usize) -> bool {
        a != b
            && (0..self.axes.len()).all(|level| {
                self.start(a, level) < self.end(b, level)
                    && self.start(b, level) < self.end(a, level)
            })
    }

    /// A pair of which the second starts within the first on the axis of `level` and which overlaps
    /// on all lower axes. On all higher axes, every pair is known to overlap.
    fn join(&mut self, intervals: &[usize], points: &[usize], level: usize) -> Found {
        if intervals.is_empty() || points.is_empty() {
            return Ok(None);
        }
        let cost = (intervals.len() + points.len()) as u64;
        self.work = self.work.checked_sub(cost).ok_or(TooIrregular)?;
        if intervals.len().saturating_mul(points.len()) <= FEW_PAIRS {
            let pairs = intervals.iter().flat_map(|&a| points.iter().map(move |&b| (a, b)));
            return Ok({ pairs }.find(|&(a, b)| self.overlap(a, b)));
        }
        if level == 0 {
            return Ok(self.scan(intervals, points));
        }
        let mut starts: Vec<u64> = points.iter().map(|&p| self.start(p, level)).collect();
        let (low, high) =
            starts.iter().fold((u64::MAX, 0), |(low, high), &s| (low.min(s), high.max(s)));
        let (mut spanning, mut crossing) = (Vec::new(), Vec::new());
        for &index in intervals {
            let (start, end) = (self.start(index, level), self.end(index, level));
            if start <= low && high < end {
                spanning.push(index);
            } else if low < end && start <= high {
                crossing.push(index);
            }
        }
        if let Some(found) = self.join(&spanning, points, level - 1)? {
            return Ok(Some(found));
        }
        if spanning != points
            && let Some(found) = self.join(points, &spanning, level - 1)?
        {
            return Ok(Some(found));
        }
        if crossing.is_empty() {
            return Ok(None);
        }
        // If most points start at the lowest position, they alone go left.
        let half = starts.len() / 2;
        let (_, &mut median, above) = starts.select_nth_unstable(half);
        let middle = if median > low {
            median
        } else {
            above.iter().copied().filter(|&s| s > low).min().unwrap_or(high)
        };
        let (left, right): (Vec<_>, Vec<_>) =
            points.iter().copied().partition(|&p| self.start(p, level) < middle);
        match self.join(&crossing, &left, level)? {
            None => self.join(&crossing, &right, level),
            found => Ok(found),
        }
    }

    /// [`join`](Self::join) on the last axis: merges two sorted lists.
    fn scan(&self, intervals: &[usize], points: &[usize]) -> Option<(usize, usize)> {
        let sorted = |indices: &[usize]| {
            let mut indices = indices.to_vec();
            indices.sort_unstable_by_key(|&index| (self.start(index, 0), index));
            indices
        };
        let (intervals, points) = (sorted(intervals), sorted(points));
        let mut next = 0;
        intervals.into_iter().find_map(|a| {
            while points.get(next).is_some_and(|&p| self.start(p, 0) < self.start(a, 0)) {
                next += 1;
            }
            // One of the first two points is another box than `a`.
            let near = points.iter().skip(next).take(2);
            { near }.find(|&&p| p != a && self.start(p, 0) < self.end(a, 0)).map(|&p| (a, p))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (Vec<u64>, Vec<u64>);

    fn rows(boxes: &[Owned]) -> Vec<Row<'_>> {
        boxes.iter().map(|(offsets, sizes)| (&**offsets, &**sizes)).collect()
    }

    fn overlap(a: &Owned, b: &Owned) -> bool {
        (0..a.0.len()).all(|d| {
            a.1[d] > 0 && b.1[d] > 0 && a.0[d] < b.0[d] + b.1[d] && b.0[d] < a.0[d] + a.1[d]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn agrees_with_all_pairs(
            ndim in 1_usize..5,
            raw in prop::collection::vec((prop::array::uniform4(0_u64..24), prop::array::uniform4(0_u64..6)), 0..40),
        ) {
            let boxes: Vec<Owned> =
                raw.iter().map(|(o, s)| (o[..ndim].to_vec(), s[..ndim].to_vec())).collect();
            let expected = (0..boxes.len()).any(|i| (0..i).any(|j| overlap(&boxes[i], &boxes[j])));
            let found = find_overlap(&rows(&boxes)).unwrap();
            prop_assert_eq!(found.is_some(), expected);
            if let Some((a, b)) = found {
                prop_assert!(a != b && overlap(&boxes[a], &boxes[b]));
            }
        }

        /// Disjoint by construction, and shuffled: random cuts of random boxes.
        #[test]
        fn cut_boxes_are_disjoint(cuts in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..3, 1_u64..1000), 0..300), twin in any::<prop::sample::Index>()) {
            let mut boxes: Vec<Owned> = vec![(vec![0; 3], vec![1000; 3])];
            for (which, axis, at) in cuts {
                let at_box = which.index(boxes.len());
                let (offsets, sizes) = boxes[at_box].clone();
                let first = at % sizes[axis];
                if first > 0 {
                    boxes[at_box].1[axis] = first;
                    let (mut o, mut s) = (offsets, sizes);
                    o[axis] += first;
                    s[axis] -= first;
                    boxes.push((o, s));
                }
            }
            prop_assert_eq!(find_overlap(&rows(&boxes)), Ok(None));
            let mut grown = boxes[twin.index(boxes.len())].clone();
            grown.1[0] = 1;
            boxes.push(grown);
            prop_assert!(find_overlap(&rows(&boxes)).unwrap().is_some());
        }
    }

    #[test]
    fn a_large_irregular_tiling_is_searched_fast() {
        // Pinwheels: no axis cuts any of them apart.
        let wheel = [
            ([0, 0], [2, 1]),
            ([2, 0], [1, 2]),
            ([1, 2], [2, 1]),
            ([0, 1], [1, 2]),
            ([1, 1], [1, 1]),
        ];
        let mut boxes: Vec<Owned> = Vec::new();
        for tile in 0..10_000_u64 {
            let (x, y) = (tile % 100 * 3, tile / 100 * 3);
            boxes.extend(wheel.iter().map(|(o, s)| (vec![x + o[0], y + o[1]], s.to_vec())));
        }
        assert_eq!(find_overlap(&rows(&boxes)), Ok(None));
        boxes.push((vec![150, 151], vec![1, 1]));
        assert!(find_overlap(&rows(&boxes)).unwrap().is_some());
    }

    #[test]
    fn hostile_numbers_of_axes_end() {
        let wide = |n: u64| (vec![n; 100], vec![2; 100]);
        assert_eq!(find_overlap(&rows(&[wide(5), wide(0)])), Err(TooIrregular));
        // Sticks along many axes, which cross in no point but look as if they did.
        let boxes: Vec<Owned> = (0..3000_u64)
            .map(|n| {
                let axis = (n % 12) as usize;
                let mut sizes = vec![1; 12];
                sizes[axis] = 1 << 20;
                let offsets = (0..12_u64).map(|d| (n * 7919 + d * 104_729) % 4096).collect();
                (offsets, sizes)
            })
            .collect();
        let _ = find_overlap(&rows(&boxes));
    }
}
