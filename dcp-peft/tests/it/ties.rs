//! Bases whose embedding and head are one parameter, and adapters that change one of them.

use std::fs;
use std::path::{Path, PathBuf};

use dcp_core::DType;
use dcp_jobs::{ErrorKind, Format};
use dcp_testing::{block_on, copy_folder, fixture};
use serde_json::{Map, Value, json};

use crate::support::{merge, open, tensors};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The header and the data of a safetensors file.
fn parts(file: &Path) -> (Map<String, Value>, Vec<u8>) {
    let bytes = fs::read(file).unwrap();
    let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    (serde_json::from_slice(header).unwrap(), data.to_vec())
}

fn write(file: &Path, header: &Map<String, Value>, data: &[u8]) {
    let header = serde_json::to_vec(header).unwrap();
    fs::write(file, [&header.len().to_le_bytes()[..], &header, data].concat()).unwrap();
}

/// The base of `wide_tied` with a head of its own, whose values are those of the embedding; `tied` is what its
/// configuration says.
fn with_head(folder: &Path, tied: Option<bool>) -> PathBuf {
    let base = folder.join(format!("base {tied:?}"));
    copy_folder(&fixture("peft/wide_tied/base"), &base);
    let file = base.join("model.safetensors");
    let (mut header, mut data) = parts(&file);
    let mut head = header[EMBEDDING].clone();
    let range = head["data_offsets"].as_array().unwrap();
    let (from, to) = (range[0].as_u64().unwrap() as usize, range[1].as_u64().unwrap() as usize);
    let copy = data[from..to].to_vec();
    head["data_offsets"] = json!([data.len(), data.len() + copy.len()]);
    data.extend(copy);
    header.insert(HEAD.to_owned(), head);
    write(&file, &header, &data);
    let config = base.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    match tied {
        Some(tied) => json["tie_word_embeddings"] = json!(tied),
        None => drop(json.as_object_mut().unwrap().remove("tie_word_embeddings")),
    }
    fs::write(config, json.to_string()).unwrap();
    base
}

#[test]
fn a_copy_of_the_embedding_changes_with_it() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let adapter = fixture("peft/wide_tied/ckpt");
        let expected = tensors(&fixture("peft/wide_tied/expected.safetensors")).await;
        for tied in [None, Some(true)] {
            let target = folder.path().join(format!("merged {tied:?}"));
            let notes = merge(&with_head(folder.path(), tied), &adapter, &target).await.unwrap();
            assert!(notes.iter().any(|note| note.contains(HEAD)), "{notes:?}");
            let found = tensors(&target).await;
            assert!(found[EMBEDDING] == expected[EMBEDDING], "{tied:?}");
            assert!(found[HEAD] == expected[EMBEDDING], "{tied:?}");
        }
        // A head that the configuration calls its own is one, whatever its values.
        let target = folder.path().join("merged apart");
        let base = with_head(folder.path(), Some(false));
        merge(&base, &adapter, &target).await.unwrap();
        let (found, before) = (tensors(&target).await, tensors(&base).await);
        assert!(found[HEAD] == before[HEAD]);
        assert!(found[EMBEDDING] == expected[EMBEDDING]);
    });
}

/// PyTorch stores the head of a tied model twice, and says no word on it; `torch.save` stores it once, under two
/// names.
#[test]
fn the_head_of_a_tied_base_changes_in_every_format() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let base = open(&with_head(folder.path(), None)).await.unwrap();
        let expected = tensors(&fixture("peft/wide_tied/expected.safetensors")).await;
        for (name, format) in [("dcp", Format::Dcp), ("one.pt", Format::TorchSave)] {
            let stored = folder.path().join(name);
            base.convert(stored.to_str().unwrap()).to(format).run().await.unwrap();
            let target = folder.path().join(format!("merged {name}"));
            merge(&stored, &fixture("peft/wide_tied/ckpt"), &target).await.unwrap();
            let found = tensors(&target).await;
            assert!(found[HEAD] == expected[EMBEDDING], "{name}");
        }
    });
}

#[test]
fn an_embedding_is_untied_only_from_a_head_that_is_there() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let adapter = fixture("peft/wide_untied/ckpt");
        let refused = async |base: &Path, said: &str| {
            let target = folder.path().join("no");
            let error = merge(base, &adapter, &target).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(said), "{error}");
            assert!(!target.exists());
        };
        refused(&fixture("peft/wide_untied/base"), "no other tensor for a head").await;
        refused(&with_head(folder.path(), Some(true)), "config.json of the base ties it").await;
        for tied in [None, Some(false)] {
            // The base of `wide_tied` is that of `wide_untied`.
            let target = folder.path().join(format!("merged {tied:?}"));
            merge(&with_head(folder.path(), tied), &adapter, &target).await.unwrap();
            let expected = tensors(&fixture("peft/wide_untied/expected.safetensors")).await;
            assert!(tensors(&target).await == expected, "{tied:?}");
        }
    });
}

/// A head is no part of a name: `weight` alone is the end of that of any tensor.
#[test]
fn an_adapter_of_a_head_changes_no_other_tensor() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let adapter = folder.path().join("adapter");
        copy_folder(&fixture("peft/wide_mixed/ckpt"), &adapter);
        let file = adapter.join("adapter_model.safetensors");
        let (mut header, data) = parts(&file);
        header.retain(|name, _| name.contains("lm_head") || name == "__metadata__");
        // Data without gaps, in the order of the file.
        let mut kept = Vec::new();
        let mut names: Vec<_> =
            header.keys().filter(|name| *name != "__metadata__").cloned().collect();
        names.sort_by_key(|name| header[name]["data_offsets"][0].as_u64());
        for name in names {
            let range = header[&name]["data_offsets"].clone();
            let (from, to) = (range[0].as_u64().unwrap(), range[1].as_u64().unwrap());
            let at = kept.len();
            kept.extend_from_slice(&data[from as usize..to as usize]);
            header[&name]["data_offsets"] = json!([at, kept.len()]);
        }
        write(&file, &header, &kept);
        let base = folder.path().join("base.safetensors");
        let score = json!({ "dtype": "F32", "shape": [20, 24], "data_offsets": [0, 1920] });
        write(&base, &Map::from_iter([("score.weight".to_owned(), score)]), &[0; 1920]);
        assert_eq!(tensors(&base).await["score.weight"].0, DType::Float32);
        let error = merge(&base, &adapter, &folder.path().join("no")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unmapped, "{error}");
    });
}
