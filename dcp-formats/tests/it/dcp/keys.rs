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

#[test]
fn the_names_of_what_is_left_out_are_known() {
    for name in ["fsdp2_adam_2r", "no_collectives_2r"] {
        let storage: Arc<dyn Storage> = fixture(name);
        let all = DcpReader::builder(Arc::clone(&storage)).rank(0).build();
        let (all, no_names) = (block_on(all.metadata()).unwrap(), block_on(all.names()).unwrap());
        assert!(no_names.is_none());
        let expected: Vec<_> = all.iter().map(|(fqn, entry)| (fqn.clone(), entry.path())).collect();
        let (paths, last) =
            (expected.iter().filter(|(_, path)| path.is_some()).count(), all.len() - 1);
        // The choice sees the names and paths of all.
        let last_alone = WantedKeys::choosing(move |keys| {
            assert_eq!(keys.iter().filter(|(_, entry)| entry.path().is_some()).count(), paths);
            (0..keys.len()).map(|position| position == last).collect()
        });
        let some = DcpReader::builder(Arc::clone(&storage)).rank(0).keys(last_alone).build();
        let names = block_on(some.names()).unwrap().unwrap();
        let found: Vec<_> = names.iter().map(|(fqn, entry)| (fqn.clone(), entry.path())).collect();
        assert_eq!(found, expected, "{name}");
        let mut files = [names.files().to_vec(), all.files().to_vec()];
        files.iter_mut().for_each(|files| files.sort());
        assert_eq!(files[0], files[1], "{name}");
        for (fqn, entry) in names.iter() {
            let (Some(name), Some(tensor)) = (entry.as_tensor(), all.get(fqn).unwrap().as_tensor())
            else {
                continue;
            };
            assert_eq!((name.dtype, &name.shape), (tensor.dtype, &tensor.shape), "{fqn}");
            assert_eq!((name.chunks.len(), &name.properties), (0, &tensor.properties), "{fqn}");
        }
        let tensors =
            |of: &CheckpointMetadata| of.iter().filter(|(_, e)| e.as_tensor().is_some()).count();
        assert!(tensors(&block_on(some.metadata()).unwrap()) <= 1, "{name}");
        // Nothing is left out.
        let whole = DcpReader::builder(storage).rank(0).keys(WantedKeys::new(|_| true)).build();
        assert!(block_on(whole.names()).unwrap().is_none());
    }
}
