//! Dequantizes tensors of torchao (0.18).

use dcp_core::region::Runs;
use dcp_core::value::Dict;
use dcp_core::{DType, Dims, Region, Tensor, Value};

use super::scales::floats;

/// The supported classes, without their modules, which torchao has moved.
const CLASSES: [&str; 5] =
    ["OptimState8bit", "OptimState4bit", "OptimStateFp8", "Int8Tensor", "Float8Tensor"];

/// Whether a class is supported.
pub(super) fn is_known(class: &str) -> bool {
    let (module, name) = class.rsplit_once('.').unwrap_or_default();
    module.split('.').next() == Some("torchao") && CLASSES.contains(&name)
}

/// A quantized tensor.
#[derive(Debug)]
pub(super) struct Quantized {
    shape: Dims,
    codes: Codes,
    scales: Vec<f32>,
    blocks: Blocks,
}

/// The stored codes.
#[derive(Debug)]
enum Codes {
    /// One byte per element, and the value of each byte.
    Bytes(Vec<u8>, Vec<f32>),
    /// Four bits per element, upper bits first, and the value of each code.
    Nibbles(Vec<u8>, Vec<f32>),
    /// 8-bit integers, and the zero point of each block, which is subtracted.
    Ints(Vec<u8>, Vec<i8>),
}

/// The elements that share a scale.
#[derive(Debug)]
enum Blocks {
    /// Runs of this many row-major elements.
    Flat(u64),
    /// Boxes of these sizes; the scales are in row-major order.
    Grid(Dims),
}

impl Quantized {
    /// The tensor `fqn` of `shape` and `class`, from the object that PyTorch (2.15) pickles.
    ///
    /// # Errors
    ///
    /// A message that says why it cannot be dequantized.
    pub(super) fn new(fqn: &str, class: &str, shape: &Dims, value: &Value) -> Result<Self, String> {
        let attributes = attributes(value).ok_or("it is not made as PyTorch 2.15 makes it")?;
        let part = |name: &str| tensor(attributes, name);
        let elements = shape.checked_volume().ok_or("it has too many elements")?;
        let scale = part("scale")?;
        let all = |tensor: &Tensor| tensor.to_vec().ok_or("a part of it is not here");
        if !matches!(scale.dtype(), DType::Float32 | DType::BFloat16 | DType::Float16) {
            return Err(format!("its scales are {}", scale.dtype()));
        }
        let numbers = |tensor: &Tensor| {
            floats(fqn, tensor.dtype(), &all(tensor)?).map_err(|error| error.to_string())
        };
        let scales = numbers(scale)?;
        let table = |len: usize| -> Result<Vec<f32>, String> {
            let qmap = part("qmap")?;
            let table = if qmap.dtype() == DType::Float32 { numbers(qmap)? } else { Vec::new() };
            let complete = table.len() == len;
            complete.then_some(table).ok_or_else(|| format!("its qmap has not {len} numbers"))
        };
        let typed = |name: &str, dtype: DType, len: u64| -> Result<Vec<u8>, String> {
            let found = part(name)?;
            let fits = found.dtype() == dtype && found.shape().checked_volume() == Some(len);
            if fits {
                return Ok(all(found)?);
            }
            Err(format!("its {name} are {} of shape {}", found.dtype(), found.shape()))
        };
        let flat = || {
            let (count, len) = (scales.len() as u64, elements);
            let even = count > 0 && len.is_multiple_of(count);
            even.then(|| Blocks::Flat(len / count)).ok_or("its scales do not divide it evenly")
        };
        let (codes, blocks) = match class.rsplit('.').next() {
            Some("OptimState8bit") => {
                (Codes::Bytes(typed("codes", DType::UInt8, elements)?, table(256)?), flat()?)
            }
            Some("OptimState4bit") if elements.is_multiple_of(2) => {
                let codes = typed("codes", DType::UInt8, elements / 2)?;
                (Codes::Nibbles(codes, table(16)?), flat()?)
            }
            Some("OptimStateFp8") => (float8(fqn, part("codes")?, shape)?, flat()?),
            Some("Float8Tensor") => {
                let sizes: Vec<_> = scale.shape().to_vec();
                (float8(fqn, part("qdata")?, shape)?, Blocks::Grid(of_counts(shape, &sizes)?))
            }
            Some("Int8Tensor") => {
                if !is_none(attributes, "act_pre_scale") {
                    return Err("its act_pre_scale is for activations".into());
                }
                let sizes = block_size(attributes, shape).ok_or("its block_size does not fit")?;
                let counts = shape.iter().zip(sizes.iter()).map(|(len, size)| len / (*size).max(1));
                let count = counts.fold(1, u64::saturating_mul);
                if scales.len() as u64 != count {
                    return Err(format!("it has {} scales for {count} blocks", scales.len()));
                }
                let codes = typed("qdata", DType::Int8, elements)?;
                let zeros = match is_none(attributes, "zero_point") {
                    true => vec![0; scales.len()],
                    false => typed("zero_point", DType::Int8, count)?,
                };
                let zeros = zeros.into_iter().map(u8::cast_signed).collect();
                (Codes::Ints(codes, zeros), Blocks::Grid(sizes))
            }
            _ => return Err("its layout is not known".into()),
        };
        Ok(Self { shape: shape.clone(), codes, scales, blocks })
    }

    /// The values of a region in row-major order, as bytes of `float32`: the product of the code's
    /// value and the scale, rounded once.
    pub(super) fn numbers(&self, region: &Region) -> Vec<u8> {
        let mut made = Vec::new();
        let runs: Runs = region.runs_in(&self.shape);
        let row = self.shape.last().copied().unwrap_or(1).max(1);
        for (start, len) in runs {
            let end = start.saturating_add(len);
            let mut at = start;
            while at < end {
                // Up to the end of the row, whose elements share all other indices.
                let next = (at / row + 1).saturating_mul(row).min(end);
                let (first, size, offset) = self.scale_of_row(at, row);
                for (flat, col) in (at..next).zip(offset..) {
                    let block = usize::try_from(first + col / size).unwrap_or(usize::MAX);
                    made.extend_from_slice(&self.number(flat, block).to_le_bytes());
                }
                at = next;
            }
        }
        made
    }

    /// The first scale of the row that contains element `flat`, the number of elements that share
    /// one, and the element's position in the row.
    fn scale_of_row(&self, flat: u64, row: u64) -> (u64, u64, u64) {
        let sizes = match &self.blocks {
            Blocks::Flat(len) => return (0, (*len).max(1), flat),
            Blocks::Grid(sizes) => sizes,
        };
        let (mut rest, mut stride, mut first) = (flat / row, 1, 0);
        let axes = self.shape.iter().zip(sizes.iter()).rev();
        for (axis, (len, size)) in axes.enumerate() {
            let size = (*size).max(1);
            if axis > 0 {
                first += rest % (*len).max(1) / size * stride;
                rest /= (*len).max(1);
            }
            stride *= len / size;
        }
        (first, sizes.last().copied().unwrap_or(1).max(1), flat % row)
    }

    fn number(&self, flat: u64, block: usize) -> f32 {
        let at = usize::try_from(flat).unwrap_or(usize::MAX);
        let scale = self.scales.get(block).copied().unwrap_or(f32::NAN);
        let of = |table: &[f32], code: u8| table.get(usize::from(code)).copied();
        let number = match &self.codes {
            Codes::Bytes(codes, table) => codes.get(at).and_then(|code| of(table, *code)),
            Codes::Nibbles(codes, table) => codes.get(at / 2).and_then(|byte| {
                let code = if at.is_multiple_of(2) { byte >> 4 } else { byte & 0xf };
                of(table, code)
            }),
            Codes::Ints(codes, zeros) => codes.get(at).zip(zeros.get(block)).map(|(code, zero)| {
                let difference = i16::from(code.cast_signed()) - i16::from(*zero);
                f32::from(difference)
            }),
        };
        number.unwrap_or(f32::NAN) * scale
    }
}

/// 8-bit floats, with the value of each byte.
fn float8(fqn: &str, tensor: &Tensor, shape: &Dims) -> Result<Codes, String> {
    let dtype = tensor.dtype();
    let known = matches!(dtype, DType::Float8E4M3Fn | DType::Float8E5M2);
    if !known || tensor.shape() != shape {
        return Err(format!("its data is {dtype} of shape {}", tensor.shape()));
    }
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let table = floats(fqn, dtype, &bytes).map_err(|error| error.to_string())?;
    Ok(Codes::Bytes(tensor.to_vec().ok_or("a part of it is not here")?, table))
}

/// The sizes of blocks, from the number of blocks per axis. A single count is for all axes.
fn of_counts(shape: &Dims, counts: &[u64]) -> Result<Dims, String> {
    if counts.iter().all(|count| *count == 1) {
        return Ok(shape.clone());
    }
    let even = |(len, count): (&u64, &u64)| {
        (*count > 0 && len.is_multiple_of(*count)).then(|| len / count)
    };
    let sizes = shape.iter().zip(counts).map(even).collect::<Option<Dims>>();
    let sizes = sizes.filter(|_| counts.len() == shape.len());
    sizes.ok_or_else(|| format!("scales of shape {} do not divide it", Dims::from(counts)))
}

/// The attribute `block_size`, if it divides `shape` evenly.
fn block_size(attributes: &Dict, shape: &Dims) -> Option<Dims> {
    let (Value::List(sizes) | Value::Tuple(sizes)) = attributes.get("block_size")? else {
        return None;
    };
    let size = |(size, len): (&Value, &u64)| match size {
        Value::Int(-1) => Some(*len),
        Value::Int(size) => {
            let size = u64::try_from(*size).ok().filter(|size| *size > 0)?;
            len.is_multiple_of(size).then_some(size)
        }
        _ => None,
    };
    (sizes.len() == shape.len()).then(|| sizes.iter().zip(shape.iter()).map(size).collect())?
}

fn is_none(attributes: &Dict, name: &str) -> bool {
    matches!(attributes.get(name), None | Some(Value::None))
}

fn tensor<'a>(attributes: &'a Dict, name: &str) -> Result<&'a Tensor, String> {
    match attributes.get(name) {
        Some(Value::Tensor(tensor)) => Ok(tensor),
        Some(_) => Err(format!("its {name} is not a plain tensor")),
        None => Err(format!("it has no {name}")),
    }
}

/// The attributes of an instance that `torch._tensor._rebuild_from_type_v2` rebuilds.
fn attributes(value: &Value) -> Option<&Dict> {
    match value {
        Value::Opaque(opaque) => attributes(&opaque.view),
        Value::Object(object) => match (&*object.class.name, &*object.args) {
            ("_rebuild_parameter", [inner, ..]) => attributes(inner),
            ("_rebuild_from_type_v2", [_, _, _, Value::Dict(state)]) => Some(state),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_that_do_not_fit_are_refused() {
        let counts = |shape: &[u64], counts: &[u64]| of_counts(&shape.into(), counts);
        assert_eq!(counts(&[4, 6], &[2, 3]), Ok([2, 2].into()));
        assert_eq!(counts(&[4, 6], &[1]), Ok([4, 6].into()));
        for bad in [&[3, 1][..], &[2], &[0, 6], &[2, 3, 1], &[u64::MAX, 2]] {
            assert!(counts(&[4, 6], bad).is_err(), "{bad:?}");
        }
        assert!(counts(&[0, 6], &[0, 6]).is_err());
        let mut attributes = Dict::new();
        let mut sizes = |sizes: &[i64], shape: &[u64]| {
            let sizes = sizes.iter().map(|size| Value::Int(*size)).collect();
            attributes.insert("block_size", Value::Tuple(sizes));
            block_size(&attributes, &shape.into())
        };
        assert_eq!(sizes(&[1, -1], &[4, 6]), Some([1, 6].into()));
        for bad in [&[0, 6][..], &[3, 6], &[1], &[-2, 6]] {
            assert_eq!(sizes(bad, &[4, 6]), None, "{bad:?}");
        }
    }

    #[test]
    fn classes_are_known_by_library_and_name() {
        assert!(is_known("torchao.quantization.Int8Tensor"));
        assert!(is_known("torchao.prototype.low_bit_optim.subclass_8bit.OptimState8bit"));
        assert!(!is_known("torchaox.quantization.Int8Tensor"));
        assert!(!is_known("torchao.quantization.Int4Tensor") && !is_known("Int8Tensor"));
    }
}
