//! What the opener of a provider adds to an `ObjectStore`.

use std::fmt;
use std::time::SystemTime;

use async_trait::async_trait;
use dcp_core::storage::{LeftoverAction, PutMode};
use object_store::path::Path;
use object_store::{MultipartUpload, PutResult, Result};

use crate::leftovers::MinAge;

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
