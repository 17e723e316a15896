//! Failures of staging.

use dcp_core::device::DeviceError;

/// The reason why a copy between a device and host memory failed. The error of a save or a load adds
/// the tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// There is not enough host memory that can be pinned.
    #[error(
        "cannot pin {byte_len} bytes of host memory for {device}; lower `lent_bytes` or `chunks` of \
         PinnedStaging, or raise the limit of locked memory (`ulimit -l`)"
    )]
    Pinned {
        /// The device.
        device: String,
        /// The length of the allocation in bytes.
        byte_len: usize,
        /// The error of the device.
        source: DeviceError,
    },
    /// The device refused a copy, or a copy failed.
    #[error("a copy of {byte_len} bytes failed on {device}")]
    Copy {
        /// The device.
        device: String,
        /// The length of the copy in bytes.
        byte_len: usize,
        /// The error of the device.
        source: DeviceError,
    },
    /// There is not enough host memory for bytes that pinned memory has no room for.
    #[error("there is no host memory for a copy of {byte_len} bytes from {device}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// The length of the copy in bytes.
        byte_len: usize,
    },
    /// Pinned memory that failed copies may still use is not used again.
    #[error(
        "all pinned memory for {device} was lost with copies that failed; open the device again"
    )]
    Lost {
        /// The device.
        device: String,
    },
    /// The thread that waits for the device cannot be started, or has panicked.
    #[error("no thread waits for {device}: {problem}")]
    NoThread {
        /// The device.
        device: String,
        /// The cause, in words.
        problem: String,
    },
}
