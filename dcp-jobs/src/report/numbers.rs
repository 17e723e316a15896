//! Statistics of tensors, as a report shows them.

use serde::Serialize;

use crate::stats::{Number, StatsReport, TensorStats};

use super::build::shortened;
use super::{KeyReport, Report, ReportLimits};

/// The number of object values that are listed.
const VALUES: usize = 64;

/// Statistics of one tensor, as [`NumberStats`](crate::stats::NumberStats) defines them.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Numbers {
    /// The number of values.
    pub count: u64,
    /// The smallest finite value.
    pub min: Option<Number>,
    /// The largest finite value.
    pub max: Option<Number>,
    /// The mean of the finite values.
    pub mean: Option<f64>,
    /// The standard deviation of the finite values.
    pub std: Option<f64>,
    /// NaNs.
    pub nan: u64,
    /// Infinities.
    pub inf: u64,
    /// Zeros.
    pub zero: u64,
    /// Values below the normal range of the dtype.
    pub subnormal: u64,
    /// Values in the topmost power of two before infinity.
    pub near_overflow: u64,
    /// The first element that is NaN or infinite, per axis.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_non_finite: Option<Vec<u64>>,
    /// The exponents of the non-empty bins: bin `e` counts values with `2^e <= |x| < 2^(e + 1)`.
    pub exponents: Vec<i16>,
    /// The number of negative values in each.
    pub negative: Vec<u64>,
    /// The number of positive values in each.
    pub positive: Vec<u64>,
}

/// NaNs and infinities of a whole checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NonFinite {
    /// Tensors with NaNs or infinities.
    pub tensors: u64,
    /// NaNs in tensors.
    pub nan: u64,
    /// Infinities in tensors.
    pub inf: u64,
    /// NaNs and infinities in objects.
    pub in_objects: u64,
    /// Their places: the key, and the path in the object.
    pub values: Vec<(String, String)>,
}

impl Report {
    /// Adds the statistics of a checkpoint's tensors, with histograms up to `limits`.
    pub fn add_stats(&mut self, stats: &StatsReport, limits: &ReportLimits) {
        let of = |tensor: &TensorStats| (tensor.numbers.nan, tensor.numbers.inf());
        let mut found = NonFinite {
            in_objects: stats.objects.nan.saturating_add(stats.objects.inf),
            ..NonFinite::default()
        };
        for (nan, inf) in stats.tensors.values().map(of).filter(|bad| *bad != (0, 0)) {
            found.tensors += 1;
            found.nan = found.nan.saturating_add(nan);
            found.inf = found.inf.saturating_add(inf);
        }
        let short = |text: &str| shortened(text, limits.name_len);
        let values = stats.objects.non_finite.iter().take(VALUES);
        found.values = values.map(|bad| (short(&bad.key), short(&bad.path))).collect();
        self.non_finite = Some(found);
        let mut bins = limits.histogram_bins;
        // Both are in the order of the checkpoint.
        let mut tensors = stats.tensors.iter();
        for key in &mut self.keys {
            let KeyReport::Tensor { name, numbers, .. } = key else { continue };
            let same = tensors.find(|(fqn, _)| shortened(fqn, limits.name_len) == *name);
            let Some((_, tensor)) = same else { break };
            let mut of_tensor = Numbers::of(tensor);
            match bins.checked_sub(of_tensor.exponents.len()) {
                Some(left) => bins = left,
                None => {
                    self.cut.histograms += 1;
                    of_tensor.drop_histogram();
                }
            }
            *numbers = Some(Box::new(of_tensor));
        }
    }
}

impl Numbers {
    fn of(tensor: &TensorStats) -> Self {
        let numbers = &tensor.numbers;
        let bins = || numbers.histogram.bins();
        Self {
            count: numbers.count,
            min: numbers.min,
            max: numbers.max,
            mean: numbers.mean,
            std: numbers.std,
            nan: numbers.nan,
            inf: numbers.inf(),
            zero: numbers.zero,
            subnormal: numbers.subnormal,
            near_overflow: numbers.near_overflow,
            first_non_finite: tensor.first_non_finite.clone(),
            exponents: bins().map(|(exponent, ..)| exponent).collect(),
            negative: bins().map(|(_, negative, _)| negative).collect(),
            positive: bins().map(|(.., positive)| positive).collect(),
        }
    }

    fn drop_histogram(&mut self) {
        self.exponents.clear();
        self.negative.clear();
        self.positive.clear();
    }
}
