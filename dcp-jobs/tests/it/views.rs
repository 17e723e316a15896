//! Views over checkpoints, against the same thing done naively with everything in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{DType, Storage};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{Header, SafetensorsItem, TensorInfo, encode_header, header_len};
use dcp_jobs::cast::{CastCounts, CastOptions, Caster, is_float};
use dcp_jobs::convert::to_safetensors;
use dcp_jobs::element::{Element, decode};
use dcp_jobs::reshard::reshard;
use dcp_jobs::view::{AverageOptions, Averaged, Cast, Duplicates, Merged, NonFloat};
use dcp_jobs::write::Target;
use dcp_jobs::{JobError, JobOptions, Source};
use dcp_testing::{block_on, key};
use indexmap::IndexMap;
use proptest::prelude::*;

mod assembled;

type Tensors = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

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
        parse(&bytes)
    })
}

/// The tensors of a safetensors file.
fn parse(bytes: &[u8]) -> Tensors {
    let len = usize::try_from(header_len(bytes, bytes.len() as u64).unwrap()).unwrap();
    let (json, data) = bytes[8..].split_at(len);
    let header = Header::parse(json, data.len() as u64).unwrap();
    let tensor = |info: &TensorInfo| {
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        (info.dtype, info.shape.to_vec(), data[range].to_vec())
    };
    header.tensors().map(|(name, info)| (name.to_string(), tensor(info))).collect()
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

/// One element by the test's own arithmetic.
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let number = |bytes| match decode(dtype, bytes) {
        Some(Element::Float(x)) => x,
        other => panic!("{other:?}"),
    };
    bytes.chunks(dtype.size()).map(number).collect()
}

/// The mean of the same tensor of several checkpoints, element by element.
fn naive_mean(parts: &[&(DType, Vec<u64>, Vec<u8>)], weights: &[f64], to: DType) -> Vec<u8> {
    let wide = parts.iter().any(|(dtype, ..)| *dtype == DType::Float64);
    let all: Vec<_> = parts.iter().map(|(dtype, _, bytes)| numbers(*dtype, bytes)).collect();
    let total: f64 = weights.iter().sum();
    let terms = |at: usize| all.iter().map(move |x| x[at]).zip(weights);
    let count = all[0].len();
    if wide {
        let mean = |at| terms(at).map(|(x, w)| x * w).reduce(|a, b| a + b).unwrap() / total;
        let bytes: Vec<u8> = (0..count).flat_map(|at| mean(at).to_le_bytes()).collect();
        cast_bytes(DType::Float64, to, &bytes)
    } else {
        let term = |(x, w): (f64, &f64)| x as f32 * *w as f32;
        let mean = |at| terms(at).map(term).reduce(|a, b| a + b).unwrap() / total as f32;
        let bytes: Vec<u8> = (0..count).flat_map(|at| mean(at).to_le_bytes()).collect();
        cast_bytes(DType::Float32, to, &bytes)
    }
}

/// The same, but for the bits of NaN.
fn without_nan_bits(mut tensors: Tensors) -> Tensors {
    for (dtype, _, bytes) in tensors.values_mut().filter(|(dtype, ..)| is_float(*dtype)) {
        for element in bytes.chunks_mut(dtype.size()) {
            if matches!(decode(*dtype, element), Some(Element::Float(x)) if x.is_nan()) {
                element.fill(0xff);
            }
        }
    }
    tensors
}

/// Checkpoints with the same keys and shapes, of any dtypes, each as so many ranks save it.
fn alike() -> impl Strategy<Value = Vec<(Tensors, u32)>> {
    (tensors(), prop::collection::vec((prop::collection::vec(float_dtype(), 5), 1_u32..5), 1..4))
        .prop_map(|(first, others)| {
            let mut all = vec![(first.clone(), 2)];
            for (seed, (dtypes, ranks)) in others.into_iter().enumerate() {
                let changed = first.iter().zip(dtypes).map(|((fqn, (old, shape, bytes)), new)| {
                    let mut bytes = cast_bytes(*old, DType::Float32, bytes);
                    for (at, element) in bytes.chunks_mut(4).enumerate() {
                        let x = f32::from_le_bytes(element.try_into().unwrap());
                        let x = x * 1.25 + (at * (seed + 2)) as f32;
                        element.copy_from_slice(&x.to_le_bytes());
                    }
                    (fqn.clone(), (new, shape.clone(), cast_bytes(DType::Float32, new, &bytes)))
                });
                all.push((changed.collect(), ranks));
            }
            all
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn an_average_is_that_of_each_element(
        checkpoints in alike(),
        to in prop::option::of(float_dtype()),
        weights in prop::option::of(prop::collection::vec(1_u8..9, 4)),
    ) {
        let sources: Vec<_> = checkpoints.iter().map(|(t, ranks)| checkpoint(t, *ranks)).collect();
        let mut average = AverageOptions::default();
        let mut factors = vec![1.0; sources.len()];
        if let Some(weights) = weights {
            factors = weights[..sources.len()].iter().map(|w| f64::from(*w) / 8.0).collect();
            average = average.weights(factors.clone());
        }
        if let Some(to) = to {
            average = average.dtypes(move |_, _| Some(to));
        }
        let job = options();
        let (averaged, view) = block_on(Averaged::apply(&sources, &average, &job)).unwrap();
        let first = &checkpoints[0].0;
        let expected: Tensors = first
            .iter()
            .map(|(fqn, (dtype, shape, _))| {
                let parts: Vec<_> = checkpoints.iter().map(|(tensors, _)| &tensors[fqn]).collect();
                let to = to.unwrap_or(*dtype);
                (fqn.clone(), (to, shape.clone(), naive_mean(&parts, &factors, to)))
            })
            .collect();
        prop_assert_eq!(without_nan_bits(contents(&averaged)), without_nan_bits(expected));
        prop_assert_eq!(view.counts(), (first.len(), 0));
    }

    #[test]
    fn a_merge_has_everything_of_all(tensors in tensors(), parts in 1_usize..4) {
        let mut split = vec![Tensors::new(); parts];
        for (at, (fqn, tensor)) in tensors.iter().enumerate() {
            split[at % parts].insert(fqn.clone(), tensor.clone());
        }
        let sources: Vec<_> =
            split.iter().zip(1..).map(|(tensors, ranks)| checkpoint(tensors, ranks)).collect();
        let job = options();
        let merged = block_on(Merged::apply(&sources, Duplicates::Refuse, &job)).unwrap();
        prop_assert_eq!(contents(&merged), tensors.clone());
        // The same keys twice are refused, or taken once when they hold the same.
        let twice = [merged.clone(), checkpoint(&tensors, 3)];
        let identical = block_on(Merged::apply(&twice, Duplicates::Identical, &job)).unwrap();
        prop_assert_eq!(contents(&identical), tensors.clone());
        let error = block_on(Merged::apply(&twice, Duplicates::Refuse, &job)).unwrap_err();
        let JobError::Disagreement { problems, .. } = error else { panic!("{error}") };
        prop_assert_eq!(problems.len(), tensors.len());
    }
}

/// Larger than what a view holds at once, cut differently in each checkpoint.
#[test]
fn large_tensors_are_averaged_in_parts() {
    let tensor = |seed: u64| {
        let numbers = (0..1_500_000_u64).map(|n| ((n * seed) % 1000) as f32);
        (DType::Float32, vec![1000, 1500], numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    let tensors = [7, 11, 13].map(tensor);
    let sources: Vec<_> = tensors
        .iter()
        .zip([1, 3, 4])
        .map(|(tensor, ranks)| checkpoint(&Tensors::from([("w".into(), tensor.clone())]), ranks))
        .collect();
    let job = options();
    let average = AverageOptions::default();
    let (averaged, _) = block_on(Averaged::apply(&sources, &average, &job)).unwrap();
    let parts: Vec<_> = tensors.iter().collect();
    let expected = naive_mean(&parts, &[1.0; 3], DType::Float32);
    assert!(contents(&averaged)["w"].2 == expected);
}

fn integers(step: i64, mask: u8) -> Tensors {
    Tensors::from([
        ("mask".to_owned(), (DType::Bool, vec![2], vec![mask, 1])),
        ("step".to_owned(), (DType::Int64, vec![1], step.to_le_bytes().to_vec())),
        ("w".to_owned(), (DType::Float32, vec![1], (step as f32).to_le_bytes().to_vec())),
    ])
}

#[test]
fn what_has_no_mean_is_equal_or_chosen() {
    let job = options();
    let sources = [checkpoint(&integers(1, 0), 1), checkpoint(&integers(3, 1), 2)];
    let with = |non_float| {
        let average = AverageOptions::default().non_float(non_float);
        block_on(Averaged::apply(&sources, &average, &job))
    };
    let error = with(NonFloat::Equal).unwrap_err();
    let JobError::Disagreement { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 2, "{error}");
    assert!(error.to_string().contains("\"step\" of checkpoints 1 and 2"), "{error}");
    for (non_float, step, mask) in [(NonFloat::First, 1_i64, 0), (NonFloat::Last, 3, 1)] {
        let found = contents(&with(non_float).unwrap().0);
        assert_eq!(found["step"].2, step.to_le_bytes());
        assert_eq!(found["mask"].2, [mask, 1]);
        assert_eq!(found["w"].2, 2_f32.to_le_bytes());
    }
    let same = [checkpoint(&integers(5, 1), 1), checkpoint(&integers(5, 1), 2)];
    let average = AverageOptions::default();
    let (averaged, view) = block_on(Averaged::apply(&same, &average, &job)).unwrap();
    assert_eq!(contents(&averaged), integers(5, 1));
    assert_eq!(view.counts(), (1, 2));
}

#[test]
fn weights_of_any_size_are_proportions() {
    let numbers = |numbers: [f32; 2]| {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let tensors = Tensors::from([("w".to_owned(), (DType::Float32, vec![2], bytes))]);
        checkpoint(&tensors, 1)
    };
    let sources = [numbers([1.0, 3e30]), numbers([5.0, 1e30])];
    let average = |weights: [f64; 2]| {
        let average = AverageOptions::default().weights(weights.to_vec());
        let averaged = block_on(Averaged::apply(&sources, &average, &options()))?.0;
        let words = contents(&averaged)["w"].2.clone();
        let words = words.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
        Ok::<_, JobError>(words.collect::<Vec<_>>())
    };
    for size in [1e39, 1e-300, 1e-46, 1e30, 5e307] {
        assert_eq!(average([size, size]).unwrap(), [3.0, 2e30], "{size}");
        assert_eq!(average([size, 3.0 * size]).unwrap(), [4.0, 1.5e30], "{size}");
    }
    assert_eq!(average([f64::MAX, f64::MAX]).unwrap(), [3.0, 2e30]);
    for bad in [[0.0, 0.0], [1e39, -1e39], [f64::INFINITY, 1.0], [f64::NAN, 1.0]] {
        assert!(average(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_with_every_reason() {
    let tensor = |shape: &[u64]| {
        (DType::UInt8, shape.to_vec(), vec![1; shape.iter().product::<u64>() as usize])
    };
    let a = Tensors::from([("a".into(), tensor(&[2])), ("b".into(), tensor(&[3]))]);
    let b = Tensors::from([("a".into(), tensor(&[2, 1])), ("c".into(), tensor(&[3]))]);
    let sources = [checkpoint(&a, 1), checkpoint(&b, 1)];
    let job = options();
    let average = |options: AverageOptions| block_on(Averaged::apply(&sources, &options, &job));
    let error = average(AverageOptions::default()).unwrap_err().to_string();
    for part in [
        "\"a\" is uint8 [2] in checkpoint 1 and uint8 [2, 1] in checkpoint 2",
        "\"b\" is missing in checkpoint 2",
        "\"c\" of checkpoint 2",
    ] {
        assert!(error.contains(part), "{error}");
    }
    for weights in [vec![1.0], vec![1.0, -1.0], vec![f64::NAN, 1.0]] {
        let error = average(AverageOptions::default().weights(weights)).unwrap_err();
        assert!(matches!(error, JobError::InvalidOption { .. }), "{error}");
    }
    let error = average(AverageOptions::default().accumulate(DType::BFloat16)).unwrap_err();
    assert!(error.to_string().contains("bfloat16"), "{error}");
    let nothing = AverageOptions::default();
    assert!(block_on(Averaged::apply(&[], &nothing, &job)).is_err());
    assert!(block_on(Merged::apply(&[], Duplicates::Refuse, &job)).is_err());
    let error = block_on(Merged::apply(&sources, Duplicates::Identical, &job)).unwrap_err();
    assert!(error.to_string().contains("\"a\" is in checkpoints 1 and 2"), "{error}");
}

/// One damaged byte in any of the checkpoints is noticed, though no read takes its chunk whole.
#[test]
fn damage_is_never_averaged_merged_or_cast_away() {
    let bytes: Vec<u8> = (0..1_200_000_u32).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let tensors = |fqn: &str| {
        Tensors::from([(fqn.to_owned(), (DType::Float32, vec![1_200_000], bytes.clone()))])
    };
    let damaged = |fqn: &str| {
        let source = checkpoint(&tensors(fqn), 1);
        block_on(async {
            let data = key("__0_0.distcp");
            let mut bytes = source.storage.read_all(&data).await.unwrap().to_vec();
            bytes[3_000_000] ^= 4;
            source.storage.put(&data, bytes.into(), PutMode::Overwrite).await.unwrap();
        });
        Source::dcp(Arc::clone(&source.storage), false)
    };
    let job = options();
    let refused = |source: &Source| {
        let target = Target::new(Arc::new(MemoryStorage::new()), key("out.safetensors"));
        let error = block_on(to_safetensors(source, &target, &options())).unwrap_err();
        let error = dcp_core::error::error_chain(&error);
        assert!(error.contains("CRC-32"), "{error}");
    };
    let pair = [checkpoint(&tensors("w"), 2), damaged("w")];
    let average = AverageOptions::default();
    refused(&block_on(Averaged::apply(&pair, &average, &job)).unwrap().0);
    let pair = [checkpoint(&tensors("v"), 2), damaged("w")];
    refused(&block_on(Merged::apply(&pair, Duplicates::Refuse, &job)).unwrap());
    let rule = |_: &str, _| Some(DType::BFloat16);
    let cast = Cast::apply(&pair[1], rule, CastOptions::default(), &job);
    refused(&block_on(cast).unwrap().0);
}

#[test]
fn means_are_pytorchs_bit_for_bit() {
    let path = "../fixtures/pytorch/vectors/averages.safetensors";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let vectors = parse(&std::fs::read(path).unwrap());
    let job = options();
    for dtype in ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn"] {
        let sources: Vec<_> = ["a", "b", "c"]
            .iter()
            .map(|letter| vectors[&format!("{letter}.{dtype}")].clone())
            .map(|tensor| checkpoint(&Tensors::from([("w".to_owned(), tensor)]), 2))
            .collect();
        let plain = AverageOptions::default();
        let weighted = plain.clone().weights(vec![0.5, 0.3, 0.2]);
        let brain = plain.clone().dtypes(|_, _| Some(DType::BFloat16));
        for (name, average) in [("mean", plain), ("weighted", weighted), ("as_bfloat16", brain)] {
            let Some(expected) = vectors.get(&format!("{name}.{dtype}")) else { continue };
            let (averaged, _) = block_on(Averaged::apply(&sources, &average, &job)).unwrap();
            assert_eq!(&contents(&averaged)["w"], expected, "{name}.{dtype}");
        }
    }
}
