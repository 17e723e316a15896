//! Copying files from one storage to another, unchanged.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    ObjectMeta, PutMode, ReadInto, ReadRequest, Upload, UploadOptions, Version, WriteLimits,
};
use dcp_core::text::Quoted;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{Buffer, Key, Storage, StorageError, StorageErrorKind};
use futures_util::stream::{FuturesUnordered, StreamExt, TryStreamExt};
use futures_util::{future, stream};
use serde::Serialize;

use crate::error::JobError;
use crate::group::JobGroup;
use crate::options::JobOptions;

/// Files that an error lists.
const NAMES_MAX: usize = 8;
/// Files up to this size are copied with one read and one put.
const WHOLE_BYTES: u64 = 8 << 20;

/// A copy of files from one storage to another.
///
/// Files are copied in batches, and a batch begins when the one before it is complete: the files
/// that make a checkpoint visible are the last batch. A file that is at the target already with the
/// same bytes stays, so a copy that was interrupted continues.
#[derive(Debug)]
pub struct CopyFiles<'a> {
    /// The storage to read.
    pub source: &'a dyn Storage,
    /// The storage to write.
    pub target: &'a dyn Storage,
    /// The files to copy, in batches.
    pub batches: Vec<Vec<ObjectMeta>>,
    /// The files that the target has.
    pub existing: BTreeMap<Key, ObjectMeta>,
    /// The comparison of the files with their source.
    pub compare: Comparing,
    /// The files of complete checkpoints at the target, which are never replaced. The others are the rest of
    /// an interrupted copy, or change with each save, such as the tracker of a run.
    pub complete: BTreeSet<Key>,
    /// The most permissions that a file gets at a target of files, as the bits of `chmod`. A file that has
    /// none here gets those of new files.
    pub permissions: BTreeMap<Key, u32>,
}

/// The comparison of a copy with its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Comparing {
    /// Reads each copied file back and compares its checksum with that of the bytes read from the
    /// source; compares the bytes of files that are at the target already.
    #[default]
    Bytes,
    /// Compares lengths only, also of files that are at the target already. The files of all batches
    /// but the first, which are small, are compared by their bytes there: two steps of one model have
    /// files of the same lengths.
    Lengths,
}

/// The result of a copy: files and bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CopyReport {
    /// Files that were copied.
    pub copied_files: usize,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Files that were at the target already.
    pub kept_files: usize,
    /// Their bytes.
    pub kept_bytes: u64,
}

impl CopyReport {
    /// The sum over all ranks, on rank 0.
    async fn of_all_ranks(self, group: &JobGroup) -> Result<Self, JobError> {
        let mut message = MessageWriter::new(*b"dcr1");
        message.number(self.copied_files as u64);
        message.number(self.copied_bytes);
        message.number(self.kept_files as u64);
        message.number(self.kept_bytes);
        let Some(all) = group.gather(message.finish()).await? else { return Ok(self) };
        let mut sum = Self::default();
        for message in all {
            let mut message = MessageReader::new(&message, *b"dcr1")?;
            let files = |number| usize::try_from(number).unwrap_or(usize::MAX);
            sum.copied_files = sum.copied_files.saturating_add(files(message.number()?));
            sum.copied_bytes = sum.copied_bytes.saturating_add(message.number()?);
            sum.kept_files = sum.kept_files.saturating_add(files(message.number()?));
            sum.kept_bytes = sum.kept_bytes.saturating_add(message.number()?);
            message.finish()?;
        }
        Ok(sum)
    }
}

impl CopyFiles<'_> {
    /// Copies the files. The ranks of a [group](JobOptions::group) divide those of the first batch, rank 0
    /// copies the others, and its report is that of all.
    ///
    /// # Errors
    ///
    /// Those of the storages; an error that names the file when a copy has other bytes than its
    /// source. Files that were copied before stay, and a second call continues.
    pub async fn run(self, options: &JobOptions) -> Result<CopyReport, JobError> {
        let total = self.batches.iter().flatten().map(|file| file.byte_len).sum();
        options.start(total);
        let first = self.batches.first().map_or(&[][..], |batch| batch);
        let own = match &options.group {
            None => first,
            Some(group) => {
                let byte_lens: Vec<_> = first.iter().map(|file| file.byte_len).collect();
                first.get(group.share(&byte_lens)).unwrap_or_default()
            }
        };
        let same = self.check_existing(own, options).await?;
        let mut report = CopyReport::default();
        for (at, batch) in self.batches.iter().enumerate() {
            let Some(group) = &options.group else {
                self.copy_batch(batch, at > 0, &same, options, &mut report).await?;
                continue;
            };
            if at == 0 {
                // All ranks have seen what was at the target before one of them writes.
                group.all_gather(Bytes::new()).await?;
                self.copy_batch(own, false, &same, options, &mut report).await?;
                report = report.of_all_ranks(group).await?;
            } else if group.is_coordinator() {
                self.copy_batch(batch, true, &same, options, &mut report).await?;
            }
        }
        Ok(report)
    }

    async fn copy_batch(
        &self,
        batch: &[ObjectMeta],
        is_index: bool,
        same: &BTreeSet<Key>,
        options: &JobOptions,
        report: &mut CopyReport,
    ) -> Result<(), JobError> {
        let copies = stream::iter(batch).map(|file| self.copy(file, is_index, same, options));
        let mut copies = std::pin::pin!(copies.buffer_unordered(options.parallelism.max(1)));
        while let Some(outcome) = copies.try_next().await? {
            options.check_group()?;
            let (files, bytes) = match outcome {
                Outcome::Copied(_) => (&mut report.copied_files, &mut report.copied_bytes),
                Outcome::Kept(_) => (&mut report.kept_files, &mut report.kept_bytes),
            };
            let (Outcome::Copied(len) | Outcome::Kept(len)) = outcome;
            *files += 1;
            *bytes += len;
        }
        Ok(())
    }

    /// Whether a file at the target may only stay as it is.
    fn is_final(&self, key: &Key) -> bool {
        self.existing.contains_key(key) && self.complete.contains(key)
    }

    /// Returns the mode of a put: the object at the target is the listed one, so that another writer in
    /// the same place fails, or this one does, where the storage has the means.
    fn put_mode(&self, key: &Key) -> PutMode {
        let capabilities = self.target.capabilities();
        match self.existing.get(key) {
            None if capabilities.atomic_create => PutMode::Create,
            Some(ObjectMeta { version: Some(version), .. }) if capabilities.conditional_put => {
                PutMode::Update(version.clone())
            }
            _ => PutMode::Overwrite,
        }
    }

    /// Refuses a target with other files before anything is written, and names all that differ: by lengths,
    /// and by bytes those of the first batch that are `own`, where that was requested, and the files of
    /// all other batches, which are small. Returns the files of the first batch whose bytes are the same.
    async fn check_existing(
        &self,
        own: &[ObjectMeta],
        options: &JobOptions,
    ) -> Result<BTreeSet<Key>, JobError> {
        let (mut differing, mut indices) = (BTreeSet::new(), Vec::new());
        for (at, batch) in self.batches.iter().enumerate() {
            for file in batch.iter().filter(|file| self.is_final(&file.key)) {
                let there = self.existing.get(&file.key).map(|there| there.byte_len);
                if there != Some(file.byte_len) {
                    differing.insert(file.key.clone());
                } else if at > 0 {
                    indices.push(file);
                }
            }
        }
        let by_bytes = self.compare == Comparing::Bytes;
        let has_length = |file: &&ObjectMeta| !differing.contains(&file.key);
        let data = own.iter().filter(|file| by_bytes && self.is_final(&file.key));
        let data: Vec<_> = data.filter(has_length).collect();
        // Each has two segments in flight, at both storages.
        let parallelism = options.parallelism.max(1);
        let segment = options.segment_bytes(4 * parallelism).min(16 << 20);
        let compare = |file| async move {
            options.check_group()?;
            Ok::<_, JobError>((file, self.has_same_bytes(file, segment).await?))
        };
        let data_count = data.len();
        let all = data.into_iter().chain(indices).enumerate();
        let compared = stream::iter(all).map(|(at, file)| async move {
            compare(file).await.map(|(file, is_same)| (at < data_count, file, is_same))
        });
        let mut compared = std::pin::pin!(compared.buffer_unordered(parallelism));
        let mut same = BTreeSet::new();
        while let Some((is_data, file, is_same)) = compared.try_next().await? {
            match (is_same, is_data) {
                (false, _) => drop(differing.insert(file.key.clone())),
                (true, true) => drop(same.insert(file.key.clone())),
                (true, false) => {}
            }
        }
        match differing.first() {
            None => Ok(same),
            Some(first) => Err(other_checkpoint(first, &differing).into()),
        }
    }

    async fn copy(
        &self,
        file: &ObjectMeta,
        is_index: bool,
        same: &BTreeSet<Key>,
        options: &JobOptions,
    ) -> Result<Outcome, JobError> {
        options.check_group()?;
        let (key, len) = (&file.key, file.byte_len);
        if same.contains(key) {
            options.advance(len);
            return Ok(Outcome::Kept(len));
        }
        // Files are copied `parallelism` at a time, and each has two segments in flight.
        let segment = options.segment_bytes(4 * options.parallelism.max(1)).min(16 << 20);
        let same_len = self.existing.get(key).is_some_and(|there| there.byte_len == len);
        let by_bytes = is_index || self.compare == Comparing::Bytes;
        if same_len && (!by_bytes || self.has_same_bytes(file, segment).await?) {
            options.advance(len);
            return Ok(Outcome::Kept(len));
        }
        if self.is_final(key) {
            return Err(other_checkpoint(key, &BTreeSet::new()).into());
        }
        if options.dry_run {
            options.advance(len);
            return Ok(Outcome::Copied(len));
        }
        let advance = |bytes| options.advance(bytes);
        let is_plain = !self.permissions.contains_key(key);
        let (crc32, copied) = match is_plain && len <= WHOLE_BYTES.min(segment) {
            true => self.copy_whole(file, &advance).await?,
            false => self.copy_in_parts(file, segment, &advance).await?,
        };
        if self.compare == Comparing::Bytes {
            let found = checksum(self.target, key, len, copied.version, segment).await?;
            if found != crc32 || copied.byte_len != len {
                return Err(differs(key, "the copy does not have the bytes of the source").into());
            }
        }
        Ok(Outcome::Copied(len))
    }

    /// Whether the file at the target, which has the same length, has the bytes of the source.
    async fn has_same_bytes(&self, file: &ObjectMeta, segment: u64) -> Result<bool, StorageError> {
        let (key, len, version) = (&file.key, file.byte_len, file.version.clone());
        let source = checksum(self.source, key, len, version, segment);
        let target = checksum(self.target, key, len, None, segment);
        let (source, target) = future::try_join(source, target).await?;
        Ok(source == target)
    }

    /// Copies a small file; returns the CRC-32 of its bytes, and the copy.
    async fn copy_whole(
        &self,
        file: &ObjectMeta,
        advance: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(u32, ObjectMeta), StorageError> {
        let bytes = read(self.source, file, 0..file.byte_len).await?;
        let crc32 = crc32fast::hash(&bytes);
        let copied = self.target.put(&file.key, bytes.into(), self.put_mode(&file.key)).await?;
        advance(file.byte_len);
        Ok((crc32, copied))
    }

    /// Copies a file in segments, which are read while others are written; returns the CRC-32 of its
    /// bytes, and the copy.
    async fn copy_in_parts(
        &self,
        file: &ObjectMeta,
        segment: u64,
        advance: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(u32, ObjectMeta), StorageError> {
        let limits = self.target.capabilities().write_limits;
        let part_bytes = part_bytes(&limits, file.byte_len, segment).ok_or_else(|| {
            let kind = StorageErrorKind::TooLarge;
            StorageError::new(kind, StorageOp::Upload, Some(file.key.clone())).with_message(
                format!("it has {} bytes, more than the storage allows", file.byte_len),
            )
        })?;
        let how = UploadOptions::new(self.put_mode(&file.key), part_bytes)
            .with_byte_len(file.byte_len)
            .with_permissions(self.permissions.get(&file.key).copied());
        let mut upload = self.target.start_upload(&file.key, how).await?;
        match send(self.source, file, &mut *upload, part_bytes, advance).await {
            Ok(crc32) => Ok((crc32, upload.complete().await?)),
            Err(error) => {
                if let Err(error) = upload.abort().await {
                    tracing::debug!(file = %file.key, %error, "cannot abort an upload");
                }
                Err(error)
            }
        }
    }
}

/// The length of the parts of a file: `segment` bytes, within the limits of the storage.
fn part_bytes(limits: &WriteLimits, byte_len: u64, segment: u64) -> Option<u64> {
    let preferred = limits.part_bytes_for(byte_len)?;
    let needed = byte_len.div_ceil(u64::from(limits.parts_max).max(1));
    Some(preferred.min(segment).max(limits.part_bytes_min).max(needed))
}

enum Outcome {
    Copied(u64),
    Kept(u64),
}

/// Reads a file and uploads its parts; returns the CRC-32 of its bytes.
async fn send(
    source: &dyn Storage,
    file: &ObjectMeta,
    upload: &mut dyn Upload,
    part_bytes: u64,
    advance: &(dyn Fn(u64) + Send + Sync),
) -> Result<u32, StorageError> {
    const SENDING: usize = 2;
    let mut hasher = crc32fast::Hasher::new();
    let mut parts = std::pin::pin!(segments(source, file, part_bytes));
    let mut sending = FuturesUnordered::new();
    while let Some(part) = parts.try_next().await? {
        hasher.update(&part);
        let len = part.len() as u64;
        let written = upload.put_part(part.into());
        sending.push(async move { written.await.map(|()| len) });
        while sending.len() >= SENDING
            && let Some(len) = sending.try_next().await?
        {
            advance(len);
        }
    }
    while let Some(len) = sending.try_next().await? {
        advance(len);
    }
    Ok(hasher.finalize())
}

/// The bytes of a file, in segments, of which the next is read ahead.
fn segments<'a>(
    storage: &'a dyn Storage,
    file: &'a ObjectMeta,
    segment: u64,
) -> impl stream::Stream<Item = Result<Bytes, StorageError>> + Send + 'a {
    let len = file.byte_len;
    let ranges = (0..len.div_ceil(segment)).map(move |number| {
        let start = number * segment;
        start..(start + segment).min(len)
    });
    stream::iter(ranges).map(move |range| read(storage, file, range)).buffered(2)
}

async fn read(
    storage: &dyn Storage,
    file: &ObjectMeta,
    range: std::ops::Range<u64>,
) -> Result<Bytes, StorageError> {
    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let buffer = Buffer::try_zeroed(len).ok_or_else(|| {
        StorageError::new(StorageErrorKind::Other, StorageOp::Read, Some(file.key.clone()))
            .with_message(format!("there is no memory for {len} bytes"))
    })?;
    let request = ReadRequest::new(vec![ReadInto { byte_offset: range.start, buffer }])
        .with_if_version(file.version.clone());
    let mut outcome = storage.read(&file.key, request).await?;
    Ok(outcome.buffers.pop().map(Buffer::freeze).unwrap_or_default())
}

async fn checksum(
    storage: &dyn Storage,
    key: &Key,
    len: u64,
    version: Option<Version>,
    segment: u64,
) -> Result<u32, StorageError> {
    let file = ObjectMeta::new(key.clone(), len).with_version(version);
    let mut hasher = crc32fast::Hasher::new();
    let mut parts = std::pin::pin!(segments(storage, &file, segment));
    while let Some(part) = parts.try_next().await? {
        hasher.update(&part);
    }
    Ok(hasher.finalize())
}

/// The error of a target with other files, of which `key` is the first.
fn other_checkpoint(key: &Key, all: &BTreeSet<Key>) -> StorageError {
    let error =
        StorageError::new(StorageErrorKind::AlreadyExists, StorageOp::Put, Some(key.clone()));
    if all.len() < 2 {
        return error.with_message("a checkpoint at the target has it with other bytes");
    }
    let shown: Vec<_> =
        all.iter().take(NAMES_MAX).map(|key| Quoted(key.as_str()).to_string()).collect();
    let more = match all.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (count, shown) = (all.len(), shown.join(", "));
    error.with_message(format!(
        "checkpoints at the target have {count} files with other bytes: {shown}{more}"
    ))
}

fn differs(key: &Key, problem: &str) -> StorageError {
    StorageError::new(StorageErrorKind::Other, StorageOp::Upload, Some(key.clone()))
        .with_message(format!("{problem}; copy it again"))
}
