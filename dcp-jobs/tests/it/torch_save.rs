//! Files of `torch.save` as sources: views of one storage are sound, and damage in any of them is
//! never carried over.

use std::io::Write as _;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_formats::pickle::{Limits, Node, Pickle, Writer};
use dcp_formats::torch_save::{TorchSaveForm, TorchSaveReader};
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_jobs::convert::{to_safetensors, to_torch_save};
use dcp_jobs::diff::{DiffOptions, diff};
use dcp_jobs::integrity::ProblemKind;
use dcp_jobs::keys::Rename;
use dcp_jobs::verify::verify;
use dcp_jobs::view::{AverageOptions, Averaged};
use dcp_jobs::write::Target;
use dcp_jobs::{JobError, JobOptions, Selection, Source};
use dcp_planner::KeyFilter;
use dcp_testing::{block_on, key};

const SIDE: u64 = 1024;

/// A view of a storage of `SIDE * SIDE` floats.
struct View {
    name: &'static str,
    offset: u64,
    sizes: &'static [u64],
    strides: &'static [u64],
}

const WHOLE: View = View { name: "whole", offset: 0, sizes: &[SIDE, SIDE], strides: &[SIDE, 1] };
const TURNED: View = View { name: "turned", offset: 0, sizes: &[SIDE, SIDE], strides: &[1, SIDE] };
const ROWS: View =
    View { name: "rows", offset: 512 * SIDE, sizes: &[500, SIDE], strides: &[SIDE, 1] };
const COLUMNS: View = View { name: "columns", offset: 7, sizes: &[SIDE, 9], strides: &[SIDE, 1] };

/// A tensor as torch.save writes it.
#[derive(Clone, Copy)]
struct Rebuilt<'a> {
    /// Its class, name and number of elements.
    storage: (&'a str, &'a str, u64),
    offset: u64,
    sizes: &'a [u64],
    strides: &'a [u64],
    /// Of a tensor that is quantized as a whole.
    scale: Option<f64>,
}

impl Rebuilt<'_> {
    fn write(&self, writer: &mut Writer) -> Result<(), ()> {
        let function = match self.scale {
            Some(_) => "_rebuild_qtensor",
            None => "_rebuild_tensor_v2",
        };
        writer.global("torch._utils", function);
        writer.tuple(6 + usize::from(self.scale.is_some()), |writer| {
            let (class, storage, len) = self.storage;
            writer.storage(("torch", class), storage, "cpu", len);
            writer.uint(self.offset);
            writer.uint_tuple(self.sizes);
            writer.uint_tuple(self.strides);
            if let Some(scale) = self.scale {
                writer.tuple(3, |writer| {
                    writer.global("torch", "per_tensor_affine");
                    writer.float(scale);
                    writer.int(0);
                    Ok::<(), ()>(())
                })?;
            }
            writer.bool(false);
            writer.none();
            Ok::<(), ()>(())
        })?;
        writer.call();
        Ok(())
    }
}

/// The pickle of a dict of these tensors.
fn pickle(tensors: &[(&str, Rebuilt<'_>)]) -> Writer {
    let mut writer = Writer::new();
    let built = writer.dict(tensors.iter(), |writer, (name, tensor)| {
        writer.constant(name);
        tensor.write(writer)
    });
    built.unwrap();
    writer
}

/// The file `model.pt` of this pickle and these storages, after `damage`.
fn file(pickle: Writer, storages: &[&[u8]], damage: impl FnOnce(&mut [u8])) -> Source {
    let pickle = pickle.finish().unwrap();
    let file = ArchiveEncoder::encode(RecordSet::default(), pickle, storages).unwrap();
    let mut file = file.to_vec();
    damage(&mut file);
    let storage = MemoryStorage::new();
    block_on(storage.put(&key("model.pt"), file.into(), PutMode::Create)).unwrap();
    Source::torch_save(Arc::new(storage), key("model.pt"))
}

fn source(views: &[View], damaged: bool) -> Source {
    let rebuilt = |view: &View| Rebuilt {
        storage: ("FloatStorage", "0", SIDE * SIDE),
        offset: view.offset,
        sizes: view.sizes,
        strides: view.strides,
        scale: None,
    };
    let tensors: Vec<_> = views.iter().map(|view| (view.name, rebuilt(view))).collect();
    let bytes: Vec<u8> = (0..SIDE * SIDE).flat_map(|n| (n as f32).to_le_bytes()).collect();
    file(pickle(&tensors), &[&bytes], |file| {
        if damaged {
            // In a row and a column that every view has.
            let found = file.windows(16).position(|window| window == &bytes[64..80]);
            file[found.unwrap() - 64 + 4 * (700 * SIDE as usize + 10)] ^= 1;
        }
    })
}

/// `{"q": a tensor of qint8 with this scale, "w": a plain one}`.
fn quantized(scale: f64) -> Source {
    let plain = Rebuilt {
        storage: ("CharStorage", "1", 4),
        offset: 0,
        sizes: &[4],
        strides: &[1],
        scale: None,
    };
    let q = Rebuilt { storage: ("QInt8Storage", "0", 4), scale: Some(scale), ..plain };
    file(pickle(&[("q", q), ("w", plain)]), &[&[1, 2, 3, 4], &[5, 6, 7, 8]], |_| {})
}

#[test]
fn a_scale_is_never_dropped() {
    let (a, b) = (quantized(0.5), quantized(0.25));
    let options = JobOptions::default();
    let equal = |a: &Source, b: &Source| {
        block_on(diff(a, b, &DiffOptions::default(), &options)).unwrap().equal
    };
    assert!(equal(&a, &quantized(0.5)));
    assert!(!equal(&a, &b));
    let average = |b: &Source| {
        block_on(Averaged::apply(&[a.clone(), b.clone()], &AverageOptions::default(), &options))
    };
    assert!(matches!(average(&b), Err(JobError::Disagreement { .. })));
    average(&quantized(0.5)).unwrap();

    let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let target = |name| Target::new(Arc::clone(&place), key(name));
    let report = block_on(to_safetensors(&a, &target("x.safetensors"), &options)).unwrap();
    assert_eq!((&*report.left_out, report.tensors), (&["q".into()][..], 1));
    block_on(to_torch_save(&a, &target("x.pt"), Default::default(), &options)).unwrap();
    let again = Source::torch_save(Arc::clone(&place), key("x.pt"));
    assert!(equal(&a, &again) && !equal(&b, &again));
}

/// What an optimizer leaves after a step, `{"state": {0: {"step": t}, 1: {"step": t}}, "empty":
/// {}, "views": [rows, columns]}`: integer keys, an empty dict, and two views of one storage.
fn optimizer(damaged: bool) -> (Source, Vec<u8>) {
    type Made = Result<(), ()>;
    let tensor = |writer: &mut Writer, storage: &str, len: u64, size: u64| -> Made {
        let storage = ("FloatStorage", storage, len);
        let (offset, sizes, strides) = (len - size, &[size], &[1]);
        Rebuilt { storage, offset, sizes, strides, scale: None }.write(writer)
    };
    let mut writer = Writer::new();
    let built = writer.dict(["state", "empty", "views"].into_iter(), |writer, name| -> Made {
        writer.constant(name);
        match name {
            "state" => writer.dict([0, 1].into_iter(), |writer, parameter| {
                writer.int(parameter);
                writer.dict(["step"].into_iter(), |writer, name| {
                    writer.constant(name);
                    tensor(writer, &parameter.to_string(), 1, 1)
                })
            }),
            "empty" => writer.dict([].into_iter(), |_, ()| Ok(())),
            _ => writer.list([1000, 600_000].into_iter(), |writer, size| {
                tensor(writer, "2", 600_000, size)
            }),
        }
    });
    built.unwrap();
    let large: Vec<u8> = (0..600_000_u32).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let steps = [1.0_f32.to_le_bytes(), 2.0_f32.to_le_bytes()];
    let source = file(writer, &[&steps[0], &steps[1], &large], |_| {});
    if damaged {
        let model = key("model.pt");
        let len = block_on(source.storage.stat(&model)).unwrap().byte_len;
        let mut bytes = block_on(source.storage.read_range(&model, 0..len)).unwrap().to_vec();
        bytes[1_500_000] ^= 1;
        block_on(source.storage.put(&model, bytes.into(), PutMode::Overwrite)).unwrap();
    }
    (source, large)
}

/// The texts of all integer and text keys of dicts, and the number of storages.
fn graph(source: &Source, name: &str) -> (Vec<String>, usize) {
    let len = block_on(source.storage.stat(&key(name))).unwrap().byte_len;
    let bytes = block_on(source.storage.read_range(&key(name), 0..len)).unwrap();
    let mut from = 0;
    if bytes.starts_with(b"PK") {
        from = bytes.windows(2).position(|window| window == [0x80, 2]).unwrap();
    } else {
        // Magic, version, and what PyTorch notes of the machine.
        for _ in 0..3 {
            from += Pickle::parse(&bytes[from..], &Limits::DEFAULT).unwrap().byte_len();
        }
    }
    let pickle = Pickle::parse(&bytes[from..], &Limits::DEFAULT).unwrap();
    let (mut keys, mut open) = (Vec::new(), vec![pickle.root()]);
    while let Some(Node::Dict(span)) = open.pop().map(|id| pickle.node(id)) {
        keys.push(format!("{}", span.len()));
        for (at, value) in pickle.entries(*span) {
            keys.push(match pickle.int(at) {
                Some(n) => format!("int {n}"),
                None => pickle.str(at).unwrap().to_owned(),
            });
            if matches!(pickle.node(value), Node::Dict(_)) {
                open.push(value);
            }
        }
    }
    let save = TorchSaveReader::new(Arc::clone(&source.storage), key(name));
    let records = block_on(save.records()).unwrap();
    (keys, records.iter().filter(|record| !record.tensors.is_empty()).count())
}

#[test]
fn a_file_in_another_form_keeps_its_objects() {
    let (source, large) = optimizer(false);
    let expected = graph(&source, "model.pt");
    assert!(expected.0.contains(&"int 1".to_owned()) && expected.0.contains(&"0".to_owned()));
    assert_eq!(expected.1, 3);
    for options in [small(), JobOptions::default()] {
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = |name| Target::new(Arc::clone(&place), key(name));
        let forms = [("old.pt", TorchSaveForm::Legacy), ("new.pt", TorchSaveForm::default())];
        for (name, form) in forms {
            let dry = options.clone().with_dry_run(true);
            let planned =
                block_on(to_torch_save(&source, &target(name), form.into(), &dry)).unwrap();
            let report =
                block_on(to_torch_save(&source, &target(name), form.into(), &options)).unwrap();
            assert_eq!((report.tensors, planned.bytes), (4, report.bytes));
            assert!(report.bytes < large.len() as u64 + 8192, "{}", report.bytes);
            let again = Source::torch_save(Arc::clone(&place), key(name));
            assert_eq!(graph(&again, name), expected, "{name}");
            let what = DiffOptions::default();
            assert!(block_on(diff(&source, &again, &what, &options)).unwrap().equal);
        }
        let old = Source::torch_save(Arc::clone(&place), key("old.pt"));
        let back = block_on(to_torch_save(&old, &target("b.pt"), Default::default(), &options));
        back.unwrap();
        let back = Source::torch_save(Arc::clone(&place), key("b.pt"));
        assert_eq!(graph(&back, "b.pt"), expected);
    }
    let source = optimizer(true).0;
    for form in [TorchSaveForm::Legacy, TorchSaveForm::default()] {
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&place), key("out.pt"));
        let error = block_on(to_torch_save(&source, &target, form.into(), &small())).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("CRC") && error.contains("views.0"), "{error}");
        assert!(error.contains("model.pt"), "{error}");
        assert!(block_on(place.stat(&key("out.pt"))).is_err());
    }
}

/// 1 MiB at most at once, so that tensors go through in segments.
fn small() -> JobOptions {
    JobOptions::default().with_max_memory(1)
}

#[test]
fn views_of_one_storage_are_no_damage() {
    let source = source(&[WHOLE, TURNED, ROWS, COLUMNS], false);
    let report = block_on(verify(&source, true, &small())).unwrap();
    assert_eq!(report.problems, []);
    assert!(report.ok && report.bytes_checked > 4 << 20);
}

/// One tensor of `mib` MiB of zeros, deflated as other programs may do.
fn deflated(mib: usize) -> Vec<u8> {
    let mut writer = Writer::new();
    writer
        .dict(["zeros"].into_iter(), |writer, name| {
            writer.constant(name);
            writer.global("torch._utils", "_rebuild_tensor_v2");
            writer.tuple(6, |writer| {
                let numel = (mib as u64) << 18;
                writer.storage(("torch", "FloatStorage"), "0", "cpu", numel);
                writer.uint(0);
                writer.uint_tuple(&[numel]);
                writer.uint_tuple(&[1]);
                writer.bool(false);
                writer.none();
                Ok::<(), ()>(())
            })?;
            writer.call();
            Ok::<(), ()>(())
        })
        .unwrap();
    let pickle = writer.finish().unwrap();
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..mib {
        encoder.write_all(&[0; 1 << 20]).unwrap();
    }
    let kept = encoder.finish().unwrap();
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, method, kept, len) in
        [("x/data.pkl", 0_u8, &pickle[..], pickle.len()), ("x/data/0", 8, &kept, mib << 20)]
    {
        let mut fields = vec![20, 0, 0, 0, method, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        fields.extend((kept.len() as u32).to_le_bytes());
        fields.extend((len as u32).to_le_bytes());
        fields.extend([name.len() as u8, 0, 0, 0]);
        directory.extend([b"PK\x01\x02\x14\0", &fields[..], &[0; 10]].concat());
        directory.extend((file.len() as u32).to_le_bytes());
        directory.extend(name.as_bytes());
        file.extend([b"PK\x03\x04", &fields[..], name.as_bytes(), kept].concat());
    }
    let start = file.len() as u32;
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0\x02\0\x02\0");
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0, 0]);
    file
}

#[test]
fn large_deflated_storages_are_converted_and_verified() {
    let storage = Arc::new(MemoryStorage::new());
    block_on(storage.put(&key("model.pt"), deflated(80).into(), PutMode::Create)).unwrap();
    let source = Source::torch_save(Arc::clone(&storage) as _, key("model.pt"));
    let report = block_on(verify(&source, true, &small())).unwrap();
    assert_eq!(report.problems, []);
    let target = Target::new(Arc::clone(&storage) as _, key("model.safetensors"));
    block_on(to_safetensors(&source, &target, &small())).unwrap();
    let written = block_on(storage.stat(&key("model.safetensors"))).unwrap();
    assert!(written.byte_len > 80 << 20);
}

#[test]
fn damage_is_told_once_with_all_that_it_hits() {
    let source = source(&[TURNED, WHOLE, COLUMNS], true);
    let report = block_on(verify(&source, true, &small())).unwrap();
    assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
    let problem = &report.problems[0];
    assert_eq!(problem.kind, ProblemKind::Corrupt);
    assert_eq!(
        (problem.key.as_deref(), problem.file.as_deref()),
        (Some("turned"), Some("model.pt"))
    );
    assert!(problem.message.contains("\"whole\", \"columns\" share it"), "{}", problem.message);
}

#[test]
fn damage_in_any_view_is_never_carried_over() {
    for options in [small(), JobOptions::default()] {
        for view in [WHOLE, TURNED, ROWS, COLUMNS] {
            let name = view.name;
            let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let target = Target::new(Arc::clone(&place), key("out.safetensors"));
            let done = block_on(to_safetensors(&source(&[view], true), &target, &options));
            let error = done.unwrap_err().to_string();
            assert!(error.contains("CRC") && error.contains(name), "{name}: {error}");
            assert!(error.contains("model.pt"), "{name}: {error}");
            assert!(block_on(place.stat(&key("out.safetensors"))).is_err(), "{name}");
        }
    }
    for view in [WHOLE, TURNED, ROWS, COLUMNS] {
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&place), key("out.safetensors"));
        block_on(to_safetensors(&source(&[view], false), &target, &small())).unwrap();
    }
}

/// As many quantized tensors, and plain views, of one storage of 1 MiB.
fn sharing(objects: usize, damaged: bool) -> Source {
    const LEN: u64 = 1 << 20;
    let names: Vec<String> = (0..objects).map(|n| format!("o{n}")).collect();
    let plain = Rebuilt {
        storage: ("CharStorage", "0", LEN),
        offset: 0,
        sizes: &[LEN - 8],
        strides: &[1],
        scale: None,
    };
    let object = Rebuilt { storage: ("QInt8Storage", "0", LEN), scale: Some(0.5), ..plain };
    let mut tensors: Vec<_> = names.iter().map(|name| (name.as_str(), object)).collect();
    tensors.extend([("v", plain), ("w", Rebuilt { offset: 8, ..plain })]);
    let bytes: Vec<u8> = (0..LEN).map(|n| (n % 251) as u8).collect();
    file(pickle(&tensors), &[&bytes], |file| {
        if damaged {
            file[file.len() / 2] ^= 1;
        }
    })
}

/// More of them than may be held one by one are written with their storage once, in both forms.
#[test]
fn what_is_chosen_of_a_file_keeps_its_shared_storages() {
    let options = JobOptions::default();
    let rename = Rename::parse("s/^o/p/").unwrap();
    let selection = Selection::all().with_exclude(KeyFilter::any_of(["o1"])).with_rename(rename);
    let written = |source: &Source, form, name| {
        let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&place), key(name));
        let view = block_on(selection.apply(source, &options)).unwrap();
        let report = block_on(to_torch_save(&view, &target, form, &options))?;
        let len = block_on(place.stat(&key(name))).unwrap().byte_len;
        Ok::<_, JobError>((Source::torch_save(place, key(name)), report, len))
    };
    for form in [TorchSaveForm::default(), TorchSaveForm::Legacy] {
        let source = sharing(400, false);
        let (copy, report, len) = written(&source, form.into(), "x.pt").unwrap();
        assert_eq!((report.objects, report.tensors), (399, 2));
        assert!(len < (1 << 20) + (256 << 10), "{len} bytes");
        assert_eq!(report.bytes, len);
        let TorchSaveForm::Zip(_) = form else { continue };
        let records = block_on(copy.extension::<TorchSaveReader>().unwrap().records()).unwrap();
        let large: Vec<_> = records.iter().filter(|one| one.record.byte_len >= 1 << 20).collect();
        assert_eq!(large.len(), 1);
        let mut what = DiffOptions::default();
        what.a = selection.clone();
        what.include = KeyFilter::any_of(["p0", "p399", "v", "w"]);
        assert!(block_on(diff(&source, &copy, &what, &options)).unwrap().equal);
        // Damage in the storage is not carried over.
        let error = written(&sharing(3, true), form.into(), "y.pt").unwrap_err().to_string();
        assert!(error.contains("CRC"), "{error}");
    }
    // A view of a small part of a storage does not bring all of it along.
    let only = Selection::all().with_include(KeyFilter::any_of(["rows"]));
    let view = block_on(only.apply(&source(&[ROWS, WHOLE], false), &options)).unwrap();
    let place: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let target = Target::new(Arc::clone(&place), key("z.pt"));
    block_on(to_torch_save(&view, &target, TorchSaveForm::default().into(), &options)).unwrap();
    let len = block_on(place.stat(&key("z.pt"))).unwrap().byte_len;
    assert!(len < 500 * SIDE * 4 + 4096, "{len}");
}
