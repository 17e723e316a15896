//! Arrays that no fixture has: padded parts, parts without files, damage.

use std::sync::Arc;

use dcp_core::Storage;
use dcp_formats::zarr::ZarrReader;
use dcp_jobs::Source;
use dcp_jobs::get::{Found, find};
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions};
use proptest::prelude::*;

use crate::support::{block_on, in_memory, put, stored};

/// An array of bytes whose elements are their own row-major numbers, in padded parts.
fn array(storage: &dyn Storage, shape: &[u64], chunks: &[u64], fill: &str) {
    let header = format!(
        r#"{{"zarr_format": 2, "shape": {shape:?}, "chunks": {chunks:?}, "dtype": "|u1",
            "compressor": null, "filters": null, "order": "C", "fill_value": {fill}}}"#
    );
    put(storage, "a/.zarray", header.into_bytes());
    let grid: Vec<u64> =
        shape.iter().zip(chunks).map(|(len, chunk)| len.div_ceil(*chunk)).collect();
    for cell in cells(&grid) {
        let mut bytes = Vec::new();
        for inner in cells(chunks) {
            let at: Vec<u64> =
                cell.iter().zip(chunks).zip(&inner).map(|((c, chunk), i)| c * chunk + i).collect();
            let inside = at.iter().zip(shape).all(|(at, len)| at < len);
            let number = at.iter().zip(shape).fold(0, |number, (at, len)| number * len + at);
            bytes.push(if inside { number as u8 } else { 0xee });
        }
        let name: Vec<String> = cell.iter().map(ToString::to_string).collect();
        put(storage, &format!("a/{}", name.join(".")), bytes);
    }
}

fn cells(grid: &[u64]) -> Vec<Vec<u64>> {
    grid.iter().fold(vec![Vec::new()], |cells, len| {
        let longer = |cell: &Vec<u64>, n| cell.iter().copied().chain([n]).collect();
        cells.iter().flat_map(|cell| (0..*len).map(move |n| longer(cell, n))).collect()
    })
}

fn read(storage: &Arc<dyn Storage>, slice: Option<&str>) -> Vec<u8> {
    let reader = block_on(ZarrReader::open(Arc::clone(storage), true)).unwrap();
    let source = Source::new(Arc::clone(storage), Arc::new(reader));
    let Found::Tensor(found) = block_on(find(&source, "a", slice)).unwrap() else { panic!() };
    block_on(found.read()).unwrap().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn padding_is_never_seen(axes in prop::collection::vec((1..6_u64, 1..5_u64), 1..4)) {
        let (shape, chunks): (Vec<u64>, Vec<u64>) = axes.into_iter().unzip();
        let storage: Arc<dyn Storage> = Arc::new(dcp_conformance::MemoryStorage::new());
        array(&*storage, &shape, &chunks, "null");
        let expected: Vec<u8> = (0..shape.iter().product::<u64>()).map(|n| n as u8).collect();
        prop_assert_eq!(read(&storage, None), expected);
    }
}

#[test]
fn a_part_without_a_file_is_zero_only_where_the_header_says_so() {
    let storage: Arc<dyn Storage> = Arc::new(dcp_conformance::MemoryStorage::new());
    array(&*storage, &[4, 3], &[2, 2], "0");
    crate::support::remove(&*storage, "a/1.0");
    assert_eq!(read(&storage, None), [0, 1, 2, 3, 4, 5, 0, 0, 8, 0, 0, 11]);
    assert_eq!(read(&storage, Some("2:4,1:3")), [0, 8, 0, 11]);

    array(&*storage, &[4, 3], &[2, 2], "null");
    crate::support::remove(&*storage, "a/1.0");
    let error = block_on(ZarrReader::open(Arc::clone(&storage), false)).unwrap_err().to_string();
    assert!(error.contains("a/.zarray") && error.contains("\"1.0\" is missing"), "{error}");
    let tolerant = block_on(ZarrReader::open(Arc::clone(&storage), true)).unwrap();
    assert_eq!(tolerant.warnings().len(), 1);
    assert_eq!(read(&storage, Some("0:2")), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_short_file_and_a_shape_beyond_all_files_are_refused() {
    let storage: Arc<dyn Storage> = Arc::new(dcp_conformance::MemoryStorage::new());
    array(&*storage, &[4], &[2], "null");
    put(&*storage, "a/1", vec![0]);
    let error = block_on(ZarrReader::open(Arc::clone(&storage), false)).unwrap_err().to_string();
    assert!(error.contains("1 bytes instead of 2"), "{error}");
    let hostile = r#"{"zarr_format": 2, "shape": [4611686018427387904], "chunks": [1],
        "dtype": "|u1", "order": "C", "fill_value": 0}"#;
    put(&*storage, "a/.zarray", hostile.into());
    for tolerant in [false, true] {
        let error = block_on(ZarrReader::open(Arc::clone(&storage), tolerant)).unwrap_err();
        assert!(error.to_string().contains("it should have"), "{error}");
    }
}

#[test]
fn folders_of_locks_are_no_tensors() {
    let storage = stored("v09_zarr");
    put(&*storage, "row.weight.sync/.zarray", Vec::new());
    put(&*storage, "row.weight.sync/0.0", Vec::new());
    let checkpoint =
        block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    assert!(metadata.get("row.weight").is_some() && metadata.get("row.weight.sync").is_none());
}

/// Real objects hold arrays of numpy, which no plain value can: they stay whole in their list.
#[test]
fn objects_are_written_again_as_they_are() {
    let folder = crate::support::fixture("v06_zarr").join("ckpt");
    let storage: Arc<dyn Storage> = in_memory(&folder);
    let checkpoint =
        block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
    let value = dcp_jobs::read::read_object(checkpoint.source(), "rng_state/shard_0.1_1.2");
    let value = block_on(value).unwrap();
    let blob = dcp_formats::torch_object::encode_object(&value).unwrap();
    let item = dcp_formats::torch_save::decode_only_item(&blob).unwrap();
    let file = std::fs::read(folder.join("rng_state/shard_0.1_1.pt")).unwrap();
    let alone = dcp_formats::torch_object::decode_object(&file.into()).unwrap();
    assert!(item.view().same(alone.view()));
}
