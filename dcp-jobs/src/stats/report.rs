//! The statistics of a checkpoint.

use std::sync::Arc;

use dcp_core::DType;
use indexmap::IndexMap;
use serde::{Serialize, Serializer};

use crate::keys::unmatched::UnmatchedPattern;
use crate::stats::histogram::Histogram;
use crate::stats::moments::Moments;

/// Statistics of a checkpoint. Serialized, they are the output of `dcp stats --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StatsReport {
    /// The format, such as `torch_dcp`.
    pub format: String,
    /// Tensors by FQN, in the order of the checkpoint.
    pub tensors: IndexMap<Arc<str>, TensorStats>,
    /// NaNs and infinities in objects.
    pub objects: ObjectStats,
    /// All tensors combined.
    pub total: NumberStats,
    /// Key patterns that match no key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<UnmatchedPattern>,
    /// Doubts about the values, such as a damaged optimizer, for people.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// A sign that numbers may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Anomaly {
    /// A NaN, in a tensor or an object.
    Nan,
    /// An infinity, in a tensor or an object.
    Infinity,
    /// A number in the topmost power of two before infinity.
    NearOverflow,
    /// A tensor with elements, all of which are zero.
    AllZeros,
}

impl StatsReport {
    /// Whether the checkpoint has this anomaly anywhere.
    #[must_use]
    pub fn has(&self, anomaly: Anomaly) -> bool {
        let any = |is: fn(&NumberStats) -> bool| self.tensors.values().any(|t| is(&t.numbers));
        match anomaly {
            Anomaly::Nan => self.objects.nan > 0 || any(|n| n.nan > 0),
            Anomaly::Infinity => self.objects.inf > 0 || any(|n| n.inf() > 0),
            Anomaly::NearOverflow => any(|n| n.near_overflow > 0),
            Anomaly::AllZeros => any(|n| n.count > 0 && n.zero == n.count),
        }
    }
}

/// Statistics of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TensorStats {
    /// The element type, by PyTorch's name without `torch.`.
    pub dtype: &'static str,
    /// Elements per axis.
    pub shape: Vec<u64>,
    /// Bytes of all elements.
    pub bytes: u64,
    /// Statistics of its elements.
    #[serde(flatten)]
    pub numbers: NumberStats,
    /// The first element in row-major order that is NaN or infinite, per axis.
    pub first_non_finite: Option<Vec<u64>>,
    /// Chunks with NaNs or infinities, in stored order; at most
    /// [`BAD_CHUNKS_MAX`](crate::stats::BAD_CHUNKS_MAX) of them.
    pub non_finite_chunks: Vec<BadChunk>,
    /// The number of chunks with NaNs or infinities.
    pub non_finite_chunk_count: u64,
}

/// A chunk with NaNs or infinities.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BadChunk {
    /// Its offset in the tensor, per axis.
    pub offsets: Vec<u64>,
    /// Elements per axis.
    pub sizes: Vec<u64>,
    /// The file that holds it.
    pub file: Option<String>,
    /// The rank that wrote the file, if its name contains the rank (`__3_0.distcp`).
    pub rank: Option<u64>,
    /// NaNs in it.
    pub nan: u64,
    /// Infinities of both signs in it.
    pub inf: u64,
    /// The index of the first of them in row-major order, in the whole tensor.
    pub first: Vec<u64>,
}

/// Statistics of numbers.
///
/// An element with several values counts as all of them: the parts of a complex number, the values
/// of a packed byte. Quantized elements count as stored, and bits as unsigned integers. Minimum,
/// maximum, mean and standard deviation are over finite numbers; `None` (`null` in JSON) without
/// any.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NumberStats {
    /// The number of values.
    pub count: u64,
    /// The smallest finite value.
    pub min: Option<Number>,
    /// The largest finite value.
    pub max: Option<Number>,
    /// The mean of the finite values.
    pub mean: Option<f64>,
    /// The standard deviation of the population (NumPy's default, `ddof=0`).
    pub std: Option<f64>,
    /// The largest finite magnitude.
    pub abs_max: Option<Number>,
    /// NaNs.
    pub nan: u64,
    /// Positive infinities.
    pub pos_inf: u64,
    /// Negative infinities.
    pub neg_inf: u64,
    /// Zeros of both signs.
    pub zero: u64,
    /// Values below the normal range of the dtype, which have lost precision.
    pub subnormal: u64,
    /// Finite values in the topmost power of two of a dtype with infinities; doubled, they are
    /// infinite.
    pub near_overflow: u64,
    /// Values by magnitude.
    pub histogram: Histogram,
}

impl NumberStats {
    /// The number of NaNs and infinities.
    #[must_use]
    pub fn non_finite(&self) -> u64 {
        self.nan + self.inf()
    }

    /// The number of infinities.
    #[must_use]
    pub fn inf(&self) -> u64 {
        self.pos_inf + self.neg_inf
    }

    /// The fraction of zeros, from 0 to 1.
    #[must_use]
    pub fn zero_share(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.zero as f64 / self.count as f64 }
    }

    pub(crate) fn of(moments: &Moments) -> Self {
        let finite = moments.finite();
        let some = |x: f64| (finite > 0).then_some(x);
        let (mut min, mut max) = (Number::Float(moments.min), Number::Float(moments.max));
        if let Some(wide) = moments.wide {
            (min, max) = (Number::Int(wide.min), Number::Int(wide.max));
        }
        let abs_max = match (min, max) {
            (Number::Int(low), Number::Int(high)) => Number::Int(low.abs().max(high.abs())),
            _ => Number::Float(moments.min.abs().max(moments.max.abs())),
        };
        Self {
            count: moments.count,
            min: (finite > 0).then_some(min),
            max: (finite > 0).then_some(max),
            mean: some(moments.mean()),
            std: some(moments.std()),
            abs_max: (finite > 0).then_some(abs_max),
            nan: moments.nan,
            pos_inf: moments.pos_inf,
            neg_inf: moments.neg_inf,
            zero: moments.zero,
            subnormal: 0,
            near_overflow: 0,
            histogram: moments.histogram.clone(),
        }
    }

    /// Like `From<&Moments>`, for numbers of `dtype`.
    pub(crate) fn of_dtype(dtype: DType, moments: &Moments) -> Self {
        let mut stats = Self::of(moments);
        if let Some(range) = FloatRange::of(dtype) {
            stats.subnormal = stats.histogram.within(i16::MIN, range.min_exponent - 1);
            if range.has_infinity {
                stats.near_overflow = stats.histogram.within(range.max_exponent, i16::MAX);
            }
        }
        stats
    }
}

/// A number at the precision of its dtype; floats cannot represent all 64-bit integers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Number {
    /// A float, or a small integer.
    Float(f64),
    /// An integer of a 64-bit dtype.
    Int(i128),
}

impl Number {
    /// The number as a float, rounded if necessary.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Float(x) => x,
            Self::Int(n) => n as f64,
        }
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Float(x) => serializer.serialize_f64(*x),
            Self::Int(n) => match (i64::try_from(*n), u64::try_from(*n)) {
                (Ok(n), _) => serializer.serialize_i64(n),
                (_, Ok(n)) => serializer.serialize_u64(n),
                _ => serializer.serialize_f64(*n as f64),
            },
        }
    }
}

/// The range of a float dtype, or of a complex dtype's parts, in powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FloatRange {
    /// Exponent of the smallest normal number.
    pub min_exponent: i16,
    /// Exponent of the largest number.
    pub max_exponent: i16,
    /// Whether larger values become infinite.
    pub has_infinity: bool,
}

impl FloatRange {
    /// The range of `dtype`; `None` for integers, booleans and bits.
    #[must_use]
    pub fn of(dtype: DType) -> Option<Self> {
        let (min_exponent, max_exponent, has_infinity) = match dtype {
            DType::Float64 | DType::Complex128 => (-1022, 1023, true),
            DType::Float32 | DType::Complex64 | DType::BFloat16 | DType::BComplex32 => {
                (-126, 127, true)
            }
            DType::Float16 | DType::Complex32 => (-14, 15, true),
            DType::Float8E5M2 => (-14, 15, true),
            DType::Float8E4M3Fn => (-6, 8, false),
            DType::Float8E4M3FnUz => (-7, 7, false),
            DType::Float8E5M2FnUz => (-15, 15, false),
            DType::Float8E8M0Fnu => (-127, 127, false),
            DType::Float4E2M1FnX2 => (0, 2, false),
            _ => return None,
        };
        Some(Self { min_exponent, max_exponent, has_infinity })
    }
}

/// NaNs and infinities in objects, such as a loss or a learning rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ObjectStats {
    /// Objects read.
    pub count: u64,
    /// Floats in them, including those of nested arrays and tensors.
    pub numbers: u64,
    /// NaNs.
    pub nan: u64,
    /// Infinities of both signs.
    pub inf: u64,
    /// Their places: the first of each array, at most
    /// [`BAD_VALUES_MAX`](crate::stats::BAD_VALUES_MAX) in
    /// all.
    pub non_finite: Vec<BadValue>,
}

/// A NaN or infinity in an object.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BadValue {
    /// The object.
    pub key: Arc<str>,
    /// The path in it, such as `['history'][3]`; empty for the object itself.
    pub path: String,
    /// `nan`, `inf` or `-inf`.
    pub value: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Element, decode};

    #[test]
    fn ranges_are_those_of_the_formats() {
        for &dtype in DType::ALL {
            let Some(range) = FloatRange::of(dtype) else { continue };
            let largest = 2_f64.powi(i32::from(range.max_exponent));
            if dtype.size() > 2 || dtype.is_complex() || dtype == DType::Float4E2M1FnX2 {
                continue;
            }
            let all = (0..1_u32 << (8 * dtype.size())).map(|n| {
                match decode(dtype, &n.to_le_bytes()[..dtype.size()]) {
                    Some(Element::Float(x)) => x,
                    other => panic!("{other:?}"),
                }
            });
            let finite: Vec<f64> = all.clone().filter(|x| x.is_finite()).collect();
            let max = finite.iter().copied().fold(0.0, f64::max);
            assert!(max >= largest && max < 2.0 * largest, "{dtype}: {max}");
            assert_eq!(all.clone().any(f64::is_infinite), range.has_infinity, "{dtype}");
            // Of normal numbers, every power of two has as many.
            let normal = 2_f64.powi(i32::from(range.min_exponent));
            let within =
                |from: f64| finite.iter().filter(|x| **x >= from && **x < 2.0 * from).count();
            assert_eq!(within(normal), within(2.0 * normal), "{dtype}");
            assert_ne!(within(normal / 2.0), within(normal), "{dtype}");
        }
    }
}
