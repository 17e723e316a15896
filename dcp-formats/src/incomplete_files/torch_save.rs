//! Compares a file of `torch.save` with its own directory or pickles.

use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{CheckpointError, Storage, StorageError};

pub(crate) use crate::torch_save::is_torch_save;
use crate::torch_save::{FILE_ENDINGS, check_stream};
use crate::torch_zip::{ParseStep, Sparse, check_end};

/// Bytes at the end of an archive that hold its end records: 22 bytes and a comment of 64 KiB, 76 of
/// zip64 before them.
const TAIL_BYTES: u64 = (64 << 10) + 98;

pub(super) fn is_named(name: &str) -> bool {
    FILE_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

pub(super) async fn problem(
    storage: &dyn Storage,
    meta: &ObjectMeta,
    head: &[u8],
) -> Result<Option<String>, StorageError> {
    let (key, byte_len) = (&meta.key, meta.byte_len);
    if head.starts_with(b"PK\x03\x04") {
        let start = byte_len.saturating_sub(TAIL_BYTES);
        let tail = storage.read_range(key, start..byte_len).await?;
        // A zip64 record may be further in front; the end record is not.
        return Ok(match check_end(&Sparse::tail(byte_len, &tail)) {
            Ok(ParseStep::Ready(()) | ParseStep::Need(_)) => None,
            Err(error) => Some(format!("was cut short, or is damaged: {}", error.problem())),
        });
    }
    match check_stream(storage, key, head).await {
        Ok(()) => Ok(None),
        Err(CheckpointError::Storage(error)) => Err(error),
        Err(error) => Ok(Some(format!("was cut short, or is damaged: {error}"))),
    }
}
