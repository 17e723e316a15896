//! Clauses on versions, and on writes that depend on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use dcp_core::storage::{
    FolderEntry, ObjectMeta, PutMode, ReadInto, ReadRequest, UploadOptions, Version,
};
use dcp_core::{Buffer, Key, StorageErrorKind};
use futures_util::TryStreamExt;
use futures_util::future::join_all;
use tokio::sync::Barrier;

use super::subject::{Subject, expect_kind, in_pieces, pattern};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    writes_return_the_length_and_version_of_the_object,
    every_overwrite_makes_another_version if Versions,
    reads_and_listings_return_the_version if Versions,
    a_read_of_another_version_is_changed if Versions,
    all_ranges_of_a_read_have_one_version if Versions,
    update_replaces_the_version_that_was_read if ConditionalPut,
    update_of_another_version_is_conflict if ConditionalPut,
    of_several_concurrent_updates_exactly_one_succeeds if ConditionalPut,
    an_upload_updates_the_version_that_was_read if ConditionalPut,
    update_is_refused_where_it_is_not_supported,
];

/// Fails unless the object has these facts.
async fn is(subject: &Subject, key: &Key, meta: &ObjectMeta, byte_len: u64) -> Outcome {
    let found = subject.storage.stat(key).await?;
    ensure!(meta.key == *key, "{key:?} was written, and {:?} returned", meta.key);
    ensure!(meta.byte_len == byte_len, "{byte_len} bytes are returned as {}", meta.byte_len);
    ensure!(found.byte_len == byte_len, "{byte_len} bytes are reported as {}", found.byte_len);
    if subject.storage.capabilities().versions {
        ensure!(meta.version.is_some(), "a write of {key:?} returned no version");
        let (written, found) = (&meta.version, &found.version);
        ensure!(written == found, "a write returned version {written:?}, stat {found:?}");
    }
    Ok(())
}

async fn writes_return_the_length_and_version_of_the_object(subject: Subject) -> Outcome {
    let capabilities = subject.storage.capabilities();
    for len in [0, 1000, 3000] {
        let key = subject.key(&format!("put {len}"))?;
        for mode in [PutMode::Create, PutMode::Overwrite] {
            let meta = subject.storage.put(&key, pattern(1, len).into(), mode).await?;
            is(&subject, &key, &meta, len as u64).await?;
        }
        let key = subject.key(&format!("uploaded {len}"))?;
        for mode in [PutMode::Create, PutMode::Overwrite] {
            let part_len = subject.part_len(1000);
            let upload = subject.send(&key, mode, &pattern(2, len), part_len).await?;
            is(&subject, &key, &upload.complete().await?, len as u64).await?;
        }
        if capabilities.claims {
            let key = subject.key(&format!("claimed {len}"))?;
            let claim = subject.storage.claim(&key).await?;
            for seed in [3, 4] {
                let meta = claim.replace(pattern(seed, len).into()).await?;
                is(&subject, &key, &meta, len as u64).await?;
            }
        }
    }
    Ok(())
}

fn version(meta: ObjectMeta) -> Result<Version, Failure> {
    let key = meta.key;
    meta.version.ok_or_else(|| Failure::new(format!("{key:?} has no version")))
}

async fn every_overwrite_makes_another_version(subject: Subject) -> Outcome {
    let bytes = pattern(5, 2000);
    let key = subject.create("object", &bytes).await?;
    let mut last = version(subject.storage.stat(&key).await?)?;
    for seed in 0..10 {
        let bytes = pattern(seed, 2000);
        let put = subject.storage.put(&key, bytes.into(), PutMode::Overwrite).await?;
        let next = version(put)?;
        ensure!(next != last, "other bytes have version {next:?} as well");
        last = next;
    }
    Ok(())
}

/// A request for ranges, each an offset and a length.
fn request(ranges: &[(u64, usize)], if_version: Option<Version>) -> ReadRequest {
    let ranges = ranges
        .iter()
        .map(|&(byte_offset, len)| ReadInto { byte_offset, buffer: Buffer::zeroed(len) });
    ReadRequest::new(ranges.collect()).with_if_version(if_version)
}

async fn reads_and_listings_return_the_version(subject: Subject) -> Outcome {
    let storage = &subject.storage;
    let key = subject.create("object", &pattern(6, 3000)).await?;
    subject.create("folder/object", &pattern(7, 10)).await?;
    let expected = storage.stat(&key).await?.version;
    ensure!(expected.is_some(), "stat returns no version");
    let mut found = vec![("read_whole", storage.read_whole(&key, 3000).await?.meta.version)];
    for ranges in [&[][..], &[(10, 0)], &[(0, 3000)], &[(2000, 10), (0, 10)]] {
        found.push(("read", storage.read(&key, request(ranges, None)).await?.version));
    }
    let listed = subject.list(None).await?;
    let listed = listed.into_iter().find(|meta| meta.key == key).and_then(|meta| meta.version);
    found.push(("list", listed));
    let entries = storage.list_folder(Some(&subject.folder)).try_collect::<Vec<_>>().await?;
    let entry = entries.into_iter().find_map(|entry| match entry {
        FolderEntry::Object(meta) if meta.key == key => Some(meta.version),
        _ => None,
    });
    found.push(("list_folder", entry.flatten()));
    for (what, version) in found {
        ensure!(version == expected, "{what} returns version {version:?}, stat {expected:?}");
    }
    Ok(())
}

async fn a_read_of_another_version_is_changed(subject: Subject) -> Outcome {
    let storage = &subject.storage;
    let (old, new) = (pattern(8, 5000), pattern(9, 5000));
    let key = subject.create("object", &old).await?;
    let first = Some(version(storage.stat(&key).await?)?);
    let ranges = [(0, 100), (4000, 1000)];
    let outcome = storage.read(&key, request(&ranges, first.clone())).await?;
    ensure!(outcome.buffers[1][..] == old[4000..], "the bytes of the version are wrong");
    let second = storage.put(&key, new.clone().into(), PutMode::Overwrite).await?.version;
    for ranges in [&ranges[..], &[(0, 5000)], &[(4999, 1)]] {
        let stale = storage.read(&key, request(ranges, first.clone())).await;
        expect_kind(stale, StorageErrorKind::Changed, "a read of a stale version")?;
    }
    let outcome = storage.read(&key, request(&ranges, second)).await?;
    ensure!(outcome.buffers[1][..] == new[4000..], "the bytes of the new version are wrong");
    let made_up = request(&ranges, Some(Version::new("never-there")));
    let outcome = storage.read(&key, made_up).await;
    expect_kind(outcome, StorageErrorKind::Changed, "a read of a version that never was")?;
    storage.delete(std::slice::from_ref(&key)).await?;
    let gone = storage.read(&key, request(&ranges, first)).await;
    expect_kind(gone, StorageErrorKind::NotFound, "a read of a version of a deleted object")
}

async fn all_ranges_of_a_read_have_one_version(subject: Subject) -> Outcome {
    const LEN: usize = 200_000;
    let key = subject.create("object", &Bytes::from(vec![0; LEN])).await?;
    let done = Arc::new(AtomicBool::new(false));
    let ranges = [(0, 1000), (150_000, 1000), (60_000, 1), (199_000, 1000)];
    let readers = (0..4).map(|_| {
        let (subject, key, done) = (subject.clone(), key.clone(), Arc::clone(&done));
        runtime().spawn(async move {
            while !done.load(Ordering::SeqCst) {
                match subject.storage.read(&key, request(&ranges, None)).await {
                    Ok(outcome) => {
                        let mut bytes = outcome.buffers.iter().flat_map(|buffer| buffer.iter());
                        let first = bytes.next();
                        ensure!(bytes.all(|byte| Some(byte) == first), "two versions in one read");
                    }
                    // It may have been replaced between two requests.
                    changed => expect_kind(changed, StorageErrorKind::Changed, "a read")?,
                }
                tokio::task::yield_now().await;
            }
            Ok(())
        })
    });
    let readers = readers.collect::<Vec<_>>();
    let mut written = Ok(());
    for byte in 1..60 {
        let payload = Bytes::from(vec![byte; LEN]).into();
        let put = subject.storage.put(&key, payload, PutMode::Overwrite).await;
        written = written.and(put.map(drop));
        tokio::task::yield_now().await;
    }
    done.store(true, Ordering::SeqCst);
    for reader in join_all(readers).await {
        reader??;
    }
    Ok(written?)
}

async fn update_replaces_the_version_that_was_read(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(10, 500)).await?;
    let mut seen = subject.storage.stat(&key).await?;
    for len in [700, 0, 500] {
        let new = pattern(11, len);
        let mode = PutMode::Update(version(seen)?);
        seen = subject.storage.put(&key, new.clone().into(), mode).await?;
        is(&subject, &key, &seen, len as u64).await?;
        subject.holds(&key, &new).await?;
    }
    Ok(())
}

async fn update_of_another_version_is_conflict(subject: Subject) -> Outcome {
    let storage = &subject.storage;
    let key = subject.create("object", &pattern(12, 500)).await?;
    let first = version(storage.stat(&key).await?)?;
    let new = pattern(13, 600);
    storage.put(&key, new.clone().into(), PutMode::Overwrite).await?;
    let absent = subject.key("absent")?;
    let stale = PutMode::Update(first);
    for (key, what) in [(&key, "a stale version"), (&absent, "a version of a missing object")] {
        let late = storage.put(key, pattern(14, 10).into(), stale.clone()).await;
        expect_kind(late, StorageErrorKind::Conflict, what)?;
    }
    subject.holds(&key, &new).await?;
    subject.is_absent(&absent).await?;
    let seen = version(storage.stat(&key).await?)?;
    storage.delete(std::slice::from_ref(&key)).await?;
    let late = storage.put(&key, pattern(14, 10).into(), PutMode::Update(seen)).await;
    expect_kind(late, StorageErrorKind::Conflict, "a version of a deleted object")?;
    subject.is_absent(&key).await
}

async fn of_several_concurrent_updates_exactly_one_succeeds(subject: Subject) -> Outcome {
    const WRITERS: usize = 16;
    for round in 0..8 {
        let key = subject.create(&format!("round {round}"), &pattern(15, 100)).await?;
        let mode = PutMode::Update(version(subject.storage.stat(&key).await?)?);
        // No writer starts before all are there: a slow machine would run them one by one.
        let start = Arc::new(Barrier::new(WRITERS));
        let writers = (0..WRITERS as u64).map(|writer| {
            let (storage, key) = (Arc::clone(&subject.storage), key.clone());
            let (bytes, mode, start) = (pattern(writer, 5000), mode.clone(), Arc::clone(&start));
            runtime().spawn(async move {
                start.wait().await;
                storage.put(&key, bytes.into(), mode).await
            })
        });
        let mut winners = Vec::new();
        for (writer, outcome) in (0..).zip(join_all(writers.collect::<Vec<_>>()).await) {
            match outcome? {
                Ok(_) => winners.push(writer),
                lost => expect_kind(lost, StorageErrorKind::Conflict, "a lost race")?,
            }
        }
        let [winner] = winners[..] else {
            let message = format!("{} of {WRITERS} updates succeed: {winners:?}", winners.len());
            return Err(Failure::new(message));
        };
        subject.holds(&key, &pattern(winner, 5000)).await?;
    }
    Ok(())
}

async fn an_upload_updates_the_version_that_was_read(subject: Subject) -> Outcome {
    let old = pattern(16, 100);
    let key = subject.create("object", &old).await?;
    let part_len = subject.part_len(1000);
    let new = pattern(17, part_len + 10);
    let seen = PutMode::Update(version(subject.storage.stat(&key).await?)?);
    let first = subject.send(&key, seen.clone(), &new, part_len).await?;
    let second = subject.send(&key, seen, &pattern(18, part_len), part_len).await?;
    subject.holds(&key, &old).await?;
    first.complete().await?;
    let late = second.complete().await;
    expect_kind(late, StorageErrorKind::Conflict, "the later one of two uploads")?;
    subject.holds(&key, &new).await
}

async fn update_is_refused_where_it_is_not_supported(subject: Subject) -> Outcome {
    if subject.storage.capabilities().conditional_put {
        return Ok(());
    }
    let old = pattern(19, 100);
    let key = subject.create("object", &old).await?;
    let seen = subject.storage.stat(&key).await?.version;
    let mode = PutMode::Update(seen.unwrap_or_else(|| Version::new("any")));
    let put = subject.storage.put(&key, in_pieces(&pattern(20, 9), 4), mode.clone()).await;
    expect_kind(put, StorageErrorKind::Unsupported, "an update")?;
    let options = UploadOptions::new(mode, subject.part_len(1000) as u64);
    let outcome = match subject.storage.start_upload(&key, options).await {
        Ok(upload) => upload.complete().await,
        Err(error) => Err(error),
    };
    expect_kind(outcome, StorageErrorKind::Unsupported, "an upload that updates")?;
    subject.holds(&key, &old).await
}
