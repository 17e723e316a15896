//! Readers of some keys: they hold these keys alone, as a reader of all does.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::format::WantedKeys;
use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, DType, Key, Storage, StorageReader as _, Value};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::harness::{State, block_on, delete, fixture, load, load_with, save};

fn of_keys(storage: &Arc<dyn Storage>, keys: WantedKeys) -> DcpReader {
    DcpReader::builder(Arc::clone(storage)).keys(keys).build()
}

#[test]
fn a_reader_of_one_key_has_no_other_tensor_and_needs_no_other_file() {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(3).rows("wide", DType::Int16, &[9, 4], 1);
    // On rank 0 alone.
    let state = State { world: 1, ..state }.rows("one", DType::Float32, &[4, 2], 2);
    let state = State { world: 3, ..state }.object("step", Value::from(7_i64));
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    delete(&*storage, "__2_0.distcp");

    let storage: Arc<dyn Storage> = storage;
    load(Arc::clone(&storage)).unwrap_err();
    let loaded = load_with(&of_keys(&storage, WantedKeys::one("one"))).unwrap();
    let mut expected = state.loaded();
    expected.tensors.retain(|fqn, _| fqn == "one");
    assert!(loaded.same(&expected) && loaded.warnings.is_empty(), "{loaded:?}");
    let wide = of_keys(&storage, WantedKeys::one("wide"));
    let error = block_on(wide.metadata()).unwrap_err();
    assert!(error.to_string().contains("__2_0.distcp"), "{error}");
}

#[test]
fn the_chunks_of_chosen_keys_are_those_of_all() {
    for (name, part) in [("fsdp2_adam_2r", "layers"), ("no_collectives_2r", "b")] {
        let storage: Arc<dyn Storage> = fixture(name);
        let rank_0 = |keys: Option<WantedKeys>| {
            let reader = DcpReader::builder(Arc::clone(&storage)).rank(0);
            let reader = match keys {
                Some(keys) => reader.keys(keys),
                None => reader,
            };
            block_on(reader.build().metadata()).unwrap()
        };
        let (all, some) =
            (rank_0(None), rank_0(Some(WantedKeys::new(move |fqn| fqn.contains(part)))));
        let is_kept = |fqn: &str, entry: &Entry| entry.as_object().is_some() || fqn.contains(part);
        let expected: Vec<_> = all.iter().filter(|(fqn, entry)| is_kept(fqn, entry)).collect();
        assert!(expected.len() < all.len(), "{name}");
        assert!(some.iter().map(|(fqn, _)| fqn).eq(expected.iter().map(|(fqn, _)| *fqn)));
        for (fqn, entry) in expected {
            let (Some(tensor), Some(found)) = (entry.as_tensor(), some.get(fqn)) else { continue };
            let file = |of: &CheckpointMetadata, file| of.file(file).map(Key::to_string);
            for (chunk, found) in tensor.chunks.iter().zip(found.as_tensor().unwrap().chunks.iter())
            {
                assert_eq!((chunk.offsets, chunk.sizes), (found.offsets, found.sizes), "{fqn}");
                let (at, found) = (chunk.placement.unwrap(), found.placement.unwrap());
                assert_eq!(file(&all, at.file), file(&some, found.file), "{fqn}");
                assert_eq!(at.byte_offset, found.byte_offset, "{fqn}");
            }
        }
    }
}
