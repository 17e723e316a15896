//! Values of options: dtypes, numbers of bytes.

use std::time::Duration;

use dcp::DType;
use dcp::core::format::Compression;
use dcp::jobs::text::float_dtype;

/// Reads a floating-point dtype by PyTorch's name or a short one.
pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    float_dtype(text).map_err(|error| error.to_string())
}

/// Reads a number of bytes: `300`, `64MiB`, `5GB`, `1.5g` (a letter alone is binary).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a number of bytes"))?;
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
    let bytes =
        number * factor.ok_or_else(|| format!("{unit:?} is not a unit; write KiB or MB"))?;
    // Above 2^53 there is no difference that anybody meant.
    if bytes < 9e15 { Ok(bytes as u64) } else { Err(format!("{text:?} is too many bytes")) }
}

/// Reads a compression: `zstd`, `zstd:19`.
pub(crate) fn parse_compression(text: &str) -> Result<Compression, String> {
    let (name, level) = match text.split_once(':') {
        Some((name, level)) => (name, Some(level)),
        None => (text, None),
    };
    if name != "zstd" {
        return Err(format!("{text:?} is not a compression; write zstd or zstd:LEVEL"));
    }
    let Some(level) = level else { return Ok(Compression::ZSTD) };
    match level.parse() {
        Ok(level) if (-7..=22).contains(&level) && level != 0 => Ok(Compression::Zstd(level)),
        _ => Err(format!("{level:?} is not a level of zstd from 1 to 22 or -7 to -1")),
    }
}

/// Reads a duration: `30d`, `12h`, `90min`, `45s`, `2w`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let seconds: u64 = match unit.trim() {
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return Err(format!("{text:?} has no unit; write 30d, 12h, 90min or 45s")),
    };
    let number: Option<u64> = number.parse().ok();
    let seconds = number.and_then(|number| number.checked_mul(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| format!("{text:?} is not a duration"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dcp::core::format::Compression;

    use super::{parse_bytes, parse_compression, parse_duration};

    #[test]
    fn a_compression_may_have_a_level() {
        for (text, level) in [("zstd", 3), ("zstd:1", 1), ("zstd:22", 22), ("zstd:-7", -7)] {
            assert_eq!(parse_compression(text), Ok(Compression::Zstd(level)), "{text}");
        }
        for text in ["", "gzip", "zstd=3", "zstd:", "zstd:0", "zstd:23", "zstd:-8", "zstd:x", "19"]
        {
            assert!(parse_compression(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [
            ("45s", 45),
            ("90min", 5400),
            ("90m", 5400),
            ("12h", 43_200),
            ("30d", 2_592_000),
            ("2 w", 1_209_600),
            ("0d", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "30", "d", "-1d", "1.5h", "1y", "99999999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

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
