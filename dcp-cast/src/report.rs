//! The losses of casts.

use std::sync::Arc;

use dcp_core::PlanError;
use dcp_core::wire::{MessageReader, MessageWriter};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// The losses of a cast. For complex tensors, all counts but `elements` count real and imaginary
/// parts separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CastCounts {
    /// Elements cast.
    pub elements: u64,
    /// Elements outside the new dtype's range, which became infinite, NaN, the largest or smallest
    /// number, or (integers) wrapped around.
    pub out_of_range: u64,
    /// Nonzero elements that became zero.
    pub underflowed: u64,
    /// Elements that became NaN, including those out of range.
    pub became_nan: u64,
    /// Elements with another value; NaN is equal to NaN.
    pub inexact: u64,
    /// The largest |new - old| / |old| among elements within range that did not become zero.
    pub max_relative_error: f64,
}

impl CastCounts {
    /// Adds the losses of another cast.
    pub fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.out_of_range += other.out_of_range;
        self.underflowed += other.underflowed;
        self.became_nan += other.became_nan;
        self.inexact += other.inexact;
        self.max_relative_error = self.max_relative_error.max(other.max_relative_error);
    }

    /// Whether an element left the range of the new dtype, upwards or to zero, or became NaN: more
    /// than rounding.
    #[must_use]
    pub fn lost_range(&self) -> bool {
        self.out_of_range > 0 || self.underflowed > 0 || self.became_nan > 0
    }

    /// Writes the losses to a message between ranks. Without any, they take six bytes.
    pub fn write_to(&self, out: &mut MessageWriter) {
        let Self { elements, out_of_range, underflowed, became_nan, inexact, max_relative_error } =
            *self;
        out.numbers(&[elements, out_of_range, underflowed, became_nan, inexact]);
        // The last bits of a rounded error mostly are zeros, so reversed it is a small number.
        out.number(max_relative_error.to_bits().reverse_bits());
    }

    /// Reads losses from a message.
    ///
    /// # Errors
    ///
    /// When the message ends before.
    pub fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        Ok(Self {
            elements: input.number()?,
            out_of_range: input.number()?,
            underflowed: input.number()?,
            became_nan: input.number()?,
            inexact: input.number()?,
            max_relative_error: f64::from_bits(input.number()?.reverse_bits()),
        })
    }
}

/// The losses of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorCast {
    /// PyTorch's name of the old dtype.
    pub from: &'static str,
    /// PyTorch's name of the new one.
    pub to: &'static str,
    /// The losses.
    #[serde(flatten)]
    pub counts: CastCounts,
}

impl TensorCast {
    /// A cast from one dtype to another, by PyTorch's names, that lost `counts`.
    #[must_use]
    pub fn new(from: &'static str, to: &'static str, counts: CastCounts) -> Self {
        Self { from, to, counts }
    }
}

/// The losses of every cast tensor, by FQN.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CastReport {
    /// The tensors whose dtype changed, in the order of the checkpoint. Elements that were read
    /// repeatedly count each time.
    pub tensors: IndexMap<Arc<str>, TensorCast>,
}

impl CastReport {
    /// The sum over all tensors.
    #[must_use]
    pub fn total(&self) -> CastCounts {
        let mut total = CastCounts::default();
        self.tensors.values().for_each(|tensor| total.add(&tensor.counts));
        total
    }

    /// The tensors that lost more than precision.
    pub fn lost_range(&self) -> impl Iterator<Item = (&Arc<str>, &TensorCast)> {
        self.tensors.iter().filter(|(_, tensor)| tensor.counts.lost_range())
    }
}
