//! Mergeable statistics of ranges of numbers.

use dcp_core::DType;

use crate::element::numbers::Numbers;
use crate::stats::histogram::{Bins, Histogram};

/// Values per block: few enough for the first-level cache.
const BLOCK: usize = 1024;
/// Independent sums, which neither wait for each other nor round as much as one.
const LANES: usize = 8;
/// The power of two, 2^-540, that scales numbers whose squares would exceed the largest float.
/// Scaling is exact.
const SCALE: f64 = f64::from_bits((1023 - 540) << 52);

/// Statistics of a range of numbers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    pub(crate) count: u64,
    pub(crate) nan: u64,
    pub(crate) pos_inf: u64,
    pub(crate) neg_inf: u64,
    pub(crate) zero: u64,
    /// The smallest finite number; infinite when there is none.
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
    /// The sum of squared distances from the mean, scaled by the square of [`SCALE`] if `scaled` is
    /// set.
    pub(crate) squares: f64,
    pub(crate) scaled: bool,
    /// Exact statistics of 64-bit integers.
    pub(crate) wide: Option<Wide>,
    /// The position of the first NaN or infinity.
    pub(crate) first_non_finite: Option<u64>,
    pub(crate) histogram: Histogram,
}

/// Exact statistics of 64-bit integers, which floats would round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wide {
    pub(crate) min: i128,
    pub(crate) max: i128,
    pub(crate) sum: i128,
}

impl Default for Moments {
    fn default() -> Self {
        Self {
            count: 0,
            nan: 0,
            pos_inf: 0,
            neg_inf: 0,
            zero: 0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            mean: 0.0,
            squares: 0.0,
            scaled: false,
            wide: None,
            first_non_finite: None,
            histogram: Histogram::default(),
        }
    }
}

impl Moments {
    pub(crate) fn non_finite(&self) -> u64 {
        self.nan + self.pos_inf + self.neg_inf
    }

    pub(crate) fn finite(&self) -> u64 {
        self.count - self.non_finite()
    }

    /// The mean of the finite numbers.
    pub(crate) fn mean(&self) -> f64 {
        match self.wide {
            Some(wide) => wide.sum as f64 / self.count as f64,
            None if self.min == self.max => self.min,
            None => self.mean,
        }
    }

    /// The standard deviation of the finite numbers.
    pub(crate) fn std(&self) -> f64 {
        // For equal numbers, the squares contain only the rounding of their mean.
        if self.wide.map_or(self.min == self.max, |wide| wide.min == wide.max) {
            return 0.0;
        }
        let std = (self.squares / self.finite() as f64).sqrt();
        if self.scaled { std / SCALE } else { std }
    }

    fn scaled_squares(&self) -> f64 {
        if self.scaled { self.squares } else { self.squares * SCALE * SCALE }
    }

    /// Appends the statistics of the following numbers (Chan, Golub and LeVeque's pairwise update).
    pub(crate) fn merge(&mut self, other: &Self) {
        let (ours, theirs) = (self.finite() as f64, other.finite() as f64);
        if theirs > 0.0 {
            let all = ours + theirs;
            let apart = other.mean - self.mean;
            // A weighted sum, because the distance between the means can exceed the largest float.
            let mean = self.mean * (ours / all) + other.mean * (theirs / all);
            let between = |apart: f64| apart * apart * (ours / all) * theirs;
            let between_scaled = || between(other.mean * SCALE - self.mean * SCALE);
            let squares = match (ours > 0.0, self.scaled || other.scaled) {
                (false, false) => other.squares,
                (true, false) => self.squares + other.squares + between(apart),
                (_, true) => f64::INFINITY,
            };
            if squares.is_finite() {
                self.squares = squares;
            } else {
                let between = if ours > 0.0 { between_scaled() } else { 0.0 };
                self.squares = self.scaled_squares() + other.scaled_squares() + between;
                self.scaled = true;
            }
            self.mean = mean;
        }
        let before = self.count;
        let first = other.first_non_finite.map(|at| before + at);
        self.first_non_finite = self.first_non_finite.or(first);
        self.count += other.count;
        self.nan += other.nan;
        self.pos_inf += other.pos_inf;
        self.neg_inf += other.neg_inf;
        self.zero += other.zero;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.wide = match (self.wide, other.wide) {
            (Some(a), Some(b)) => Some(Wide {
                min: a.min.min(b.min),
                max: a.max.max(b.max),
                sum: a.sum.saturating_add(b.sum),
            }),
            (one, other) => one.or(other),
        };
        self.histogram.merge(&other.histogram);
    }
}

/// Computes statistics and reuses its buffers from one range to the next.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    values: Vec<f64>,
    finite: Vec<f64>,
    bins: Bins,
}

impl Observer {
    /// Computes the statistics of whole elements.
    pub(crate) fn observe(&mut self, dtype: DType, bytes: &[u8]) -> Moments {
        let numbers = Numbers::new(dtype);
        let mut all = Moments::default();
        let block = (BLOCK / numbers.per_element()).max(1) * numbers.size();
        let mut values = std::mem::take(&mut self.values);
        let subnormal = matches!(dtype, DType::Float64 | DType::Complex128);
        for bytes in bytes.chunks(block) {
            numbers.decode(bytes, &mut values);
            let mut found = self.block(&values);
            if subnormal {
                self.bins.count_subnormal(&values);
            }
            if numbers.is_wide() {
                found.wide = wide(&numbers, bytes);
            }
            all.merge(&found);
        }
        self.values = values;
        all.histogram = self.bins.take();
        all
    }

    fn block(&mut self, values: &[f64]) -> Moments {
        self.bins.count(values);
        let sums = Sums::of(values);
        // A finite sum has only finite terms.
        if sums.sum.is_finite() {
            return sums.moments(values);
        }
        let mut finite = std::mem::take(&mut self.finite);
        finite.clear();
        finite.extend(values.iter().copied().filter(|x| x.is_finite()));
        let mut found = Sums::of(&finite).moments(&finite);
        self.finite = finite;
        found.count = values.len() as u64;
        found.nan = values.iter().filter(|x| x.is_nan()).count() as u64;
        found.pos_inf = values.iter().filter(|x| **x == f64::INFINITY).count() as u64;
        found.neg_inf = values.iter().filter(|x| **x == f64::NEG_INFINITY).count() as u64;
        found.first_non_finite = values.iter().position(|x| !x.is_finite()).map(|at| at as u64);
        found
    }
}

struct Sums {
    sum: f64,
    min: f64,
    max: f64,
    zero: u64,
}

impl Sums {
    fn of(values: &[f64]) -> Self {
        let mut sum = [0.0; LANES];
        let mut min = [f64::INFINITY; LANES];
        let mut max = [f64::NEG_INFINITY; LANES];
        let mut zero = [0_u64; LANES];
        let (rows, rest) = values.as_chunks::<LANES>();
        for row in rows {
            for lane in 0..LANES {
                let x = row[lane];
                sum[lane] += x;
                min[lane] = if x < min[lane] { x } else { min[lane] };
                max[lane] = if x > max[lane] { x } else { max[lane] };
                zero[lane] += u64::from(x == 0.0);
            }
        }
        for (lane, x) in rest.iter().enumerate() {
            sum[lane] += x;
            min[lane] = min[lane].min(*x);
            max[lane] = max[lane].max(*x);
            zero[lane] += u64::from(*x == 0.0);
        }
        Self {
            sum: sum.iter().sum(),
            min: min.iter().copied().fold(f64::INFINITY, f64::min),
            max: max.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            zero: zero.iter().sum(),
        }
    }

    /// The statistics of `values`, all finite, with these sums.
    fn moments(self, values: &[f64]) -> Moments {
        let count = values.len() as f64;
        let mean = if values.is_empty() {
            0.0
        } else if self.sum.is_finite() {
            self.sum / count
        } else {
            values.iter().map(|x| x / count).sum()
        };
        let mut squares = [0.0; LANES];
        let (rows, rest) = values.as_chunks::<LANES>();
        for row in rows {
            for lane in 0..LANES {
                let apart = row[lane] - mean;
                squares[lane] += apart * apart;
            }
        }
        for (lane, x) in rest.iter().enumerate() {
            squares[lane] += (x - mean) * (x - mean);
        }
        let mut squares: f64 = squares.iter().sum();
        let scaled = !squares.is_finite();
        if scaled {
            squares = values.iter().map(|x| (x * SCALE - mean * SCALE).powi(2)).sum();
        }
        Moments {
            count: values.len() as u64,
            zero: self.zero,
            min: self.min,
            max: self.max,
            mean,
            squares,
            scaled,
            ..Moments::default()
        }
    }
}

fn wide(numbers: &Numbers, bytes: &[u8]) -> Option<Wide> {
    let values = || bytes.as_chunks::<8>().0.iter().map(|bytes| numbers.wide(*bytes));
    Some(Wide { min: values().min()?, max: values().max()?, sum: values().sum() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn observe(values: &[f64]) -> Moments {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Observer::default().observe(DType::Float64, &bytes)
    }

    fn close(a: f64, b: f64, scale: f64) -> bool {
        a == b || (a - b).abs() <= 1e-12 * scale.max(a.abs())
    }

    #[test]
    fn a_small_spread_around_a_large_mean_is_not_lost() {
        let values: Vec<f64> = (0..5000).map(|n| 1e9 + f64::from(n % 2)).collect();
        let found = observe(&values);
        assert_eq!(found.mean, 1e9 + 0.5);
        assert!(close(found.squares / 5000.0, 0.25, 1.0), "{found:?}");
    }

    #[test]
    fn values_whose_sum_overflows_have_a_mean() {
        let found = observe(&[1e308; 3000]);
        assert!(close(found.mean, 1e308, 1.0), "{}", found.mean);
        let found = observe(&[f64::MAX, -f64::MAX, f64::MAX, -f64::MAX]);
        assert_eq!((found.nan, found.mean), (0, 0.0));
    }

    #[test]
    fn integers_of_64_bits_are_summed_exactly() {
        let bytes: Vec<u8> = [i64::MAX, i64::MIN, 5].iter().flat_map(|n| n.to_le_bytes()).collect();
        let found = Observer::default().observe(DType::Int64, &bytes);
        assert_eq!(found.mean(), 4.0 / 3.0);
        let mut twice = found.clone();
        twice.merge(&found);
        assert_eq!(twice.mean(), 4.0 / 3.0);
        let bytes: Vec<u8> = [u64::MAX; 3].iter().flat_map(|n| n.to_le_bytes()).collect();
        let found = Observer::default().observe(DType::UInt64, &bytes);
        assert_eq!((found.mean(), found.std()), (u64::MAX as f64, 0.0));
    }

    #[test]
    fn equal_numbers_have_no_spread() {
        let mut found = observe(&[0.1; 3000]);
        found.merge(&observe(&[0.1; 7]));
        assert_eq!((found.mean(), found.std()), (0.1, 0.0));
        let mut found = observe(&[1e15 + 0.1; 5000]);
        found.merge(&observe(&[f64::NAN, 1e15 + 0.1]));
        assert_eq!(found.std(), 0.0);
    }

    #[test]
    fn the_spread_of_huge_numbers_is_finite() {
        let alternating: Vec<f64> = (0..5000).map(|n| 1e300 * f64::from(n % 2)).collect();
        let found = observe(&alternating);
        assert!(close(found.std() / 1e300, 0.5, 1.0), "{found:?}");
        // Only together do these exceed the largest float.
        let mut found = observe(&[1e200; 10]);
        found.merge(&observe(&[-1e200; 10]));
        assert!(close(found.std() / 1e200, 1.0, 1.0), "{found:?}");
        let mut small = observe(&[1.0, 2.0]);
        small.merge(&found);
        small.merge(&observe(&[3.0]));
        let expected = 1e200 * (20.0_f64 / 23.0).sqrt();
        assert!(close(small.std() / expected, 1.0, 1.0), "{small:?}");
        let found = observe(&[f64::MAX, -f64::MAX]);
        assert!(close(found.std() / f64::MAX, 1.0, 1.0), "{found:?}");
    }

    #[test]
    fn nothing_and_nothing_finite() {
        assert_eq!(observe(&[]), Moments::default());
        let found = observe(&[f64::NAN, f64::NEG_INFINITY]);
        assert_eq!((found.finite(), found.first_non_finite), (0, Some(0)));
        assert_eq!((found.mean, found.squares), (0.0, 0.0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn agrees_with_the_definition(
            values in prop::collection::vec(
                prop_oneof![
                    8 => -1e3_f64..1e3,
                    1 => prop::sample::select(vec![
                        0.0, -0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 5e-324, -1e-310,
                    ]),
                ],
                0..4000,
            ),
            cut in 0_usize..4000,
        ) {
            let (front, back) = values.split_at(cut.min(values.len()));
            let mut found = observe(front);
            found.merge(&observe(back));
            let finite: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
            let count = finite.len() as f64;
            let mean = if finite.is_empty() { 0.0 } else { finite.iter().sum::<f64>() / count };
            let squares: f64 = finite.iter().map(|x| (x - mean).powi(2)).sum();
            let bits = |wanted: fn(f64) -> bool| values.iter().filter(|x| wanted(**x)).count() as u64;
            prop_assert_eq!(found.count, values.len() as u64);
            prop_assert_eq!(found.nan, bits(f64::is_nan));
            prop_assert_eq!(found.pos_inf, bits(|x| x == f64::INFINITY));
            prop_assert_eq!(found.neg_inf, bits(|x| x == f64::NEG_INFINITY));
            prop_assert_eq!(found.zero, bits(|x| x == 0.0));
            prop_assert_eq!(found.min, finite.iter().copied().fold(f64::INFINITY, f64::min));
            prop_assert_eq!(found.max, finite.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            let first = values.iter().position(|x| !x.is_finite()).map(|at| at as u64);
            prop_assert_eq!(found.first_non_finite, first);
            prop_assert!(close(found.mean, mean, 1e3), "{} {mean}", found.mean);
            prop_assert!(close(found.squares, squares, 1e6), "{} {squares}", found.squares);
            let in_bins: u64 = found.histogram.bins().map(|(_, n, p)| n + p).sum();
            prop_assert_eq!(in_bins + found.zero, found.finite());
            let mut bins = std::collections::BTreeMap::<i16, (u64, u64)>::new();
            for x in finite.iter().filter(|x| **x != 0.0) {
                let bin = bins.entry(exponent_of(*x)).or_default();
                *(if *x < 0.0 { &mut bin.0 } else { &mut bin.1 }) += 1;
            }
            let bins: Vec<_> = bins.into_iter().map(|(at, (n, p))| (at, n, p)).collect();
            prop_assert_eq!(found.histogram.bins().collect::<Vec<_>>(), bins);
        }
    }

    /// Floor of the binary logarithm, with all subnormal numbers in one bin.
    fn exponent_of(x: f64) -> i16 {
        let (mut left, mut exponent) = (x.abs(), 0);
        while left >= 2.0 {
            left /= 2.0;
            exponent += 1;
        }
        while left < 1.0 {
            left *= 2.0;
            exponent -= 1;
        }
        exponent.max(-1023)
    }
}
