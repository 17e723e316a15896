//! Compares stored chunks with their checksums, for jobs that stop at the first damaged one.

use std::sync::Arc;

use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::integrity::archive_audit;
use crate::options::JobOptions;
use crate::read::stored_items::Placed;
use crate::source::Source;

/// Reads `items` and fails with the first that differs from its checksum or the index.
pub(crate) async fn refuse_damaged(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    items: &[Placed],
    options: &JobOptions,
) -> Result<(), CheckpointError> {
    let job = &archive_audit::Job::new(source, metadata, options);
    let checks: Vec<_> =
        items
            .iter()
            .map(|item| async move {
                job.item(item).await.map_err(|error| named(error, item, metadata))
            })
            .collect();
    stream::iter(checks).buffered(options.parallelism.max(1)).try_collect().await
}

/// Adds the tensor and its file to an error, as the reader does.
pub(crate) fn named(
    error: CheckpointError,
    item: &Placed,
    metadata: &CheckpointMetadata,
) -> CheckpointError {
    let fqn = &item.fqn;
    let file = metadata.file(item.placement.file).map_or("", Key::as_str);
    match error {
        CheckpointError::Format(error) => {
            let at = error.byte_offset().unwrap_or(item.placement.byte_offset);
            FormatError::new(error.what(), error.problem()).of_item(fqn).in_file(file, at).into()
        }
        CheckpointError::Storage(error)
            if matches!(error.kind(), StorageErrorKind::Truncated | StorageErrorKind::NotFound) =>
        {
            FormatError::new("checkpoint", format!("{fqn:?}: its bytes are missing"))
                .in_file(file, item.placement.byte_offset)
                .with_source(error)
                .into()
        }
        other => other,
    }
}
