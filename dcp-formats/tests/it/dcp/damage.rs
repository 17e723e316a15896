//! Checkpoints that are damaged, incomplete or hostile: a typed error that says where, or a
//! warning, never wrong data.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::metadata::{ChunkTable, Encoding, Entry, TensorEntry};
use dcp_core::storage::WholeObject;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Key, Storage, StorageError, StorageErrorKind,
    StorageReader as _,
};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_formats::metadata::{Profile, decode, encode};
use proptest::prelude::*;

use crate::harness::{State, block_on, delete, fixture, get, key, load, load_with, put, save};
use crate::support;

pub(crate) fn format_error(storage: Arc<dyn Storage>) -> dcp_core::FormatError {
    match load(storage) {
        Err(CheckpointError::Format(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn saved(state: &State) -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::new());
    save(&DcpWriter::new(storage.clone()), state).unwrap();
    storage
}

/// Replaces the metadata by a changed one.
fn change(storage: &MemoryStorage, change: impl FnOnce(&mut CheckpointMetadata)) {
    let mut metadata = decode(&get(storage, ".metadata")).unwrap();
    change(&mut metadata);
    put(storage, ".metadata", encode(&metadata, Profile::default()).unwrap().to_vec());
}

/// Offsets and sizes.
type Chunks<'a> = [(&'a [u64], &'a [u64])];

/// Replaces the chunks of a tensor, keeping their placements.
fn rechunk(metadata: &mut CheckpointMetadata, fqn: &str, chunks: &Chunks<'_>) {
    let Some(Entry::Tensor(tensor)) = metadata.get_mut(fqn) else { panic!("no {fqn}") };
    let mut table = ChunkTable::new(tensor.shape.ndim());
    for (n, (offsets, sizes)) in chunks.iter().enumerate() {
        table.push(offsets, sizes, tensor.chunks.get(n).unwrap().placement).unwrap();
    }
    tensor.chunks = table;
}

#[test]
fn t01_keys_whose_bytes_were_lost_are_named() {
    let storage = saved(&State::new(1).rows("lost", DType::Int8, &[4], 1));
    let mut bytes = get(&*storage, ".metadata").to_vec();
    let name = b"storage_data";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(b"storage_tada");
    put(&*storage, ".metadata", bytes);
    let warnings = block_on(DcpReader::new(storage.clone()).warnings()).unwrap();
    assert!(warnings[0].contains("\"lost\""), "{warnings:?}");
    let error = format_error(storage);
    assert!(error.problem().contains("\"lost\""), "{error}");
}

#[test]
fn t03_a_metadata_that_was_not_renamed_is_pointed_out() {
    let storage = fixture("nested");
    let bytes = get(&*storage, ".metadata");
    delete(&*storage, ".metadata");
    put(&*storage, ".metadata.tmp", bytes.to_vec());
    let error = load(storage).unwrap_err();
    assert!(matches!(error, CheckpointError::NotACheckpoint { .. }));
    assert!(error.to_string().contains(".metadata.tmp"), "{error}");
    assert!(error.to_string().contains("complete"), "{error}");
}

#[test]
fn t04_a_flipped_bit_is_noticed() {
    let state = State::new(2).rows("small", DType::Float32, &[8, 4], 1).rows(
        "large",
        DType::Float32,
        &[200, 400],
        2,
    );
    let whole = saved(&state);
    let metadata = block_on(DcpReader::new(whole.clone()).metadata()).unwrap();
    for fqn in ["small", "large"] {
        let tensor = metadata.get(fqn).unwrap().as_tensor().unwrap();
        let place = tensor.chunks.get(1).unwrap().placement.unwrap();
        let file = metadata.file(place.file).unwrap().to_string();
        let mut bytes = get(&*whole, &file).to_vec();
        // `data/0` begins at 704 of a 2-D tensor's archive.
        bytes[place.byte_offset as usize + 704 + 5] ^= 0x10;
        let damaged = saved(&state);
        put(&*damaged, &file, bytes);
        let error = format_error(damaged.clone());
        assert_eq!(error.file(), Some(&*file));
        assert!(error.problem().contains(fqn), "{error}");
        assert!(error.problem().contains("CRC"), "{error}");
        let offset = error.byte_offset().unwrap();
        assert!((place.byte_offset..place.byte_offset + place.byte_len).contains(&offset));
        let careless = DcpReader::builder(damaged).verify_checksums(false).build();
        assert!(!load_with(&careless).unwrap().same(&state.loaded()));
    }
}

#[test]
fn t07_f15_a_chunk_that_is_not_what_the_metadata_says_is_refused() {
    for shape in [[6, 4], [600, 400]] {
        let storage = saved(&State::new(1).rows("w", DType::Int16, &shape, 1));
        change(&storage, |metadata| {
            let Some(Entry::Tensor(tensor)) = metadata.get_mut("w") else { panic!("no w") };
            tensor.shape = [shape[0] - 1, shape[1]].into();
            rechunk(metadata, "w", &[(&[0, 0], &[shape[0] - 1, shape[1]])]);
        });
        let error = format_error(storage.clone());
        assert_eq!((error.file(), error.byte_offset()), (Some("__0_0.distcp"), Some(0)));
        assert!(error.problem().contains("\"w\": it is int16"), "{error}");
    }
}

#[test]
fn t09_a_stale_dtype_is_refused() {
    let storage = saved(&State::new(1).rows("w", DType::Float16, &[6, 4], 1));
    change(&storage, |metadata| {
        let Some(Entry::Tensor(tensor)) = metadata.get_mut("w") else { panic!("no w") };
        tensor.dtype = DType::BFloat16;
    });
    assert!(format_error(storage).problem().contains("bfloat16"));
}

#[test]
fn t12_safetensors_serialization_that_lost_a_chunk_is_refused() {
    let storage = fixture("safetensors_fmt_2r");
    change(&storage, |metadata| {
        let Some(Entry::Tensor(tensor)) = metadata.get_mut("w") else { panic!("no w") };
        let mut second = tensor.chunks.get(1).unwrap().placement.unwrap();
        second.file = tensor.chunks.get(0).unwrap().placement.unwrap().file;
        tensor.chunks.place(1, second);
    });
    let error = format_error(storage);
    assert_eq!(error.file(), Some("__0_0.distcp"));
    assert!(error.problem().contains("lost"), "{error}");
}

#[test]
fn t13_unknown_transforms_are_named() {
    let storage = fixture("zstd_2r");
    change(&storage, |metadata| {
        let unknown =
            Encoding::default().with_transforms(["stream.zstd/1", "cipher/2"].map(Into::into));
        let encoding = metadata.intern_encoding(&unknown).unwrap();
        let Some(Entry::Tensor(tensor)) = metadata.get_mut("small") else { panic!("no small") };
        let mut place = tensor.chunks.get(0).unwrap().placement.unwrap();
        place.encoding = encoding;
        tensor.chunks.place(0, place);
    });
    assert!(format_error(storage).problem().contains("cipher/2"));
}

#[test]
fn t18_rank_local_metadata_is_merged() {
    let storage = fixture("no_collectives_2r");
    let loaded = load(storage.clone()).unwrap();
    let (_, expected) = &support::expected_tensors("no_collectives_2r")["w"];
    assert_eq!(&loaded.tensors["w"].to_vec().unwrap(), expected);
    assert!(loaded.tensors.contains_key("rank_only_0"));
    assert!(loaded.tensors.contains_key("rank_only_1"));
    assert!(loaded.warnings.iter().any(|warning| warning.contains("differ in \"per_rank\"")));
    // With a rank missing, the tensor is visibly not whole.
    delete(&*storage, "__0.metadata");
    let warnings = block_on(DcpReader::new(storage).warnings()).unwrap();
    assert!(warnings.iter().any(|warning| warning.contains("rank 0 is missing")));
    assert!(warnings.iter().any(|warning| warning.contains("8 of 20")), "{warnings:?}");
}

#[test]
fn t23_rank_local_metadata_beside_a_metadata_is_reported() {
    let storage = fixture("nested");
    assert_eq!(load(storage.clone()).unwrap().warnings, [""; 0]);
    put(&*storage, "__0.metadata", get(&*fixture("no_collectives_2r"), "__0.metadata").to_vec());
    let loaded = load(storage).unwrap();
    assert!(loaded.warnings[0].contains("another save"), "{:?}", loaded.warnings);
    assert!(!loaded.tensors.contains_key("rank_only_0"));
    // Of whichever rank.
    let storage = fixture("nested");
    put(&*storage, "__7.metadata", b"anything".to_vec());
    assert!(load(storage).unwrap().warnings[0].contains("another save"));
}

#[test]
fn errors_name_the_rank_local_metadata_they_are_about() {
    let storage = fixture("no_collectives_2r");
    let rank = |n: usize| decode(&get(&*storage, &format!("__{n}.metadata"))).unwrap();
    let write = |storage: &MemoryStorage, n: usize, metadata: &CheckpointMetadata| {
        let bytes = encode(metadata, Profile::default()).unwrap();
        put(storage, &format!("__{n}.metadata"), bytes.to_vec());
    };
    let mut other = rank(1);
    let Some(Entry::Tensor(tensor)) = other.get_mut("w") else { panic!("no w") };
    tensor.dtype = DType::Int64;
    let unlike = fixture("no_collectives_2r");
    write(&unlike, 1, &other);
    let error = format_error(unlike);
    assert_eq!(error.file(), Some("__1.metadata"));
    assert!(error.problem().contains("\"w\" is not the same tensor"), "{error}");

    // Each is right by itself, but together they overlap: no one file is to blame.
    let mut other = rank(1);
    let Some(Entry::Tensor(tensor)) = other.get("w") else { panic!("no w") };
    let sizes = tensor.chunks.get(0).unwrap().sizes.to_vec();
    let mut offsets = vec![0; sizes.len()];
    offsets[0] = 1;
    rechunk(&mut other, "w", &[(&offsets, &sizes)]);
    write(&storage, 1, &other);
    let error = format_error(storage);
    assert_eq!(error.file(), None, "{error}");
    assert!(error.problem().contains("\"w\": chunks"), "{error}");
}

#[test]
fn f12_paths_that_leave_the_directory_are_refused() {
    let storage = fixture("foreign_minimal");
    let name = b"__0_0.distcp";
    let nested = fixture("nested");
    let bytes = get(&*nested, ".metadata").to_vec();
    for evil in [b"../../../abc", b"/etc/passwd0", b"a/../../evil", b"C:/windows/a"] {
        let mut bytes = bytes.clone();
        while let Some(at) = bytes.windows(name.len()).position(|window| window == name) {
            bytes[at..at + name.len()].copy_from_slice(evil);
        }
        put(&*storage, ".metadata", bytes);
        let error = format_error(storage.clone());
        assert_eq!(error.file(), Some(".metadata"));
        let evil = str::from_utf8(evil).unwrap();
        assert!(dcp_core::error::error_chain(&error).contains(evil), "{error}");
    }
}

#[test]
fn f13_leftovers_do_not_matter() {
    let storage = fixture("replicated_lowest_rank_4r");
    put(&*storage, "__9_0.distcp", b"of another save".to_vec());
    assert!(load(storage).unwrap().same(&load(fixture("replicated_lowest_rank_4r")).unwrap()));
}

#[test]
fn chunks_must_lie_inside_and_apart() {
    let cases: [(&Chunks<'_>, &str); 3] = [
        (&[(&[0, 0], &[3, 4]), (&[4, 0], &[3, 4])], "outside"),
        (&[(&[0, 0], &[3, 4]), (&[2, 0], &[3, 4])], "overlap"),
        (&[(&[0, 0], &[3, 4]), (&[u64::MAX, 0], &[3, 4])], ""),
    ];
    for (chunks, problem) in cases {
        let storage = saved(&State::new(2).rows("w", DType::Int8, &[6, 4], 1));
        let mut metadata = decode(&get(&*storage, ".metadata")).unwrap();
        rechunk(&mut metadata, "w", chunks);
        let Ok(bytes) = encode(&metadata, Profile::default()) else { continue };
        put(&*storage, ".metadata", bytes.to_vec());
        let error = format_error(storage);
        assert!(dcp_core::error::error_chain(&error).contains(problem), "{error}");
    }
}

#[test]
fn missing_and_short_files_are_named_before_anything_is_read() {
    let storage = saved(&State::new(2).rows("w", DType::Int8, &[6, 4], 1).object("o", 1_i64));
    let whole = get(&*storage, "__1_0.distcp").to_vec();
    put(&*storage, "__1_0.distcp", whole[..whole.len() - 1].to_vec());
    let check = |problem: &str| {
        let reader = DcpReader::new(storage.clone());
        let Err(CheckpointError::Format(error)) = block_on(reader.metadata()) else {
            panic!("no error")
        };
        assert_eq!((error.file(), error.byte_offset()), (Some("__1_0.distcp"), Some(0)));
        assert!(error.problem().contains("\"w\"") && error.problem().contains(problem), "{error}");
    };
    check("ends at");
    delete(&*storage, "__1_0.distcp");
    check("missing");
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    let storage = saved(&State::new(1).rows("w", DType::Int8, &[600, 400], 1));
    let reader = DcpReader::new(storage.clone());
    block_on(reader.metadata()).unwrap();
    put(&*storage, "__0_0.distcp", vec![0; 100_000]);
    let Err(CheckpointError::Storage(error)) = load_with(&reader) else { panic!("no error") };
    assert_eq!(error.kind(), StorageErrorKind::Changed);
    assert_eq!(error.key(), Some(&key("__0_0.distcp")));
}

#[test]
fn nothing_large_is_allocated_for_a_claim() {
    let storage = saved(&State::new(1).rows("w", DType::Int8, &[4], 1));
    change(&storage, |metadata| {
        let mut huge = TensorEntry::new(DType::Int8, [1 << 50]);
        let place = metadata.get("w").unwrap().as_tensor().unwrap().chunks.get(0).unwrap();
        let mut place = place.placement.unwrap();
        place.byte_len = 1 << 50;
        huge.chunks.push(&[0], &[1 << 50], Some(place)).unwrap();
        metadata.insert("w", Entry::Tensor(huge));
    });
    assert!(block_on(DcpReader::new(storage).metadata()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// A byte changed anywhere: the same data, or an error; no panic, no hang, no other data.
    #[test]
    fn damaged_data_files_never_give_wrong_tensors(at in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let state = State::new(1)
            .rows("small", DType::Float32, &[8, 4], 1)
            .rows("large", DType::UInt8, &[70, 1000], 2);
        let storage = saved(&state);
        let mut bytes = get(&*storage, "__0_0.distcp").to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        put(&*storage, "__0_0.distcp", bytes);
        if let Ok(loaded) = load(storage) {
            prop_assert!(loaded.same(&state.loaded()), "byte {at} with {flip:#x}");
        }
    }

    #[test]
    fn damaged_metadata_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let storage = fixture("no_collectives_2r");
        let mut bytes = get(&*storage, "__1.metadata").to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        put(&*storage, "__1.metadata", bytes);
        let reader = DcpReader::new(storage);
        if let Ok(metadata) = block_on(reader.metadata()) {
            prop_assert!(metadata.len() >= 4);
        }
    }
}

/// T10: PyTorch 2.15's reader of MXFP4 folders fills a fraction of each tensor. Such a folder is
/// no DCP checkpoint, and is not read as if its packed blocks were the tensors.
#[test]
fn t10_a_quantized_folder_is_not_read_as_if_it_were_plain() {
    let storage = Arc::new(MemoryStorage::new());
    let header = br#"{"w_blocks":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    let mut image = (header.len() as u64).to_le_bytes().to_vec();
    image.extend_from_slice(header);
    image.extend_from_slice(&[0x21, 0x43]);
    put(&*storage, "model-00001-of-00001.safetensors", image);
    put(&*storage, "model.safetensors.index.json", b"{}".to_vec());
    match load(storage) {
        Err(CheckpointError::NotACheckpoint { message }) => {
            assert!(message.contains("safetensors"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// T21: in PyTorch's view of an item, a seek from the end lands behind it. Here the ends of items
/// are found by arithmetic, and a storage refuses what is behind the last one.
#[test]
fn t21_reads_stay_inside_their_blob() {
    for len in [1, 5_000, 70_000, 300_000] {
        let state = State::new(1).rows("first", DType::UInt8, &[len], 3).rows(
            "second",
            DType::UInt8,
            &[len],
            77,
        );
        let loaded = load(saved(&state)).unwrap();
        assert!(loaded.same(&state.loaded()), "{len}");
    }
}

/// A server that names a length in its answers which is not that of the object.
#[derive(Debug)]
struct Short(Arc<MemoryStorage>);

#[async_trait]
impl Storage for Short {
    dcp_core::forward_storage!(
        0: capabilities, stat, read, put, start_upload, list, list_folder, delete, leftovers,
        remove_empty_folders, claim
    );

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let mut object = self.0.read_whole(key, max_bytes).await?;
        object.bytes.truncate(object.bytes.len() - 1);
        Ok(object)
    }
}

#[test]
fn an_answer_that_is_cut_is_no_damage_of_the_index() {
    let storage = saved(&State::new(1).rows("w", DType::Int8, &[4], 1));
    match load(Arc::new(Short(storage.clone()))) {
        Err(CheckpointError::Storage(error)) => {
            assert_eq!(error.kind(), StorageErrorKind::Truncated);
            assert_eq!(error.key(), Some(&key(".metadata")));
        }
        other => panic!("{other:?}"),
    }
    let mut bytes = get(&*storage, ".metadata").to_vec();
    bytes.pop();
    put(&*storage, ".metadata", bytes);
    assert!(format_error(storage).file().is_some_and(|file| file == ".metadata"));
}
