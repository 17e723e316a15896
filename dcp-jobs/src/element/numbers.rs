//! Decodes a block of elements to numbers, with one tight loop per dtype.

use dcp_core::DType;

use crate::element::{Element, decode};

/// Decodes the elements of one dtype to `f64`.
///
/// Floats, integers of up to 53 bits and all small formats are exact in an `f64`; 64-bit integers
/// round to the nearest one. An element with several values yields all of them in stored order (low
/// bits first): a complex number its real and imaginary part, `float4_e2m1fn_x2` two floats,
/// `quint4x2` and `bits4x2` two integers, `quint2x4` and `bits2x4` four, `bits1x8` eight. Quantized
/// numbers are the stored ones, without scale and zero point. Bits are unsigned integers.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    scalar: Scalar,
    /// Values of one element.
    per_element: usize,
    /// Bytes of one element.
    size: usize,
}

#[derive(Clone, Debug)]
enum Scalar {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    U64,
    U32,
    U16,
    /// A table with the value of each byte.
    Byte(Box<[f64; 256]>),
    /// A table with the values of each byte, one byte after the other.
    Packed(Vec<f64>),
}

impl Numbers {
    pub(crate) fn new(dtype: DType) -> Self {
        let scalar = match dtype {
            DType::Float64 | DType::Complex128 => Scalar::F64,
            DType::Float32 | DType::Complex64 => Scalar::F32,
            DType::Float16 | DType::Complex32 => Scalar::F16,
            DType::BFloat16 | DType::BComplex32 => Scalar::BF16,
            DType::Int64 => Scalar::I64,
            DType::Int32 | DType::QInt32 => Scalar::I32,
            DType::Int16 => Scalar::I16,
            DType::UInt64 => Scalar::U64,
            DType::UInt32 => Scalar::U32,
            DType::UInt16 | DType::Bits16 => Scalar::U16,
            DType::QUInt4x2 | DType::Bits4x2 => packed_integers(4),
            DType::QUInt2x4 | DType::Bits2x4 => packed_integers(2),
            DType::Bits1x8 => packed_integers(1),
            DType::Float4E2M1FnX2 => {
                let pairs = (0..=u8::MAX).map(|byte| match decode(dtype, &[byte]) {
                    Some(Element::Pair(low, high)) => [low, high],
                    _ => [f64::NAN; 2],
                });
                Scalar::Packed(pairs.flatten().collect())
            }
            _ => {
                let mut values = Box::new([f64::NAN; 256]);
                for (byte, value) in (0..=u8::MAX).zip(values.iter_mut()) {
                    *value = decode(dtype, &[byte]).map_or(f64::NAN, |element| match element {
                        Element::Float(x) => x,
                        Element::Int(n) => n as f64,
                        Element::UInt(n) | Element::Bits(n, _) => n as f64,
                        Element::Bool(b) => f64::from(u8::from(b)),
                        Element::Complex(..) | Element::Pair(..) => f64::NAN,
                    });
                }
                Scalar::Byte(values)
            }
        };
        let per_element = match &scalar {
            Scalar::Packed(values) => values.len() / 256,
            _ if dtype.is_complex() => 2,
            _ => 1,
        };
        Self { scalar, per_element, size: dtype.size() }
    }

    /// Values of one element.
    pub(crate) fn per_element(&self) -> usize {
        self.per_element
    }

    /// Bytes of one element.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Whether an `f64` cannot represent every value: true for 64-bit integers.
    pub(crate) fn is_wide(&self) -> bool {
        matches!(self.scalar, Scalar::I64 | Scalar::U64)
    }

    /// The exact value of a 64-bit integer.
    pub(crate) fn wide(&self, bytes: [u8; 8]) -> i128 {
        match self.scalar {
            Scalar::I64 => i64::from_le_bytes(bytes).into(),
            _ => u64::from_le_bytes(bytes).into(),
        }
    }

    /// Replaces the contents of `out` with the values of whole elements.
    pub(crate) fn decode(&self, bytes: &[u8], out: &mut Vec<f64>) {
        out.clear();
        let (by_8, by_4, by_2) =
            (bytes.as_chunks::<8>().0, bytes.as_chunks::<4>().0, bytes.as_chunks::<2>().0);
        match &self.scalar {
            Scalar::F64 => out.extend(by_8.iter().map(|b| f64::from_le_bytes(*b))),
            Scalar::F32 => out.extend(by_4.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
            Scalar::F16 => out.extend(by_2.iter().map(|b| half(u16::from_le_bytes(*b)))),
            Scalar::BF16 => out.extend(by_2.iter().map(|b| brain(u16::from_le_bytes(*b)))),
            Scalar::I64 => out.extend(by_8.iter().map(|b| i64::from_le_bytes(*b) as f64)),
            Scalar::U64 => out.extend(by_8.iter().map(|b| u64::from_le_bytes(*b) as f64)),
            Scalar::I32 => out.extend(by_4.iter().map(|b| f64::from(i32::from_le_bytes(*b)))),
            Scalar::U32 => out.extend(by_4.iter().map(|b| f64::from(u32::from_le_bytes(*b)))),
            Scalar::I16 => out.extend(by_2.iter().map(|b| f64::from(i16::from_le_bytes(*b)))),
            Scalar::U16 => out.extend(by_2.iter().map(|b| f64::from(u16::from_le_bytes(*b)))),
            Scalar::Byte(values) => {
                out.extend(bytes.iter().filter_map(|byte| values.get(usize::from(*byte)).copied()));
            }
            Scalar::Packed(values) => {
                for byte in bytes {
                    let at = usize::from(*byte) * self.per_element;
                    out.extend(values.get(at..at + self.per_element).into_iter().flatten());
                }
            }
        }
    }
}

/// A table of the `bits`-bit unsigned integers in every byte, lowest bits first.
fn packed_integers(bits: u32) -> Scalar {
    let values = (0..=u8::MAX).flat_map(|byte| {
        (0..8 / bits).map(move |at| f64::from(byte >> (at * bits) & ((1 << bits) - 1) as u8))
    });
    Scalar::Packed(values.collect())
}

/// Decodes an IEEE half. Multiplying by a power of two adjusts the exponent and is exact for
/// subnormal numbers too.
fn half(bits: u16) -> f64 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    let scaled = f32::from_bits(magnitude) * 2_f32.powi(112);
    let special = magnitude | 0x7f80_0000;
    let magnitude = if magnitude >= 0x0f80_0000 { special } else { scaled.to_bits() };
    f64::from(f32::from_bits(magnitude | sign))
}

fn brain(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
        let mut out = vec![7.0];
        Numbers::new(dtype).decode(bytes, &mut out);
        out
    }

    fn same(a: f64, b: f64) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[test]
    fn every_dtype_agrees_with_single_elements() {
        for &dtype in DType::ALL {
            let size = dtype.size();
            // All patterns of one and two bytes, and a spread of the wider ones.
            let count = if size == 1 { 256 } else { 1_u64 << 16 };
            for n in 0..count {
                let spread = match size {
                    1 | 2 => n,
                    _ => n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                };
                let bytes = [spread, spread.rotate_left(29)].map(u64::to_le_bytes).concat();
                let bytes = &bytes[..size];
                let found = numbers(dtype, bytes);
                let wanted = match decode(dtype, bytes).unwrap() {
                    Element::Float(x) => vec![x],
                    Element::Int(n) => vec![n as f64],
                    Element::UInt(n) => vec![n as f64],
                    Element::Bool(b) => vec![f64::from(u8::from(b))],
                    Element::Complex(re, im) | Element::Pair(re, im) => vec![re, im],
                    Element::Bits(n, _) => {
                        let width = 8 * size / found.len();
                        let part = |at: usize| (n >> (at * width)) & ((1 << width) - 1);
                        (0..found.len()).map(|at| part(at) as f64).collect()
                    }
                };
                let all_same = found.len() == wanted.len()
                    && found.iter().zip(&wanted).all(|(a, b)| same(*a, *b));
                assert!(all_same, "{dtype} {bytes:x?}: {found:?} {wanted:?}");
                assert_eq!(Numbers::new(dtype).per_element(), found.len());
                if size > 2 && n > 2000 {
                    break;
                }
            }
        }
    }

    #[test]
    fn packed_values_come_lowest_first() {
        assert_eq!(numbers(DType::QUInt4x2, &[0x21, 0xf0]), [1.0, 2.0, 0.0, 15.0]);
        assert_eq!(numbers(DType::Bits2x4, &[0b11_10_01_00]), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(numbers(DType::Bits1x8, &[0b101])[..3], [1.0, 0.0, 1.0]);
        assert_eq!(numbers(DType::Complex64, &[0; 16]).len(), 4);
    }

    #[test]
    fn wide_integers_are_exact() {
        let n = i64::MIN + 1;
        assert_eq!(Numbers::new(DType::Int64).wide(n.to_le_bytes()), i128::from(n));
        assert_eq!(Numbers::new(DType::UInt64).wide([0xff; 8]), i128::from(u64::MAX));
        let wide: Vec<_> =
            DType::ALL.iter().filter(|dtype| Numbers::new(**dtype).is_wide()).collect();
        assert_eq!(wide, [&DType::Int64, &DType::UInt64]);
    }
}
