//! Compares master weights with the rounded ones beside them.
//!
//! Training rounds the master weights into those of the model after each step, so a master that does not round to
//! what is beside it is of another parameter or another step. The first elements are enough: two parameters, and two
//! steps, do not agree in all of them.

use dcp_core::{CheckpointError, DType};

use crate::parameter::{Masters, State};
use crate::rank_file::RankFile;

/// Elements that are compared of each parameter.
const ELEMENTS: u64 = 256;

/// The first parameter whose master, an entry or a run, is not that of the rounded weights `rounded` finds.
pub(crate) async fn first_difference<'m>(
    masters: &'m Masters,
    files: &[RankFile],
    rounded: impl Fn(&str) -> Option<(usize, usize)>,
) -> Result<Option<&'m str>, CheckpointError> {
    for (name, parameter) in &masters.parameters {
        let Some((part, entry)) = rounded(name) else { continue };
        let (of, master) = match &parameter.weights {
            State::Entry { part, entry } => (*part, *entry),
            State::Elements(runs) => match runs.first() {
                Some(run) if run.range.start == 0 => (run.part, run.entry),
                _ => continue,
            },
        };
        let (Some(file), Some(beside)) = (files.get(of), files.get(part)) else { continue };
        let (Some(tensor), Some(low)) = (file.tensor(master), beside.tensor(entry)) else {
            continue;
        };
        if tensor.dtype != DType::Float32 || low.shape != parameter.shape {
            continue;
        }
        let row = low.shape.last().copied().unwrap_or(1).min(ELEMENTS);
        let masters = file.first_elements(master, row).await?;
        let beside = beside.first_elements(entry, row).await?;
        if !agree(&masters, &beside, low.dtype) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Whether `float32` elements round to those of another dtype; of one that is not known, yes.
fn agree(masters: &[u8], rounded: &[u8], dtype: DType) -> bool {
    let (masters, _) = masters.as_chunks::<4>();
    match dtype {
        DType::Float32 => {
            let (rounded, _) = rounded.as_chunks::<4>();
            masters.iter().zip(rounded).all(|(a, b)| a == b || f32::from_le_bytes(*a).is_nan())
        }
        DType::BFloat16 => {
            let (rounded, _) = rounded.as_chunks::<2>();
            masters.iter().zip(rounded).all(|(a, b)| {
                let master = f32::from_le_bytes(*a);
                master.is_nan() || bfloat16(master) == u16::from_le_bytes(*b)
            })
        }
        DType::Float16 => {
            let (rounded, _) = rounded.as_chunks::<2>();
            masters.iter().zip(rounded).all(|(a, b)| {
                let (master, low) = (f32::from_le_bytes(*a), float16(u16::from_le_bytes(*b)));
                // Half of the last bit, and of the smallest number.
                let ulp = (master.abs() / 1024.0).max(2.0_f32.powi(-24));
                master.is_nan() || !low.is_finite() || (master - low).abs() <= ulp * 0.501
            })
        }
        _ => true,
    }
}

/// Rounds to the nearest, ties to even.
fn bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    let even = (bits >> 16) & 1;
    (bits.wrapping_add(0x7fff + even) >> 16) as u16
}

/// The number that 16 bits are.
fn float16(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from((bits >> 10) & 0x1f), f32::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2.0_f32.powi(-24),
        0x1f if fraction == 0.0 => f32::INFINITY,
        0x1f => f32::NAN,
        _ => (1.0 + fraction / 1024.0) * 2.0_f32.powi(exponent - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masters_agree_with_what_they_round_to() {
        let masters = [1.0_f32 + 1.0 / 512.0, -3.25e-5, 0.0];
        let bytes: Vec<u8> = masters.iter().flat_map(|value| value.to_le_bytes()).collect();
        let low: Vec<u8> =
            masters.iter().flat_map(|value| bfloat16(*value).to_le_bytes()).collect();
        assert!(agree(&bytes, &low, DType::BFloat16));
        assert_eq!(bfloat16(1.0 + 1.0 / 256.0), 0x3f80);
        let mut other = low.clone();
        other[0] ^= 1;
        assert!(!agree(&bytes, &other, DType::BFloat16));
        assert_eq!(float16(0x3c00), 1.0);
        assert_eq!(float16(0x8001), -2.0_f32.powi(-24));
        assert!(agree(&1.0_f32.to_le_bytes(), &0x3c00_u16.to_le_bytes(), DType::Float16));
        assert!(!agree(&1.0_f32.to_le_bytes(), &0x3c01_u16.to_le_bytes(), DType::Float16));
    }
}
