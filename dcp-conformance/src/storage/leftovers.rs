//! Clauses on leftovers of uploads that never ended.

use std::time::Duration;

use dcp_core::StorageErrorKind;
use dcp_core::storage::PutMode;

use super::subject::{Subject, expect_kind, in_pieces, pattern};
use crate::case::Outcome;

super::clauses![remove_leftovers_spares_objects_and_uploads];

/// Older than any upload of the clause.
const AN_HOUR: Duration = Duration::from_secs(3600);

async fn remove_leftovers_spares_objects_and_uploads(subject: Subject) -> Outcome {
    let part_len = subject.part_len(5000);
    let bytes = pattern(1, 2 * part_len + 100);
    let object = subject.create("folder/object", &pattern(2, 300)).await?;
    let key = subject.key("folder/uploaded")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    for part in in_pieces(&bytes, part_len).pieces() {
        for folder in [Some(&subject.folder), Some(&subject.key("folder")?)] {
            let removed = subject.storage.remove_leftovers(folder, AN_HOUR).await;
            if removed.is_err() {
                expect_kind(removed, StorageErrorKind::Unsupported, "remove_leftovers")?;
            }
        }
        upload.put_part(part.clone().into()).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await?;
    subject.holds(&object, &pattern(2, 300)).await
}
