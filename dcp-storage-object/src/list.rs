//! Listing objects and folders.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{FolderEntry, FolderStream, ObjectStream};
use dcp_core::text::Quoted;
use dcp_core::{Key, StorageError, StorageErrorKind as Kind};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryFutureExt, TryStreamExt, future, stream};
use object_store::ObjectMeta;
use object_store::path::Path;
use tokio::time::timeout;

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
    let listing =
        Listing { inner, folder, path, answers: None, last: None, in_order: true, resumed: false };
    let objects = stream::try_unfold(listing, |mut listing| async move {
        while let Some(object) = listing.next().await? {
            let inner = &listing.inner;
            inner.bucket_seen.store(true, Ordering::Relaxed);
            if let Some(key) = inner.prefix.key(&object.location) {
                let meta = inner.meta(&key, object);
                return Ok(Some((meta, listing)));
            }
        }
        Ok(None)
    });
    objects.boxed()
}

/// A listing under way.
struct Listing {
    inner: Arc<Inner>,
    folder: Option<Key>,
    path: Path,
    answers: Option<BoxStream<'static, object_store::Result<ObjectMeta>>>,
    /// The last object that was returned.
    last: Option<Path>,
    /// Whether all objects came in the order of their paths, so that the listing can continue behind
    /// the last one.
    in_order: bool,
    resumed: bool,
}

impl Listing {
    /// The next object. After an answer that breaks off or cannot be read, the listing continues
    /// behind the last object.
    async fn next(&mut self) -> Result<Option<ObjectMeta>, StorageError> {
        let mut attempts = Attempts::new(self.inner.retry);
        loop {
            let answers = self.answers.get_or_insert_with(|| {
                let path = not_root(&self.path);
                match &self.last {
                    Some(last) => self.inner.store.list_with_offset(path, last),
                    None => self.inner.store.list(path),
                }
            });
            let stall = self.inner.stall;
            let answer = timeout(stall, attempts.request(Op::List, answers.try_next())).await;
            let answer = answer.unwrap_or_else(|_| {
                Err(Failure::new(Kind::Transient, format!("the store sent nothing for {stall:?}")))
            });
            let failure = match answer {
                Ok(Some(object)) => {
                    let is_behind = self.last.as_ref().is_none_or(|last| *last < object.location);
                    if !is_behind && self.resumed {
                        // The store ignores where a listing begins.
                        continue;
                    }
                    self.in_order &= is_behind;
                    self.last = Some(object.location.clone());
                    return Ok(Some(object));
                }
                Ok(None) => return Ok(None),
                Err(failure) => failure,
            };
            let paused = match self.in_order {
                true => attempts.pause(failure).await,
                false => Err(failure),
            };
            if let Err(failure) = paused {
                return Err(failed(failure, self.folder.as_ref(), &self.path, &attempts));
            }
            (self.answers, self.resumed) = (None, true);
        }
    }
}

/// The error of a listing, with the prefix that the store was requested.
fn failed(
    failure: Failure,
    folder: Option<&Key>,
    path: &Path,
    attempts: &Attempts,
) -> StorageError {
    let mut doing = match not_root(path) {
        Some(path) => format!("the prefix is {}", Quoted(&format!("{path}/"))),
        None => "the prefix is empty".to_owned(),
    };
    let summary = attempts.summary();
    if !summary.is_empty() {
        doing.push_str(", ");
        doing.push_str(&summary);
    }
    failure.into_error(Op::List, folder, &doing)
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
                    return Err(failed(failure, folder, path, &attempts));
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
