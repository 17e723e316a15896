//! Elements in the memory of a device, copied in bounded pieces.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::device::{DeviceError, DeviceMemory};
use dcp_core::region::Runs;
use dcp_core::{CheckpointError, DType, HostMemory, Region, Shard};
use futures_util::future::join;

/// The host memory through which a save or a load copies shards on devices, by default.
pub(crate) const STAGING_BYTES: u64 = 64 << 20;
/// The most bytes of one copy.
pub(crate) const PIECE_BYTES: u64 = 16 << 20;
/// The most ranges of one copy.
const RANGES_MAX: usize = 4096;

/// The most bytes of one copy, where `staging` bytes are there for all: those that are copied, those
/// that wait, and those that are read or written meanwhile.
pub(crate) fn piece_bytes(staging: u64) -> u64 {
    (staging / 4).clamp(1, PIECE_BYTES)
}

/// The elements of a box in the memory of a device, row-major, which are copied in pieces.
#[derive(Clone)]
pub struct DeviceElements {
    memory: Arc<dyn DeviceMemory>,
    /// The runs of the box in the memory, in elements.
    runs: Runs,
    element: u64,
    byte_len: u64,
    /// The most bytes of one copy.
    piece_bytes: u64,
}

impl DeviceElements {
    /// The elements of `region`, in the coordinates of a shard of `sizes` that is all of `memory`.
    /// One copy has at most `piece_bytes`.
    #[must_use]
    pub fn new(
        memory: Arc<dyn DeviceMemory>,
        dtype: DType,
        region: &Region,
        sizes: &[u64],
        piece_bytes: u64,
    ) -> Self {
        let element = dtype.size() as u64;
        let byte_len = region.volume().saturating_mul(element);
        Self { memory, runs: region.runs_in(sizes), element, byte_len, piece_bytes }
    }

    /// All elements of a shard, which is all of `memory`.
    pub(crate) fn of_shard(shard: &Shard, memory: &Arc<dyn DeviceMemory>) -> Self {
        let region = shard.region();
        let inner = region.relative_to(region.offsets()).unwrap_or_else(|| region.clone());
        Self::new(Arc::clone(memory), shard.dtype(), &inner, region.sizes(), PIECE_BYTES)
    }

    /// The length of all elements in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// Host memory from which [`write`](Self::write) copies directly, where the device has some.
    pub(crate) fn staging(&self, byte_len: usize) -> Option<HostMemory> {
        self.memory.staging(byte_len)
    }

    /// The ranges of the memory that have the bytes `range` of the elements.
    fn ranges(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let (mut at, end) = (range.start, range.end.min(self.byte_len));
        let run_bytes = (self.runs.run_len() * self.element).max(1);
        let element = self.element;
        let mut runs = self.runs.clone();
        let mut skipped = usize::try_from(at / run_bytes).unwrap_or(usize::MAX);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (first, _) = runs.nth(std::mem::take(&mut skipped))?;
            let inside = at % run_bytes;
            let len = (run_bytes - inside).min(end - at);
            let start = first * element + inside;
            at += len;
            Some(start..start + len)
        })
    }

    /// Groups of ranges, each of which is one copy.
    fn copies(&self, range: Range<u64>) -> impl Iterator<Item = Vec<Range<u64>>> + use<> {
        let mut ranges = self.ranges(range);
        let piece_bytes = self.piece_bytes;
        let mut rest: Option<Range<u64>> = None;
        std::iter::from_fn(move || {
            let (mut copy, mut bytes) = (Vec::new(), 0);
            while bytes < piece_bytes && copy.len() < RANGES_MAX {
                let Some(mut next) = rest.take().or_else(|| ranges.next()) else { break };
                let fits = next.end.min(next.start + (piece_bytes - bytes));
                if fits < next.end {
                    rest = Some(fits..next.end);
                    next.end = fits;
                }
                bytes += next.end - next.start;
                copy.push(next);
            }
            (!copy.is_empty()).then_some(copy)
        })
    }

    /// The bytes `range` of the elements, in host memory, copy by copy.
    pub(crate) async fn read(
        &self,
        fqn: &str,
        range: Range<u64>,
    ) -> Result<Vec<Bytes>, CheckpointError> {
        let mut pieces = Vec::new();
        for copy in self.copies(range) {
            pieces.push(self.copy(fqn, &copy).await?);
        }
        Ok(pieces)
    }

    async fn copy(&self, fqn: &str, ranges: &[Range<u64>]) -> Result<Bytes, CheckpointError> {
        let read = self.memory.read(ranges).await;
        let bytes = read.map_err(|source| self.failed(fqn, true, source))?;
        let expected: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if bytes.len() as u64 != expected {
            let problem = format!("{} bytes instead of {expected} were copied", bytes.len());
            return Err(self.failed(fqn, true, problem.into()));
        }
        Ok(bytes)
    }

    /// Copies all elements of tensor `fqn` to host memory of their length. Two copies are in host
    /// memory at once: one that the device makes, and the one before, which is stored meanwhile.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Device`] when the device fails.
    pub async fn read_into(&self, fqn: &str, mut target: &mut [u8]) -> Result<(), CheckpointError> {
        let mut copies = self.copies(0..self.byte_len);
        let Some(first) = copies.next() else { return Ok(()) };
        let mut bytes = self.copy(fqn, &first).await?;
        loop {
            let (now, later) = target.split_at_mut(bytes.len().min(target.len()));
            let store = async { now.copy_from_slice(bytes.get(..now.len()).unwrap_or_default()) };
            let Some(copy) = copies.next() else {
                store.await;
                return Ok(());
            };
            // The first of both starts first: the device copies while the processor does.
            let (next, ()) = join(self.copy(fqn, &copy), store).await;
            (bytes, target) = (next?, later);
        }
    }

    /// Copies all elements of tensor `fqn` to the device.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Device`] when the device fails.
    pub async fn write(&self, fqn: &str, mut bytes: Bytes) -> Result<(), CheckpointError> {
        for copy in self.copies(0..self.byte_len) {
            let len = copy.iter().map(|range| (range.end - range.start) as usize).sum::<usize>();
            let piece = bytes.split_to(len.min(bytes.len()));
            let written = self.memory.write(&copy, piece).await;
            written.map_err(|source| self.failed(fqn, false, source))?;
        }
        Ok(())
    }

    fn failed(&self, fqn: &str, saving: bool, source: DeviceError) -> CheckpointError {
        let device = self.memory.device().to_owned();
        CheckpointError::Device { fqn: fqn.to_owned(), device, saving, source }
    }
}

impl fmt::Debug for DeviceElements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceElements")
            .field("memory", &self.memory)
            .field("byte_len", &self.byte_len)
            .finish_non_exhaustive()
    }
}

/// Runs copies to their end, on a thread of their own: the caller may or may not have a runtime.
pub(crate) fn wait_for<T: Send>(
    copies: impl Future<Output = Result<T, CheckpointError>> + Send,
) -> Result<T, CheckpointError> {
    let failed = |problem: String| CheckpointError::Background { problem, source: None };
    std::thread::scope(|scope| {
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| {
                failed(format!("there is no runtime for the copies from a device: {error}"))
            })?;
            runtime.block_on(copies)
        };
        let thread = std::thread::Builder::new().name("dcp-device".into()).spawn_scoped(scope, run);
        let thread = thread.map_err(|error| {
            failed(format!("there is no thread for the copies from a device: {error}"))
        })?;
        let panicked = |_| Err(failed("the copies from a device panicked".into()));
        thread.join().unwrap_or_else(panicked)
    })
}
