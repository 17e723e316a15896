//! The layout of parameters in a flat gradient buffer of Megatron (0.6 to 0.19).
//!
//! Parameters come in the reverse of the order in which modules registered them, for that is
//! roughly the order in which gradients become ready. Each begins at a multiple of [`ALIGNMENT`];
//! after one that fills the bucket, or that has to have its own, the bucket ends at a multiple that
//! all data-parallel ranks can share. A checkpoint keeps neither names nor this order.

use std::ops::Range;

/// Elements: every parameter begins at a multiple of it, counted from the beginning of its bucket.
pub const ALIGNMENT: u64 = 64;

/// Options of the division of a buffer into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlatLayoutOptions {
    /// Data-parallel ranks that share a bucket evenly.
    pub data_parallel: u64,
    /// Elements after which a bucket ends; `None` for one bucket, which is what there is without
    /// overlapped gradient reduction. Megatron's own default with it is
    /// `max(40_000_000, 1_000_000 * data_parallel)`.
    pub bucket_size: Option<u64>,
    /// Whether buckets are padded further, for the sake of the network
    /// (`--ddp-pad-buckets-for-high-nccl-busbw`).
    pub high_bandwidth: bool,
}

impl FlatLayoutOptions {
    /// One bucket, shared by `data_parallel` ranks.
    #[must_use]
    pub fn new(data_parallel: u64) -> Self {
        Self { data_parallel: data_parallel.max(1), bucket_size: None, high_bandwidth: false }
    }

    /// Sets the number of elements after which a bucket ends.
    #[must_use]
    pub fn with_bucket_size(mut self, elements: u64) -> Self {
        self.bucket_size = Some(elements);
        self
    }

    /// Sets whether buckets are padded for the network.
    #[must_use]
    pub fn with_high_bandwidth(mut self, padded: bool) -> Self {
        self.high_bandwidth = padded;
        self
    }

    /// The length of every bucket is a multiple of this, in elements; `None` past 64 bits.
    #[must_use]
    pub fn bucket_multiple(&self) -> Option<u64> {
        let multiple = lcm(self.data_parallel.max(1), 128)?;
        if self.high_bandwidth { lcm(multiple, 1 << 16) } else { Some(multiple) }
    }
}

/// A parameter to lay out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlatParam {
    /// Elements that a rank has of it.
    pub elements: u64,
    /// Whether it gets a bucket of its own: an embedding that is shared between pipeline stages.
    pub alone: bool,
}

impl FlatParam {
    /// A parameter of so many elements that shares its bucket.
    #[must_use]
    pub fn new(elements: u64) -> Self {
        Self { elements, alone: false }
    }

    /// Sets whether the parameter has a bucket of its own.
    #[must_use]
    pub fn with_alone(mut self, alone: bool) -> Self {
        self.alone = alone;
        self
    }
}

/// One bucket of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlatBucket {
    /// Its range in the buffer, in elements, padding included.
    pub range: Range<u64>,
    /// Its elements without the padding at its end, as a checkpoint stores them. Before a
    /// parameter with a bucket of its own, they end at a multiple of [`ALIGNMENT`].
    pub unpadded: u64,
    /// The ranges of its parameters, in elements from its beginning, in the order of the buffer.
    pub params: Vec<Range<u64>>,
}

impl FlatBucket {
    /// The pieces in which data-parallel ranks store the bucket as `dp_reshardable`, in order:
    /// every part of a parameter and every gap between two on one rank. They cover
    /// `0..unpadded` exactly.
    #[must_use]
    pub fn pieces(&self, data_parallel: u64) -> Vec<Range<u64>> {
        let share = (self.range.end - self.range.start) / data_parallel.max(1);
        let mut cuts: Vec<u64> = vec![0, self.unpadded];
        cuts.extend(self.params.iter().flat_map(|param| [param.start, param.end]));
        if share > 0 {
            let bounds = (1..data_parallel).map(|rank| rank.saturating_mul(share));
            cuts.extend(bounds.take_while(|cut| *cut < self.unpadded));
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).filter_map(|pair| Some(*pair.first()?..*pair.get(1)?)).collect()
    }
}

/// Lays out parameters, given in the order in which modules registered them.
///
/// Returns `None` where a place exceeds 64 bits.
#[must_use]
pub fn flat_layout(params: &[FlatParam], options: &FlatLayoutOptions) -> Option<Vec<FlatBucket>> {
    let multiple = options.bucket_multiple()?;
    let mut buckets = Vec::new();
    let (mut start, mut end) = (0_u64, 0_u64);
    let mut placed: Vec<Range<u64>> = Vec::new();
    let mut close = |placed: &mut Vec<Range<u64>>, start: u64, end: u64| {
        let padded = end.checked_next_multiple_of(multiple)?;
        let params = std::mem::take(placed);
        buckets.push(FlatBucket { range: start..padded, unpadded: end - start, params });
        Some(padded)
    };
    for param in params.iter().rev() {
        if param.alone && !placed.is_empty() {
            // Megatron has aligned the next parameter by then, and counts the gap before it.
            let aligned = end.checked_next_multiple_of(ALIGNMENT)?;
            start = close(&mut placed, start, aligned)?;
            end = start;
        }
        let at = end.checked_next_multiple_of(ALIGNMENT)?;
        end = at.checked_add(param.elements)?;
        placed.push(at - start..end - start);
        let full = options.bucket_size.is_some_and(|size| end - start >= size);
        if full || param.alone {
            start = close(&mut placed, start, end)?;
            end = start;
        }
    }
    if !placed.is_empty() {
        close(&mut placed, start, end)?;
    }
    Some(buckets)
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x)?.checked_mul(b)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_layout_of_a_small_model_is_megatrons() {
        let registered = [128, 8, 64, 192, 8, 96, 96, 8].map(FlatParam::new);
        let buckets = flat_layout(&registered, &FlatLayoutOptions::new(2)).unwrap();
        let [bucket] = &*buckets else { panic!("one bucket") };
        assert_eq!((bucket.range.clone(), bucket.unpadded), (0..896, 832));
        let places = [0..8, 64..160, 192..288, 320..328, 384..576, 576..640, 640..648, 704..832];
        assert_eq!(bucket.params, places);
        let starts: Vec<_> = bucket.pieces(2).iter().map(|piece| piece.start).collect();
        assert_eq!(starts, [0, 8, 64, 160, 192, 288, 320, 328, 384, 448, 576, 640, 648, 704]);
    }

    #[test]
    fn buckets_end_where_megatron_ends_them() {
        let registered = [64, 8, 64, 192, 8, 96, 96, 8].map(FlatParam::new);
        let options = FlatLayoutOptions::new(2).with_bucket_size(200);
        let buckets = flat_layout(&registered, &options).unwrap();
        let lengths: Vec<_> =
            buckets.iter().map(|b| (b.range.end - b.range.start, b.unpadded)).collect();
        assert_eq!(lengths, [(384, 288), (256, 256), (256, 192)]);
    }

    /// As 0.16.1 has it on the first stage of a pipeline with a tied embedding: it refuses to save
    /// such a bucket as `dp_reshardable` where that is not the whole of it.
    #[test]
    fn the_gap_before_a_shared_embedding_is_a_part_of_the_bucket_before() {
        let registered = [128, 8, 72].map(FlatParam::new);
        let registered = [registered[0].with_alone(true), registered[1], registered[2]];
        let buckets = flat_layout(&registered, &FlatLayoutOptions::new(1)).unwrap();
        let lengths: Vec<_> = buckets.iter().map(|b| (b.range.clone(), b.unpadded)).collect();
        assert_eq!(lengths, [(0..256, 192), (256..384, 128)]);
        assert_eq!(buckets[0].params, [0..72, 128..136]);
        assert_eq!(buckets[0].pieces(1), [0..72, 72..128, 128..136, 136..192]);
    }

    #[test]
    fn sizes_past_64_bits_are_refused() {
        let params = [FlatParam::new(u64::MAX - 1), FlatParam::new(64)];
        assert_eq!(flat_layout(&params, &FlatLayoutOptions::new(2)), None);
        assert_eq!(flat_layout(&params, &FlatLayoutOptions::new(u64::MAX)), None);
    }

    proptest! {
        #[test]
        fn pieces_cover_every_bucket_exactly(
            sizes in proptest::collection::vec((1_u64..400, any::<bool>()), 0..20),
            data_parallel in 1_u64..9,
            bucket_size in proptest::option::of(1_u64..1000),
            high_bandwidth in any::<bool>(),
        ) {
            let params: Vec<_> = sizes
                .iter()
                .map(|(elements, alone)| FlatParam::new(*elements).with_alone(*alone))
                .collect();
            let mut options =
                FlatLayoutOptions::new(data_parallel).with_high_bandwidth(high_bandwidth);
            options.bucket_size = bucket_size;
            let buckets = flat_layout(&params, &options).unwrap();
            let multiple = options.bucket_multiple().unwrap();
            let (mut at, mut found) = (0, Vec::new());
            for bucket in &buckets {
                prop_assert_eq!(bucket.range.start, at);
                prop_assert_eq!(bucket.range.end % multiple, 0);
                prop_assert!(bucket.unpadded <= bucket.range.end - bucket.range.start);
                at = bucket.range.end;
                let mut end = 0;
                for piece in bucket.pieces(data_parallel) {
                    prop_assert_eq!(piece.start, end);
                    prop_assert!(piece.end > piece.start);
                    end = piece.end;
                }
                prop_assert_eq!(end, bucket.unpadded);
                let mut before = 0;
                for param in &bucket.params {
                    prop_assert!(param.start >= before && param.start % ALIGNMENT == 0);
                    prop_assert!(param.start - before < ALIGNMENT);
                    before = param.end;
                    found.push(param.end - param.start);
                }
                prop_assert!((before..before + ALIGNMENT).contains(&bucket.unpadded));
            }
            let sizes: Vec<_> = sizes.iter().rev().map(|(elements, _)| *elements).collect();
            prop_assert_eq!(found, sizes);
        }
    }
}
