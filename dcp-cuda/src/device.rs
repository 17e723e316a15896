//! The interface of a device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::HostMemory;
use dcp_core::device::DeviceError;
use dcp_core::memory::Buffer;

/// A device that copies bytes between its memory and pinned host memory on its own.
///
/// [`PinnedStaging`](crate::PinnedStaging) does the rest: which pinned memory a copy uses, how many
/// copies there are at once, and who waits for them. Copies that were started run concurrently with
/// the caller and end in any order. A copy owns its host memory and shares the memory of the device
/// until it has ended: one that is dropped before must not end later in memory that others use.
///
/// The methods are called concurrently. `start_read` and `start_write` do not wait for the copy.
/// Ranges ascend, share no byte, and are in bounds of the memory.
pub trait Device: fmt::Debug + Send + Sync + 'static {
    /// The memory of a tensor.
    type Memory: fmt::Debug + Send + Sync + 'static;
    /// A copy that was started.
    type Copy: Send + 'static;

    /// The name in errors, such as `cuda:0`.
    fn name(&self) -> &str;

    /// The length of memory in bytes.
    fn byte_len(&self, memory: &Self::Memory) -> u64;

    /// Allocates host memory from and to which the device copies directly.
    ///
    /// # Errors
    ///
    /// When there is not enough memory that can be pinned.
    fn pinned(&self, byte_len: usize) -> Result<HostMemory, DeviceError>;

    /// Starts to copy the bytes of all `ranges`, one after the other, to pinned memory of their
    /// length. The copy begins after all work that was submitted for this memory before.
    ///
    /// # Errors
    ///
    /// When the device refuses the copy.
    fn start_read(
        &self,
        memory: &Arc<Self::Memory>,
        ranges: &[Range<u64>],
        into: Buffer,
    ) -> Result<Self::Copy, DeviceError>;

    /// Starts to copy pinned memory to all `ranges`, one after the other, which have its length. The
    /// copy begins after all work that was submitted for this memory before.
    ///
    /// # Errors
    ///
    /// When the device refuses the copy.
    fn start_write(
        &self,
        memory: &Arc<Self::Memory>,
        ranges: &[Range<u64>],
        from: Bytes,
    ) -> Result<Self::Copy, DeviceError>;

    /// Waits for the end of a copy, and returns the memory that a read has filled.
    ///
    /// # Errors
    ///
    /// When the copy failed.
    fn wait(&self, copy: Self::Copy) -> Result<Option<Buffer>, DeviceError>;
}
