//! Memory that is not host memory.

use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

use crate::tensors::memory::HostMemory;

/// The error of a device, of whatever type.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// The elements of a shard in memory that the processor does not address: that of a GPU, or of
/// another process.
///
/// A save and a load copy them in pieces through host memory, so a [`Shard`](crate::Shard) on a
/// device costs a bounded number of bytes there. Elements are row-major and little-endian from byte
/// 0 on; an implementation for a tensor within a larger allocation adds the tensor's offset.
///
/// Both methods take several ranges, so that a device starts all copies of a call and waits once.
/// Calls are concurrent, and no two of them that are in progress write the same bytes. What else
/// uses the memory, such as kernels that were launched before, is the implementation's to wait for.
#[async_trait]
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// The name of the device in errors, such as `cuda:0`.
    fn device(&self) -> &str;

    /// The length in bytes.
    fn byte_len(&self) -> u64;

    /// Copies bytes to host memory: those of all `ranges`, one after the other. The ranges ascend,
    /// share no byte, and are in bounds.
    ///
    /// # Errors
    ///
    /// When the copy fails. The save then fails with an error that names tensor and device.
    async fn read(&self, ranges: &[Range<u64>]) -> Result<Bytes, DeviceError>;

    /// Copies `bytes` from host memory to all `ranges`, one after the other, which have as many bytes
    /// together. The ranges ascend, share no byte, and are in bounds.
    ///
    /// When this returns, the bytes are on the device. Dropping the future may leave any of them
    /// there.
    ///
    /// # Errors
    ///
    /// When the copy fails. The load then fails with an error that names tensor and device.
    async fn write(&self, ranges: &[Range<u64>], bytes: Bytes) -> Result<(), DeviceError>;

    /// Host memory of `byte_len` bytes from which [`write`](Self::write) copies directly, such as
    /// pinned memory; its content is unspecified. A load reads a file into it. `None` where there is
    /// none, or none now: the load then allocates. Does not wait, because a load holds several.
    fn staging(&self, byte_len: usize) -> Option<HostMemory>;
}
