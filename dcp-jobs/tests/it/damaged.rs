//! Damaged data is not carried on: a job that copies it would seal it under a new checksum.

use futures_util::StreamExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use dcp_conformance::{CountingStorage, FaultStorage, MemoryStorage};
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, IndexFacts, RecordAudit, SaveRecord,
};
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Key, Payload, Storage, StorageError};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{SafetensorsItem, encode_header};
use dcp_jobs::convert::to_safetensors;
use dcp_jobs::get::{Found, FoundTensor, find};
use dcp_jobs::reshard::reshard;
use dcp_jobs::verify::verify;
use dcp_jobs::write::Target;
use dcp_jobs::{JobError, JobOptions, Source};
use dcp_testing::key;
use indexmap::IndexMap;

use crate::support::{block_on, fixture};

const ROWS: u64 = 1024;
const COLUMNS: u64 = 1024;

/// 1 MiB at most at once, so that a tensor of 4 MiB goes through in segments.
fn small() -> JobOptions {
    JobOptions::default().with_max_memory(1)
}

/// A checkpoint in PyTorch's format with one tensor of 4 MiB, saved by `ranks` ranks.
async fn checkpoint(ranks: u32) -> Arc<dyn Storage> {
    let item = SafetensorsItem {
        name: "w".into(),
        dtype: DType::Float32,
        shape: [ROWS, COLUMNS].as_slice().into(),
    };
    let mut bytes = encode_header(&[item], &IndexMap::new()).unwrap().bytes.to_vec();
    bytes.extend((0..ROWS * COLUMNS).flat_map(|n| (n as f32).to_le_bytes()));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    storage.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
    let source = Source::safetensors(storage, key("in.safetensors"));
    let sharded: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    reshard(&source, &DcpWriter::new(Arc::clone(&sharded)), ranks, &small()).await.unwrap();
    sharded
}

/// The same with one bit flipped in the middle of the last data file.
async fn damaged(ranks: u32) -> Arc<dyn Storage> {
    let storage = checkpoint(ranks).await;
    let mut files: Vec<_> = storage.list(None).map(|meta| meta.unwrap().key).collect().await;
    files.retain(|key| key.as_str().ends_with(".distcp"));
    files.sort();
    let last = files.pop().unwrap();
    let mut bytes = storage.read_all(&last).await.unwrap().to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    storage.put(&last, bytes.into(), PutMode::Overwrite).await.unwrap();
    storage
}

fn source(storage: &Arc<dyn Storage>) -> Source {
    Source::dcp(Arc::clone(storage), false)
}

async fn found(source: &Source, slice: Option<&str>) -> FoundTensor {
    match find(source, "w", slice).await.unwrap() {
        Found::Tensor(found) => found,
        other => panic!("{other:?}"),
    }
}

/// The refusal names the tensor and its file, and nothing was written.
async fn refused<T>(what: &str, done: Result<T, JobError>, place: &dyn Storage) {
    let error = done.map(|_| what).unwrap_err().to_string();
    assert!(error.contains("CRC") && error.contains("\"w\""), "{what}: {error}");
    assert!(error.contains(".distcp"), "{what}: {error}");
    assert_eq!(place.list(None).count().await, 0, "{what} left something");
}

#[test]
fn a_flipped_bit_of_a_large_chunk_stops_every_job() {
    for saved_by in [1, 2] {
        block_on(async {
            let source = source(&damaged(saved_by).await);
            for options in [small(), JobOptions::default()] {
                let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
                let target = Target::new(Arc::clone(&place), key("out"));
                let done = to_safetensors(&source, &target, &options).await;
                refused("convert", done, &*place).await;
                let whole = found(&source, None).await;
                refused("get", whole.to_npy(&target, &options).await, &*place).await;
                let done = whole.to_safetensors(&target, &options).await;
                refused("get to safetensors", done, &*place).await;
                refused("get as bytes", whole.read().await, &*place).await;
                for ranks in 1..=3 {
                    let writer = DcpWriter::new(Arc::clone(&place));
                    let done = reshard(&source, &writer, ranks, &options).await;
                    refused(&format!("reshard to {ranks}"), done, &*place).await;
                }
            }
        });
    }
}

#[test]
fn a_slice_answers_for_the_chunks_that_it_holds_whole() {
    block_on(async {
        let source = source(&damaged(2).await);
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&place), key("out.npy"));
        let second_half = found(&source, Some("500:")).await;
        refused("the second chunk", second_half.to_npy(&target, &small()).await, &*place).await;
        // Of the damaged chunk it has the sound beginning.
        found(&source, Some("0:600")).await.to_npy(&target, &small()).await.unwrap();
    });
}

#[test]
fn every_byte_is_read_once() {
    block_on(async {
        let counting = CountingStorage::new(checkpoint(1).await);
        let source = source(&(Arc::new(counting.clone()) as Arc<dyn Storage>));
        let read = async |options: &JobOptions| {
            let before = counting.counts().bytes_read;
            let target = Target::new(Arc::new(MemoryStorage::new()), key("out.safetensors"));
            to_safetensors(&source, &target, options).await.unwrap();
            counting.counts().bytes_read - before
        };
        let bytes = ROWS * COLUMNS * 4;
        for options in [JobOptions::default(), small()] {
            let read = read(&options).await;
            assert!(read < bytes + bytes / 4, "{read} of {bytes} bytes were read");
        }
    });
}

/// What is not read to know an object is part of its archive all the same: a copy would have it.
#[test]
fn damage_anywhere_in_the_archive_of_an_object_is_refused() {
    let find = |bytes: &[u8], what: &[u8], from: usize| {
        let found = bytes[from..].windows(what.len()).position(|at| at == what);
        from + found.unwrap()
    };
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let damages: [(&str, Damage<'_>); 3] = [
        ("a record that says the version", &|bytes| {
            let header = find(bytes, b"/version", 0);
            let at = find(bytes, b"3\n", header);
            bytes[at] ^= 1;
        }),
        ("the name in a local header", &|bytes| {
            let at = find(bytes, b"/byteorder", 0);
            bytes[at + 1] ^= 1;
        }),
        ("the magic of a local header", &|bytes| {
            let at = find(bytes, b"/.data/serialization_id", 0);
            let header = bytes[..at].windows(4).rposition(|at| at == b"PK\x03\x04").unwrap();
            bytes[header] ^= 1;
        }),
    ];
    for (what, damage) in damages {
        let storage = fixture("objects");
        let file = key("__0_0.distcp");
        let mut bytes = block_on(storage.read_all(&file)).unwrap().to_vec();
        damage(&mut bytes);
        block_on(storage.put(&file, bytes.into(), PutMode::Overwrite)).unwrap();
        let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::new(Arc::clone(&target));
        let done = block_on(reshard(&source(&storage), &writer, 2, &small()));
        let error = dcp_core::error::error_chain(&done.expect_err(what));
        assert!(error.contains("__0_0.distcp"), "{what}: {error}");
        assert_eq!(block_on(target.list(None).count()), 0, "{what} left something");
    }
}

/// Writes on tasks of its own, as a file system does on threads: a caller that stops waiting does not stop
/// the write. Each takes many turns, and more than those that began before it.
#[derive(Debug)]
struct Detached {
    inner: Arc<dyn Storage>,
    under_way: Arc<AtomicUsize>,
}

#[async_trait]
impl Storage for Detached {
    dcp_core::forward_storage!(
        inner: capabilities, stat, read, read_whole, start_upload, list, list_folder, delete,
        leftovers, remove_empty_folders, claim
    );

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let (inner, under_way) = (Arc::clone(&self.inner), Arc::clone(&self.under_way));
        let key = key.clone();
        let before = under_way.fetch_add(1, Ordering::SeqCst);
        let write = async move {
            for _ in 0..1000 * (before + 1) {
                tokio::task::yield_now().await;
            }
            let put = inner.put(&key, payload, mode).await;
            under_way.fetch_sub(1, Ordering::SeqCst);
            put
        };
        tokio::spawn(write).await.unwrap()
    }
}

/// Ranks write side by side. When one fails, the files of those that are still writing go too.
#[test]
fn what_other_ranks_were_writing_when_one_failed_is_removed() {
    block_on(async {
        let storage = checkpoint(4).await;
        // What one rank is to write cannot be read, which shows while the others write.
        let second = key("__1_0.distcp");
        let mut bytes = storage.read_all(&second).await.unwrap().to_vec();
        bytes[..64].fill(0xff);
        storage.put(&second, bytes.into(), PutMode::Overwrite).await.unwrap();
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let under_way = Arc::new(AtomicUsize::new(0));
        let slow = Detached { inner: Arc::clone(&place), under_way: Arc::clone(&under_way) };
        let options = JobOptions::default().with_parallelism(4);
        let writer = DcpWriter::new(Arc::new(slow));
        let done = reshard(&source(&storage), &writer, 4, &options).await;
        while under_way.load(Ordering::SeqCst) > 0 {
            tokio::task::yield_now().await;
        }
        let error = dcp_core::error::error_chain(&done.unwrap_err());
        assert!(error.contains("__1_0.distcp"), "{error}");
        assert_eq!(place.list(None).count().await, 0, "a file was left");
    });
}

/// A commit that fails removes what was written, and what was there before stays.
#[test]
fn a_commit_that_fails_leaves_what_was_there() {
    block_on(async {
        let storage = checkpoint(2).await;
        for n in 1.. {
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            reshard(&source(&storage), &DcpWriter::new(Arc::clone(&place)), 3, &small())
                .await
                .unwrap();
            let names = async || {
                let names = place.list(None).map(|meta| meta.unwrap().key).collect::<Vec<_>>();
                let mut names = names.await;
                names.sort();
                names
            };
            let before = names().await;
            let full = FaultStorage::new(Arc::clone(&place)).full_after(n - 1);
            let writer = DcpWriter::new(Arc::new(full.clone()));
            let done = reshard(&source(&storage), &writer, 2, &small()).await;
            if done.is_err() {
                assert_eq!(names().await, before, "full after {} operations", n - 1);
            } else {
                assert!(n > 5, "only {n} operations were tried");
                break;
            }
        }
    });
}

/// A format of plain bytes with a CRC-32 of each chunk, which its reader does not compare.
#[derive(Debug)]
struct Checksums(u32);

#[async_trait]
impl CheckpointAudit for Checksums {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        Ok(Findings::default())
    }

    async fn checksum(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: usize,
        _: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        Ok(ChunkChecksum::Crc32(self.0))
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        Ok(IndexFacts::default())
    }

    async fn save_record(&self, _: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        Ok(None)
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        None
    }
}

/// What a format says of its checksums is compared, whatever its reader does.
#[test]
fn checksums_of_another_format_are_compared() {
    let item = SafetensorsItem {
        name: "w".into(),
        dtype: DType::Float32,
        shape: [ROWS, COLUMNS].as_slice().into(),
    };
    let header = encode_header(&[item], &IndexMap::new()).unwrap().bytes;
    let elements: Vec<u8> = (0..ROWS * COLUMNS).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let crc32 = crc32fast::hash(&elements);
    for damaged in [false, true] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let mut bytes = [&*header, &elements].concat();
        let last = bytes.len() - 1;
        bytes[last] ^= u8::from(damaged);
        block_on(storage.put(&key("x.safetensors"), bytes.into(), PutMode::Create)).unwrap();
        let reader = Source::safetensors(Arc::clone(&storage), key("x.safetensors")).reader;
        let source = Source::new(storage, reader).with_audit(Arc::new(Checksums(crc32)));
        let report = block_on(verify(&source, true, &small())).unwrap();
        assert_eq!(report.ok, !damaged, "{report:?}");
        assert_eq!(report.problems.len(), usize::from(damaged));
        let written: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&written), key("y.safetensors"));
        let done = block_on(to_safetensors(&source, &target, &small()));
        assert_eq!(done.is_err(), damaged, "{done:?}");
        assert_eq!(block_on(written.contains(&key("y.safetensors"))).unwrap(), !damaged);
    }
}
