//! Checkpoints of ByteCheckpoint 0.0.2: PyTorch's index over files without archives.

use std::path::PathBuf;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::Value;
use dcp_core::format::{CheckpointFormat as _, Listing, Place};
use dcp_core::metadata::Layout;
use dcp_core::{CheckpointError, Storage, StorageReader as _};
use dcp_formats::dcp::{DcpFormat, DcpReader};
use futures_util::TryStreamExt as _;

use crate::harness::{block_on, folder, get, load, put};
use crate::support;

fn root(name: &str) -> PathBuf {
    dcp_testing::fixture("byte_checkpoint").join(name)
}

/// The names of the parameters in the order of the optimizer's, which the state of FSDP has and that of DDP
/// numbers.
fn parameters() -> Vec<String> {
    let loaded = load(folder(&root("fsdp2_2r/optimizer"))).unwrap();
    let Value::List(groups) = &loaded.objects["param_groups"] else { panic!("{loaded:?}") };
    let Value::Dict(group) = &groups[0] else { panic!("{groups:?}") };
    let Some(Value::List(names)) = group.get("params") else { panic!("{group:?}") };
    names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

/// The name in the expected tensors of one in the checkpoint.
fn expected_name(part: &str, fqn: &str, parameters: &[String]) -> String {
    let fqn = fqn.strip_prefix("module.").unwrap_or(fqn);
    let numbered = fqn.strip_prefix("state.").and_then(|rest| rest.split_once('.'));
    let named = numbered.and_then(|(id, name)| {
        let parameter = &parameters[id.parse::<usize>().ok()?];
        Some(format!("state.{parameter}.{name}"))
    });
    format!("{part}.{}", named.as_deref().unwrap_or(fqn))
}

#[test]
fn tensors_and_objects_equal_what_was_saved() {
    let parameters = parameters();
    for name in ["fsdp2_2r", "ddp_2r"] {
        let expected = support::tensors_of(&root(name).join("expected.safetensors"));
        let mut found = 0;
        for part in ["model", "optimizer"] {
            let loaded = load(folder(&root(name).join(part))).unwrap();
            for (fqn, tensor) in &loaded.tensors {
                let (shape, bytes) = &expected[&expected_name(part, fqn, &parameters)];
                assert_eq!(tensor.shape().to_vec(), *shape, "{name}: {fqn}");
                assert_eq!(tensor.to_vec().unwrap(), *bytes, "{name}: {fqn}");
            }
            found += loaded.tensors.len();
            let groups = loaded.objects.get("param_groups");
            assert_eq!(groups.is_some(), part == "optimizer", "{name}");
        }
        assert_eq!(found, expected.len(), "{name}");
    }
}

#[test]
fn all_tensors_are_placed_without_an_archive() {
    let reader = DcpReader::new(folder(&root("fsdp2_2r/optimizer")));
    let metadata = block_on(reader.metadata()).unwrap();
    let layout = |placement| metadata.encoding(&placement).unwrap().layout;
    for (fqn, entry) in metadata.iter() {
        match (entry.as_tensor(), entry.as_object()) {
            (Some(tensor), _) => {
                for chunk in tensor.chunks.iter() {
                    assert_eq!(layout(chunk.placement.unwrap()), Layout::Raw, "{fqn}");
                }
            }
            (_, Some(object)) => {
                assert_eq!(layout(object.placement.unwrap()), Layout::TorchArchive)
            }
            _ => panic!("{fqn}"),
        }
    }
    assert!(block_on(reader.foreign_names()).unwrap().is_empty());
}

#[test]
fn a_file_that_begins_with_zero_elements_is_complete() {
    let storage = folder(&root("ddp_2r/model"));
    let file = get(&*storage, "__0_0.distcp");
    put(&*storage, "__0_0.distcp", vec![0; file.len()]);
    let objects = block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
    let storage: Arc<dyn Storage> = storage;
    let place = Place::folder(&storage, Listing::new(objects));
    let examined = block_on(DcpFormat.examine(&place)).unwrap();
    assert_eq!(examined.problem, None);
}

/// Replaces bytes of the index of a model.
fn changed(from: &[u8], to: &[u8]) -> Arc<MemoryStorage> {
    let storage = folder(&root("fsdp2_2r/model"));
    let mut index = get(&*storage, ".metadata").to_vec();
    let at = index.windows(from.len()).position(|window| window == from).unwrap();
    index.splice(at..at + from.len(), to.iter().copied());
    put(&*storage, ".metadata", index);
    storage
}

fn problem_of(storage: Arc<MemoryStorage>) -> String {
    match block_on(DcpReader::new(storage).metadata()) {
        Err(CheckpointError::Format(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_index_that_contradicts_itself_is_refused_by_name() {
    // Of the tensor of 6 x 6: its shape and strides in the pickle of the tensor, protocol 2.
    let layout = b"K\x06K\x06\x86q\x06K\x06K\x01\x86q\x07";
    for (to, problem) in [
        // Strides 1 and 6.
        (b"K\x06K\x06\x86q\x06K\x01K\x06\x86q\x07", "is stored with strides [1, 6]"),
        // A shape of 6 x 5.
        (b"K\x06K\x05\x86q\x06K\x06K\x01\x86q\x07", "is stored as float32 of [6, 5]"),
        // A shape of 6 x 7, beyond the storage.
        (b"K\x06K\x07\x86q\x06K\x06K\x01\x86q\x07", "does not fit its storage"),
    ] {
        let found = problem_of(changed(layout, to));
        assert!(found.contains(problem), "{found}");
        assert!(found.contains("embed.weight"), "{found}");
    }
    // The storage of 36 elements has 144 bytes in the file.
    let found = problem_of(changed(b"K$tq\x05QK\x00", b"K%tq\x05QK\x00"));
    assert!(found.contains("has 144 bytes, its storage 148"), "{found}");
}
