//! Listing objects and folders.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{FolderEntry, FolderStream, ObjectStream};
use dcp_core::{Key, StorageError, StorageErrorKind as Kind};
use futures_util::{FutureExt, StreamExt, TryFutureExt, TryStreamExt, future, stream};
use object_store::path::Path;

use crate::error::Failure;
use crate::inner::Inner;
use crate::retry::Attempts;

/// All objects of a folder, at any depth.
pub(crate) fn list(inner: &Arc<Inner>, folder: Option<&Key>) -> ObjectStream {
    let path = match folder_path(inner, folder) {
        Ok(path) => path,
        Err(error) => return stream::once(future::ready(Err(error))).boxed(),
    };
    let (inner, folder) = (Arc::clone(inner), folder.cloned());
    let listed = inner.store.list(not_root(&path));
    listed
        .map_err(move |error| {
            Failure::of(Op::List, &error).into_error(Op::List, folder.as_ref(), "")
        })
        .try_filter_map(move |object| {
            inner.bucket_seen.store(true, Ordering::Relaxed);
            let key = inner.prefix.key(&object.location);
            future::ready(Ok(key.map(|key| inner.meta(&key, object))))
        })
        .boxed()
}

/// The objects and folders directly in a folder.
pub(crate) fn list_folder(inner: &Arc<Inner>, folder: Option<&Key>) -> FolderStream {
    let path = match folder_path(inner, folder) {
        Ok(path) => path,
        Err(error) => return stream::once(future::ready(Err(error))).boxed(),
    };
    let (inner, folder) = (Arc::clone(inner), folder.cloned());
    let entries = async move { entries(&inner, folder.as_ref(), &path).await };
    entries.map(|entries| entries.map(|all| stream::iter(all).map(Ok))).try_flatten_stream().boxed()
}

async fn entries(
    inner: &Inner,
    folder: Option<&Key>,
    path: &Path,
) -> Result<Vec<FolderEntry>, StorageError> {
    let mut attempts = Attempts::new(inner.retry);
    let listed = loop {
        let request = inner.store.list_with_delimiter(not_root(path));
        match attempts.request(Op::List, request).await {
            Ok(listed) => break listed,
            Err(failure) => {
                if let Err(failure) = attempts.pause(failure).await {
                    return Err(failure.into_error(Op::List, folder, &attempts.summary()));
                }
            }
        }
    };
    let folders = listed.common_prefixes.iter().filter_map(|path| inner.prefix.key(path));
    let objects = listed.objects.into_iter().filter_map(|object| {
        let key = inner.prefix.key(&object.location)?;
        Some(FolderEntry::Object(inner.meta(&key, object)))
    });
    Ok(folders.map(FolderEntry::Folder).chain(objects).collect())
}

fn folder_path(inner: &Inner, folder: Option<&Key>) -> Result<Path, StorageError> {
    if !inner.capabilities.listable {
        return Err(StorageError::new(Kind::Unsupported, Op::List, folder.cloned())
            .with_message("a web server has no listing"));
    }
    inner.prefix.folder(Op::List, folder)
}

pub(crate) fn not_root(path: &Path) -> Option<&Path> {
    (!path.as_ref().is_empty()).then_some(path)
}
