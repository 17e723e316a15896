//! Decodes and encodes floats of every width, as blocks of `f32` and `f64`.

use std::sync::LazyLock;

use dcp_core::DType;

use crate::small_float::{
    BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, F16, SmallFloat, nearest, small_float,
};

/// Decodes floats of at most 32 bits, which is exact; does nothing for other dtypes.
pub(super) fn load_single(dtype: DType, bytes: &[u8], numbers: &mut [f32]) {
    match dtype {
        DType::Float32 => {
            let (words, _) = bytes.as_chunks::<4>();
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = f32::from_le_bytes(*word);
            }
        }
        DType::BFloat16 => {
            let (words, _) = bytes.as_chunks::<2>();
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
            }
        }
        DType::Float16 => {
            let (words, _) = bytes.as_chunks::<2>();
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = half(u16::from_le_bytes(*word));
            }
        }
        _ => {
            let Some(table) = table(dtype) else { return };
            for (number, byte) in numbers.iter_mut().zip(bytes) {
                *number = table[usize::from(*byte)];
            }
        }
    }
}

/// Encodes floats of at most 32 bits, rounding each number once.
pub(super) fn store_single(dtype: DType, numbers: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::Float32 => {
            let (words, _) = bytes.as_chunks_mut::<4>();
            for (word, number) in words.iter_mut().zip(numbers) {
                *word = number.to_le_bytes();
            }
        }
        DType::BFloat16 => store_words(numbers, bytes, BF16),
        DType::Float16 => store_words(numbers, bytes, F16),
        DType::Float8E4M3Fn => store_bytes(numbers, bytes, E4M3FN),
        DType::Float8E5M2 => store_bytes(numbers, bytes, E5M2),
        DType::Float8E4M3FnUz => store_bytes(numbers, bytes, E4M3FNUZ),
        DType::Float8E5M2FnUz => store_bytes(numbers, bytes, E5M2FNUZ),
        DType::Float8E8M0Fnu => {
            for (byte, number) in bytes.iter_mut().zip(numbers) {
                *byte = exponent(*number);
            }
        }
        _ => {}
    }
}

/// Decodes floats of any width.
pub(super) fn load_double(dtype: DType, bytes: &[u8], numbers: &mut [f64]) {
    if dtype == DType::Float64 {
        let (words, _) = bytes.as_chunks::<8>();
        for (number, word) in numbers.iter_mut().zip(words) {
            *number = f64::from_le_bytes(*word);
        }
        return;
    }
    let mut narrow = [0.0; super::block::BLOCK];
    for (numbers, bytes) in
        numbers.chunks_mut(narrow.len()).zip(bytes.chunks(narrow.len() * dtype.size()))
    {
        load_single(dtype, bytes, &mut narrow);
        for (number, narrow) in numbers.iter_mut().zip(&narrow) {
            *number = f64::from(*narrow);
        }
    }
}

/// Encodes floats of any width, rounding each number once.
pub(super) fn store_double(dtype: DType, numbers: &[f64], bytes: &mut [u8]) {
    match dtype {
        DType::Float64 => {
            let (words, _) = bytes.as_chunks_mut::<8>();
            for (word, number) in words.iter_mut().zip(numbers) {
                *word = number.to_le_bytes();
            }
        }
        DType::Float32 => {
            let (words, _) = bytes.as_chunks_mut::<4>();
            for (word, number) in words.iter_mut().zip(numbers) {
                *word = (*number as f32).to_le_bytes();
            }
        }
        _ => {
            let mut odd = [0.0; super::block::BLOCK];
            for (numbers, bytes) in
                numbers.chunks(odd.len()).zip(bytes.chunks_mut(odd.len() * dtype.size()))
            {
                for (odd, number) in odd.iter_mut().zip(numbers) {
                    *odd = to_odd(*number);
                }
                store_single(dtype, odd.get(..numbers.len()).unwrap_or_default(), bytes);
            }
        }
    }
}

/// Sets the bits of NaNs in bfloat16 as PyTorch does for sources of at most 16 bits.
pub(super) fn settle_nans(from: DType, to: DType, bytes: &mut [u8]) {
    if to != DType::BFloat16 || from.size() > 2 {
        return;
    }
    let (words, _) = bytes.as_chunks_mut::<2>();
    for word in words {
        let is_nan = u16::from_le_bytes(*word) & 0x7fff > 0x7f80;
        *word = if is_nan { 0x7fc0_u16.to_le_bytes() } else { *word };
    }
}

#[inline(always)]
fn store_words(numbers: &[f32], bytes: &mut [u8], layout: SmallFloat) {
    let (words, _) = bytes.as_chunks_mut::<2>();
    for (word, number) in words.iter_mut().zip(numbers) {
        *word = (nearest(*number, layout) as u16).to_le_bytes();
    }
}

#[inline(always)]
fn store_bytes(numbers: &[f32], bytes: &mut [u8], layout: SmallFloat) {
    for (byte, number) in bytes.iter_mut().zip(numbers) {
        *byte = nearest(*number, layout) as u8;
    }
}

/// The exponent of the nearest power of two, as PyTorch rounds: up from one and a half times a
/// power, and always up between the two smallest. Drops the sign; zero becomes the smallest power,
/// and infinities and NaNs become NaN.
#[inline(always)]
fn exponent(x: f32) -> u8 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    // A subnormal number with only its highest bit set is the smallest power itself.
    let exact = u32::from(magnitude < 1 << 23);
    let rounded = magnitude.wrapping_add((1 << 22) - exact) >> 23;
    rounded.min(0xff) as u8
}

/// Decodes a binary16 without branches.
#[inline(always)]
fn half(bits: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let wide = u32::from(bits & 0x7fff) << 13;
    let exponent = wide & EXPONENT;
    let rebiased = wide + ((127 - 15) << 23);
    // Makes a NaN quiet, as PyTorch and processors do.
    let quiet = u32::from(wide > EXPONENT) << 22;
    let special = (rebiased + ((128 - 16) << 23)) | quiet;
    let subnormal = f32::from_bits(rebiased + (1 << 23)) - f32::from_bits(113 << 23);
    let magnitude = if exponent == EXPONENT {
        special
    } else if exponent == 0 {
        subnormal.to_bits()
    } else {
        rebiased
    };
    f32::from_bits(magnitude | u32::from(bits >> 15) << 31)
}

/// A `binary32` that rounds to any narrower type as `x` itself does: `x` truncated, with the last
/// bit set if anything was lost.
#[inline(always)]
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    let away = u32::from(back.abs() > x.abs());
    let inexact = u32::from(back != x && !x.is_nan());
    f32::from_bits((near.to_bits() - away) | inexact)
}

/// The values of the bytes of an 8-bit float.
fn table(dtype: DType) -> Option<&'static [f32; 256]> {
    type Table = LazyLock<[f32; 256]>;
    static E4M3FN_TABLE: Table = LazyLock::new(|| decoded(E4M3FN));
    static E5M2_TABLE: Table = LazyLock::new(|| decoded(E5M2));
    static E4M3FNUZ_TABLE: Table = LazyLock::new(|| decoded(E4M3FNUZ));
    static E5M2FNUZ_TABLE: Table = LazyLock::new(|| decoded(E5M2FNUZ));
    static E8M0FNU_TABLE: Table = LazyLock::new(|| {
        std::array::from_fn(|code| match code {
            0 => f32::from_bits(1 << 22),
            0xff => f32::from_bits(SIGNALING),
            code => f32::from_bits((code as u32) << 23),
        })
    });
    Some(match dtype {
        DType::Float8E4M3Fn => &E4M3FN_TABLE,
        DType::Float8E5M2 => &E5M2_TABLE,
        DType::Float8E4M3FnUz => &E4M3FNUZ_TABLE,
        DType::Float8E5M2FnUz => &E5M2FNUZ_TABLE,
        DType::Float8E8M0Fnu => &E8M0FNU_TABLE,
        _ => return None,
    })
}

/// The NaN to which PyTorch decodes that of dtypes with a single one.
const SIGNALING: u32 = 0x7f80_0001;

fn decoded(layout: SmallFloat) -> [f32; 256] {
    std::array::from_fn(|code| {
        let number = small_float(code as u32, layout) as f32;
        if !number.is_nan() {
            return number;
        }
        let code = code as u32;
        // PyTorch decodes one dtype by way of float16 and prefixes ones to the other.
        f32::from_bits(match (layout.has_infinity(), layout.has_signed_nan()) {
            (true, _) => (code & 0x80) << 24 | 0x7fc0_0000 | (code & 3) << 21,
            (false, true) => (code & 0x80) << 24 | 0x7ff0_0000,
            (false, false) => SIGNALING,
        })
    })
}

/// Whether the float dtype `wide` represents every number of `narrow`.
#[must_use]
pub fn holds(wide: DType, narrow: DType) -> bool {
    match narrow {
        DType::Float64 => wide == DType::Float64,
        DType::Float32 => matches!(wide, DType::Float64 | DType::Float32),
        DType::Float16 | DType::BFloat16 => {
            wide == narrow || matches!(wide, DType::Float64 | DType::Float32)
        }
        DType::Float8E8M0Fnu => {
            matches!(wide, DType::Float64 | DType::Float32 | DType::BFloat16)
        }
        _ => wide == narrow || wide.size() > 1,
    }
}

/// The end of a dtype's range: half a step beyond its largest number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    end: f64,
    /// Whether the end itself rounds back into the range.
    even: bool,
    /// Whether the dtype has infinity.
    pub(super) infinite: bool,
    /// Whether the dtype has positive numbers only.
    pub(super) positive: bool,
}

impl Reach {
    /// The smallest out-of-range `f32`.
    pub(super) fn single(&self) -> f32 {
        let end = self.end as f32;
        if self.even { end.next_up() } else { end }
    }

    /// The smallest out-of-range `f64`.
    pub(super) fn double(&self) -> f64 {
        if self.even { self.end.next_up() } else { self.end }
    }
}

/// The end of a float dtype's range.
pub(super) fn reach(dtype: DType) -> Reach {
    let wide = |end| Reach { end, even: false, infinite: true, positive: false };
    let layout = match dtype {
        DType::Float16 => F16,
        DType::BFloat16 => BF16,
        DType::Float8E4M3Fn => E4M3FN,
        DType::Float8E5M2 => E5M2,
        DType::Float8E4M3FnUz => E4M3FNUZ,
        DType::Float8E5M2FnUz => E5M2FNUZ,
        DType::Float8E8M0Fnu => {
            let end = 1.5 * 2_f64.powi(127);
            return Reach { end, even: false, infinite: false, positive: true };
        }
        DType::Float32 => return wide(f64::from(f32::MAX) + 2_f64.powi(103)),
        _ => return wide(f64::INFINITY),
    };
    let largest = layout.largest();
    let number = small_float(largest, layout);
    let half_step = (number - small_float(largest - 1, layout)) / 2.0;
    Reach {
        end: number + half_step,
        even: largest & 1 == 0,
        infinite: layout.has_infinity(),
        positive: false,
    }
}
