//! The types of Rust that are elements of tensors.

use crate::tensors::dtype::DType;

/// A type of Rust that is the element of a tensor, bit for bit.
///
/// No other crate implements it. Dtypes without a type of Rust, such as bfloat16, have their bytes
/// alone.
pub trait TensorElement: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The element type of such tensors.
    const DTYPE: DType;
}

/// A [`TensorElement`] of which every pattern of bits is a value: all but `bool`.
pub trait NumericElement: TensorElement {}

pub(super) mod sealed {
    /// The bytes of an element, in the order of the formats.
    pub trait Sealed: Sized {
        /// Writes the element to exactly its size in bytes.
        fn put(self, bytes: &mut [u8]);

        /// Reads an element from exactly its size in bytes.
        fn get(bytes: &[u8]) -> Self;

        /// Whether every pattern of bits is a value.
        const IS_NUMBER: bool;
    }
}

macro_rules! numbers {
    ($($number:ty => $dtype:ident;)*) => {$(
        impl TensorElement for $number {
            const DTYPE: DType = DType::$dtype;
        }

        impl NumericElement for $number {}

        impl sealed::Sealed for $number {
            fn put(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &[u8]) -> Self {
                let mut element = [0; size_of::<Self>()];
                element.copy_from_slice(bytes);
                Self::from_le_bytes(element)
            }

            const IS_NUMBER: bool = true;
        }
    )*};
}

numbers! {
    f64 => Float64;
    f32 => Float32;
    i64 => Int64;
    i32 => Int32;
    i16 => Int16;
    i8 => Int8;
    u64 => UInt64;
    u32 => UInt32;
    u16 => UInt16;
    u8 => UInt8;
}

impl TensorElement for bool {
    const DTYPE: DType = DType::Bool;
}

impl sealed::Sealed for bool {
    fn put(self, bytes: &mut [u8]) {
        bytes.fill(self.into());
    }

    /// Every other byte than 0 is true, as in PyTorch.
    fn get(bytes: &[u8]) -> Self {
        bytes.iter().any(|byte| *byte != 0)
    }

    const IS_NUMBER: bool = false;
}

/// The bytes of elements, copied.
pub(crate) fn to_bytes<T: TensorElement>(elements: &[T]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(elements)];
    for (bytes, element) in bytes.chunks_exact_mut(size_of::<T>()).zip(elements) {
        element.put(bytes);
    }
    bytes
}

/// The elements of bytes, copied; what is left of the last element is dropped.
pub(crate) fn from_bytes<T: TensorElement>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::get).collect()
}
