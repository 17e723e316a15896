#![doc = include_str!("../README.md")]
//!
//! A number becomes the nearest number of the new dtype, ties to even, subnormal numbers included.
//! Everything is rounded once; PyTorch casts from `float64` and large integers to 16 and 8 bits by
//! way of `float32`, and so rounds twice. Beyond the largest number the rules are those of PyTorch
//! 2.15: infinity if the dtype has one, NaN in the `fnuz` dtypes, and the largest number in
//! `float8_e4m3fn`.
//!
//! NaN stays NaN. It keeps its sign if the dtype has one, and between dtypes of at least 16 bits as
//! much of its payload as fits, made quiet; in 8 bits it is all ones. (PyTorch's own bits depend on
//! the processor.) `float8_e8m0fnu` has neither sign nor zero and keeps the exponent only.

mod block;
mod exact;
mod float;
mod integer;
mod report;
mod small_float;

use dcp_core::DType;

pub use exact::{ExactTensors, is_exact};
pub use float::holds;
pub use report::{CastCounts, CastReport, TensorCast};
pub use small_float::{
    BF16, E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, F16, SmallFloat, Specials, small_float,
};

/// An undefined cast.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor {fqn:?} {problem}")]
pub struct CastError {
    /// The tensor.
    pub fqn: String,
    /// The reason, and the alternative.
    pub problem: String,
}

/// The casts to allow, besides those that keep the kind of number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CastOptions {
    /// Whether floats may become integers or booleans, and integers booleans. Floats are truncated
    /// towards zero and saturate at the ends of the range, and NaN becomes 0 (PyTorch defines
    /// neither). Every value but zero is true, including NaN.
    pub truncate: bool,
}

impl CastOptions {
    /// Sets [`truncate`](Self::truncate).
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }
}

/// Casts elements of one dtype to another, and counts what is lost.
///
/// ```
/// use dcp_cast::{CastCounts, CastOptions, Caster};
/// use dcp_core::DType;
///
/// let caster = Caster::new("w", DType::Float32, DType::BFloat16, CastOptions::default())?;
/// let (mut bf16, mut counts) = ([0; 4], CastCounts::default());
/// caster.cast(&[0, 0, 0x80, 0x3f, 0xff, 0xff, 0x7f, 0x7f], &mut bf16, &mut counts);
/// assert_eq!(bf16, [0x80, 0x3f, 0x80, 0x7f]);
/// assert_eq!((counts.elements, counts.out_of_range), (2, 1));
/// # Ok::<(), dcp_cast::CastError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caster {
    from: DType,
    to: DType,
    how: How,
}

/// The intermediate form of an element, which represents every value of the old dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Copy,
    /// `binary32`, for floats of up to 32 bits.
    Single,
    /// `binary64`, if either side has 64 bits.
    Double,
    /// Integers of any width.
    Integer,
    /// Floats truncated to integers.
    Truncate,
    /// Two elements of these dtypes per element.
    Parts(DType, DType, bool),
}

impl Caster {
    /// A cast of the tensor `fqn` from one dtype to another.
    ///
    /// # Errors
    ///
    /// When the cast is undefined: quantized and packed elements, bits, complex numbers as real
    /// ones; also floats as integers, unless `options` allow it.
    pub fn new(fqn: &str, from: DType, to: DType, options: CastOptions) -> Result<Self, CastError> {
        let refuse = |problem: String| CastError { fqn: fqn.to_owned(), problem };
        if from == to {
            return Ok(Self { from, to, how: How::Copy });
        }
        let how = match (Kind::of(from), Kind::of(to)) {
            (Kind::Opaque, _) | (_, Kind::Opaque) => {
                return Err(refuse(format!(
                    "cannot be cast from {from} to {to}: one of them is not a type of plain numbers; \
                     leave the tensor as it is"
                )));
            }
            (Kind::Complex(a), Kind::Complex(b)) => {
                let wide = a == DType::Float64 || b == DType::Float64;
                How::Parts(a, b, wide)
            }
            (Kind::Complex(_), _) | (_, Kind::Complex(_)) => {
                return Err(refuse(format!(
                    "cannot be cast from {from} to {to}: complex numbers only become other \
                     complex numbers"
                )));
            }
            (Kind::Float | Kind::Integer, Kind::Bool) | (Kind::Float, Kind::Integer)
                if !options.truncate =>
            {
                return Err(refuse(format!(
                    "would lose the fractions of its numbers from {from} to {to}; allow \
                     truncation to drop them"
                )));
            }
            (Kind::Float, Kind::Float) => {
                let wide = from == DType::Float64 || to == DType::Float64;
                if wide { How::Double } else { How::Single }
            }
            (Kind::Float, Kind::Integer | Kind::Bool) => How::Truncate,
            (Kind::Integer | Kind::Bool, _) => How::Integer,
        };
        Ok(Self { from, to, how })
    }

    /// The dtype of the source.
    #[must_use]
    pub fn from(&self) -> DType {
        self.from
    }

    /// The dtype of the target.
    #[must_use]
    pub fn to(&self) -> DType {
        self.to
    }

    /// Casts the little-endian elements of `source` to as many in `target`, and adds the losses to
    /// `counts`.
    ///
    /// # Panics
    ///
    /// When the slices do not have the sizes of equally many elements.
    pub fn cast(&self, source: &[u8], target: &mut [u8], counts: &mut CastCounts) {
        let elements = source.len() / self.from.size();
        assert!(
            source.len() == elements * self.from.size()
                && target.len() == elements * self.to.size(),
            "{} bytes of {} into {} of {}",
            source.len(),
            self.from,
            target.len(),
            self.to
        );
        counts.elements += elements as u64;
        match self.how {
            How::Copy => target.copy_from_slice(source),
            How::Single => block::single(self.from, self.to, source, target, counts),
            How::Double => block::double(self.from, self.to, source, target, counts),
            How::Integer => block::integer(self.from, self.to, source, target, counts),
            How::Truncate => block::truncate(self.from, self.to, source, target, counts),
            How::Parts(from, to, true) => block::double(from, to, source, target, counts),
            How::Parts(from, to, false) => block::single(from, to, source, target, counts),
        }
    }
}

/// The kind of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float,
    Integer,
    Bool,
    /// Two floats of that dtype.
    Complex(DType),
    /// Not a plain number.
    Opaque,
}

impl Kind {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::Float64
            | DType::Float32
            | DType::Float16
            | DType::BFloat16
            | DType::Float8E4M3Fn
            | DType::Float8E5M2
            | DType::Float8E4M3FnUz
            | DType::Float8E5M2FnUz
            | DType::Float8E8M0Fnu => Self::Float,
            DType::Int64
            | DType::Int32
            | DType::Int16
            | DType::Int8
            | DType::UInt64
            | DType::UInt32
            | DType::UInt16
            | DType::UInt8 => Self::Integer,
            DType::Bool => Self::Bool,
            DType::Complex128 => Self::Complex(DType::Float64),
            DType::Complex64 => Self::Complex(DType::Float32),
            DType::Complex32 => Self::Complex(DType::Float16),
            DType::BComplex32 => Self::Complex(DType::BFloat16),
            _ => Self::Opaque,
        }
    }
}

/// Whether the elements are floats, of any width.
#[must_use]
pub fn is_float(dtype: DType) -> bool {
    Kind::of(dtype) == Kind::Float
}

/// Whether a mean of such elements is defined: true for floats, except bare exponents, and for
/// complex numbers.
#[must_use]
pub fn is_averaged(dtype: DType) -> bool {
    match Kind::of(dtype) {
        Kind::Float => dtype != DType::Float8E8M0Fnu,
        Kind::Complex(_) => true,
        _ => false,
    }
}
