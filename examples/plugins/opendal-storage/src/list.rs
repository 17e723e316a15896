//! Listings.

use std::cmp::Reverse;

use dcp_core::error::StorageOp;
use dcp_core::storage::{FolderEntry, FolderStream, ObjectMeta, ObjectStream};
use dcp_core::{Key, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use opendal::{Entry, ErrorKind};

use crate::error::storage_error;
use crate::storage::OpendalStorage;

/// Requests for the sizes of listed objects that are in flight together.
const PARALLELISM: usize = 8;

/// The entries of OpenDAL: files, and folders other than the listed one. A name that is no key is of
/// another program.
fn found(
    storage: OpendalStorage,
    folder: Option<&Key>,
    recursive: bool,
) -> impl stream::Stream<Item = Result<(OpendalStorage, Key, Entry), StorageError>> + Send + 'static
{
    let (path, folder) = (storage.folder_path(folder), folder.cloned());
    let open = async move {
        let failed = |error| storage_error(StorageOp::List, None, error);
        let lister = match storage.operator().lister_with(&path).recursive(recursive).await {
            Ok(lister) => lister.left_stream(),
            Err(error) if error.kind() == ErrorKind::NotFound => stream::empty().right_stream(),
            Err(error) => return Err(failed(error)),
        };
        let visible = move |entry: Entry| {
            let key = storage.key(entry.path())?;
            (folder.as_ref() != Some(&key)).then(|| (storage.clone(), key, entry))
        };
        Ok(lister.map_err(failed).try_filter_map(move |entry| {
            let visible = visible(entry);
            async move { Ok(visible) }
        }))
    };
    stream::once(open).try_flatten()
}

/// The size of a listed object, which not every service lists. `None` if it was deleted meanwhile.
async fn sized(storage: OpendalStorage, key: Key) -> Result<Option<ObjectMeta>, StorageError> {
    match storage.meta(StorageOp::List, &key).await {
        Ok(meta) => Ok(Some(meta)),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn objects(storage: OpendalStorage, folder: Option<&Key>) -> ObjectStream {
    let files = found(storage, folder, true)
        .try_filter(|(_, _, entry)| std::future::ready(entry.metadata().is_file()));
    let sizes = files.map_ok(|(storage, key, _)| sized(storage, key));
    Box::pin(sizes.try_buffered(PARALLELISM).try_filter_map(|meta| async move { Ok(meta) }))
}

pub(crate) fn entries(storage: OpendalStorage, folder: Option<&Key>) -> FolderStream {
    let entries = found(storage, folder, false).map_ok(|(storage, key, entry)| async move {
        match entry.metadata().is_dir() {
            true => Ok(Some(FolderEntry::Folder(key))),
            false => Ok(sized(storage, key).await?.map(FolderEntry::Object)),
        }
    });
    Box::pin(entries.try_buffered(PARALLELISM).try_filter_map(|entry| async move { Ok(entry) }))
}

/// Removes the folders below `folder`, and itself, that have no object below them.
pub(crate) async fn remove_empty(
    storage: &OpendalStorage,
    folder: &Key,
) -> Result<(), StorageError> {
    let all: Vec<_> = found(storage.clone(), Some(folder), true).try_collect().await?;
    let (folders, files): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(_, _, entry)| entry.metadata().is_dir());
    let mut empty: Vec<Key> = folders.into_iter().map(|(_, key, _)| key).collect();
    empty.push(folder.clone());
    empty.retain(|folder| !files.iter().any(|(_, file, _)| file.is_under(folder)));
    // The innermost first. A service with folders refuses to remove one that got an object meanwhile.
    empty.sort_by_key(|folder| Reverse(folder.as_str().len()));
    for folder in empty {
        let removed = storage.operator().delete(&storage.folder_path(Some(&folder))).await;
        if let Err(error) = removed {
            let below = found(storage.clone(), Some(&folder), false);
            if below.try_collect::<Vec<_>>().await?.is_empty() {
                return Err(storage_error(StorageOp::RemoveFolders, Some(&folder), error));
            }
        }
    }
    Ok(())
}
