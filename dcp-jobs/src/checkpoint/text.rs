//! Numbers and names as messages show them and options have them.

use std::sync::Arc;

use dcp_core::DType;
use dcp_core::text::Message;

use crate::cast::is_float;
use crate::error::{Error, ErrorKind};

/// A number with its thousands apart: `12,345`.
#[must_use]
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number and the noun that it counts: `1 shard`, `2,000 shards`.
#[must_use]
pub fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", thousands(number as u64))
}

/// The floating-point dtype of this name: PyTorch's, with or without `torch.`, or a short one such
/// as `bf16`.
///
/// # Errors
///
/// [`InvalidOption`](ErrorKind::InvalidOption) for names of no dtype and of dtypes that are not
/// floating-point.
pub fn float_dtype(name: &str) -> Result<DType, Error> {
    let full = match name.strip_prefix("torch.").unwrap_or(name) {
        "bf16" => "bfloat16",
        "fp16" | "f16" | "half" => "float16",
        "fp32" | "f32" | "float" => "float32",
        "fp64" | "f64" | "double" => "float64",
        "fp8" | "f8" | "fp8_e4m3" | "e4m3" => "float8_e4m3fn",
        "fp8_e5m2" | "e5m2" => "float8_e5m2",
        full => full,
    };
    let invalid = |message: String| Error::new(ErrorKind::InvalidOption, message);
    let floats = DType::ALL.iter().filter(|dtype| is_float(**dtype)).map(|dtype| dtype.name());
    let floats = floats.collect::<Vec<_>>().join(", ");
    let dtype: DType = full.parse().map_err(|_| {
        invalid(format!("{name:?} is not a dtype; the dtypes of floats are {floats}"))
    })?;
    match is_float(dtype) {
        true => Ok(dtype),
        false => Err(invalid(format!("{dtype} is not a float; the dtypes of floats are {floats}"))),
    }
}

/// The first of some names, and how many more there are.
#[must_use]
pub fn list(names: &[Arc<str>]) -> String {
    const SHOWN: usize = 5;
    let mut shown: Vec<_> =
        names.iter().take(SHOWN).map(|name| Message(name).to_string()).collect();
    if names.len() > SHOWN {
        shown.push(format!("and {} more", names.len() - SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names() {
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(thousands(999), "999");
        assert_eq!((count(1, "shard"), count(2, "shard")), ("1 shard".into(), "2 shards".into()));
        let names: Vec<Arc<str>> = (0..7).map(|n| n.to_string().into()).collect();
        assert_eq!(list(&names), "0, 1, 2, 3, 4, and 2 more");
    }
}
