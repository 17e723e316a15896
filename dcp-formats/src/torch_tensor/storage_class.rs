//! The storage classes that represent dtypes in pickles.

use dcp_core::DType;

/// Classes of module `torch`; tensors of all other dtypes use an untyped storage.
const TYPED: &[(DType, &str)] = &[
    (DType::Float64, "DoubleStorage"),
    (DType::Float32, "FloatStorage"),
    (DType::Float16, "HalfStorage"),
    (DType::BFloat16, "BFloat16Storage"),
    (DType::Int64, "LongStorage"),
    (DType::Int32, "IntStorage"),
    (DType::Int16, "ShortStorage"),
    (DType::Int8, "CharStorage"),
    (DType::UInt8, "ByteStorage"),
    (DType::Bool, "BoolStorage"),
    (DType::Complex64, "ComplexFloatStorage"),
    (DType::Complex128, "ComplexDoubleStorage"),
    (DType::QInt8, "QInt8Storage"),
    (DType::QUInt8, "QUInt8Storage"),
    (DType::QInt32, "QInt32Storage"),
    (DType::QUInt4x2, "QUInt4x2Storage"),
    (DType::QUInt2x4, "QUInt2x4Storage"),
];

/// The element type of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StorageClass {
    Typed(DType),
    /// Bytes; the pickle gives the dtype elsewhere.
    Untyped,
}

impl StorageClass {
    /// The class that PyTorch writes for a dtype.
    pub(super) fn of(dtype: DType) -> Self {
        match TYPED.iter().find(|(typed, _)| *typed == dtype) {
            Some(_) => Self::Typed(dtype),
            None => Self::Untyped,
        }
    }

    pub(super) fn from_global(module: &str, name: &str) -> Option<Self> {
        if name == "UntypedStorage" && matches!(module, "torch.storage" | "torch") {
            return Some(Self::Untyped);
        }
        if !matches!(module, "torch" | "torch.cuda") {
            return None;
        }
        TYPED.iter().find(|(_, class)| *class == name).map(|(dtype, _)| Self::Typed(*dtype))
    }

    pub(super) fn global(self) -> (&'static str, &'static str) {
        match self {
            Self::Typed(dtype) => {
                let class = TYPED.iter().find(|(typed, _)| *typed == dtype);
                ("torch", class.map_or("UntypedStorage", |(_, class)| class))
            }
            Self::Untyped => ("torch.storage", "UntypedStorage"),
        }
    }

    pub(super) fn element_size(self) -> u64 {
        match self {
            Self::Typed(dtype) => dtype.size() as u64,
            Self::Untyped => 1,
        }
    }
}
