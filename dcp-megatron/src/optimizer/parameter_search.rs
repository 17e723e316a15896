//! Finds parameters in a flat buffer by their elements.
//!
//! The master parameter of a weight, cast to the weight's dtype, is the weight. So the elements
//! at a place of the buffer show which parameters can begin there, and the hash of as many
//! elements as one has shows whether it is there. Parameters with the same elements are one
//! *class* here; which of them is which is decided later, by their order.
//!
//! There are two searches:
//!
//! - **With bounds**, where the file has a chunk for each parameter and rank: from each bound, the class
//!   that ends at a bound and cuts the fewest chunks that no rank's part explains. No step is taken back.
//! - **Without bounds**, in one buffer: a depth-first search with backtracking. A step is a parameter at
//!   the next aligned place. A wrong step is possible where one parameter begins with the elements of
//!   another, as zeros do, and shows only later, where nothing fits. Then the last step with another
//!   choice is taken back. `path` holds the steps with the choices that are left at each.
//!
//! Why not try all sizes: a bucket of a model has thousands of parameters, and the number of ways grows
//! with each. Two bounds keep the search linear: elements are compared by their beginning first and by a
//! hash once for each place and length, and after [`STEPS`] for each parameter the search gives up
//! and reports how far it came. Parameters that are none of the model's, at most [`UNKNOWN_MAX`], are
//! allowed only when the search without them fails, because with them almost anything fits.
//!
//! Invariant: a slot is reported only where the hash of all its elements is that of the class.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use async_trait::async_trait;
use dcp_core::CheckpointError;

use super::layout::ALIGNMENT;
use super::shards::{Fingerprint, Known};

/// Master parameters in the model's dtype, among which parameters are searched.
#[async_trait]
pub(super) trait Elements: Sync {
    /// The bytes of the elements `range` of a bucket.
    async fn read(&self, bucket: usize, range: Range<u64>) -> Result<Vec<u8>, CheckpointError>;

    /// The SHA-256 of those.
    async fn digest(&self, bucket: usize, range: Range<u64>) -> Result<[u8; 32], CheckpointError>;
}

/// A bucket, without its elements.
#[derive(Clone, Debug, Default)]
pub(super) struct BucketShape {
    pub(super) elements: u64,
    /// The boundaries of its chunks, if they are those of parameters.
    pub(super) bounds: Option<BTreeSet<u64>>,
    /// The data-parallel ranks that share the bucket, and how many elements each has: chunks may
    /// end where a rank's part does.
    pub(super) ranks: Option<(u64, u64)>,
    /// Whether several buckets lie here, one after the other.
    pub(super) coalesced: bool,
    /// Whether there may be padding at the end, of a length that is not known.
    pub(super) padded: bool,
}

impl BucketShape {
    /// Leaves out the padding behind the first `elements`.
    pub(super) fn end_at(&mut self, elements: u64) {
        let fits = self.elements.checked_sub(elements).is_some_and(|padding| padding < PADDING_MAX);
        if !fits {
            return;
        }
        self.elements = elements;
        self.padded = false;
        if let Some(bounds) = &mut self.bounds {
            bounds.retain(|bound| *bound < elements);
            bounds.insert(elements);
        }
    }

    /// Whether the part of a rank ends here, and that of another begins.
    fn is_rank_bound(&self, bound: u64) -> bool {
        self.ranks.is_some_and(|(ranks, share)| {
            let rank = bound.checked_div(share).unwrap_or(0);
            rank > 0 && rank < ranks && bound.is_multiple_of(share)
        })
    }
}

/// The place of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) bucket: usize,
    pub(super) range: Range<u64>,
    pub(super) class: usize,
}

/// The parameters found in the buckets of a buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Walked {
    pub(super) slots: Vec<Slot>,
    /// Places at which a parameter begins that is none of the model's.
    pub(super) unknown: Vec<(usize, u64)>,
}

/// Something in a bucket without bounds.
#[derive(Clone, Copy, Debug)]
struct Step {
    start: u64,
    end: u64,
    /// The first element of the bucket.
    base: u64,
    /// The class of the parameter; `None` when it is none of the model's.
    class: Option<usize>,
}

/// Parameters of a bucket without bounds that need not be of the model for the others to be found.
const UNKNOWN_MAX: usize = 2;
/// Sizes to try for those.
const SIZES_MAX: usize = 64;
/// Steps to take before the search of a buffer stops, for each of its parameters.
const STEPS: usize = 64;
/// The longest padding at the end of a bucket, in elements.
const PADDING_MAX: u64 = 1 << 22;

/// Finds the parameters in the buckets of one group of ranks.
pub(super) async fn walk(
    known: &Known,
    buckets: &[BucketShape],
    elements: &dyn Elements,
) -> Result<Walked, CheckpointError> {
    let mut walker = Walker { known, elements, digests: HashMap::new() };
    let mut walked = Walked::default();
    for (bucket, shape) in buckets.iter().enumerate() {
        match &shape.bounds {
            Some(bounds) => walker.along_bounds(bucket, shape, bounds, &mut walked).await?,
            None => walker.without_bounds(bucket, shape, &mut walked).await?,
        }
    }
    Ok(walked)
}

struct Walker<'a> {
    known: &'a Known,
    elements: &'a dyn Elements,
    digests: HashMap<(usize, u64, u64), [u8; 32]>,
}

impl Walker<'_> {
    /// The classes that begin at a place of a bucket, largest first.
    async fn at(
        &mut self,
        bucket: usize,
        start: u64,
        end: u64,
    ) -> Result<Vec<usize>, CheckpointError> {
        let room = end.saturating_sub(start);
        let Some(longest) = self.known.head_lengths.iter().find(|length| **length <= room) else {
            return Ok(Vec::new());
        };
        let head = self.elements.read(bucket, start..start + longest).await?;
        let size = head.len() / usize::try_from(*longest).unwrap_or(usize::MAX).max(1);
        let mut likely = Vec::new();
        for length in self.known.head_lengths.iter().filter(|length| *length <= longest) {
            let bytes = usize::try_from(*length).unwrap_or(usize::MAX).saturating_mul(size);
            if let Some(classes) = head.get(..bytes).and_then(|head| self.known.heads.get(head)) {
                likely.extend_from_slice(classes);
            }
        }
        let length = |class: &usize| self.known.prints.get(*class).map_or(0, |p| p.elements);
        likely.retain(|class| (1..=room).contains(&length(class)));
        likely.sort_unstable_by_key(|class| std::cmp::Reverse(length(class)));
        let mut found = Vec::new();
        for class in likely {
            let Some(Fingerprint { elements, digest }) = self.known.prints.get(class) else {
                continue;
            };
            let place = (bucket, start, *elements);
            let there = match self.digests.get(&place) {
                Some(there) => *there,
                None => {
                    let there = self.elements.digest(bucket, start..start + elements).await?;
                    self.digests.insert(place, there);
                    there
                }
            };
            if there == *digest {
                found.push(class);
            }
        }
        Ok(found)
    }

    /// Every chunk is a parameter, a part of one, or a gap: parameters begin and end with chunks.
    async fn along_bounds(
        &mut self,
        bucket: usize,
        shape: &BucketShape,
        bounds: &BTreeSet<u64>,
        walked: &mut Walked,
    ) -> Result<(), CheckpointError> {
        let end = shape.elements;
        let mut after = 0_u64;
        let mut at = Some(0_u64);
        while let Some(start) = at.filter(|start| *start < end) {
            // A chunk ends inside of a parameter only where the part of a rank does.
            let cuts = |stop: u64| {
                let inner = bounds.range(start + 1..stop);
                inner.filter(|bound| !shape.is_rank_bound(**bound)).count()
            };
            let stop = |class: usize| {
                start + self.known.prints.get(class).map_or(0, |print| print.elements)
            };
            let fitting = self.at(bucket, start, end).await?;
            let fitting = fitting.into_iter().filter(|class| {
                let stop = stop(*class);
                stop == end || bounds.contains(&stop)
            });
            match fitting.min_by_key(|class| cuts(stop(*class))) {
                Some(class) => {
                    after = stop(class);
                    walked.slots.push(Slot { bucket, range: start..after, class });
                    at = Some(after);
                }
                None => {
                    // Padding is one chunk, from the last parameter to the end.
                    let padding = shape.padded
                        && start == after
                        && end - start < PADDING_MAX
                        && bounds.range(start + 1..end).next().is_none();
                    if after.checked_next_multiple_of(ALIGNMENT) == Some(start) && !padding {
                        walked.unknown.push((bucket, start));
                    }
                    at = bounds.range(start + 1..).next().copied();
                }
            }
        }
        Ok(())
    }

    /// Parameters lie one after the other, aligned; only its size shows where one ends.
    async fn without_bounds(
        &mut self,
        bucket: usize,
        shape: &BucketShape,
        walked: &mut Walked,
    ) -> Result<(), CheckpointError> {
        let mut furthest = 0;
        for unknown in 0..=UNKNOWN_MAX {
            match self.search(bucket, shape, unknown).await? {
                Ok(path) => {
                    for step in path {
                        let range = step.start..step.end;
                        match step.class {
                            Some(class) => walked.slots.push(Slot { bucket, range, class }),
                            None => walked.unknown.push((bucket, range.start)),
                        }
                    }
                    return Ok(());
                }
                Err(reached) if unknown == 0 => furthest = reached,
                Err(_) => {}
            }
        }
        walked.unknown.push((bucket, furthest));
        Ok(())
    }

    /// A way through a bucket to its end, on which up to `unknown` parameters are none of the
    /// model's, of sizes that others have; or how far one gets.
    async fn search(
        &mut self,
        bucket: usize,
        shape: &BucketShape,
        unknown: usize,
    ) -> Result<Result<Vec<Step>, u64>, CheckpointError> {
        let mut left = STEPS.saturating_mul(self.known.params.len().max(1));
        // What was chosen so far, each with what else could have been.
        let mut path: Vec<(Step, Vec<Step>)> = Vec::new();
        let mut furthest = 0_u64;
        let mut choices = self.choices(bucket, shape, 0, 0, unknown > 0).await?;
        loop {
            let at = path.last().map_or(0, |(step, _)| step.end);
            let is_end = at == shape.elements
                || (shape.padded && shape.elements - at < PADDING_MAX && choices.is_empty());
            if is_end {
                return Ok(Ok(path.into_iter().map(|(step, _)| step).collect()));
            }
            if left == 0 {
                return Ok(Err(furthest));
            }
            left -= 1;
            if let Some(step) = choices.pop() {
                furthest = furthest.max(step.end);
                path.push((step, std::mem::take(&mut choices)));
                let used = path.iter().filter(|(step, _)| step.class.is_none()).count();
                let more = used < unknown;
                choices = self.choices(bucket, shape, step.end, step.base, more).await?;
            } else if let Some((_, others)) = path.pop() {
                choices = others;
            } else {
                return Ok(Err(furthest));
            }
        }
    }

    /// Returns the steps that can follow at `at` of a bucket that begins at `base`, the likeliest
    /// last. With `unknown`, where no known parameter follows, anything of a known size.
    async fn choices(
        &mut self,
        bucket: usize,
        shape: &BucketShape,
        at: u64,
        base: u64,
        unknown: bool,
    ) -> Result<Vec<Step>, CheckpointError> {
        let mut starts = Vec::new();
        let aligned = (at - base).checked_next_multiple_of(ALIGNMENT);
        starts.extend(aligned.and_then(|offset| base.checked_add(offset)).map(|s| (s, base)));
        if shape.coalesced && at > base && starts.iter().all(|(start, _)| *start != at) {
            // The padding between two buckets is not stored. What looks like a parameter there is
            // one rather than a gap before an aligned one.
            starts.push((at, at));
        }
        starts.retain(|(start, _)| *start < shape.elements);
        let mut choices = Vec::new();
        for (start, base) in &starts {
            let found = self.at(bucket, *start, shape.elements).await?;
            choices.extend(found.into_iter().rev().filter_map(|class| {
                let end = start.checked_add(self.known.prints.get(class)?.elements)?;
                Some(Step { start: *start, end, base: *base, class: Some(class) })
            }));
        }
        if choices.is_empty() && unknown {
            let sizes: BTreeSet<u64> = self.known.prints.iter().map(|p| p.elements).collect();
            for (start, base) in starts {
                // The smallest first, so that a known parameter is never matched as a part of a larger one.
                let sizes = sizes.iter().take(SIZES_MAX).rev();
                let ends = sizes.filter_map(|size| start.checked_add(*size));
                let ends = ends.filter(|end| *end <= shape.elements);
                choices.extend(ends.map(|end| Step { start, end, base, class: None }));
            }
        }
        Ok(choices)
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Region;
    use dcp_core::digest::sha256;
    use proptest::prelude::*;

    use super::*;
    use crate::optimizer::layout::{FlatBucket, FlatLayoutOptions, FlatParam, flat_layout};
    use crate::optimizer::shards::{HEAD, LocalParam};

    /// Buckets in memory, an element a byte.
    struct InMemory(Vec<Vec<u8>>);

    #[async_trait]
    impl Elements for InMemory {
        async fn read(&self, bucket: usize, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
            Ok(self.0[bucket][range.start as usize..range.end as usize].to_vec())
        }

        async fn digest(
            &self,
            bucket: usize,
            range: Range<u64>,
        ) -> Result<[u8; 32], CheckpointError> {
            Ok(sha256(self.read(bucket, range).await?))
        }
    }

    fn known(params: &[Vec<u8>]) -> Known {
        let local = |(at, bytes): (usize, &Vec<u8>)| LocalParam {
            key: format!("param.{at}").into(),
            entry: at,
            boxes: vec![Region::full([bytes.len() as u64]).unwrap()],
            elements: bytes.len() as u64,
            layer: None,
            expert: None,
            part: (0, 1),
        };
        let print = |bytes: &Vec<u8>| {
            let (elements, digest) = (bytes.len() as u64, sha256(bytes));
            let head = bytes[..bytes.len().min(HEAD as usize)].to_vec();
            (head.into(), Fingerprint { elements, digest })
        };
        Known::new(
            params.iter().enumerate().map(local).collect(),
            params.iter().map(print).collect(),
        )
    }

    /// The elements of a bucket; gaps hold whatever was in memory.
    fn fill(bucket: &FlatBucket, params: &mut impl Iterator<Item = Vec<u8>>, gap: u8) -> Vec<u8> {
        let mut elements = vec![gap; bucket.unpadded as usize];
        for place in &bucket.params {
            let place = place.start as usize..place.end as usize;
            elements[place].copy_from_slice(&params.next().unwrap());
        }
        elements
    }

    fn found(known: &Known, shapes: &[BucketShape], buckets: Vec<Vec<u8>>) -> Walked {
        dcp_testing::block_on(walk(known, shapes, &InMemory(buckets))).unwrap()
    }

    fn places(walked: &Walked) -> Vec<(usize, Range<u64>)> {
        walked.slots.iter().map(|slot| (slot.bucket, slot.range.clone())).collect()
    }

    #[test]
    fn what_is_no_parameter_of_the_model_is_said() {
        let params = [vec![1; 64], vec![2; 64]];
        let strange = [params[0].clone(), vec![9; 64], params[1].clone()].concat();
        let shape = |bounds: Option<BTreeSet<u64>>| BucketShape {
            elements: 192,
            bounds,
            ..BucketShape::default()
        };
        let known = known(&params);
        let bounds = BTreeSet::from([0, 64, 128, 192]);
        let walked = found(&known, &[shape(Some(bounds))], vec![strange.clone()]);
        assert_eq!(places(&walked), [(0, 0..64), (0, 128..192)]);
        assert_eq!(walked.unknown, [(0, 64)]);
        // Without bounds only its size shows where the next one begins: that of another one.
        let walked = found(&known, &[shape(None)], vec![strange]);
        assert_eq!(places(&walked), [(0, 0..64), (0, 128..192)]);
        assert_eq!(walked.unknown, [(0, 64)]);
        let longer = [params[0].clone(), vec![9; 128], params[1].clone()].concat();
        let shape = BucketShape { elements: 256, ..BucketShape::default() };
        let walked = found(&known, std::slice::from_ref(&shape), vec![longer]);
        assert_eq!(walked.unknown, [(0, 64), (0, 128)]);
        let none = found(&known, &[shape], vec![vec![9; 256]]);
        assert_eq!((none.slots, none.unknown), (vec![], vec![(0, 0)]));
    }

    #[test]
    fn a_wrong_turn_is_taken_back() {
        // The first two have the elements of the third.
        let params = [vec![1; 64], vec![1; 64], vec![1; 128], vec![3; 8]];
        let stored = [vec![1; 128], vec![1; 64], vec![1; 64], vec![3; 8]].concat();
        let elements = stored.len() as u64;
        let shape = BucketShape { elements, ..BucketShape::default() };
        let walked = found(&known(&params), &[shape], vec![stored]);
        assert_eq!(walked.unknown, []);
        assert_eq!(places(&walked).last(), Some(&(0, 256..264)));
    }

    #[test]
    fn looking_for_parameters_comes_to_an_end() {
        // Every way to cut the zeros into parameters fails only at the end.
        let params: Vec<_> = (1..9).map(|at| vec![0; at * 64]).collect();
        let mut stored = vec![0; 64 * 64];
        stored.push(1);
        let elements = stored.len() as u64;
        let shape = BucketShape { elements, ..BucketShape::default() };
        let walked = found(&known(&params), &[shape], vec![stored]);
        assert_eq!((walked.slots.len(), walked.unknown.len()), (0, 1));
    }

    #[test]
    fn parts_of_ranks_are_told_without_a_list_of_them() {
        let shape = |ranks| BucketShape { ranks, ..BucketShape::default() };
        let four = shape(Some((4, 10)));
        let bounds: Vec<_> = (0..100).filter(|bound| four.is_rank_bound(*bound)).collect();
        assert_eq!(bounds, [10, 20, 30]);
        assert!(!shape(None).is_rank_bound(10) && !shape(Some((4, 0))).is_rank_bound(10));
        assert!(shape(Some((u64::MAX, 1))).is_rank_bound(1 << 40));
    }

    proptest! {
        #[test]
        fn parameters_are_found_where_they_were_laid_out(
            sizes in proptest::collection::vec((1_usize..300, any::<bool>()), 1..14),
            data_parallel in 1_u64..6,
            bucket_size in proptest::option::of(1_u64..600),
            gap in any::<u8>(),
            seed in any::<u64>(),
        ) {
            // The first two bytes distinguish parameters where there is room for them.
            let mut state = seed | 1;
            let mut byte = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            let params: Vec<Vec<u8>> =
                sizes.iter().map(|(len, _)| (0..len + 8).map(|_| byte()).collect()).collect();
            let flat: Vec<_> = params
                .iter()
                .zip(&sizes)
                .map(|(bytes, (_, alone))| FlatParam::new(bytes.len() as u64).with_alone(*alone))
                .collect();
            let mut options = FlatLayoutOptions::new(data_parallel);
            options.bucket_size = bucket_size;
            let buckets = flat_layout(&flat, &options).unwrap();
            let mut in_order = params.iter().rev().cloned();
            let stored: Vec<_> =
                buckets.iter().map(|bucket| fill(bucket, &mut in_order, gap)).collect();
            let known = known(&params);
            let shapes: Vec<_> = buckets
                .iter()
                .map(|bucket| {
                    let share = (bucket.range.end - bucket.range.start) / data_parallel;
                    let pieces = bucket.pieces(data_parallel);
                    BucketShape {
                        elements: bucket.unpadded,
                        bounds: Some(pieces.iter().flat_map(|p| [p.start, p.end]).collect()),
                        ranks: Some((data_parallel, share)),
                        ..BucketShape::default()
                    }
                })
                .collect();
            let expected: Vec<_> = buckets
                .iter()
                .enumerate()
                .flat_map(|(at, bucket)| bucket.params.iter().map(move |p| (at, p.clone())))
                .collect();
            let walked = found(&known, &shapes, stored.clone());
            prop_assert_eq!(places(&walked), expected);
            prop_assert!(walked.unknown.is_empty());

            // One after the other, without padding and bounds.
            let joined = stored.concat();
            let shape = BucketShape {
                elements: joined.len() as u64,
                coalesced: true,
                ..BucketShape::default()
            };
            let walked = found(&known, &[shape], vec![joined]);
            let mut base = 0;
            let mut expected = Vec::new();
            for bucket in &buckets {
                let places = bucket.params.iter().map(|p| (0, p.start + base..p.end + base));
                expected.extend(places);
                base += bucket.unpadded;
            }
            prop_assert_eq!(places(&walked), expected);
        }
    }
}
