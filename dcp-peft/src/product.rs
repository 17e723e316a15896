//! Rows of the product of two low-rank matrices.
//!
//! An element of `B @ A` is a sum over the rank, from the first term to the last and starting at zero. Each step is
//! a fused multiply-add, which rounds once, or a multiplication and an addition, which round twice; one element
//! in four differs in its last bit. [`Steps::of`] chooses as MKL does for PyTorch 2.15. The result is the same on
//! every machine, so ranks on different processors write the same bytes: `f32::mul_add` rounds once everywhere,
//! and is merely slow where the processor cannot do it.

#![allow(unsafe_code, reason = "a loop for processors that have the instructions")]

/// The number of columns from which on MKL (2024.2, on x86-64) multiplies by fused multiply-adds. Its own limit
/// depends on the processor: 10 on one, between 12 and 19 on another. No layer of a trained model is so small.
const FUSED_COLUMNS: u64 = 16;

/// The steps in which the terms of a sum are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Steps {
    Fused,
    Plain,
}

impl Steps {
    /// The steps of a product with this number of columns.
    pub(crate) fn of(columns: u64) -> Self {
        if columns < FUSED_COLUMNS { Self::Plain } else { Self::Fused }
    }

    /// Sets `row` to the sum of `left[k] * right[k][..]` over all `k`.
    ///
    /// `right` has `left.len()` rows of `row.len()` elements each.
    pub(crate) fn row(self, left: &[f32], right: &[f32], row: &mut [f32]) {
        match self {
            Self::Plain => sum(left, right, row, |sum, a, b| sum + a * b),
            Self::Fused => fused(left, right, row),
        }
    }
}

fn fused(left: &[f32], right: &[f32], row: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the function is safe but for the instructions that it is compiled to, and the processor has
        // both sets of them.
        return unsafe { fused_vectors(left, right, row) };
    }
    sum(left, right, row, |sum, a, b| a.mul_add(b, sum));
}

/// As [`fused`], compiled to instructions on vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_vectors(left: &[f32], right: &[f32], row: &mut [f32]) {
    sum(left, right, row, |sum, a, b| a.mul_add(b, sum));
}

#[inline(always)]
fn sum(left: &[f32], right: &[f32], row: &mut [f32], step: impl Fn(f32, f32, f32) -> f32) {
    row.fill(0.0);
    let Some(width) = std::num::NonZeroUsize::new(row.len()) else { return };
    for (factor, other) in left.iter().zip(right.chunks_exact(width.get())) {
        for (sum, element) in row.iter_mut().zip(other) {
            *sum = step(*sum, *factor, *element);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The vectors of this processor compute what the definition says, element by element.
        #[test]
        fn a_row_is_the_sum_of_each_element(
            (rank, width) in (0_usize..9, 0_usize..40),
            seed in any::<u32>(),
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 4_194_304.0 - 2.0
            };
            let left: Vec<f32> = (0..rank).map(|_| next()).collect();
            let right: Vec<f32> = (0..rank * width).map(|_| next()).collect();
            let mut row = vec![f32::NAN; width];
            Steps::Fused.row(&left, &right, &mut row);
            for (at, sum) in row.iter().enumerate() {
                let expected = (0..rank).fold(0.0_f32, |sum, k| left[k].mul_add(right[k * width + at], sum));
                prop_assert_eq!(sum.to_bits(), expected.to_bits());
            }
        }
    }
}
