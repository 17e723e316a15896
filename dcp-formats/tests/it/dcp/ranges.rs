//! Only the bytes that are needed are read, and put where they belong.

use std::sync::Arc;
use std::time::Duration;

use dcp_conformance::{CountingStorage, MemoryStorage, SlowStorage, WebStorage};
use dcp_core::checkpoint::ReadReport;
use dcp_core::error::error_chain;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::storage::Capabilities;
use dcp_core::{DType, HostMemory, Region, Shard, Storage, StorageReader as _, Tensor, TensorView};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use proptest::prelude::*;
use tokio::time::Instant;

use crate::harness::{
    Leaf, Sink, State, block_on, cut, delete, fixture, get, load, load_with, put, save, whole_plan,
};

/// Fills `region` of entry 0 from all chunks that hold some of it; returns its bytes.
pub(super) fn load_region(
    storage: Arc<dyn Storage>,
    region: &Region,
    padding: u64,
) -> (Vec<u8>, ReadReport) {
    block_on(async {
        let reader = DcpReader::builder(storage).scratch_bytes(1 << 20).build();
        let metadata = reader.metadata().await.unwrap();
        let entry = metadata.at(0).unwrap().1.as_tensor().unwrap();
        let mut strides = vec![1; region.ndim()];
        let mut stride = 1;
        for axis in (0..region.ndim()).rev() {
            strides[axis] = stride;
            stride *= region.sizes()[axis] + padding;
        }
        let memory = HostMemory::zeroed(stride as usize * entry.dtype.size());
        let view =
            TensorView::strided(memory, entry.dtype, region.sizes().clone(), strides, 0).unwrap();
        let shard = Shard::with_view(region.clone(), view.clone()).unwrap();
        let tensor = Tensor::sharded(entry.dtype, entry.shape.clone(), vec![shard]).unwrap();
        let items = (0..)
            .zip(entry.chunks.iter())
            .filter_map(|(chunk, stored)| {
                let region = stored.region().unwrap().intersect(region)?;
                let kind = ReadKind::Tensor { chunk, shard: 0, region };
                Some(ReadItem { entry: 0, leaf: 0, kind })
            })
            .collect();
        let sink = Sink::new(vec![Some(tensor)]);
        let report = reader.read(&metadata, &LoadPlan { items }, sink).await.unwrap();
        (view.payload().unwrap().to_bytes().to_vec(), report)
    })
}

fn one_tensor(world: usize, dtype: DType, shape: &[u64]) -> (Arc<MemoryStorage>, Vec<u8>) {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(world).rows("w", dtype, shape, 5);
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    let Leaf::Tensor { bytes, .. } = state.leaves.into_iter().next().unwrap().1 else {
        panic!("no tensor")
    };
    (storage, bytes)
}

#[test]
fn a_row_slice_costs_what_it_has() {
    let shape = [4096, 4096];
    let (storage, bytes) = one_tensor(1, DType::UInt8, &shape);
    let counting = CountingStorage::new(storage);
    let region = Region::new([64 * 17, 0], [64, 4096]).unwrap();
    let (found, report) = load_region(Arc::new(counting.clone()), &region, 0);
    assert!(found == cut(&bytes, DType::UInt8, &shape, &region));
    assert_eq!(report.bytes_needed, 64 * 4096);
    let ratio = report.bytes_read as f64 / report.bytes_needed as f64;
    assert!(ratio < 1.01, "{ratio}");
    let index = counting.counts().bytes_read - report.bytes_read;
    assert!(index < 2000, "{index} bytes of metadata");
}

/// One request for the index, and one for all names and lengths, however many files there are.
#[test]
fn a_checkpoint_of_many_files_opens_with_two_requests() {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(12).rows("w", DType::Float32, &[48, 4], 5);
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    let counting = CountingStorage::new(storage);
    let metadata = block_on(DcpReader::new(Arc::new(counting.clone())).metadata()).unwrap();
    assert_eq!(metadata.files().len(), 12);
    let counts = counting.counts();
    assert_eq!((counts.whole_reads, counts.folder_lists, counts.operations()), (1, 1, 2));
}

/// Each request has to find what is wrong with its file then, and images still need lengths.
#[test]
fn a_checkpoint_whose_files_are_not_checked_opens_with_one_request() {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(3).rows("w", DType::Float32, &[48, 4], 5);
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    let unchecked = |storage| DcpReader::builder(storage).check_files(false).build();
    let web: Arc<dyn Storage> = Arc::new(WebStorage::new(storage.clone()));
    for inner in [Arc::clone(&storage) as Arc<dyn Storage>, web] {
        let counting = CountingStorage::new(inner);
        let reader = unchecked(Arc::new(counting.clone()));
        block_on(reader.metadata()).unwrap();
        let counts = counting.counts();
        assert_eq!((counts.whole_reads, counts.operations()), (1, 1));
        assert!(load_with(&reader).unwrap().same(&state.loaded()));
        let counts = counting.counts();
        assert_eq!(counts.reads, 3, "one for each file");
        assert_eq!(counts.operations(), 4);
    }

    let short = get(&*storage, "__1_0.distcp");
    put(&*storage, "__1_0.distcp", short[..short.len() - 900].to_vec());
    let error = load_with(&unchecked(storage.clone())).unwrap_err();
    assert!(error_chain(&error).contains("__1_0.distcp"), "{}", error_chain(&error));
    delete(&*storage, "__1_0.distcp");
    let error = load_with(&unchecked(storage.clone())).unwrap_err();
    assert!(error_chain(&error).contains("__1_0.distcp"), "{}", error_chain(&error));

    for name in ["safetensors_fmt_with_objects", "no_collectives_2r"] {
        let found = load_with(&unchecked(fixture(name))).unwrap();
        assert!(found.same(&load(fixture(name)).unwrap()), "{name}");
    }
}

/// The index with the listing; the sidecar with the ends of the archive; the elements.
#[test]
fn a_load_waits_for_three_answers() {
    let (storage, bytes) = one_tensor(1, DType::UInt8, &[1024, 1024]);
    let counting = CountingStorage::new(storage);
    let second = Duration::from_secs(1);
    let slow = SlowStorage::new(Arc::new(counting.clone()), second);
    let reader = DcpReader::builder(Arc::new(slow)).compare_saved(true).build();
    // The clock stands still but for waits, whatever the machine does.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let waited = runtime.block_on(async {
        let begun = Instant::now();
        let metadata = reader.metadata().await.unwrap();
        let (plan, sink) = whole_plan(&metadata);
        reader.read(&metadata, &plan, Arc::clone(&sink) as _).await.unwrap();
        let found = sink.tensors[0].clone().unwrap();
        assert!(found.shards()[0].view().unwrap().payload().unwrap().to_bytes() == bytes);
        begun.elapsed()
    });
    assert_eq!(waited, 3 * second);
    assert_eq!(counting.counts().whole_reads, 2, "the index and the sidecar");
}

#[test]
fn a_column_slice_skips_what_is_worth_skipping() {
    let shape = [256, 65_536];
    let (storage, bytes) = one_tensor(1, DType::UInt8, &shape);
    let region = Region::new([0, 1000], [256, 128]).unwrap();
    let expected = cut(&bytes, DType::UInt8, &shape, &region);
    let mut capabilities = Capabilities::none();
    capabilities.parallelism = 3;
    for (gap, most) in [(0, 1.1), (1 << 20, 520.0)] {
        capabilities.coalesce_gap = gap;
        let counting =
            CountingStorage::new(Arc::new((*storage).clone().with_capabilities(capabilities)));
        let (found, report) = load_region(Arc::new(counting.clone()), &region, 0);
        assert!(found == expected, "gap {gap}");
        let ratio = report.bytes_read as f64 / report.bytes_needed as f64;
        assert!(ratio < most, "gap {gap}: {ratio}");
        // The data takes a few requests: as many as the scratch is often filled.
        assert!(counting.counts().reads < 50, "{:?}", counting.counts());
    }
}

#[test]
fn t16_parts_of_transposed_tensors_follow_the_strides() {
    let storage = fixture("views");
    let metadata = block_on(DcpReader::new(storage.clone()).metadata()).unwrap();
    let (index, entry) = (0..)
        .zip(metadata.iter())
        .find_map(|(index, (fqn, entry))| fqn.contains("transposed").then_some((index, entry)))
        .unwrap();
    let entry = entry.as_tensor().unwrap();
    let shape = entry.shape.clone();
    let load = |region: Region| {
        let shard = Tensor::zeros_sharded(entry.dtype, shape.clone(), [region.clone()]).unwrap();
        let view = shard.shards()[0].view().unwrap().clone();
        let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
        let items = vec![ReadItem { entry: index, leaf: 0, kind }];
        let sink = Sink::new(vec![Some(shard)]);
        let reader = DcpReader::new(storage.clone());
        block_on(reader.read(&metadata, &LoadPlan { items }, sink)).unwrap();
        view.payload().unwrap().to_bytes().to_vec()
    };
    let whole = load(Region::full(shape.clone()).unwrap());
    let part = Region::new([1, 1], [2, 1]).unwrap();
    assert_eq!(load(part.clone()), cut(&whole, entry.dtype, &shape, &part));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_region_of_any_sharding_is_right(
        world in 1..4_usize,
        rows in 1..40_u64,
        columns in 1..3000_u64,
        at in (0..40_u64, 0..3000_u64),
        len in (1..40_u64, 1..3000_u64),
        padding in 0..3_u64,
    ) {
        let shape = [rows, columns];
        let (storage, bytes) = one_tensor(world, DType::Float32, &shape);
        let offsets = [at.0 % rows, at.1 % columns];
        let sizes = [1 + len.0 % (rows - offsets[0]), 1 + len.1 % (columns - offsets[1])];
        let region = Region::new(offsets, sizes).unwrap();
        let (found, _) = load_region(storage, &region, padding);
        prop_assert!(found == cut(&bytes, DType::Float32, &shape, &region));
    }
}
