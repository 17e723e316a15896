//! Fixtures of PyTorch bit for bit, and any part of any weight against a plain computation.

use dcp_conformance::MemoryStorage;
use dcp_core::storage::PutMode;
use dcp_core::{Key, Payload, Storage};
use dcp_formats::hf::{HfLayout, HfPart, HfWriteOptions, write_folder};
use dcp_testing::block_on;
use proptest::prelude::*;

use crate::read::tensor_read::TensorReader;
use crate::write::stored_data_source::CheckpointData;

use super::*;

fn put(storage: &MemoryStorage, name: &str, bytes: Vec<u8>) {
    let key = Key::new(name).unwrap();
    block_on(storage.put(&key, Payload::from(bytes), PutMode::Overwrite)).unwrap();
}

fn fixture(name: &str, folder: &str) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new();
    let root = dcp_testing::fixture("hf").join(name).join(folder);
    for file in std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        if file.is_file() {
            let name = file.file_name().unwrap().to_str().unwrap();
            put(&storage, name, std::fs::read(&file).unwrap());
        }
    }
    Arc::new(storage)
}

/// All tensors of a source: name, dtype, shape, bytes.
fn everything(source: &Source) -> Vec<(String, DType, Vec<u64>, Vec<u8>)> {
    block_on(async {
        let metadata = source.metadata().await.unwrap();
        let mut all = Vec::new();
        for (index, (fqn, entry)) in metadata.iter().enumerate() {
            let tensor = entry.as_tensor().unwrap();
            let whole = Region::full(tensor.shape.clone()).unwrap();
            let bytes = read(source, &metadata, index, whole).await;
            all.push((fqn.to_string(), tensor.dtype, tensor.shape.to_vec(), bytes));
        }
        all.sort();
        all
    })
}

async fn read(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entry: usize,
    region: Region,
) -> Vec<u8> {
    let reader = Arc::clone(&source.reader);
    let reader = TensorReader::new(reader, Arc::clone(metadata), entry).unwrap();
    reader.read(&[region]).await.unwrap().to_vec()
}

fn dequantized(storage: Arc<MemoryStorage>, options: DequantizeOptions) -> Source {
    let source = Source::hf(storage, false);
    block_on(Dequantized::apply(&source, options, &JobOptions::default())).unwrap()
}

#[test]
fn eight_bit_weights_equal_pytorchs() {
    let options = DequantizeOptions::new(DType::Float32);
    let expected = fixture("quant_fp8_block", ".");
    let key = Key::new("expected.safetensors").unwrap();
    let expected = everything(&Source::safetensors(expected, key));
    let given = dequantized(fixture("quant_fp8_block", "ckpt"), options.with_block([4, 4]));
    assert_eq!(everything(&given), expected);

    // The model itself may say how large its blocks are.
    let storage = fixture("quant_fp8_block", "ckpt");
    let config = r#"{"quantization_config": {"weight_block_size": [4, 4]}}"#;
    put(&storage, "config.json", config.as_bytes().to_vec());
    assert_eq!(everything(&dequantized(storage, options)), expected);

    let source = Source::hf(fixture("quant_fp8_block", "ckpt"), false);
    let guessed = block_on(Dequantized::apply(&source, options, &JobOptions::default()));
    let error = guessed.unwrap_err().to_string();
    assert!(error.contains("give the size of the blocks"), "{error}");
    // Without the view everything is as it is stored.
    assert!(everything(&source).iter().any(|(fqn, ..)| fqn == "a.weight_scale_inv"));
}

/// PyTorch's own reader (2.15) fills the first quarter only.
#[test]
fn t10_mxfp4_weights_are_whole() {
    let key = Key::new("expected.safetensors").unwrap();
    let expected = everything(&Source::safetensors(fixture("quant_mxfp4", "."), key));
    let options = DequantizeOptions::new(DType::Float32);
    let found = everything(&dequantized(fixture("quant_mxfp4", "ckpt"), options));
    let [(fqn, dtype, shape, bytes)] = &*found else { panic!("{found:?}") };
    assert_eq!((fqn.as_str(), *dtype, &shape[..]), ("m.w", DType::Float32, &[2, 16, 3][..]));
    // The script that made the fixture keeps the order of the file's axes, transformers does not.
    let in_file_order: Vec<[u8; 4]> = expected[0].3.as_chunks().0.to_vec();
    assert_eq!(*bytes, exchanged(&in_file_order, 3, 16).concat());
    let options = DequantizeOptions::new(DType::BFloat16);
    let halves = everything(&dequantized(fixture("quant_mxfp4", "ckpt"), options));
    let upper: Vec<u8> = bytes.chunks_exact(4).flat_map(|f| [f[2], f[3]]).collect();
    assert_eq!(halves[0].3, upper);
}

#[test]
fn exponents_have_no_bounds_that_matter() {
    let floats = floats("s", DType::UInt8, &[0, 1, 127, 254, 255]).unwrap();
    assert_eq!(floats[..4], [2_f32.powi(-127), 2_f32.powi(-126), 1.0, 2_f32.powi(127)]);
    assert!(floats[4].is_nan());
}

/// Matrices of so many rows and columns, each with its rows as columns.
fn exchanged<T: Copy>(numbers: &[T], rows: usize, cols: usize) -> Vec<T> {
    let matrices = numbers.chunks_exact(rows * cols);
    matrices
        .flat_map(|matrix| {
            (0..cols).flat_map(move |col| (0..rows).map(move |row| matrix[row * cols + col]))
        })
        .collect()
}

/// A model of one weight, cut into parts of some rows.
fn model(parts: Vec<(HfPart, Vec<u8>)>) -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::new());
    let (parts, bytes): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let plan = HfLayout::default().plan(parts).unwrap();
    let source = Source::new(Arc::clone(&storage) as _, Arc::new(Given(Arc::default())));
    let encoded = bytes
        .into_iter()
        .map(|bytes| crate::write::stored_data_source::Part::Encoded(bytes.into()));
    let data = CheckpointData::new(
        &CheckedSource::new(&source, &JobOptions::default()),
        encoded.collect(),
        &JobOptions::default(),
    );
    let shared = Arc::clone(&storage) as Arc<dyn Storage>;
    let options = HfWriteOptions::default();
    block_on(write_folder(&shared, &plan, Arc::new(data), &options, None)).unwrap();
    storage
}

/// One stored weight with equal and with other scales.
#[test]
fn one_weight_with_other_scales_is_another_tensor() {
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&Key::new("data").unwrap()).unwrap();
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
    let mut tensor = |fqn: String, dtype, byte_offset, byte_len| {
        let mut tensor = TensorEntry::new(dtype, [1_u64, byte_len / dtype.size() as u64]);
        let placement = Some(Placement { file, encoding, byte_offset, byte_len });
        let sizes = tensor.shape.to_vec();
        tensor.chunks.push(&[0, 0], &sizes, placement).unwrap();
        metadata.insert(fqn, Entry::Tensor(tensor));
    };
    for (fqn, scales) in [("a", 100), ("b", 200), ("c", 100)] {
        tensor(format!("{fqn}.weight"), DType::Float8E4M3Fn, 0, 4);
        tensor(format!("{fqn}.weight_scale_inv"), DType::Float32, scales, 4);
    }
    let reader = Arc::new(Given(Arc::new(metadata)));
    let view = block_on(Dequantized::new(reader, DType::Float32, [4, 4])).unwrap();
    let shown = block_on(view.metadata()).unwrap();
    assert_eq!(shown.len(), 3);
    assert_eq!(crate::read::ties::ties(&shown), HashMap::from([(2, Arc::from("a.weight"))]));
}

#[derive(Debug)]
struct Given(Arc<CheckpointMetadata>);

#[async_trait]
impl StorageReader for Given {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.0))
    }

    async fn read(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: &LoadPlan,
        _: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        Ok(ReadReport::default())
    }
}

/// Rows of the first axis per rank.
fn in_rows(
    fqn: &str,
    dtype: DType,
    shape: &[u64],
    each: u64,
    bytes: &[u8],
) -> Vec<(HfPart, Vec<u8>)> {
    let row = bytes.len() / shape[0] as usize;
    let starts = (0..shape[0]).step_by(each as usize);
    starts
        .enumerate()
        .map(|(rank, start)| {
            let (mut sizes, mut offsets) = (shape.to_vec(), vec![0; shape.len()]);
            sizes[0] = each.min(shape[0] - start);
            offsets[0] = start;
            let held = start as usize * row..(start + sizes[0]) as usize * row;
            (HfPart::part_of(fqn, dtype, sizes, offsets, rank as u32), bytes[held].to_vec())
        })
        .collect()
}

fn some_bytes(count: u64, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..count).map(next).collect()
}

/// A box inside of `shape`; all of it without picks.
fn inside(shape: &[u64], picks: &[(u64, u64)]) -> Region {
    if picks.is_empty() {
        return Region::full(shape).unwrap();
    }
    let picks = picks.iter().cycle();
    let (offsets, sizes): (Vec<_>, Vec<_>) =
        shape.iter().zip(picks).map(|(n, (at, len))| (at % n, 1 + len % (n - at % n))).unzip();
    Region::new(offsets, sizes).unwrap()
}

fn check_part(source: &Source, fqn: &str, expected: &[f32], picks: &[(u64, u64)]) {
    block_on(async {
        let metadata = source.metadata().await.unwrap();
        let entry = metadata.index_of(fqn).unwrap();
        let shape = metadata.at(entry).unwrap().1.as_tensor().unwrap().shape.clone();
        let region = inside(&shape, picks);
        let expected: Vec<u8> = region
            .runs_in(&shape)
            .flat_map(|(at, n)| expected[at as usize..(at + n) as usize].to_vec())
            .flat_map(f32::to_le_bytes)
            .collect();
        assert_eq!(read(source, &metadata, entry, region).await, expected);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_part_of_an_eight_bit_weight(
        outer in prop::collection::vec(1_u64..3, 0..2),
        (height, width) in (1_u64..40, 1_u64..40),
        (rows, cols) in (1_u64..9, 1_u64..9),
        (each, scales_each) in (1_u64..20, 1_u64..20),
        seed: u64,
        picks in prop::collection::vec((0_u64..99, 0_u64..99), 1..4),
    ) {
        let shape: Vec<u64> = outer.iter().copied().chain([height, width]).collect();
        let (tall, wide) = (height.div_ceil(rows), width.div_ceil(cols));
        let scale_shape: Vec<u64> = outer.iter().copied().chain([tall, wide]).collect();
        let weights = some_bytes(shape.iter().product(), seed);
        let count = scale_shape.iter().product::<u64>();
        let scales: Vec<f32> = (0..count).map(|n| 0.37 + n as f32 * 1.25).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let e4m3 = DType::Float8E4M3Fn;
        let mut parts = in_rows("x.weight", e4m3, &shape, each, &weights);
        parts.extend(in_rows("x.weight_scale_inv", DType::Float32, &scale_shape, scales_each, &scale_bytes));
        let options = DequantizeOptions::new(DType::Float32).with_block([rows, cols]);
        let source = dequantized(model(parts), options);

        let numbers = floats("x", e4m3, &weights).unwrap();
        let expected: Vec<f32> = (0..).zip(&numbers).map(|(at, number): (u64, _)| {
            let (matrix, row, col) = (at / (height * width), at / width % height, at % width);
            number * scales[(matrix * tall * wide + row / rows * wide + col / cols) as usize]
        }).collect();
        // NaN compares by its bits here.
        check_part(&source, "x.weight", &expected, &picks);
        check_part(&source, "x.weight", &expected, &[]);
    }

    #[test]
    fn any_part_of_an_mxfp4_weight(
        outer in prop::collection::vec(1_u64..6, 0..3),
        (groups, block) in (1_u64..6, 1_u64..5),
        each in 1_u64..4,
        seed: u64,
        picks in prop::collection::vec((0_u64..99, 0_u64..99), 1..4),
    ) {
        let scale_shape: Vec<u64> = outer.iter().copied().chain([groups]).collect();
        let shape: Vec<u64> = scale_shape.iter().copied().chain([block]).collect();
        let bytes = some_bytes(shape.iter().product(), seed);
        let exponents: Vec<u8> =
            some_bytes(scale_shape.iter().product(), !seed).iter().map(|e| 100 + e % 50).collect();
        let mut parts = in_rows("w_blocks", DType::UInt8, &shape, each, &bytes);
        parts.extend(in_rows("w_scales", DType::UInt8, &scale_shape, each, &exponents));
        let source = dequantized(model(parts), DequantizeOptions::new(DType::Float32));
        let mut expected: Vec<f32> = bytes
            .iter()
            .enumerate()
            .flat_map(|(at, byte)| {
                let scale = 2_f32.powi(i32::from(exponents[at / block as usize]) - 127);
                [byte & 0xf, byte >> 4].map(|nibble| E2M1[usize::from(nibble)] * scale)
            })
            .collect();
        // With an axis of experts, as transformers has it.
        if let [_, rows] = &*outer {
            expected = exchanged(&expected, *rows as usize, (groups * block * 2) as usize);
        }
        check_part(&source, "w", &expected, &picks);
        check_part(&source, "w", &expected, &[]);
    }
}

/// More than one slab and more than one tile.
#[test]
fn large_weights_are_made_piece_by_piece() {
    let (height, width, cols) = (3_u64, 400_000_u64, 32_u64);
    let groups = width / cols;
    let bytes = some_bytes(height * width / 2, 7);
    let exponents: Vec<u8> = some_bytes(height * groups, 8).iter().map(|e| 110 + e % 30).collect();
    let parts = vec![
        (HfPart::whole("w_blocks", DType::UInt8, [height, groups, cols / 2]), bytes.clone()),
        (HfPart::whole("w_scales", DType::UInt8, [height, groups]), exponents.clone()),
    ];
    let source = dequantized(model(parts), DequantizeOptions::new(DType::Float32));
    let expected: Vec<f32> = bytes
        .iter()
        .enumerate()
        .flat_map(|(at, byte)| {
            let scale = 2_f32.powi(i32::from(exponents[at / 16]) - 127);
            [byte & 0xf, byte >> 4].map(|nibble| E2M1[usize::from(nibble)] * scale)
        })
        .collect();
    check_part(&source, "w", &expected, &[]);
    check_part(&source, "w", &expected, &[(1, 1), (262_100, 200)]);
}
