//! Computes the weighted mean of elements of several dtypes.

use dcp_core::DType;

use crate::cast::{CastCounts, CastOptions, Caster};
use crate::error::JobError;

/// The mean of one tensor. Each part is cast to the dtype of the sum, multiplied by its weight and
/// added in the order of the checkpoints; the sum is divided by the sum of weights and cast to the
/// dtype of the result. Every step rounds in the dtype of the sum, as PyTorch does.
#[derive(Clone, Debug)]
pub(super) struct Mean {
    /// One caster per checkpoint.
    widen: Vec<Caster>,
    weights: Vec<f64>,
    narrow: Caster,
    /// Whether the sum has 64 bits.
    double: bool,
}

/// A partial sum.
#[derive(Debug)]
pub(super) struct Sum<'a> {
    mean: &'a Mean,
    numbers: Numbers,
    widened: Vec<u8>,
    added: usize,
    overflowed: u64,
}

/// The values of a sum.
#[derive(Debug)]
enum Numbers {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

impl Mean {
    /// The mean of the tensor `fqn`, with these `dtypes` in the checkpoints, as dtype `to`. Sums in
    /// `accumulate`, by default in 64 bits if any dtype has 64.
    pub(super) fn new(
        fqn: &str,
        dtypes: &[DType],
        to: DType,
        weights: &[f64],
        accumulate: Option<DType>,
    ) -> Result<Self, JobError> {
        let wide = |dtype: &DType| matches!(dtype, DType::Float64 | DType::Complex128);
        let double =
            accumulate.map_or_else(|| dtypes.iter().any(wide), |dtype| dtype == DType::Float64);
        let complex = dtypes.first().is_some_and(|dtype| dtype.is_complex());
        let sum = match (complex, double) {
            (false, false) => DType::Float32,
            (false, true) => DType::Float64,
            (true, false) => DType::Complex64,
            (true, true) => DType::Complex128,
        };
        let options = CastOptions::default();
        let widen = dtypes.iter().map(|dtype| Caster::new(fqn, *dtype, sum, options));
        Ok(Self {
            widen: widen.collect::<Result<_, _>>()?,
            weights: weights.to_vec(),
            narrow: Caster::new(fqn, sum, to, options)?,
            double,
        })
    }

    /// Bytes of an element in the largest dtype involved.
    pub(super) fn element_bytes(&self) -> usize {
        let all = self.widen.iter().flat_map(|caster| [caster.from().size(), caster.to().size()]);
        all.chain([self.narrow.to().size()]).max().unwrap_or(1)
    }

    /// The dtypes of the sum and of the result, if they differ.
    pub(super) fn last_cast(&self) -> Option<(DType, DType)> {
        let (from, to) = (self.narrow.from(), self.narrow.to());
        (from != to).then_some((from, to))
    }

    /// An empty sum of `elements` values.
    pub(super) fn start(&self, elements: u64) -> Sum<'_> {
        let parts = self.narrow.from().size() / self.narrow.from().scalar_size();
        let len = usize::try_from(elements).unwrap_or(usize::MAX).saturating_mul(parts);
        let numbers = if self.double {
            Numbers::Double(vec![0.0; len])
        } else {
            Numbers::Single(vec![0.0; len])
        };
        Sum { mean: self, numbers, widened: Vec::new(), added: 0, overflowed: 0 }
    }
}

impl Sum<'_> {
    /// Adds the elements of the next checkpoint.
    pub(super) fn add(&mut self, elements: &[u8]) {
        let at = self.added;
        let (Some(caster), Some(weight)) = (self.mean.widen.get(at), self.mean.weights.get(at))
        else {
            return;
        };
        self.added += 1;
        // Adding to zero would turn a negative zero into a positive one.
        let first = at == 0;
        let count = elements.len() / caster.from().size();
        self.widened.resize(count * caster.to().size(), 0);
        caster.cast(elements, &mut self.widened, &mut CastCounts::default());
        match &mut self.numbers {
            Numbers::Single(sums) => {
                let weight = *weight as f32;
                let (words, _) = self.widened.as_chunks::<4>();
                for (sum, word) in sums.iter_mut().zip(words) {
                    let value = f32::from_le_bytes(*word);
                    let finite = value.is_finite() && sum.is_finite();
                    let weighted = value * weight;
                    *sum = if first { weighted } else { *sum + weighted };
                    self.overflowed += u64::from(finite && !sum.is_finite());
                }
            }
            Numbers::Double(sums) => {
                let (words, _) = self.widened.as_chunks::<8>();
                for (sum, word) in sums.iter_mut().zip(words) {
                    let value = f64::from_le_bytes(*word);
                    let finite = value.is_finite() && sum.is_finite();
                    let weighted = value * weight;
                    *sum = if first { weighted } else { *sum + weighted };
                    self.overflowed += u64::from(finite && !sum.is_finite());
                }
            }
        }
    }

    /// The mean in the dtype of the result, and the number of finite inputs whose sums overflowed.
    pub(super) fn finish(mut self, counts: &mut CastCounts) -> (Vec<u8>, u64) {
        let total: f64 = self.mean.weights.iter().sum();
        match &self.numbers {
            Numbers::Single(sums) => {
                let total = total as f32;
                self.widened.resize(4 * sums.len(), 0);
                let (words, _) = self.widened.as_chunks_mut::<4>();
                for (word, sum) in words.iter_mut().zip(sums) {
                    let mean = sum / total;
                    self.overflowed += u64::from(sum.is_finite() && !mean.is_finite());
                    *word = mean.to_le_bytes();
                }
            }
            Numbers::Double(sums) => {
                self.widened.resize(8 * sums.len(), 0);
                let (words, _) = self.widened.as_chunks_mut::<8>();
                for (word, sum) in words.iter_mut().zip(sums) {
                    let mean = sum / total;
                    self.overflowed += u64::from(sum.is_finite() && !mean.is_finite());
                    *word = mean.to_le_bytes();
                }
            }
        }
        let narrow = &self.mean.narrow;
        let count = self.widened.len() / narrow.from().size();
        let mut elements = vec![0; count * narrow.to().size()];
        narrow.cast(&self.widened, &mut elements, counts);
        (elements, self.overflowed)
    }
}
