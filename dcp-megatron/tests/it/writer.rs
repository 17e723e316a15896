//! What `MegatronWriter` leaves, whatever happens on the way.

use std::sync::Arc;

use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
use dcp_core::digest::{hex, sha256};
use dcp_core::error::error_chain;
use dcp_core::metadata::Entry;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Storage, StorageErrorKind, Value};
use dcp_formats::metadata::Profile;
use dcp_formats::torch_object::decode_object;
use dcp_jobs::reshard::reshard;
use dcp_jobs::{JobError, JobOptions, Source};
use dcp_megatron::{MegatronForm, MegatronWriter};

use crate::support::{block_on, copy, fixture, get, in_memory, names, objects, put};

pub(crate) const FORMS: [MegatronForm; 2] = [MegatronForm::CommonFile, MegatronForm::CommonInside];

/// What a loader finds: every stored chunk and object, and the common state.
pub(crate) type Found = (Vec<(String, Vec<u8>)>, i64);

pub(crate) fn common(seed: i64) -> Value {
    Value::Dict(Dict::from([("iteration", Value::Int(seed)), ("args", Value::Dict(Dict::new()))]))
}

pub(crate) fn source() -> Source {
    Source::dcp(in_memory(&fixture("tp2_basic").join("ckpt")), false)
}

pub(crate) fn other_source() -> Source {
    Source::dcp(in_memory(&fixture("factories").join("ckpt")), false)
}

pub(crate) fn writer(storage: Arc<dyn Storage>, form: MegatronForm, seed: i64) -> MegatronWriter {
    MegatronWriter::builder(storage).common(common(seed)).form(form).overwrite(true).build()
}

pub(crate) fn save(source: &Source, writer: &MegatronWriter) -> Result<(), JobError> {
    block_on(reshard(source, writer, 2, &JobOptions::default())).map(|_| ())
}

/// What is there, by `metadata.json` alone: nothing, or a checkpoint that must be whole.
pub(crate) fn load(storage: &Arc<MemoryStorage>) -> Option<Found> {
    let json = get(&**storage, "metadata.json")?;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["sharded_backend"], "torch_dist");
    let source = Source::dcp(storage.clone(), false);
    let metadata = block_on(source.metadata()).expect("the index of a checkpoint is whole");
    let report = block_on(dcp_jobs::verify::verify(&source, true, &JobOptions::default())).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let mut found = Vec::new();
    let mut inside = None;
    for (fqn, entry) in metadata.iter() {
        let mut add = |placement: dcp_core::metadata::Placement| {
            let file = get(&**storage, metadata.file(placement.file).unwrap().as_str()).unwrap();
            let start = placement.byte_offset as usize;
            let bytes = file[start..start + placement.byte_len as usize].to_vec();
            if fqn.starts_with("common_state/") {
                inside = Some(bytes);
            } else {
                found.push((fqn.to_string(), bytes));
            }
        };
        match entry {
            Entry::Tensor(tensor) => {
                tensor.chunks.iter().for_each(|chunk| add(chunk.placement.unwrap()));
            }
            Entry::Object(object) => add(object.placement.unwrap()),
            _ => unreachable!(),
        }
    }
    // Of both, readers take the file.
    let common = match get(&**storage, "common.pt") {
        Some(bytes) => {
            assert!(inside.is_none(), "common state in both places");
            decode_object(&bytes.into()).unwrap()
        }
        None => match decode_object(&inside.expect("there is a common state").into()).unwrap() {
            Value::List(items) => items.into_iter().next().unwrap(),
            other => panic!("{other:?}"),
        },
    };
    let iteration = common.as_dict().unwrap().get("iteration").unwrap().as_int().unwrap();
    Some((found, iteration))
}

#[test]
fn trap_01_each_form_has_one_common_state_and_its_own_metadata_json() {
    for form in FORMS {
        let storage = Arc::new(MemoryStorage::new());
        save(&source(), &writer(storage.clone(), form, 7)).unwrap();
        let json = get(&*storage, "metadata.json").unwrap();
        let fixture_of = match form {
            MegatronForm::CommonFile => "tp2_basic",
            _ => "head020_basic_integrity",
        };
        let megatrons = std::fs::read(fixture(fixture_of).join("ckpt/metadata.json")).unwrap();
        assert_eq!(json, megatrons);
        let files = names(&*storage);
        let has = |name: &str| files.iter().any(|file| file == name);
        assert_eq!(has("common.pt"), form == MegatronForm::CommonFile, "{files:?}");
        assert!(has(".metadata") && has("__0_0.distcp") && has("__1_0.distcp"), "{files:?}");
        assert_eq!(has("__0_1.distcp"), form == MegatronForm::CommonInside, "{files:?}");
        assert_eq!(load(&storage).unwrap().1, 7);
        // Five properties for each tensor, whatever the source had.
        let profile = Profile::of(&get(&*storage, ".metadata").unwrap()).unwrap();
        assert_eq!(profile, Profile::Compat);
    }
}

#[test]
fn trap_10_a_first_save_that_dies_is_none_or_whole() {
    for form in FORMS {
        for n in 1.. {
            let inner = Arc::new(MemoryStorage::new());
            let storage = FaultStorage::new(inner.clone()).dying_after(n - 1);
            let saved = save(&source(), &writer(Arc::new(storage.clone()), form, 1));
            assert_eq!(load(&inner).is_some(), saved.is_ok(), "dead at operation {n}");
            if storage.operations() < n {
                break;
            }
        }
    }
}

#[test]
fn a_save_that_fails_puts_back_what_was_there() {
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        let place = Arc::new(MemoryStorage::new());
        let integrity = |storage: Arc<dyn Storage>, form, seed| {
            let writer = MegatronWriter::builder(storage).common(common(seed)).form(form);
            writer.overwrite(true).integrity(true).build()
        };
        save(&source(), &integrity(place.clone(), from, 1)).unwrap();
        let old = load(&place).unwrap();
        let without_sidecars = |storage: &dyn Storage| {
            let all = names(storage).into_iter().filter(|name| !name.ends_with(".cbor"));
            all.map(|name| (get(storage, &name), name)).collect::<Vec<_>>()
        };
        let before = without_sidecars(&*place);
        for n in 1.. {
            let inner = copy(&*place);
            let storage =
                FaultStorage::new(inner.clone()).fault(n, Fault::Fail(StorageErrorKind::Full));
            let saved = save(&other_source(), &integrity(Arc::new(storage.clone()), to, 2));
            let when = format!("{from:?} to {to:?}, failed at operation {n}");
            if saved.is_err() {
                assert_eq!(load(&inner).as_ref(), Some(&old), "{when}");
                assert!(without_sidecars(&*inner) == before, "{when}: {:?}", names(&*inner));
            } else {
                assert_eq!(load(&inner).unwrap().1, 2, "{when}");
            }
            if storage.operations() < n {
                break;
            }
        }
    }
}

/// A disk that is full stays full: what is put back must not need space. With the files of
/// Megatron-Core's integrity check and without.
#[test]
fn a_full_disk_changes_nothing_of_what_was_there() {
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        for with_integrity in [false, true] {
            let place = Arc::new(MemoryStorage::new());
            let writer = |storage: Arc<dyn Storage>, form, seed| {
                let writer = MegatronWriter::builder(storage).common(common(seed)).form(form);
                writer.overwrite(true).integrity(with_integrity).build()
            };
            save(&source(), &writer(place.clone(), from, 1)).unwrap();
            let all = |storage: &dyn Storage| {
                let names = names(storage).into_iter();
                names.map(|name| (get(storage, &name), name)).collect::<Vec<_>>()
            };
            let before = all(&*place);
            let mut tried = 0;
            for n in 0.. {
                let inner = copy(&*place);
                let full = FaultStorage::new(inner.clone()).full_after(n);
                let saved = save(&other_source(), &writer(Arc::new(full.clone()), to, 2));
                let when = format!("{from:?} to {to:?}, full after {n} operations");
                if saved.is_ok() {
                    assert_eq!(load(&inner).unwrap().1, 2, "{when}");
                    break;
                }
                assert!(all(&*inner) == before, "{when}: {:?}", names(&*inner));
                tried = n;
            }
            assert!(tried > 10, "only {tried} operations were tried");
        }
    }
}

/// Whatever stops working in the middle of a save, what is left is one checkpoint or none.
#[test]
fn a_storage_that_breaks_leaves_no_mix() {
    let faults: [fn(FaultStorage, u64) -> FaultStorage; 3] = [
        |storage, n| storage.read_only_after(n - 1),
        |storage, n| storage.fault(n, Fault::FailAfterwards),
        |storage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Transient)),
    ];
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        let place = Arc::new(MemoryStorage::new());
        save(&source(), &writer(place.clone(), from, 1)).unwrap();
        let old = load(&place).unwrap();
        let whole = Arc::new(MemoryStorage::new());
        save(&other_source(), &writer(whole.clone(), to, 2)).unwrap();
        let new = load(&whole).unwrap();
        // What was loaded of the objects that a fault left.
        let mut known = Vec::new();
        for (which, fault) in faults.iter().enumerate() {
            for n in 1.. {
                let inner = copy(&*place);
                let storage = fault(FaultStorage::new(inner.clone()), n);
                let saved = save(&other_source(), &writer(Arc::new(storage.clone()), to, 2));
                let when = format!("{from:?} to {to:?}, fault {which} at operation {n}: {saved:?}");
                let left = objects(&*inner);
                let loaded = known.iter().find(|(objects, _)| *objects == left);
                let loaded = loaded.map(|(_, loaded)| Clone::clone(loaded));
                let loaded = loaded.unwrap_or_else(|| {
                    let loaded = load(&inner);
                    known.push((left, loaded.clone()));
                    loaded
                });
                match loaded {
                    // Only what stays read-only cannot be put back.
                    None => {
                        assert!(which == 0 && (from, to) != (FORMS[1], FORMS[1]), "{when}");
                        save(&source(), &writer(inner.clone(), to, 3)).unwrap();
                        assert_eq!(load(&inner).unwrap(), (old.0.clone(), 3), "{when}");
                    }
                    Some(found) if found == old => assert!(saved.is_err(), "{when}"),
                    Some(found) => assert!(found == new, "{when}"),
                }
                if storage.operations() < n {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_lost_reply_never_makes_a_mix() {
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        let place = Arc::new(MemoryStorage::new());
        save(&source(), &writer(place.clone(), from, 1)).unwrap();
        let old = load(&place).unwrap();
        for n in 1.. {
            let inner = copy(&*place);
            let storage = FaultStorage::new(inner.clone()).fault(n, Fault::LoseReply);
            let saved = save(&other_source(), &writer(Arc::new(storage.clone()), to, 2));
            let found = load(&inner).unwrap();
            assert_eq!(saved.is_ok(), found != old, "lost at operation {n}: {saved:?}");
            if storage.operations() < n {
                break;
            }
        }
    }
}

#[test]
fn a_checkpoint_is_not_replaced_unasked() {
    for name in ["tp2_basic", "head020_basic_integrity", "v06_zarr"] {
        let place = in_memory(&fixture(name).join("ckpt"));
        let before = names(&*place);
        let careful = MegatronWriter::builder(place.clone()).common(common(1)).build();
        let error = save(&source(), &careful).unwrap_err();
        let JobError::Checkpoint(CheckpointError::Storage(error)) = error else {
            panic!("{error:?}")
        };
        assert_eq!(error.kind(), StorageErrorKind::AlreadyExists);
        assert!(error_chain(&error).contains("overwriting is off"), "{error}");
        assert_eq!(names(&*place), before);
    }
    // What another backend wrote would stay, gigabytes of it.
    let place = in_memory(&fixture("v06_zarr").join("ckpt"));
    let error = save(&source(), &writer(place, MegatronForm::CommonFile, 1)).unwrap_err();
    assert!(error_chain(&error).contains("another backend"), "{error:?}");
}

#[test]
fn an_unfinished_save_is_not_in_the_way_of_the_next() {
    let careful = |storage: Arc<dyn Storage>, form, seed| {
        MegatronWriter::builder(storage).common(common(seed)).form(form).build()
    };
    for form in FORMS {
        let mut between = 0;
        for n in 1.. {
            let inner = Arc::new(MemoryStorage::new());
            let storage = FaultStorage::new(inner.clone()).dying_after(n - 1);
            let saved = save(&source(), &careful(Arc::new(storage.clone()), form, 1));
            if saved.is_err() {
                between += u32::from(get(&*inner, ".metadata").is_some());
                save(&other_source(), &careful(inner.clone(), form, 2))
                    .unwrap_or_else(|error| panic!("dead at operation {n}: {error:?}"));
                assert_eq!(load(&inner).unwrap().1, 2, "dead at operation {n}");
            } else {
                assert!(save(&other_source(), &careful(inner.clone(), form, 2)).is_err());
                assert_eq!(load(&inner).unwrap().1, 1);
            }
            if storage.operations() < n {
                break;
            }
        }
        assert!(between > 0, "no save died after its .metadata");
    }
    // What may be a whole checkpoint of PyTorch stays: of PyTorch itself, and of our writer for it.
    let of_pytorch = in_memory(&fixture("tp2_basic").join("ckpt"));
    block_on(of_pytorch.delete(&[dcp_core::Key::new("metadata.json").unwrap()])).unwrap();
    let of_ours = Arc::new(MemoryStorage::new());
    let plain = dcp_formats::dcp::DcpWriter::new(of_ours.clone());
    block_on(reshard(&source(), &plain, 2, &JobOptions::default())).unwrap();
    for place in [of_pytorch, of_ours as _] {
        let before = names(&*place);
        let error = save(&source(), &careful(place.clone(), FORMS[0], 1)).unwrap_err();
        assert!(error_chain(&error).contains("overwriting is off"), "{error:?}");
        assert_eq!(names(&*place), before);
    }
}

#[test]
fn data_files_are_hashed_before_the_index_is_visible() {
    // However many files there are, a save is as long between the index and its completion.
    let moments = |ranks| {
        let mut between = 0;
        for n in 1.. {
            let inner = Arc::new(MemoryStorage::new());
            let storage = FaultStorage::new(inner.clone()).dying_after(n - 1);
            let writer = MegatronWriter::builder(Arc::new(storage.clone())).common(common(1));
            let writer = writer.integrity(true).build();
            let saved = block_on(reshard(&source(), &writer, ranks, &JobOptions::default()));
            let has = |name| get(&*inner, name).is_some();
            between += u32::from(saved.is_err() && has(".metadata") && !has("metadata.json"));
            if storage.operations() < n {
                break;
            }
        }
        between
    };
    assert_eq!(moments(2), moments(8));
}

#[test]
fn files_of_a_separation_hint_go_with_the_checkpoint_that_had_them() {
    let place = in_memory(&fixture("gpt_separation_hint").join("ckpt"));
    put(&*place, "notes.distcp", b"mine".to_vec());
    assert!(names(&*place).iter().any(|name| name.starts_with("optimizer.__")));
    save(&source(), &writer(place.clone(), MegatronForm::CommonFile, 4)).unwrap();
    assert_eq!(load(&place).unwrap().1, 4);
    let left: Vec<_> =
        names(&*place).into_iter().filter(|name| name.ends_with(".distcp")).collect();
    assert_eq!(left, ["__0_0.g1.distcp", "__1_0.g1.distcp", "notes.distcp"]);
}

#[test]
fn the_integrity_manifest_lists_every_file_with_its_hash() {
    for form in FORMS {
        let storage = Arc::new(MemoryStorage::new());
        for seed in [1, 2] {
            let writer = MegatronWriter::builder(storage.clone()).common(common(seed)).form(form);
            save(&source(), &writer.integrity(true).overwrite(true).build()).unwrap();
            let text = String::from_utf8(get(&*storage, "integrity.json").unwrap()).unwrap();
            let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert!(text.starts_with("{\n  \"algorithm\": \"sha256\",\n  \"files\": {\n    \""));
            assert!(text.ends_with("\"\n  }\n}"));
            let files = manifest["files"].as_object().unwrap();
            let listed: Vec<_> = files.keys().cloned().collect();
            let mut there = names(&*storage);
            there.retain(|name| name != "integrity.json");
            assert_eq!(listed, there);
            for (name, hash) in files {
                let hex = hex(&sha256(get(&*storage, name).unwrap()));
                assert_eq!(*hash, hex, "{name}");
            }
        }
        // A save without one leaves none that would condemn it.
        save(&source(), &writer(storage.clone(), form, 3)).unwrap();
        assert_eq!(get(&*storage, "integrity.json"), None);
    }
}

#[test]
fn what_cannot_be_common_state_is_refused_before_anything_is_written() {
    let mut shown = dcp_core::value::Object::new(dcp_core::value::Global::new("m", "C"), vec![]);
    shown.made_by = dcp_core::value::MadeBy::Unknown;
    let mut args =
        dcp_core::value::Object::new(dcp_core::value::Global::new("argparse", "Namespace"), vec![]);
    let attributes = Dict::from([("lr", Value::Int(1)), ("odd", Value::from(shown))]);
    args.state = Some(attributes.into());
    let of_a_class = Value::Dict(Dict::from([("list", Value::List(vec![args.into()]))]));
    let said = "at list.0.odd: an object of class m.C";
    for (value, said) in [(Value::Int(3), "a int, not a dict"), (of_a_class, said)] {
        let storage = Arc::new(MemoryStorage::new());
        let writer = MegatronWriter::builder(storage.clone()).common(value).build();
        let error = error_chain(&save(&source(), &writer).unwrap_err());
        assert!(error.contains("common state") && error.contains(said), "{error}");
        assert_eq!(names(&*storage), Vec::<String>::new());
    }
}

#[test]
fn the_common_state_of_a_fixture_is_taken_over_byte_for_byte() {
    for name in ["tp2_basic", "run_torch_dist_dp2/iter_0000010"] {
        let folder = fixture(name);
        let folder = if folder.join("ckpt").exists() { folder.join("ckpt") } else { folder };
        let bytes = std::fs::read(folder.join("common.pt")).unwrap();
        let value = decode_object(&bytes.clone().into()).unwrap();
        let storage = Arc::new(MemoryStorage::new());
        let writer = MegatronWriter::builder(storage.clone()).common(value.clone()).build();
        save(&source(), &writer).unwrap();
        let written = get(&*storage, "common.pt").unwrap();
        let again = decode_object(&written.clone().into()).unwrap();
        assert!(again.view().same(value.view()), "{name}");
        if matches!(value, Value::Opaque(_)) {
            assert_eq!(written, bytes, "{name}");
        }
    }
}

#[test]
fn a_common_state_is_not_planned_as_an_object_too() {
    let place = Arc::new(MemoryStorage::new());
    save(&source(), &writer(place.clone(), MegatronForm::CommonInside, 1)).unwrap();
    let target = Arc::new(MemoryStorage::new());
    let raw = Source::dcp(place, false);
    let error = save(&raw, &writer(target, MegatronForm::CommonFile, 1)).unwrap_err();
    assert!(error_chain(&error).contains("common_state/shard_0_1"), "{error:?}");
}
