//! Conversions to safetensors, checked by reading the image with the format's own rules.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::StorageExt as _;
use dcp_core::{DType, Key, Storage};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_formats::safetensors::{Header, PREFIX_LEN, header_len};
use dcp_jobs::convert::to_safetensors;
use dcp_jobs::reshard::reshard;
use dcp_jobs::write::Target;
use dcp_jobs::{JobOptions, Source};

use crate::support::{block_on, fixture};

fn source(storage: &Arc<dyn Storage>) -> Source {
    Source::new(Arc::clone(storage), Arc::new(DcpReader::new(Arc::clone(storage))))
}

/// Converts a fixture and returns header, data, and where the data begins in the file.
fn convert(name: &str) -> (Header, Vec<u8>, u64) {
    let output: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let key = Key::new("out.safetensors").unwrap();
    let target = Target::new(Arc::clone(&output), key.clone());
    let source = source(&fixture(name));
    let image = block_on(async {
        to_safetensors(&source, &target, &JobOptions::default()).await.unwrap();
        output.read_all(&key).await.unwrap()
    });
    let start = PREFIX_LEN + header_len(&image, image.len() as u64).unwrap();
    let (head, data) = image.split_at(start as usize);
    let header = Header::parse(&head[PREFIX_LEN as usize..], data.len() as u64).unwrap();
    (header, data.to_vec(), start)
}

/// T11: PyTorch 2.15's consolidation turns 0-dim tensors to zero, fails on integers and bools,
/// and writes headers without padding and without `format`.
#[test]
fn t11_scalars_and_integers_survive_and_the_header_is_proper() {
    let (header, data, start) = convert("fsdp2_adam_2r");
    assert_eq!(start % 8, 0, "the data is aligned");
    assert_eq!(header.metadata().get("format").map(String::as_str), Some("pt"));
    let step = header.get("optimizer.state.embed.weight.step").unwrap();
    assert!(step.shape.is_empty());
    let bytes = &data[step.byte_range.start as usize..step.byte_range.end as usize];
    assert!(f32::from_le_bytes(bytes.try_into().unwrap()) > 0.0);
    let batches = header.get("model.bn.num_batches_tracked").unwrap();
    assert_eq!(batches.dtype, DType::Int64);

    let (header, ..) = convert("all_dtypes");
    for dtype in [DType::Bool, DType::Int8, DType::UInt64, DType::Float8E4M3Fn] {
        assert!(header.tensors().any(|(_, info)| info.dtype == dtype), "{dtype}");
    }
}

#[test]
fn tensors_larger_than_the_memory_pass_through_it() {
    let (small, large) = (JobOptions::default().with_max_memory(0), JobOptions::default());
    let images = [small, large].map(|options| {
        let source = source(&fixture("threads4_single_file"));
        let output: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&output), Key::new("out").unwrap());
        block_on(async {
            to_safetensors(&source, &target, &options).await.unwrap();
            output.read_all(target.key()).await.unwrap()
        })
    });
    assert_eq!(images[0], images[1]);
}

#[test]
fn a_resharded_checkpoint_converts_to_the_same_tensors() {
    let resharded: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let original = fixture("tp_fsdp_2x2");
    let images = block_on(async {
        let writer = DcpWriter::new(Arc::clone(&resharded));
        reshard(&source(&original), &writer, 5, &JobOptions::default()).await.unwrap();
        let mut images = Vec::new();
        for storage in [&original, &resharded] {
            let output: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let target = Target::new(Arc::clone(&output), Key::new("out").unwrap());
            to_safetensors(&source(storage), &target, &JobOptions::default()).await.unwrap();
            images.push(output.read_all(target.key()).await.unwrap());
        }
        images
    });
    let tensors = |image: &[u8]| {
        let start = (PREFIX_LEN + header_len(image, image.len() as u64).unwrap()) as usize;
        let data = &image[start..];
        let header = Header::parse(&image[PREFIX_LEN as usize..start], data.len() as u64).unwrap();
        let mut all: Vec<_> = header
            .tensors()
            .map(|(name, info)| {
                let range = info.byte_range.start as usize..info.byte_range.end as usize;
                (name.to_string(), info.dtype, info.shape.clone(), data[range].to_vec())
            })
            .collect();
        all.sort();
        all
    };
    assert_eq!(tensors(&images[0]), tensors(&images[1]));
}
