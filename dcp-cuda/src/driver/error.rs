//! Failures of NVIDIA's driver.

use cudarc::driver::DriverError;

/// The reason why a CUDA device cannot be opened or does not copy.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver is not installed.
    #[error(
        "cannot load the CUDA driver: {problem}; install NVIDIA's driver, or in a container its \
         libraries (`--gpus all`)"
    )]
    NoLibrary {
        /// The report of the loader, by name of the library.
        problem: String,
    },
    /// The driver lacks a function that copies need.
    #[error("the CUDA driver has no function {name}; a driver of CUDA 11.4 or later has it")]
    NoFunction {
        /// The function.
        name: &'static str,
    },
    /// The driver has no such device.
    #[error(
        "there is no device cuda:{ordinal}: the CUDA driver has {count} of them; CUDA_VISIBLE_DEVICES \
         limits which"
    )]
    NoDevice {
        /// The device.
        ordinal: usize,
        /// The number of devices.
        count: usize,
    },
    /// Memory belongs to another device or another context.
    #[error("memory on cuda:{ordinal} is of another CUDA context than the device that copies it")]
    OtherContext {
        /// The number of the memory's device.
        ordinal: usize,
    },
    /// Ranges exceed the memory, or have another length than the host memory.
    #[error(
        "a copy of {host_len} bytes does not fit its ranges in a memory of {byte_len} bytes; this is \
         an error of the caller"
    )]
    OutOfBounds {
        /// The length of the memory on the device.
        byte_len: u64,
        /// The length of the host memory.
        host_len: usize,
    },
    /// The driver allocated nothing.
    #[error("the CUDA driver returned no host memory")]
    NoMemory,
    /// A call of the driver failed.
    #[error("cannot {operation}")]
    Driver {
        /// The operation that failed.
        operation: &'static str,
        /// The error of the driver.
        source: DriverError,
    },
}
