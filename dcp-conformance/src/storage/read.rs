//! Clauses on reading ranges into lent memory.

use bytes::Bytes;
use dcp_core::storage::{ReadInto, ReadRequest};
use dcp_core::{Buffer, HostMemory, StorageErrorKind};
use futures_util::future::try_join_all;

use super::subject::{Subject, expect_kind, pattern, same_bytes};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    read_fills_a_buffer_from_its_offset,
    read_returns_the_buffers_in_the_order_given,
    read_of_many_ranges_fills_each,
    read_fills_lent_memory_in_place,
    read_of_no_bytes_succeeds_if_the_object_exists,
    read_of_no_bytes_of_a_missing_object_is_not_found,
    read_of_a_missing_object_is_not_found,
    read_past_the_end_is_truncated,
    a_failed_read_returns_the_memory_it_was_lent,
    read_of_more_than_8_mib_is_whole,
    an_object_is_read_concurrently,
    read_whole_returns_all_bytes,
    read_whole_of_more_than_the_limit_is_too_large,
    read_whole_of_a_folder_is_not_found,
];

const MIB: usize = 1 << 20;

/// Fails unless every buffer holds its range of `bytes`.
fn are_ranges_of(bytes: &Bytes, ranges: &[(u64, usize)], got: &[Buffer]) -> Outcome {
    ensure!(got.len() == ranges.len(), "{} buffers of {} came back", got.len(), ranges.len());
    for (buffer, &(byte_offset, len)) in got.iter().zip(ranges) {
        let start = byte_offset as usize;
        same_bytes(buffer, &bytes[start..start + len]).map_err(|failure| {
            Failure::new(format!("{len} bytes at {byte_offset}: {}", failure.message()))
        })?;
    }
    Ok(())
}

async fn read_fills_a_buffer_from_its_offset(subject: Subject) -> Outcome {
    let bytes = pattern(1, 70_000);
    let key = subject.create("object", &bytes).await?;
    for range in [(0, 70_000), (0, 1), (69_999, 1), (4095, 2), (1, 69_998), (65_536, 4464)] {
        are_ranges_of(&bytes, &[range], &subject.read(&key, &[range]).await?)?;
    }
    Ok(())
}

async fn read_returns_the_buffers_in_the_order_given(subject: Subject) -> Outcome {
    let bytes = pattern(2, 10_000);
    let key = subject.create("object", &bytes).await?;
    let ranges = [(9000, 1000), (0, 10), (5, 10), (5000, 2000), (5, 10), (4999, 3), (9999, 1)];
    are_ranges_of(&bytes, &ranges, &subject.read(&key, &ranges).await?)
}

async fn read_of_many_ranges_fills_each(subject: Subject) -> Outcome {
    let bytes = pattern(3, 300_000);
    let key = subject.create("object", &bytes).await?;
    let ranges = (0_u64..2000).map(|i| (i * 149_993 % 299_000, (i % 97) as usize));
    let ranges = ranges.collect::<Vec<_>>();
    are_ranges_of(&bytes, &ranges, &subject.read(&key, &ranges).await?)
}

async fn read_fills_lent_memory_in_place(subject: Subject) -> Outcome {
    let bytes = pattern(4, 1000);
    let key = subject.create("object", &bytes).await?;
    let memory = HostMemory::zeroed(1000);
    let reads = vec![
        ReadInto { byte_offset: 600, buffer: memory.lend(600..1000)? },
        ReadInto { byte_offset: 0, buffer: memory.lend(0..600)? },
    ];
    let buffers = subject.storage.read(&key, ReadRequest::new(reads)).await?;
    ensure!(memory.read().is_err(), "the loan ended before the buffers were dropped");
    drop(buffers);
    same_bytes(&memory.read()?, &bytes)
}

async fn read_of_no_bytes_succeeds_if_the_object_exists(subject: Subject) -> Outcome {
    let empty = subject.create("empty", &Bytes::new()).await?;
    let object = subject.create("object", &pattern(5, 10)).await?;
    for key in [&empty, &object] {
        for ranges in [&[][..], &[(0, 0)], &[(10, 0), (0, 0)], &[(1 << 40, 0)]] {
            let got = subject.read(key, ranges).await?;
            ensure!(got.len() == ranges.len(), "{} buffers came back", got.len());
        }
    }
    let ranges = [(3, 0), (2, 5), (10, 0)];
    are_ranges_of(&pattern(5, 10), &ranges, &subject.read(&object, &ranges).await?)
}

async fn read_of_no_bytes_of_a_missing_object_is_not_found(subject: Subject) -> Outcome {
    let key = subject.key("absent")?;
    for ranges in [&[][..], &[(0, 0)]] {
        let outcome = subject.read(&key, ranges).await;
        expect_kind(outcome, StorageErrorKind::NotFound, "no bytes of an absent object")?;
    }
    Ok(())
}

async fn read_of_a_missing_object_is_not_found(subject: Subject) -> Outcome {
    for name in ["absent", "no/such/folder"] {
        let outcome = subject.read(&subject.key(name)?, &[(0, 1), (1, 1)]).await;
        expect_kind(outcome, StorageErrorKind::NotFound, name)?;
    }
    Ok(())
}

async fn read_past_the_end_is_truncated(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(6, 1000)).await?;
    let empty = subject.create("empty", &Bytes::new()).await?;
    let beyond: [&[(u64, usize)]; 8] = [
        &[(999, 2)],
        &[(1000, 1)],
        &[(0, 1001)],
        &[(5000, 10)],
        &[(0, 10), (995, 10), (20, 10)],
        &[(i64::MAX as u64, 1)],
        &[(u64::MAX - 3, 3)],
        &[(u64::MAX, 2)],
    ];
    for ranges in beyond {
        let outcome = subject.read(&key, ranges).await;
        expect_kind(outcome, StorageErrorKind::Truncated, &format!("{ranges:?} of 1000 bytes"))?;
    }
    expect_kind(subject.read(&empty, &[(0, 1)]).await, StorageErrorKind::Truncated, "no bytes")
}

async fn a_failed_read_returns_the_memory_it_was_lent(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(7, 1000)).await?;
    for key in [key, subject.key("absent")?] {
        let memory = HostMemory::zeroed(2000);
        let reads = vec![
            ReadInto { byte_offset: 0, buffer: memory.lend(0..900)? },
            ReadInto { byte_offset: 900, buffer: memory.lend(900..2000)? },
        ];
        let outcome = subject.storage.read(&key, reads.into()).await;
        ensure!(outcome.is_err(), "a bad read succeeded");
        drop(outcome);
        memory.read()?;
    }
    Ok(())
}

async fn read_of_more_than_8_mib_is_whole(subject: Subject) -> Outcome {
    let bytes = pattern(8, 20 * MIB + 5);
    let key = subject.create("object", &bytes).await?;
    let ranges = [(0, 20 * MIB + 5)];
    are_ranges_of(&bytes, &ranges, &subject.read(&key, &ranges).await?)?;
    let ranges = [(11 * MIB as u64, 9 * MIB + 1), (1, 9 * MIB), (3, 5), (19 * MIB as u64, MIB)];
    are_ranges_of(&bytes, &ranges, &subject.read(&key, &ranges).await?)
}

async fn an_object_is_read_concurrently(subject: Subject) -> Outcome {
    let bytes = pattern(9, 500_000);
    let key = subject.create("object", &bytes).await?;
    let readers = (0_u64..32).map(|reader| {
        let (subject, key, bytes) = (subject.clone(), key.clone(), bytes.clone());
        runtime().spawn(async move {
            let ranges = [(reader * 10_000, 150_000), (reader, 1000)];
            are_ranges_of(&bytes, &ranges, &subject.read(&key, &ranges).await?)
        })
    });
    for reader in try_join_all(readers.collect::<Vec<_>>()).await? {
        reader?;
    }
    Ok(())
}

async fn read_whole_returns_all_bytes(subject: Subject) -> Outcome {
    for len in [0, 1, 70_000, 9 * MIB + 1] {
        let bytes = pattern(10, len);
        let key = subject.create(&len.to_string(), &bytes).await?;
        for max_bytes in [len as u64, u64::MAX] {
            let whole = subject.storage.read_whole(&key, max_bytes).await?;
            same_bytes(&whole.bytes, &bytes)?;
            ensure!(whole.meta.key == key, "{key:?} is reported as {:?}", whole.meta.key);
            let reported = whole.meta.byte_len;
            ensure!(reported == len as u64, "{len} bytes are reported as {reported}");
        }
    }
    Ok(())
}

async fn read_whole_of_more_than_the_limit_is_too_large(subject: Subject) -> Outcome {
    let key = subject.create("object", &pattern(11, 70_000)).await?;
    for max_bytes in [69_999, 1000, 0] {
        let outcome = subject.storage.read_whole(&key, max_bytes).await;
        expect_kind(outcome, StorageErrorKind::TooLarge, "70000 bytes")?;
    }
    Ok(())
}

async fn read_whole_of_a_folder_is_not_found(subject: Subject) -> Outcome {
    subject.create("folder/object", &pattern(12, 10)).await?;
    for name in ["folder", "absent", "absent/object"] {
        let outcome = subject.storage.read_whole(&subject.key(name)?, 100).await;
        expect_kind(outcome, StorageErrorKind::NotFound, name)?;
    }
    Ok(())
}
