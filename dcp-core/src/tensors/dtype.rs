//! Element types, by PyTorch's names.

use std::fmt;
use std::str::FromStr;

use crate::text::Quoted;

macro_rules! dtypes {
    ($($variant:ident, $name:literal, $size:literal, $doc:literal;)*) => {
        /// The element type of a tensor: every one that PyTorch 2.15 can store.
        ///
        /// Names are PyTorch's, without the `torch.` prefix.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DType {
            $(#[doc = $doc] $variant,)*
        }

        impl DType {
            /// Every element type, in the order of their wire codes.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// PyTorch's name, such as `float32` or `float8_e4m3fn`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// The stored size of one element in bytes.
            #[must_use]
            pub const fn size(self) -> usize {
                match self { $(DType::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    Float64, "float64", 8, "IEEE 754 binary64.";
    Float32, "float32", 4, "IEEE 754 binary32.";
    Float16, "float16", 2, "IEEE 754 binary16.";
    BFloat16, "bfloat16", 2, "The upper half of a binary32.";
    Int64, "int64", 8, "Signed 64-bit integer.";
    Int32, "int32", 4, "Signed 32-bit integer.";
    Int16, "int16", 2, "Signed 16-bit integer.";
    Int8, "int8", 1, "Signed 8-bit integer.";
    UInt64, "uint64", 8, "Unsigned 64-bit integer.";
    UInt32, "uint32", 4, "Unsigned 32-bit integer.";
    UInt16, "uint16", 2, "Unsigned 16-bit integer.";
    UInt8, "uint8", 1, "Unsigned 8-bit integer.";
    Bool, "bool", 1, "One byte, 0 or 1.";
    Complex128, "complex128", 16, "Two binary64, real part first.";
    Complex64, "complex64", 8, "Two binary32, real part first.";
    Complex32, "complex32", 4, "Two binary16, real part first.";
    BComplex32, "bcomplex32", 4, "Two bfloat16, real part first.";
    Float8E4M3Fn, "float8_e4m3fn", 1, "OCP E4M3, finite only.";
    Float8E5M2, "float8_e5m2", 1, "OCP E5M2.";
    Float8E4M3FnUz, "float8_e4m3fnuz", 1, "E4M3 without negative zero.";
    Float8E5M2FnUz, "float8_e5m2fnuz", 1, "E5M2 without negative zero.";
    Float8E8M0Fnu, "float8_e8m0fnu", 1, "Exponent only, the scale type of the OCP MX formats.";
    Float4E2M1FnX2, "float4_e2m1fn_x2", 1, "Two E2M1 values in a byte; shapes count bytes.";
    QInt8, "qint8", 1, "Quantized signed byte.";
    QUInt8, "quint8", 1, "Quantized unsigned byte.";
    QInt32, "qint32", 4, "Quantized 32-bit integer.";
    QUInt4x2, "quint4x2", 1, "Two quantized 4-bit values in a byte.";
    QUInt2x4, "quint2x4", 1, "Four quantized 2-bit values in a byte.";
    Bits8, "bits8", 1, "Eight bits without meaning.";
    Bits16, "bits16", 2, "Sixteen bits without meaning.";
    Bits1x8, "bits1x8", 1, "Eight one-bit values in a byte.";
    Bits2x4, "bits2x4", 1, "Four two-bit values in a byte.";
    Bits4x2, "bits4x2", 1, "Two four-bit values in a byte.";
}

impl DType {
    /// Whether the elements are affine-quantized, so that their meaning depends on a scale.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        matches!(
            self,
            DType::QInt8 | DType::QUInt8 | DType::QInt32 | DType::QUInt4x2 | DType::QUInt2x4
        )
    }

    /// Whether an element is a real and an imaginary part.
    #[must_use]
    pub const fn is_complex(self) -> bool {
        matches!(self, DType::Complex128 | DType::Complex64 | DType::Complex32 | DType::BComplex32)
    }

    /// The number of bytes that a change of byte order reverses as one unit: half an element for a
    /// complex dtype, a whole one otherwise.
    #[must_use]
    pub const fn scalar_size(self) -> usize {
        if self.is_complex() { self.size() / 2 } else { self.size() }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is not a known dtype.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {}", Quoted(.0))]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    /// Accepts PyTorch's names, with or without the `torch.` prefix.
    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let bare = name.strip_prefix("torch.").unwrap_or(name);
        Self::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == bare)
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(format!("torch.{dtype}").parse(), Ok(dtype));
        }
        assert!("half".parse::<DType>().is_err());
    }
}
