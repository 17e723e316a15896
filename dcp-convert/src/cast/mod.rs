//! Casts, and their tests against PyTorch; the arithmetic is that of `dcp-cast`.

pub(crate) use dcp_cast::is_averaged;
pub use dcp_cast::{
    CastCounts, CastError, CastOptions, CastReport, Caster, TensorCast, is_exact, is_float,
};

use crate::error::ConvertError;

impl From<CastError> for ConvertError {
    fn from(error: CastError) -> Self {
        Self::NotCastable { fqn: error.fqn, problem: error.problem }
    }
}

#[cfg(test)]
mod tests;
