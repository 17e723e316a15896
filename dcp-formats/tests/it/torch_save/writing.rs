//! Files written here.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::error::StateProblem;
use dcp_core::metadata::Entry;
use dcp_core::path::PathItem;
use dcp_core::{CheckpointError, DType, PlanError, Storage, StorageReader as _, Value};
use dcp_formats::torch_object::decode_object;
use dcp_formats::torch_save::{
    TorchSaveContent, TorchSaveForm, TorchSaveItem, TorchSaveOptions, TorchSavePlan, write,
};
use dcp_formats::torch_zip::RecordSet;

use crate::harness::{Loaded, Source, block_on, get, key, names};
use crate::torch_save::reading::{fixture, load, metadata, reader, root, stored};

const LEGACY: TorchSaveForm = TorchSaveForm::Legacy;

fn options(form: TorchSaveForm) -> TorchSaveOptions {
    TorchSaveOptions::default().with_form(form)
}

fn item(name: &str, content: TorchSaveContent) -> TorchSaveItem {
    TorchSaveItem { name: name.into(), path: None, content }
}

fn tensor(dtype: DType, shape: &[u64], same_as: Option<usize>) -> TorchSaveContent {
    TorchSaveContent::Tensor { dtype, shape: shape.into(), same_as }
}

/// What a file holds, as items to write; tensors in the same bytes are tied.
fn items_of(storage: &Arc<MemoryStorage>, loaded: &Loaded) -> (Vec<TorchSaveItem>, Vec<Bytes>) {
    let metadata = block_on(reader(storage).metadata()).unwrap();
    let (mut items, mut data, mut places) = (Vec::new(), Vec::new(), HashMap::new());
    for (fqn, entry) in metadata.iter() {
        let position = items.len();
        let (content, bytes) = match entry {
            Entry::Tensor(entry) => {
                let placement = entry.chunks.get(0).unwrap().placement.unwrap();
                let place = (placement.byte_offset, placement.byte_len, placement.encoding);
                let first = *places.entry(place).or_insert(position);
                let tied = first != position && placement.byte_len > 0 && placement.encoding == 0;
                let content = tensor(entry.dtype, &entry.shape, tied.then_some(first));
                (content, loaded.tensors[&**fqn].to_vec().unwrap())
            }
            _ => (TorchSaveContent::Object(loaded.objects[&**fqn].clone()), Vec::new()),
        };
        items.push(TorchSaveItem { path: entry.path().cloned(), ..item(fqn, content) });
        data.push(bytes.into());
    }
    (items, data)
}

fn written(
    items: &[TorchSaveItem],
    data: Vec<Bytes>,
    options: &TorchSaveOptions,
) -> Result<Arc<MemoryStorage>, CheckpointError> {
    let storage = Arc::new(MemoryStorage::new());
    let source = Arc::new(Source { items: data, segment: 7 });
    let file = key("file.pt");
    let len = block_on(write(&*storage, &file, items, source, options, None))?;
    assert_eq!(get(&*storage, "file.pt").len() as u64, len);
    Ok(storage)
}

#[test]
fn plain_files_are_those_of_pytorch_byte_for_byte() {
    let name = root().join("t215/back.pt");
    let theirs = std::fs::read(name).unwrap();
    let storage = stored(theirs.clone());
    let (items, data) = items_of(&storage, &load(&storage).unwrap());
    let options = TorchSaveOptions::default().with_root("back");
    let ours = get(&*written(&items, data, &options).unwrap(), "file.pt");
    assert_eq!(ours.len(), theirs.len());
    // The 40 digits of the serialization id and their CRC, which stands there twice.
    let id = find(&theirs, b"back/.data/serialization_id") + 40;
    let differs: Vec<_> = (0..ours.len()).filter(|at| ours[*at] != theirs[*at]).collect();
    assert!(differs.len() <= 48, "{differs:?}");
    let outside = differs.iter().filter(|at| !(id..id + 120).contains(*at));
    assert!(outside.count() <= 4, "{id} {differs:?}");
}

fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).position(|window| window == what).unwrap()
}

#[test]
fn the_head_of_the_older_form_is_that_of_pytorch() {
    let theirs = std::fs::read(root().join("t215/legacy.pt")).unwrap();
    let ours = get(&*written(&[], Vec::new(), &options(LEGACY)).unwrap(), "file.pt");
    assert_eq!(ours[..137], theirs[..137]);
    assert_eq!(&ours[137..], b"\x80\x02}q\x00.\x80\x02]q\x00.");
}

#[test]
fn all_that_training_leaves_comes_back() {
    let mut compared = 0;
    for file in ["zip.pt", "legacy.pt"] {
        let storage = fixture("kinds", file);
        let before = load(&storage).unwrap();
        let (items, data) = items_of(&storage, &before);
        for form in [TorchSaveForm::default(), TorchSaveForm::Zip(RecordSet::Torch2_1), LEGACY] {
            let new = written(&items, data.clone(), &options(form)).unwrap();
            let after = load(&new).unwrap();
            assert_eq!(after.tensors.len(), before.tensors.len());
            for (fqn, tensor) in &after.tensors {
                assert!(tensor.same(&before.tensors[fqn]), "{fqn}");
            }
            assert!(after.objects.keys().eq(before.objects.keys()));
            for (fqn, value) in &after.objects {
                match (value, &before.objects[fqn]) {
                    (Value::Opaque(after), Value::Opaque(before)) => {
                        let views = (format!("{:?}", after.view), format!("{:?}", before.view));
                        assert_eq!(views.0, views.1, "{fqn}");
                        decode_object(&after.encoded).unwrap();
                        compared += 1;
                    }
                    (after, before) => assert!(after.same(before), "{fqn}: {after:?}"),
                }
            }
            let metadata = metadata(&new).unwrap();
            let paths = metadata.iter().map(|(fqn, entry)| (fqn.clone(), entry.path().cloned()));
            let requested = items.iter().map(|item| (item.name.clone(), item.path.clone()));
            let mut paths: Vec<_> = paths.collect();
            let mut requested: Vec<_> = requested.collect();
            paths.sort();
            requested.sort();
            assert_eq!(paths, requested);
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn tied_tensors_are_stored_once() {
    for form in [TorchSaveForm::default(), LEGACY] {
        let items = [
            item("embed", tensor(DType::Float32, &[64, 32], None)),
            item("head", tensor(DType::Float32, &[32, 64], Some(0))),
            item("other", tensor(DType::Float8E4M3Fn, &[3], None)),
        ];
        let embed: Bytes = (0..64 * 32_u32).flat_map(u32::to_le_bytes).collect();
        let data = vec![embed.clone(), Bytes::new(), Bytes::from_static(b"abc")];
        let storage = written(&items, data, &options(form)).unwrap();
        assert!(get(&*storage, "file.pt").len() < 2 * embed.len());
        let loaded = load(&storage).unwrap();
        assert_eq!(loaded.tensors["head"].to_vec().unwrap(), embed);
        assert_eq!(loaded.tensors["head"].shape().to_vec(), [32, 64]);
        assert_eq!(loaded.tensors["other"].to_vec().unwrap(), b"abc");
    }
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    let refused = |items: &[TorchSaveItem]| {
        let error = TorchSavePlan::new(&key("f.pt"), items, &TorchSaveOptions::default());
        match error.unwrap_err() {
            CheckpointError::Plan(PlanError::State {
                fqn,
                problem:
                    StateProblem::NotStorable { problem } | StateProblem::PathConflict { problem },
            }) => (fqn, problem),
            other => panic!("{other:?}"),
        }
    };
    let (fqn, problem) = refused(&[item("q", tensor(DType::QInt8, &[2], None))]);
    assert!(fqn == "q" && problem.contains("scale"), "{problem}");
    let (fqn, problem) = refused(&[
        item("a", tensor(DType::Int8, &[2], None)),
        item("b", tensor(DType::Int8, &[3], Some(0))),
    ]);
    assert!(fqn == "b" && problem.contains("same type and size"), "{problem}");
    let path = |steps: &[PathItem]| Some(steps.into());
    let step = |name: &str| PathItem::Key(name.into());
    let none = || TorchSaveContent::Object(Value::None);
    let (fqn, problem) = refused(&[
        TorchSaveItem { path: path(&[step("x"), step("y")]), ..item("x.y", none()) },
        TorchSaveItem { path: path(&[step("x"), PathItem::Index(0)]), ..item("x.0", none()) },
    ]);
    assert!(fqn == "x.0" && problem.contains("not a container of that kind"), "{problem}");
    let (fqn, problem) = refused(&[item("x", none()), item("x", none())]);
    assert!(fqn == "x" && problem.contains("same place"), "{problem}");
    let (fqn, _) = refused(&[TorchSaveItem {
        path: path(&[step("l"), PathItem::Index(1 << 40)]),
        ..item("l.1099511627776", none())
    }]);
    assert_eq!(fqn, "l.1099511627776");
    let mut class =
        dcp_core::value::Object::new(dcp_core::value::Global::new("m", "C"), Vec::new());
    class.made_by = dcp_core::value::MadeBy::Unknown;
    let (fqn, problem) =
        refused(&[item("o", TorchSaveContent::Object(Value::Object(Box::new(class))))]);
    assert!(fqn == "o" && problem.contains("m.C"), "{problem}");
}

#[test]
fn a_source_that_fails_leaves_no_file() {
    let items = [item("w", tensor(DType::Int8, &[1 << 24], None))];
    let storage = Arc::new(MemoryStorage::new());
    // Too few bytes.
    let source = Arc::new(Source { items: vec![Bytes::from(vec![1; 5])], segment: 1 << 20 });
    let (file, options) = (key("f.pt"), TorchSaveOptions::default());
    block_on(write(&*storage, &file, &items, source, &options, None)).unwrap_err();
    assert_eq!(names(&*storage as &dyn Storage), Vec::<String>::new());
}

#[test]
fn gaps_in_lists_are_none() {
    let path = |at| Some([PathItem::Key("l".into()), PathItem::Index(at)].as_slice().into());
    let items = [
        TorchSaveItem { path: path(2), ..item("l.2", tensor(DType::Int8, &[1], None)) },
        TorchSaveItem { path: path(0), ..item("l.0", TorchSaveContent::Object(5.into())) },
    ];
    let data = vec![Bytes::from_static(b"x"), Bytes::new()];
    let loaded = load(&written(&items, data, &TorchSaveOptions::default()).unwrap()).unwrap();
    assert!(loaded.objects["l.0"].same(&5.into()) && loaded.objects["l.1"].same(&Value::None));
    assert_eq!(loaded.tensors["l.2"].to_vec().unwrap(), b"x");
}
