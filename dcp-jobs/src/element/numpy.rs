//! NumPy scalars and arrays, decoded from their pickled form.

use bytes::Bytes;
use dcp_core::value::Object;
use dcp_core::{DType, Value};

/// A NumPy value in an object.
#[derive(Debug)]
pub(crate) enum Numpy {
    /// A scalar, such as `numpy.float32(2.5)`.
    Scalar {
        /// NumPy's name of the type, or its type string if it has no name.
        kind: String,
        /// The dtype and the little-endian bytes, when the type is a number.
        value: Option<(DType, Bytes)>,
    },
    /// An array.
    Array {
        /// NumPy's name of the type, or its type string if it has no name.
        kind: String,
        shape: Vec<u64>,
        /// Whether elements are in column-major (Fortran) order.
        fortran: bool,
        /// The dtype and the little-endian bytes in memory order, when the type is a number.
        data: Option<(DType, Bytes)>,
    },
}

impl Numpy {
    /// The NumPy value that `object` rebuilds. Returns `None` for other objects and for forms that
    /// neither NumPy 1 nor 2 writes.
    pub(crate) fn of(object: &Object) -> Option<Self> {
        let module = &*object.class.module;
        if !matches!(module, "numpy.core.multiarray" | "numpy._core.multiarray") {
            return None;
        }
        match (&*object.class.name, &*object.args) {
            ("scalar", [dtype, rest @ ..]) => {
                let kind = Kind::of(dtype)?;
                let value = rest.first().and_then(bytes).and_then(|bytes| kind.numbers(bytes, 1));
                Some(Self::Scalar { kind: kind.name(), value })
            }
            ("_reconstruct", _) => {
                let (Layout { kind, shape, fortran }, bytes) = layout(object)?;
                let count = dcp_core::dims::checked_volume(&shape)?;
                let data = bytes.and_then(|bytes| kind.numbers(bytes, count));
                Some(Self::Array { kind: kind.name(), shape, fortran, data })
            }
            _ => None,
        }
    }
}

fn bytes(value: &Value) -> Option<&Bytes> {
    match value.view() {
        Value::Bytes(bytes) | Value::ByteArray(bytes) => Some(bytes),
        _ => None,
    }
}

/// The maximum length of a type string, such as `datetime64[25s/3]`, in bytes.
const CODE_MAX: usize = 64;

/// A NumPy type: its letter and size, such as `f8`, and its byte order.
pub(crate) struct Kind {
    pub(crate) code: String,
    pub(crate) big_endian: bool,
}

/// The type, shape and order of an array's bytes.
pub(crate) struct Layout {
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<u64>,
    pub(crate) fortran: bool,
}

/// The layout of the array that `object` rebuilds, and its bytes when they are stored as bytes.
/// Returns `None` when the object is not an array.
pub(crate) fn layout(object: &Object) -> Option<(Layout, Option<&Bytes>)> {
    let module = &*object.class.module;
    let known = matches!(module, "numpy.core.multiarray" | "numpy._core.multiarray");
    let Some(Value::Tuple(state)) = &object.state else { return None };
    let [.., shape, dtype, Value::Bool(fortran), data] = &**state else { return None };
    let Value::Tuple(sizes) = shape else { return None };
    if !known || &*object.class.name != "_reconstruct" {
        return None;
    }
    let shape =
        sizes.iter().map(|size| u64::try_from(size.as_int()?).ok()).collect::<Option<Vec<_>>>()?;
    let kind = Kind::of(dtype)?;
    Some((Layout { kind, shape, fortran: *fortran }, bytes(data)))
}

impl Kind {
    fn of(dtype: &Value) -> Option<Self> {
        let Value::Object(object) = dtype.view() else { return None };
        if !object.class.is("numpy", "dtype") {
            return None;
        }
        let code = object.args.first()?.as_str().filter(|code| code.len() <= CODE_MAX)?.to_owned();
        let order = match &object.state {
            Some(Value::Tuple(state)) => state.get(1).and_then(Value::as_str),
            _ => None,
        };
        Some(Self { code, big_endian: order == Some(">") })
    }

    fn dtype(&self) -> Option<DType> {
        Some(match &*self.code {
            "f8" => DType::Float64,
            "f4" => DType::Float32,
            "f2" => DType::Float16,
            "i8" => DType::Int64,
            "i4" => DType::Int32,
            "i2" => DType::Int16,
            "i1" => DType::Int8,
            "u8" => DType::UInt64,
            "u4" => DType::UInt32,
            "u2" => DType::UInt16,
            "u1" => DType::UInt8,
            "b1" => DType::Bool,
            "c16" => DType::Complex128,
            "c8" => DType::Complex64,
            _ => return None,
        })
    }

    fn name(&self) -> String {
        self.dtype().map_or_else(|| self.code.clone(), |dtype| dtype.name().to_owned())
    }

    /// The bytes of `count` numbers, in little-endian order.
    fn numbers(&self, bytes: &Bytes, count: u64) -> Option<(DType, Bytes)> {
        let dtype = self.dtype()?;
        if count.checked_mul(dtype.size() as u64)? != bytes.len() as u64 {
            return None;
        }
        if !self.big_endian {
            return Some((dtype, bytes.clone()));
        }
        let mut swapped = bytes.to_vec();
        for scalar in swapped.chunks_exact_mut(dtype.scalar_size()) {
            scalar.reverse();
        }
        Some((dtype, swapped.into()))
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::value::Global;

    use super::*;

    fn dtype(code: &str, order: &str) -> Value {
        let mut object = Object::new(Global::new("numpy", "dtype"), vec![code.into()]);
        object.state = Some(Value::Tuple(vec![3_i32.into(), order.into()]));
        object.into()
    }

    fn scalar(code: &str, order: &str, data: &'static [u8]) -> Option<Numpy> {
        let args = vec![dtype(code, order), Bytes::from_static(data).into()];
        Numpy::of(&Object::new(Global::new("numpy._core.multiarray", "scalar"), args))
    }

    #[test]
    fn scalars_of_both_byte_orders() {
        for (order, data) in [("<", &[1_u8, 0][..]), (">", &[0, 1])] {
            let Some(Numpy::Scalar { kind, value }) = scalar("i2", order, data) else { panic!() };
            assert_eq!((kind.as_str(), value.unwrap().1), ("int16", Bytes::from_static(&[1, 0])));
        }
        let Some(Numpy::Scalar { kind, value: None }) = scalar("M8", "<", &[0; 8]) else {
            panic!("a datetime has no number here")
        };
        assert_eq!(kind, "M8");
        let Some(Numpy::Scalar { value: None, .. }) = scalar("i2", "<", &[0; 3]) else {
            panic!("a wrong length has no value")
        };
    }

    #[test]
    fn an_array_has_a_shape() {
        let class = Global::new("numpy.core.multiarray", "_reconstruct");
        let mut object = Object::new(class, vec![]);
        let shape = Value::Tuple(vec![2_i32.into(), 1_i32.into()]);
        let data = Bytes::from_static(&[1, 2]).into();
        let state = vec![1_i32.into(), shape, dtype("u1", "|"), Value::Bool(true), data];
        object.state = Some(Value::Tuple(state));
        let Some(Numpy::Array { shape, fortran, data, .. }) = Numpy::of(&object) else { panic!() };
        assert_eq!((shape, fortran, data.unwrap().0), (vec![2, 1], true, DType::UInt8));
    }
}
