//! Every checkpoint that PyTorch wrote loads, bit for bit.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::metadata::{Entry, Placement};
use dcp_core::{Region, StorageReader as _};
use dcp_formats::dcp::{DcpReader, DcpWriter, FileLayout};
use dcp_formats::torch_zip::ArchiveIndex;
use serde_json::{Map, Value as Json, json};

use crate::harness::{Leaf, Loaded, State, block_on, fixture, get, load, names, save};
use crate::support::{self, tagged::tagged};

#[test]
fn every_fixture_equals_what_pytorch_saved() {
    for name in support::names() {
        if name == "zstd_2r" && cfg!(not(feature = "zstd")) {
            continue;
        }
        let loaded = load(fixture(&name)).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let expected = support::json(&support::root().join(&name).join("expected.json"));
        let tensors = support::expected_tensors(&name);
        for (fqn, tensor) in expected["tensors"].as_object().unwrap() {
            let found = &loaded.tensors[fqn];
            assert_eq!(found.dtype().name(), tensor["dtype"], "{name}: {fqn}");
            assert_eq!(found.shape().to_vec(), support::uints(&tensor["shape"]), "{name}: {fqn}");
            assert_eq!(found.to_vec().unwrap(), tensors[fqn].1, "{name}: {fqn}");
        }
        for (fqn, object) in expected["objects"].as_object().unwrap() {
            let found = plain(&tagged(&loaded.objects[fqn]));
            assert_eq!(found, plain(object), "{name}: {fqn}");
        }
    }
}

/// Floats by their bits, whatever `repr` wrote them; `torch.Size` as the tuple that it is.
fn plain(json: &Json) -> Json {
    match json {
        Json::Object(fields) if fields.get("t").is_some_and(|tag| tag == "float") => {
            json!(fields["v"].as_str().unwrap().parse::<f64>().unwrap().to_bits())
        }
        Json::Object(fields) if fields.get("t").is_some_and(|tag| tag == "torch.Size") => {
            json!({ "t": "tuple", "v": plain(&fields["v"]) })
        }
        Json::Object(fields) => {
            fields.iter().map(|(k, v)| (k.clone(), plain(v))).collect::<Map<_, _>>().into()
        }
        Json::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

/// The state that a checkpoint holds, with each item on the rank that wrote it and in the order
/// of its bytes.
fn state_of(name: &str, loaded: &Loaded) -> State {
    let storage = fixture(name);
    let metadata = block_on(DcpReader::new(storage).metadata()).unwrap();
    let mut places = Vec::new();
    for (fqn, entry) in metadata.iter() {
        match entry {
            Entry::Tensor(tensor) => {
                for chunk in tensor.chunks.iter() {
                    let region = chunk.region().unwrap();
                    places.push((chunk.placement.unwrap(), fqn.to_string(), Some(region)));
                }
            }
            Entry::Object(object) => {
                places.push((object.placement.unwrap(), fqn.to_string(), None))
            }
            _ => panic!("{fqn}"),
        }
    }
    let rank_of = |place: &Placement| -> usize {
        let file = metadata.file(place.file).unwrap().as_str();
        file.trim_start_matches('_').split('_').next().unwrap().parse().unwrap()
    };
    places.sort_by_key(|(place, ..)| (rank_of(place), place.byte_offset));
    let world = places.iter().map(|(place, ..)| rank_of(place) + 1).max().unwrap_or(1);
    let mut state = State::new(world);
    // A leaf for every chunk: only the files are compared, not the metadata.
    for (n, (place, fqn, region)) in places.into_iter().enumerate() {
        let rank = rank_of(&place);
        let leaf = match region {
            Some(region) => {
                let tensor = &loaded.tensors[&fqn];
                let bytes = tensor.to_vec().unwrap();
                let shape = tensor.shape().to_vec();
                Leaf::Tensor { dtype: tensor.dtype(), shape, bytes, chunks: vec![(rank, region)] }
            }
            None => Leaf::Object { rank, value: loaded.objects[&fqn].clone() },
        };
        state.leaves.push((format!("{n} {fqn}"), leaf));
    }
    state
}

/// Blanks the id, which PyTorch derives from a hash, and its CRC in both places.
fn without_id(blob: &[u8]) -> Vec<u8> {
    let mut blob = blob.to_vec();
    let index = ArchiveIndex::from_tail(&blob, blob.len() as u64).unwrap().ready().unwrap();
    let entry = index.require(".data/serialization_id").unwrap();
    let header = entry.header_range();
    let data = entry.data_range(&blob[header.start as usize..header.end as usize]).unwrap().data;
    let (start, end) = (data.start as usize, data.end as usize);
    blob[start..end + 8].fill(0);
    let name = entry.name().as_bytes();
    let central = blob.windows(name.len()).rposition(|window| window == name).unwrap() - 46;
    blob[central + 16..central + 20].fill(0);
    blob
}

#[test]
fn files_are_byte_for_byte_those_of_pytorch() {
    let same = [
        "all_dtypes",
        "fsdp2_adam_2r",
        "sharded_tensor_raw_4r",
        "tp_fsdp_2x2",
        "replicated_lowest_rank_4r",
    ];
    for name in same {
        let theirs = fixture(name);
        let state = state_of(name, &load(theirs.clone()).unwrap());
        let ours = Arc::new(dcp_conformance::MemoryStorage::new());
        save(&DcpWriter::new(ours.clone()), &state).unwrap();
        let metadata = block_on(DcpReader::new(ours.clone()).metadata()).unwrap();
        for (fqn, entry) in metadata.iter() {
            let place = match entry {
                Entry::Tensor(tensor) => tensor.chunks.get(0).unwrap().placement.unwrap(),
                Entry::Object(object) => object.placement.unwrap(),
                _ => panic!("{fqn}"),
            };
            let file = metadata.file(place.file).unwrap().as_str();
            let range = place.byte_offset as usize..(place.byte_offset + place.byte_len) as usize;
            let blob = |bytes: Bytes| without_id(&bytes[range.clone()]);
            assert!(blob(get(&*ours, file)) == blob(get(&*theirs, file)), "{name}: {file} {fqn}");
        }
        for file in names(&*theirs).iter().filter(|file| file.ends_with(".distcp")) {
            let rank: usize = file[2..3].parse().unwrap();
            if rank < state.world {
                assert_eq!(get(&*ours, file).len(), get(&*theirs, file).len(), "{name}: {file}");
            }
        }
    }
}

#[test]
fn threads_divide_items_as_pytorch_does() {
    for (name, layout) in [
        ("threads4_single_file", FileLayout::TorchCompatible(4.try_into().unwrap())),
        ("threads4_file_per_item", FileLayout::OnePerItem),
    ] {
        let theirs = fixture(name);
        let loaded = load(theirs.clone()).unwrap();
        let order = support::json(&support::root().join(name).join("expected_metadata.json"));
        let mut state = State::new(1);
        for entry in order["state_dict_metadata"].as_array().unwrap() {
            let fqn = entry[0].as_str().unwrap();
            let leaf = match loaded.tensors.get(fqn) {
                Some(tensor) => Leaf::Tensor {
                    dtype: tensor.dtype(),
                    shape: tensor.shape().to_vec(),
                    bytes: tensor.to_vec().unwrap(),
                    chunks: vec![(0, Region::full(tensor.shape().clone()).unwrap())],
                },
                None => Leaf::Object { rank: 0, value: loaded.objects[fqn].clone() },
            };
            state.leaves.push((fqn.into(), leaf));
        }
        let ours = Arc::new(dcp_conformance::MemoryStorage::new());
        save(&DcpWriter::builder(ours.clone()).files(layout).build(), &state).unwrap();
        for file in names(&*theirs).iter().filter(|file| file.ends_with(".distcp")) {
            assert_eq!(get(&*ours, file).len(), get(&*theirs, file).len(), "{name}: {file}");
        }
        assert!(load(ours).unwrap().same(&loaded), "{name}");
    }
}
