//! One tensor element as a number, for every dtype.

pub(crate) mod compare;
pub(crate) mod npy;
pub(crate) mod numbers;
pub(crate) mod numpy;
pub(crate) mod place;
pub(crate) mod print;
pub(crate) mod slice;
pub(crate) mod value_difference;
pub(crate) mod value_json;

use std::fmt;

use dcp_core::DType;

use dcp_cast::{E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, F16, small_float};

pub use compare::Tolerance;
pub use npy::{NpyType, npy_header, npy_type};
pub use slice::TensorSlice;
pub use value_json::{JsonLimits, ValueEncoder, value_json};

/// An element, in the widest type of its kind.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Element {
    /// A float of any width.
    Float(f64),
    /// A signed integer. A quantized element is its stored number.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A boolean.
    Bool(bool),
    /// A real and an imaginary part.
    Complex(f64, f64),
    /// The two numbers of one byte, low nibble first.
    Pair(f64, f64),
    /// Uninterpreted bits, and how many.
    Bits(u64, u8),
}

/// Decodes one element from its little-endian bytes. Returns `None` unless there are
/// [`DType::size`] of them.
#[must_use]
pub fn decode(dtype: DType, bytes: &[u8]) -> Option<Element> {
    if bytes.len() != dtype.size() {
        return None;
    }
    let mut wide = [0; 8];
    if bytes.len() <= 8 {
        wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    }
    let raw = u64::from_le_bytes(wide);
    let [b0, b1, b2, b3, ..] = wide;
    let signed = |bits: u32| (raw as i64) << (64 - bits) >> (64 - bits);
    let half = |lo: u8, hi: u8| small_float(u32::from(u16::from_le_bytes([lo, hi])), F16);
    let brain = |lo: u8, hi: u8| f64::from(f32::from_le_bytes([0, 0, lo, hi]));
    let byte = u32::from(b0);
    Some(match dtype {
        DType::Float64 => Element::Float(f64::from_bits(raw)),
        DType::Float32 => Element::Float(f64::from(f32::from_le_bytes([b0, b1, b2, b3]))),
        DType::Float16 => Element::Float(half(b0, b1)),
        DType::BFloat16 => Element::Float(brain(b0, b1)),
        DType::Int64 => Element::Int(raw as i64),
        DType::Int32 | DType::QInt32 => Element::Int(signed(32)),
        DType::Int16 => Element::Int(signed(16)),
        DType::Int8 | DType::QInt8 => Element::Int(signed(8)),
        DType::UInt64 | DType::UInt32 | DType::UInt16 | DType::UInt8 | DType::QUInt8 => {
            Element::UInt(raw)
        }
        DType::Bool => Element::Bool(raw != 0),
        DType::Complex128 => {
            let (re, im) = bytes.split_at(8);
            let part = |part: &[u8]| part.try_into().map(f64::from_le_bytes);
            Element::Complex(part(re).ok()?, part(im).ok()?)
        }
        DType::Complex64 => {
            let part = |bits: u64| f64::from(f32::from_bits(bits as u32));
            Element::Complex(part(raw), part(raw >> 32))
        }
        DType::Complex32 => Element::Complex(half(b0, b1), half(b2, b3)),
        DType::BComplex32 => Element::Complex(brain(b0, b1), brain(b2, b3)),
        DType::Float8E4M3Fn => Element::Float(small_float(byte, E4M3FN)),
        DType::Float8E5M2 => Element::Float(small_float(byte, E5M2)),
        DType::Float8E4M3FnUz => Element::Float(small_float(byte, E4M3FNUZ)),
        DType::Float8E5M2FnUz => Element::Float(small_float(byte, E5M2FNUZ)),
        DType::Float8E8M0Fnu => Element::Float(match b0 {
            0xff => f64::NAN,
            exponent => 2_f64.powi(i32::from(exponent) - 127),
        }),
        DType::Float4E2M1FnX2 => {
            Element::Pair(small_float(byte & 15, E2M1), small_float(byte >> 4, E2M1))
        }
        _ => Element::Bits(raw, u8::try_from(8 * bytes.len()).unwrap_or(u8::MAX)),
    })
}

impl fmt::Display for Element {
    /// The shortest text that gives the number exactly, as Python's `repr` writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(x) => f.write_str(&float(*x)),
            Self::Int(n) => n.fmt(f),
            Self::UInt(n) => n.fmt(f),
            Self::Bool(b) => f.write_str(if *b { "True" } else { "False" }),
            Self::Complex(re, im) => {
                let sign = if im.is_sign_negative() && !im.is_nan() { "" } else { "+" };
                write!(f, "{}{sign}{}j", float(*re), float(*im))
            }
            Self::Pair(low, high) => write!(f, "({}, {})", float(*low), float(*high)),
            Self::Bits(bits, len) => write!(f, "0x{bits:0width$x}", width = usize::from(*len) / 4),
        }
    }
}

/// Formats a float as Python does.
pub(crate) fn float(x: f64) -> String {
    if x.is_nan() {
        "nan".to_owned()
    } else if x.is_infinite() {
        if x > 0.0 { "inf" } else { "-inf" }.to_owned()
    } else if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        match text.split_once('e') {
            Some((digits, power)) => {
                let (sign, power) = power.strip_prefix('-').map_or(("+", power), |p| ("-", p));
                format!("{digits}e{sign}{power:0>2}")
            }
            None => text,
        }
    } else {
        format!("{x:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(dtype: DType, bytes: &[u8]) -> f64 {
        match decode(dtype, bytes) {
            Some(Element::Float(x)) => x,
            other => panic!("{dtype}: {other:?}"),
        }
    }

    #[test]
    fn small_floats_at_their_limits() {
        assert_eq!(value(DType::Float16, &0x7bff_u16.to_le_bytes()), 65504.0);
        assert_eq!(value(DType::Float16, &1_u16.to_le_bytes()), 2_f64.powi(-24));
        assert_eq!(value(DType::Float16, &0xfc00_u16.to_le_bytes()), f64::NEG_INFINITY);
        assert_eq!(value(DType::BFloat16, &0x3f80_u16.to_le_bytes()), 1.0);
        assert_eq!(value(DType::Float8E4M3Fn, &[0x7e]), 448.0);
        assert!(value(DType::Float8E4M3Fn, &[0x7f]).is_nan());
        assert_eq!(value(DType::Float8E5M2, &[0x7b]), 57344.0);
        assert_eq!(value(DType::Float8E5M2, &[0x7c]), f64::INFINITY);
        assert_eq!(value(DType::Float8E4M3FnUz, &[0x7f]), 240.0);
        assert!(value(DType::Float8E4M3FnUz, &[0x80]).is_nan());
        assert_eq!(value(DType::Float8E5M2FnUz, &[0x7f]), 57344.0);
        assert_eq!(value(DType::Float8E8M0Fnu, &[127]), 1.0);
        assert!(value(DType::Float8E8M0Fnu, &[255]).is_nan());
        assert_eq!(decode(DType::Float4E2M1FnX2, &[0xf1]), Some(Element::Pair(0.5, -6.0)));
    }

    #[test]
    fn integers_keep_their_sign() {
        assert_eq!(decode(DType::Int8, &[0xff]), Some(Element::Int(-1)));
        assert_eq!(decode(DType::UInt8, &[0xff]), Some(Element::UInt(255)));
        assert_eq!(decode(DType::Int32, &[0, 0, 0, 0x80]), Some(Element::Int(-1 << 31)));
        assert_eq!(decode(DType::Int32, &[0]), None);
    }

    #[test]
    fn text_is_pythons() {
        let complex = Element::Complex(1.0, -0.5);
        assert_eq!(complex.to_string(), "1.0-0.5j");
        assert_eq!(float(1e-7), "1e-07");
        assert_eq!(float(1.5e300), "1.5e+300");
        assert_eq!(float(0.1), "0.1");
        assert_eq!(float(-0.0), "-0.0");
        assert_eq!(Element::Bits(5, 16).to_string(), "0x0005");
    }

    #[test]
    fn every_dtype_decodes() {
        for &dtype in DType::ALL {
            assert!(decode(dtype, &vec![1; dtype.size()]).is_some(), "{dtype}");
        }
    }
}
