//! Writing and reading 256 MiB through the storage, and through `std::fs` for comparison.
//!
//! The folder is a new one in `DCP_BENCH_DIR`, or in the system's temporary folder. Nothing is
//! synced, so on a folder in memory this measures what the storage itself costs.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark that cannot run shall stop")]

use std::fs;
use std::hint::black_box;
use std::io::Read;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dcp_core::storage::{PutMode, ReadInto, ReadOutcome, ReadRequest};
use dcp_core::{HostMemory, Key, Payload, Storage};
use dcp_storage_fs::FsStorage;

const LEN: usize = 256 << 20;
const PIECE: usize = 16 << 20;

fn throughput(criterion: &mut Criterion) {
    let folder = match std::env::var_os("DCP_BENCH_DIR") {
        Some(path) => tempfile::tempdir_in(path).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let storage = FsStorage::builder(folder.path()).sync(false).open().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let bytes = Bytes::from((0..LEN).map(|i| i as u8).collect::<Vec<_>>());
    let payload =
        (0..LEN).step_by(PIECE).map(|start| bytes.slice(start..start + PIECE)).collect::<Payload>();
    let plain = folder.path().join("plain");
    let key = Key::new("object").unwrap();

    let mut group = criterion.benchmark_group("write 256 MiB");
    group.sample_size(10).throughput(Throughput::Bytes(LEN as u64));
    group.bench_function("std::fs::write", |bencher| {
        bencher.iter(|| fs::write(&plain, &bytes).unwrap());
    });
    group.bench_function("put of 16 pieces", |bencher| {
        bencher.iter(|| {
            let put = storage.put(&key, payload.clone(), PutMode::Overwrite);
            runtime.block_on(put).unwrap();
        });
    });
    group.finish();

    fs::write(&plain, &bytes).unwrap();
    runtime.block_on(storage.put(&key, payload.clone(), PutMode::Overwrite)).unwrap();
    let mut memory = vec![0; LEN];
    let lent = HostMemory::zeroed(LEN);
    let mut group = criterion.benchmark_group("read 256 MiB");
    group.sample_size(10).throughput(Throughput::Bytes(LEN as u64));
    group.bench_function("std::fs::File::read_exact", |bencher| {
        bencher.iter(|| {
            fs::File::open(&plain).unwrap().read_exact(black_box(&mut memory)).unwrap();
        });
    });
    for pieces in [1, 16] {
        group.bench_function(format!("read of {pieces} ranges"), |bencher| {
            bencher.iter(|| {
                let reads = (0..LEN).step_by(LEN / pieces).map(|start| ReadInto {
                    byte_offset: start as u64,
                    buffer: lent.lend(start..start + LEN / pieces).unwrap(),
                });
                let read = storage.read(&key, ReadRequest::new(reads.collect()));
                black_box::<ReadOutcome>(runtime.block_on(read).unwrap());
            });
        });
    }
    group.finish();
}

criterion_group!(benches, throughput);
criterion_main!(benches);
