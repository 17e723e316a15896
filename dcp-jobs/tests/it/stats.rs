//! Statistics of whole checkpoints: against NumPy, across shardings, and where a NaN is found.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{DType, Storage};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{SafetensorsItem, encode_header};
use dcp_jobs::reshard::reshard;
use dcp_jobs::stats::{Number, StatsReport, TensorStats, stats};
use dcp_jobs::{JobOptions, Selection, Source};
use dcp_planner::KeyFilter;
use dcp_testing::key;
use indexmap::IndexMap;
use proptest::prelude::*;

use crate::support::{block_on, fixture};

fn small() -> JobOptions {
    JobOptions::default().with_max_memory(1).with_parallelism(2)
}

fn of(source: &Source) -> StatsReport {
    block_on(stats(source, &Selection::all(), &JobOptions::default())).unwrap()
}

fn of_fixture(name: &str) -> StatsReport {
    of(&Source::dcp(fixture(name), false))
}

#[track_caller]
fn assert_numbers(tensor: &TensorStats, min: f64, max: f64, mean: f64, std: f64, zero: u64) {
    let numbers = &tensor.numbers;
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-14 * b.abs().max(1.0);
    assert_eq!(numbers.min.map(Number::as_f64), Some(min));
    assert_eq!(numbers.max.map(Number::as_f64), Some(max));
    assert!(close(numbers.mean.unwrap(), mean), "{numbers:?}");
    assert!(close(numbers.std.unwrap(), std), "{numbers:?}");
    assert_eq!((numbers.zero, numbers.non_finite()), (zero, 0));
    let in_bins: u64 = numbers.histogram.bins().map(|(_, n, p)| n + p).sum();
    assert_eq!(in_bins + zero, numbers.count);
}

// The expected numbers are NumPy 2's, in float64, of the fixtures' expected.safetensors.

#[test]
fn numpy_says_the_same_of_every_dtype() {
    let report = of_fixture("all_dtypes");
    let of = |name: &str| &report.tensors[name];
    assert_numbers(
        of("float64"),
        0.682_036_519_050_598_1,
        2.678_789_377_212_524_4,
        1.350_617_463_390_032_5,
        0.571_166_139_136_786_3,
        0,
    );
    assert_numbers(
        of("float32"),
        0.622_701_227_664_947_5,
        2.009_107_589_721_679_7,
        1.336_104_780_435_562_1,
        0.407_643_684_557_849_8,
        0,
    );
    assert_numbers(
        of("float16"),
        0.520_996_093_75,
        2.718_75,
        1.276_652_018_229_166_7,
        0.613_419_096_803_405_5,
        0,
    );
    assert_numbers(
        of("bfloat16"),
        0.507_812_5,
        1.585_937_5,
        0.977_864_583_333_333_4,
        0.382_025_569_430_613_8,
        0,
    );
    assert_numbers(
        of("float8_e4m3fn"),
        0.5625,
        3.25,
        1.447_916_666_666_666_7,
        0.814_034_341_856_793,
        0,
    );
    assert_numbers(
        of("float8_e4m3fnuz"),
        0.5,
        1.875,
        1.036_458_333_333_333_3,
        0.394_838_387_736_749_3,
        0,
    );
    assert_numbers(
        of("float8_e5m2"),
        0.625,
        3.5,
        1.635_416_666_666_666_7,
        0.817_227_167_350_398,
        0,
    );
    assert_numbers(of("float8_e5m2fnuz"), 0.625, 2.5, 1.156_25, 0.500_325_414_938_451_2, 0);
    assert_numbers(
        of("float8_e8m0fnu"),
        0.5,
        4.0,
        1.791_666_666_666_666_7,
        1.107_894_650_025_694,
        0,
    );
    for name in ["int8", "int16", "int32", "int64", "uint8"] {
        assert_numbers(of(name), 0.0, 127.0, 38.833_333_333_333_336, 53.377_325_606_374_18, 1);
    }
    for name in ["uint16", "uint32", "uint64"] {
        assert_numbers(of(name), 0.0, 65535.0, 17_590.166_666_666_668, 25_943.375_708_239_837, 1);
    }
    assert_numbers(of("bool"), 0.0, 1.0, 0.5, 0.5, 2);
    // As torch.view_as_real shows it.
    assert_numbers(
        of("complex64"),
        -1.055_531_859_397_888_2,
        0.498_786_151_409_149_17,
        -0.335_086_386_650_800_7,
        0.474_947_413_793_477_2,
        0,
    );
    assert_eq!(of("complex64").numbers.count, 6);
    assert_eq!(of("int64").numbers.max, Some(Number::Int(127)));
}

#[test]
fn shards_are_counted_once() {
    let report = of_fixture("fsdp2_adam_2r");
    let embed = &report.tensors["model.embed.weight"];
    let (min, max) = (-2.113_665_103_912_353_5, 3.411_490_917_205_810_5);
    assert_numbers(embed, min, max, 0.090_069_453_883_916_14, 1.055_395_607_949_914_7, 0);
    assert_eq!(embed.numbers.count, 80);
    assert_eq!(embed.numbers.abs_max, Some(Number::Float(max)));
    // Tensor-parallel and FSDP: cut along both axes.
    let report = of_fixture("tp_fsdp_2x2");
    let bias = &report.tensors["model.layers.0.weight"];
    let (min, max) = (-0.353_675_812_482_833_86, 0.334_665_000_438_690_2);
    assert_numbers(bias, min, max, -0.033_121_607_026_259_88, 0.207_072_349_602_993_17, 0);
}

#[test]
fn a_selection_is_all_that_is_read() {
    let source = Source::dcp(fixture("fsdp2_adam_2r"), false);
    let selection = Selection::all().with_include(KeyFilter::any_of(["model.norm"]));
    let report = block_on(stats(&source, &selection, &JobOptions::default())).unwrap();
    let names: Vec<_> = report.tensors.keys().map(|name| &**name).collect();
    assert_eq!(names, ["model.norm.weight", "model.norm.bias"]);
    assert_eq!(report.objects.count, 0);
}

#[test]
fn objects_are_looked_at() {
    let report = of_fixture("objects");
    let found: Vec<_> =
        report.objects.non_finite.iter().map(|bad| (&*bad.key, bad.value)).collect();
    assert!(found.contains(&("nan", "nan")), "{found:?}");
    assert!(found.contains(&("inf", "inf")), "{found:?}");
}

/// A source with one float32 tensor `x`.
async fn tensor(shape: &[u64], values: &[f32]) -> Source {
    let item = SafetensorsItem { name: "x".into(), dtype: DType::Float32, shape: shape.into() };
    let mut bytes = encode_header(&[item], &IndexMap::new()).unwrap().bytes.to_vec();
    bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    storage.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
    Source::safetensors(storage, key("in.safetensors"))
}

async fn sharded(source: &Source, ranks: u32) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    reshard(source, &DcpWriter::new(Arc::clone(&storage)), ranks, &small()).await.unwrap();
    storage
}

#[test]
fn a_nan_is_found_with_its_file_and_rank() {
    block_on(async {
        let mut values = vec![1.0_f32; 10 * 70 * 500];
        let at = |row: usize, column: usize, last: usize| (row * 70 + column) * 500 + last;
        values[at(7, 69, 499)] = f32::NAN;
        values[at(6, 3, 2)] = f32::NEG_INFINITY;
        values[at(9, 0, 0)] = f32::NAN;
        let source = tensor(&[10, 70, 500], &values).await;
        for options in [small(), JobOptions::default()] {
            // Five ranks have two rows each; a row is cut into pieces where memory is short.
            let source = Source::dcp(sharded(&source, 5).await, false);
            let report = stats(&source, &Selection::all(), &options).await.unwrap();
            let x = &report.tensors["x"];
            assert_eq!((x.numbers.nan, x.numbers.neg_inf), (2, 1));
            assert_eq!((x.numbers.mean, x.numbers.std), (Some(1.0), Some(0.0)));
            assert_eq!(x.first_non_finite.as_deref(), Some(&[6, 3, 2][..]));
            let chunks: Vec<_> = x
                .non_finite_chunks
                .iter()
                .map(|chunk| (chunk.rank, chunk.nan, chunk.inf, &*chunk.first, &*chunk.offsets))
                .collect();
            assert_eq!(
                chunks,
                [
                    (Some(3), 1, 1, &[6, 3, 2][..], &[6, 0, 0][..]),
                    (Some(4), 1, 0, &[9, 0, 0][..], &[8, 0, 0][..]),
                ]
            );
            assert_eq!(x.non_finite_chunks[0].file.as_deref(), Some("__3_0.distcp"));
        }
    });
}

#[test]
fn damage_is_an_error_and_no_statistic() {
    block_on(async {
        let values: Vec<f32> = (0..1024 * 1024).map(|n| n as f32).collect();
        let source = tensor(&[1024, 1024], &values).await;
        for ranks in [1, 3] {
            let storage = sharded(&source, ranks).await;
            let file = key("__0_0.distcp");
            let mut bytes = storage.read_all(&file).await.unwrap().to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
            storage.put(&file, bytes.into(), PutMode::Overwrite).await.unwrap();
            let source = Source::dcp(storage, false);
            for options in [small(), JobOptions::default()] {
                let error = stats(&source, &Selection::all(), &options).await.unwrap_err();
                let error = error.to_string();
                assert!(error.contains("CRC") && error.contains("\"x\""), "{error}");
                assert!(error.contains("__0_0.distcp"), "{error}");
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn the_sharding_makes_no_difference(
        shape in prop::collection::vec(0_u64..9, 0..4),
        seed in any::<u32>(),
        ranks in 1_u32..5,
    ) {
        let count = shape.iter().product::<u64>() as u32;
        let values: Vec<f32> = (0..count)
            .map(|n| match n.wrapping_mul(0x9e37_79b9) ^ seed {
                odd if odd % 97 == 0 => f32::NAN,
                odd if odd % 89 == 0 => f32::INFINITY,
                odd if odd % 5 == 0 => 0.0,
                other => (other as i32) as f32 / 3e6,
            })
            .collect();
        block_on(async {
            let source = tensor(&shape, &values).await;
            let whole = stats(&source, &Selection::all(), &JobOptions::default()).await.unwrap();
            let source = Source::dcp(sharded(&source, ranks).await, false);
            let parts = stats(&source, &Selection::all(), &small()).await.unwrap();
            let (a, b) = (&whole.tensors["x"], &parts.tensors["x"]);
            prop_assert_eq!(&a.first_non_finite, &b.first_non_finite);
            let first = values.iter().position(|x| !x.is_finite());
            prop_assert_eq!(a.first_non_finite.is_some(), first.is_some());
            let (mut a, mut b) = (a.numbers.clone(), b.numbers.clone());
            for (one, other) in [(&mut a.mean, &mut b.mean), (&mut a.std, &mut b.std)] {
                let (x, y) = (one.take(), other.take());
                let close = |x: f64, y: f64| (x - y).abs() <= 1e-12 * x.abs().max(1.0);
                prop_assert!(x.zip(y).is_none_or(|(x, y)| close(x, y)), "{x:?} {y:?}");
                prop_assert_eq!(x.is_some(), y.is_some());
            }
            prop_assert_eq!(a, b);
            Ok(())
        })?;
    }
}
