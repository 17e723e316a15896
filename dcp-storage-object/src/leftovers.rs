//! Finds and removes the remains of uploads that did not finish.

use std::sync::Arc;
use std::time::Duration;

use dcp_core::storage::{Leftover, LeftoverAction, LeftoverKind};
use dcp_core::{Key, StorageError};
use futures_util::TryStreamExt;
use object_store::path::Path;

use crate::error::Failure;
use crate::inner::Inner;
use crate::list::not_root;
use crate::native::MinAge;
use crate::path::UPLOAD_NAME;
use crate::retry::Attempts;

/// Finds objects that are unfinished uploads, and open uploads where the store can list them.
pub(crate) async fn find(
    inner: &Arc<Inner>,
    folder: Option<&Key>,
    min_age: Duration,
    action: LeftoverAction,
) -> Result<Vec<Leftover>, StorageError> {
    let path = inner.prefix.folder(action.op(), folder)?;
    let age = MinAge::until_now(min_age);
    let mut attempts = Attempts::new(inner.retry);
    loop {
        match find_older(inner, &path, age, action, &mut attempts).await {
            Ok(found) => return Ok(found),
            Err(failure) => {
                if let Err(failure) = attempts.pause(failure).await {
                    return Err(failure.into_error(action.op(), folder, &attempts.summary()));
                }
            }
        }
    }
}

async fn find_older(
    inner: &Inner,
    path: &Path,
    age: MinAge,
    action: LeftoverAction,
    attempts: &mut Attempts,
) -> Result<Vec<Leftover>, Failure> {
    let listed = inner.store.list(not_root(path));
    let old = listed.try_filter_map(|object| {
        let is_upload =
            object.location.filename().is_some_and(|name| name.starts_with(UPLOAD_NAME));
        let is_old = age.is_reached(object.last_modified.into());
        std::future::ready(Ok((is_upload && is_old).then_some(object)))
    });
    let old = attempts.request(action.op(), old.try_collect::<Vec<_>>()).await?;
    if action == LeftoverAction::Remove {
        let paths: Vec<_> = old.iter().map(|object| object.location.clone()).collect();
        inner.delete_once(&paths, attempts).await?;
    }
    let mut found: Vec<_> = old
        .into_iter()
        .map(|object| {
            Leftover::new(LeftoverKind::TemporaryFile, inner.prefix.below(&object.location))
                .with_byte_len(Some(object.size))
                .with_modified(Some(object.last_modified.into()))
        })
        .collect();
    if let Some(uploads) = &inner.open_uploads {
        let open = attempts.request(action.op(), uploads.older(path, age, action)).await?;
        found.extend(open.into_iter().map(|upload| {
            Leftover::new(LeftoverKind::OpenUpload, inner.prefix.below(&upload.path))
                .with_modified(Some(upload.begun))
        }));
    }
    Ok(found)
}
