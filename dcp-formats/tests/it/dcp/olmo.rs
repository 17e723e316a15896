//! What OLMo-core wrote loads, bit for bit: its own class for places, strides, empty files.

use std::collections::BTreeMap;

use dcp_core::path::PathItem;
use dcp_core::{StorageReader as _, Value};
use dcp_formats::dcp::DcpReader;
use dcp_formats::metadata::Profile;
use serde_json::{Value as Json, json};

use crate::harness::{block_on, fixture, get, load, names};
use crate::support;

const FIXTURES: [&str; 5] = [
    "any-4rank",
    "ddp-2rank-nested",
    "fsdp2-2rank-bf16-modelonly",
    "fsdp2-2rank-flat",
    "fsdp2-2rank-nested",
];

fn expected(name: &str) -> Json {
    support::json(&support::root().join(format!("../olmo/{name}/expected.json")))
}

/// The JSON that the fixtures' generator makes of a value.
fn plain(value: &Value) -> Json {
    match value.view() {
        Value::None => Json::Null,
        Value::Bool(b) => json!(b),
        Value::Int(n) => json!(n),
        Value::Float(x) => json!(x),
        Value::Str(text) => json!(**text),
        Value::List(items) => items.iter().map(plain).collect(),
        Value::Tuple(items) => json!({ "tuple": items.iter().map(plain).collect::<Vec<_>>() }),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_fixture_of_olmo_core_equals_what_it_saved() {
    let mut chunks = 0;
    for name in FIXTURES {
        let storage = fixture(&format!("../olmo/{name}/ckpt"));
        let expected = expected(name);
        let metadata = block_on(DcpReader::new(storage.clone()).metadata()).unwrap();
        let loaded = load(storage.clone()).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(loaded.warnings, Vec::<String>::new(), "{name}");
        let tensors = support::expected_tensors(&format!("../olmo/{name}"));
        let entries = expected["entries"].as_array().unwrap();
        assert_eq!(metadata.len(), entries.len(), "{name}");
        for ((fqn, entry), expected) in metadata.iter().zip(entries) {
            assert_eq!(**fqn, expected["key"], "{name}");
            let path = entry.path().unwrap().iter().map(|item| match item {
                PathItem::Key(key) => json!(**key),
                PathItem::Index(n) => json!(n),
            });
            assert_eq!(path.collect::<Json>(), expected["path"], "{name}: {fqn}");
            let Some(tensor) = entry.as_tensor() else {
                assert_eq!(plain(&loaded.objects[&**fqn]), expected["value"], "{name}: {fqn}");
                continue;
            };
            assert_eq!(tensor.dtype.name(), expected["dtype"], "{name}: {fqn}");
            let boxes = tensor.chunks.iter();
            let boxes = boxes.map(|c| json!({ "offsets": c.offsets, "sizes": c.sizes }));
            assert_eq!(boxes.collect::<Json>(), expected["chunks"], "{name}: {fqn}");
            chunks += tensor.chunks.len();
            let (shape, bytes) = &tensors[&**fqn];
            let found = &loaded.tensors[&**fqn];
            assert_eq!((&found.shape().to_vec(), &found.to_vec().unwrap()), (shape, bytes));
        }
        let mut places = BTreeMap::new();
        for (fqn, entry) in metadata.iter() {
            let chunks = entry.as_tensor().map(|tensor| &tensor.chunks);
            let placed = chunks.into_iter().flat_map(|chunks| chunks.iter());
            let placed = placed.map(|chunk| (json!(chunk.offsets), chunk.placement.unwrap()));
            let object = entry.as_object().map(|object| (Json::Null, object.placement.unwrap()));
            for (offset, place) in placed.chain(object) {
                let file = metadata.file(place.file).unwrap().as_str();
                let place = json!([file, place.byte_offset, place.byte_len]);
                places.insert(json!([**fqn, offset]).to_string(), place);
            }
        }
        for place in expected["storage_data"].as_array().unwrap() {
            let key = json!([place["fqn"], place["offset"]]).to_string();
            let expected = json!([place["file"], place["start"], place["length"]]);
            assert_eq!(places.remove(&key), Some(expected), "{name}: {key}");
        }
        assert!(places.is_empty(), "{name}: {places:?}");
    }
    assert!(chunks > 250, "{chunks}");
}

#[test]
fn its_metadata_is_recognized() {
    for name in FIXTURES {
        let metadata = get(&*fixture(&format!("../olmo/{name}/ckpt")), ".metadata");
        assert_eq!(Profile::of(&metadata).unwrap(), Profile::OlmoTorch2_15, "{name}");
    }
    for (name, profile) in [
        ("t21_plain", Profile::Compat),
        ("t24_plain", Profile::Torch2_3),
        ("fsdp2_adam_2r", Profile::Torch2_15),
    ] {
        assert_eq!(Profile::of(&get(&*fixture(name), ".metadata")).unwrap(), profile, "{name}");
    }
}

#[test]
fn idle_ranks_leave_empty_files_and_strides_are_undone() {
    let ddp = fixture("../olmo/ddp-2rank-nested/ckpt");
    let empty = names(&*ddp).into_iter().filter(|file| get(&*ddp, file).is_empty());
    assert_eq!(empty.collect::<Vec<_>>(), ["__1_0.distcp", "__1_1.distcp"]);

    // Stored column by column: its bytes as they lie there are not the tensor's.
    let any = fixture("../olmo/any-4rank/ckpt");
    let expected = support::expected_tensors("../olmo/any-4rank").remove("model.transposed");
    let (_, row_major) = expected.unwrap();
    let holds = |bytes: &[u8]| bytes.windows(row_major.len()).any(|window| window == row_major);
    assert!(names(&*any).iter().all(|file| !holds(&get(&*any, file))));
    assert_eq!(load(any).unwrap().tensors["model.transposed"].to_vec().unwrap(), row_major);
}
