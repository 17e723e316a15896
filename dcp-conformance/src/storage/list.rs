//! Clauses on listing.

use std::collections::BTreeMap;

use dcp_core::Key;
use dcp_core::storage::PutMode;
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;

use super::subject::{Random, Subject, pattern};
use crate::case::{Failure, Outcome, ensure};

super::clauses![
    list_finds_all_objects_under_a_folder_with_their_sizes,
    list_takes_a_folder_by_whole_segments,
    list_of_a_folder_that_does_not_exist_is_empty,
    list_without_a_folder_finds_all_objects,
    list_finds_each_of_many_objects_once,
    list_leaves_out_objects_that_are_being_written,
    list_forgets_deleted_objects,
    list_folder_finds_objects_and_folders,
    list_folder_takes_a_folder_by_whole_segments,
    list_folder_agrees_with_list,
    list_folder_leaves_out_objects_that_are_being_written,
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
            ensure!(meta.byte_len == 12, "12 bytes are reported as {}", meta.byte_len);
            return Ok(());
        }
    }
    Err(Failure::new(format!("{key:?} is not listed")))
}

async fn list_finds_each_of_many_objects_once(subject: Subject) -> Outcome {
    // More than any store lists with one answer, of which 1000 is the most common number.
    const OBJECTS: usize = 1200;
    let place = |i| if i < 100 { i % 5 } else { 5 };
    let names = (0..OBJECTS).map(|i| format!("{}/object {i}", place(i))).collect::<Vec<_>>();
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
    let entries = subject.entries(Some("5")).await?;
    let mut expected = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("5/")) {
        expected.push((subject.key(name)?, Some(name.len() as u64)));
    }
    expected.sort();
    ensure!(
        entries == expected,
        "list_folder finds {} entries of {} in a folder",
        entries.len(),
        expected.len()
    );
    Ok(())
}

async fn list_leaves_out_objects_that_are_being_written(subject: Subject) -> Outcome {
    fill(&subject, &[("folder/old", 5)]).await?;
    let len = subject.part_len(100_000);
    let mut upload = subject.start(&subject.key("folder/new")?, PutMode::Create, len).await?;
    lists(&subject, None, &[("folder/old", 5)]).await?;
    upload.put_part(pattern(2, len).into()).await?;
    lists(&subject, Some("folder"), &[("folder/old", 5)]).await?;
    upload.complete().await?;
    lists(&subject, None, &[("folder/old", 5), ("folder/new", len as u64)]).await
}

async fn list_forgets_deleted_objects(subject: Subject) -> Outcome {
    fill(&subject, &[("a/b", 1), ("a/c", 2), ("d", 3)]).await?;
    subject.storage.delete(&[subject.key("a/b")?]).await?;
    lists(&subject, None, &[("a/c", 2), ("d", 3)]).await?;
    subject.storage.delete(&[subject.key("a/c")?]).await?;
    lists(&subject, Some("a"), &[]).await
}

/// Fails unless the folder has exactly these entries; those without a length are folders.
async fn has_entries(
    subject: &Subject,
    folder: Option<&str>,
    expected: &[(&str, Option<u64>)],
) -> Outcome {
    let got = subject.entries(folder).await?;
    let mut expected = expected
        .iter()
        .map(|&(name, len)| Ok((subject.key(name)?, len)))
        .collect::<Result<Vec<(Key, Option<u64>)>, Failure>>()?;
    expected.sort();
    ensure!(got == expected, "{folder:?} has the entries {got:?}, not {expected:?}");
    Ok(())
}

async fn list_folder_finds_objects_and_folders(subject: Subject) -> Outcome {
    let objects = [("a", 0), ("b/c", 10), ("b/d/e", 2000), ("b/d/f", 1), (".hidden/g", 7)];
    fill(&subject, &objects).await?;
    let all = [("a", Some(0)), ("b", None), (".hidden", None)];
    has_entries(&subject, None, &all).await?;
    has_entries(&subject, Some("b"), &[("b/c", Some(10)), ("b/d", None)]).await?;
    has_entries(&subject, Some("b/d"), &[("b/d/e", Some(2000)), ("b/d/f", Some(1))]).await?;
    has_entries(&subject, Some("absent"), &[]).await?;
    has_entries(&subject, Some("no/such/folder"), &[]).await
}

async fn list_folder_takes_a_folder_by_whole_segments(subject: Subject) -> Outcome {
    fill(&subject, &[("step_1/a", 1), ("step_10/a", 2), ("step_1.tmp/b/c", 3)]).await?;
    has_entries(&subject, Some("step_1"), &[("step_1/a", Some(1))]).await?;
    has_entries(&subject, Some("step"), &[]).await?;
    has_entries(&subject, Some("step_1.tmp"), &[("step_1.tmp/b", None)]).await
}

/// Of any objects, the entries of each folder are what `list` finds below it.
async fn list_folder_agrees_with_list(subject: Subject) -> Outcome {
    let mut random = Random::new(7);
    let names = ["a", "a.b", "a-b", "a b", "A", "é", "0", "..."];
    for tree in 0..6 {
        let mut objects: BTreeMap<String, u64> = BTreeMap::new();
        for _ in 0..random.below(25) {
            let depth = 1 + random.below(4);
            let name = (0..depth).map(|_| names[random.below(names.len() as u64) as usize]);
            let name = name.collect::<Vec<_>>().join("/");
            // A file system has no object and folder of one name.
            let clashes = |other: &String| {
                let (short, long) =
                    if other.len() < name.len() { (other, &name) } else { (&name, other) };
                long.strip_prefix(short.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            if !objects.keys().any(clashes) {
                objects.insert(name, random.below(50));
            }
        }
        let mut folders = BTreeMap::from([(format!("{tree}"), BTreeMap::new())]);
        for (name, len) in &objects {
            let path = format!("{tree}/{name}");
            subject.create(&path, &pattern(*len, *len as usize)).await?;
            let (mut below, mut entry) = (path.as_str(), Some(*len));
            while let Some((above, _)) = below.rsplit_once('/') {
                folders.entry(above.to_owned()).or_default().insert(below.to_owned(), entry);
                (below, entry) = (above, None);
            }
        }
        for (folder, entries) in folders {
            let entries = entries.iter().map(|(name, len)| (name.as_str(), *len));
            has_entries(&subject, Some(&folder), &entries.collect::<Vec<_>>()).await?;
        }
    }
    Ok(())
}

async fn list_folder_leaves_out_objects_that_are_being_written(subject: Subject) -> Outcome {
    fill(&subject, &[("folder/old", 5)]).await?;
    let len = subject.part_len(10_000);
    let mut upload = subject.start(&subject.key("folder/new")?, PutMode::Create, len).await?;
    upload.put_part(pattern(2, len).into()).await?;
    has_entries(&subject, Some("folder"), &[("folder/old", Some(5))]).await?;
    upload.complete().await?;
    let both = [("folder/old", Some(5)), ("folder/new", Some(len as u64))];
    has_entries(&subject, Some("folder"), &both).await
}
