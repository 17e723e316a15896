//! Element types by the names that safetensors gives them.

use dcp_core::DType;

/// Names of safetensors 0.8, ours, and the type's alignment class in bits by which the library
/// orders a file.
const NAMES: &[(&str, DType, u8)] = &[
    ("BOOL", DType::Bool, 8),
    ("F4", DType::Float4E2M1FnX2, 4),
    ("U8", DType::UInt8, 8),
    ("I8", DType::Int8, 8),
    ("F8_E5M2", DType::Float8E5M2, 8),
    ("F8_E4M3", DType::Float8E4M3Fn, 8),
    ("F8_E8M0", DType::Float8E8M0Fnu, 8),
    ("F8_E4M3FNUZ", DType::Float8E4M3FnUz, 8),
    ("F8_E5M2FNUZ", DType::Float8E5M2FnUz, 8),
    ("I16", DType::Int16, 16),
    ("U16", DType::UInt16, 16),
    ("F16", DType::Float16, 16),
    ("BF16", DType::BFloat16, 16),
    ("I32", DType::Int32, 32),
    ("U32", DType::UInt32, 32),
    ("F32", DType::Float32, 32),
    ("C64", DType::Complex64, 64),
    ("F64", DType::Float64, 64),
    ("I64", DType::Int64, 64),
    ("U64", DType::UInt64, 64),
];

/// The name of an element type, or `None` where the format has none, as for `complex128`.
#[must_use]
pub fn dtype_name(dtype: DType) -> Option<&'static str> {
    NAMES.iter().find(|(_, known, _)| *known == dtype).map(|(name, ..)| *name)
}

/// The element type of that name.
#[must_use]
pub fn parse_dtype(name: &str) -> Option<DType> {
    NAMES.iter().find(|(known, ..)| *known == name).map(|(_, dtype, _)| *dtype)
}

/// Elements of the format per element of ours along the last axis: shapes of packed types count
/// single values there, bytes here.
pub(super) fn packing(dtype: DType) -> u64 {
    if dtype == DType::Float4E2M1FnX2 { 2 } else { 1 }
}

/// Where tensors of the type come in a file: the library puts large alignments first.
pub(super) fn rank(dtype: DType) -> u8 {
    NAMES.iter().find(|(_, known, _)| *known == dtype).map_or(0, |(.., bits)| *bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_types_are_one_to_one() {
        for (name, dtype, _) in NAMES {
            assert_eq!(parse_dtype(name), Some(*dtype));
            assert_eq!(dtype_name(*dtype), Some(*name));
        }
        assert_eq!(dtype_name(DType::Complex128), None);
        assert_eq!(parse_dtype("F6_E2M3"), None);
    }
}
