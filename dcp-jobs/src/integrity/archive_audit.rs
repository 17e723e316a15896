//! Reads every stored byte and compares it with its checksum and the index.

use dcp_core::storage::StorageExt;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dcp_core::format::{ChunkChecksum, RecordLimits, StoredRecord};
use dcp_core::metadata::{Encoding, Layout};
use dcp_core::{CheckpointError, CheckpointMetadata, Dims, FormatError, Key};
use dcp_formats::torch_tensor::{ByteOrder, TensorBlob};
use dcp_formats::torch_zip::{
    ArchiveIndex, Inflater, Method, ParseStep, PartialBlob, Record, Sparse,
};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::error::JobError;
use crate::integrity::problem::{Problem, judge};
use crate::integrity::record_audit::RecordMap;
use crate::options::JobOptions;
use crate::read::objects::read_objects;
use crate::read::segment_memory::SegmentMemory;
use crate::read::stored_items::Placed;
use crate::read::tensor_read::{TensorReader, read_tensor};
use crate::source::Source;

/// Blobs up to this many bytes are read with one request.
const SMALL: u64 = 256 << 10;
/// The bytes at each end of a larger blob that the first reads fetch.
const ENDS: u64 = 16 << 10;
/// The maximum number of bytes to read at once because an archive's directory says so.
const PARSED_MAX: u64 = 64 << 20;

/// The result of an audit. Ranks send it to each other.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Checked {
    /// Stored bytes of undamaged items.
    pub(crate) bytes: u64,
    pub(crate) problems: Vec<Problem>,
}

/// Checks `items`, whose bytes all exist.
pub(crate) async fn check(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    items: Vec<Placed>,
    options: &JobOptions,
) -> Result<Checked, JobError> {
    let job = Arc::new(Job::new(source, metadata, options));
    let mut results = stream::iter(items)
        .map(|item| {
            let job = Arc::clone(&job);
            // Checksums are CPU-bound; the tasks run in parallel on a runtime with several threads.
            tokio::spawn(async move {
                let result = job.item(&item).await;
                (item, result)
            })
        })
        .buffered(options.parallelism.max(1));
    let mut checked = Checked::default();
    while let Some(done) = results.next().await {
        let (item, result) = done.map_err(|error| JobError::task("compares checksums", &error))?;
        match result {
            Ok(()) => {
                checked.bytes = checked.bytes.saturating_add(item.placement.byte_len);
            }
            Err(error) => checked.problems.push(judge(error, metadata, &item)?),
        }
    }
    Ok(checked)
}

/// Checks one item at a time.
pub(crate) struct Job {
    pub(crate) source: Source,
    pub(crate) metadata: Arc<CheckpointMetadata>,
    /// Bytes of one item in memory at once.
    segment: u64,
    pub(crate) options: JobOptions,
    /// The records of the format, and which of them were compared.
    records: OnceCell<(Vec<StoredRecord>, RecordMap)>,
    begun: Mutex<HashSet<usize>>,
}

impl Job {
    pub(crate) fn new(
        source: &Source,
        metadata: &Arc<CheckpointMetadata>,
        options: &JobOptions,
    ) -> Self {
        Self {
            source: source.clone(),
            metadata: Arc::clone(metadata),
            segment: options.segment_bytes(2 * options.parallelism),
            options: options.clone(),
            records: OnceCell::new(),
            begun: Mutex::default(),
        }
    }

    /// Reads one item, whose bytes all exist, and fails when it is damaged.
    pub(crate) async fn item(&self, item: &Placed) -> Result<(), CheckpointError> {
        let encoding = self.metadata.encoding(&item.placement);
        let file = self.metadata.file(item.placement.file);
        let (Some(encoding), Some(file)) = (encoding, file) else {
            return Err(FormatError::new("index", "it names no known file or encoding").into());
        };
        let checksum = self.checksum(item).await?;
        if let (Some(chunk), ChunkChecksum::Crc32(crc32)) = (item.chunk, checksum) {
            let found = self.decode_chunk(item, chunk).await?;
            if found != crc32 {
                return Err(differs(found, crc32).into());
            }
        } else if checksum == ChunkChecksum::Record {
            self.record_of(item).await?;
        } else if let ChunkChecksum::Encoding | ChunkChecksum::EncodingOf(_) = checksum
            && *encoding == Encoding::new(Layout::TorchArchive)
        {
            let blob = Blob { job: self, file, item, saved: noted(checksum) };
            blob.check().await.map_err(|error| match error {
                CheckpointError::Format(error) => {
                    error.in_file(file.as_str(), item.placement.byte_offset).into()
                }
                other => other,
            })?;
        } else if let Some(chunk) = item.chunk {
            self.decode_chunk(item, chunk).await?;
        } else {
            self.options.advance(item.placement.byte_len);
        }
        if item.chunk.is_none() {
            let mut values =
                read_objects(&self.source, &self.metadata, std::slice::from_ref(&item.entry)).await;
            values.remove(&item.entry).transpose()?;
        }
        Ok(())
    }

    /// Returns the checksum by which the format compares the chunk `item`.
    async fn checksum(&self, item: &Placed) -> Result<ChunkChecksum, CheckpointError> {
        match (self.source.audit(), item.chunk) {
            (Some(audit), Some(chunk)) => {
                audit.checksum(&self.metadata, item.entry, chunk as usize).await
            }
            _ => Ok(ChunkChecksum::Encoding),
        }
    }

    /// Compares the record that holds `item` with its checksum, unless that was done.
    async fn record_of(&self, item: &Placed) -> Result<(), CheckpointError> {
        let audit = self.source.audit().and_then(|audit| audit.records());
        let Some(audit) = audit else { return Ok(()) };
        let known = self.records.get_or_try_init(async || {
            let records = audit.records().await?;
            let map = RecordMap::new(&records);
            Ok::<_, CheckpointError>((records, map))
        });
        let (records, map) = known.await?;
        let Some(at) = map.holder(&self.metadata, item) else {
            let problem = format!("{:?} is in no record", item.fqn);
            return Err(FormatError::new("index", problem).into());
        };
        let is_new = self.begun.lock().unwrap_or_else(PoisonError::into_inner).insert(at);
        let Some(record) = records.get(at).filter(|_| is_new) else { return Ok(()) };
        let progress = |bytes| self.options.advance(bytes);
        audit.check_record(record, RecordLimits::new(self.segment, &progress)).await
    }

    /// The expected checksum of a chunk's elements, from its archive. Checks the rest of the
    /// archive on the way.
    pub(crate) async fn expected(&self, item: &Placed) -> Result<Expected, CheckpointError> {
        let encoding = self.metadata.encoding(&item.placement);
        let file = self.metadata.file(item.placement.file);
        let (Some(encoding), Some(file), Some(chunk)) = (encoding, file, item.chunk) else {
            return Ok(Expected::Elsewhere);
        };
        let checksum = self.checksum(item).await?;
        match checksum {
            ChunkChecksum::Crc32(crc32) => return Ok(Expected::Crc32(crc32)),
            ChunkChecksum::Record => return Ok(Expected::Elsewhere),
            ChunkChecksum::Encoding | ChunkChecksum::EncodingOf(_) => {}
            _ => return Ok(Expected::Nothing),
        }
        match encoding.layout {
            Layout::TorchArchive if encoding.transforms.is_empty() => {
                Blob { job: self, file, item, saved: noted(checksum) }.expected(chunk).await
            }
            Layout::Raw if encoding.transforms.is_empty() => Ok(Expected::Nothing),
            _ => Ok(Expected::Elsewhere),
        }
    }

    /// Reads a chunk through its format, which finds every error that decoding can meet.
    async fn decode_chunk(&self, item: &Placed, chunk: u32) -> Result<u32, CheckpointError> {
        let reader = self.source.decoded_once(1);
        let tensor = TensorReader::new(reader, Arc::clone(&self.metadata), item.entry)?;
        let entry = tensor.tensor()?;
        let Some(chunk) = entry.chunks.get(chunk as usize) else { return Ok(0) };
        let bad =
            |error: dcp_core::region::RegionError| FormatError::new("index", error.to_string());
        let region = chunk.region().map_err(bad)?;
        let element = entry.dtype.size() as u64;
        let total = region.volume().saturating_mul(element);
        let (mut crc, mut at) = (crc32fast::Hasher::new(), 0);
        let segments = SegmentMemory::new(self.segment);
        // Stored bytes are reported; a compressed chunk has fewer than elements.
        let mut unreported = item.placement.byte_len;
        while at < total {
            self.options.check_group()?;
            let end = total.min(at.saturating_add(self.segment));
            let segment = read_tensor(&tensor, &region, element, at..end, &segments).await?;
            segment.pieces().iter().for_each(|piece| crc.update(piece));
            let read = unreported.min(end - at);
            self.options.advance(read);
            unreported -= read;
            at = end;
        }
        self.options.advance(unreported);
        Ok(crc.finalize())
    }
}

/// The expected checksum of a chunk's elements, row-major and as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// A CRC-32.
    Crc32(u32),
    /// The format stores no checksum.
    Nothing,
    /// The checksum covers other bytes too: [`Job::item`] reads them.
    Elsewhere,
}

/// The error for a chunk whose CRC-32 is `found`.
pub(crate) fn differs(found: u32, expected: u32) -> FormatError {
    let problem = format!("its CRC-32 is {found:08x}, not {expected:08x}: the data is damaged");
    FormatError::new("archive record", problem)
}

/// The CRC-32 of the elements that the save noted.
fn noted(checksum: ChunkChecksum) -> Option<u32> {
    match checksum {
        ChunkChecksum::EncodingOf(crc32) => Some(crc32),
        _ => None,
    }
}

/// One `torch.save` archive inside a file.
struct Blob<'a> {
    job: &'a Job,
    file: &'a Key,
    item: &'a Placed,
    /// The CRC-32 of its elements that the save noted.
    saved: Option<u32>,
}

impl Blob<'_> {
    fn byte_len(&self) -> u64 {
        self.item.placement.byte_len
    }

    /// Reads a range that is relative to the start of the archive.
    async fn read(&self, range: Range<u64>) -> Result<Bytes, CheckpointError> {
        self.job.options.check_group()?;
        let start = self.item.placement.byte_offset;
        let range = start.saturating_add(range.start)..start.saturating_add(range.end);
        Ok(self.job.source.storage.read_range(self.file, range).await?)
    }

    /// Reads both ends of the archive, or all of a small one.
    async fn ends(&self) -> Result<PartialBlob, CheckpointError> {
        let len = self.byte_len();
        let mut archive = PartialBlob::new("torch archive", len, PARSED_MAX);
        let (head, tail) =
            if len <= SMALL { (0..len, len..len) } else { (0..ENDS, len - ENDS..len) };
        for range in [head, tail] {
            if !range.is_empty() {
                let start = range.start;
                archive.add(start, self.read(range).await?);
            }
        }
        Ok(archive)
    }

    async fn expected(&self, chunk: u32) -> Result<Expected, CheckpointError> {
        let mut archive = self.ends().await?;
        let index = self.parse(&mut archive, ArchiveIndex::parse).await?;
        let tensor = self.parse(&mut archive, TensorBlob::parse).await?;
        self.compare(chunk, &tensor)?;
        let storage = tensor.storage();
        let whole = tensor.layout().contiguous_range() == Some(0..storage.byte_len);
        let as_it_is = tensor.byte_order() == ByteOrder::Little;
        if !whole || !as_it_is || storage.method != Method::Stored {
            return Ok(Expected::Elsewhere);
        }
        for entry in index.entries() {
            let record = self.parse(&mut archive, |blob| entry.locate(blob)).await?;
            if record != *storage {
                self.check_record(&archive, &record).await?;
            }
        }
        Ok(storage.crc32.or(self.saved).map_or(Expected::Nothing, Expected::Crc32))
    }

    async fn check(&self) -> Result<(), CheckpointError> {
        let len = self.byte_len();
        let mut archive = self.ends().await?;
        let index = self.parse(&mut archive, ArchiveIndex::parse).await?;
        if let Some(chunk) = self.item.chunk {
            let tensor = self.parse(&mut archive, TensorBlob::parse).await?;
            self.compare(chunk, &tensor)?;
        }
        self.parse(&mut archive, |blob| index.check_ends(blob)).await?;
        let trailing = self.parse(&mut archive, ArchiveIndex::trailing).await?;
        if trailing > 0 {
            let problem = format!("{trailing} bytes follow its end");
            return Err(FormatError::new("torch archive", problem).at(len - trailing).into());
        }
        let mut counted = 0;
        for entry in index.entries() {
            let record = self.parse(&mut archive, |blob| entry.locate(blob)).await?;
            self.parse(&mut archive, |blob| entry.check_around(&record, blob)).await?;
            counted += record.data.end - record.data.start;
            self.check_record(&archive, &record).await.map_err(|error| match error {
                CheckpointError::Format(format) => {
                    let problem = format!("{}: {}", entry.name(), format.problem());
                    FormatError::new("torch archive", problem).at(record.data.start).into()
                }
                other => other,
            })?;
        }
        self.job.options.advance(len.saturating_sub(counted));
        Ok(())
    }

    /// Compares the blob's own dtype and shape with the index (trap F15), and its checksum with the
    /// one that the save noted.
    fn compare(&self, chunk: u32, blob: &TensorBlob) -> Result<(), FormatError> {
        if let (Some(saved), Some(stored)) = (self.saved, blob.storage().crc32)
            && saved != stored
        {
            let problem = format!(
                "its CRC-32 is {stored:08x}, the save noted {saved:08x}: these are not the bytes of \
                 this save"
            );
            return Err(FormatError::new("torch archive", problem));
        }
        let entry = self.job.metadata.at(self.item.entry);
        let tensor = entry.and_then(|(_, entry)| entry.as_tensor());
        let Some((tensor, chunk)) =
            tensor.and_then(|tensor| Some((tensor, tensor.chunks.get(chunk as usize)?)))
        else {
            return Ok(());
        };
        let (dtype, sizes) = (blob.layout().dtype(), blob.layout().sizes());
        if (dtype, &**sizes) == (tensor.dtype, chunk.sizes) {
            return Ok(());
        }
        let problem = format!(
            "the index says {} of shape {}, the blob says {dtype} of shape {sizes}",
            tensor.dtype,
            Dims::from(chunk.sizes)
        );
        Err(FormatError::new("tensor blob", problem).at(0))
    }

    async fn parse<T>(
        &self,
        archive: &mut PartialBlob,
        parse: impl Fn(&Sparse<'_>) -> Result<ParseStep<T>, FormatError>,
    ) -> Result<T, CheckpointError> {
        archive.parse(parse, |range| self.read(range), CheckpointError::from).await
    }

    async fn check_record(
        &self,
        archive: &PartialBlob,
        record: &Record,
    ) -> Result<(), CheckpointError> {
        let Range { start, end } = record.data;
        if record.method != Method::Stored {
            let mut inflater = Inflater::new(record)?;
            let mut at = start;
            while at < end {
                let next = end.min(at.saturating_add(self.job.segment));
                inflater.push(&self.read(at..next).await?, |_| ())?;
                self.job.options.advance(next - at);
                at = next;
            }
            return Ok(inflater.finish()?);
        }
        let mut crc = crc32fast::Hasher::new();
        let mut at = start;
        while at < end {
            let next = end.min(at.saturating_add(self.job.segment));
            match archive.sparse().get(at..next) {
                Some(bytes) => crc.update(bytes),
                None => crc.update(&self.read(at..next).await?),
            }
            self.job.options.advance(next - at);
            at = next;
        }
        Ok(record.check_crc32(crc.finalize())?)
    }
}
