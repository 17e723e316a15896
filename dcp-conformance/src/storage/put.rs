//! Clauses on whole objects: put, stat, delete.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{HostMemory, Payload, StorageErrorKind};
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};
use tokio::sync::Barrier;

use super::subject::{Subject, expect_kind, in_pieces, pattern, same_bytes};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    stat_tells_the_size_of_an_object,
    stat_of_a_missing_object_is_not_found,
    a_folder_is_no_object,
    put_writes_every_piece_in_order,
    put_of_no_bytes_makes_an_empty_object,
    put_of_more_than_8_mib_is_whole,
    put_create_of_a_taken_key_is_already_exists,
    of_several_concurrent_creators_exactly_one_succeeds if AtomicCreate,
    put_overwrite_replaces_an_object,
    put_overwrite_creates_a_missing_object,
    a_reader_sees_the_old_bytes_or_the_new_ones,
    a_dropped_put_leaves_no_part_under_its_key,
    objects_are_written_concurrently,
    keys_may_hold_spaces_signs_and_letters,
    keys_may_nest_deeply,
    keys_may_have_long_segments,
    delete_removes_an_object,
    delete_of_a_missing_object_is_no_error,
    delete_of_a_folder_spares_what_is_in_it,
    delete_of_many_objects_removes_each,
    delete_of_no_objects_is_no_error,
    put_of_more_than_the_limit_is_too_large,
    the_memory_of_a_payload_is_released_when_the_write_ends,
    a_deleted_key_is_free_again,
    errors_name_the_key_and_what_was_done,
];

const MIB: usize = 1 << 20;

async fn stat_tells_the_size_of_an_object(subject: Subject) -> Outcome {
    for len in [1, 1000, MIB + 1] {
        let key = subject.create(&len.to_string(), &pattern(1, len)).await?;
        let meta = subject.storage.stat(&key).await?;
        ensure!(meta.byte_len == len as u64, "{len} bytes are reported as {}", meta.byte_len);
        ensure!(meta.key == key, "{key:?} is reported as {:?}", meta.key);
    }
    Ok(())
}

async fn stat_of_a_missing_object_is_not_found(subject: Subject) -> Outcome {
    let missing = StorageErrorKind::NotFound;
    expect_kind(subject.storage.stat(&subject.key("absent")?).await, missing, "an absent object")?;
    let key = subject.key("no/such/folder")?;
    expect_kind(subject.storage.stat(&key).await, missing, "an object in an absent folder")?;
    subject.create("object", &pattern(1, 5)).await?;
    let key = subject.key("object/below")?;
    expect_kind(subject.storage.stat(&key).await, missing, "a key below an object")
}

async fn a_folder_is_no_object(subject: Subject) -> Outcome {
    subject.create("folder/object", &pattern(1, 10)).await?;
    let folder = subject.key("folder")?;
    let missing = StorageErrorKind::NotFound;
    expect_kind(subject.storage.stat(&folder).await, missing, "stat of a folder")?;
    expect_kind(subject.read(&folder, &[(0, 1)]).await, missing, "read of a folder")?;
    expect_kind(subject.read(&folder, &[]).await, missing, "read of no bytes of a folder")
}

async fn put_writes_every_piece_in_order(subject: Subject) -> Outcome {
    let bytes = pattern(2, 100_000);
    for piece_len in [7, 4096, 99_999, 100_000] {
        let key = subject.key(&piece_len.to_string())?;
        let payload = in_pieces(&bytes, piece_len);
        subject.storage.put(&key, payload, PutMode::Create).await?;
        subject.holds(&key, &bytes).await?;
    }
    Ok(())
}

async fn put_of_no_bytes_makes_an_empty_object(subject: Subject) -> Outcome {
    for (name, mode) in [("created", PutMode::Create), ("overwritten", PutMode::Overwrite)] {
        let key = subject.key(name)?;
        subject.storage.put(&key, Payload::default(), mode).await?;
        subject.holds(&key, &Bytes::new()).await?;
        let listed = subject.list(None).await?;
        ensure!(listed.iter().any(|meta| meta.key == key), "an empty object is not listed");
    }
    Ok(())
}

async fn put_of_more_than_8_mib_is_whole(subject: Subject) -> Outcome {
    let bytes = pattern(3, 9 * MIB + 13);
    let key = subject.key("large")?;
    subject.storage.put(&key, in_pieces(&bytes, 3 * MIB + 1), PutMode::Create).await?;
    subject.holds(&key, &bytes).await
}

async fn put_create_of_a_taken_key_is_already_exists(subject: Subject) -> Outcome {
    let old = pattern(4, 500);
    let key = subject.create("object", &old).await?;
    for new in [Bytes::new(), pattern(5, 500), pattern(5, 5000)] {
        let outcome = subject.storage.put(&key, new.into(), PutMode::Create).await;
        expect_kind(outcome, StorageErrorKind::AlreadyExists, "create of a taken key")?;
        subject.holds(&key, &old).await?;
    }
    Ok(())
}

async fn of_several_concurrent_creators_exactly_one_succeeds(subject: Subject) -> Outcome {
    const CREATORS: usize = 16;
    for round in 0..8 {
        let key = subject.key(&format!("round {round}"))?;
        // No creator starts before all are there: a slow machine would run them one by one.
        let start = Arc::new(Barrier::new(CREATORS));
        let creators = (0..CREATORS as u64).map(|creator| {
            let (storage, key) = (Arc::clone(&subject.storage), key.clone());
            let (bytes, start) = (pattern(creator, 10_000), Arc::clone(&start));
            runtime().spawn(async move {
                start.wait().await;
                storage.put(&key, bytes.into(), PutMode::Create).await
            })
        });
        let mut winners = Vec::new();
        for (creator, outcome) in (0..).zip(join_all(creators.collect::<Vec<_>>()).await) {
            match outcome? {
                Ok(_) => winners.push(creator),
                lost => expect_kind(lost, StorageErrorKind::AlreadyExists, "a lost race")?,
            }
        }
        let [winner] = winners[..] else {
            return Err(Failure::new(format!(
                "of {CREATORS} creators {} report that they won: {winners:?}",
                winners.len()
            )));
        };
        subject.holds(&key, &pattern(winner, 10_000)).await?;
    }
    Ok(())
}

async fn put_overwrite_replaces_an_object(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(6, 5000)).await?;
    for len in [9000, 10, 0, 5000] {
        let new = pattern(7, len);
        subject.storage.put(&key, new.clone().into(), PutMode::Overwrite).await?;
        subject.holds(&key, &new).await?;
    }
    Ok(())
}

async fn put_overwrite_creates_a_missing_object(subject: Subject) -> Outcome {
    let key = subject.key("new folder/object")?;
    let bytes = pattern(8, 50);
    subject.storage.put(&key, bytes.clone().into(), PutMode::Overwrite).await?;
    subject.holds(&key, &bytes).await
}

async fn a_reader_sees_the_old_bytes_or_the_new_ones(subject: Subject) -> Outcome {
    const LEN: usize = 300_000;
    const VERSIONS: u64 = 24;
    let versions = (0..VERSIONS).map(|version| pattern(version, LEN)).collect::<Vec<_>>();
    let versions = Arc::new(versions);
    let key = subject.create("object", &versions[0]).await?;
    let done = Arc::new(AtomicBool::new(false));
    let readers = (0..3).map(|_| {
        let (subject, key) = (subject.clone(), key.clone());
        let (versions, done) = (Arc::clone(&versions), Arc::clone(&done));
        runtime().spawn(async move {
            let mut oldest = 0;
            loop {
                let last_look = done.load(Ordering::SeqCst);
                let got = match subject.read(&key, &[(0, LEN)]).await {
                    // A storage that reads it in pieces may find another version after the first piece.
                    Err(error) if error.kind() == StorageErrorKind::Changed && !last_look => {
                        continue;
                    }
                    got => got?,
                };
                let got = got.first().ok_or_else(|| Failure::new("no buffer came back"))?;
                let Some(seen) = versions.iter().position(|version| got[..] == version[..]) else {
                    return Err(Failure::new("a reader saw a mixture of old and new bytes"));
                };
                ensure!(seen >= oldest, "a reader saw version {seen} after version {oldest}");
                oldest = seen;
                if last_look {
                    return Ok(seen);
                }
                // With a storage that never waits, the reader does not wait either.
                tokio::task::yield_now().await;
            }
        })
    });
    let readers = readers.collect::<Vec<_>>();
    let mut written = Ok(());
    for bytes in versions.iter() {
        let payload = in_pieces(bytes, 30_001);
        let put = subject.storage.put(&key, payload, PutMode::Overwrite).await;
        written = written.and(put.map(drop));
    }
    done.store(true, Ordering::SeqCst);
    let seen = try_join_all(readers).await?;
    written?;
    for seen in seen {
        let seen = seen?;
        ensure!(seen + 1 == versions.len(), "after the last put a reader saw version {seen}");
    }
    Ok(())
}

async fn a_dropped_put_leaves_no_part_under_its_key(subject: Subject) -> Outcome {
    let old = pattern(9, 100_000);
    let new = pattern(10, 2 * MIB);
    let patience = [0, 1, 2, 5, 20, 100, 1000];
    for (number, polls) in patience.into_iter().enumerate() {
        let fresh = subject.key(&format!("fresh {number}"))?;
        let taken = subject.create(&format!("taken {number}"), &old).await?;
        for (key, mode) in [(&fresh, PutMode::Create), (&taken, PutMode::Overwrite)] {
            let mut put = subject.storage.put(key, in_pieces(&new, 65_536), mode);
            for _ in 0..polls {
                if let Some(outcome) = (&mut put).now_or_never() {
                    outcome?;
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        // Work that was started before the drop may continue meanwhile.
        for _ in 0..20 {
            if subject.storage.contains(&fresh).await? {
                subject.holds(&fresh, &new).await?;
            }
            let got = subject.storage.read_range(&taken, 0..100_000).await?;
            ensure!(got == old || got == new[..100_000], "there is a mixture of old and new bytes");
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}

async fn objects_are_written_concurrently(subject: Subject) -> Outcome {
    let writers = (0..32).map(|writer| {
        let subject = subject.clone();
        runtime().spawn(async move {
            let bytes = pattern(writer, 20_000 + writer as usize);
            let key = subject.create(&format!("{}/{writer}", writer % 3), &bytes).await?;
            subject.holds(&key, &bytes).await?;
            Ok::<_, Failure>((key, bytes))
        })
    });
    for written in try_join_all(writers.collect::<Vec<_>>()).await? {
        let (key, bytes) = written?;
        subject.holds(&key, &bytes).await?;
    }
    Ok(())
}

async fn keys_may_hold_spaces_signs_and_letters(subject: Subject) -> Outcome {
    let names = [
        "a b%20c#d+e~é",
        ".metadata",
        "...",
        "日本語/ключ",
        "__0_0.distcp",
        "q?x=1&y=2;z",
        "(a)[b]{c}<d>|e",
        "'\"`$!*@^,:=",
        "-rf",
        "%2e%2e",
        "trailing.",
    ];
    for (seed, name) in (0..).zip(names) {
        let bytes = pattern(seed, 100);
        let key = subject.create(name, &bytes).await?;
        subject.holds(&key, &bytes).await?;
    }
    let listed = subject.list(None).await?;
    for name in names {
        let key = subject.key(name)?;
        ensure!(listed.iter().any(|meta| meta.key == key), "{key:?} is not listed: {listed:?}");
    }
    ensure!(listed.len() == names.len(), "more is listed than there is: {listed:?}");
    for name in names {
        let key = subject.key(name)?;
        subject.storage.delete(std::slice::from_ref(&key)).await?;
        subject.is_absent(&key).await?;
    }
    Ok(())
}

async fn keys_may_nest_deeply(subject: Subject) -> Outcome {
    let name = (0..40).map(|level| format!("level {level}")).collect::<Vec<_>>().join("/");
    let bytes = pattern(11, 100);
    let key = subject.create(&name, &bytes).await?;
    subject.holds(&key, &bytes).await?;
    let listed = subject.list(Some("level 0/level 1")).await?;
    ensure!(listed.len() == 1 && listed[0].key == key, "it is listed as {listed:?}");
    Ok(())
}

async fn keys_may_have_long_segments(subject: Subject) -> Outcome {
    let long = "x".repeat(200);
    for name in [long.clone(), format!("{long}/{long}")] {
        let bytes = pattern(12, 100);
        let key = subject.key(&format!("{} {name}", name.len()))?;
        subject.storage.put(&key, bytes.clone().into(), PutMode::Create).await?;
        subject.holds(&key, &bytes).await?;
        let new = pattern(13, 50);
        subject.storage.put(&key, new.clone().into(), PutMode::Overwrite).await?;
        subject.holds(&key, &new).await?;
    }
    Ok(())
}

async fn delete_removes_an_object(subject: Subject) -> Outcome {
    let kept = subject.create("folder/kept", &pattern(14, 10)).await?;
    let key = subject.create("folder/deleted", &pattern(14, 20)).await?;
    subject.storage.delete(std::slice::from_ref(&key)).await?;
    subject.is_absent(&key).await?;
    subject.holds(&kept, &pattern(14, 10)).await
}

async fn delete_of_a_missing_object_is_no_error(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(15, 10)).await?;
    subject.storage.delete(std::slice::from_ref(&key)).await?;
    subject.storage.delete(std::slice::from_ref(&key)).await?;
    subject.storage.delete(&[subject.key("no/such/folder")?]).await?;
    Ok(())
}

async fn delete_of_a_folder_spares_what_is_in_it(subject: Subject) -> Outcome {
    let bytes = pattern(16, 10);
    let key = subject.create("folder/object", &bytes).await?;
    subject.storage.delete(&[subject.key("folder")?]).await?;
    subject.holds(&key, &bytes).await
}

async fn delete_of_many_objects_removes_each(subject: Subject) -> Outcome {
    const KEYS: usize = 2500;
    let kept = subject.create("0/kept", &pattern(18, 10)).await?;
    let mut keys = Vec::new();
    for number in 0..KEYS {
        let name = format!("{}/object {number}", number % 3);
        // Most of them do not exist: more keys than a storage removes with one request. The first and
        // the last of requests do.
        let is_edge = number % 1000 < 2 || number % 1000 > 997 || number + 1 == KEYS;
        if is_edge || number % 100 == 37 {
            subject.create(&name, &pattern(18, number % 7)).await?;
        }
        keys.push(subject.key(&name)?);
    }
    subject.storage.delete(&keys).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.len() == 1, "these are left: {listed:?}");
    subject.holds(&kept, &pattern(18, 10)).await?;
    subject.storage.delete(&keys).await?;
    subject.holds(&kept, &pattern(18, 10)).await
}

async fn delete_of_no_objects_is_no_error(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(19, 10)).await?;
    subject.storage.delete(&[]).await?;
    subject.holds(&key, &pattern(19, 10)).await
}

async fn put_of_more_than_the_limit_is_too_large(subject: Subject) -> Outcome {
    let limits = subject.storage.capabilities().write_limits;
    let longest = limits.put_bytes_max.min(limits.object_bytes_max);
    // A test with more memory is too expensive.
    let Some(len) = usize::try_from(longest).ok().filter(|len| *len <= 64 * MIB) else {
        return Ok(());
    };
    let key = subject.key("object")?;
    let outcome = subject.storage.put(&key, pattern(20, len + 1).into(), PutMode::Create).await;
    expect_kind(outcome, StorageErrorKind::TooLarge, "put of more than the limit")?;
    subject.is_absent(&key).await?;
    let bytes = pattern(20, len);
    subject.storage.put(&key, bytes.clone().into(), PutMode::Create).await?;
    subject.holds(&key, &bytes).await
}

async fn the_memory_of_a_payload_is_released_when_the_write_ends(subject: Subject) -> Outcome {
    let memory = HostMemory::zeroed(100_000);
    for (name, mode) in [("created", PutMode::Create), ("overwritten", PutMode::Overwrite)] {
        let key = subject.key(name)?;
        let payload = Payload::from(memory.read()?);
        subject.storage.put(&key, payload, mode.clone()).await?;
        ensure!(memory.lend(0..1).is_ok(), "a storage keeps the memory of a written payload");
        let payload = Payload::from(memory.read()?);
        if mode == PutMode::Create {
            let again = subject.storage.put(&key, payload, mode).await;
            expect_kind(again, StorageErrorKind::AlreadyExists, "create of a taken key")?;
        } else {
            drop(subject.storage.put(&key, payload, mode));
        }
        ensure!(memory.lend(0..1).is_ok(), "a storage keeps the memory of a failed write");
    }
    Ok(())
}

async fn a_deleted_key_is_free_again(subject: Subject) -> Outcome {
    for seed in 0..4 {
        let bytes = pattern(seed, 10 * seed as usize);
        let key = subject.create("object", &bytes).await?;
        subject.holds(&key, &bytes).await?;
        subject.storage.delete(std::slice::from_ref(&key)).await?;
    }
    Ok(())
}

async fn errors_name_the_key_and_what_was_done(subject: Subject) -> Outcome {
    let absent = subject.key("absent")?;
    let taken = subject.create("taken", &pattern(17, 10)).await?;
    let storage = &subject.storage;
    let again = storage.put(&taken, Payload::from("new"), PutMode::Create).await;
    let outcomes = [
        (StorageOp::Stat, &absent, storage.stat(&absent).await.err()),
        (StorageOp::Read, &absent, subject.read(&absent, &[(0, 1)]).await.err()),
        (StorageOp::Read, &taken, subject.read(&taken, &[(5, 10)]).await.err()),
        (StorageOp::Put, &taken, again.err()),
    ];
    for (op, key, error) in outcomes {
        let error = error.ok_or_else(|| Failure::new(format!("{op} of {key:?} succeeded")))?;
        ensure!(error.key() == Some(key), "an error on {key:?} names {:?}", error.key());
        ensure!(error.op() == op, "an error of {op:?} names {:?}", error.op());
    }
    same_bytes(&subject.whole(&taken).await?, &pattern(17, 10))
}
