//! Every `.metadata` of every fixture, against what PyTorch says it holds.

use std::collections::BTreeMap;
use std::fs;

use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::path::PathItem;
use dcp_core::{CheckpointMetadata, DType, FormatError, Key};
use dcp_formats::metadata::{Profile, decode, encode};
use dcp_formats::pickle::{Limits, Node, Pickle, Writer};
use serde_json::{Value as Json, json};

use crate::support;

/// The parts of an `expected_metadata.json` that an index keeps; places sorted, since their order
/// means nothing.
fn to_json(metadata: &CheckpointMetadata) -> Json {
    let mut places = BTreeMap::new();
    let mut place = |key: Json, placement: Placement| {
        let mut info = json!({
            "relative_path": metadata.file(placement.file).unwrap().as_str(),
            "offset": placement.byte_offset,
            "length": placement.byte_len,
        });
        let encoding = metadata.encoding(&placement).unwrap();
        assert_eq!(encoding.layout, Layout::TorchArchive);
        if !encoding.transforms.is_empty() {
            let names: Vec<_> = encoding.transforms.iter().map(|name| json!(**name)).collect();
            info["transform_descriptors"] = names.into();
        }
        places.insert(key.to_string(), info);
    };
    let mut entries = Vec::new();
    for (fqn, entry) in metadata.iter() {
        let body = match entry {
            Entry::Object(object) => {
                if let Some(placement) = object.placement {
                    place(json!({"fqn": **fqn, "offset": null, "index": null}), placement);
                }
                json!({"kind": "bytes"})
            }
            Entry::Tensor(tensor) => {
                for (n, chunk) in tensor.chunks.iter().enumerate() {
                    if let Some(placement) = chunk.placement {
                        let key = json!({"fqn": **fqn, "offset": chunk.offsets, "index": n});
                        place(key, placement);
                    }
                }
                let formats = ["contiguous_format", "channels_last", "preserve_format"];
                let format = formats[usize::from(tensor.properties.memory_format)];
                json!({
                    "kind": "tensor",
                    "size": tensor.shape.to_vec(),
                    "dtype": tensor.dtype.name(),
                    "layout": "torch.strided",
                    "requires_grad": tensor.properties.requires_grad,
                    "memory_format": format!("torch.{format}"),
                    "pin_memory": tensor.properties.pin_memory,
                    "strides": tensor.properties.strides,
                    "chunks": tensor.chunks.iter().map(|c| json!([c.offsets, c.sizes])).collect::<Vec<_>>(),
                })
            }
            other => panic!("{other:?}"),
        };
        entries.push(json!([**fqn, body]));
    }
    let item = |item: &PathItem| match item {
        PathItem::Key(key) => json!(**key),
        PathItem::Index(n) => json!({"i": n}),
    };
    let paths: Vec<_> = metadata
        .iter()
        .filter_map(|(fqn, entry)| {
            let path: Vec<_> = entry.path()?.iter().map(item).collect();
            Some(json!([**fqn, path]))
        })
        .collect();
    let provenance = metadata.provenance();
    json!({
        "version": provenance.version.as_deref(),
        "checkpoint_id": provenance.checkpoint_id.as_deref(),
        "save_id": provenance.save_id.as_deref(),
        "state_dict_metadata": entries,
        "planner_data": paths,
        "storage_data": places,
    })
}

fn expected(json: &Json) -> Json {
    let mut entries = json["state_dict_metadata"].clone();
    for entry in entries.as_array_mut().unwrap() {
        entry[1].as_object_mut().unwrap().remove("properties_class");
    }
    let places: BTreeMap<_, _> = json["storage_data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry[0].to_string(), entry[1].clone()))
        .collect();
    let paths = json["planner_data"].as_array().cloned().unwrap_or_default();
    json!({
        "version": json["version"],
        "checkpoint_id": json["storage_meta"].get("checkpoint_id").unwrap_or(&Json::Null),
        "save_id": json["storage_meta"].get("save_id").unwrap_or(&Json::Null),
        "state_dict_metadata": entries,
        "planner_data": sorted(paths),
        "storage_data": places,
    })
}

fn sorted(paths: Vec<Json>) -> Json {
    let mut paths = paths;
    paths.sort_by_key(Json::to_string);
    paths.into()
}

/// As `pickle.dumps(metadata, protocol=…)` of the same object makes them.
#[test]
fn metadata_of_the_first_protocols_is_read() {
    let read = |name: &str| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/torch_save/protocols/");
        to_json(&decode(&fs::read(format!("{path}{name}")).unwrap()).unwrap())
    };
    let expected = read("metadata2");
    assert_eq!((read("metadata0"), read("metadata1")), (expected.clone(), expected));
}

#[test]
fn f06_f07_f14_every_metadata_decodes_to_what_pytorch_says() {
    let mut files = 0;
    for name in support::names() {
        for (file, json) in support::metadata_files(&name) {
            let metadata = decode(&fs::read(&file).unwrap()).unwrap();
            let mut ours = to_json(&metadata);
            ours["planner_data"] = sorted(ours["planner_data"].as_array().unwrap().clone());
            assert_eq!(ours, expected(&support::json(&json)), "{name}");
            files += 1;
        }
    }
    assert!(files > 35, "{files}");
}

/// The index of a checkpoint of many ranks is large, and all of them read it.
#[test]
fn an_index_is_no_larger_than_that_of_pytorch() {
    const CLASS_NAMES: usize = 272;
    let (mut ours, mut theirs) = (0, 0);
    for name in support::names() {
        for (file, _) in support::metadata_files(&name) {
            let stored = fs::read(&file).unwrap();
            let profile = Profile::of(&stored).unwrap();
            let encoded = encode(&decode(&stored).unwrap(), profile).unwrap();
            // Protocol 2 writes the module of each class, PyTorch's once: a few bytes in all.
            let most = stored.len() + CLASS_NAMES;
            assert!(encoded.len() <= most, "{name}: {} {}", encoded.len(), stored.len());
            (ours, theirs) = (ours + encoded.len(), theirs + stored.len());
        }
    }
    assert!(theirs > 100_000 && ours * 10 < theirs * 9, "{ours} bytes, {theirs} of PyTorch");
}

/// Names that a pickle would import.
fn globals(bytes: &[u8]) -> Vec<String> {
    let pickle = Pickle::parse(bytes, &Limits::DEFAULT).unwrap();
    assert_eq!((pickle.protocol(), pickle.byte_len()), (2, bytes.len()));
    pickle.globals().iter().map(|global| format!("{}.{}", global.module, global.name)).collect()
}

#[test]
fn t05_t06_what_is_encoded_decodes_again_and_each_profile_keeps_to_its_classes() {
    for name in support::names() {
        for (file, _) in support::metadata_files(&name) {
            let metadata = decode(&fs::read(&file).unwrap()).unwrap();
            for profile in Profile::ALL {
                if profile.is_olmo() && metadata.encodings().iter().any(is_transformed) {
                    let error = encode(&metadata, profile).unwrap_err();
                    assert!(error.problem().contains("stream.zstd"), "{error}");
                    continue;
                }
                let bytes = encode(&metadata, profile).unwrap();
                let again = decode(&bytes).unwrap();
                let (mut before, mut after) = (to_json(&metadata), to_json(&again));
                let with_strides = matches!(profile, Profile::Torch2_15 | Profile::OlmoTorch2_15);
                let with_origin = with_strides || profile == Profile::Olmo;
                if profile != Profile::Torch2_15 || before["version"].is_null() {
                    (before["version"], after["version"]) = (Json::Null, Json::Null);
                }
                if !with_origin {
                    before["checkpoint_id"] = Json::Null;
                    before["save_id"] = Json::Null;
                }
                for entry in before["state_dict_metadata"].as_array_mut().unwrap() {
                    if entry[1]["kind"] == "tensor" && !with_strides {
                        entry[1]["strides"] = Json::Null;
                    }
                }
                assert_eq!(before, after, "{name} {profile:?}");

                let globals = globals(&bytes);
                let has = |name: &str| globals.iter().any(|global| global == name);
                let checkpoint = "torch.distributed.checkpoint.metadata";
                assert!(!globals.iter().any(|global| global.starts_with("pathlib")));
                assert_eq!(has(&format!("{checkpoint}.StorageMeta")), with_origin);
                let mut classes = ["torch", "olmo_core"].map(|package| {
                    has(&format!("{package}.distributed.checkpoint.filesystem._StorageInfo"))
                });
                classes.sort_unstable();
                assert_eq!(classes, [false, !metadata.files().is_empty()], "{name}");
                let tensors = metadata.iter().any(|(_, entry)| entry.as_tensor().is_some());
                if tensors && !metadata.files().is_empty() {
                    assert_eq!(Profile::of(&bytes).unwrap(), profile);
                }
                if profile == Profile::Compat {
                    assert!(!has(&format!("{checkpoint}.TensorProperties")));
                    assert!(!has(&format!("{checkpoint}._MEM_FORMAT_ENCODING")));
                } else {
                    assert!(!globals.iter().any(|global| global.contains("_shard")));
                }
            }
        }
    }
}

fn is_transformed(encoding: &Encoding) -> bool {
    !encoding.transforms.is_empty()
}

fn refused(bytes: &[u8]) -> FormatError {
    decode(bytes).unwrap_err()
}

fn small() -> CheckpointMetadata {
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&Key::new("__0_0.distcp").unwrap()).unwrap();
    let encoding = metadata.intern_encoding(&Encoding::default()).unwrap();
    let placement = Placement { file, encoding, byte_offset: 1 << 40, byte_len: 1577 };
    let mut tensor = TensorEntry::new(DType::BFloat16, [4, 2]);
    tensor.chunks.push(&[0, 0], &[2, 2], Some(placement)).unwrap();
    tensor.chunks.push(&[2, 0], &[2, 2], Some(placement)).unwrap();
    metadata.insert("w", Entry::Tensor(tensor));
    metadata.insert("step", Entry::Object(ObjectEntry::new(Some(placement))));
    metadata
}

/// `bytes` with the only occurrence of a text replaced by one of the same length.
fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

#[test]
fn the_compat_profile_is_the_documented_bytes() {
    let bytes = encode(&small(), Profile::Compat).unwrap();
    let old = "torch.distributed._shard.sharded_tensor.metadata";
    let properties = format!("c{old}\nTensorProperties\n");
    let at = bytes.windows(properties.len()).position(|w| w == properties.as_bytes()).unwrap();
    let text: Vec<u8> = bytes[at..].to_vec();
    // Without memo numbers.
    let expected: Vec<&[u8]> = vec![
        b")\x81",
        b"(ctorch\nbfloat16\n",
        b"ctorch.serialization\n_get_layout\n",
        b"X\x0d\0\0\0torch.strided",
        b"\x85",
        b"R",
        b"\x89",
        b"MEM_FORMAT_ENCODING\n",
        b"K\0\x85",
        b"\x89t",
        b"b",
    ];
    let mut from = 0;
    for part in expected {
        from += text[from..].windows(part.len()).position(|window| window == part).unwrap();
    }
    assert!(from < 400, "{from}");
}

/// `bytes` with the last occurrence of a pattern replaced.
fn last_replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).rposition(|window| window == from).unwrap();
    let mut bytes = bytes.to_vec();
    bytes.splice(at..at + from.len(), to.iter().copied());
    bytes
}

#[test]
fn t01_chunks_that_lost_their_place_have_none() {
    // A writer thread died: the key is there, its entry in storage_data is not.
    let bytes = encode(&small(), Profile::Compat).unwrap();
    let lost = decode(&last_replaced(&bytes, b"K\x02K\0\x86", b"K\x03K\0\x86")).unwrap();
    let tensor = lost.get("w").unwrap().as_tensor().unwrap();
    let placed: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.placement.is_some()).collect();
    assert_eq!(placed, [true, false]);
    let error = encode(&lost, Profile::Compat).unwrap_err();
    assert!(error.problem().contains("\"w\" cannot be written"), "{error}");
}

#[test]
fn index_hints_are_only_hints() {
    let bytes = encode(&small(), Profile::Compat).unwrap();
    // The position of the second chunk in its MetadataIndex, in front of the key "offset".
    let hint: Vec<_> =
        bytes.windows(3).filter(|w| w[0] == b'K' && w[1] == 1 && w[2] == b'h').collect();
    assert_eq!(hint.len(), 1);
    let wrong = decode(&last_replaced(&bytes, hint[0], b"K\x4dh")).unwrap();
    let tensor = wrong.get("w").unwrap().as_tensor().unwrap();
    assert!(tensor.chunks.iter().all(|chunk| chunk.placement.is_some()));
}

#[test]
fn metadata_without_places_versions_or_paths_is_read() {
    let mut writer = Writer::new();
    writer.global("torch.distributed.checkpoint.metadata", "Metadata");
    writer.empty_tuple();
    writer.new_object();
    assert!(decode(&writer.finish().unwrap()).unwrap().is_empty());

    let bytes = encode(&small(), Profile::Compat).unwrap();
    let without = replaced(&bytes, "storage_data", "storage_tada");
    let metadata = decode(&without).unwrap();
    let tensor = metadata.get("w").unwrap().as_tensor().unwrap();
    assert_eq!(tensor.chunks.len(), 2);
    assert!(tensor.chunks.iter().all(|chunk| chunk.placement.is_none()));
    assert_eq!(metadata.get("step").unwrap().as_object().unwrap().placement, None);
}

#[test]
fn f12_file_names_cannot_leave_the_directory() {
    let bytes = encode(&small(), Profile::Compat).unwrap();
    for name in ["/etc/passwds", "../../secret", "a/../../bcde", "C:/windows/x"] {
        let error = refused(&replaced(&bytes, "__0_0.distcp", name));
        assert!(error.problem().contains("not allowed"), "{error}");
    }
}

#[test]
fn unknown_classes_are_named() {
    let bytes = encode(&small(), Profile::Compat).unwrap();
    let error = refused(&replaced(&bytes, "BytesStorageMetadata", "CustomStorageMetaaaa"));
    let class = "torch.distributed.checkpoint.metadata.CustomStorageMetaaaa";
    assert!(error.problem().contains(class), "{error}");
    let error = refused(&replaced(&bytes, "\nbfloat16\n", "\nbfloat17\n"));
    assert!(error.problem().contains("torch.bfloat17"), "{error}");
    assert!(refused(b"\x80\x02}.").problem().contains("a dict"));
}

/// OLMo-core's class has these three fields, and is read by setting them.
#[test]
fn places_for_olmo_have_its_class_and_three_fields() {
    for profile in [Profile::Olmo, Profile::OlmoTorch2_15] {
        let bytes = encode(&small(), profile).unwrap();
        assert_eq!(Profile::of(&bytes).unwrap(), profile);
        let pickle = Pickle::parse(&bytes, &Limits::DEFAULT).unwrap();
        let fields = |id| {
            let Node::Dict(fields) = *pickle.node(pickle.object(id).unwrap().state.unwrap()) else {
                panic!()
            };
            pickle.entries(fields).map(|(key, value)| (pickle.str(key).unwrap(), value))
        };
        let (_, places) = fields(pickle.root()).find(|(key, _)| *key == "storage_data").unwrap();
        let Node::Dict(places) = *pickle.node(places) else { panic!() };
        let mut infos = 0;
        for (_, info) in pickle.entries(places) {
            let class = pickle.global_name(pickle.object(info).unwrap().class).unwrap();
            let module = "olmo_core.distributed.checkpoint.filesystem";
            assert_eq!(class, (module, "_StorageInfo"));
            let names: Vec<_> = fields(info).map(|(key, _)| key).collect();
            assert_eq!(names, ["relative_path", "offset", "length"]);
            infos += 1;
        }
        assert_eq!(infos, 3);
    }
}

#[test]
fn the_profile_of_what_is_no_metadata() {
    assert!(Profile::of(b"\x80\x02}.").is_err());
    assert!(Profile::of(b"").is_err());
    // Both at once: whatever wrote it, it is not for anybody.
    let mut bytes = encode(&small(), Profile::Compat).unwrap().to_vec();
    let name = "torch.distributed.checkpoint.filesystem";
    let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).unwrap();
    bytes.splice(at..at + "torch".len(), "olmo_core".bytes());
    assert!(Profile::of(&bytes).unwrap_err().problem().contains("OLMo-core"));
    assert!(decode(&bytes).is_ok());
}

#[test]
fn t06_paths_of_all_pythons_are_text() {
    let with_id = |put: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new();
        let module = "torch.distributed.checkpoint.metadata";
        writer.global(module, "Metadata");
        writer.empty_tuple();
        writer.new_object();
        let never = |_: &mut Writer| Ok::<(), FormatError>(());
        writer
            .dict(std::iter::once(()), |writer, ()| {
                writer.constant("storage_meta");
                writer.global(module, "StorageMeta");
                writer.empty_tuple();
                writer.new_object();
                writer.dict(std::iter::once(()), |writer, ()| {
                    writer.constant("checkpoint_id");
                    put(writer);
                    never(writer)
                })?;
                writer.build();
                never(writer)
            })
            .unwrap();
        writer.build();
        let metadata = decode(&writer.finish().unwrap()).unwrap();
        metadata.provenance().checkpoint_id.as_deref().map(str::to_owned)
    };
    let path = |module: &'static str, parts: &'static [&'static str]| {
        move |writer: &mut Writer| {
            writer.global(module, "PosixPath");
            writer
                .tuple(parts.len(), |writer| {
                    parts.iter().for_each(|part| writer.constant(part));
                    Ok::<(), FormatError>(())
                })
                .unwrap();
            writer.call();
        }
    };
    let expected = Some("/mnt/a".to_owned());
    assert_eq!(with_id(&path("pathlib", &["/", "mnt", "a"])), expected);
    assert_eq!(with_id(&path("pathlib._local", &["/mnt/a"])), expected);
    assert_eq!(with_id(&|writer| writer.str("/mnt/a")), expected);
    assert_eq!(with_id(&|writer| writer.none()), None);
}

#[test]
fn f09_paths_tell_dotted_names_apart() {
    let paths: [(&str, &[&str]); 4] = [
        ("a.b.c", &["a", "b.c"]),
        ("x.y.z", &["x.y", "z"]),
        ("", &[""]),
        ("a/../b\n\u{e9}", &["a/../b\n\u{e9}"]),
    ];
    let mut metadata = small();
    let step = metadata.get("step").unwrap().clone();
    for (fqn, path) in paths {
        let Entry::Object(mut object) = step.clone() else { panic!() };
        object.path = Some(path.iter().map(|key| PathItem::Key((*key).into())).collect());
        metadata.insert(fqn, Entry::Object(object));
    }
    for profile in Profile::ALL {
        let again = decode(&encode(&metadata, profile).unwrap()).unwrap();
        for (fqn, path) in paths {
            let found: Vec<_> = again.get(fqn).unwrap().path().unwrap().to_vec();
            let keys: Vec<_> = path.iter().map(|key| PathItem::Key((*key).into())).collect();
            assert_eq!(found, keys);
        }
        // A name without a known path is one key.
        assert_eq!(again.get("w").unwrap().path().unwrap()[..], [PathItem::Key("w".into())]);
    }
}
