//! Caches inflated storages of a file.

use std::sync::Arc;

use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, Key, Storage};
use futures_util::lock::Mutex;

use crate::torch_zip::{INFLATED_MAX, Inflater, Record};

/// The number of deflated bytes to read at a time.
const READ_BYTES: u64 = 4 << 20;

/// Contents of deflated storages, so that reading a tensor in parts inflates its storage once. At
/// most [`INFLATED_MAX`] bytes in all; the least recently used are dropped first.
#[derive(Debug, Default)]
pub(super) struct Inflated {
    /// By offset of the record in the file; most recently used last.
    known: Mutex<Vec<(u64, Arc<Vec<u8>>)>>,
}

impl Inflated {
    /// The content of a deflated record, and the number of bytes read for it.
    ///
    /// Only one record is inflated at a time, which bounds the memory. Concurrent requests for a
    /// record wait and share it.
    pub(super) async fn get(
        &self,
        storage: &dyn Storage,
        key: &Key,
        record: &Record,
    ) -> Result<(Arc<Vec<u8>>, u64), CheckpointError> {
        let mut known = self.known.lock().await;
        let start = record.data.start;
        if let Some(at) = known.iter().position(|(at, _)| *at == start) {
            let found = known.remove(at);
            let content = Arc::clone(&found.1);
            known.push(found);
            return Ok((content, 0));
        }
        let mut inflater = Inflater::new(record)?;
        let held = |known: &[(u64, Arc<Vec<u8>>)]| known.iter().map(|(_, c)| c.len() as u64).sum();
        while !known.is_empty() && record.byte_len.saturating_add(held(&known)) > INFLATED_MAX {
            known.remove(0);
        }
        // At most INFLATED_MAX, and no more than the deflated bytes can yield.
        let mut content = Vec::with_capacity(usize::try_from(record.byte_len).unwrap_or(0));
        let (mut at, end) = (start, record.data.end);
        while at < end {
            let next = end.min(at.saturating_add(READ_BYTES));
            let kept = storage.read_range(key, at..next).await?;
            inflater.push(&kept, |piece| content.extend_from_slice(piece))?;
            at = next;
        }
        inflater.finish()?;
        let content = Arc::new(content);
        known.push((start, Arc::clone(&content)));
        Ok((content, end.saturating_sub(start)))
    }
}
