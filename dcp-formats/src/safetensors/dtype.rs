//! The names of dtypes in safetensors.

use dcp_core::DType;

/// Names of safetensors 0.8 and our dtypes, in the order of the library's list.
const NAMES: &[(&str, DType)] = &[
    ("BOOL", DType::Bool),
    ("F4", DType::Float4E2M1FnX2),
    ("U8", DType::UInt8),
    ("I8", DType::Int8),
    ("F8_E5M2", DType::Float8E5M2),
    ("F8_E4M3", DType::Float8E4M3Fn),
    ("F8_E8M0", DType::Float8E8M0Fnu),
    ("F8_E4M3FNUZ", DType::Float8E4M3FnUz),
    ("F8_E5M2FNUZ", DType::Float8E5M2FnUz),
    ("I16", DType::Int16),
    ("U16", DType::UInt16),
    ("F16", DType::Float16),
    ("BF16", DType::BFloat16),
    ("I32", DType::Int32),
    ("U32", DType::UInt32),
    ("F32", DType::Float32),
    ("C64", DType::Complex64),
    ("F64", DType::Float64),
    ("I64", DType::Int64),
    ("U64", DType::UInt64),
];

/// The name of a dtype; `None` if the format has none, as for `complex128`.
#[must_use]
pub fn dtype_name(dtype: DType) -> Option<&'static str> {
    NAMES.iter().find(|(_, known)| *known == dtype).map(|(name, _)| *name)
}

/// The dtype of that name.
#[must_use]
pub fn parse_dtype(name: &str) -> Option<DType> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
}

/// Elements of the format per element of ours along the last axis: shapes of packed dtypes count
/// single values there, and bytes here.
pub(super) fn packing(dtype: DType) -> u64 {
    if dtype == DType::Float4E2M1FnX2 { 2 } else { 1 }
}

/// The sort key of the dtype in a file. The library writes the last types of its list first, so
/// that large alignments precede small ones.
pub(super) fn rank(dtype: DType) -> usize {
    NAMES.iter().position(|(_, known)| *known == dtype).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_types_are_one_to_one() {
        for (name, dtype) in NAMES {
            assert_eq!(parse_dtype(name), Some(*dtype));
            assert_eq!(dtype_name(*dtype), Some(*name));
        }
        assert_eq!(dtype_name(DType::Complex128), None);
        assert_eq!(parse_dtype("F6_E2M3"), None);
    }
}
