//! Clauses on listing.

use std::collections::BTreeMap;

use dcp_core::Key;
use dcp_core::storage::PutMode;
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;

use super::subject::{Subject, pattern};
use crate::case::{Failure, Outcome, ensure};

super::clauses![
    list_finds_all_objects_under_a_folder_with_their_sizes,
    list_takes_a_folder_by_whole_segments,
    list_of_a_folder_that_does_not_exist_is_empty,
    list_without_a_folder_finds_all_objects,
    list_finds_each_of_many_objects_once,
    list_leaves_out_objects_that_are_being_written,
    list_forgets_deleted_objects,
];

/// Fails unless exactly these objects are listed under the folder.
async fn lists(subject: &Subject, folder: Option<&str>, expected: &[(&str, u64)]) -> Outcome {
    let listed = subject.list(folder).await?;
    let got = listed.iter().map(|meta| (meta.key.clone(), meta.byte_len)).collect::<Vec<_>>();
    let mut expected = expected
        .iter()
        .map(|&(name, len)| Ok((subject.key(name)?, len)))
        .collect::<Result<Vec<(Key, u64)>, Failure>>()?;
    expected.sort();
    ensure!(got == expected, "under {folder:?} it lists {got:?}, there are {expected:?}");
    Ok(())
}

async fn fill(subject: &Subject, objects: &[(&str, u64)]) -> Outcome {
    for &(name, len) in objects {
        subject.create(name, &pattern(len, len as usize)).await?;
    }
    Ok(())
}

async fn list_finds_all_objects_under_a_folder_with_their_sizes(subject: Subject) -> Outcome {
    let objects = [("a", 0), ("b/c", 10), ("b/d/e", 2000), ("b/d/f", 1), (".hidden/g", 7)];
    fill(&subject, &objects).await?;
    lists(&subject, None, &objects).await?;
    lists(&subject, Some("b"), &objects[1..4]).await?;
    lists(&subject, Some("b/d"), &objects[2..4]).await
}

async fn list_takes_a_folder_by_whole_segments(subject: Subject) -> Outcome {
    fill(&subject, &[("step_1/a", 1), ("step_10/a", 2), ("step_1.tmp/a", 3)]).await?;
    lists(&subject, Some("step_1"), &[("step_1/a", 1)]).await?;
    lists(&subject, Some("step"), &[]).await?;
    lists(&subject, Some("step_10"), &[("step_10/a", 2)]).await
}

async fn list_of_a_folder_that_does_not_exist_is_empty(subject: Subject) -> Outcome {
    lists(&subject, Some("absent"), &[]).await?;
    lists(&subject, Some("no/such/folder"), &[]).await
}

async fn list_without_a_folder_finds_all_objects(subject: Subject) -> Outcome {
    let key = subject.create("folder/object", &pattern(1, 12)).await?;
    // Others may be at work, so a listed object may be gone by now, but not this one.
    let mut all = subject.storage.list(None);
    while let Some(meta) = all.try_next().await? {
        if meta.key == key {
            ensure!(meta.byte_len == 12, "12 bytes are told as {}", meta.byte_len);
            return Ok(());
        }
    }
    Err(Failure::new(format!("{key:?} is not listed")))
}

async fn list_finds_each_of_many_objects_once(subject: Subject) -> Outcome {
    const OBJECTS: usize = 300;
    let names = (0..OBJECTS).map(|i| format!("{}/object {i}", i % 5)).collect::<Vec<_>>();
    for names in names.chunks(30) {
        try_join_all(
            names.iter().map(async |name| subject.create(name, &pattern(0, name.len())).await),
        )
        .await?;
    }
    let mut times = BTreeMap::new();
    for meta in subject.list(None).await? {
        *times.entry(meta.key).or_insert(0) += 1;
    }
    ensure!(times.len() == OBJECTS, "{} of {OBJECTS} objects are listed", times.len());
    for (key, times) in times {
        ensure!(times == 1, "{key:?} is listed {times} times");
    }
    Ok(())
}

async fn list_leaves_out_objects_that_are_being_written(subject: Subject) -> Outcome {
    fill(&subject, &[("folder/old", 5)]).await?;
    let mut upload =
        subject.storage.start_upload(&subject.key("folder/new")?, PutMode::Create).await?;
    lists(&subject, None, &[("folder/old", 5)]).await?;
    upload.put_part(pattern(2, 100_000).into()).await?;
    lists(&subject, Some("folder"), &[("folder/old", 5)]).await?;
    upload.complete().await?;
    lists(&subject, None, &[("folder/old", 5), ("folder/new", 100_000)]).await
}

async fn list_forgets_deleted_objects(subject: Subject) -> Outcome {
    fill(&subject, &[("a/b", 1), ("a/c", 2), ("d", 3)]).await?;
    subject.storage.delete(&subject.key("a/b")?).await?;
    lists(&subject, None, &[("a/c", 2), ("d", 3)]).await?;
    subject.storage.delete(&subject.key("a/c")?).await?;
    lists(&subject, Some("a"), &[]).await
}
