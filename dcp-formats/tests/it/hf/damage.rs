//! Folders that are not what they claim.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{CheckpointError, Storage, StorageReader as _};
use dcp_formats::hf::{Finding, FindingKind, HfReader};

use crate::harness::{block_on, delete, get, key, put};
use crate::hf::folder::{counting, expected, file, fixture, same, tensors};

const INDEX: &str = "model.safetensors.index.json";

/// What a strict reader says, and what a tolerant one finds.
fn judge(storage: &Arc<MemoryStorage>) -> (String, Vec<Finding>) {
    let shared = || Arc::clone(storage) as Arc<dyn Storage>;
    let strict = block_on(HfReader::new(shared()).metadata());
    let strict = strict.err().map_or(String::new(), |error| error.to_string());
    let tolerant = HfReader::builder(shared()).tolerant(true).build();
    let findings = block_on(tolerant.findings()).unwrap().to_vec();
    (strict, findings)
}

fn only(storage: &Arc<MemoryStorage>, kind: FindingKind, words: &[&str]) -> Finding {
    let (strict, findings) = judge(storage);
    let [finding] = &*findings else { panic!("{findings:?}") };
    assert_eq!(finding.kind, kind, "{finding:?}");
    for word in words {
        assert!(strict.contains(word), "{strict:?} does not contain {word:?}");
    }
    finding.clone()
}

fn edit_index(storage: &MemoryStorage, from: &str, to: &str) {
    let text = String::from_utf8(get(storage, INDEX).to_vec()).unwrap();
    assert!(text.contains(from));
    put(storage, INDEX, text.replacen(from, to, 1).into_bytes());
}

#[test]
fn a_missing_file_is_named_and_the_rest_can_be_seen() {
    let storage = fixture("rank0_index");
    delete(&*storage, "model-00002-of-00003.safetensors");
    let words = ["model-00002-of-00003.safetensors", "missing", "\"l1.w\" and 1 more"];
    let finding = only(&storage, FindingKind::MissingFile, &words);
    assert_eq!(finding.file, Some(key("model-00002-of-00003.safetensors")));
    let found = tensors(&HfReader::builder(storage).tolerant(true).build()).unwrap();
    let mut rest = expected("rank0_index");
    rest.retain(|fqn, _| !fqn.starts_with("l1"));
    assert!(same(&found, &rest));
}

#[test]
fn a_tensor_that_is_not_where_the_index_says_is_named() {
    let storage = fixture("rank0_index");
    edit_index(
        &storage,
        r#""head": "model-00003-of-00003.safetensors""#,
        r#""head": "model-00001-of-00003.safetensors""#,
    );
    let words = ["\"head\"", "model-00001-of-00003.safetensors", "does not hold it"];
    let finding = only(&storage, FindingKind::NotInFile, &words);
    assert_eq!(finding.fqn.as_deref(), Some("head"));
}

#[test]
fn an_index_that_leaves_the_folder_is_refused() {
    let storage = fixture("rank0");
    edit_index(&storage, "\"model-00001", "\"../model-00001");
    let error = tensors(&HfReader::new(storage)).unwrap_err().to_string();
    assert!(error.contains("`..` segment") && error.contains(INDEX), "{error}");
}

#[test]
fn wrong_totals_are_only_noted() {
    let storage = fixture("rank0");
    edit_index(&storage, "384", "385");
    let reader = HfReader::new(storage);
    assert!(same(&tensors(&reader).unwrap(), &expected("rank0")));
    let notes = block_on(reader.notes()).unwrap();
    assert!(notes[0].contains("385 bytes, they have 384"), "{notes:?}");
}

#[test]
fn files_cut_short_or_grown_are_found() {
    let name = "model-00003-of-00003.safetensors";
    let whole = fixture("rank0_index");
    let bytes = get(&*whole, name);
    let with = |bytes: &[u8]| {
        let storage = fixture("rank0_index");
        put(&*storage, name, bytes.to_vec());
        storage
    };
    // The lengths of files and places show this one already.
    let (strict, findings) = judge(&with(&bytes[..bytes.len() - 1]));
    assert!(strict.contains("\"head\"") && strict.contains("cut short"), "{strict}");
    assert_eq!(findings, []);
    only(&with(&bytes[..100]), FindingKind::Header, &[name, "claims"]);
    only(&with(&[]), FindingKind::Header, &[name, "only 0 bytes"]);
    let grown = [&bytes[..], b"x"].concat();
    only(&with(&grown), FindingKind::ExtraBytes, &[name, "the data has 109"]);
    let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    only(&with(&huge), FindingKind::Header, &[name, "the limit is"]);
}

fn raw(storage: &MemoryStorage, name: &str, json: &str, data: usize) {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    put(storage, name, bytes);
}

#[test]
fn headers_that_lie_are_found() {
    let a = r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let b = r#""b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}"#;
    let sharded = |offsets: &str| {
        format!(
            r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{\"a\": {{\"saved_offsets\": {offsets}}}}}"}},{a}}}"#
        )
    };
    let cases = [
        (format!("{{{a},{b}}}"), 6, FindingKind::SharedBytes, "\"b\" begins at 2"),
        (format!("{{{b}}}"), 6, FindingKind::ExtraBytes, "not at 0"),
        (format!("{{{a},{a}}}"), 4, FindingKind::Header, "occurs twice"),
        ("[".repeat(100_000), 0, FindingKind::Header, "invalid type"),
        (sharded("[0, 0]"), 4, FindingKind::Parts, "but 2 offsets"),
        (sharded("[18446744073709551615]"), 4, FindingKind::Parts, "beyond 2^64"),
        (sharded("[-1]"), 4, FindingKind::Header, "DCP_SHARDING_INFO"),
        (sharded("0"), 4, FindingKind::Header, "DCP_SHARDING_INFO"),
    ];
    for (json, data, kind, words) in cases {
        let storage = Arc::new(MemoryStorage::new());
        raw(&storage, "model.safetensors", &json, data);
        only(&storage, kind, &["model.safetensors", words]);
    }
}

#[test]
fn a_tensor_in_two_files_is_one_too_many() {
    let storage = Arc::new(MemoryStorage::new());
    let tensor = |first, at: Option<&'static [u64]>| {
        let (item, bytes) = counting("a", &[2], first);
        [(item, bytes, at)]
    };
    file(&*storage, "x.safetensors", &tensor(0, None));
    file(&*storage, "y.safetensors", &tensor(2, None));
    let words = ["\"a\"", "\"x.safetensors\"", "\"y.safetensors\"", "DCP_SHARDING_INFO"];
    only(&storage, FindingKind::Twice, &words);
    file(&*storage, "y.safetensors", &tensor(2, Some(&[2])));
    only(&storage, FindingKind::Twice, &words);

    // Once both say where they belong, it is one tensor.
    file(&*storage, "x.safetensors", &tensor(0, Some(&[0])));
    let found = tensors(&HfReader::new(Arc::clone(&storage) as _)).unwrap();
    assert_eq!(found["a"].to_vec().unwrap(), [0, 1, 2, 3]);

    // The same part twice does no harm, and is said.
    file(&*storage, "z.safetensors", &tensor(2, Some(&[2])));
    let reader = HfReader::new(Arc::clone(&storage) as _);
    assert_eq!(tensors(&reader).unwrap()["a"].to_vec().unwrap(), [0, 1, 2, 3]);
    let notes = block_on(reader.notes()).unwrap();
    assert!(notes[0].contains("stored more than once"), "{notes:?}");

    // Parts that overlap are visible in the metadata.
    file(&*storage, "z.safetensors", &tensor(2, Some(&[1])));
    let (strict, findings) = judge(&storage);
    assert!(strict.contains("overlap"), "{strict}");
    assert_eq!(findings, []);
}

#[test]
fn parts_of_different_kinds_do_not_fit() {
    let storage = Arc::new(MemoryStorage::new());
    let (item, bytes) = counting("a", &[2], 0);
    file(&*storage, "x.safetensors", &[(item.clone(), bytes.clone(), Some(&[0]))]);
    let (item, bytes) = counting("a", &[2, 1], 0);
    file(&*storage, "y.safetensors", &[(item, bytes, Some(&[2, 0]))]);
    only(&storage, FindingKind::Parts, &["\"a\"", "2 axes here", "1 axes in"]);
}

#[test]
fn several_indexes_and_no_model_at_all() {
    let storage = Arc::new(MemoryStorage::new());
    let reader = || HfReader::new(Arc::clone(&storage) as _);
    let error = block_on(reader().metadata()).unwrap_err();
    assert!(matches!(&error, CheckpointError::NotACheckpoint { .. }), "{error}");
    for name in ["a.safetensors.index.json", "b.safetensors.index.json"] {
        put(&*storage, name, br#"{"weight_map": {}}"#.to_vec());
    }
    let error = block_on(reader().metadata()).unwrap_err().to_string();
    assert!(error.contains("read one by its name"), "{error}");
    let one = HfReader::builder(Arc::clone(&storage) as _).index(key("b.safetensors.index.json"));
    let error = block_on(one.build().metadata()).unwrap_err().to_string();
    assert!(error.contains("names no tensor"), "{error}");
}

/// Folders of the Hub have indexes of other frameworks, too.
#[test]
fn an_index_of_another_program_is_no_variant() {
    for name in ["pytorch_model.bin.index.json", "tf_model.h5.index.json", "x.index.json"] {
        let storage = Arc::new(MemoryStorage::new());
        let weights = get(&*fixture("rank0"), "model-00001-of-00001.safetensors");
        put(&*storage, "model.safetensors", weights.to_vec());
        let alone = block_on(HfReader::new(Arc::clone(&storage) as _).metadata()).unwrap();
        put(&*storage, name, br#"{"weight_map": {"w": "w.bin"}}"#.to_vec());
        let beside = block_on(HfReader::new(Arc::clone(&storage) as _).metadata()).unwrap();
        assert_eq!(alone.len(), beside.len(), "{name}");
    }
}

#[test]
fn several_problems_are_counted() {
    let storage = fixture("rank0_index");
    for name in ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"] {
        delete(&*storage, name);
    }
    let (strict, findings) = judge(&storage);
    assert!(strict.contains("and 1 more problems"), "{strict}");
    assert_eq!(findings.len(), 2);
}
