//! Requests that the opener of a provider adds to an `ObjectStore`.

use std::fmt;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use dcp_core::storage::{LeftoverAction, PutMode};
use object_store::path::Path;
use object_store::{MultipartUpload, PutResult, Result};

/// Completes uploads with the condition of a mode, in one request of the store.
///
/// `MultipartUpload::complete` has no condition. The opener of a provider that takes one adds it to
/// the request.
#[async_trait]
pub(crate) trait Completion: fmt::Debug + Send + Sync {
    /// Completes an upload to the final path. Fails as a refused precondition if the object is
    /// there already, or does not have the version.
    async fn complete(&self, upload: &mut dyn MultipartUpload, mode: &PutMode)
    -> Result<PutResult>;
}

/// The age from which on an upload counts as left behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MinAge {
    min_age: Duration,
    now: SystemTime,
}

impl MinAge {
    pub(crate) fn until_now(min_age: Duration) -> Self {
        Self { min_age, now: SystemTime::now() }
    }

    /// Whether what began then has it. The times are of the store's clock: what begins in the future of
    /// this machine's is new, and as old as a minimum of zero demands.
    pub(crate) fn is_reached(self, begun: SystemTime) -> bool {
        self.now.duration_since(begun).unwrap_or_default() >= self.min_age
    }
}

/// The unfinished uploads of a store that can list them.
#[async_trait]
pub(crate) trait OpenUploads: fmt::Debug + Send + Sync {
    /// The uploads to paths in `folder` of an age. Removing aborts them.
    async fn older(
        &self,
        folder: &Path,
        age: MinAge,
        action: LeftoverAction,
    ) -> Result<Vec<OpenUpload>>;
}

/// An unfinished upload of the store.
#[derive(Debug)]
pub(crate) struct OpenUpload {
    pub(crate) path: Path,
    pub(crate) begun: SystemTime,
}

/// Replaces one version of an object by another object.
#[async_trait]
pub(crate) trait Replacement: fmt::Debug + Send + Sync {
    /// Copies an object to a path whose object has this generation. Fails as a refused precondition
    /// if it has another one.
    async fn replace(&self, from: &Path, to: &Path, generation: &str) -> Result<()>;
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
