//! Stored data as a [`DataSource`]. Data is read from the source checkpoint when it is written, so
//! a checkpoint of any size needs little memory.

use dcp_core::storage::StorageExt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use crc32fast::Hasher;
use dcp_core::checkpoint::DataSource;
use dcp_core::metadata::TensorEntry;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, Payload, PlanError, Region};
use dcp_formats::torch_object::encode_object;

use crate::error::ConvertError;
use crate::integrity::checked_source::CheckedSource;
use crate::job::JobOptions;
use crate::read::objects::{read_objects, unread};
use crate::read::tensor_read::{TensorReader, read_tensor};
use crate::source::Source;

/// The origin of one plan item's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// A box of a stored tensor.
    Tensor { reader: Arc<TensorReader>, region: Region, element_bytes: u64 },
    /// Bytes of a file, unchanged, and their checksum at first reading unless the writer compares
    /// them.
    Stored { key: Key, byte_offset: u64, first: Option<Arc<FirstRead>> },
    /// Bytes in memory.
    Encoded(Bytes),
    /// The `torch.save` archive of the object at this position.
    Object { metadata: Arc<CheckpointMetadata>, entry: usize, first: Arc<FirstRead> },
}

/// The length and checksum of an object at first reading, to detect changes at the second.
#[derive(Debug)]
pub(crate) struct FirstRead {
    fqn: Arc<str>,
    byte_len: u64,
    crc32: u32,
    /// The CRC-32 of the second reading so far; ranges ascend without gaps.
    again: Mutex<Hasher>,
}

impl FirstRead {
    pub(crate) fn new(fqn: &str, bytes: &[u8]) -> Arc<Self> {
        let (byte_len, crc32) = (bytes.len() as u64, crc32fast::hash(bytes));
        Arc::new(Self { fqn: fqn.into(), byte_len, crc32, again: Mutex::default() })
    }

    /// Adds the next bytes. After the last ones, fails if they differ from the first reading.
    fn compare(&self, bytes: &[u8], byte_range: &Range<u64>) -> Result<(), FormatError> {
        let mut again = self.again.lock().unwrap_or_else(PoisonError::into_inner);
        if byte_range.start == 0 {
            again.reset();
        }
        again.update(bytes);
        let found = again.clone().finalize();
        if byte_range.end < self.byte_len || found == self.crc32 {
            return Ok(());
        }
        let problem = format!(
            "{:?} has the CRC-32 {found:08x}, and had {:08x} when it was checked: the file has \
             changed meanwhile or is damaged",
            self.fqn, self.crc32
        );
        Err(FormatError::new("object", problem))
    }
}

impl Part {
    /// The whole tensor at position `entry` of `source`.
    pub(crate) fn whole_tensor(
        source: &CheckedSource,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
        tensor: &TensorEntry,
    ) -> Result<Self, ConvertError> {
        let reader = Arc::clone(&source.reader);
        let reader = TensorReader::new(reader, Arc::clone(metadata), entry)?;
        let region = Region::full(tensor.shape.clone()).map_err(PlanError::from)?;
        let element_bytes = tensor.dtype.size() as u64;
        Ok(Self::Tensor { reader: Arc::new(reader), region, element_bytes })
    }
}

/// The items of one rank's plan, or of a file, by position.
#[derive(Debug)]
pub(crate) struct CheckpointData {
    /// The source of a [`CheckedSource`].
    source: Source,
    parts: Vec<Part>,
    segment_bytes: u64,
    options: JobOptions,
}

impl CheckpointData {
    /// Data of `parts`.
    pub(crate) fn new(source: &CheckedSource, parts: Vec<Part>, options: &JobOptions) -> Self {
        let segment_bytes = options.write_segment_bytes();
        let (source, options) = (Source::clone(source), options.clone());
        Self { source, parts, segment_bytes, options }
    }
}

impl CheckpointData {
    /// The number of segments in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.options.parallelism.max(1)
    }

    /// Bytes on their way to the storage.
    pub(crate) fn upload_bytes(&self) -> u64 {
        self.options.upload_bytes()
    }
}

#[async_trait]
impl DataSource for CheckpointData {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        self.options.check_group()?;
        let len = byte_range.end.saturating_sub(byte_range.start);
        let payload = match self.parts.get(item) {
            Some(Part::Tensor { reader, region, element_bytes }) => {
                read_tensor(reader, region, *element_bytes, byte_range).await?
            }
            Some(Part::Stored { key, byte_offset, first }) => {
                let start = byte_offset.saturating_add(byte_range.start);
                let end = byte_offset.saturating_add(byte_range.end);
                let bytes = self.source.storage.read_range(key, start..end).await?;
                if let Some(first) = first {
                    first
                        .compare(&bytes, &byte_range)
                        .map_err(|error| error.in_file(key.as_str(), *byte_offset))?;
                }
                Payload::from(bytes)
            }
            Some(Part::Object { metadata, entry, first }) => {
                let bytes = self.object(metadata, *entry).await?.slice(byte_range.clone());
                for piece in bytes.pieces() {
                    first.compare(piece, &byte_range)?;
                }
                bytes
            }
            Some(Part::Encoded(bytes)) => Payload::from(bytes.clone()).slice(byte_range),
            None => {
                let items = self.parts.len() as u64;
                return Err(PlanError::NoItem { item: item as u64, items }.into());
            }
        };
        self.options.advance(len);
        Ok(payload)
    }

    fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }
}

impl CheckpointData {
    /// Encodes an object that was encodable when the plan was made.
    async fn object(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
    ) -> Result<Payload, CheckpointError> {
        let mut values = read_objects(&self.source, metadata, &[entry]).await;
        let value = values.remove(&entry).ok_or_else(|| unread(metadata, entry))??;
        Ok(Payload::from(encode_object(&value)?))
    }
}

#[cfg(test)]
mod tests {
    use dcp_conformance::MemoryStorage;
    use dcp_core::Storage;
    use dcp_core::storage::PutMode;
    use dcp_testing::block_on;

    use super::*;

    #[test]
    fn an_object_that_changes_after_it_was_checked_is_refused() {
        let storage = Arc::new(MemoryStorage::new());
        let key = Key::new("__0_0.distcp").unwrap();
        let resolve = |bytes: &[u8]| {
            let put = storage.put(&key, bytes.to_vec().into(), PutMode::Overwrite);
            block_on(put).unwrap();
            let first = Some(FirstRead::new("extra.big", b"as it was"));
            let part = Part::Stored { key: key.clone(), byte_offset: 2, first };
            let (source, options) =
                (Source::dcp(Arc::clone(&storage) as _, false), JobOptions::default());
            let source = CheckedSource::new(&source, &options);
            let data = CheckpointData::new(&source, vec![part], &options);
            block_on(data.resolve(0, 0..4)).unwrap();
            block_on(data.resolve(0, 4..9)).map(|_| ())
        };
        resolve(b"..as it was").unwrap();
        let error = resolve(b"..As it was").unwrap_err();
        assert!(matches!(error, CheckpointError::Format(_)), "{error:?}");
        let error = dcp_core::error::error_chain(&error);
        assert!(error.contains("extra.big") && error.contains("__0_0.distcp"), "{error}");
    }
}
