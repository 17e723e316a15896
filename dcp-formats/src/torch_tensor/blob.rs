//! The archive of one tensor.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::FormatError;

use super::layout::{StorageRef, TensorLayout};
use crate::pickle::{Limits, Pickle};
use crate::torch_zip::{
    ArchiveEncoder, ArchiveEntry, ArchiveIndex, Halt, Method, ParseStep, Record, RecordSet, Sparse,
};

/// The maximum size of a tensor's pickle, which has a few hundred bytes.
pub(super) const PICKLE_LEN_MAX: u64 = 1 << 20;
/// The offset of the pickle in PyTorch's archives: after one padded header.
const PICKLE_OFFSET: usize = 64;

/// The byte order of numbers in a storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first; also the default of archives without a byte order (PyTorch up
    /// to 2.0).
    #[default]
    Little,
    /// Most significant byte first.
    Big,
}

/// A tensor in an archive, located without reading its elements.
#[derive(Clone, Debug)]
pub struct TensorBlob {
    layout: TensorLayout,
    byte_order: ByteOrder,
    storage: Record,
}

impl TensorBlob {
    /// Locates the tensor and its elements.
    ///
    /// The last 1 KiB and the first 4 KiB of an archive of PyTorch's are enough.
    ///
    /// # Errors
    ///
    /// When the blob is not an archive of one tensor, or the length of the storage differs from the
    /// tensor's pickle.
    pub fn parse(blob: &Sparse<'_>) -> Result<ParseStep<Self>, FormatError> {
        ParseStep::from_halting(Self::read(blob))
    }

    fn read(blob: &Sparse<'_>) -> Result<Self, Halt> {
        let index = ArchiveIndex::read(blob)?;
        let pickle = small_record(blob, index.require("data.pkl")?, PICKLE_LEN_MAX)?;
        let layout = TensorLayout::from_pickle(&pickle)?;
        let byte_order = byte_order(blob, &index)?;
        let storage = storage_record(blob, &index, &layout)?;
        Ok(Self { byte_order, storage, layout })
    }

    /// Locates the tensor from the first bytes alone. Returns `None` unless the archive of
    /// `byte_len` bytes is laid out exactly as PyTorch 2.1 or later does, with only this tensor.
    ///
    /// The CRC is then unknown, because PyTorch writes it after the data.
    #[must_use]
    pub fn locate_from_head(head: &[u8], byte_len: u64) -> Option<Self> {
        let from_pickle = head.get(PICKLE_OFFSET..)?;
        let pickle_len = Pickle::parse(from_pickle, &Limits::DEFAULT).ok()?.byte_len();
        let pickle = from_pickle.get(..pickle_len)?;
        let layout = TensorLayout::from_pickle(pickle).ok()?;
        if &*layout.storage().key != "0" {
            return None;
        }
        [RecordSet::Torch2_7, RecordSet::Torch2_1].into_iter().find_map(|records| {
            let pickle = Bytes::copy_from_slice(pickle);
            let lens = [layout.storage().byte_len];
            let encoder = ArchiveEncoder::new(records, pickle, &lens).ok()?;
            let agrees = encoder.byte_len() == byte_len && head.starts_with(&encoder.head());
            let slot = encoder.storages().first().copied().filter(|_| agrees)?;
            let storage = Record {
                data: slot.byte_offset..slot.byte_offset.checked_add(slot.byte_len)?,
                byte_len: slot.byte_len,
                crc32: None,
                method: Method::Stored,
            };
            Some(Self { layout: layout.clone(), byte_order: ByteOrder::Little, storage })
        })
    }

    /// The tensor's layout.
    #[must_use]
    pub fn layout(&self) -> &TensorLayout {
        &self.layout
    }

    /// The byte order of the storage.
    #[must_use]
    pub fn byte_order(&self) -> ByteOrder {
        self.byte_order
    }

    /// The record of the storage: its range in the blob, its length and CRC.
    #[must_use]
    pub fn storage(&self) -> &Record {
        &self.storage
    }

    /// The byte range of the elements in the blob, if they are stored row-major, little-endian and
    /// unencoded; any run of them can then be read directly.
    #[must_use]
    pub fn element_range(&self) -> Option<Range<u64>> {
        let swapped = self.byte_order == ByteOrder::Big && self.layout.dtype().scalar_size() > 1;
        if swapped || self.storage.method != Method::Stored {
            return None;
        }
        let range = self.layout.contiguous_range()?;
        let start = self.storage.data.start;
        Some(start.checked_add(range.start)?..start.checked_add(range.end)?)
    }

    /// Decodes the elements to row-major, little-endian form, from the bytes of
    /// [`storage().data`](Self::storage). Checks the CRC.
    ///
    /// `limit` bounds the result in bytes.
    ///
    /// # Errors
    ///
    /// As [`Record::decode`] and [`TensorLayout::gather`].
    pub fn decode(&self, kept: &[u8], limit: u64) -> Result<Vec<u8>, FormatError> {
        let storage = self.storage.decode(kept, self.layout.storage().byte_len)?;
        self.layout.gather(&storage, self.byte_order, limit)
    }
}

/// The content of a record that is read whole.
pub(crate) fn small_record(
    blob: &Sparse<'_>,
    entry: &ArchiveEntry,
    limit: u64,
) -> Result<Vec<u8>, Halt> {
    if entry.byte_len() > limit {
        let problem = format!("{:?} has more than {limit} bytes", entry.name());
        return Err(FormatError::new("torch archive", problem).at(entry.header_offset()).into());
    }
    let record = entry.find(blob)?;
    let kept = blob.need(entry.name(), record.data.clone())?;
    Ok(record.decode(kept, limit)?.into_owned())
}

pub(crate) fn byte_order(blob: &Sparse<'_>, index: &ArchiveIndex) -> Result<ByteOrder, Halt> {
    let Some(entry) = index.entry("byteorder") else { return Ok(ByteOrder::Little) };
    match &*small_record(blob, entry, 16)? {
        b"little" => Ok(ByteOrder::Little),
        b"big" => Ok(ByteOrder::Big),
        _ => Err(FormatError::new("torch archive", "its byte order is neither little nor big")
            .at(entry.header_offset())
            .into()),
    }
}

/// The record of a tensor's storage.
pub(crate) fn storage_record(
    blob: &Sparse<'_>,
    index: &ArchiveIndex,
    layout: &TensorLayout,
) -> Result<Record, Halt> {
    let StorageRef { key, byte_len: expected, .. } = layout.storage();
    let name = format!("data/{key}");
    let entry = match index.entry(&name) {
        // OLMo-core writes no record for an empty storage.
        None if *expected == 0 => {
            return Ok(Record { data: 0..0, byte_len: 0, crc32: None, method: Method::Stored });
        }
        None => index.require(&name)?,
        Some(entry) => entry,
    };
    let found = entry.byte_len();
    if found != *expected {
        let problem =
            format!("storage {key:?} has {found} bytes, the tensor's pickle says {expected}");
        return Err(FormatError::new("torch archive", problem).at(entry.header_offset()).into());
    }
    entry.find(blob)
}
