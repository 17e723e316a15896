//! Reads ranges of a file straight into lent memory.

use std::fs::{File, Metadata};
use std::io::{self, IoSliceMut};
use std::sync::Arc;

use dcp_core::error::StorageOp;
use dcp_core::storage::{ReadInto, ReadOutcome, ReadRequest, Version, WholeObject};
use dcp_core::{Buffer, Key, StorageError, StorageErrorKind};
use futures_util::future::join_all;
use rustix::io::{Errno, preadv};

use crate::blocking::blocking;
use crate::error::{is_absence, on_key};
use crate::root::{READ, Root};
use crate::version::{is_unchanged, object, version_of};

/// The minimum bytes for another thread.
const PER_THREAD: u64 = 8 << 20;
/// A file of which so many bytes follow each other in one request is read ahead twice as far.
#[cfg(target_os = "linux")]
const AHEAD_MIN: usize = 1 << 20;
/// The maximum vectors of one call on Linux (`IOV_MAX`).
const VECTORS_MAX: usize = 1024;

/// The maximum reads of a whole file that is written in place meanwhile.
const TRIES: u32 = 3;

/// An open file, and its version at that time.
#[derive(Debug)]
struct Opened {
    file: File,
    meta: Metadata,
    version: Version,
}

impl Opened {
    /// Fails if the file was written in place since it was opened.
    fn check(&self, key: &Key) -> Result<(), StorageError> {
        if is_unchanged(&self.file, &self.version).map_err(on_key(StorageOp::Read, key))? {
            return Ok(());
        }
        Err(changed(key, "it was written while it was read"))
    }
}

fn changed(key: &Key, why: &str) -> StorageError {
    StorageError::new(StorageErrorKind::Changed, StorageOp::Read, Some(key.clone()))
        .with_message(why)
}

/// Fills the buffers, on up to `parallelism` threads.
pub(crate) async fn read(
    root: Arc<Root>,
    key: &Key,
    request: ReadRequest,
    parallelism: u16,
) -> Result<ReadOutcome, StorageError> {
    let ReadRequest { ranges: reads, if_version, .. } = request;
    let total = reads.iter().map(|read| read.buffer.len() as u64).sum::<u64>();
    let target = PER_THREAD.max(total.div_ceil(u64::from(parallelism.max(1))));
    if total < 2 * PER_THREAD || reads.len() == 1 {
        let for_thread = key.clone();
        return blocking(StorageOp::Read, Some(key), move || {
            let opened = open(&root, &for_thread, &reads, if_version.as_ref())?;
            let buffers = fill(&opened.file, &for_thread, reads)?;
            opened.check(&for_thread)?;
            Ok(ReadOutcome::new(buffers).with_version(Some(opened.version)))
        })
        .await;
    }
    let for_thread = key.clone();
    let (opened, reads) = blocking(StorageOp::Read, Some(key), move || {
        let opened = open(&root, &for_thread, &reads, if_version.as_ref())?;
        Ok((Arc::new(opened), reads))
    })
    .await?;
    let filling = groups(reads, target).into_iter().map(|reads| {
        let (opened, for_thread) = (Arc::clone(&opened), key.clone());
        blocking(StorageOp::Read, Some(key), move || {
            let buffers = fill(&opened.file, &for_thread, reads)?;
            opened.check(&for_thread)?;
            Ok(buffers)
        })
    });
    // All of them, even when one fails: when this returns, no thread may still hold the memory.
    let filled = join_all(filling).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let buffers = filled.into_iter().flatten().collect();
    Ok(ReadOutcome::new(buffers).with_version(Some(opened.version.clone())))
}

/// Reads a whole file, again if it is written in place meanwhile, as Megatron-LM writes its tracker.
pub(crate) fn read_whole(
    root: &Root,
    key: &Key,
    max_bytes: u64,
) -> Result<WholeObject, StorageError> {
    let mut tries = TRIES;
    loop {
        tries -= 1;
        let opened = open(root, key, &[], None)?;
        let byte_len = opened.meta.len();
        if byte_len > max_bytes {
            let kind = StorageErrorKind::TooLarge;
            return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone()))
                .with_message(format!("it has {byte_len} bytes, at most {max_bytes} are read")));
        }
        let buffer = usize::try_from(byte_len).ok().and_then(Buffer::try_zeroed);
        let buffer = buffer.ok_or_else(|| {
            StorageError::new(StorageErrorKind::Other, StorageOp::Read, Some(key.clone()))
                .with_message(format!("cannot allocate {byte_len} bytes"))
        })?;
        let filled = fill(&opened.file, key, vec![ReadInto { byte_offset: 0, buffer }]);
        let read = filled.and_then(|filled| opened.check(key).map(|()| filled));
        match read {
            Ok(mut buffers) => {
                let bytes = buffers.pop().map(Buffer::freeze).unwrap_or_default();
                return Ok(WholeObject::new(object(key, &opened.meta), bytes));
            }
            Err(error) => match error.kind() {
                StorageErrorKind::Changed | StorageErrorKind::Truncated if tries > 0 => {}
                _ => return Err(error),
            },
        }
    }
}

/// Divides the reads, in order, into groups of about `target` bytes.
fn groups(reads: Vec<ReadInto>, target: u64) -> Vec<Vec<ReadInto>> {
    let mut groups = Vec::new();
    let mut group = Vec::new();
    let mut bytes = 0;
    for read in reads {
        bytes += read.buffer.len() as u64;
        group.push(read);
        if bytes >= target {
            groups.push(std::mem::take(&mut group));
            bytes = 0;
        }
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// Opens the object, and checks that it holds all ranges.
fn open(
    root: &Root,
    key: &Key,
    reads: &[ReadInto],
    if_version: Option<&Version>,
) -> Result<Opened, StorageError> {
    let failed = |kind| StorageError::new(kind, StorageOp::Read, Some(key.clone()));
    let file = match root.open_below(key.as_str(), READ) {
        Ok(fd) => File::from(fd),
        Err(error) if is_absence(&error) => {
            return Err(failed(StorageErrorKind::NotFound).with_source(error));
        }
        Err(error) => return Err(on_key(StorageOp::Read, key)(error)),
    };
    let meta = file.metadata().map_err(on_key(StorageOp::Read, key))?;
    if !meta.is_file() {
        return Err(failed(StorageErrorKind::NotFound).with_message("it is not a regular file"));
    }
    let version = version_of(&meta);
    if if_version.is_some_and(|required| *required != version) {
        return Err(changed(key, "it is not the file of the requested version"));
    }
    for read in reads.iter().filter(|read| !read.buffer.is_empty()) {
        let len = read.buffer.len() as u64;
        if read.byte_offset.checked_add(len).is_none_or(|end| end > meta.len()) {
            return Err(failed(StorageErrorKind::Truncated).with_message(format!(
                "{len} bytes at {} were requested, the object has {}",
                read.byte_offset,
                meta.len()
            )));
        }
    }
    advise(&file, reads);
    Ok(Opened { file, meta, version })
}

/// Makes the system read long ranges further ahead. Each request opens the file, and reading ahead
/// starts small in each open file.
#[cfg(target_os = "linux")]
fn advise(file: &File, reads: &[ReadInto]) {
    use rustix::fs::{Advice, fadvise};
    if reads.iter().any(|read| read.buffer.len() >= AHEAD_MIN) {
        // A file system that has no such advice reads at its own pace.
        let _ = fadvise(file, 0, None, Advice::Sequential);
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: &[ReadInto]) {}

/// Fills the buffers. Those whose ranges follow each other in the file share a call to the system:
/// rows of a shard that go to strided memory are often a few kilobytes each.
fn fill(file: &File, key: &Key, mut reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
    for run in reads.chunk_by_mut(|a, b| a.byte_offset + a.buffer.len() as u64 == b.byte_offset) {
        for part in run.chunks_mut(VECTORS_MAX) {
            let byte_offset = part.first().map_or(0, |read| read.byte_offset);
            if let [read] = part
                && !read.buffer.is_empty()
            {
                read_vectors(file, &mut [IoSliceMut::new(&mut read.buffer)], byte_offset)
                    .map_err(|(error, at)| shrunk_or(error, key, at))?;
                continue;
            }
            let mut vectors: Vec<_> = part
                .iter_mut()
                .filter(|read| !read.buffer.is_empty())
                .map(|read| IoSliceMut::new(&mut read.buffer))
                .collect();
            read_vectors(file, &mut vectors, byte_offset)
                .map_err(|(error, at)| shrunk_or(error, key, at))?;
        }
    }
    Ok(reads.into_iter().map(|read| read.buffer).collect())
}

/// Fills `vectors` with the bytes from `byte_offset` on; an error comes with its offset.
fn read_vectors(
    file: &File,
    mut vectors: &mut [IoSliceMut<'_>],
    mut byte_offset: u64,
) -> Result<(), (io::Error, u64)> {
    while !vectors.is_empty() {
        match preadv(file, vectors, byte_offset) {
            Ok(0) => return Err((io::ErrorKind::UnexpectedEof.into(), byte_offset)),
            Ok(len) => {
                byte_offset += len as u64;
                IoSliceMut::advance_slices(&mut vectors, len);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err((error.into(), byte_offset)),
        }
    }
    Ok(())
}

fn shrunk_or(error: io::Error, key: &Key, byte_offset: u64) -> StorageError {
    let cut = error.kind() == io::ErrorKind::UnexpectedEof;
    let error = on_key(StorageOp::Read, key)(error);
    if cut { error.with_message(format!("the file ends at byte {byte_offset}")) } else { error }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, bytes).unwrap();
        file
    }

    #[test]
    fn more_rows_than_one_call_takes() {
        let bytes: Vec<_> = (0..10_000_u32).flat_map(u32::to_le_bytes).collect();
        let rows = (0..10_000_u64).map(|row| (row * 4, 4));
        let file = file_of(&bytes);
        assert_eq!(filled(&file, rows).unwrap(), bytes);
    }

    #[test]
    fn a_file_that_shrinks_names_the_byte() {
        let file = file_of(&[7; 10]);
        let error = filled(&file, [(0, 4), (4, 4), (8, 4)].into_iter()).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Truncated);
        assert!(error.to_string().contains("ends at byte 10"), "{error}");
    }

    fn filled(
        file: &File,
        ranges: impl Iterator<Item = (u64, usize)>,
    ) -> Result<Vec<u8>, StorageError> {
        let reads = ranges
            .map(|(byte_offset, len)| ReadInto { byte_offset, buffer: Buffer::zeroed(len) })
            .collect();
        let buffers = fill(file, &Key::new("a").unwrap(), reads)?;
        Ok(buffers.iter().flat_map(|buffer| buffer.to_vec()).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn rows_that_touch_and_rows_that_do_not_are_what_the_file_holds(
            ranges in prop::collection::vec((0_usize..300, 0_usize..50, any::<bool>()), 0..60),
        ) {
            let bytes: Vec<_> = (0..400_u32).map(|byte| (byte % 251) as u8).collect();
            let mut end = 0;
            let mut wanted = Vec::new();
            let mut expected = Vec::new();
            for (start, len, follows) in ranges {
                let start = if follows && end + len <= bytes.len() { end } else { start };
                end = start + len;
                wanted.push((start as u64, len));
                expected.extend_from_slice(&bytes[start..end]);
            }
            let found = filled(&file_of(&bytes), wanted.into_iter()).unwrap();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn groups_keep_order_and_size(
            lens in prop::collection::vec(0_usize..100, 0..40),
            target in 1_u64..300,
        ) {
            let reads = (0..).zip(&lens).map(|(byte_offset, &len)| ReadInto {
                byte_offset,
                buffer: Buffer::zeroed(len),
            });
            let groups = groups(reads.collect(), target);
            let order = groups.iter().flatten().map(|read| read.byte_offset).collect::<Vec<_>>();
            prop_assert_eq!(order, (0..lens.len() as u64).collect::<Vec<_>>());
            for group in &groups {
                let bytes = group.iter().map(|read| read.buffer.len() as u64).sum::<u64>();
                prop_assert!(bytes < target + 100);
                prop_assert!(!group.is_empty());
            }
        }
    }
}
