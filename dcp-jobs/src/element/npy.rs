//! NumPy's `.npy` files, version 1.0 of the format.

use bytes::Bytes;
use dcp_core::{DType, FormatError};

/// The representation of a dtype in a file of NumPy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpyType {
    /// NumPy's type string, such as `<f4`.
    pub descr: &'static str,
    /// Whether NumPy has the dtype. If not, the array holds the bits as unsigned integers.
    pub exact: bool,
}

/// NumPy's type for `dtype`.
#[must_use]
pub fn npy_type(dtype: DType) -> NpyType {
    let exact = |descr| NpyType { descr, exact: true };
    match dtype {
        DType::Float64 => exact("<f8"),
        DType::Float32 => exact("<f4"),
        DType::Float16 => exact("<f2"),
        DType::Int64 => exact("<i8"),
        DType::Int32 => exact("<i4"),
        DType::Int16 => exact("<i2"),
        DType::Int8 => exact("|i1"),
        DType::UInt64 => exact("<u8"),
        DType::UInt32 => exact("<u4"),
        DType::UInt16 => exact("<u2"),
        DType::UInt8 => exact("|u1"),
        DType::Bool => exact("|b1"),
        DType::Complex128 => exact("<c16"),
        DType::Complex64 => exact("<c8"),
        other => NpyType {
            descr: match other.size() {
                1 => "|u1",
                2 => "<u2",
                4 => "<u4",
                _ => "<u8",
            },
            exact: false,
        },
    }
}

/// The header of a `.npy` file for a row-major array of `shape`, padded to a multiple of 64 bytes.
///
/// # Errors
///
/// When the shape has so many axes that the header exceeds the format's 64 KiB.
pub fn npy_header(dtype: DType, shape: &[u64]) -> Result<Bytes, FormatError> {
    const PREFIX: usize = 10;
    let shape = match shape {
        [one] => format!("({one},)"),
        many => {
            let sizes: Vec<_> = many.iter().map(ToString::to_string).collect();
            format!("({})", sizes.join(", "))
        }
    };
    let descr = npy_type(dtype).descr;
    let mut text =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}").into_bytes();
    let padded = (PREFIX + text.len() + 1).next_multiple_of(64) - PREFIX;
    text.resize(padded - 1, b' ');
    text.push(b'\n');
    let len = u16::try_from(text.len())
        .map_err(|_| FormatError::new("npy header", "the shape has too many axes"))?;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend_from_slice(&len.to_le_bytes());
    header.extend_from_slice(&text);
    Ok(header.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_as_numpy_writes_them() {
        let header = npy_header(DType::Float32, &[3, 4]).unwrap();
        assert_eq!(header.len(), 128);
        assert!(header.starts_with(
            b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
        ));
        assert!(header.ends_with(b" \n"));
        let text = |shape: &[u64]| {
            String::from_utf8_lossy(&npy_header(DType::Bool, shape).unwrap()[10..]).into_owned()
        };
        assert!(text(&[5]).contains("'shape': (5,), "));
        assert!(text(&[]).contains("'shape': (), "));
    }

    #[test]
    fn types_that_numpy_lacks_keep_their_size() {
        for &dtype in DType::ALL {
            let NpyType { descr, .. } = npy_type(dtype);
            assert_eq!(descr[2..].parse::<usize>().unwrap(), dtype.size(), "{dtype}");
        }
        assert!(!npy_type(DType::BFloat16).exact);
        assert!(npy_header(DType::Bool, &vec![1; 40_000]).is_err());
    }
}
