//! Finds the block-scaled weights of a model.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::metadata::TensorEntry;
use dcp_core::{CheckpointMetadata, DType, Dims, FormatError, Region};
use serde::Deserialize;

use super::sidecar_files::CONFIG_NAME;

/// The default block of a scale, in rows and columns, as in DeepSeek's models and PyTorch's reader
/// (2.15).
pub const BLOCK: [u64; 2] = [128, 128];

/// The suffix of the scales of an fp8 weight.
const SCALE_INV: &str = "_scale_inv";
/// The suffixes of the two tensors of an MXFP4 weight.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
/// The maximum size of an MXFP4 block in bytes; OCP's have 16. A block is read whole for each of
/// its parts, so large blocks would be read many times.
const BLOCK_BYTES_MAX: u64 = 1 << 12;

/// A block-scaled weight.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantized {
    /// The FQN of the dequantized weight. For MXFP4 without the suffix `_blocks`, as in the
    /// original model and in transformers; PyTorch's reader (2.15) keeps the suffix.
    pub fqn: Arc<str>,
    /// The shape of the dequantized weight.
    pub shape: Dims,
    /// The position of the stored weight in the metadata.
    pub weight: usize,
    /// The position of its scales.
    pub scales: usize,
    /// The quantization scheme.
    pub scheme: QuantScheme,
}

/// The combination of weights and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantScheme {
    /// 8-bit floats `X.weight`, with one scale per `rows` × `cols` block of the last two axes in
    /// `X.weight_scale_inv`. The last blocks may be partial. A single scale, of shape `[]` or `[1]`,
    /// is that of the whole weight.
    Block {
        /// Rows of a block.
        rows: u64,
        /// Columns of a block.
        cols: u64,
    },
    /// OCP MXFP4. `X_blocks` of shape `[…, G, B]` stores two E2M1 values per byte, the first in the
    /// low half. `X_scales` of shape `[…, G]` stores exponents (E8M0). The weight has shape `[…, G
    /// * B * 2]`.
    Mxfp4 {
        /// Bytes of a block.
        block_bytes: u64,
        /// Whether the dequantized weight has its last two axes exchanged: `[E, R, G, B]` becomes
        /// `[E, G * B * 2, R]`. transformers (5.23) does so, because its expert modules put the
        /// input axis first; PyTorch's reader (2.15) keeps the order of the file. A weight without
        /// an expert axis keeps its order here too.
        transposed: bool,
    },
}

/// A reason why the block-scaled weights of a model are not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The shape of scales is that of blocks of another size.
    #[error(transparent)]
    BlockSize(FormatError),
    /// Weights and scales do not match, whatever the size of blocks.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl From<QuantError> for FormatError {
    fn from(error: QuantError) -> Self {
        match error {
            QuantError::BlockSize(error) | QuantError::Format(error) => error,
        }
    }
}

/// The block-scaled weights of a model: all weights that have scales. `block` is the block size of
/// 8-bit weights.
///
/// # Errors
///
/// When weights and scales do not match, a name is taken, or `block` contains 0;
/// [`QuantError::BlockSize`] when another size of blocks may match.
pub fn find_quantized(
    metadata: &CheckpointMetadata,
    block: [u64; 2],
) -> Result<Vec<Quantized>, QuantError> {
    let mut found = Vec::new();
    for (position, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(scales) = entry.as_tensor() else { continue };
        let pair = |ending: &str, other: &str| {
            let name = fqn.strip_suffix(ending)?;
            let weight = metadata.index_of(&format!("{name}{other}"))?;
            Some((name, weight, metadata.at(weight)?.1.as_tensor()?))
        };
        let one = if let Some((name, weight, tensor)) = pair(SCALE_INV, "") {
            block_scaled(fqn, tensor, scales, block).map(|scheme| Quantized {
                fqn: name.into(),
                shape: tensor.shape.clone(),
                weight,
                scales: position,
                scheme,
            })
        } else if let Some((name, weight, tensor)) = pair(SCALES, BLOCKS) {
            if metadata.get(name).is_some() {
                return Err(bad(fqn, "its weight as plain numbers has a name that is taken").into());
            }
            mxfp4(tensor, scales).map_err(|problem| bad(fqn, &problem).into()).map(
                |(shape, scheme)| Quantized {
                    fqn: name.into(),
                    shape,
                    weight,
                    scales: position,
                    scheme,
                },
            )
        } else {
            continue;
        };
        found.push(one?);
    }
    let weights: BTreeSet<_> = found.iter().map(|one| one.weight).collect();
    if weights.len() < found.len() || found.iter().any(|one| weights.contains(&one.scales)) {
        return Err(bad("the model", "a tensor is weight or scales of two others").into());
    }
    Ok(found)
}

fn bad(fqn: &str, problem: &str) -> FormatError {
    FormatError::new("quantized weight", format!("{fqn:?}: {problem}"))
}

fn block_scaled(
    fqn: &str,
    weight: &TensorEntry,
    scales: &TensorEntry,
    [rows, cols]: [u64; 2],
) -> Result<QuantScheme, QuantError> {
    let misfit = |problem: String| Err(bad(fqn, &problem).into());
    if rows == 0 || cols == 0 {
        return misfit(format!("blocks of {rows} × {cols} hold nothing"));
    }
    if !matches!(
        weight.dtype,
        DType::Float8E4M3Fn | DType::Float8E5M2 | DType::Float8E4M3FnUz | DType::Float8E5M2FnUz
    ) {
        return misfit(format!("its weight is {}, not an 8-bit float", weight.dtype));
    }
    if !matches!(
        scales.dtype,
        DType::Float32 | DType::BFloat16 | DType::Float16 | DType::Float8E8M0Fnu
    ) {
        return misfit(format!("scales are floats, not {}", scales.dtype));
    }
    let [outer @ .., height, width] = &*weight.shape else {
        return misfit(format!("blocks have two axes, its weight has shape {}", weight.shape));
    };
    // One scale for all of a weight.
    if outer.is_empty() && matches!(&*scales.shape, [] | [1]) {
        return Ok(QuantScheme::Block { rows: (*height).max(1), cols: (*width).max(1) });
    }
    let blocks = [height.div_ceil(rows), width.div_ceil(cols)];
    let expected: Dims = outer.iter().copied().chain(blocks).collect();
    if scales.shape != expected {
        let problem = format!(
            "it has shape {}, but for blocks of {rows} × {cols} a weight of shape {} has scales \
             of {expected}: give the size of the blocks",
            scales.shape, weight.shape
        );
        return Err(QuantError::BlockSize(bad(fqn, &problem)));
    }
    Ok(QuantScheme::Block { rows, cols })
}

fn mxfp4(blocks: &TensorEntry, scales: &TensorEntry) -> Result<(Dims, QuantScheme), String> {
    if blocks.dtype != DType::UInt8 {
        return Err(format!("its blocks are {}, not bytes", blocks.dtype));
    }
    if !matches!(scales.dtype, DType::UInt8 | DType::Float8E8M0Fnu) {
        return Err(format!("exponents are bytes, not {}", scales.dtype));
    }
    let [outer @ .., groups, block_bytes] = &*blocks.shape else {
        return Err(format!("its blocks have shape {}", blocks.shape));
    };
    let (groups, block_bytes) = (*groups, *block_bytes);
    let expected: Dims = outer.iter().copied().chain([groups]).collect();
    if scales.shape != expected || block_bytes == 0 {
        let (found, blocks) = (&scales.shape, &blocks.shape);
        return Err(format!("its shape is {found}, that of its blocks {blocks}"));
    }
    if block_bytes > BLOCK_BYTES_MAX {
        return Err(format!("its blocks have {block_bytes} bytes, those of MXFP4 have 16"));
    }
    let width = block_bytes.checked_mul(2).and_then(|values| values.checked_mul(groups));
    let width = width.ok_or("it has an axis beyond 2^64")?;
    let transposed = outer.len() == 2;
    let shape: Dims = match outer {
        [experts, rows] => [*experts, width, *rows].into(),
        outer => outer.iter().copied().chain([width]).collect(),
    };
    Region::full(shape.clone()).map_err(|error| error.to_string())?;
    // A block is a part of the axis, so it cannot be partial.
    let whole = blocks
        .chunks
        .iter()
        .all(|chunk| (chunk.offsets.last(), chunk.sizes.last()) == (Some(&0), Some(&block_bytes)));
    if !whole {
        return Err("its blocks are cut into parts".to_owned());
    }
    Ok((shape, QuantScheme::Mxfp4 { block_bytes, transposed }))
}

/// The block size of 8-bit weights in a model's `config.json`:
/// `quantization_config.weight_block_size`; `None` if absent.
///
/// # Errors
///
/// When it is not JSON, or the value is not a pair of numbers.
pub fn configured_block(config: &[u8]) -> Result<Option<[u64; 2]>, FormatError> {
    #[derive(Deserialize)]
    #[serde(expecting = "a JSON object")]
    struct Config {
        quantization_config: Option<Quantization>,
    }
    #[derive(Deserialize)]
    #[serde(expecting = "a JSON object")]
    struct Quantization {
        weight_block_size: Option<[u64; 2]>,
    }
    let config: Config = serde_json::from_slice(config).map_err(bad_config)?;
    Ok(config.quantization_config.and_then(|config| config.weight_block_size))
}

/// The quantization method in a model's `config.json`, with its format where it has one:
/// `compressed-tensors (nvfp4-pack-quantized)`.
#[must_use]
pub fn configured_method(config: &[u8]) -> Option<String> {
    let config: serde_json::Value = serde_json::from_slice(config).ok()?;
    let quantization = config.get("quantization_config")?;
    let text = |name| quantization.get(name).and_then(serde_json::Value::as_str);
    let method = text("quant_method")?;
    Some(match text("format").or(text("quant_algo")) {
        Some(format) => format!("{method} ({format})"),
        None => method.to_owned(),
    })
}

fn bad_config(error: serde_json::Error) -> FormatError {
    FormatError::new("model configuration", error.to_string()).in_file(CONFIG_NAME, 0)
}

/// A model's `config.json` for its dequantized form: without a `quantization_config` for fp8 or
/// MXFP4, which makes transformers search for scales. `None` if there is nothing to remove.
///
/// # Errors
///
/// When it is not a JSON object.
pub fn config_without_quantization(config: &[u8]) -> Result<Option<Vec<u8>>, FormatError> {
    let mut config: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(config).map_err(bad_config)?;
    let method = config.get("quantization_config").and_then(|config| config.get("quant_method"));
    if !method.and_then(|method| method.as_str()).is_some_and(|m| matches!(m, "fp8" | "mxfp4")) {
        return Ok(None);
    }
    config.shift_remove("quantization_config");
    let mut text = format!("{:#}", serde_json::Value::Object(config)).into_bytes();
    text.push(b'\n');
    Ok(Some(text))
}

/// A model's `config.json` with `dtype` wherever it names a dtype of weights, in the configurations of
/// its parts too. `None` if there is nothing to change.
///
/// # Errors
///
/// When it is not a JSON object.
pub fn config_with_dtype(config: &[u8], dtype: DType) -> Result<Option<Vec<u8>>, FormatError> {
    fn change(config: &mut serde_json::Map<String, serde_json::Value>, dtype: &str) -> bool {
        let mut changed = false;
        for (name, value) in config {
            match value {
                serde_json::Value::String(text)
                    if ["torch_dtype", "dtype"].contains(&&**name) && text != dtype =>
                {
                    *text = dtype.to_owned();
                    changed = true;
                }
                serde_json::Value::Object(part) if name != "quantization_config" => {
                    changed |= change(part, dtype);
                }
                _ => {}
            }
        }
        changed
    }
    let mut config: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(config).map_err(bad_config)?;
    if !change(&mut config, dtype.name()) {
        return Ok(None);
    }
    let mut text = format!("{:#}", serde_json::Value::Object(config)).into_bytes();
    text.push(b'\n');
    Ok(Some(text))
}

/// Whether a tensor contains scales, judged by its name.
#[must_use]
pub fn names_scales(fqn: &str) -> bool {
    fqn.ends_with(SCALE_INV) || fqn.ends_with(SCALES)
}

/// The value of each nibble.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

#[cfg(test)]
mod tests {
    use dcp_core::metadata::Entry;

    use super::*;

    fn model(tensors: &[(&str, DType, &[u64])]) -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for (fqn, dtype, shape) in tensors {
            let mut tensor = TensorEntry::new(*dtype, *shape);
            tensor.chunks.push(&vec![0; shape.len()], shape, None).unwrap();
            metadata.insert(*fqn, Entry::Tensor(tensor));
        }
        metadata
    }

    const E4M3: DType = DType::Float8E4M3Fn;

    #[test]
    fn weights_find_their_scales() {
        let metadata = model(&[
            ("a.weight_scale_inv", DType::Float32, &[2, 3]),
            ("a.weight", E4M3, &[130, 300]),
            ("norm", DType::Float32, &[3]),
            ("experts.w_blocks", DType::UInt8, &[2, 5, 3, 16]),
            ("experts.w_scales", DType::UInt8, &[2, 5, 3]),
            ("lonely.weight_scale_inv", DType::Float32, &[1, 1]),
            ("lonely_scales", DType::UInt8, &[1]),
        ]);
        let found = find_quantized(&metadata, BLOCK).unwrap();
        let names: Vec<_> = found.iter().map(|one| (&*one.fqn, one.weight, one.scales)).collect();
        assert_eq!(names, [("a.weight", 1, 0), ("experts.w", 3, 4)]);
        assert_eq!(found[0].scheme, QuantScheme::Block { rows: 128, cols: 128 });
        assert_eq!((&*found[1].shape, &*found[0].shape), (&[2, 96, 5][..], &[130, 300][..]));
        for shape in [&[][..], &[1]] {
            let metadata =
                model(&[("w", E4M3, &[130, 300]), ("w_scale_inv", DType::Float32, shape)]);
            let found = find_quantized(&metadata, BLOCK).unwrap();
            assert_eq!(found[0].scheme, QuantScheme::Block { rows: 130, cols: 300 });
        }
    }

    #[test]
    fn configurations_name_the_dtype_of_the_weights() {
        let config = br#"{"torch_dtype":"float32","text_config":{"dtype":"float32"},
            "quantization_config":{"dtype":"float32"},"other_dtype":"float32"}"#;
        let changed = config_with_dtype(config, DType::BFloat16).unwrap().unwrap();
        let changed: serde_json::Value = serde_json::from_slice(&changed).unwrap();
        assert_eq!(changed["torch_dtype"], "bfloat16");
        assert_eq!(changed["text_config"]["dtype"], "bfloat16");
        assert_eq!(changed["quantization_config"]["dtype"], "float32");
        assert_eq!(changed["other_dtype"], "float32");
        assert_eq!(config_with_dtype(b"{}", DType::BFloat16).unwrap(), None);
        assert!(config_with_dtype(b"[]", DType::BFloat16).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let fp8 = |weight: (DType, &[u64]), scales: (DType, &[u64]), block| {
            let metadata = model(&[("w", weight.0, weight.1), ("w_scale_inv", scales.0, scales.1)]);
            find_quantized(&metadata, block).unwrap_err().to_string()
        };
        let scales = (DType::Float32, &[1, 1][..]);
        assert!(fp8((E4M3, &[129, 1]), scales, BLOCK).contains("give the size of the blocks"));
        assert!(fp8((E4M3, &[4]), scales, BLOCK).contains("two axes"));
        assert!(fp8((DType::Int8, &[4, 4]), scales, BLOCK).contains("not an 8-bit float"));
        assert!(fp8((E4M3, &[4, 4]), (DType::Int8, &[1, 1]), BLOCK).contains("floats"));
        assert!(fp8((E4M3, &[4, 4]), scales, [0, 1]).contains("hold nothing"));

        let fp4 = |blocks: &[u64], scales: &[u64], taken: &str| {
            let metadata = model(&[
                ("w_blocks", DType::UInt8, blocks),
                ("w_scales", DType::UInt8, scales),
                (taken, DType::UInt8, &[1]),
            ]);
            find_quantized(&metadata, BLOCK).unwrap_err().to_string()
        };
        assert!(fp4(&[2, 16], &[3], "x").contains("that of its blocks"));
        assert!(fp4(&[2, 0], &[2], "x").contains("that of its blocks"));
        assert!(fp4(&[2, 16], &[2], "w").contains("name that is taken"));
        assert!(fp4(&[1, 1 << 30], &[1], "x").contains("those of MXFP4 have 16"));
        assert!(fp4(&[1 << 60, 16], &[1 << 60], "x").contains("beyond 2^64"));
    }

    #[test]
    fn configurations_are_asked() {
        let block = |text: &str| configured_block(text.as_bytes());
        let config = r#"{"quantization_config": {"weight_block_size": [64, 32], "x": {}}}"#;
        assert_eq!(block(config).unwrap(), Some([64, 32]));
        assert_eq!(block(r#"{"quantization_config": {"weight_block_size": null}}"#).unwrap(), None);
        assert_eq!(block(r#"{"quantization_config": null}"#).unwrap(), None);
        assert_eq!(block("{}").unwrap(), None);
        assert!(block(r#"{"quantization_config": {"weight_block_size": [1]}}"#).is_err());
        assert!(block("[").is_err());
        let plain = |text: &str| {
            let config = config_without_quantization(text.as_bytes()).unwrap();
            config.map(|text| String::from_utf8(text).unwrap())
        };
        let config = r#"{"a": 1, "quantization_config": {"quant_method": "fp8"}, "b": 2}"#;
        assert_eq!(plain(config).unwrap(), "{\n  \"a\": 1,\n  \"b\": 2\n}\n");
        assert_eq!(plain(r#"{"quantization_config": {"quant_method": "gptq"}}"#), None);
        assert_eq!(plain(r#"{"a": 1}"#), None);
    }
}
