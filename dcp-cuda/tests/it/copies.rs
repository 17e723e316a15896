//! Copies of single calls.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::device::DeviceMemory;
use dcp_core::error::error_chain;
use dcp_cuda::PinnedStaging;
use dcp_testing::block_on;
use tokio::task::JoinSet;

use crate::fake::{Control, FakeGpu, FakeMemory};

const KIB: usize = 1 << 10;

pub(crate) fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(7)) as u8).collect()
}

/// Staging with an area of 256 KiB and two chunks of 1 KiB.
pub(crate) fn small() -> (PinnedStaging<FakeGpu>, Arc<Control>) {
    let (device, control) = FakeGpu::new();
    let builder = PinnedStaging::builder(device).lent_bytes(256 * KIB).chunk_bytes(KIB).chunks(2);
    (builder.build(), control)
}

fn read(memory: &Arc<dyn DeviceMemory>, ranges: &[std::ops::Range<u64>]) -> Bytes {
    block_on(memory.read(ranges)).unwrap()
}

#[test]
fn bytes_are_copied_through_the_area_and_through_chunks() {
    let (staging, control) = small();
    let whole = noise(600 * KIB);
    let memory = staging.memory(FakeMemory::new(whole.clone()));
    // Longer than the area, shorter, and several ranges of odd lengths.
    let len = whole.len() as u64;
    assert_eq!(read(&memory, &[0..len]), whole);
    assert_eq!(read(&memory, &[5..1000]), whole[5..1000]);
    let ranges = [3..4, 10..3000, 5000..5001, 400_000..len];
    let expected = ranges.iter().map(|range| &whole[range.start as usize..range.end as usize]);
    assert_eq!(read(&memory, &ranges), expected.collect::<Vec<_>>().concat());
    assert_eq!(read(&memory, &[]), Bytes::new());

    let device = FakeMemory::new(vec![0; whole.len()]);
    let target = staging.memory(Arc::clone(&device));
    block_on(target.write(&[7..len], Bytes::from(whole[7..].to_vec()))).unwrap();
    assert_eq!(device.bytes()[7..], whole[7..]);
    assert!(control.pinned_peak() <= 258 * KIB, "{}", control.pinned_peak());
}

#[test]
fn pinned_memory_is_allocated_once_and_freed_when_nothing_uses_it() {
    let (staging, control) = small();
    let memory = staging.memory(FakeMemory::new(noise(600 * KIB)));
    assert_eq!((control.allocations(), staging.pinned_bytes()), (0, 0));
    for _ in 0..20 {
        read(&memory, &[0..100 * KIB as u64]);
        read(&memory, &[0..600 * KIB as u64]);
    }
    assert_eq!(control.allocations(), 3);
    assert_eq!(staging.pinned_bytes(), 258 * KIB as u64);
    let kept = read(&memory, &[0..8]);
    staging.release();
    assert_eq!(control.pinned_now(), 256 * KIB, "a part of the area is in use");
    drop(kept);
    staging.release();
    assert_eq!((control.pinned_now(), staging.pinned_bytes()), (0, 0));
    assert_eq!(read(&memory, &[0..8]), noise(8));
}

#[test]
fn callers_that_keep_all_pinned_memory_stop_no_copy() {
    let (staging, control) = small();
    let whole = noise(100 * KIB);
    let device = FakeMemory::new(whole.clone());
    let memory = staging.memory(Arc::clone(&device));
    let kept: Vec<Bytes> = (0..20).map(|_| read(&memory, &[0..64 * KIB as u64])).collect();
    assert!(kept.iter().all(|bytes| *bytes == whole[..64 * KIB]));
    assert!(memory.staging(64 * KIB).is_none());
    block_on(memory.write(&[0..64 * KIB as u64], Bytes::from(vec![9; 64 * KIB]))).unwrap();
    assert_eq!(device.bytes()[..64 * KIB], vec![9; 64 * KIB]);
    assert_eq!(control.pinned_peak(), 258 * KIB);
}

#[test]
fn bytes_in_staging_memory_are_copied_at_once() {
    let (staging, control) = small();
    let device = FakeMemory::new(vec![0; 100 * KIB]);
    let memory = staging.memory(Arc::clone(&device));
    let pinned = memory.staging(100 * KIB).unwrap();
    pinned.lend(0..100 * KIB).unwrap().copy_from_slice(&noise(100 * KIB));
    let before = control.started.load(std::sync::atomic::Ordering::SeqCst);
    block_on(memory.write(&[0..100 * KIB as u64], pinned.read().unwrap())).unwrap();
    assert_eq!(control.started.load(std::sync::atomic::Ordering::SeqCst), before + 1);
    assert_eq!(device.bytes(), noise(100 * KIB));
}

#[test]
fn the_device_copies_one_chunk_while_the_processor_copies_another() {
    let (staging, control) = small();
    // Longer than the area: through chunks.
    let whole = noise(300 * KIB);
    let memory = staging.memory(FakeMemory::new(whole.clone()));
    control.hold(true);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let copy = runtime.spawn(async move { memory.read(&[0..300 << 10]).await.unwrap() });
    // Of both chunks, before the first one has ended.
    control.wait_for_starts(2);
    assert_eq!(control.ended.load(std::sync::atomic::Ordering::SeqCst), 0);
    control.hold(false);
    assert_eq!(runtime.block_on(copy).unwrap(), whole);
}

#[test]
fn many_copies_at_once_wait_for_chunks_and_not_for_each_other() {
    let (staging, _) = small();
    let whole = noise(300 * KIB);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    runtime.block_on(async {
        let mut copies = JoinSet::new();
        for _ in 0..16 {
            let device = FakeMemory::new(vec![0; whole.len()]);
            let from = staging.memory(FakeMemory::new(whole.clone()));
            let (to, whole) = (staging.memory(Arc::clone(&device)), whole.clone());
            copies.spawn(async move {
                let all = 0..whole.len() as u64;
                let bytes = from.read(std::slice::from_ref(&all)).await.unwrap();
                to.write(&[all], bytes).await.unwrap();
                assert!(device.bytes() == whole);
            });
        }
        while let Some(copied) = copies.join_next().await {
            copied.unwrap();
        }
    });
}

#[test]
fn a_dropped_copy_keeps_its_memory_until_it_has_ended() {
    let (staging, control) = small();
    let whole = noise(300 * KIB);
    let memory = staging.memory(FakeMemory::new(whole.clone()));
    control.hold(true);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let cancelled = {
        let memory = Arc::clone(&memory);
        runtime.spawn(async move { memory.read(&[0..300 << 10]).await.map(drop) })
    };
    control.wait_for_starts(2);
    cancelled.abort();
    assert!(runtime.block_on(cancelled).unwrap_err().is_cancelled());
    staging.release();
    assert_eq!(control.pinned_now(), 2 * KIB);
    control.hold(false);
    // Both chunks come back, whatever order the copies end in.
    assert_eq!(read(&memory, &[0..300 << 10]), whole);
}

#[test]
fn failures_name_the_device_and_what_to_do() {
    let (staging, control) = small();
    let memory = staging.memory(FakeMemory::new(noise(300 * KIB)));
    let text =
        |ranges: &[std::ops::Range<u64>]| error_chain(&*block_on(memory.read(ranges)).unwrap_err());
    control.fail_pinning(true);
    let failed = text(&[0..8]);
    assert!(
        failed.starts_with("cannot pin 262144 bytes of host memory for fake:3; lower"),
        "{failed}"
    );
    assert!(failed.ends_with(": out of locked memory"), "{failed}");
    assert!(text(&[0..300 << 10]).contains("cannot pin 1024 bytes"));
    assert!(memory.staging(8).is_none());
    control.fail_pinning(false);
    control.fail_copies(true);
    let expected = "a copy of 8 bytes failed on fake:3: the device fell off the bus";
    assert_eq!(text(&[0..8]), expected);
    let written = block_on(memory.write(&[0..8], Bytes::from_static(&[0; 8]))).unwrap_err();
    assert_eq!(error_chain(&*written), expected);
    assert!(text(&[0..300 << 10]).contains("a copy of 1024 bytes failed on fake:3"));
    // The fake device returns the memory of a copy that failed, so the next one works.
    control.fail_copies(false);
    assert_eq!(read(&memory, &[0..300 << 10]), noise(300 * KIB));
}

#[test]
fn memory_that_a_failed_copy_may_still_use_is_not_used_again() {
    let (staging, control) = small();
    let memory = staging.memory(FakeMemory::new(noise(300 * KIB)));
    control.fail_copies(true);
    control.leak_failures(true);
    let text =
        |ranges: &[std::ops::Range<u64>]| error_chain(&*block_on(memory.read(ranges)).unwrap_err());
    // Through both chunks at once.
    assert!(text(&[0..300 << 10]).ends_with("the device fell off the bus"));
    // Both copies have ended when the chunks are free again.
    let lost =
        "all pinned memory for fake:3 was lost with copies that failed; open the device again";
    assert_eq!(text(&[0..300 << 10]), lost);
    // A copy through the area loses its part alone.
    assert!(text(&[0..8]).ends_with("the device fell off the bus"));
    control.fail_copies(false);
    assert_eq!(read(&memory, &[0..8]), noise(8));
    assert_eq!(text(&[0..300 << 10]), lost);
    staging.release();
    assert_eq!(control.pinned_peak(), 258 * KIB);
    assert_eq!(control.pinned_now(), 258 * KIB);
}
