//! The parts of a `torch.save` file: a pickle, and storages by key.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::{CheckpointError, FormatError, Key, Storage};
use indexmap::IndexMap;

use super::file::File;
use super::legacy;
use crate::pickle::Limits;
use crate::torch_tensor::{ByteOrder, StorageRef, byte_order, small_record};
use crate::torch_zip::{ArchiveEntry, ArchiveIndex, Method, ParseStep, Record, Sparse};

/// The maximum size of a pickle in bytes; a tensor takes about 300.
pub(super) const PICKLE_MAX: u64 = 256 << 20;
/// Limits on parsing a pickle.
pub(super) const LIMITS: Limits = Limits::DEFAULT.with_bytes(1 << 30);
/// The maximum ratio of inflated to stored size of a pickle, and the size that is always allowed.
/// PyTorch stores pickles without compression.
const INFLATED_PICKLE_RATIO: u64 = 16;
const INFLATED_PICKLE_MIN: u64 = 4 << 20;
/// The magic bytes of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";
/// The size of the first read at the end of an archive.
pub(super) const TAIL: u64 = 64 << 10;
/// The number of leading bytes that identify the format.
pub const MAGIC_LEN: u64 = 512;

/// The parts of a file, without the bytes of storages.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) pickle: Bytes,
    /// The range of the stored pickle in the file.
    pub(super) pickle_range: Range<u64>,
    pub(super) byte_order: ByteOrder,
    /// Storages by key.
    pub(super) storages: IndexMap<Box<str>, Record>,
    /// All records of an archive by full name; empty for a file of the older form.
    pub(super) records: IndexMap<Box<str>, Record>,
    pub(super) version: Option<Box<str>>,
    /// The number of bytes after the archive.
    pub(super) trailing: u64,
}

impl Contents {
    pub(super) async fn read(storage: &dyn Storage, key: &Key) -> Result<Self, CheckpointError> {
        let mut file = File::open(storage, key).await?;
        let head = file.bring(0..MAGIC_LEN).await?;
        if head.starts_with(ZIP) {
            return read_archive(&mut file).await;
        }
        if legacy::is_magic(head) {
            file.forget();
            return legacy::read(&mut file).await;
        }
        let problem = if is_tar(head) {
            "it is a tar file as PyTorch before 0.4 wrote; load it with an old PyTorch and save it \
             again"
        } else {
            "it begins neither as a zip archive nor as the stream that PyTorch wrote before 1.6"
        };
        Err(file.locate(FormatError::new("torch.save file", problem)).into())
    }

    /// The record of a storage, with the length that the pickle states.
    pub(super) fn storage(&self, storage: &StorageRef) -> Result<Record, FormatError> {
        let StorageRef { key, byte_len: expected, .. } = storage;
        match self.storages.get(key) {
            Some(record) if record.byte_len == *expected => Ok(record.clone()),
            Some(record) => {
                let found = record.byte_len;
                let problem =
                    format!("storage {key:?} has {found} bytes, the pickle says {expected}");
                Err(FormatError::new("torch.save file", problem).at(record.data.start))
            }
            // OLMo-core writes no record for an empty storage.
            None if *expected == 0 => {
                Ok(Record { data: 0..0, byte_len: 0, crc32: None, method: Method::Stored })
            }
            None => {
                let problem = format!("storage {key:?} is missing");
                Err(FormatError::new("torch.save file", problem))
            }
        }
    }
}

/// Checks the pickles and the lengths of storages of a stream from before PyTorch 1.6, whose leading
/// bytes are `head`; files of other kinds pass. A file of fewer bytes than show its kind was cut short.
pub(crate) async fn check_stream(
    storage: &dyn Storage,
    key: &Key,
    head: &[u8],
) -> Result<(), CheckpointError> {
    if legacy::ends_in_magic(head) || ZIP.starts_with(head) {
        let problem = format!("there are only {} bytes", head.len());
        return Err(FormatError::new("torch.save file", problem).into());
    }
    if legacy::is_magic(head) {
        legacy::read(&mut File::open(storage, key).await?).await?;
    }
    Ok(())
}

/// Whether a file with the leading bytes `head` ([`MAGIC_LEN`] of them) may be one of `torch.save`,
/// in any version. Other zip archives look the same.
#[must_use]
pub fn is_torch_save(head: &[u8]) -> bool {
    head.starts_with(ZIP) || legacy::is_magic(head) || is_tar(head)
}

fn is_tar(head: &[u8]) -> bool {
    head.get(257..262) == Some(b"ustar")
}

async fn read_archive(file: &mut File<'_>) -> Result<Contents, CheckpointError> {
    let len = file.byte_len();
    file.bring(len.saturating_sub(TAIL)..len).await?;
    let index = file.parse(len, ArchiveIndex::parse).await?;
    let trailing = file.parse(len, ArchiveIndex::trailing).await?;
    if index.entry("constants.pkl").is_some() {
        let problem = "it is a TorchScript program, no checkpoint; save its state_dict() instead";
        return Err(file.locate(FormatError::new("torch.save file", problem)).into());
    }
    if ["archive_format", "serialized_exported_program.json"]
        .iter()
        .any(|name| index.entry(name).is_some())
    {
        let problem = "it is a program of torch.export, no checkpoint; load it with \
                       torch.export.load() and save its state_dict instead";
        return Err(file.locate(FormatError::new("torch.save file", problem)).into());
    }
    let mut contents = {
        let entry = index.require("data.pkl").map_err(|error| file.locate(error))?;
        let record = file.parse(1 << 20, |blob| entry.locate(blob)).await?;
        let limit = match record.method {
            Method::Stored => PICKLE_MAX,
            Method::Deflated => {
                let kept = record.data.end.saturating_sub(record.data.start);
                let most = kept.saturating_mul(INFLATED_PICKLE_RATIO);
                most.clamp(INFLATED_PICKLE_MIN, PICKLE_MAX)
            }
        };
        let whole = |blob: &Sparse<'_>, entry: &ArchiveEntry, limit: u64| {
            ParseStep::from_halting(small_record(blob, entry, limit))
        };
        let pickle = file.parse(PICKLE_MAX, |blob| whole(blob, entry, limit)).await?;
        let byte_order =
            file.parse(1 << 20, |blob| ParseStep::from_halting(byte_order(blob, &index))).await?;
        let version = match index.entry("version") {
            Some(entry) => Some(file.parse(1 << 20, |blob| whole(blob, entry, 64)).await?),
            None => None,
        };
        Contents {
            pickle: pickle.into(),
            pickle_range: record.data,
            byte_order,
            storages: IndexMap::new(),
            records: IndexMap::new(),
            trailing,
            version: version.map(|text| String::from_utf8_lossy(&text).trim().into()),
        }
    };
    let headers: Vec<_> = index.entries().map(ArchiveEntry::header_range).collect();
    let headers = file.scattered(&headers).await?;
    let storages = format!("{}/data/", index.root());
    for (entry, header) in index.entries().zip(headers) {
        let record = entry.data_range(&header).map_err(|error| file.locate(error))?;
        if let Some(key) = entry.name().strip_prefix(&storages) {
            contents.storages.insert(key.into(), record.clone());
        }
        contents.records.insert(entry.name().into(), record);
    }
    Ok(contents)
}
