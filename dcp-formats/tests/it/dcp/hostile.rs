//! Checkpoints made to exhaust memory: their claims are either served within bounds or refused.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::metadata::{Encoding, Entry, ObjectEntry, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, FormatError, Region, StorageReader as _, Tensor,
};
use dcp_formats::dcp::DcpReader;
use dcp_formats::metadata::{Profile, encode};
use dcp_formats::pickle::Writer;
use dcp_formats::torch_tensor::TensorLayout;
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use proptest::prelude::*;

use crate::harness::{Sink, block_on, key, load, put};

/// A checkpoint of the one tensor `w`, in one chunk.
fn of_one_tensor(
    dtype: DType,
    shape: &[u64],
    blob: Vec<u8>,
    encoding: &Encoding,
) -> Arc<MemoryStorage> {
    of_one(blob, encoding, |placement| {
        let mut tensor = TensorEntry::new(dtype, shape);
        tensor.chunks.push(&vec![0; shape.len()], shape, Some(placement)).unwrap();
        Entry::Tensor(tensor)
    })
}

fn of_one(
    blob: Vec<u8>,
    encoding: &Encoding,
    entry: impl FnOnce(Placement) -> Entry,
) -> Arc<MemoryStorage> {
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&key("__0_0.distcp")).unwrap();
    let encoding = metadata.intern_encoding(encoding).unwrap();
    let placement = Placement { file, encoding, byte_offset: 0, byte_len: blob.len() as u64 };
    metadata.insert("w", entry(placement));
    let storage = MemoryStorage::new();
    put(&storage, "__0_0.distcp", blob);
    put(&storage, ".metadata", encode(&metadata, Profile::Torch2_15).unwrap().to_vec());
    Arc::new(storage)
}

/// Part of the chunk of `w`.
fn read_part(storage: Arc<MemoryStorage>, region: Region) -> Result<Vec<u8>, CheckpointError> {
    let reader = DcpReader::new(storage);
    let metadata = block_on(reader.metadata())?;
    let tensor = metadata.get("w").unwrap().as_tensor().unwrap();
    let shard = Tensor::zeros_sharded(tensor.dtype, tensor.shape.clone(), [region.clone()])?;
    let sink = Sink::new(vec![Some(shard)]);
    let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
    let plan = LoadPlan { items: vec![ReadItem { entry: 0, leaf: 0, kind }] };
    block_on(reader.read(&metadata, &plan, Arc::clone(&sink) as _))?;
    let shard = &sink.tensors[0].as_ref().unwrap().shards()[0];
    Ok(shard.view().unwrap().payload().unwrap().to_bytes().to_vec())
}

/// The archive of a float tensor over a storage of `values`, with any sizes and strides.
fn strided(values: &[f32], sizes: &[u64], strides: &[u64], conj: bool) -> Vec<u8> {
    let class = if conj { "ComplexFloatStorage" } else { "FloatStorage" };
    let numel = values.len() as u64 / if conj { 2 } else { 1 };
    let mut writer = Writer::new();
    writer.global("torch._utils", "_rebuild_tensor_v2");
    let put = |writer: &mut Writer| {
        writer.tuple(5, |writer| {
            writer.constant("storage");
            writer.global("torch", class);
            writer.str("0");
            writer.constant("cpu");
            writer.uint(numel);
            Ok::<(), FormatError>(())
        })?;
        writer.persistent();
        writer.uint(0);
        writer.uint_tuple(sizes);
        writer.uint_tuple(strides);
        writer.bool(false);
        writer.none();
        if conj {
            writer.dict(std::iter::once("conj"), |writer, bit| {
                writer.constant(bit);
                writer.bool(true);
                Ok::<(), FormatError>(())
            })?;
        }
        Ok::<(), FormatError>(())
    };
    writer.tuple(6 + usize::from(conj), put).unwrap();
    writer.call();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let pickle = writer.finish().unwrap();
    ArchiveEncoder::encode(RecordSet::default(), pickle, &[&bytes]).unwrap().to_vec()
}

/// A zstd frame of zeros that takes 4 bytes for 128 KiB.
#[cfg(feature = "zstd")]
fn zstd_zeros(blocks: u32) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    for block in 1..=blocks {
        let header = u32::from(block == blocks) | 1 << 1 | (128 << 10) << 3;
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

#[test]
fn a_part_of_an_expanded_tensor_takes_no_more_than_the_part() {
    let shape = [1_u64 << 40];
    let blob = strided(&[1.5], &shape, &[0], false);
    let storage = of_one_tensor(DType::Float32, &shape, blob, &Encoding::default());
    let part = read_part(storage, Region::new([1 << 39], [3]).unwrap()).unwrap();
    assert_eq!(part, [1.5_f32.to_le_bytes(); 3].concat());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn parts_of_any_layout_are_cut_from_the_whole(
        sizes in prop::collection::vec(1_u64..5, 1..4),
        strides in prop::collection::vec(0_u64..7, 3),
        cut in prop::collection::vec((0_u64..4, 1_u64..5), 3),
        conj: bool,
    ) {
        let strides = &strides[..sizes.len()];
        let values: Vec<f32> = (0_u8..160).map(f32::from).collect();
        let dtype = if conj { DType::Complex64 } else { DType::Float32 };
        let blob = strided(&values, &sizes, strides, conj);
        let storage = of_one_tensor(dtype, &sizes, blob, &Encoding::default());
        let offsets: Vec<u64> = sizes.iter().zip(&cut).map(|(n, (at, _))| at % n).collect();
        let lens: Vec<u64> = sizes.iter().zip(&offsets).zip(&cut)
            .map(|((n, at), (_, len))| *len.min(&(n - at))).collect();
        let region = Region::new(offsets, lens).unwrap();
        let mut expected = Vec::new();
        for (first, len) in region.runs_in(&sizes) {
            for element in first..first + len {
                let (mut left, mut at) = (element, 0);
                for (size, stride) in sizes.iter().zip(strides).rev() {
                    at += left % size * stride;
                    left /= size;
                }
                let at = at as usize;
                if conj {
                    expected.extend(values[2 * at].to_le_bytes());
                    expected.extend((-values[2 * at + 1]).to_le_bytes());
                } else {
                    expected.extend(values[at].to_le_bytes());
                }
            }
        }
        prop_assert_eq!(read_part(storage, region).unwrap(), expected);
    }
}

#[cfg(feature = "zstd")]
#[test]
fn a_compressed_chunk_cannot_claim_what_nobody_wants() {
    let shape = [1_u64 << 40];
    let encoding = Encoding::default().with_transforms(["stream.zstd/1".into()]);
    let storage = of_one_tensor(DType::Int8, &shape, zstd_zeros(16), &encoding);
    let error = read_part(storage, Region::new([0], [2]).unwrap()).unwrap_err();
    let CheckpointError::Format(error) = error else { panic!("{error}") };
    assert_eq!(error.file(), Some("__0_0.distcp"));
    assert!(error.problem().contains("\"w\""), "{error}");
    assert!(error.problem().contains("decompress"), "{error}");
}

#[cfg(feature = "zstd")]
#[test]
fn a_compressed_object_cannot_become_a_gibibyte() {
    let encoding = Encoding::default().with_transforms(["stream.zstd/1".into()]);
    let storage = of_one(zstd_zeros(1 << 12), &encoding, |placement| {
        Entry::Object(ObjectEntry::new(Some(placement)))
    });
    let error = load(storage).unwrap_err();
    let CheckpointError::Format(error) = error else { panic!("{error}") };
    assert_eq!(error.file(), Some("__0_0.distcp"));
    assert!(error.problem().contains("\"w\": it decompresses to more than"), "{error}");
}

#[test]
fn tensors_have_no_more_axes_than_pytorch_allows() {
    let shape = vec![1_u64; 65];
    let refused = |error: &FormatError| error.problem().contains("65 axes");
    let blob = strided(&[1.0], &[1], &[1], false);
    let storage = of_one_tensor(DType::Float32, &shape, blob, &Encoding::default());
    let error = block_on(DcpReader::new(storage).metadata()).unwrap_err();
    assert!(
        error.to_string().contains("65 axes") && error.to_string().contains("\"w\""),
        "{error}"
    );

    assert!(refused(&TensorLayout::contiguous(DType::Float32, shape.clone()).unwrap_err()));
    assert!(TensorLayout::contiguous(DType::Float32, &shape[1..]).is_ok());

    let json = format!(r#"{{"w":{{"dtype":"U8","shape":{shape:?},"data_offsets":[0,1]}}}}"#);
    let error = dcp_formats::safetensors::Header::parse(json.as_bytes(), 1).unwrap_err();
    assert!(refused(&error), "{error}");
}

#[test]
fn empty_boxes_of_huge_axes_do_not_overflow() {
    let shape = [1_u64 << 40, 1 << 40, 0];
    let blob = strided(&[], &shape, &[1, 1, 1], false);
    let storage = of_one_tensor(DType::Float32, &shape, blob, &Encoding::default());
    assert_eq!(read_part(storage, Region::full(shape).unwrap()).unwrap(), [0; 0]);
}
