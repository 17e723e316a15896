//! Tensors of dtypes that the format has no name for.

use dcp_core::{DType, Dims, Region};
use serde::Deserialize;
use serde_json::json;

use super::dtype::dtype_name;
use super::header::{Header, TensorInfo};

/// The key of the header's `__metadata__` that describes tensors of a dtype without a name in the
/// format: a JSON object, FQN → `{"dtype", "shape"}`. Their bytes are stored as `U8`, with a
/// further axis for the bytes of an element.
///
/// The convention is dcp's; other programs see bytes.
pub const RAW: &str = "dcp.raw";

/// The content of [`RAW`] for the tensors of one file.
#[derive(Clone, Debug, Default)]
pub struct RawTypes(serde_json::Map<String, serde_json::Value>);

#[derive(Deserialize)]
#[serde(expecting = "an object with a dtype and a shape")]
struct RawType {
    dtype: String,
    shape: Vec<u64>,
}

impl RawTypes {
    /// Reads the header's entry; empty if it is invalid.
    #[must_use]
    pub fn of(header: &Header) -> Self {
        let text = header.metadata().get(RAW).map_or("{}", String::as_str);
        Self(serde_json::from_str(text).unwrap_or_default())
    }

    /// Whether no tensor is described.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The stored dtype and shape of a tensor: its own if the format has a name for the dtype, and
    /// bytes otherwise, which it records.
    pub fn stored_as(&mut self, name: &str, dtype: DType, shape: &Dims) -> (DType, Dims) {
        let packed_scalar = dtype == DType::Float4E2M1FnX2 && shape.ndim() == 0;
        if dtype_name(dtype).is_some() && !packed_scalar {
            return (dtype, shape.clone());
        }
        let described = json!({ "dtype": dtype.name(), "shape": &**shape });
        self.0.insert(name.to_owned(), described);
        (DType::UInt8, shape.iter().copied().chain([dtype.size() as u64]).collect())
    }

    /// The value for the header's `__metadata__`.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::Value::Object(self.0.clone()).to_string()
    }

    /// The dtype and shape of a tensor: the described ones if they match its bytes, those of the
    /// format otherwise.
    #[must_use]
    pub fn typed(&self, name: &str, info: &TensorInfo) -> (DType, Dims) {
        let described = self.0.get(name).filter(|_| info.dtype == DType::UInt8);
        let described = described.and_then(|described| {
            let described = RawType::deserialize(described).ok()?;
            let dtype: DType = described.dtype.parse().ok()?;
            let shape = Dims::from(described.shape);
            (shape.ndim() <= Dims::MAX_AXES).then_some(())?;
            Region::full(shape.clone()).ok()?;
            let bytes = shape.checked_volume()?.checked_mul(dtype.size() as u64)?;
            (bytes == info.byte_range.end - info.byte_range.start).then_some((dtype, shape))
        });
        described.unwrap_or_else(|| (info.dtype, info.shape.clone()))
    }
}
