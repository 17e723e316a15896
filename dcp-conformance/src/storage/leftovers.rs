//! Clauses on leftovers of uploads that never ended.

use std::time::Duration;

use dcp_core::StorageErrorKind;
use dcp_core::storage::{FolderEntry, LeftoverAction, PutMode};
use futures_util::TryStreamExt;

use super::subject::{Subject, expect_kind, in_pieces, pattern};
use crate::case::{Outcome, ensure};

super::clauses![leftovers_spare_objects_and_uploads, empty_folders_go_and_others_stay];

/// Older than any upload of the clause.
const AN_HOUR: Duration = Duration::from_secs(3600);

async fn leftovers_spare_objects_and_uploads(subject: Subject) -> Outcome {
    let part_len = subject.part_len(5000);
    let bytes = pattern(1, 2 * part_len + 100);
    let object = subject.create("folder/object", &pattern(2, 300)).await?;
    let key = subject.key("folder/uploaded")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    for part in in_pieces(&bytes, part_len).pieces() {
        for folder in [Some(&subject.folder), Some(&subject.key("folder")?)] {
            let removed = subject.storage.leftovers(folder, AN_HOUR, LeftoverAction::Remove).await;
            if removed.is_err() {
                expect_kind(removed, StorageErrorKind::Unsupported, "leftovers")?;
            }
        }
        upload.put_part(part.clone().into()).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await?;
    subject.holds(&object, &pattern(2, 300)).await
}

async fn empty_folders_go_and_others_stay(subject: Subject) -> Outcome {
    let gone = subject.create("top/gone/below/object", &pattern(1, 10)).await?;
    let kept = subject.create("top/kept/object", &pattern(2, 10)).await?;
    subject.storage.delete(&[gone]).await?;
    for _ in 0..2 {
        subject.storage.remove_empty_folders(&subject.key("top")?).await?;
        let mut entries = subject.storage.list_folder(Some(&subject.key("top")?));
        let mut folders = Vec::new();
        while let Some(entry) = entries.try_next().await? {
            match entry {
                FolderEntry::Folder(folder) => folders.push(folder.file_name().to_owned()),
                other => ensure!(false, "{other:?} is listed"),
            }
        }
        ensure!(folders == ["kept"], "the folders are {folders:?}");
    }
    subject.holds(&kept, &pattern(2, 10)).await?;
    // A folder that is not there is as good as removed.
    subject.storage.remove_empty_folders(&subject.key("top/gone")?).await?;
    Ok(())
}
