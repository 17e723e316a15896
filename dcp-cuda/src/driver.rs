//! NVIDIA's driver, through cudarc: the only module of this crate with `unsafe`.
//!
//! # Safety
//!
//! What the `unsafe` blocks rely on:
//!
//! 1. [`library::check`] has found the driver and every function that is called here, before the
//!    first call: a [`CudaDevice`] exists only after that.
//! 2. A [`CudaCopy`] owns the host memory of a copy and shares the memory of the device. Both are
//!    dropped only after the driver has reported that the copy, and all before it in its stream, have
//!    ended. Where the driver cannot report that, they are never dropped.
//! 3. Copies of one call are within the memory of the device, because their ranges are compared with
//!    its length, and within the host memory, because slices of it are taken.
//! 4. Device memory holds [`NumericElement`]s, of which every pattern of bits is one.
//! 5. Pinned memory is freed by its one owner, which `HostMemory` drops after its last loan.

#![allow(unsafe_code, reason = "the leaf module that proves its calls of C sound, see above")]

mod copy;
mod error;
mod library;

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, result,
};
use dcp_core::HostMemory;
use dcp_core::device::DeviceError;
use dcp_core::memory::{Buffer, NumericElement};

pub use self::copy::CudaCopy;
use self::copy::Held;
pub use self::error::CudaError;
use crate::device::Device;

/// A CUDA device, with a stream for copies from it and one for copies to it.
#[derive(Debug)]
pub struct CudaDevice {
    name: String,
    context: Arc<CudaContext>,
    reads: Arc<CudaStream>,
    writes: Arc<CudaStream>,
}

impl CudaDevice {
    /// Loads the driver and opens the device with this number.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoLibrary`] and [`CudaError::NoFunction`] without a driver that has what is
    /// needed, [`CudaError::NoDevice`] without the device, and [`CudaError::Driver`] when the driver
    /// refuses.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal)
            .map_err(|source| CudaError::Driver { operation: "open the device", source })?;
        Self::of_context(context)
    }

    /// The device of a context that a trainer has opened.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn of_context(context: Arc<CudaContext>) -> Result<Self, CudaError> {
        library::check()?;
        let failed = |source| CudaError::Driver { operation: "make a stream for copies", source };
        let reads = context.new_stream().map_err(failed)?;
        let writes = context.new_stream().map_err(failed)?;
        let name = format!("cuda:{}", context.ordinal());
        Ok(Self { name, context, reads, writes })
    }

    /// The number of devices.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn count() -> Result<usize, CudaError> {
        library::check()?;
        match CudaContext::device_count() {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(error) if error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            Err(source) => Err(CudaError::Driver { operation: "initialize CUDA", source }),
        }
    }

    /// The context, whose streams run kernels and allocate memory.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
}

/// Elements on a CUDA device, which a trainer shares: it locks them while it launches kernels.
///
/// A copy begins after what was launched before on the stream that allocated the elements and, unless
/// the context does not track events, after what used them on any other. A save locks the elements for
/// reading and a load for writing, both only while copies are started.
#[derive(Clone, Debug)]
pub struct CudaMemory(Arc<dyn Elements>);

impl CudaMemory {
    /// The elements of `slice`.
    #[must_use]
    pub fn new<T>(slice: Arc<RwLock<CudaSlice<T>>>) -> Self
    where
        T: NumericElement + DeviceRepr + fmt::Debug,
    {
        Self(Arc::new(Shared(slice)))
    }
}

/// Elements of any type.
trait Elements: fmt::Debug + Send + Sync {
    fn byte_len(&self) -> u64;

    /// Starts to copy `ranges` to `into`, which has their length.
    fn start_read(
        &self,
        stream: &CudaStream,
        ranges: &[Range<u64>],
        into: &mut [u8],
    ) -> Result<(), CudaError>;

    /// Starts to copy `from` to `ranges`, which have its length.
    fn start_write(
        &self,
        stream: &CudaStream,
        ranges: &[Range<u64>],
        from: &[u8],
    ) -> Result<(), CudaError>;
}

#[derive(Debug)]
struct Shared<T>(Arc<RwLock<CudaSlice<T>>>);

/// Compares ranges with the memory of a device and with that of the host, and their contexts.
fn check<T>(
    slice: &CudaSlice<T>,
    stream: &CudaStream,
    ranges: &[Range<u64>],
    host_len: usize,
) -> Result<(), CudaError> {
    if slice.context() != stream.context() {
        return Err(CudaError::OtherContext { ordinal: slice.ordinal() });
    }
    let byte_len = slice.num_bytes() as u64;
    let mut total = Some(0_u64);
    for range in ranges {
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= byte_len);
        total = total.zip(len).and_then(|(total, len)| total.checked_add(len));
    }
    if total == Some(host_len as u64) {
        return Ok(());
    }
    Err(CudaError::OutOfBounds { byte_len, host_len })
}

impl<T: NumericElement + DeviceRepr + fmt::Debug> Elements for Shared<T> {
    fn byte_len(&self) -> u64 {
        self.0.read().unwrap_or_else(PoisonError::into_inner).num_bytes() as u64
    }

    fn start_read(
        &self,
        stream: &CudaStream,
        ranges: &[Range<u64>],
        mut into: &mut [u8],
    ) -> Result<(), CudaError> {
        let failed = |source| CudaError::Driver { operation: "copy from the device", source };
        let slice = self.0.read().unwrap_or_else(PoisonError::into_inner);
        check(&slice, stream, ranges, into.len())?;
        stream.join(slice.stream()).map_err(failed)?;
        let (address, _recorded) = slice.device_ptr(stream);
        for range in ranges {
            // In bounds of `usize`, as the length of the host memory is.
            let (now, later) = into.split_at_mut((range.end - range.start) as usize);
            // SAFETY: the range is within the memory and `now` within the host memory (3), which both
            // stay until the copy has ended (2); the functions are there (1).
            unsafe { result::memcpy_dtoh_async(now, address + range.start, stream.cu_stream()) }
                .map_err(failed)?;
            into = later;
        }
        Ok(())
    }

    fn start_write(
        &self,
        stream: &CudaStream,
        ranges: &[Range<u64>],
        mut from: &[u8],
    ) -> Result<(), CudaError> {
        let failed = |source| CudaError::Driver { operation: "copy to the device", source };
        let mut slice = self.0.write().unwrap_or_else(PoisonError::into_inner);
        check(&slice, stream, ranges, from.len())?;
        stream.join(slice.stream()).map_err(failed)?;
        let (address, _recorded) = slice.device_ptr_mut(stream);
        for range in ranges {
            let (now, later) = from.split_at((range.end - range.start) as usize);
            // SAFETY: as in `start_read`, and any bytes are elements (4).
            unsafe { result::memcpy_htod_async(address + range.start, now, stream.cu_stream()) }
                .map_err(failed)?;
            from = later;
        }
        Ok(())
    }
}

/// Host memory that the driver has pinned.
struct Pinned {
    context: Arc<CudaContext>,
    pointer: NonNull<c_void>,
}

// SAFETY: the pointer is followed by `HostMemory` alone, which is itself `Send` and `Sync`, and freed
// by `drop`; the driver allows both on any thread.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: `malloc_host` returned the pointer, and nothing uses the memory any more (5).
        self.context.record_err(unsafe { result::free_host(self.pointer.as_ptr()) });
    }
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Copy = CudaCopy;

    fn name(&self) -> &str {
        &self.name
    }

    fn byte_len(&self, memory: &CudaMemory) -> u64 {
        memory.0.byte_len()
    }

    fn pinned(&self, byte_len: usize) -> Result<HostMemory, DeviceError> {
        let failed = |source| CudaError::Driver { operation: "pin host memory", source };
        self.context.bind_to_thread().map_err(failed)?;
        // Not write-combined, as cudarc's own pinned memory is: the processor reads it.
        // SAFETY: a call of a function that is there (1); the memory is set before it is read.
        let pointer = unsafe { result::malloc_host(byte_len, CU_MEMHOSTALLOC_PORTABLE) };
        let pointer = NonNull::new(pointer.map_err(failed)?).ok_or(CudaError::NoMemory)?;
        let pinned = Pinned { context: Arc::clone(&self.context), pointer };
        let bytes = pointer.cast::<u8>();
        // SAFETY: the driver has just allocated this memory of `byte_len` bytes.
        unsafe { bytes.write_bytes(0, byte_len) };
        // SAFETY: valid and initialized until `pinned` is dropped; only copies that hold a loan use it
        // besides (2).
        Ok(unsafe { HostMemory::from_raw_parts(bytes, byte_len, pinned) })
    }

    fn start_read(
        &self,
        memory: &Arc<CudaMemory>,
        ranges: &[Range<u64>],
        into: Buffer,
    ) -> Result<CudaCopy, DeviceError> {
        let mut copy = CudaCopy::new(&self.reads, memory, Held::Read(into));
        if let Some(Held::Read(into)) = copy.held_mut() {
            memory.0.start_read(&self.reads, ranges, into)?;
        }
        copy.started()?;
        Ok(copy)
    }

    fn start_write(
        &self,
        memory: &Arc<CudaMemory>,
        ranges: &[Range<u64>],
        from: Bytes,
    ) -> Result<CudaCopy, DeviceError> {
        let mut copy = CudaCopy::new(&self.writes, memory, Held::Written(from));
        if let Some(Held::Written(from)) = copy.held_mut() {
            memory.0.start_write(&self.writes, ranges, from)?;
        }
        copy.started()?;
        Ok(copy)
    }

    fn wait(&self, copy: CudaCopy) -> Result<Option<Buffer>, DeviceError> {
        Ok(copy.wait()?)
    }
}
