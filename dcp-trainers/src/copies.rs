//! Compares what several ranks have with each other.
//!
//! Two copies with CRC-32s of their own in the archives are equal if those are: nothing is read. Where a storage
//! is larger than its tensor, or has no checksum, the elements are read and compared, a segment at a time. Opening a
//! checkpoint reads at most [`BYTES_MAX`] for that, so that looking at one costs no more than its index;
//! what was not compared then is counted, and a deep check compares it.

use std::sync::Arc;

use dcp_core::{CheckpointError, Region, StorageReader};
use dcp_jobs::read::TensorReader;

use crate::leaves::RankFile;

/// Bytes that are read at most to compare copies while a checkpoint is opened.
pub(crate) const BYTES_MAX: u64 = 64 << 20;
/// Bytes of one read.
const SEGMENT: u64 = 4 << 20;

/// The budget and the results of comparisons.
#[derive(Debug)]
pub(crate) struct Copies {
    pub(crate) bytes_left: u64,
    /// The number of copies that were not compared.
    pub(crate) left_out: u64,
}

impl Copies {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes_left: bytes, left_out: 0 }
    }

    /// Whether two tensors of one dtype and shape have the same elements; true for what was not compared.
    pub(crate) async fn equal(
        &mut self,
        a: (&RankFile, usize),
        b: (&RankFile, usize),
    ) -> Result<bool, CheckpointError> {
        let crc = |(file, entry): (&RankFile, usize)| {
            let (reader, metadata) = (Arc::clone(&file.reader), Arc::clone(&file.metadata));
            async move { reader.chunk_crc32(&metadata, entry, 0).await }
        };
        if let (Some(a), Some(b)) = (crc(a).await?, crc(b).await?) {
            return Ok(a == b);
        }
        let reader = |(file, entry): (&RankFile, usize)| {
            let reader: Arc<dyn StorageReader> = Arc::clone(&file.reader) as _;
            TensorReader::new(reader, Arc::clone(&file.metadata), entry)
        };
        let (a, b) = (reader(a)?, reader(b)?);
        let tensor = a.tensor()?;
        let bytes = tensor.byte_len().unwrap_or(u64::MAX);
        let Some(left) = self.bytes_left.checked_sub(bytes) else {
            self.left_out += 1;
            return Ok(true);
        };
        self.bytes_left = left;
        let whole = Region::full(tensor.shape.clone())?;
        let step = (SEGMENT / (tensor.dtype.size() as u64).max(1)).max(1);
        let mut at = 0;
        while at < whole.volume() {
            let next = at.saturating_add(step).min(whole.volume());
            if a.read_range(&whole, at..next).await? != b.read_range(&whole, at..next).await? {
                return Ok(false);
            }
            at = next;
        }
        Ok(true)
    }
}
