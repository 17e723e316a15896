//! The layouts of floats of up to 16 bits, and what their bits mean.

/// The meaning of the all-ones exponent of a small float.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Specials {
    /// Infinities and NaNs, as IEEE 754 has them.
    Ieee,
    /// NaN only where the mantissa is all ones too.
    NanAllOnes,
    /// No special value but NaN in the place of negative zero.
    NanNegativeZero,
    /// None at all.
    Finite,
}

/// The layout of a float of up to 16 bits: a sign, `exponent` and `mantissa` bits.
#[derive(Clone, Copy, Debug)]
pub struct SmallFloat {
    /// Bits of the exponent.
    pub exponent: u32,
    /// Bits of the mantissa.
    pub mantissa: u32,
    /// The number that is added to the exponent.
    pub bias: i32,
    /// The meaning of the largest exponent.
    pub specials: Specials,
}

const fn layout(exponent: u32, mantissa: u32, bias: i32, specials: Specials) -> SmallFloat {
    SmallFloat { exponent, mantissa, bias, specials }
}

/// `float16`.
pub const F16: SmallFloat = layout(5, 10, 15, Specials::Ieee);
/// `bfloat16`.
pub const BF16: SmallFloat = layout(8, 7, 127, Specials::Ieee);
/// `float8_e4m3fn`.
pub const E4M3FN: SmallFloat = layout(4, 3, 7, Specials::NanAllOnes);
/// `float8_e5m2`.
pub const E5M2: SmallFloat = layout(5, 2, 15, Specials::Ieee);
/// `float8_e4m3fnuz`.
pub const E4M3FNUZ: SmallFloat = layout(4, 3, 8, Specials::NanNegativeZero);
/// `float8_e5m2fnuz`.
pub const E5M2FNUZ: SmallFloat = layout(5, 2, 16, Specials::NanNegativeZero);
/// A half of `float4_e2m1fn_x2`.
pub const E2M1: SmallFloat = layout(2, 1, 1, Specials::Finite);

impl SmallFloat {
    /// Whether there are infinities.
    pub(crate) const fn has_infinity(self) -> bool {
        matches!(self.specials, Specials::Ieee)
    }

    /// Whether NaN has a sign.
    pub(crate) const fn has_signed_nan(self) -> bool {
        matches!(self.specials, Specials::Ieee | Specials::NanAllOnes)
    }

    /// The bits of the largest finite number.
    pub(crate) const fn largest(self) -> u32 {
        let all = (1 << (self.exponent + self.mantissa)) - 1;
        match self.specials {
            Specials::Ieee => all - (1 << self.mantissa),
            Specials::NanAllOnes => all - 1,
            Specials::NanNegativeZero | Specials::Finite => all,
        }
    }
}

/// The number that `bits` encode, exactly.
#[must_use]
pub fn small_float(bits: u32, layout: SmallFloat) -> f64 {
    let SmallFloat { exponent: exponent_bits, mantissa: mantissa_bits, bias, specials } = layout;
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent_ones = (1 << exponent_bits) - 1;
    let exponent = bits >> mantissa_bits & exponent_ones;
    let negative = bits >> (mantissa_bits + exponent_bits) & 1 == 1;
    let sign = if negative { -1.0 } else { 1.0 };
    let ones = exponent == exponent_ones;
    match specials {
        Specials::Ieee if ones && mantissa == 0 => return sign * f64::INFINITY,
        Specials::Ieee if ones => return f64::NAN,
        Specials::NanAllOnes if ones && mantissa == (1 << mantissa_bits) - 1 => return f64::NAN,
        Specials::NanNegativeZero if negative && exponent == 0 && mantissa == 0 => return f64::NAN,
        _ => {}
    }
    let fraction = f64::from(mantissa) / f64::from(1_u32 << mantissa_bits);
    let exponent = i32::try_from(exponent).unwrap_or(i32::MAX);
    // Every value is a few bits times a power of two, so this is exact.
    if exponent == 0 {
        sign * fraction * 2_f64.powi(1 - bias)
    } else {
        sign * (1.0 + fraction) * 2_f64.powi(exponent - bias)
    }
}

/// The bits of the number nearest to `x`, the even one of two as near; without branches, so that
/// loops over it become vector code.
///
/// Beyond the largest number comes infinity where there is one, NaN in the `fnuz` types, and the
/// largest number in E4M3FN, infinity included (as in PyTorch 2.15; 2.4 made that NaN). A NaN
/// becomes what it does in PyTorch 2.15: in float16 it keeps its sign and the upper part of its
/// payload, made quiet; in bfloat16 all bits are set, as PyTorch's vector code has it; in 8 bits it
/// keeps its sign where the type has one.
#[inline(always)]
pub(crate) fn nearest(x: f32, layout: SmallFloat) -> u32 {
    let SmallFloat { exponent, mantissa, bias, specials } = layout;
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 31) << (exponent + mantissa);
    let is_nan = magnitude > INFINITE;
    let dropped = 23 - mantissa;
    let rebias = (127 - bias).unsigned_abs() << 23;
    // Half of what is dropped, or just less where the kept part is even; a carry moves on into
    // the exponent, as it should.
    let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
    let normal = magnitude.wrapping_add(half).wrapping_sub(rebias) >> dropped;
    // A sum whose last place is that of the type's subnormals rounds as they do.
    let magic = (127 + 24 - bias).unsigned_abs().wrapping_sub(mantissa) << 23;
    let sum = f32::from_bits(magnitude) + f32::from_bits(magic);
    let subnormal = sum.to_bits().wrapping_sub(magic);
    let code = if magnitude < rebias + (1 << 23) { subnormal } else { normal };
    let all = (1 << (exponent + mantissa)) - 1;
    match specials {
        Specials::Ieee => {
            let infinity = layout.largest() + 1;
            let quiet = infinity | 1 << (mantissa - 1);
            let (nan_sign, payload) = match mantissa {
                7 => (1 << (exponent + mantissa), all),
                10.. => (sign, quiet | magnitude >> dropped & all),
                _ => (sign, all),
            };
            if is_nan { nan_sign | payload } else { sign | code.min(infinity) }
        }
        Specials::NanAllOnes => sign | if is_nan { all } else { code.min(layout.largest()) },
        Specials::NanNegativeZero => {
            let negative_zero = all + 1;
            let signed = if code == 0 { 0 } else { sign | code };
            if is_nan || code > all { negative_zero } else { signed }
        }
        Specials::Finite => sign | code.min(all),
    }
}

/// The magnitude bits of an infinite binary32.
const INFINITE: u32 = 0x7f80_0000;
