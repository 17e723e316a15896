//! Encodes the header of a safetensors image.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{DType, Dims, FormatError};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::dtype::{dtype_name, packing, rank};
use super::header::{Header, PREFIX_LEN, TensorInfo};

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsItem {
    /// Its name.
    pub name: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Dims,
}

/// A header, ready to be written in front of the tensors' bytes.
#[derive(Clone, Debug)]
pub struct EncodedHeader {
    /// Length, JSON text and padding to a multiple of 8 bytes.
    pub bytes: Bytes,
    /// The positions of the items, in the order of their bytes.
    pub order: Vec<usize>,
    /// The parsed header.
    pub header: Header,
    /// The size of the whole image in bytes.
    pub byte_len: u64,
}

/// Lays out an image as the safetensors library (0.8) does: tensors by dtype, large alignments
/// first, then by name; `__metadata__` in the given order.
///
/// Loaders that dispatch on it need `("format", "pt")` in the metadata.
///
/// # Errors
///
/// When the format has no name for a dtype, a name occurs twice or is `__metadata__`, or the size
/// exceeds `u64`.
pub fn encode_header(
    items: &[SafetensorsItem],
    metadata: &IndexMap<String, String>,
) -> Result<EncodedHeader, FormatError> {
    let bad = |name: &str, problem: &str| {
        FormatError::new("safetensors header", format!("{name:?} {problem}"))
    };
    let mut sorted: Vec<_> = items.iter().enumerate().collect();
    sorted.sort_by(|(_, a), (_, b)| {
        rank(b.dtype).cmp(&rank(a.dtype)).then_with(|| a.name.cmp(&b.name))
    });
    let mut json = Map::new();
    if !metadata.is_empty() {
        json.insert("__metadata__".into(), json!(metadata));
    }
    let mut tensors = IndexMap::new();
    let mut at = 0_u64;
    for (_, item) in &sorted {
        let Some(dtype) = dtype_name(item.dtype) else {
            return Err(bad(&item.name, &format!("is {}, which it cannot hold", item.dtype)));
        };
        let end = item
            .shape
            .checked_volume()
            .and_then(|volume| volume.checked_mul(item.dtype.size() as u64))
            .and_then(|byte_len| byte_len.checked_add(at))
            .ok_or_else(|| bad(&item.name, "ends behind 2^64 bytes"))?;
        let mut shape = item.shape.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = last
                .checked_mul(packing(item.dtype))
                .ok_or_else(|| bad(&item.name, "has an axis beyond 2^64"))?;
        } else if packing(item.dtype) > 1 {
            return Err(bad(&item.name, "packs values but has no axis"));
        }
        let value = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] });
        if &*item.name == "__metadata__" || json.insert(item.name.to_string(), value).is_some() {
            return Err(bad(&item.name, "is taken"));
        }
        let info = TensorInfo { dtype: item.dtype, shape: item.shape.clone(), byte_range: at..end };
        tensors.insert(Arc::clone(&item.name), info);
        at = end;
    }
    let mut text = Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    let byte_len = at
        .checked_add(PREFIX_LEN + text.len() as u64)
        .ok_or_else(|| FormatError::new("safetensors header", "the image exceeds 2^64 bytes"))?;
    Ok(EncodedHeader {
        bytes: bytes.into(),
        order: sorted.into_iter().map(|(index, _)| index).collect(),
        header: Header::from_parts(tensors, metadata.clone()),
        byte_len,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{PREFIX_LEN, header_len};
    use super::*;

    fn item() -> impl Strategy<Value = (DType, Vec<u64>)> {
        let dtypes: Vec<_> =
            DType::ALL.iter().copied().filter(|dtype| dtype_name(*dtype).is_some()).collect();
        (prop::sample::select(dtypes), prop::collection::vec(0..6_u64, 1..4))
    }

    proptest! {
        #[test]
        fn headers_come_back(all in prop::collection::vec(item(), 0..12)) {
            let items: Vec<_> = all
                .into_iter()
                .enumerate()
                .map(|(index, (dtype, shape))| SafetensorsItem {
                    name: format!("layer\"{index}\u{e9}").into(),
                    dtype,
                    shape: shape.into(),
                })
                .collect();
            let metadata = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
            let encoded = encode_header(&items, &metadata).unwrap();
            prop_assert_eq!(encoded.bytes.len() % 8, 0);
            let json_len = header_len(&encoded.bytes, encoded.byte_len).unwrap();
            prop_assert_eq!(PREFIX_LEN + json_len, encoded.bytes.len() as u64);
            let data_len = encoded.byte_len - encoded.bytes.len() as u64;
            let parsed = Header::parse(&encoded.bytes[8..], data_len).unwrap();
            prop_assert_eq!(parsed, encoded.header);
        }
    }

    #[test]
    fn types_come_in_the_order_of_the_library_then_names() {
        let item =
            |name: &str, dtype| SafetensorsItem { name: name.into(), dtype, shape: [2].into() };
        let items = [
            item("z", DType::Float32),
            item("b", DType::Bool),
            item("a", DType::Float32),
            item("c", DType::Int64),
        ];
        let encoded = encode_header(&items, &IndexMap::new()).unwrap();
        assert_eq!(encoded.order, [3, 2, 0, 1]);
        assert!(encode_header(&[item("x", DType::Complex128)], &IndexMap::new()).is_err());
        let twice = [item("x", DType::Bool), item("x", DType::Bool)];
        assert!(encode_header(&twice, &IndexMap::new()).is_err());
    }
}
