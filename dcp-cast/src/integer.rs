//! Decodes and encodes integers and booleans of every width, as blocks of `i128`.

use dcp_core::DType;

use super::float::Reach;
use super::report::CastCounts;

/// Runs `$then` with `$type` as the integer type of a dtype.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $then:expr) => {
        match $dtype {
            DType::Int64 => {
                type $type = i64;
                $then
            }
            DType::Int32 => {
                type $type = i32;
                $then
            }
            DType::Int16 => {
                type $type = i16;
                $then
            }
            DType::Int8 => {
                type $type = i8;
                $then
            }
            DType::UInt64 => {
                type $type = u64;
                $then
            }
            DType::UInt32 => {
                type $type = u32;
                $then
            }
            DType::UInt16 => {
                type $type = u16;
                $then
            }
            DType::UInt8 => {
                type $type = u8;
                $then
            }
            _ => {}
        }
    };
}

/// Decodes integers; does nothing for other dtypes.
pub(super) fn load(dtype: DType, bytes: &[u8], numbers: &mut [i128]) {
    if dtype == DType::Bool {
        for (number, byte) in numbers.iter_mut().zip(bytes) {
            *number = i128::from(*byte != 0);
        }
        return;
    }
    with_type!(dtype, Int => {
        let (words, _) = bytes.as_chunks::<{ size_of::<Int>() }>();
        for (number, word) in numbers.iter_mut().zip(words) {
            *number = i128::from(Int::from_le_bytes(*word));
        }
    });
}

/// Encodes integers of any width by their lowest bits, as PyTorch does. Every value but zero is
/// true.
pub(super) fn store(dtype: DType, numbers: &[i128], bytes: &mut [u8]) {
    if dtype == DType::Bool {
        for (byte, number) in bytes.iter_mut().zip(numbers) {
            *byte = u8::from(*number != 0);
        }
        return;
    }
    with_type!(dtype, Int => {
        let (words, _) = bytes.as_chunks_mut::<{ size_of::<Int>() }>();
        for (word, number) in words.iter_mut().zip(numbers) {
            *word = (*number as Int).to_le_bytes();
        }
    });
}

/// The smallest and largest integer of a dtype; unbounded for booleans.
fn range(dtype: DType) -> (i128, i128) {
    let mut range = (i128::MIN, i128::MAX);
    with_type!(dtype, Int => range = (i128::from(Int::MIN), i128::from(Int::MAX)));
    range
}

/// An `f64` that rounds to any narrower type as `x` itself does: `x` truncated, with the last bit
/// set if anything was lost.
pub(super) fn to_odd(x: i128) -> f64 {
    let near = x as f64;
    let back = near as i128;
    if back == x {
        return near;
    }
    let away = u64::from(back.unsigned_abs() > x.unsigned_abs());
    f64::from_bits((near.to_bits() - away) | 1)
}

/// Truncates towards zero into the range of `dtype`. Every value but zero is true.
pub(super) fn truncate(dtype: DType, old: &[f64], new: &mut [i128], counts: &mut CastCounts) {
    let (lowest, highest) = range(dtype);
    for (&old, new) in old.iter().zip(new) {
        if dtype == DType::Bool {
            *new = i128::from(old != 0.0);
        } else {
            // Saturates, and converts NaN to zero.
            let whole = old as i128;
            *new = whole.clamp(lowest, highest);
            let out = old.is_nan() || *new != whole || old.is_infinite();
            counts.out_of_range += u64::from(out);
            if out {
                counts.inexact += 1;
                continue;
            }
        }
        let back = *new as f64;
        counts.underflowed += u64::from(old != 0.0 && *new == 0);
        counts.inexact += u64::from(back != old);
        if *new != 0 && old.is_finite() {
            let error = ((back - old) / old).abs();
            counts.max_relative_error = counts.max_relative_error.max(error);
        }
    }
}

/// Counts the losses of integers as other integers or booleans.
pub(super) fn compare(to: DType, old: &[i128], new: &[i128], counts: &mut CastCounts) {
    let (lowest, highest) = range(to);
    for (old, new) in old.iter().zip(new) {
        counts.out_of_range += u64::from(!(lowest..=highest).contains(old));
        counts.inexact += u64::from(old != new);
    }
}

/// Counts the losses of integers as floats.
pub(super) fn compare_floats(reach: &Reach, old: &[i128], new: &[f64], counts: &mut CastCounts) {
    let beyond = reach.double();
    for (&old, &new) in old.iter().zip(new) {
        // Integers beyond 53 bits are far from the end of any dtype's range.
        let far = old.unsigned_abs() as f64 >= beyond;
        let out_of_range = far || (reach.positive && old <= 0);
        counts.out_of_range += u64::from(out_of_range);
        counts.became_nan += u64::from(new.is_nan());
        // A nonzero result is whole in every dtype.
        let difference = (new as i128).abs_diff(old);
        let inexact = out_of_range || difference != 0;
        counts.inexact += u64::from(inexact);
        if inexact && !out_of_range {
            let error = difference as f64 / old.unsigned_abs() as f64;
            counts.max_relative_error = counts.max_relative_error.max(error);
        }
    }
}
