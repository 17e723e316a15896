//! Removes what uploads that never ended left behind.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dcp_core::error::StorageOp as Op;
use dcp_core::{Key, StorageError};
use futures_util::TryStreamExt;
use object_store::path::Path;

use crate::error::Failure;
use crate::inner::Inner;
use crate::list::not_root;
use crate::path::UPLOAD_NAME;
use crate::retry::Attempts;

/// Removes objects that are unfinished uploads, and aborts uploads where the store can list them.
pub(crate) async fn remove(
    inner: &Arc<Inner>,
    folder: Option<&Key>,
    min_age: Duration,
) -> Result<u64, StorageError> {
    let op = Op::RemoveLeftovers;
    let path = inner.prefix.folder(op, folder)?;
    let now = SystemTime::now();
    let before = now.checked_sub(min_age).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut attempts = Attempts::new(inner.retry);
    loop {
        match remove_before(inner, &path, before, &mut attempts).await {
            Ok(removed) => return Ok(removed),
            Err(failure) => {
                if let Err(failure) = attempts.pause(failure).await {
                    return Err(failure.into_error(op, folder, &attempts.summary()));
                }
            }
        }
    }
}

async fn remove_before(
    inner: &Inner,
    path: &Path,
    before: SystemTime,
    attempts: &mut Attempts,
) -> Result<u64, Failure> {
    let op = Op::RemoveLeftovers;
    let listed = inner.store.list(not_root(path));
    let old = listed.try_filter_map(|object| {
        let is_upload =
            object.location.filename().is_some_and(|name| name.starts_with(UPLOAD_NAME));
        let is_old = SystemTime::from(object.last_modified) <= before;
        std::future::ready(Ok((is_upload && is_old).then_some(object.location)))
    });
    let old = attempts.request(op, old.try_collect::<Vec<_>>()).await?;
    inner.delete_once(&old, attempts).await?;
    let mut removed = old.len() as u64;
    if let Some(uploads) = &inner.open_uploads {
        removed += attempts.request(op, uploads.abort_before(path, before)).await?;
    }
    Ok(removed)
}
