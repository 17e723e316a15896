//! Indexes that no program writes: chunks that overlap, leave gaps, or lie about their bytes.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::plan::LoadPlan;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, FormatError, Storage, StorageReader};
use dcp_formats::dcp::DcpWriter;
use dcp_jobs::convert::to_safetensors;
use dcp_jobs::get::{Found, find};
use dcp_jobs::integrity::ProblemKind;
use dcp_jobs::reshard::reshard;
use dcp_jobs::verify::verify;
use dcp_jobs::write::Target;
use dcp_jobs::{JobOptions, Source};
use dcp_testing::{block_on as run, key};

/// An index made by hand, over files of `file_len` bytes.
#[derive(Debug)]
struct Handmade(Arc<CheckpointMetadata>);

#[async_trait]
impl StorageReader for Handmade {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.0))
    }

    async fn read(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: &LoadPlan,
        _: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        Err(FormatError::new("handmade", "there is no data").into())
    }
}

type Chunk<'a> = (&'a [u64], &'a [u64], Option<(u64, u64)>);

async fn handmade(shape: &[u64], chunks: &[Chunk<'_>], file_len: usize) -> Source {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let name = key("data.bin");
    storage.put(&name, vec![0; file_len].into(), PutMode::Create).await.unwrap();
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&name).unwrap();
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
    let mut tensor = TensorEntry::new(DType::UInt8, shape);
    for (offsets, sizes, place) in chunks {
        let placement = place.map(|(byte_offset, byte_len)| Placement {
            file,
            encoding,
            byte_offset,
            byte_len,
        });
        tensor.chunks.push(offsets, sizes, placement).unwrap();
    }
    metadata.insert("w", Entry::Tensor(tensor));
    metadata.insert("o", Entry::Object(ObjectEntry::new(None)));
    Source::new(storage, Arc::new(Handmade(Arc::new(metadata))))
}

fn kinds(shape: &[u64], chunks: &[Chunk<'_>], file_len: usize) -> Vec<ProblemKind> {
    run(async {
        let source = handmade(shape, chunks, file_len).await;
        let report = verify(&source, false, &JobOptions::default()).await.unwrap();
        // The object without a place is in all of them.
        let of_tensor = report.problems.iter().filter(|p| p.key.as_deref() != Some("o"));
        of_tensor.map(|problem| problem.kind).collect()
    })
}

#[test]
fn verify_names_every_kind_of_bad_structure() {
    let a = (&[0][..], &[4][..], Some((0, 4)));
    let b = (&[4][..], &[4][..], Some((4, 4)));
    assert_eq!(kinds(&[8], &[a, b], 8), []);
    assert_eq!(kinds(&[8], &[a], 8), [ProblemKind::Uncovered]);
    assert_eq!(kinds(&[8], &[a, b], 7), [ProblemKind::ShortFile]);
    let outside = (&[5][..], &[4][..], Some((4, 4)));
    assert!(kinds(&[8], &[a, outside], 8).contains(&ProblemKind::OutOfBounds));
    let over = (&[3][..], &[5][..], Some((4, 5)));
    assert!(kinds(&[8], &[a, over], 9).contains(&ProblemKind::Overlap));
    let shared = (&[4][..], &[4][..], Some((2, 4)));
    assert_eq!(kinds(&[8], &[a, shared], 8), [ProblemKind::SharedBytes]);
    let nowhere = (&[4][..], &[4][..], None);
    assert_eq!(kinds(&[8], &[a, nowhere], 8), [ProblemKind::Index]);
    let endless = (&[u64::MAX][..], &[u64::MAX][..], Some((u64::MAX, u64::MAX)));
    assert!(kinds(&[8], &[a, b, endless], 8).len() >= 2);
}

#[test]
fn a_lying_shape_claims_no_memory() {
    let huge = 1_u64 << 50;
    run(async {
        let source = handmade(&[huge], &[(&[0], &[huge], Some((0, huge)))], 16).await;
        let Found::Tensor(found) = find(&source, "w", None).await.unwrap() else { panic!() };
        let error = found.read().await.unwrap_err().to_string();
        assert!(error.contains("hold 16 of its 1125899906842624 elements"), "{error}");
        found.to_json().await.unwrap_err();
        // What is printed is small, however large the tensor claims to be.
        assert!(found.to_text().await.unwrap_err().to_string().contains("there is no data"));
        let target = Target::new(Arc::new(MemoryStorage::new()), key("x.npy"));
        found.to_npy(&target, &JobOptions::default()).await.unwrap_err();
    });
}

#[test]
fn unsound_checkpoints_are_not_converted() {
    run(async {
        let overlapping: [Chunk<'_>; 2] = [(&[0], &[6], Some((0, 6))), (&[4], &[4], Some((6, 4)))];
        let source = handmade(&[8], &overlapping, 10).await;
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&place), key("x.safetensors"));
        let error = to_safetensors(&source, &target, &JobOptions::default()).await.unwrap_err();
        assert!(
            error.to_string().contains("overlapping chunks chunk [0:6] and chunk [4:8]"),
            "{error}"
        );
        let writer = DcpWriter::new(Arc::clone(&place));
        reshard(&source, &writer, 2, &JobOptions::default()).await.unwrap_err();
        assert!(reshard(&source, &writer, 0, &JobOptions::default()).await.is_err());
        assert!(!place.contains(&key(".metadata")).await.unwrap());
    });
}
