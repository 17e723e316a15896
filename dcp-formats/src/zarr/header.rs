//! `.zarray`: the description of an array, and its division into files.

use dcp_core::dims::checked_volume;
use dcp_core::{DType, Dims, FormatError};
use serde_json::Value as Json;

/// The name of an array's description.
pub const HEADER_FILE: &str = ".zarray";
/// The maximum length of a dtype's text.
const DTYPE_MAX: usize = 64;

/// The description of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArrayHeader {
    /// The dtype.
    pub dtype: DType,
    /// The shape of the array.
    pub shape: Dims,
    /// The shape of a chunk. Chunks at the edge are stored in full, padded.
    pub chunks: Dims,
    /// Whether a chunk without a file is all zeros; otherwise it is lost.
    pub zeros_where_absent: bool,
    /// The separator of numbers in a file name.
    pub separator: char,
}

impl ArrayHeader {
    /// Parses a `.zarray`.
    ///
    /// # Errors
    ///
    /// When it is not a JSON object of version 2, has contradictory members, or declares
    /// compression, filters, column-major order, or dtypes that PyTorch lacks; Megatron-Core writes
    /// none of these.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let json: Json = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        let Json::Object(members) = &json else { return Err(bad("it is no JSON object")) };
        let member = |name: &str| members.get(name).unwrap_or(&Json::Null);
        match member("zarr_format") {
            version if version.as_u64() == Some(2) => {}
            Json::Null => return Err(bad("it has no \"zarr_format\"")),
            other => return Err(bad(format!("it is of version {other} of zarr, not of 2"))),
        }
        let none = |name: &str| match member(name) {
            Json::Null => Ok(()),
            Json::Array(list) if list.is_empty() => Ok(()),
            other => Err(bad(format!("{name:?} is {}, only null is read", short(other)))),
        };
        none("compressor")?;
        none("filters")?;
        match member("order").as_str() {
            Some("C") => {}
            _ => return Err(bad(format!("\"order\" is {}, not \"C\"", short(member("order"))))),
        }
        let separator = match member("dimension_separator") {
            Json::Null => '.',
            Json::String(text) if text == "." => '.',
            Json::String(text) if text == "/" => '/',
            other => return Err(bad(format!("\"dimension_separator\" is {}", short(other)))),
        };
        let dtype = dtype(member("dtype"))?;
        let shape = dims("shape", member("shape"))?;
        let chunks = dims("chunks", member("chunks"))?;
        if shape.ndim() != chunks.ndim() {
            let (shape, chunks) = (shape.ndim(), chunks.ndim());
            return Err(bad(format!("\"shape\" has {shape} axes, \"chunks\" {chunks}")));
        }
        if chunks.contains(&0) {
            return Err(bad(format!("a chunk of {chunks} has no elements")));
        }
        for sizes in [&shape, &chunks] {
            let bytes = checked_volume(sizes).and_then(|n| n.checked_mul(dtype.size() as u64));
            bytes.ok_or_else(|| bad(format!("{sizes} of {dtype} exceeds 64 bits")))?;
        }
        let zeros_where_absent = zero_fill(member("fill_value"))?;
        Ok(Self { dtype, shape, chunks, zeros_where_absent, separator })
    }

    /// The number of chunks along each axis.
    #[must_use]
    pub fn grid(&self) -> Dims {
        self.shape.iter().zip(&*self.chunks).map(|(len, chunk)| len.div_ceil(*chunk)).collect()
    }

    /// The size of a chunk's file in bytes.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        let volume = self.chunks.checked_volume().unwrap_or(u64::MAX);
        volume.saturating_mul(self.dtype.size() as u64)
    }

    /// The file of a grid cell, relative to the array's folder.
    #[must_use]
    pub fn chunk_name(&self, cell: &[u64]) -> String {
        if cell.is_empty() {
            return "0".to_owned();
        }
        let numbers: Vec<String> = cell.iter().map(u64::to_string).collect();
        numbers.join(self.separator.encode_utf8(&mut [0; 4]))
    }
}

/// Dtypes with and without a name in NumPy.
fn dtype(json: &Json) -> Result<DType, FormatError> {
    let Some(text) = json.as_str() else {
        return Err(bad(format!("\"dtype\" is {}, not a name", short(json))));
    };
    let Some((order, kind)) = text.split_at_checked(1) else {
        return Err(bad("\"dtype\" is empty, or no name of numpy"));
    };
    let found = match kind {
        "f2" => Some(DType::Float16),
        "f4" => Some(DType::Float32),
        "f8" => Some(DType::Float64),
        "i1" => Some(DType::Int8),
        "i2" => Some(DType::Int16),
        "i4" => Some(DType::Int32),
        "i8" => Some(DType::Int64),
        "u1" => Some(DType::UInt8),
        "u2" => Some(DType::UInt16),
        "u4" => Some(DType::UInt32),
        "u8" => Some(DType::UInt64),
        "b1" => Some(DType::Bool),
        "c8" => Some(DType::Complex64),
        "c16" => Some(DType::Complex128),
        _ => None,
    };
    match (order, found) {
        ("<", Some(dtype)) => Ok(dtype),
        ("|", Some(dtype)) if dtype.size() == 1 => Ok(dtype),
        (">", Some(_)) => Err(bad(format!("elements of {text:?} are big-endian"))),
        // tensorstore, which Megatron-Core used, has names for dtypes that NumPy lacks.
        _ => match text.parse() {
            Ok(dtype @ (DType::BFloat16 | DType::Float8E4M3Fn | DType::Float8E5M2)) => Ok(dtype),
            _ => {
                let text: String = text.chars().take(DTYPE_MAX).collect();
                Err(bad(format!("elements of {text:?} are not known")))
            }
        },
    }
}

fn dims(name: &str, json: &Json) -> Result<Dims, FormatError> {
    let refuse = || bad(format!("{name:?} is {}, not a list of sizes", short(json)));
    let sizes = json.as_array().ok_or_else(refuse)?;
    if sizes.len() > Dims::MAX_AXES {
        let (axes, max) = (sizes.len(), Dims::MAX_AXES);
        return Err(bad(format!("{name:?} has {axes} axes, more than {max}")));
    }
    sizes.iter().map(|size| size.as_u64().ok_or_else(refuse)).collect()
}

/// Whether unwritten elements are zero. Megatron-Core declares no other value.
fn zero_fill(json: &Json) -> Result<bool, FormatError> {
    let zero = match json {
        Json::Null => return Ok(false),
        Json::Bool(b) => !b,
        Json::Number(n) => n.as_f64().is_some_and(|x| x.to_bits() == 0),
        _ => false,
    };
    if zero {
        return Ok(true);
    }
    Err(bad(format!("\"fill_value\" is {}, only null and zero are read", short(json))))
}

/// The beginning of a member, for messages.
fn short(json: &Json) -> String {
    const SHOWN: usize = 80;
    let text = json.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new("zarr array", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(changes: &[(&str, Json)]) -> Result<ArrayHeader, FormatError> {
        let mut json = serde_json::json!({
            "chunks": [4, 4], "compressor": null, "dtype": "bfloat16", "fill_value": null,
            "filters": null, "order": "C", "shape": [8, 6], "zarr_format": 2
        });
        for (name, value) in changes {
            json[*name] = value.clone();
        }
        ArrayHeader::parse(json.to_string().as_bytes())
    }

    #[test]
    fn an_array_of_megatron_is_understood() {
        let header = header(&[]).unwrap();
        assert_eq!(header.dtype, DType::BFloat16);
        assert_eq!((&*header.shape, &*header.chunks), (&[8, 6][..], &[4, 4][..]));
        assert_eq!((&*header.grid(), header.chunk_bytes()), (&[2, 2][..], 32));
        assert_eq!(header.chunk_name(&[1, 0]), "1.0");
        assert!(!header.zeros_where_absent);
    }

    #[test]
    fn names_of_types_and_files_are_those_of_numpy() {
        for (name, dtype) in [
            ("<f4", DType::Float32),
            ("<i8", DType::Int64),
            ("|u1", DType::UInt8),
            ("<u1", DType::UInt8),
            ("|b1", DType::Bool),
            ("<c16", DType::Complex128),
            ("float8_e4m3fn", DType::Float8E4M3Fn),
        ] {
            assert_eq!(header(&[("dtype", name.into())]).unwrap().dtype, dtype);
        }
        let nested = header(&[("dimension_separator", "/".into())]).unwrap();
        assert_eq!(nested.chunk_name(&[1, 0]), "1/0");
        let scalar = header(&[("shape", serde_json::json!([])), ("chunks", serde_json::json!([]))]);
        let scalar = scalar.unwrap();
        assert_eq!((scalar.chunk_name(&[]).as_str(), scalar.grid().ndim()), ("0", 0));
        let filled = header(&[("fill_value", 0.into())]).unwrap();
        assert!(filled.zeros_where_absent);
    }

    #[test]
    fn what_is_not_read_is_said() {
        let json = |text: &str| serde_json::from_str::<Json>(text).unwrap();
        for (name, value, said) in [
            ("zarr_format", "3", "version 3"),
            ("zarr_format", "null", "no \"zarr_format\""),
            ("compressor", r#"{"id": "blosc"}"#, "blosc"),
            ("filters", r#"[{"id": "delta"}]"#, "delta"),
            ("order", "\"F\"", "not \"C\""),
            ("dimension_separator", "\"..\"", "separator"),
            ("dtype", "\">f4\"", "big-endian"),
            ("dtype", "\"|f4\"", "not known"),
            ("dtype", "\"<M8[ns]\"", "not known"),
            ("dtype", "[[\"a\", \"<f4\"]]", "not a name"),
            ("dtype", "\"\"", "empty"),
            ("dtype", "\"é\"", "empty"),
            ("shape", "[4]", "1 axes, \"chunks\" 2"),
            ("shape", "[-1, 4]", "not a list of sizes"),
            ("shape", "[9223372036854775807, 3]", "64 bits"),
            ("chunks", "[0, 4]", "no elements"),
            ("chunks", "\"auto\"", "not a list of sizes"),
            ("fill_value", "\"NaN\"", "null and zero"),
            ("fill_value", "1", "null and zero"),
        ] {
            let error = header(&[(name, json(value))]).unwrap_err().to_string();
            assert!(error.contains(said), "{name} {value}: {error}");
        }
        for text in ["", "{", "[]", "null", "\u{feff}{}"] {
            assert!(ArrayHeader::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        let deep = "[".repeat(100_000);
        assert!(ArrayHeader::parse(deep.as_bytes()).is_err());
    }
}
