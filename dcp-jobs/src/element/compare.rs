//! Compares elements of two byte ranges, of equal or different dtypes.

use dcp_core::DType;

use crate::element::numbers::Numbers;
use crate::element::{Element, decode};

/// The difference at which values are still equal, as in `numpy.allclose`: `|a - b| <= atol + rtol
/// * |b|`. Equal infinities are equal, and so are two NaNs (`equal_nan=True`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// The relative tolerance, as a share of the magnitude in B.
    pub rtol: f64,
    /// The absolute tolerance.
    pub atol: f64,
}

impl Tolerance {
    pub(crate) fn allows(self, a: f64, b: f64) -> bool {
        if a.is_finite() && b.is_finite() {
            a == b || (a - b).abs() <= self.atol + self.rtol * b.abs()
        } else {
            a == b || (a.is_nan() && b.is_nan())
        }
    }
}

/// Elements per comparison block.
const BLOCK: usize = 1024;

/// The differences of two ranges of elements.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Compared {
    /// Elements in each range.
    pub(crate) count: u64,
    /// Elements that differ.
    pub(crate) different: u64,
    /// Elements of which exactly one is NaN.
    pub(crate) nan_mismatches: u64,
    /// The largest absolute difference, also below the tolerance.
    pub(crate) max_abs: f64,
    /// The largest difference as a share of the magnitude in B; infinite where that is zero.
    pub(crate) max_rel: f64,
    /// The first element that differs.
    pub(crate) first: Option<Pair>,
    /// The element with the largest difference among those that differ.
    pub(crate) largest: Option<Pair>,
}

/// Two elements at one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pair {
    /// The position.
    pub(crate) at: u64,
    pub(crate) a: Element,
    pub(crate) b: Element,
    /// Their absolute difference; NaN when one of them is NaN.
    pub(crate) abs: f64,
}

impl Compared {
    /// Adds the result of a range that begins at `start`.
    pub(crate) fn merge(&mut self, other: Self, start: u64) {
        let moved = |pair: Pair| Pair { at: start + pair.at, ..pair };
        self.count += other.count;
        self.different += other.different;
        self.nan_mismatches += other.nan_mismatches;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_rel = self.max_rel.max(other.max_rel);
        if let Some(pair) = other.first.map(moved)
            && self.first.is_none_or(|first| pair.at < first.at)
        {
            self.first = Some(pair);
        }
        if let Some(pair) = other.largest.map(moved)
            && self.largest.is_none_or(|largest| is_larger(&pair, &largest))
        {
            self.largest = Some(pair);
        }
    }
}

fn is_larger(pair: &Pair, than: &Pair) -> bool {
    match pair.abs.partial_cmp(&than.abs) {
        Some(std::cmp::Ordering::Equal) => pair.at < than.at,
        Some(order) => order.is_gt(),
        None => than.abs.is_nan() && !pair.abs.is_nan(),
    }
}

/// Compares elements of two dtypes, which may differ.
#[derive(Debug)]
pub(crate) struct Comparer {
    tolerance: Option<Tolerance>,
    dtypes: (DType, DType),
    numbers: (Numbers, Numbers),
    values: (Vec<f64>, Vec<f64>),
}

impl Comparer {
    /// Without a tolerance, elements of one dtype are equal when their bits are. Returns `None`
    /// when the dtypes store different numbers of values per element, such as a complex and a real
    /// one.
    pub(crate) fn new(a: DType, b: DType, tolerance: Option<Tolerance>) -> Option<Self> {
        let numbers = (Numbers::new(a), Numbers::new(b));
        (numbers.0.per_element() == numbers.1.per_element()).then_some(Self {
            tolerance,
            dtypes: (a, b),
            numbers,
            values: (Vec::new(), Vec::new()),
        })
    }

    /// Compares two ranges with equal numbers of elements.
    pub(crate) fn compare(&mut self, a: &[u8], b: &[u8]) -> Compared {
        let size = (self.numbers.0.size(), self.numbers.1.size());
        let mut all = Compared::default();
        if self.dtypes.0 == self.dtypes.1 && a == b {
            all.count = (a.len() / size.0) as u64;
            return all;
        }
        let mut start = 0;
        for (a, b) in a.chunks(BLOCK * size.0).zip(b.chunks(BLOCK * size.1)) {
            let count = (a.len() / size.0).min(b.len() / size.1) as u64;
            if self.dtypes.0 != self.dtypes.1 || a != b {
                let found = self.block(a, b);
                all.merge(found, start);
            }
            start += count;
        }
        all.count = start;
        all
    }

    fn block(&mut self, a: &[u8], b: &[u8]) -> Compared {
        let wide = (self.numbers.0.is_wide(), self.numbers.1.is_wide());
        let (mut x, mut y) = std::mem::take(&mut self.values);
        self.numbers.0.decode(a, &mut x);
        self.numbers.1.decode(b, &mut y);
        let mut found = Found { comparer: self, a, b, compared: Compared::default(), last: None };
        if wide == (false, false) {
            found.floats(&x, &y);
        } else {
            found.wide(&x, &y);
        }
        let compared = found.compared;
        self.values = (x, y);
        compared
    }

    fn element(&self, at: usize, a: &[u8], b: &[u8]) -> Option<(Element, Element)> {
        let part = |dtype: DType, bytes: &[u8]| {
            let start = at * dtype.size();
            decode(dtype, bytes.get(start..start + dtype.size())?)
        };
        Some((part(self.dtypes.0, a)?, part(self.dtypes.1, b)?))
    }

    /// Whether elements are compared by their bits.
    fn is_exact(&self) -> bool {
        self.tolerance.is_none() && self.dtypes.0 == self.dtypes.1
    }
}

/// The differences of one block.
struct Found<'a> {
    comparer: &'a Comparer,
    a: &'a [u8],
    b: &'a [u8],
    compared: Compared,
    /// The last element that differed.
    last: Option<usize>,
}

impl Found<'_> {
    fn floats(&mut self, x: &[f64], y: &[f64]) {
        let per_element = self.comparer.numbers.0.per_element();
        let exact = self.comparer.is_exact();
        let tolerance = self.comparer.tolerance.unwrap_or_default();
        for (at, (x, y)) in x.iter().zip(y).enumerate() {
            if x.to_bits() == y.to_bits() {
                if exact && x.is_nan() {
                    // Different NaNs of a narrow format may be one NaN as an `f64`.
                    self.same_bits(at / per_element);
                }
                continue;
            }
            let abs = (x - y).abs();
            self.measure(*x, *y, abs);
            if exact || !tolerance.allows(*x, *y) {
                self.differs(at / per_element, abs);
            }
        }
    }

    /// Compares 64-bit integers exactly, where at least one side has them.
    fn wide(&mut self, x: &[f64], y: &[f64]) {
        let tolerance = self.comparer.tolerance.unwrap_or_default();
        for (at, (x, y)) in x.iter().zip(y).enumerate() {
            let (numbers_a, numbers_b) = &self.comparer.numbers;
            let (a, b) = (whole(numbers_a, self.a, at, *x), whole(numbers_b, self.b, at, *y));
            let (abs, allowed) = match (a, b) {
                (Some(a), Some(b)) => {
                    let abs = a.abs_diff(b) as f64;
                    (abs, a == b || abs <= tolerance.atol + tolerance.rtol * y.abs())
                }
                // An integer and a non-integer are not equal.
                _ => ((x - y).abs(), x != y && tolerance.allows(*x, *y)),
            };
            if a.is_some() && a == b {
                continue;
            }
            self.measure(*x, *y, abs);
            if self.comparer.is_exact() || !allowed {
                self.differs(at, abs);
            }
        }
    }

    /// Counts an element whose numbers are equal, unless its bits differ and bits decide.
    fn same_bits(&mut self, element: usize) {
        let (dtype, size) = (self.comparer.dtypes.0, self.comparer.dtypes.0.size());
        let range = element * size..(element + 1) * size;
        if self.a.get(range.clone()) != self.b.get(range) && dtype == self.comparer.dtypes.1 {
            self.differs(element, f64::NAN);
        }
    }

    fn measure(&mut self, x: f64, y: f64, abs: f64) {
        if x.is_nan() != y.is_nan() {
            self.compared.nan_mismatches += 1;
        }
        // False for NaN.
        if abs > self.compared.max_abs {
            self.compared.max_abs = abs;
        }
        if abs > 0.0 {
            let rel = if y.is_infinite() { f64::INFINITY } else { abs / y.abs() };
            self.compared.max_rel = self.compared.max_rel.max(rel);
        }
    }

    fn differs(&mut self, element: usize, abs: f64) {
        if self.last != Some(element) {
            self.last = Some(element);
            self.compared.different += 1;
        }
        let is_largest = |pair: &Pair| {
            let new = Pair { at: element as u64, abs, ..*pair };
            is_larger(&new, pair)
        };
        let first = self.compared.first.is_none();
        let largest = self.compared.largest.as_ref().is_none_or(is_largest);
        if (first || largest)
            && let Some((a, b)) = self.comparer.element(element, self.a, self.b)
        {
            let pair = Pair { at: element as u64, a, b, abs };
            if first {
                self.compared.first = Some(pair);
            }
            if largest {
                self.compared.largest = Some(pair);
            }
        }
    }
}

/// The element at `at` as an integer, if it is one.
fn whole(numbers: &Numbers, bytes: &[u8], at: usize, value: f64) -> Option<i128> {
    if numbers.is_wide() {
        let bytes = bytes.as_chunks::<8>().0.get(at)?;
        return Some(numbers.wide(*bytes));
    }
    (value.trunc() == value && value.abs() < 2_f64.powi(100)).then_some(value as i128)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn compare(a: &[f32], b: &[f32], tolerance: Option<Tolerance>) -> Compared {
        let mut comparer = Comparer::new(DType::Float32, DType::Float32, tolerance).unwrap();
        comparer.compare(&floats(a), &floats(b))
    }

    #[test]
    fn bits_decide_without_a_tolerance() {
        let found = compare(&[0.0, 1.0, f32::NAN], &[-0.0, 1.0, f32::NAN], None);
        assert_eq!((found.different, found.max_abs, found.count), (1, 0.0, 3));
        assert_eq!(found.first.map(|pair| pair.at), Some(0));
        let other_nan = f32::from_bits(0x7fc0_0001);
        let found = compare(&[1.0, f32::NAN], &[1.0, other_nan], None);
        assert_eq!((found.different, found.nan_mismatches), (1, 0));
        let none = Some(Tolerance::default());
        assert_eq!(compare(&[0.0, f32::NAN], &[-0.0, other_nan], none).different, 0);
    }

    #[test]
    fn nans_of_narrow_formats_differ_in_bits() {
        let mut comparer = Comparer::new(DType::Float8E5M2, DType::Float8E5M2, None).unwrap();
        let found = comparer.compare(&[0x7d, 0x3c], &[0x7e, 0x3c]);
        assert_eq!((found.different, found.nan_mismatches), (1, 0));
    }

    #[test]
    fn what_is_not_finite() {
        let tolerance = Some(Tolerance { rtol: 1.0, atol: 1.0 });
        let inf = f32::INFINITY;
        let found = compare(&[inf, inf, 1.0, f32::NAN], &[inf, -inf, inf, 1.0], tolerance);
        assert_eq!((found.different, found.nan_mismatches), (3, 1));
        assert_eq!(found.max_abs, f64::INFINITY);
        assert_eq!(found.first.map(|pair| pair.at), Some(1));
    }

    #[test]
    fn wide_integers_are_compared_exactly() {
        let bytes = |n: i64| n.to_le_bytes();
        let near = (1_i64 << 60) + 1;
        let mut comparer = Comparer::new(DType::Int64, DType::Int64, None).unwrap();
        let found = comparer.compare(&bytes(1 << 60), &bytes(near));
        assert_eq!((found.different, found.max_abs), (1, 1.0));
        let mut comparer = Comparer::new(DType::Int64, DType::UInt64, None).unwrap();
        assert_eq!(comparer.compare(&bytes(-1), &[0xff; 8]).different, 1);
        assert_eq!(comparer.compare(&bytes(near), &bytes(near)).different, 0);
        let mut comparer = Comparer::new(DType::Int64, DType::Float64, None).unwrap();
        let float = 2_f64.powi(60).to_le_bytes();
        assert_eq!(comparer.compare(&bytes(1 << 60), &float).different, 0);
        assert_eq!(comparer.compare(&bytes(near), &float).different, 1);
        assert_eq!(comparer.compare(&bytes(1), &1.5_f64.to_le_bytes()).max_abs, 0.5);
    }

    #[test]
    fn dtypes_are_compared_by_value() {
        let half = [0x3c00_u16, 0x3555].into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let mut comparer = Comparer::new(DType::Float16, DType::Float32, None).unwrap();
        let found = comparer.compare(&half, &floats(&[1.0, 1.0 / 3.0]));
        assert_eq!((found.different, found.first.map(|pair| pair.at)), (1, Some(1)));
        let tolerance = Some(Tolerance { rtol: 1e-3, atol: 0.0 });
        let mut comparer = Comparer::new(DType::Float16, DType::Float32, tolerance).unwrap();
        assert_eq!(comparer.compare(&half, &floats(&[1.0, 1.0 / 3.0])).different, 0);
        assert!(Comparer::new(DType::Complex64, DType::Float32, None).is_none());
    }

    #[test]
    fn an_element_of_several_values_differs_once() {
        let mut comparer = Comparer::new(DType::Complex64, DType::Complex64, None).unwrap();
        let found =
            comparer.compare(&floats(&[1.0, 2.0, 3.0, 4.0]), &floats(&[1.0, 2.0, 5.0, 0.0]));
        assert_eq!((found.count, found.different, found.max_abs), (2, 1, 4.0));
        assert_eq!(found.largest.map(|pair| pair.a), Some(Element::Complex(3.0, 4.0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn agrees_with_numpys_definition(
            pairs in prop::collection::vec(
                (
                    prop_oneof![4 => -3.0_f32..3.0, 1 => prop::sample::select(vec![
                        0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY,
                    ])],
                    prop::sample::select(vec![0.0_f32, 0.0, 1e-7, 0.01, 1.0, f32::NAN]),
                ),
                0..3000,
            ),
            rtol in prop::sample::select(vec![0.0, 1e-6, 0.1]),
            atol in prop::sample::select(vec![0.0, 1e-3, 0.5]),
            exact in any::<bool>(),
        ) {
            let a: Vec<f32> = pairs.iter().map(|(x, _)| *x).collect();
            let b: Vec<f32> = pairs.iter().map(|(x, by)| if *by == 0.0 { *x } else { x + by }).collect();
            let tolerance = Tolerance { rtol, atol };
            let found = compare(&a, &b, (!exact).then_some(tolerance));
            let is_close = |x: f64, y: f64| {
                x == y
                    || (x.is_nan() && y.is_nan())
                    || (x.is_finite() && y.is_finite() && (x - y).abs() <= atol + rtol * y.abs())
            };
            let same = |x: f32, y: f32| {
                if exact { x.to_bits() == y.to_bits() } else { is_close(x.into(), y.into()) }
            };
            let differing: Vec<usize> = (0..a.len()).filter(|at| !same(a[*at], b[*at])).collect();
            prop_assert_eq!(found.count, a.len() as u64);
            prop_assert_eq!(found.different, differing.len() as u64);
            prop_assert_eq!(found.first.map(|pair| pair.at), differing.first().map(|at| *at as u64));
            let apart = |at: usize| (f64::from(a[at]) - f64::from(b[at])).abs();
            let max = (0..a.len()).map(apart).filter(|abs| !abs.is_nan()).fold(0.0, f64::max);
            prop_assert_eq!(found.max_abs, max);
            let largest = differing.iter().copied().filter(|at| !apart(*at).is_nan());
            let largest = largest.fold(None, |best: Option<usize>, at| match best {
                Some(best) if apart(best) >= apart(at) => Some(best),
                _ => Some(at),
            });
            if let Some(largest) = largest {
                prop_assert_eq!(found.largest.map(|pair| pair.at), Some(largest as u64));
            }
            let nans = a.iter().zip(&b).filter(|(x, y)| x.is_nan() != y.is_nan()).count();
            prop_assert_eq!(found.nan_mismatches, nans as u64);
        }
    }
}
