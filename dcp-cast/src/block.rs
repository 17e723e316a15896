//! Casts block by block: decode, encode, decode again, compare. A block stays in the first-level
//! cache, and every step is a loop without branches.

use dcp_core::DType;

use super::float::{self, Reach};
use super::integer;
use super::report::CastCounts;

/// The number of elements per block.
pub(super) const BLOCK: usize = 1024;

/// Floats of at most 32 bits.
pub(super) fn single(
    from: DType,
    to: DType,
    source: &[u8],
    target: &mut [u8],
    counts: &mut CastCounts,
) {
    let (exact, reach) = (float::holds(to, from), float::reach(to));
    let (mut old, mut new) = ([0_f32; BLOCK], [0_f32; BLOCK]);
    for (source, target) in blocks(from, to, source, target) {
        let n = source.len() / from.size();
        float::load_single(from, source, &mut old);
        let (Some(old), Some(new)) = (old.get(..n), new.get_mut(..n)) else { return };
        float::store_single(to, old, target);
        float::settle_nans(from, to, target);
        if !exact {
            float::load_single(to, target, new);
            compare_single(old, new, &reach, counts);
        }
    }
}

/// Floats, one of them of 64 bits.
pub(super) fn double(
    from: DType,
    to: DType,
    source: &[u8],
    target: &mut [u8],
    counts: &mut CastCounts,
) {
    let (exact, reach) = (float::holds(to, from), float::reach(to));
    let (mut old, mut new) = ([0_f64; BLOCK], [0_f64; BLOCK]);
    for (source, target) in blocks(from, to, source, target) {
        let n = source.len() / from.size();
        float::load_double(from, source, &mut old);
        let (Some(old), Some(new)) = (old.get(..n), new.get_mut(..n)) else { return };
        float::store_double(to, old, target);
        if !exact {
            float::load_double(to, target, new);
            compare_double(old, new, &reach, counts);
        }
    }
}

/// Integers and booleans, to any kind of number.
pub(super) fn integer(
    from: DType,
    to: DType,
    source: &[u8],
    target: &mut [u8],
    counts: &mut CastCounts,
) {
    let reach = float::reach(to);
    let (mut old, mut new) = ([0_i128; BLOCK], [0_i128; BLOCK]);
    let (mut odd, mut float) = ([0_f64; BLOCK], [0_f64; BLOCK]);
    for (source, target) in blocks(from, to, source, target) {
        let n = source.len() / from.size();
        integer::load(from, source, &mut old);
        let (Some(old), Some(new)) = (old.get(..n), new.get_mut(..n)) else { return };
        if !super::is_float(to) {
            integer::store(to, old, target);
            integer::load(to, target, new);
            integer::compare(to, old, new, counts);
            continue;
        }
        let (Some(odd), Some(float)) = (odd.get_mut(..n), float.get_mut(..n)) else { return };
        for (odd, old) in odd.iter_mut().zip(old) {
            // To nearest for the last rounding, to odd before another one.
            *odd = if to == DType::Float64 { *old as f64 } else { integer::to_odd(*old) };
        }
        float::store_double(to, odd, target);
        float::load_double(to, target, float);
        integer::compare_floats(&reach, old, float, counts);
    }
}

/// Floats to integers and booleans.
pub(super) fn truncate(
    from: DType,
    to: DType,
    source: &[u8],
    target: &mut [u8],
    counts: &mut CastCounts,
) {
    let (mut old, mut new) = ([0_f64; BLOCK], [0_i128; BLOCK]);
    for (source, target) in blocks(from, to, source, target) {
        let n = source.len() / from.size();
        float::load_double(from, source, &mut old);
        let (Some(old), Some(new)) = (old.get(..n), new.get_mut(..n)) else { return };
        integer::truncate(to, old, new, counts);
        integer::store(to, new, target);
    }
}

/// Splits both sides into blocks of equally many elements.
fn blocks<'a>(
    from: DType,
    to: DType,
    source: &'a [u8],
    target: &'a mut [u8],
) -> impl Iterator<Item = (&'a [u8], &'a mut [u8])> {
    source.chunks(BLOCK * from.size()).zip(target.chunks_mut(BLOCK * to.size()))
}

macro_rules! compare {
    ($name:ident, $float:ident, $bits:ident, $beyond:ident) => {
        fn $name(old: &[$float], new: &[$float], reach: &Reach, counts: &mut CastCounts) {
            let beyond = reach.$beyond();
            let (mut out, mut under, mut nan, mut inexact) = (0_u32, 0_u32, 0_u32, 0_u32);
            // Non-negative floats are ordered like their bits, whose maximum can be computed in any
            // order.
            let mut worst: $bits = 0;
            for (&old, &new) in old.iter().zip(new) {
                let far = old.abs() >= beyond && !(reach.infinite && old.is_infinite());
                let out_of_range = far || (reach.positive && old <= 0.0);
                let to_zero = old != 0.0 && new == 0.0;
                let equal = old == new || old.is_nan();
                out += u32::from(out_of_range);
                under += u32::from(to_zero);
                nan += u32::from(new.is_nan() && !old.is_nan());
                inexact += u32::from(!equal);
                let error = ((new - old) / old).abs();
                let counted = !equal && !out_of_range && !to_zero;
                worst = worst.max(if counted { error.to_bits() } else { 0 });
            }
            counts.out_of_range += u64::from(out);
            counts.underflowed += u64::from(under);
            counts.became_nan += u64::from(nan);
            counts.inexact += u64::from(inexact);
            counts.max_relative_error =
                counts.max_relative_error.max($float::from_bits(worst).into());
        }
    };
}

compare!(compare_single, f32, u32, single);
compare!(compare_double, f64, u64, double);
