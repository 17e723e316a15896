//! Finds and removes what uploads that never ended left behind.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dcp_core::storage::{Leftover, LeftoverAction, LeftoverKind};
use dcp_core::{Key, StorageError};
use futures_util::TryStreamExt;
use object_store::path::Path;

use crate::error::Failure;
use crate::inner::Inner;
use crate::list::not_root;
use crate::path::UPLOAD_NAME;
use crate::retry::Attempts;

/// The age from which on an upload counts as left behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MinAge {
    min_age: Duration,
    now: SystemTime,
}

impl MinAge {
    /// Whether what began then has it. The times are of the store's clock: what begins in the future of
    /// this machine's is new, and as old as a minimum of zero demands.
    pub(crate) fn is_reached(self, begun: SystemTime) -> bool {
        self.now.duration_since(begun).unwrap_or_default() >= self.min_age
    }
}

/// Finds objects that are unfinished uploads, and open uploads where the store can list them.
pub(crate) async fn find(
    inner: &Arc<Inner>,
    folder: Option<&Key>,
    min_age: Duration,
    action: LeftoverAction,
) -> Result<Vec<Leftover>, StorageError> {
    let path = inner.prefix.folder(action.op(), folder)?;
    let age = MinAge { min_age, now: SystemTime::now() };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_whose_clock_is_ahead_has_new_uploads_and_a_minimum_of_zero_finds_them() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(10_000);
        let is_reached = |seconds: u64, begun| {
            let min_age = Duration::from_secs(seconds);
            MinAge { min_age, now }.is_reached(begun)
        };
        let second = Duration::from_secs(1);
        for (begun, zero, one, two) in [
            (now - 2 * second, true, true, true),
            (now - second, true, true, false),
            (now, true, false, false),
            (now + second, true, false, false),
            (now + 100 * second, true, false, false),
        ] {
            assert_eq!([0, 1, 2].map(|age| is_reached(age, begun)), [zero, one, two], "{begun:?}");
        }
        assert!(!is_reached(u64::MAX, SystemTime::UNIX_EPOCH));
    }
}
