//! Clauses on objects that are written in parts.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::storage::{PutMode, Upload, UploadOptions};
use dcp_core::{HostMemory, Key, Payload, StorageErrorKind};
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join_all};
use tokio::sync::Barrier;

use super::subject::{Subject, expect_kind, in_pieces, pattern};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    the_order_of_parts_is_the_order_of_bytes,
    an_upload_of_no_parts_makes_an_empty_object,
    an_upload_of_large_parts_is_whole,
    an_upload_of_announced_length_is_whole,
    parts_may_end_in_any_order,
    parts_are_written_concurrently,
    a_part_that_was_dropped_is_never_missing,
    parts_of_other_lengths_are_refused_or_in_order,
    the_memory_of_a_part_is_released_when_it_is_written,
    parts_outside_of_the_limits_are_invalid,
    an_upload_appears_only_on_complete,
    an_aborted_upload_leaves_nothing,
    an_upload_is_aborted_while_parts_are_written,
    a_dropped_upload_leaves_no_object,
    an_upload_to_a_taken_key_is_already_exists,
    an_upload_to_a_key_taken_meanwhile_is_already_exists,
    an_overwriting_upload_replaces_the_object_when_it_completes,
    an_overwriting_upload_makes_an_object_that_was_not_there,
    of_several_concurrent_uploads_exactly_one_succeeds if AtomicCreate,
    uploads_run_side_by_side,
];

const MIB: usize = 1 << 20;

/// Bytes of two full parts and a shorter one.
fn three_parts(seed: u64, part_len: usize) -> Bytes {
    pattern(seed, 2 * part_len + part_len / 2)
}

async fn the_order_of_parts_is_the_order_of_bytes(subject: Subject) -> Outcome {
    for wished in [999, 30_000, 100_000] {
        let part_len = subject.part_len(wished);
        for len in [part_len - 1, part_len, part_len + 1, 2 * part_len, 3 * part_len + 7] {
            let bytes = pattern(1, len);
            let key = subject.key(&format!("{wished} {len}"))?;
            subject.send(&key, PutMode::Create, &bytes, part_len).await?.complete().await?;
            subject.holds(&key, &bytes).await?;
        }
    }
    let part_len = subject.part_len(50_000);
    let bytes = three_parts(2, part_len);
    let key = subject.key("gathered")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    for part in in_pieces(&bytes, part_len).pieces() {
        upload.put_part(in_pieces(part, 777)).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_upload_of_no_parts_makes_an_empty_object(subject: Subject) -> Outcome {
    let key = subject.key("folder/object")?;
    let part_len = subject.part_len(1000);
    subject.start(&key, PutMode::Create, part_len).await?.complete().await?;
    subject.holds(&key, &Bytes::new()).await?;
    let key = subject.key("of an empty part")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    upload.put_part(Payload::default()).await?;
    upload.complete().await?;
    subject.holds(&key, &Bytes::new()).await
}

async fn an_upload_of_large_parts_is_whole(subject: Subject) -> Outcome {
    let part_len = subject.part_len(6 * MIB);
    let bytes = pattern(2, 2 * part_len + 5 * MIB + 9);
    let key = subject.key("object")?;
    subject.send(&key, PutMode::Create, &bytes, part_len).await?.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_upload_of_announced_length_is_whole(subject: Subject) -> Outcome {
    let part_len = subject.part_len(10_000);
    let bytes = three_parts(3, part_len);
    let options = UploadOptions::new(PutMode::Create, part_len as u64);
    let key = subject.key("object")?;
    let options = options.with_byte_len(bytes.len() as u64);
    let mut upload = subject.storage.start_upload(&key, options).await?;
    for part in in_pieces(&bytes, part_len).pieces() {
        upload.put_part(part.clone().into()).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn parts_may_end_in_any_order(subject: Subject) -> Outcome {
    let part_len = subject.part_len(10_000);
    let bytes = pattern(4, 3 * part_len + 1);
    let orders = [[3, 2, 1, 0], [0, 3, 1, 2], [2, 0, 3, 1], [1, 0, 3, 2]];
    for (number, order) in orders.into_iter().enumerate() {
        let key = subject.key(&format!("order {number}"))?;
        let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
        let payload = in_pieces(&bytes, part_len);
        let parts = payload.pieces().iter();
        let mut parts =
            parts.map(|part| Some(upload.put_part(part.clone().into()))).collect::<Vec<_>>();
        for part in order {
            if let Some(part) = parts.get_mut(part).and_then(Option::take) {
                part.await?;
            }
        }
        upload.complete().await?;
        subject.holds(&key, &bytes).await?;
    }
    Ok(())
}

async fn parts_are_written_concurrently(subject: Subject) -> Outcome {
    let part_len = subject.part_len(40_000);
    let parts = if part_len > MIB { 6 } else { 40 };
    let bytes = pattern(5, parts * part_len - 17);
    let key = subject.key("object")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    let payload = in_pieces(&bytes, part_len);
    let sent = payload.pieces().iter().map(|part| upload.put_part(part.clone().into()));
    // On several threads, so that they do run at the same time.
    let sent = sent.map(|part| runtime().spawn(part)).collect::<Vec<_>>();
    for part in try_join_all(sent).await? {
        part?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

/// An object has every part, or the upload fails.
async fn a_part_that_was_dropped_is_never_missing(subject: Subject) -> Outcome {
    let part_len = subject.part_len(MIB);
    let bytes = pattern(9, 2 * part_len + 1000);
    let patience: &[usize] = if part_len > MIB { &[0, 5] } else { &[0, 1, 2, 5, 100] };
    for &polls in patience {
        for dropped in 0..3 {
            let key = subject.key(&format!("part {dropped} after {polls}"))?;
            let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
            let mut refused = false;
            for (number, part) in in_pieces(&bytes, part_len).pieces().iter().enumerate() {
                let mut sent = upload.put_part(in_pieces(part, 65_536));
                if number != dropped {
                    refused |= sent.await.is_err();
                    continue;
                }
                for _ in 0..polls {
                    if let Some(outcome) = (&mut sent).now_or_never() {
                        outcome?;
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            match upload.complete().await {
                Ok(_) => subject.holds(&key, &bytes).await?,
                Err(_) => subject.is_absent(&key).await?,
            }
            ensure!(!refused || polls < 100, "a part after a dropped one is refused");
        }
    }
    Ok(())
}

/// A storage may refuse parts that are not of the announced length; if it does not, the bytes are
/// in the order of the calls.
async fn parts_of_other_lengths_are_refused_or_in_order(subject: Subject) -> Outcome {
    let part_len = subject.part_len(10_000);
    let lens = [[part_len / 2, part_len, 10], [part_len, 1, part_len], [part_len + 1, 3, 0]];
    for (number, lens) in lens.into_iter().enumerate() {
        let bytes = pattern(10, lens.iter().sum());
        let key = subject.key(&format!("lengths {number}"))?;
        let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
        let mut start = 0;
        for len in lens {
            // A refusal here is one of the upload, which `complete` repeats.
            let _ = upload.put_part(bytes.slice(start..start + len).into()).await;
            start += len;
        }
        match upload.complete().await {
            Ok(_) => subject.holds(&key, &bytes).await?,
            Err(_) => subject.is_absent(&key).await?,
        }
    }
    Ok(())
}

async fn the_memory_of_a_part_is_released_when_it_is_written(subject: Subject) -> Outcome {
    let part_len = subject.part_len(10_000);
    let memory = HostMemory::zeroed(2 * part_len);
    let key = subject.key("object")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    let bytes = Payload::from(memory.read()?).to_bytes();
    let parts = [bytes.slice(..part_len), bytes.slice(part_len..)].map(Payload::from);
    drop(bytes);
    let sent = parts.map(|part| upload.put_part(part));
    for part in sent {
        part.await?;
    }
    ensure!(memory.lend(0..1).is_ok(), "the upload keeps the memory of written parts");
    upload.complete().await?;
    subject.holds(&key, &vec![0; 2 * part_len].into()).await
}

async fn parts_outside_of_the_limits_are_invalid(subject: Subject) -> Outcome {
    let limits = subject.storage.capabilities().write_limits;
    let key = subject.key("object")?;
    let short = Some(limits.part_bytes_min).filter(|min| *min > 1).map(|min| min - 1);
    for part_bytes in [short, limits.part_bytes_max.checked_add(1)].into_iter().flatten() {
        let options = UploadOptions::new(PutMode::Create, part_bytes);
        let outcome = subject.storage.start_upload(&key, options).await;
        expect_kind(outcome, StorageErrorKind::Invalid, &format!("parts of {part_bytes} bytes"))?;
    }
    subject.is_absent(&key).await
}

async fn an_upload_appears_only_on_complete(subject: Subject) -> Outcome {
    let part_len = subject.part_len(20_000);
    let bytes = three_parts(3, part_len);
    let key = subject.key("object")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    subject.is_absent(&key).await?;
    for part in in_pieces(&bytes, part_len).pieces() {
        upload.put_part(part.clone().into()).await?;
        subject.is_absent(&key).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_aborted_upload_leaves_nothing(subject: Subject) -> Outcome {
    let part_len = subject.part_len(20_000);
    let bytes = three_parts(4, part_len);
    let key = subject.key("object")?;
    subject.start(&key, PutMode::Create, part_len).await?.abort().await?;
    subject.is_absent(&key).await?;
    subject.send(&key, PutMode::Create, &bytes, part_len).await?.abort().await?;
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "something is left: {listed:?}");
    subject.send(&key, PutMode::Create, &bytes, part_len).await?.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn an_upload_is_aborted_while_parts_are_written(subject: Subject) -> Outcome {
    let part_len = subject.part_len(100_000);
    let key = subject.key("object")?;
    let mut upload = subject.start(&key, PutMode::Create, part_len).await?;
    let payload = in_pieces(&three_parts(12, part_len), part_len);
    let sent = payload.pieces().iter().map(|part| upload.put_part(part.clone().into()));
    let sent = sent.map(|part| runtime().spawn(part)).collect::<Vec<_>>();
    upload.abort().await?;
    for part in sent {
        // It was written before the abort, or not.
        let _ = part.await?;
    }
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "something is left: {listed:?}");
    Ok(())
}

async fn a_dropped_upload_leaves_no_object(subject: Subject) -> Outcome {
    let part_len = subject.part_len(20_000);
    let bytes = three_parts(5, part_len);
    let key = subject.key("object")?;
    drop(subject.send(&key, PutMode::Create, &bytes, part_len).await?);
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "something is listed: {listed:?}");
    subject.create("object", &bytes).await?;
    subject.holds(&key, &bytes).await
}

/// Fails unless starting or completing an upload to the key is refused.
async fn is_refused(subject: &Subject, key: &Key) -> Outcome {
    let outcome = match subject.start(key, PutMode::Create, subject.part_len(1000)).await {
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
    let part_len = subject.part_len(1000);
    let bytes = three_parts(7, part_len);
    let upload = subject.send(&key, PutMode::Create, &bytes, part_len).await?;
    let other = subject.create("object", &pattern(8, 700)).await?;
    let outcome = upload.complete().await;
    expect_kind(outcome, StorageErrorKind::AlreadyExists, "completion on a taken key")?;
    subject.holds(&other, &pattern(8, 700)).await
}

async fn an_overwriting_upload_replaces_the_object_when_it_completes(subject: Subject) -> Outcome {
    let part_len = subject.part_len(20_000);
    let (old, new) = (pattern(20, 70_000), three_parts(21, part_len));
    let key = subject.key("object")?;
    subject.create("object", &old).await?;
    subject.start(&key, PutMode::Overwrite, part_len).await?.abort().await?;
    subject.holds(&key, &old).await?;
    let mut upload = subject.start(&key, PutMode::Overwrite, part_len).await?;
    for part in in_pieces(&new, part_len).pieces() {
        upload.put_part(part.clone().into()).await?;
        subject.holds(&key, &old).await?;
    }
    upload.complete().await?;
    subject.holds(&key, &new).await
}

async fn an_overwriting_upload_makes_an_object_that_was_not_there(subject: Subject) -> Outcome {
    let bytes = pattern(22, 1000);
    let key = subject.key("folder/object")?;
    let part_len = subject.part_len(1000);
    subject.send(&key, PutMode::Overwrite, &bytes, part_len).await?.complete().await?;
    subject.holds(&key, &bytes).await
}

async fn of_several_concurrent_uploads_exactly_one_succeeds(subject: Subject) -> Outcome {
    const UPLOADS: usize = 16;
    let part_len = subject.part_len(1000);
    let rounds = if part_len > MIB { 1 } else { 4 };
    for round in 0..rounds {
        let key = subject.key(&format!("round {round}"))?;
        // No upload starts before all are there: a slow machine would run them one by one.
        let start = Arc::new(Barrier::new(UPLOADS));
        let uploads = (0..UPLOADS as u64).map(|number| {
            let (subject, key, start) = (subject.clone(), key.clone(), Arc::clone(&start));
            runtime().spawn(async move {
                let bytes = pattern(number, part_len + 100);
                start.wait().await;
                if number % 4 == 3 {
                    return subject.storage.put(&key, bytes.into(), PutMode::Create).await;
                }
                subject.send(&key, PutMode::Create, &bytes, part_len).await?.complete().await
            })
        });
        let mut winners = Vec::new();
        for (number, outcome) in (0..).zip(join_all(uploads.collect::<Vec<_>>()).await) {
            match outcome? {
                Ok(_) => winners.push(number),
                lost => expect_kind(lost, StorageErrorKind::AlreadyExists, "a lost race")?,
            }
        }
        let [winner] = winners[..] else {
            return Err(Failure::new(format!(
                "of {UPLOADS} uploads {} report that they won: {winners:?}",
                winners.len()
            )));
        };
        subject.holds(&key, &pattern(winner, part_len + 100)).await?;
    }
    Ok(())
}

async fn uploads_run_side_by_side(subject: Subject) -> Outcome {
    const UPLOADS: u64 = 8;
    let part_len = subject.part_len(2000);
    let mut uploads: Vec<(Key, Bytes, Box<dyn Upload>)> = Vec::new();
    for number in 0..UPLOADS {
        let key = subject.key(&format!("object {number}"))?;
        let upload = subject.start(&key, PutMode::Create, part_len).await?;
        uploads.push((key, three_parts(number, part_len), upload));
    }
    for part in 0..3 {
        for (_, bytes, upload) in &mut uploads {
            let end = bytes.len().min((part + 1) * part_len);
            upload.put_part(bytes.slice(part * part_len..end).into()).await?;
        }
    }
    for (key, bytes, upload) in uploads {
        upload.complete().await?;
        subject.holds(&key, &bytes).await?;
    }
    Ok(())
}
