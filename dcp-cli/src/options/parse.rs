//! Values of options: dtypes, numbers of bytes.

use dcp::DType;
use dcp::checkpoint::text::float_dtype;

/// Reads a floating-point dtype by PyTorch's name or a short one.
pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    float_dtype(text).map_err(|error| error.to_string())
}

/// Reads a number of bytes: `300`, `64MiB`, `5GB`, `1.5g` (a letter alone is binary).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no number of bytes"))?;
    let unit = unit.trim().to_ascii_lowercase();
    let power = |base: f64, letter: &str| {
        let place = ["", "k", "m", "g", "t", "p"].iter().position(|known| *known == letter)?;
        Some(base.powi(i32::try_from(place).ok()?))
    };
    let factor = if let Some(letter) = unit.strip_suffix("ib") {
        power(1024.0, letter).filter(|_| !letter.is_empty())
    } else if let Some(letter) = unit.strip_suffix('b') {
        power(1000.0, letter)
    } else {
        power(1024.0, &unit)
    };
    let bytes = number * factor.ok_or_else(|| format!("{unit:?} is no unit; write KiB or MB"))?;
    // Above 2^53 there is no difference that anybody meant.
    if bytes < 9e15 { Ok(bytes as u64) } else { Err(format!("{text:?} is too many bytes")) }
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn bytes_are_written_in_many_ways() {
        for (text, bytes) in [
            ("300", 300),
            ("64MiB", 64 << 20),
            ("5GB", 5_000_000_000),
            ("1.5g", 3 << 29),
            ("2 KB", 2000),
            ("7b", 7),
            ("0", 0),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1x", "1.2.3", "9999999PiB", "1ib", "inf", "nan"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
