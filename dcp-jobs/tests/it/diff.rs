//! Differences of whole checkpoints: across formats and shardings, and exactly where they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{DType, Storage};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{SafetensorsItem, encode_header};
use dcp_jobs::diff::{Described, DiffOptions, DiffReport, DifferenceKind, diff};
use dcp_jobs::element::Tolerance;
use dcp_jobs::keys::{Rename, StatePart};
use dcp_jobs::reshard::reshard;
use dcp_jobs::view::{Duplicates, Merged};
use dcp_jobs::{JobOptions, Selection, Source};
use dcp_planner::KeyFilter;
use dcp_testing::key;
use indexmap::IndexMap;
use proptest::prelude::*;
use serde_json::json;

use crate::support::{block_on, fixture};

fn small() -> JobOptions {
    JobOptions::default().with_max_memory(1).with_parallelism(2)
}

fn compare(a: &Source, b: &Source, what: &DiffOptions) -> DiffReport {
    let report = block_on(diff(a, b, what, &JobOptions::default())).unwrap();
    let in_segments = block_on(diff(a, b, what, &small())).unwrap();
    assert_eq!(report, in_segments, "memory makes no difference");
    report
}

fn dcp(name: &str) -> Source {
    Source::dcp(fixture(name), false)
}

/// What the fixture holds, as the safetensors file that is kept beside it.
fn expected(name: &str) -> Source {
    let folder = dcp_testing::fixture("pytorch").join(name);
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    block_on(storage.put(&key("x"), bytes.into(), PutMode::Create)).unwrap();
    Source::safetensors(storage, key("x"))
}

type Tensors = BTreeMap<&'static str, (DType, Vec<u64>, Vec<u8>)>;

fn file(tensors: &Tensors) -> Source {
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, _))| SafetensorsItem {
            name: (*name).into(),
            dtype: *dtype,
            shape: shape.as_slice().into(),
        })
        .collect();
    let encoded = encode_header(&items, &IndexMap::new()).unwrap();
    let mut bytes = encoded.bytes.to_vec();
    for index in encoded.order {
        bytes.extend_from_slice(&tensors[&*items[index].name].2);
    }
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    block_on(storage.put(&key("x"), bytes.into(), PutMode::Create)).unwrap();
    Source::safetensors(storage, key("x"))
}

fn floats(shape: &[u64], values: &[f32]) -> (DType, Vec<u64>, Vec<u8>) {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    (DType::Float32, shape.to_vec(), bytes)
}

async fn sharded(source: &Source, ranks: u32) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    reshard(source, &DcpWriter::new(Arc::clone(&storage)), ranks, &small()).await.unwrap();
    storage
}

#[test]
fn a_checkpoint_equals_what_it_should_hold() {
    let only_tensors = |report: &DiffReport| {
        // The file has no objects, and nothing else is different.
        let is_object = |kind: &DifferenceKind| {
            matches!(kind, DifferenceKind::OnlyInA { a: Described::Object })
        };
        report.differences.iter().all(|difference| is_object(&difference.what))
    };
    for name in ["fsdp2_adam_2r", "tp_fsdp_2x2", "dtensor_uneven_4r", "views", "empty_zero"] {
        let report = compare(&dcp(name), &expected(name), &DiffOptions::default());
        assert!(only_tensors(&report), "{name}: {report:?}");
        assert!(report.compared.tensors > 0 && report.compared.bytes > 0, "{name}");
    }
}

#[test]
fn resharding_changes_nothing() {
    let source = dcp("fsdp2_adam_2r");
    for ranks in [1, 3, 4] {
        let other = Source::dcp(block_on(sharded(&source, ranks)), false);
        let report = compare(&source, &other, &DiffOptions::default());
        assert!(report.equal && report.differences.is_empty(), "{report:?}");
        assert_eq!((report.compared.tensors, report.compared.objects), (39, 17));
    }
}

#[test]
fn other_values_are_found_with_their_places() {
    let mut changed = vec![0.5_f32; 3 * 4 * 5];
    let a = file(&Tensors::from([("x", floats(&[3, 4, 5], &changed))]));
    changed[20 + 2 * 5 + 3] = 0.75;
    changed[2 * 20 + 4] = -1.5;
    changed[2 * 20 + 5] = f32::NAN;
    let b = file(&Tensors::from([("x", floats(&[3, 4, 5], &changed))]));
    let report = compare(&a, &b, &DiffOptions::default());
    let [found] = &*report.differences else { panic!("{report:?}") };
    let DifferenceKind::Values(values) = &found.what else { panic!("{found:?}") };
    assert_eq!((values.count, values.different, values.nan_mismatches), (60, 3, 1));
    assert_eq!((values.max_abs, values.max_rel), (2.0, 2.0 / 1.5));
    let first = values.first.as_ref().unwrap();
    assert_eq!((&*first.index, &first.a, &first.b), (&[1, 2, 3][..], &json!(0.5), &json!(0.75)));
    let largest = values.largest.as_ref().unwrap();
    assert_eq!((&*largest.index, &largest.b), (&[2, 0, 4][..], &json!(-1.5)));
    assert!(!report.equal);

    let mut what = DiffOptions::default();
    what.tolerance = Some(Tolerance { rtol: 0.0, atol: 0.25 });
    let report = compare(&a, &b, &what);
    let DifferenceKind::Values(values) = &report.differences[0].what else { panic!() };
    assert_eq!((values.different, values.max_abs), (2, 2.0));
}

fn big(flipped: Option<usize>) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..1024 * 700_u32)
        .flat_map(|n| (n.wrapping_mul(0x9e37_79b9) >> 3).to_le_bytes())
        .collect();
    if let Some(bit) = flipped {
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_flipped_bit_is_found_exactly_where_it_is(
        bit in 0_usize..1024 * 700 * 32,
        ranks in 1_u32..4,
    ) {
        let tensor = |bytes| Tensors::from([("x", (DType::Float32, vec![1024, 700], bytes))]);
        let a = file(&tensor(big(None)));
        let b = file(&tensor(big(Some(bit))));
        let b = Source::dcp(block_on(sharded(&b, ranks)), false);
        let report = compare(&a, &b, &DiffOptions::default());
        let DifferenceKind::Values(values) = &report.differences[0].what else { panic!() };
        let element = bit as u64 / 32;
        prop_assert_eq!(values.different, 1);
        prop_assert_eq!(&values.first.as_ref().unwrap().index, &[element / 700, element % 700]);
    }
}

#[test]
fn damage_is_an_error_that_names_the_chunk() {
    let whole = file(&Tensors::from([("x", (DType::Float32, vec![1024, 700], big(None)))]));
    block_on(async {
        let storage = sharded(&whole, 2).await;
        let name = key("__1_0.distcp");
        let mut bytes = storage.read_all(&name).await.unwrap().to_vec();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        storage.put(&name, bytes.into(), PutMode::Overwrite).await.unwrap();
        let damaged = Source::dcp(storage, false);
        for options in [small(), JobOptions::default()] {
            for (a, b) in [(&whole, &damaged), (&damaged, &whole)] {
                let error = diff(a, b, &DiffOptions::default(), &options).await.unwrap_err();
                let error = error.to_string();
                assert!(error.contains("\"x\"") && error.contains("__1_0.distcp"), "{error}");
            }
            // Keys alone touch no damaged byte.
            let mut keys = DiffOptions::default();
            keys.keys_only = true;
            assert!(diff(&whole, &damaged, &keys, &options).await.unwrap().equal);
        }
    });
}

#[test]
fn every_kind_of_difference_the_gravest_first() {
    let one = |values: &[f32]| floats(&[values.len() as u64], values);
    let a = file(&Tensors::from([
        ("same", one(&[1.0])),
        ("values", one(&[1.0, 2.0])),
        ("worse", one(&[1.0, 2.0])),
        ("shape", floats(&[2, 3], &[0.0; 6])),
        ("gone", one(&[1.0])),
        ("cast", one(&[1.0, -2.0])),
        ("complex", (DType::Complex64, vec![1], vec![0; 8])),
    ]));
    let b = file(&Tensors::from([
        ("same", one(&[1.0])),
        ("values", one(&[1.0, 2.5])),
        ("worse", one(&[9.0, 2.0])),
        ("shape", floats(&[3, 2], &[0.0; 6])),
        ("new", one(&[1.0])),
        ("cast", (DType::BFloat16, vec![2], vec![0x80, 0x3f, 0x00, 0xc0])),
        ("complex", floats(&[1], &[0.0])),
    ]));
    let report = compare(&a, &b, &DiffOptions::default());
    let found: Vec<_> = report
        .differences
        .iter()
        .map(|difference| {
            let what = serde_json::to_value(&difference.what).unwrap();
            (difference.key.to_string(), what["difference"].as_str().unwrap().to_owned())
        })
        .collect();
    let expected = [
        ("shape", "shape"),
        ("gone", "only_in_a"),
        ("new", "only_in_b"),
        ("worse", "values"),
        ("values", "values"),
        ("complex", "dtype"),
        ("cast", "dtype"),
    ];
    let expected: Vec<_> =
        expected.iter().map(|(k, w)| ((*k).to_owned(), (*w).to_owned())).collect();
    assert_eq!(found, expected);
    assert_eq!(report.compared.tensors, 6);
    assert_eq!(report.counts.values, 2);

    let mut what = DiffOptions::default();
    what.ignore_dtype = true;
    what.include = KeyFilter::any_of(["cast", "same"]);
    assert!(compare(&a, &b, &what).equal);
    what.include = KeyFilter::any_of(["complex"]);
    assert!(!compare(&a, &b, &what).equal, "what cannot be compared is never equal");
    what.include = KeyFilter::all();
    what.exclude = Some(KeyFilter::any_of(["*"]));
    let nothing = block_on(diff(&a, &b, &what, &small())).unwrap_err();
    assert!(nothing.to_string().contains("leaves nothing of both"), "{nothing}");
}

#[test]
fn dtypes_are_compared_by_value() {
    let a = file(&Tensors::from([("x", floats(&[2], &[1.0, 0.1]))]));
    // 0.1 as bfloat16 is 0.10009765625.
    let b = (DType::BFloat16, vec![2], vec![0x80, 0x3f, 0xcd, 0x3d]);
    let b = file(&Tensors::from([("x", b)]));
    let report = compare(&a, &b, &DiffOptions::default());
    let DifferenceKind::Values(values) = &report.differences[0].what else { panic!("{report:?}") };
    assert_eq!((values.different, values.dtype_b), (1, "bfloat16"));
    assert_eq!(values.max_abs, 0.100_097_656_25 - f64::from(0.1_f32));
    let mut what = DiffOptions::default();
    what.tolerance = Some(Tolerance { rtol: 1e-2, atol: 0.0 });
    assert_eq!(compare(&a, &b, &what).counts.dtype, 1);
    what.ignore_dtype = true;
    assert!(compare(&a, &b, &what).equal);
}

#[test]
fn keys_are_compared_under_other_names() {
    let tensor = floats(&[2], &[1.0, 2.0]);
    let a = file(&Tensors::from([("module.w", tensor.clone()), ("module.h.3.b", tensor.clone())]));
    let b = file(&Tensors::from([("w", tensor.clone()), ("layers.3.b", tensor)]));
    assert_eq!(compare(&a, &b, &DiffOptions::default()).differences.len(), 4);
    let mut what = DiffOptions::default();
    what.a = Selection::all()
        .with_rename(Rename::without_prefix("module.").unwrap())
        .with_rename(Rename::parse(r"s/^h\.(\d+)/layers.\1/").unwrap());
    assert!(compare(&a, &b, &what).equal);
    what.a = Selection::all().with_rename(Rename::parse("s/^module.w$/w/").unwrap());
    let report = compare(&a, &b, &what);
    assert_eq!((report.counts.only_in_a, report.counts.only_in_b), (1, 1));
    // A dot of a prefix is a dot.
    assert_eq!(&*Rename::without_prefix("a.").unwrap().apply("abc"), "abc");
}

#[test]
fn a_model_is_compared_without_its_training() {
    let mut what = DiffOptions::default();
    what.a = Selection::all().with_part(StatePart::Model);
    what.b = Selection::all().with_part(StatePart::Model);
    let report = compare(&dcp("fsdp2_adam_2r"), &dcp("tp_fsdp_2x2"), &what);
    assert!(report.counts.values > 0 && report.counts.only_in_a > 0, "{report:?}");
    assert!(report.differences.iter().all(|one| !one.key.starts_with("optimizer")));
    let embed = report.differences.iter().find(|one| &*one.key == "embed.weight").unwrap();
    assert_eq!(embed.key_a.as_deref(), Some("model.embed.weight"));
}

#[test]
fn objects_are_compared_too() {
    let report = compare(&dcp("objects"), &dcp("objects"), &DiffOptions::default());
    assert!(report.equal, "{report:?}");
    let report = compare(&dcp("t21_plain"), &dcp("t24_plain"), &DiffOptions::default());
    assert!(report.compared.objects > 0, "{report:?}");
}

/// The files of a quantized fixture, with another scale of its first tensor.
fn with_scale(scale: f64) -> Arc<dyn Storage> {
    let storage = fixture("quantized");
    let file = key("__0_0.distcp");
    let mut bytes = block_on(storage.read_all(&file)).unwrap().to_vec();
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|at| at == what);
    let number = |scale: f64| [&b"G"[..], &scale.to_be_bytes()].concat();
    let at = find(&bytes, &number(0.1)).unwrap();
    // The record with the pickle: from behind its header to the next one's.
    let header = bytes[..at].windows(4).rposition(|mark| mark == b"PK\x03\x04").unwrap();
    let len = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let start = header + 30 + len(header + 26) + len(header + 28);
    let end = at + find(&bytes[at..], b"PK").unwrap();
    let before = crc32fast::hash(&bytes[start..end]).to_le_bytes();
    bytes[at..at + 9].copy_from_slice(&number(scale));
    let after = crc32fast::hash(&bytes[start..end]).to_le_bytes();
    while let Some(at) = find(&bytes, &before).filter(|_| before != after) {
        bytes[at..at + 4].copy_from_slice(&after);
    }
    block_on(storage.put(&file, bytes.into(), PutMode::Overwrite)).unwrap();
    storage
}

#[test]
fn a_scale_is_compared() {
    let source = |scale| Source::dcp(with_scale(scale), false);
    let options = JobOptions::default();
    let what = DiffOptions::default();
    let (a, same, b) = (source(0.1), source(0.1), source(0.2));
    assert!(block_on(diff(&a, &same, &what, &options)).unwrap().equal);
    let report = block_on(diff(&a, &b, &what, &options)).unwrap();
    assert!(!report.equal);
    let [difference] = &*report.differences else { panic!("{report:?}") };
    let DifferenceKind::Object { a: first, b: second, .. } = &difference.what else {
        panic!("{report:?}")
    };
    assert_eq!((first, second), (&json!(0.1), &json!(0.2)));
    // What differs in a scale alone is not the same in both.
    let merge = |other: &Source| {
        let both = [a.clone(), other.clone()];
        block_on(Merged::apply(&both, Duplicates::Identical, &options)).map(drop)
    };
    merge(&same).unwrap();
    let error = merge(&b).unwrap_err().to_string();
    assert!(error.contains("elements, scales or zero points differ"), "{error}");
}
