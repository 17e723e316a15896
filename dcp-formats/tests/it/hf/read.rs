//! What PyTorch's Hugging Face storage wrote, and folders as they lie about.

use std::sync::Arc;

use dcp_conformance::{MemoryStorage, WebStorage};
use dcp_core::{CheckpointError, Storage, StorageReader as _};
use dcp_formats::hf::HfReader;

use crate::harness::{block_on, delete, key, names, put};
use crate::hf::folder::{counting, expected, file, fixture, same, tensors};

const FIXTURES: [&str; 5] =
    ["consolidated_2r", "consolidated_index_4r", "rank0", "rank0_index", "sharded_2r"];

#[test]
fn folders_of_pytorch_are_read() {
    for name in FIXTURES {
        let found = tensors(&HfReader::new(fixture(name))).unwrap();
        assert!(same(&found, &expected(name)), "{name}");
    }
}

/// With the index gone the same is found by listing, but a strict reader does not take it: the
/// index is written last. What ranks hold has none.
#[test]
fn a_model_without_its_index_is_only_looked_at() {
    for name in FIXTURES {
        let storage = fixture(name);
        delete(&*storage, "model.safetensors.index.json");
        let of_ranks = names(&*storage).iter().any(|name| name.starts_with("shard-"));
        let strict = tensors(&HfReader::new(Arc::clone(&storage) as _));
        let tolerant = HfReader::builder(storage).tolerant(true).build();
        assert!(same(&tensors(&tolerant).unwrap(), &expected(name)), "{name}");
        let findings = block_on(tolerant.findings()).unwrap();
        assert_eq!(findings.is_empty(), of_ranks, "{name}: {findings:?}");
        match strict {
            Ok(_) => assert!(of_ranks, "{name}"),
            Err(error) => assert!(error.to_string().contains("not written to its end"), "{error}"),
        }
    }
}

#[test]
fn the_ranks_files_are_read_when_asked_for() {
    for name in ["consolidated_2r", "consolidated_index_4r"] {
        let storage = fixture(name);
        let reader = HfReader::builder(Arc::clone(&storage) as _).folder(key("sharded")).build();
        let metadata = block_on(reader.metadata()).unwrap();
        let chunks = metadata.get("emb").unwrap().as_tensor().unwrap().chunks.len();
        assert!(chunks > 1, "{name} has {chunks} chunks");
        assert!(same(&tensors(&reader).unwrap(), &expected(name)), "{name}");
        // Nothing of them is taken by a reader of the folder itself.
        let metadata = block_on(HfReader::new(storage).metadata()).unwrap();
        assert_eq!(metadata.get("emb").unwrap().as_tensor().unwrap().chunks.len(), 1);
        assert!(metadata.files().iter().all(|file| !file.as_str().contains('/')));
    }
}

#[test]
fn what_cannot_be_listed_is_read_by_its_index() {
    let name = "consolidated_index_4r";
    let reader = HfReader::new(Arc::new(WebStorage::new(fixture(name))));
    assert!(same(&tensors(&reader).unwrap(), &expected(name)));

    let single = Arc::new(MemoryStorage::new());
    let (item, bytes) = counting("a", &[3], 0);
    file(&*single, "model.safetensors", &[(item, bytes, None)]);
    let found =
        tensors(&HfReader::new(Arc::new(WebStorage::new(Arc::clone(&single) as _)))).unwrap();
    assert_eq!(found["a"].to_vec().unwrap(), [0, 1, 2]);

    delete(&*single, "model.safetensors");
    let error = tensors(&HfReader::new(Arc::new(WebStorage::new(single)))).unwrap_err();
    assert!(matches!(&error, CheckpointError::NotACheckpoint { .. }));
    assert!(error.to_string().contains("cannot be listed"), "{error}");
}

#[test]
fn files_that_the_index_does_not_name_are_left_alone() {
    let storage = fixture("rank0");
    let (item, bytes) = counting("stray", &[3], 0);
    file(&*storage, "adapter.safetensors", &[(item, bytes, None)]);
    let found = tensors(&HfReader::new(Arc::clone(&storage) as _)).unwrap();
    assert!(same(&found, &expected("rank0")));
    delete(&*storage, "model.safetensors.index.json");
    let tolerant = HfReader::builder(storage).tolerant(true).build();
    assert_eq!(tensors(&tolerant).unwrap().len(), found.len() + 1);
}

#[test]
fn an_index_of_another_name_and_place_is_followed() {
    let storage = Arc::new(MemoryStorage::new());
    let (item, bytes) = counting("a", &[3], 7);
    file(&*storage, "unet/weights.safetensors", &[(item, bytes, None)]);
    let index = br#"{"weight_map": {"a": "weights.safetensors"}}"#;
    put(&*storage, "unet/diffusion_pytorch_model.safetensors.index.json", index.to_vec());
    let shared = || Arc::clone(&storage) as Arc<dyn Storage>;
    let named = key("unet/diffusion_pytorch_model.safetensors.index.json");
    for reader in [
        HfReader::builder(shared()).folder(key("unet")).build(),
        HfReader::builder(shared()).index(named).build(),
    ] {
        assert_eq!(tensors(&reader).unwrap()["a"].to_vec().unwrap(), [7, 8, 9]);
    }
}

/// PyTorch 2.15's consolidation crashes on integers and turns 0-dim tensors to zero.
#[test]
fn t11_scalars_and_integers_of_ranks_are_whole() {
    let storage = Arc::new(MemoryStorage::new());
    let part = |name: &str, shape: &[u64], first: u8, at: &'static [u64]| {
        let (item, bytes) = counting(name, shape, first);
        (item, bytes, Some(at))
    };
    let first = [part("scalar", &[], 9, &[]), part("rows", &[1, 2], 0, &[0, 0])];
    let second = [part("rows", &[1, 2], 2, &[1, 0]), part("none", &[0, 2], 0, &[0, 0])];
    file(&*storage, "shard-00001-model-00001-of-00001.safetensors", &first);
    file(&*storage, "shard-00002-model-00001-of-00001.safetensors", &second);
    let found = tensors(&HfReader::new(storage)).unwrap();
    assert_eq!(found["scalar"].to_vec().unwrap(), [9]);
    assert_eq!(found["rows"].to_vec().unwrap(), [0, 1, 2, 3]);
    assert_eq!((**found["none"].shape()).to_vec(), [0, 2]);
}

#[test]
fn the_order_is_that_of_the_index() {
    let metadata = block_on(HfReader::new(fixture("rank0")).metadata()).unwrap();
    let names: Vec<_> = metadata.iter().map(|(fqn, _)| &**fqn).collect();
    assert_eq!(names, ["emb", "l0.w", "l0.b", "l1.w", "l1.b", "head"]);
    assert_eq!(metadata.provenance().format.as_deref(), Some("hf"));
}
