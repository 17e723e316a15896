//! Conveniences for callers of a [`Storage`].

use std::future::Future;
use std::ops::Range;

use bytes::Bytes;

use super::{FolderEntry, ObjectStream, ReadInto, ReadRequest, Storage};
use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::names::key::Key;
use crate::storages::streams::FilterMap;
use crate::tensors::memory::Buffer;

/// The longest object that [`StorageExt::read_all`] reads, in bytes: 2 GiB. The largest index of a
/// checkpoint has a few hundred megabytes.
pub const READ_ALL_BYTES_MAX: u64 = 2 << 30;

/// Conveniences for every [`Storage`].
pub trait StorageExt: Storage {
    /// Reads an index or another object that is small by its nature, of at most
    /// [`READ_ALL_BYTES_MAX`] bytes; [`Storage::read_whole`] has another limit.
    fn read_all(&self, key: &Key) -> impl Future<Output = Result<Bytes, StorageError>> + Send {
        async move { Ok(self.read_whole(key, READ_ALL_BYTES_MAX).await?.bytes) }
    }

    /// Reads one range into new memory.
    ///
    /// Allocates only after checking that the object contains the range, so a range from an
    /// untrusted file cannot allocate more than the object's size.
    fn read_range(
        &self,
        key: &Key,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Bytes, StorageError>> + Send {
        async move {
            let len = range.end.saturating_sub(range.start);
            // A small allocation is harmless and saves a round trip.
            if len > 1 << 20 {
                let meta = self.stat(key).await?;
                if meta.byte_len < range.end {
                    return Err(StorageError::new(
                        StorageErrorKind::Truncated,
                        StorageOp::Read,
                        Some(key.clone()),
                    )
                    .with_message(format!(
                        "bytes {}..{} were requested, the object has {}",
                        range.start, range.end, meta.byte_len
                    )));
                }
            }
            let buffer = usize::try_from(len).ok().and_then(Buffer::try_zeroed);
            let buffer = buffer.ok_or_else(|| {
                StorageError::new(StorageErrorKind::Other, StorageOp::Read, Some(key.clone()))
                    .with_message(format!("there is no memory for {len} bytes"))
            })?;
            let read = ReadInto { byte_offset: range.start, buffer };
            let mut outcome = self.read(key, ReadRequest::new(vec![read])).await?;
            Ok(outcome.buffers.pop().map(Buffer::freeze).unwrap_or_default())
        }
    }

    /// The objects directly in `folder`, or in the root, without those in its folders.
    fn list_files(&self, folder: Option<&Key>) -> ObjectStream {
        Box::pin(FilterMap::new(self.list_folder(folder), |entry| match entry {
            FolderEntry::Object(meta) => Some(meta),
            FolderEntry::Folder(_) => None,
        }))
    }

    /// Whether an object of that key exists.
    fn contains(&self, key: &Key) -> impl Future<Output = Result<bool, StorageError>> + Send {
        async move {
            match self.stat(key).await {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(false),
                Err(error) => Err(error),
            }
        }
    }
}

impl<S: Storage + ?Sized> StorageExt for S {}
