//! The deflated storages of a file that were read last.

use std::sync::Arc;

use dcp_core::{CheckpointError, Key, Storage, StorageExt as _};
use futures_util::lock::Mutex;

use crate::torch_zip::{INFLATED_MAX, Inflater, Record};

/// Kept bytes that are read at a time.
const READ_BYTES: u64 = 4 << 20;

/// Content of deflated storages, so that the parts of a tensor do not inflate its storage once
/// each; no more than [`INFLATED_MAX`] bytes together, of which the longest unused go first.
#[derive(Debug, Default)]
pub(super) struct Inflated {
    /// By where the record lies in the file; the one used last is the last.
    known: Mutex<Vec<(u64, Arc<Vec<u8>>)>>,
}

impl Inflated {
    /// The content of a deflated record, and how many bytes were read for it.
    ///
    /// While one is inflated the others wait: that bounds the memory, and who waits for the same
    /// one gets it.
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
        // At most INFLATED_MAX, and no more than its kept bytes can make.
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
