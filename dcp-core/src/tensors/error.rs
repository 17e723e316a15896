//! Errors of tensors: dtype, shape, region and memory that do not go together.

use crate::tensors::region::RegionError;
use crate::text::{Message, Quoted};

/// A tensor or a view of one cannot be made, or its elements cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// Dtype, shape, region and memory of a tensor do not fit together.
    #[error("invalid tensor{}: {problem}", named(.fqn), problem = Message(.problem))]
    Invalid {
        /// The tensor, where it has a name; [`TensorError::with_fqn`] adds it.
        fqn: Option<String>,
        /// The contradiction among dtype, shape, region and memory.
        problem: String,
    },
    /// The lists of a region contradict each other, or it ends beyond 64 bits.
    #[error("invalid region{}: {error}", named(.fqn))]
    Region {
        /// The tensor, where it has a name; [`TensorError::with_fqn`] adds it.
        fqn: Option<String>,
        /// The contradiction, or the end that exceeds 64 bits.
        error: Box<RegionError>,
    },
    /// There is not enough memory for the elements.
    #[error("cannot allocate {byte_len} bytes for {what}")]
    OutOfMemory {
        /// The use of the memory.
        what: String,
        /// The number of bytes requested.
        byte_len: u64,
    },
    /// Elements are needed in host memory and are on a device.
    #[error("{fqn} is in the memory of {device} and needed in host memory; copy it there first", fqn = Quoted(.fqn), device = Message(.device))]
    OnDevice {
        /// The tensor.
        fqn: String,
        /// The device.
        device: String,
    },
}

impl TensorError {
    /// The tensor that it is about, where it has a name.
    #[must_use]
    pub fn fqn(&self) -> Option<&str> {
        match self {
            Self::Invalid { fqn, .. } | Self::Region { fqn, .. } => fqn.as_deref(),
            Self::OnDevice { fqn, .. } => Some(fqn),
            Self::OutOfMemory { .. } => None,
        }
    }

    /// Sets the name of the tensor that it is about.
    #[must_use]
    pub fn with_fqn(mut self, new: impl Into<String>) -> Self {
        match &mut self {
            Self::Invalid { fqn, .. } | Self::Region { fqn, .. } => *fqn = Some(new.into()),
            Self::OnDevice { fqn, .. } => *fqn = new.into(),
            Self::OutOfMemory { .. } => {}
        }
        self
    }
}

impl From<RegionError> for TensorError {
    fn from(error: RegionError) -> Self {
        Self::Region { fqn: None, error: Box::new(error) }
    }
}

fn named(fqn: &Option<String>) -> String {
    fqn.as_ref().map_or_else(String::new, |fqn| format!(" {}", Quoted(fqn)))
}
