//! Reading ranges of a file straight into lent memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dcp_core::{Buffer, Key, ReadInto, StorageError, StorageErrorKind, StorageOp};
use futures_util::future::join_all;

use crate::blocking::blocking;
use crate::error::{is_absence, on_key};
use crate::root::{READ, Root};

/// Fewer bytes than this are not worth another thread.
const PER_THREAD: u64 = 8 << 20;

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
                "{len} bytes at {} were asked for, the object has {}",
                read.byte_offset,
                meta.len()
            )));
        }
    }
    Ok(file)
}

fn fill(file: &File, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
    reads
        .into_iter()
        .map(|ReadInto { byte_offset, mut buffer }| {
            if !buffer.is_empty() {
                file.read_exact_at(&mut buffer, byte_offset)
                    .map_err(|error| shrunk_or(error, key, byte_offset))?;
            }
            Ok(buffer)
        })
        .collect()
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

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
