//! Items that are written through zstd: what they take, and what damage does to them.

use std::num::NonZeroUsize;
use std::sync::Arc;

use dcp_conformance::{CountingStorage, MemoryStorage};
use dcp_core::metadata::{Entry, Placement};
use dcp_core::storage::WriteLimits;
use dcp_core::{
    CheckpointMetadata, DType, Region, Storage, StorageReader as _, StorageWriter as _,
};
use dcp_formats::dcp::{DcpReader, DcpWriter, FileLayout, Sidecar, Zstd, sidecar_of};
use proptest::prelude::*;

use super::ranges::load_region;
use crate::harness::{
    Leaf, State, block_on, cut, get, load, names, put, save, save_in_segments, write_all,
};

const MIB: u64 = 1 << 20;

fn zstd(storage: Arc<dyn Storage>, zstd: Zstd) -> DcpWriter {
    DcpWriter::builder(storage).zstd(zstd).build()
}

fn state(seed: u8) -> State {
    State::new(2)
        .rows("model.w", DType::BFloat16, &[50, 30], seed)
        .rows("model.empty", DType::Int64, &[0, 4], seed)
        .object("step", i64::from(seed))
        .object("name", "a \"name\"\n".repeat(100))
}

/// Bytes that zstd cannot compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}

fn metadata(storage: &Arc<MemoryStorage>) -> Arc<CheckpointMetadata> {
    block_on(DcpReader::new(storage.clone()).metadata()).unwrap()
}

fn placements(metadata: &CheckpointMetadata) -> Vec<Placement> {
    let of_entry = |entry: &Entry| match entry {
        Entry::Tensor(tensor) => tensor.chunks.iter().filter_map(|chunk| chunk.placement).collect(),
        Entry::Object(object) => Vec::from_iter(object.placement),
        _ => Vec::new(),
    };
    metadata.iter().flat_map(|(_, entry)| of_entry(entry)).collect()
}

#[test]
fn every_layout_loads_and_its_index_names_the_extension() {
    let three = NonZeroUsize::new(3).unwrap();
    for layout in [FileLayout::OnePerRank, FileLayout::OnePerItem, FileLayout::SplitBySize(three)] {
        for options in [Zstd::new(), Zstd::new().level(19), Zstd::new().threads(2)] {
            let (plain, storage) = (Arc::new(MemoryStorage::new()), Arc::new(MemoryStorage::new()));
            save(&DcpWriter::builder(plain.clone()).files(layout).build(), &state(3)).unwrap();
            let writer = DcpWriter::builder(storage.clone()).files(layout).zstd(options);
            save(&writer.build(), &state(3)).unwrap();
            assert!(load(storage.clone()).unwrap().same(&state(3).loaded()), "{layout:?}");
            let metadata = metadata(&storage);
            let encodings = metadata.encodings();
            assert_eq!(encodings.len(), 1);
            assert_eq!(*encodings[0].transforms, ["stream.zstd/1".into()]);
            // Items take all of their file, one after the other.
            let mut ends = vec![0; metadata.files().len()];
            let mut places = placements(&metadata);
            places.sort_by_key(|place| (place.file, place.byte_offset));
            for place in places {
                let end = &mut ends[place.file.index()];
                assert_eq!(place.byte_offset, *end);
                *end += place.byte_len;
            }
            for (file, end) in metadata.files().iter().zip(ends) {
                assert_eq!(get(&*storage, file.as_str()).len() as u64, end);
                assert!(end * 2 < get(&*plain, file.as_str()).len() as u64, "{file}: {end}");
            }
        }
    }
}

/// Zeros shrink 10,000 times, which readers refuse of larger objects: padding keeps them readable.
#[test]
fn an_object_of_which_little_is_stored_loads() {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(1).object("name", "a".repeat(65 << 20)).object("step", 5_i64);
    save(&zstd(storage.clone(), Zstd::new()), &state).unwrap();
    let stored = get(&*storage, "__0_0.distcp").len() as u64;
    assert!((65 * MIB / 256..MIB / 2).contains(&stored), "{stored}");
    assert!(load(storage).unwrap().same(&state.loaded()));
}

#[test]
fn the_sidecar_has_the_checksums_at_the_stored_offsets() {
    let storage = Arc::new(MemoryStorage::new());
    save(&zstd(storage.clone(), Zstd::new()), &state(5)).unwrap();
    let bytes = get(&*storage, ".metadata");
    let name = sidecar_of(&bytes).unwrap();
    let sidecar = Sidecar::decode(&get(&*storage, name.as_str()), crc32fast::hash(&bytes)).unwrap();
    let metadata = metadata(&storage);
    let tensor = metadata.get("model.w").unwrap().as_tensor().unwrap();
    for chunk in tensor.chunks.iter() {
        let place = chunk.placement.unwrap();
        let file = metadata.file(place.file).unwrap();
        let file = sidecar.files.iter().find(|one| one.name == file.as_str()).unwrap();
        assert!(file.chunks.at(place.byte_offset).is_some());
        assert_eq!(file.byte_len, get(&*storage, &file.name).len() as u64);
    }
}

/// Parts of lengths that the storage accepts, from data that arrives in small segments: nothing holds
/// a file in memory.
#[test]
fn data_that_does_not_compress_is_streamed_in_parts() {
    let bytes = noise(5 << 20);
    for threads in [0, 1] {
        let mut capabilities = MemoryStorage::new().capabilities();
        let limits: &mut WriteLimits = &mut capabilities.write_limits;
        (limits.part_bytes_min, limits.part_bytes) = (MIB / 4, MIB / 4);
        let storage = Arc::new(MemoryStorage::new().with_capabilities(capabilities));
        let counting = CountingStorage::new(storage.clone());
        let mut state = State::new(1).rows("w", DType::UInt8, &[5, MIB], 1).object("o", 7_i64);
        let Leaf::Tensor { bytes: content, .. } = &mut state.leaves[0].1 else { panic!("w") };
        content.clone_from(&bytes);
        let writer = zstd(Arc::new(counting.clone()), Zstd::new().threads(threads));
        block_on(save_in_segments(&writer, &state, 100_000)).unwrap();
        assert!((20..=23).contains(&counting.counts().parts), "{:?}", counting.counts());
        assert!(get(&*storage, "__0_0.distcp").len() > bytes.len());
        assert!(load(storage).unwrap().same(&state.loaded()));
    }
}

#[test]
fn an_overwrite_replaces_a_compressed_checkpoint_and_the_reverse() {
    let storage = Arc::new(MemoryStorage::new());
    let (with, without) = (zstd(storage.clone(), Zstd::new()), DcpWriter::new(storage.clone()));
    for (seed, writer) in [(1, &with), (2, &without), (3, &with), (4, &with)] {
        save(writer, &state(seed)).unwrap();
        assert!(load(storage.clone()).unwrap().same(&state(seed).loaded()), "{seed}");
        assert_eq!(names(&*storage).len(), 4, "{:?}", names(&*storage));
    }
}

#[test]
fn ranks_with_different_settings_are_refused() {
    let storage = Arc::new(MemoryStorage::new());
    let writers = [zstd(storage.clone(), Zstd::new()), DcpWriter::new(storage.clone())];
    for (first, second) in [(0, 1), (1, 0)] {
        let error = block_on(async {
            let session = writers[first].begin().await.unwrap();
            let (locals, mut global, data) = state(1).plan(&writers[first]);
            let plans = writers[first].place(&session, &locals, &mut global).unwrap();
            write_all(&writers[second], &locals, &plans, data, u64::MAX).await.unwrap_err()
        });
        assert!(error.to_string().contains("same options"), "{error}");
    }
    assert!(names(&*storage).is_empty());
}

#[test]
fn every_flipped_byte_and_every_cut_of_a_compressed_file_is_an_error() {
    let state = State::new(1).rows("w", DType::Float32, &[40, 4], 1).object("step", 3_i64);
    let storage = Arc::new(MemoryStorage::new());
    save(&zstd(storage.clone(), Zstd::new()), &state).unwrap();
    let whole = get(&*storage, "__0_0.distcp").to_vec();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x20;
        put(&*storage, "__0_0.distcp", damaged);
        match load(storage.clone()) {
            Err(error) => {
                let text = dcp_core::error::error_chain(&error);
                assert!(text.contains("__0_0.distcp"), "{text}");
            }
            // A bit of a frame's header that decoders ignore.
            Ok(loaded) => assert!(loaded.same(&state.loaded()), "byte {at} changes values"),
        }
        put(&*storage, "__0_0.distcp", whole[..at].to_vec());
        assert!(load(storage.clone()).is_err(), "cut after {at} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_region_of_a_compressed_tensor_is_what_was_saved(
        (rows, columns) in (1_u64..40, 1_u64..40),
        corner in any::<[u64; 4]>(),
        world in 1_usize..4,
    ) {
        let shape = [rows, columns];
        let storage = Arc::new(MemoryStorage::new());
        let state = State::new(world).rows("w", DType::Float16, &shape, 5);
        save(&zstd(storage.clone(), Zstd::new()), &state).unwrap();
        let Leaf::Tensor { bytes, .. } = &state.leaves[0].1 else { panic!("no tensor") };
        let start = [corner[0] % rows, corner[1] % columns];
        let sizes = [corner[2] % (rows - start[0]) + 1, corner[3] % (columns - start[1]) + 1];
        let region = Region::new(start, sizes).unwrap();
        let (found, _) = load_region(storage, &region, 3);
        prop_assert_eq!(found, cut(bytes, DType::Float16, &shape, &region));
    }
}
