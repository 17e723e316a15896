//! Reading ranges of a file straight into lent memory.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::sync::Arc;

use dcp_core::error::StorageOp;
use dcp_core::storage::ReadInto;
use dcp_core::{Buffer, Key, StorageError, StorageErrorKind};
use futures_util::future::join_all;
use rustix::io::{Errno, preadv};

use crate::blocking::blocking;
use crate::error::{is_absence, on_key};
use crate::root::{READ, Root};

/// Fewer bytes than this are not worth another thread.
const PER_THREAD: u64 = 8 << 20;
/// The most vectors that Linux takes in one call (`IOV_MAX`).
const VECTORS_MAX: usize = 1024;

/// Fills the buffers, on up to `parallelism` threads.
pub(crate) async fn read(
    root: Arc<Root>,
    key: &Key,
    reads: Vec<ReadInto>,
    parallelism: u16,
) -> Result<Vec<Buffer>, StorageError> {
    let total = reads.iter().map(|read| read.buffer.len() as u64).sum::<u64>();
    let target = PER_THREAD.max(total.div_ceil(u64::from(parallelism.max(1))));
    if total < 2 * PER_THREAD || reads.len() == 1 {
        let for_thread = key.clone();
        return blocking(StorageOp::Read, Some(key), move || {
            let file = open(&root, &for_thread, &reads)?;
            fill(&file, &for_thread, reads)
        })
        .await;
    }
    let for_thread = key.clone();
    let (file, reads) = blocking(StorageOp::Read, Some(key), move || {
        let file = open(&root, &for_thread, &reads)?;
        Ok((Arc::new(file), reads))
    })
    .await?;
    let filling = groups(reads, target).into_iter().map(|reads| {
        let (file, for_thread) = (Arc::clone(&file), key.clone());
        blocking(StorageOp::Read, Some(key), move || fill(&file, &for_thread, reads))
    });
    // All of them, even when one fails: when this returns, no thread may still hold the memory.
    let filled = join_all(filling).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(filled.into_iter().flatten().collect())
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

/// Opens the object, and sees that it holds all ranges.
fn open(root: &Root, key: &Key, reads: &[ReadInto]) -> Result<File, StorageError> {
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
        return Err(failed(StorageErrorKind::NotFound).with_message("it is no regular file"));
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
    Ok(file)
}

/// Fills the buffers. Those whose ranges follow each other in the file share a call to the system:
/// rows of a shard that go to strided memory are often a few kilobytes each.
fn fill(file: &File, key: &Key, mut reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
    for run in reads.chunk_by_mut(|a, b| a.byte_offset + a.buffer.len() as u64 == b.byte_offset) {
        for part in run.chunks_mut(VECTORS_MAX) {
            let byte_offset = part.first().map_or(0, |read| read.byte_offset);
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

/// Fills `vectors` with what begins at `byte_offset`; an error comes with where it was met.
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
    if cut {
        error.with_message(format!("it was cut short behind byte {byte_offset}"))
    } else {
        error
    }
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
        assert!(error.to_string().contains("behind byte 10"), "{error}");
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
