//! Views over checkpoints, against the same thing done naively with everything in memory.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_convert::view::Cast;
use dcp_convert::{
    CastCounts, CastOptions, Caster, JobOptions, Source, Target, is_float, reshard, to_safetensors,
};
use dcp_core::{DType, Key, PutMode, Storage, StorageExt};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{Header, SafetensorsItem, encode_header, header_len};
use indexmap::IndexMap;
use proptest::prelude::*;

type Tensors = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn options() -> JobOptions {
    JobOptions::default().with_max_memory(1 << 20)
}

/// A checkpoint in PyTorch's format with `tensors`, as `ranks` ranks save it.
fn checkpoint(tensors: &Tensors, ranks: u32) -> Source {
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, _))| SafetensorsItem {
            name: name.as_str().into(),
            dtype: *dtype,
            shape: shape.as_slice().into(),
        })
        .collect();
    let encoded = encode_header(&items, &IndexMap::new()).unwrap();
    let mut bytes = encoded.bytes.to_vec();
    for index in encoded.order {
        bytes.extend_from_slice(&tensors[&*items[index].name].2);
    }
    block_on(async {
        let file: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        file.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
        let source = Source::safetensors(file, key("in.safetensors"));
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::builder(Arc::clone(&storage)).build();
        reshard(&source, &writer, ranks, &options()).await.unwrap();
        Source::dcp(storage, false)
    })
}

/// Everything that a source has, read in segments.
fn contents(source: &Source) -> Tensors {
    block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&storage), key("out.safetensors"));
        to_safetensors(source, &target, &options()).await.unwrap();
        let bytes = storage.read_all(&key("out.safetensors")).await.unwrap();
        let len = usize::try_from(header_len(&bytes, bytes.len() as u64).unwrap()).unwrap();
        let (json, data) = bytes[8..].split_at(len);
        let header = Header::parse(json, data.len() as u64).unwrap();
        let tensor = |info: &dcp_formats::safetensors::TensorInfo| {
            let range = info.byte_range.start as usize..info.byte_range.end as usize;
            (info.dtype, info.shape.to_vec(), data[range].to_vec())
        };
        header.tensors().map(|(name, info)| (name.to_string(), tensor(info))).collect()
    })
}

fn cast_bytes(from: DType, to: DType, bytes: &[u8]) -> Vec<u8> {
    let caster = Caster::new("", from, to, CastOptions::default()).unwrap();
    let mut out = vec![0; bytes.len() / from.size() * to.size()];
    caster.cast(bytes, &mut out, &mut CastCounts::default());
    out
}

/// Numbers that are exact in bfloat16 or nearly so, of any sign, and some special ones.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => (-1000_i16..1000).prop_map(|n| f32::from(n) / 7.0),
        1 => any::<f32>(),
        1 => prop::sample::select(vec![0.0, -0.0, f32::INFINITY, f32::NAN, 1e30, -1e30, 1e-30]),
    ]
}

fn float_dtype() -> impl Strategy<Value = DType> {
    let dtypes = vec![
        DType::Float32,
        DType::BFloat16,
        DType::Float16,
        DType::Float64,
        DType::Float8E4M3Fn,
        DType::Float8E5M2,
    ];
    prop::sample::select(dtypes)
}

/// A float tensor of up to a few thousand elements.
fn tensor() -> impl Strategy<Value = (DType, Vec<u64>, Vec<u8>)> {
    let shape = prop::collection::vec(0_u64..9, 0..4);
    (float_dtype(), shape, prop::collection::vec(number(), 1..40)).prop_map(
        |(dtype, shape, numbers)| {
            let volume: u64 = shape.iter().product();
            let elements = numbers.iter().cycle().take(volume as usize);
            let bytes: Vec<u8> = elements.flat_map(|x| x.to_le_bytes()).collect();
            (dtype, shape, cast_bytes(DType::Float32, dtype, &bytes))
        },
    )
}

fn tensors() -> impl Strategy<Value = Tensors> {
    prop::collection::btree_map("[a-c]{1,2}", tensor(), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_cast_checkpoint_is_each_tensor_cast(
        tensors in tensors(),
        ranks in 1_u32..5,
        to in float_dtype(),
    ) {
        let source = checkpoint(&tensors, ranks);
        // Keys with a `b` in them stay as they are.
        let rule = |fqn: &str, dtype| (is_float(dtype) && !fqn.contains('b')).then_some(to);
        let job = options();
    let cast = Cast::apply(&source, rule, CastOptions::default(), &job);
        let (cast, view) = block_on(cast).unwrap();
        let expected: Tensors = tensors
            .iter()
            .map(|(fqn, (dtype, shape, bytes))| {
                let new = if fqn.contains('b') { *dtype } else { to };
                (fqn.clone(), (new, shape.clone(), cast_bytes(*dtype, new, bytes)))
            })
            .collect();
        prop_assert_eq!(contents(&cast), expected);
        let report = view.report();
        let changed = tensors.iter().filter(|(fqn, (dtype, ..))| !fqn.contains('b') && *dtype != to);
        for (fqn, (dtype, shape, _)) in changed.clone() {
            let found = &report.tensors[fqn.as_str()];
            prop_assert_eq!((found.from, found.to), (dtype.name(), to.name()));
            prop_assert_eq!(found.counts.elements, shape.iter().product::<u64>());
        }
        prop_assert_eq!(report.tensors.len(), changed.count());
    }
}

/// Larger than what a view holds at once, and with one odd value at the very end.
#[test]
fn large_tensors_are_cast_in_parts() {
    let numbers = (0..3 << 20).map(|n| (n % 200) as f32).chain([1e39_f64 as f32, 1e30, 1e-30]);
    let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
    let expected = cast_bytes(DType::Float32, DType::Float16, &bytes);
    let shape = vec![(3 << 20) + 3];
    let tensors = Tensors::from([("w".to_owned(), (DType::Float32, shape.clone(), bytes))]);
    let source = checkpoint(&tensors, 2);
    let rule = |_: &str, _| Some(DType::Float16);
    let job = options();
    let cast = Cast::apply(&source, rule, CastOptions::default(), &job);
    let (cast, view) = block_on(cast).unwrap();
    assert_eq!(contents(&cast)["w"], (DType::Float16, shape, expected));
    let counts = view.report().total();
    let found = (counts.elements, counts.out_of_range, counts.underflowed, counts.inexact);
    assert_eq!(found, ((3 << 20) + 3, 1, 1, 2));
    assert_eq!(view.report().lost_range().count(), 1);
}

#[test]
fn what_cannot_be_cast_is_named() {
    let tensors = Tensors::from([
        ("step".to_owned(), (DType::Int64, vec![1], vec![1; 8])),
        ("z".to_owned(), (DType::Complex64, vec![1], vec![1; 8])),
    ]);
    let source = checkpoint(&tensors, 1);
    let rule = |_: &str, dtype| (dtype == DType::Complex64).then_some(DType::Float32);
    let job = options();
    let cast = Cast::apply(&source, rule, CastOptions::default(), &job);
    let error = block_on(cast).unwrap_err().to_string();
    assert!(error.contains("\"z\"") && error.contains("complex64"), "{error}");
}
