//! Clauses of [`CheckpointAudit`](dcp_core::format::CheckpointAudit), for formats that have one.

use std::ops::Range;
use std::sync::Arc;

use dcp_core::format::{CheckpointAudit, ChunkChecksum, RecordLimits, StoredRecord};
use dcp_core::metadata::Placement;
use dcp_core::{CheckpointMetadata, Key, Region, Storage, StorageReader};

use super::load::Load;
use super::read::flipped;
use super::sample::{Sample, SampleTensor};
use super::subject::{Subject, files, storage_of};
use crate::case::{Failure, Outcome, ensure};
use crate::numbers::Numbers;

super::clauses! {
    an_audit_of_a_whole_checkpoint_finds_nothing,
    a_checksum_is_that_of_the_elements,
    every_read_compares_where_the_audit_says_so,
    flipped_bits_of_records_are_found,
}

/// Bits that are flipped in each chunk and record.
const FLIPS: usize = 32;

/// A checkpoint that is open, with its audit.
struct Audited {
    audit: Arc<dyn CheckpointAudit>,
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
}

impl Audited {
    /// Opens the checkpoint; `None` where its format has no audit.
    async fn open(subject: &Subject, storage: &Arc<dyn Storage>) -> Result<Option<Self>, Failure> {
        let opened = subject.open(storage).await?;
        let Some(audit) = opened.audit else { return Ok(None) };
        let metadata = opened.reader.metadata().await?;
        Ok(Some(Self { audit, reader: opened.reader, metadata }))
    }

    async fn check(&self, record: &StoredRecord) -> Outcome {
        let read = std::sync::atomic::AtomicU64::new(0);
        let progress = |bytes| {
            read.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        };
        let Some(audit) = self.audit.records() else { return Ok(()) };
        audit.check_record(record, RecordLimits::new(16, &progress)).await?;
        Ok(())
    }

    /// The records of the checkpoint; none of a format without records.
    async fn records(&self) -> Result<Vec<StoredRecord>, Failure> {
        match self.audit.records() {
            Some(audit) => Ok(audit.records().await?),
            None => Ok(Vec::new()),
        }
    }

    /// The chunks of a tensor of the sample: position, place, box and checksum.
    async fn chunks(&self, tensor: &SampleTensor) -> Result<Vec<Chunk>, Failure> {
        let at = self.metadata.index_of(&tensor.fqn);
        let entry = at.and_then(|at| self.metadata.at(at)).and_then(|(_, entry)| entry.as_tensor());
        let (Some(at), Some(entry)) = (at, entry) else {
            return Err(Failure::new(format!("the index has no tensor {:?}", tensor.fqn)));
        };
        let mut chunks = Vec::new();
        for (n, chunk) in entry.chunks.iter().enumerate() {
            let checksum = self.audit.checksum(&self.metadata, at, n).await?;
            chunks.push(Chunk { placement: chunk.placement, region: chunk.region()?, checksum });
        }
        Ok(chunks)
    }

    fn file(&self, placement: &Placement) -> Option<Key> {
        self.metadata.file(placement.file).cloned()
    }
}

struct Chunk {
    placement: Option<Placement>,
    region: Region,
    checksum: ChunkChecksum,
}

fn bytes(placement: &Placement) -> Range<u64> {
    placement.byte_offset..placement.byte_offset.saturating_add(placement.byte_len)
}

async fn an_audit_of_a_whole_checkpoint_finds_nothing(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let storage: Arc<dyn Storage> = storage;
    let Some(open) = Audited::open(&subject, &storage).await? else { return Ok(()) };
    let found = open.audit.findings().await?;
    ensure!(found.problems.is_empty(), "a whole checkpoint has problems: {:?}", found.problems);
    let facts = open.audit.index_facts().await?;
    ensure!(
        facts.unread_files.is_empty() && facts.unfinished.is_empty(),
        "a whole checkpoint has {facts:?}"
    );
    let lens = files(&*storage).await?;
    for record in open.records().await? {
        let len = lens.get(&record.file).map(|bytes| bytes.len() as u64);
        ensure!(
            len.is_some_and(|len| record.bytes.start <= record.bytes.end && record.bytes.end <= len),
            "the record {record:?} is not in its file, which has {len:?} bytes"
        );
        open.check(&record).await?;
    }
    let around = match open.audit.records() {
        Some(audit) => audit.check_structure().await?,
        None => Vec::new(),
    };
    ensure!(around.is_empty(), "between the records of a whole checkpoint is {around:?}");
    subject.holds(&storage, &sample).await
}

async fn a_checksum_is_that_of_the_elements(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let Some(open) = Audited::open(&subject, &(storage as _)).await? else { return Ok(()) };
    let records = open.records().await?;
    for tensor in &sample.tensors {
        for chunk in open.chunks(tensor).await? {
            match (chunk.checksum, chunk.placement) {
                (ChunkChecksum::Crc32(crc32), _) => {
                    let found = crc32fast::hash(&tensor.elements(&chunk.region)?);
                    ensure!(
                        crc32 == found,
                        "the CRC-32 of {} of {:?} is {found:08x}, not {crc32:08x}",
                        chunk.region,
                        tensor.fqn
                    );
                }
                (ChunkChecksum::Record, Some(placement)) => {
                    let (file, place) = (open.file(&placement), bytes(&placement));
                    let holds = |record: &StoredRecord| {
                        Some(&record.file) == file.as_ref()
                            && record.bytes.start <= place.start
                            && place.end <= record.bytes.end
                    };
                    ensure!(
                        records.iter().any(holds),
                        "no record has {} of {:?}",
                        chunk.region,
                        tensor.fqn
                    );
                }
                _ => {}
            }
        }
    }
    Ok(())
}

async fn every_read_compares_where_the_audit_says_so(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let Some(open) = Audited::open(&subject, &(storage as _)).await? else { return Ok(()) };
    let mut numbers = Numbers(29);
    for tensor in &sample.tensors {
        for chunk in open.chunks(tensor).await? {
            let Some(placement) = chunk.placement else { continue };
            let is_compared = chunk.checksum == ChunkChecksum::EveryRead;
            let Some(file) = open.file(&placement).filter(|_| is_compared) else { continue };
            if placement.byte_len == 0 || chunk.region.volume() == 0 {
                continue;
            }
            for _ in 0..FLIPS {
                let at = placement.byte_offset + numbers.below(placement.byte_len);
                let damaged = storage_of(&flipped(&whole, &file, at, numbers.below(8))?).await?;
                let ones = vec![1; chunk.region.sizes().ndim()];
                let first = Region::new(chunk.region.offsets().clone(), ones)?;
                let all = read_box(&subject, &damaged, &sample, tensor, &chunk.region).await?;
                let one = read_box(&subject, &damaged, &sample, tensor, &first).await?;
                ensure!(
                    all.is_ok() || one.is_err(),
                    "byte {at} of {file} is damaged, and one element of {:?} is read",
                    tensor.fqn
                );
            }
        }
    }
    Ok(())
}

/// Reads a box. Wrong data is the outer error.
async fn read_box(
    subject: &Subject,
    storage: &Arc<dyn Storage>,
    sample: &Sample,
    tensor: &SampleTensor,
    region: &Region,
) -> Result<Result<(), Failure>, Failure> {
    let Ok(Some(open)) = Audited::open(subject, storage).await else {
        return Ok(Err(Failure::new("it is not opened")));
    };
    let mut load = Load::default();
    load.add_box(&open.metadata, tensor, region.clone())?;
    load.run(&*open.reader, &open.metadata, sample).await
}

async fn flipped_bits_of_records_are_found(subject: Subject) -> Outcome {
    let (storage, _) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let Some(open) = Audited::open(&subject, &(storage as _)).await? else { return Ok(()) };
    let found = open.audit.findings().await?;
    let mut numbers = Numbers(31);
    for record in open.records().await? {
        let byte_len = record.bytes.end - record.bytes.start;
        for _ in 0..if byte_len > 0 && found.unchecked.is_none() { FLIPS } else { 0 } {
            let at = record.bytes.start + numbers.below(byte_len);
            let damaged = flipped(&whole, &record.file, at, numbers.below(8))?;
            // What is not opened is found.
            let storage = storage_of(&damaged).await?;
            let Ok(Some(open)) = Audited::open(&subject, &storage).await else { continue };
            ensure!(
                open.check(&record).await.is_err(),
                "byte {at} of {} is damaged, and the record {:?} is called right",
                record.file,
                record.name
            );
        }
    }
    Ok(())
}
