//! Whole jobs over a storage in memory: contents, memory, failures at every step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use dcp_conformance::{CountingStorage, Fault, FaultStorage, FaultWriter, MemoryStorage};
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Storage, StorageErrorKind, StorageReader,
};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::hf::HfLayout;
use dcp_formats::safetensors::{Header, SafetensorsItem, encode_header, header_len};
use dcp_formats::torch_save::TorchSaveOptions;
use dcp_jobs::convert::{to_hf, to_safetensors, to_torch_save};
use dcp_jobs::diff::{DiffOptions, diff};
use dcp_jobs::get::{Found, find};
use dcp_jobs::reshard::reshard;
use dcp_jobs::stats::stats;
use dcp_jobs::verify::verify;
use dcp_jobs::write::Target;
use dcp_jobs::{JobError, JobOptions, Selection, Source};
use dcp_testing::{block_on as run, key};
use futures_util::StreamExt;
use indexmap::IndexMap;
use proptest::prelude::*;

type Tensors = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

/// A storage with `in.safetensors`, which holds `tensors`.
async fn file(tensors: &Tensors) -> Arc<dyn Storage> {
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, _))| SafetensorsItem {
            name: name.as_str().into(),
            dtype: *dtype,
            shape: shape.as_slice().into(),
        })
        .collect();
    let encoded = encode_header(&items, &IndexMap::new()).unwrap();
    let mut bytes = encoded.bytes.to_vec();
    for index in encoded.order {
        bytes.extend_from_slice(&tensors[&*items[index].name].2);
    }
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    storage.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
    storage
}

async fn tensors_of(storage: &dyn Storage, name: &str) -> Tensors {
    let bytes = storage.read_all(&key(name)).await.unwrap();
    let len = usize::try_from(header_len(&bytes, bytes.len() as u64).unwrap()).unwrap();
    let (json, data) = bytes[8..].split_at(len);
    let header = Header::parse(json, data.len() as u64).unwrap();
    let tensors = header.tensors().map(|(name, info)| {
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        (name.to_string(), (info.dtype, info.shape.to_vec(), data[range].to_vec()))
    });
    tensors.collect()
}

fn tensor(dtype: DType, shape: &[u64], seed: u8) -> (DType, Vec<u64>, Vec<u8>) {
    let len = shape.iter().product::<u64>() * dtype.size() as u64;
    let bytes = (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed).collect();
    (dtype, shape.to_vec(), bytes)
}

fn small() -> JobOptions {
    JobOptions::default().with_max_memory(1).with_parallelism(2)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn contents_survive_any_way_through(
        shapes in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(0_u64..6, 0..4),
                // Larger than a segment, so that it goes through in pieces.
                (1_u64..5, 200_u64..400, 100_u64..300).prop_map(|(a, b, c)| vec![a, b, c]),
            ],
            1..5,
        ),
        dtype in prop::sample::select(vec![DType::UInt8, DType::BFloat16, DType::Complex64]),
        ranks in 1_u32..6,
    ) {
        let tensors: Tensors = shapes
            .iter()
            .enumerate()
            .map(|(at, shape)| (format!("t{at}"), tensor(dtype, shape, at as u8)))
            .collect();
        run(async {
            let storage = file(&tensors).await;
            let source = Source::safetensors(Arc::clone(&storage), key("in.safetensors"));
            let sharded: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let writer = DcpWriter::new(Arc::clone(&sharded));
            reshard(&source, &writer, ranks, &small()).await.unwrap();

            let source = Source::dcp(Arc::clone(&sharded), false);
            let report = verify(&source, true, &small()).await.unwrap();
            prop_assert!(report.ok, "{report:?}");
            let target = Target::new(Arc::clone(&storage), key("out.safetensors"));
            to_safetensors(&source, &target, &small()).await.unwrap();
            prop_assert!(tensors_of(&*storage, "out.safetensors").await == tensors);
            Ok(())
        })?;
    }
}

/// Records the most bytes that one read requested.
#[derive(Debug)]
struct Spy {
    inner: Arc<dyn StorageReader>,
    most: AtomicU64,
}

#[async_trait]
impl StorageReader for Spy {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let bytes = plan.items.iter().map(|item| match &item.kind {
            ReadKind::Tensor { region, .. } => region.volume() * 4,
            _ => 0,
        });
        self.most.fetch_max(bytes.sum(), Ordering::Relaxed);
        self.inner.read(metadata, plan, sink).await
    }
}

#[test]
fn a_tensor_larger_than_the_budget_goes_through_in_segments() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[3, 700, 1001], 1))]);
    run(async {
        let storage = file(&tensors).await;
        let inner = Source::safetensors(Arc::clone(&storage), key("in.safetensors")).reader;
        let spy = Arc::new(Spy { inner, most: AtomicU64::new(0) });
        let source = Source::new(Arc::clone(&storage), Arc::clone(&spy) as Arc<dyn StorageReader>);
        let options = JobOptions::default().with_max_memory(1 << 20);
        let target = Target::new(Arc::clone(&storage), key("out.safetensors"));
        to_safetensors(&source, &target, &options).await.unwrap();
        assert_eq!(tensors_of(&*storage, "out.safetensors").await, tensors);
        let sharded: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        reshard(&source, &DcpWriter::new(sharded), 2, &options).await.unwrap();
        let report = stats(&source, &Selection::all(), &options).await.unwrap();
        assert_eq!(report.total.count, 3 * 700 * 1001);
        assert!(diff(&source, &source, &DiffOptions::default(), &options).await.unwrap().equal);
        let most = spy.most.load(Ordering::Relaxed);
        assert!(most > 1 << 16 && most <= 1 << 20, "{most} bytes of 8.4 MB were held at once");
    });
}

/// Counts the bytes that reads in flight bring together.
#[derive(Debug)]
struct InFlight {
    inner: Arc<dyn StorageReader>,
    now: AtomicU64,
    most: AtomicU64,
}

#[async_trait]
impl StorageReader for InFlight {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let bytes = plan.items.iter().map(|item| match &item.kind {
            ReadKind::Tensor { region, .. } => region.volume(),
            _ => 0,
        });
        let bytes: u64 = bytes.sum();
        self.most
            .fetch_max(self.now.fetch_add(bytes, Ordering::Relaxed) + bytes, Ordering::Relaxed);
        tokio::task::yield_now().await;
        let report = self.inner.read(metadata, plan, sink).await;
        self.now.fetch_sub(bytes, Ordering::Relaxed);
        report
    }
}

#[test]
fn a_target_of_one_file_reads_as_many_segments_at_once_as_there_are_jobs() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::UInt8, &[1 << 20], 1))]);
    run(async {
        let storage = file(&tensors).await;
        for parallelism in [1, 4, 16] {
            let inner = Source::safetensors(Arc::clone(&storage), key("in.safetensors")).reader;
            let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
            let reader = Arc::new(InFlight { inner, now, most });
            let source = Source::new(Arc::clone(&storage), Arc::clone(&reader) as _);
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let options = JobOptions::default().with_max_memory(1 << 20);
            let options = options.with_parallelism(parallelism);
            let target = |name| Target::new(Arc::clone(&place), key(name));
            let segment = ((1 << 20) / (4 * parallelism as u64).max(8)) & !0xffff;
            let at_once = parallelism as u64 * segment.max(1 << 16);
            to_safetensors(&source, &target("out.safetensors"), &options).await.unwrap();
            assert_eq!(reader.most.swap(0, Ordering::Relaxed), at_once);
            to_torch_save(&source, &target("out.pt"), TorchSaveOptions::default(), &options)
                .await
                .unwrap();
            assert_eq!(reader.most.swap(0, Ordering::Relaxed), at_once);
            assert_eq!(tensors_of(&*place, "out.safetensors").await, tensors);
            assert!(at_once <= options.max_memory);
        }
    });
}

#[test]
fn a_folder_of_files_reads_as_many_segments_at_once_as_there_are_jobs() {
    let part = |seed| tensor(DType::UInt8, &[1 << 20], seed);
    let tensors = Tensors::from([("x".to_owned(), part(1)), ("y".to_owned(), part(2))]);
    run(async {
        let storage = file(&tensors).await;
        // With memory for one file at a time, and for two.
        for (memory, parallelism) in [(1 << 20, 4), (1 << 20, 16), (200 << 20, 8)] {
            let inner = Source::safetensors(Arc::clone(&storage), key("in.safetensors")).reader;
            let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
            let reader = Arc::new(InFlight { inner, now, most });
            let source = Source::new(Arc::clone(&storage), Arc::clone(&reader) as _);
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let options = small().with_max_memory(memory).with_parallelism(parallelism);
            let layout = HfLayout::MaxFileBytes(1 << 20);
            to_hf(&source, &place, &layout, false, &options).await.unwrap();
            let segment = ((memory / (4 * parallelism as u64).max(8)) & !0xffff).max(1 << 16);
            let at_once = (parallelism as u64 * segment).min(2 << 20);
            assert_eq!(reader.most.swap(0, Ordering::Relaxed), at_once);
            for (name, at) in [("x", 1), ("y", 2)] {
                let file = format!("model-0000{at}-of-00002.safetensors");
                let written = tensors_of(&*place, &file).await;
                assert_eq!(written.get(name), tensors.get(name));
            }
        }
    });
}

#[test]
fn the_archive_of_a_tensor_is_located_once_for_all_its_segments() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[1 << 20], 1))]);
    run(async {
        let options = JobOptions::default().with_max_memory(1 << 20);
        let source = Source::safetensors(file(&tensors).await, key("in.safetensors"));
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        reshard(&source, &DcpWriter::new(Arc::clone(&place)), 1, &options).await.unwrap();
        let counting = CountingStorage::new(place);
        let target = Target::new(Arc::new(MemoryStorage::new()), key("out.safetensors"));
        let source = Source::dcp(Arc::new(counting.clone()), false);
        to_safetensors(&source, &target, &options).await.unwrap();
        // 64 segments of 64 KiB; once it is located by the reader, once its checksum is looked up.
        let requests = counting.requests(&key("__0_0.distcp"));
        assert!((65..72).contains(&requests), "{requests} requests");
    });
}

#[test]
fn printing_reads_only_what_is_shown() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[2000, 1000], 1))]);
    run(async {
        let counting = CountingStorage::new(file(&tensors).await);
        let storage: Arc<dyn Storage> = Arc::new(counting.clone());
        let source = Source::safetensors(storage, key("in.safetensors"));
        let Found::Tensor(found) = find(&source, "x", None).await.unwrap() else { panic!() };
        let text = found.to_text().await.unwrap();
        assert!(text.contains("...,"), "{text}");
        let read = counting.counts().bytes_read;
        assert!(read < 100_000, "{read} of 8 MB were read");
    });
}

#[test]
fn a_conversion_that_fails_anywhere_leaves_no_file() {
    // One goes in a single request, the other in parts.
    for rows in [3, 3000] {
        let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[rows, 1000], 1))]);
        run(async {
            let inside = file(&tensors).await;
            let source = Source::safetensors(Arc::clone(&inside), key("in.safetensors"));
            for operation in 1.. {
                let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
                let fault = Fault::Fail(StorageErrorKind::Full);
                let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, fault);
                let target = Target::new(Arc::new(faulty.clone()), key("out.safetensors"));
                let done = to_safetensors(&source, &target, &small()).await;
                if faulty.operations() < operation {
                    done.unwrap();
                    assert!(operation > 2);
                    break;
                }
                let error = done.unwrap_err();
                assert!(error.to_string().contains("full"), "{error}");
                assert!(!place.contains(target.key()).await.unwrap(), "operation {operation}");
            }
        });
    }
}

#[test]
fn a_replacement_that_fails_to_be_made_leaves_the_old_file() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[6000, 1000], 1))]);
    run(async {
        let storage = file(&tensors).await;
        let broken = FaultStorage::new(Arc::clone(&storage)).dying_after(6);
        let source = Source::safetensors(Arc::new(broken), key("in.safetensors"));
        let out = key("out.safetensors");
        storage.put(&out, "old".into(), PutMode::Create).await.unwrap();
        let target = Target::new(Arc::clone(&storage), out.clone());
        let refused = to_safetensors(&source, &target, &small()).await.unwrap_err();
        assert!(matches!(refused, JobError::TargetExists { .. }));
        let target = target.overwrite(true);
        to_safetensors(&source, &target, &small()).await.unwrap_err();
        assert_eq!(storage.read_all(&out).await.unwrap(), "old");
        let source = Source::safetensors(Arc::clone(&storage), key("in.safetensors"));
        to_safetensors(&source, &target, &small()).await.unwrap();
        assert_eq!(tensors_of(&*storage, "out.safetensors").await, tensors);
        let names = storage.list(None).map(|meta| meta.unwrap().key.to_string());
        let mut names = names.collect::<Vec<_>>().await;
        names.sort();
        assert_eq!(names, ["in.safetensors", "out.safetensors"], "nothing is left beside it");

        // Wherever the replacement fails, the old file or the new one is there, whole.
        let new = storage.read_all(&out).await.unwrap();
        for operation in 1.. {
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            place.put(&out, "old".into(), PutMode::Create).await.unwrap();
            let fault = Fault::Fail(StorageErrorKind::Full);
            let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, fault);
            let target = Target::new(Arc::new(faulty.clone()), out.clone()).overwrite(true);
            let done = to_safetensors(&source, &target, &small()).await;
            if faulty.operations() < operation {
                done.unwrap();
                assert!(operation > 2);
                break;
            }
            let there = place.read_all(&out).await.unwrap();
            assert!(there == "old" || there == new, "operation {operation}");
        }
    });
}

#[test]
fn a_reshard_that_fails_anywhere_leaves_no_checkpoint() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[8, 4], 1))]);
    run(async {
        let inside = file(&tensors).await;
        let source = Source::safetensors(Arc::clone(&inside), key("in.safetensors"));
        for operation in 1.. {
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let fault = Fault::Fail(StorageErrorKind::Full);
            let faulty = FaultStorage::new(Arc::clone(&place)).fault(operation, fault);
            let writer = DcpWriter::new(Arc::new(faulty.clone()));
            let done = reshard(&source, &writer, 2, &small()).await;
            if faulty.operations() < operation {
                done.unwrap();
                break;
            }
            // Some failures come when the commit is done and only leftovers remain to be removed.
            let visible = place.contains(&key(".metadata")).await.unwrap();
            assert_eq!(done.is_ok(), visible, "operation {operation}");
        }
    });
}

#[test]
fn a_reshard_whose_commit_takes_effect_and_fails_keeps_the_checkpoint() {
    let tensors = Tensors::from([("x".to_owned(), tensor(DType::Float32, &[8, 4], 1))]);
    run(async {
        let source = Source::safetensors(file(&tensors).await, key("in.safetensors"));
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = FaultWriter::new(DcpWriter::new(Arc::clone(&place)), Arc::clone(&place));
        reshard(&source, &writer, 2, &small()).await.unwrap_err();
        assert!(writer.is_committed());
        let report = verify(&Source::dcp(place, false), true, &small()).await.unwrap();
        assert!(report.ok, "{:?}", report.problems);
    });
}
