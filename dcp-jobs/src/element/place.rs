//! Identifies arrays by address, so that an array with many references is read once.

use dcp_core::value::Object;
use dcp_core::{DType, Dims, Tensor, Value};

use crate::element::numpy::layout;

/// The length in bytes from which an array is identified by address.
const LEN_MIN: usize = 4096;

/// The address, length and type of an array's bytes. Valid while the value that owns the array is
/// alive.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    address: usize,
    len: usize,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Tensor(DType, Dims),
    Numpy { code: String, big_endian: bool, fortran: bool, shape: Vec<u64> },
    Text,
}

impl Place {
    fn new(bytes: &[u8], kind: impl FnOnce() -> Kind) -> Option<Self> {
        let (address, len) = (bytes.as_ptr().addr(), bytes.len());
        (len >= LEN_MIN).then(|| Self { address, len, kind: kind() })
    }

    /// The place of a contiguous tensor.
    pub(crate) fn of_tensor(tensor: &Tensor) -> Option<Self> {
        let [shard] = tensor.shards() else { return None };
        let payload = shard.view()?.payload().ok()?;
        let [piece] = payload.pieces() else { return None };
        Self::new(piece, || Kind::Tensor(tensor.dtype(), tensor.shape().clone()))
    }

    /// The place of a NumPy array.
    pub(crate) fn of_numpy(object: &Object) -> Option<Self> {
        let (array, bytes) = layout(object)?;
        let bytes = bytes?;
        let (code, big_endian) = (array.kind.code, array.kind.big_endian);
        let (fortran, shape) = (array.fortran, array.shape);
        Self::new(bytes, || Kind::Numpy { code, big_endian, fortran, shape })
    }

    /// The place of a string or a byte string.
    pub(crate) fn of_text(value: &Value) -> Option<Self> {
        let bytes = match value {
            Value::Str(text) => text.as_bytes(),
            Value::Bytes(bytes) | Value::ByteArray(bytes) => bytes,
            _ => return None,
        };
        Self::new(bytes, || Kind::Text)
    }
}
