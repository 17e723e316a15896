//! Small files that are read whole.

use bytes::Bytes;
use dcp_core::storage::StorageExt as _;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};

/// A longer file than any of these should be is not kept, and so cannot be put back.
const KEPT_MAX: u64 = 1 << 30;

/// One of the small files; `None` where there is none.
pub(crate) async fn read_small(
    storage: &dyn Storage,
    name: &str,
) -> Result<Option<Bytes>, StorageError> {
    let key = Key::new(name)?;
    let byte_len = match storage.stat(&key).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if byte_len > KEPT_MAX {
        let message =
            format!("it has {byte_len} bytes, more than can be kept while it is replaced");
        return Err(StorageError::new(
            StorageErrorKind::Unsupported,
            dcp_core::error::StorageOp::Read,
            Some(key),
        )
        .with_message(message));
    }
    storage.read_range(&key, 0..byte_len).await.map(Some)
}
