//! Clauses on objects that are written in parts.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{Key, Payload, StorageErrorKind};
use futures_util::FutureExt;
use futures_util::future::join_all;

use super::subject::{Subject, expect_kind, in_pieces, pattern};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    the_order_of_parts_is_the_order_of_bytes,
    an_upload_of_no_parts_makes_an_empty_object,
    an_upload_of_large_parts_is_whole,
    an_upload_appears_only_on_complete,
    an_aborted_upload_leaves_nothing,
    a_dropped_upload_leaves_no_object,
    an_upload_to_a_taken_key_is_already_exists,
    an_upload_to_a_key_taken_meanwhile_is_already_exists,
    an_overwriting_upload_replaces_the_object_when_it_completes,
    an_overwriting_upload_makes_an_object_that_was_not_there,
    of_several_concurrent_uploads_exactly_one_succeeds if AtomicCreate,
    uploads_run_side_by_side,
    a_dropped_part_leaves_the_order_intact,
];

const MIB: usize = 1 << 20;

/// Uploads `bytes` in parts of so many bytes, without completing.
async fn begin(
    subject: &Subject,
    key: &Key,
    bytes: &Bytes,
    part_len: usize,
) -> Result<Box<dyn dcp_core::storage::Upload>, Failure> {
    let mut upload = subject.storage.start_upload(key, PutMode::Create).await?;
    for part in in_pieces(bytes, part_len).pieces() {
        upload.put_part(part.clone().into()).await?;
    }
    Ok(upload)
}

async fn the_order_of_parts_is_the_order_of_bytes(subject: Subject) -> Outcome {
    let bytes = pattern(1, 100_000);
    for part_len in [999, 30_000, 100_000] {
        let key = subject.key(&part_len.to_string())?;
        begin(&subject, &key, &bytes, part_len).await?.complete().await?;
        subject.holds(&key, &bytes).await?;
    }
    let key = subject.key("gathered")?;
    let mut upload = subject.storage.start_upload(&key, PutMode::Create).await?;
    upload.put_part(in_pieces(&bytes.slice(..50_000), 77)).await?;
    upload.put_part(Payload::default()).await?;
    upload.put_part(in_pieces(&bytes.slice(50_000..), 7777)).await?;
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_upload_of_no_parts_makes_an_empty_object(subject: Subject) -> Outcome {
    let key = subject.key("folder/object")?;
    subject.storage.start_upload(&key, PutMode::Create).await?.complete().await?;
    subject.holds(&key, &Bytes::new()).await
}

async fn an_upload_of_large_parts_is_whole(subject: Subject) -> Outcome {
    let bytes = pattern(2, 17 * MIB + 9);
    let key = subject.key("object")?;
    begin(&subject, &key, &bytes, 6 * MIB).await?.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_upload_appears_only_on_complete(subject: Subject) -> Outcome {
    let bytes = pattern(3, 50_000);
    let key = subject.key("object")?;
    let mut upload = subject.storage.start_upload(&key, PutMode::Create).await?;
    subject.is_absent(&key).await?;
    for part in in_pieces(&bytes, 20_000).pieces() {
        upload.put_part(part.clone().into()).await?;
        subject.is_absent(&key).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_aborted_upload_leaves_nothing(subject: Subject) -> Outcome {
    let bytes = pattern(4, 50_000);
    let key = subject.key("object")?;
    subject.storage.start_upload(&key, PutMode::Create).await?.abort().await?;
    subject.is_absent(&key).await?;
    begin(&subject, &key, &bytes, 20_000).await?.abort().await?;
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "something is left: {listed:?}");
    begin(&subject, &key, &bytes, 20_000).await?.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn a_dropped_upload_leaves_no_object(subject: Subject) -> Outcome {
    let bytes = pattern(5, 50_000);
    let key = subject.key("object")?;
    drop(begin(&subject, &key, &bytes, 20_000).await?);
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "something is listed: {listed:?}");
    subject.create("object", &bytes).await?;
    subject.holds(&key, &bytes).await
}

/// Fails unless starting or completing an upload to the key is refused.
async fn is_refused(subject: &Subject, key: &Key) -> Outcome {
    let outcome = match subject.storage.start_upload(key, PutMode::Create).await {
        Ok(mut upload) => {
            upload.put_part(Payload::from("new")).await?;
            upload.complete().await
        }
        Err(error) => Err(error),
    };
    expect_kind(outcome, StorageErrorKind::AlreadyExists, "an upload to a taken key")
}

async fn an_upload_to_a_taken_key_is_already_exists(subject: Subject) -> Outcome {
    let old = pattern(6, 500);
    let key = subject.create("object", &old).await?;
    is_refused(&subject, &key).await?;
    subject.holds(&key, &old).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.len() == 1, "something is left: {listed:?}");
    Ok(())
}

async fn an_upload_to_a_key_taken_meanwhile_is_already_exists(subject: Subject) -> Outcome {
    let key = subject.key("object")?;
    let upload = begin(&subject, &key, &pattern(7, 5000), 1000).await?;
    let other = subject.create("object", &pattern(8, 700)).await?;
    let outcome = upload.complete().await;
    expect_kind(outcome, StorageErrorKind::AlreadyExists, "completion on a taken key")?;
    subject.holds(&other, &pattern(8, 700)).await
}

async fn an_overwriting_upload_replaces_the_object_when_it_completes(subject: Subject) -> Outcome {
    let (old, new) = (pattern(20, 70_000), pattern(21, 50_000));
    let key = subject.key("object")?;
    subject.create("object", &old).await?;
    let abandoned = subject.storage.start_upload(&key, PutMode::Overwrite).await?;
    abandoned.abort().await?;
    subject.holds(&key, &old).await?;
    let mut upload = subject.storage.start_upload(&key, PutMode::Overwrite).await?;
    for part in in_pieces(&new, 20_000).pieces() {
        upload.put_part(part.clone().into()).await?;
        subject.holds(&key, &old).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &new).await
}

async fn an_overwriting_upload_makes_an_object_that_was_not_there(subject: Subject) -> Outcome {
    let bytes = pattern(22, 1000);
    let key = subject.key("folder/object")?;
    let mut upload = subject.storage.start_upload(&key, PutMode::Overwrite).await?;
    upload.put_part(bytes.clone().into()).await?;
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn of_several_concurrent_uploads_exactly_one_succeeds(subject: Subject) -> Outcome {
    const UPLOADS: u64 = 16;
    for round in 0..4 {
        let key = subject.key(&format!("round {round}"))?;
        let uploads = (0..UPLOADS).map(|number| {
            let (storage, key) = (Arc::clone(&subject.storage), key.clone());
            runtime().spawn(async move {
                if number % 4 == 3 {
                    let bytes = pattern(number, 3000);
                    return storage.put(&key, bytes.into(), PutMode::Create).await;
                }
                let mut upload = storage.start_upload(&key, PutMode::Create).await?;
                for part in in_pieces(&pattern(number, 3000), 1000).pieces() {
                    upload.put_part(part.clone().into()).await?;
                }
                upload.complete().await
            })
        });
        let mut winners = Vec::new();
        for (number, outcome) in (0..).zip(join_all(uploads.collect::<Vec<_>>()).await) {
            match outcome? {
                Ok(()) => winners.push(number),
                lost => expect_kind(lost, StorageErrorKind::AlreadyExists, "a lost race")?,
            }
        }
        let [winner] = winners[..] else {
            return Err(Failure::new(format!(
                "of {UPLOADS} uploads {} believe to have won: {winners:?}",
                winners.len()
            )));
        };
        subject.holds(&key, &pattern(winner, 3000)).await?;
    }
    Ok(())
}

async fn uploads_run_side_by_side(subject: Subject) -> Outcome {
    const UPLOADS: u64 = 8;
    let mut uploads = Vec::new();
    for number in 0..UPLOADS {
        let key = subject.key(&format!("object {number}"))?;
        uploads.push((key.clone(), subject.storage.start_upload(&key, PutMode::Create).await?));
    }
    for part in 0..3 {
        for (number, (_, upload)) in (0..).zip(&mut uploads) {
            let bytes = pattern(number, 6000).slice(part * 2000..(part + 1) * 2000);
            upload.put_part(bytes.into()).await?;
        }
    }
    for (number, (key, upload)) in (0..).zip(uploads) {
        upload.complete().await?;
        subject.holds(&key, &pattern(number, 6000)).await?;
    }
    Ok(())
}

async fn a_dropped_part_leaves_the_order_intact(subject: Subject) -> Outcome {
    let first = pattern(9, 100_000);
    let dropped = pattern(10, 2 * MIB);
    let last = pattern(11, 100_000);
    for polls in [0, 1, 2, 5, 100] {
        let key = subject.key(&format!("after {polls}"))?;
        let mut upload = begin(&subject, &key, &first, 60_000).await?;
        let part = in_pieces(&dropped, 65_536);
        {
            let mut sent = upload.put_part(part);
            for _ in 0..polls {
                if let Some(outcome) = (&mut sent).now_or_never() {
                    outcome?;
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        // The dropped part may be there or not, and an upload may refuse to go on; but never are
        // bytes of it in the wrong place.
        if upload.put_part(last.clone().into()).await.is_err() {
            drop(upload);
            subject.is_absent(&key).await?;
            continue;
        }
        if upload.complete().await.is_err() {
            subject.is_absent(&key).await?;
            continue;
        }
        let got = subject.storage.read_all(&key).await?;
        let without = [&first[..], &last].concat();
        let with = [&first[..], &dropped, &last].concat();
        ensure!(got == without || got == with, "the parts got mixed up ({} bytes)", got.len());
    }
    Ok(())
}
