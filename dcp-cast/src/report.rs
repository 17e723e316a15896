//! What casts lost.

use std::sync::Arc;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// What a cast did to the elements that went through it. In complex tensors the real and the
/// imaginary parts are counted one by one, but in `elements`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CastCounts {
    /// Elements cast.
    pub elements: u64,
    /// Elements outside of the new dtype's range: they became infinite, NaN, the largest or
    /// smallest number there is, or (integers) wrapped around.
    pub out_of_range: u64,
    /// Elements other than zero that became zero.
    pub underflowed: u64,
    /// Elements that became NaN and were none, those out of range included.
    pub became_nan: u64,
    /// Elements that have another value now; NaN counts as equal to NaN.
    pub inexact: u64,
    /// The largest of |new - old| / |old| among elements within range that stayed different from
    /// zero.
    pub max_relative_error: f64,
}

impl CastCounts {
    /// Adds what another cast lost.
    pub fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.out_of_range += other.out_of_range;
        self.underflowed += other.underflowed;
        self.became_nan += other.became_nan;
        self.inexact += other.inexact;
        self.max_relative_error = self.max_relative_error.max(other.max_relative_error);
    }

    /// Whether any element left the range of the new dtype, upwards or to zero, or became NaN:
    /// more than rounding.
    #[must_use]
    pub fn lost_range(&self) -> bool {
        self.out_of_range > 0 || self.underflowed > 0 || self.became_nan > 0
    }
}

/// What became of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorCast {
    /// PyTorch's name of the old dtype.
    pub from: &'static str,
    /// PyTorch's name of the new one.
    pub to: &'static str,
    /// What was lost.
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

/// What became of every tensor that was cast, by FQN.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CastReport {
    /// The tensors with another dtype than before, in the order of the checkpoint. Elements that
    /// were read more than once are counted as often.
    pub tensors: IndexMap<Arc<str>, TensorCast>,
}

impl CastReport {
    /// Everything taken together.
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
