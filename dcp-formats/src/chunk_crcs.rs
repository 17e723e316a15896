//! Checksums of chunks as one byte string: a checkpoint may have millions.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes of an offset and a CRC-32.
const ITEM: usize = 12;

/// The CRC-32s of the elements of a file's chunks, and of its encoded objects before compression, by
/// the offset of their stored item.
///
/// In CBOR they are a byte string: for each chunk 8 bytes of its offset and 4 of its CRC-32, in
/// little-endian order, by increasing offsets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkCrcs(Vec<(u64, u32)>);

impl ChunkCrcs {
    pub(crate) fn new(mut chunks: Vec<(u64, u32)>) -> Self {
        chunks.sort_unstable();
        chunks.dedup_by_key(|(byte_offset, _)| *byte_offset);
        Self(chunks)
    }

    /// The CRC-32 of the chunk whose stored item begins at this byte of the file.
    #[must_use]
    pub fn at(&self, byte_offset: u64) -> Option<u32> {
        let at = self.0.binary_search_by_key(&byte_offset, |(start, _)| *start).ok()?;
        self.0.get(at).map(|(_, crc32)| *crc32)
    }

    /// The number of chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for ChunkCrcs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = Vec::with_capacity(self.0.len() * ITEM);
        for (byte_offset, crc32) in &self.0 {
            bytes.extend_from_slice(&byte_offset.to_le_bytes());
            bytes.extend_from_slice(&crc32.to_le_bytes());
        }
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for ChunkCrcs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(Packed)
    }
}

struct Packed;

impl Visitor<'_> for Packed {
    type Value = ChunkCrcs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a byte string of offsets and checksums")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<ChunkCrcs, E> {
        let (items, rest) = bytes.as_chunks::<ITEM>();
        if !rest.is_empty() {
            return Err(E::custom("the checksums of chunks end in the middle of one"));
        }
        let item = |[a, b, c, d, e, f, g, h, i, j, k, l]: &[u8; ITEM]| {
            let byte_offset = u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]);
            (byte_offset, u32::from_le_bytes([*i, *j, *k, *l]))
        };
        let chunks: Vec<_> = items.iter().map(item).collect();
        if !chunks.is_sorted_by(|(one, _), (other, _)| one < other) {
            return Err(E::custom("the offsets of chunks do not increase"));
        }
        Ok(ChunkCrcs(chunks))
    }

    fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<ChunkCrcs, E> {
        self.visit_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use ciborium::Value;

    use super::*;

    fn decoded(bytes: Vec<u8>) -> Result<ChunkCrcs, ciborium::value::Error> {
        Value::Bytes(bytes).deserialized()
    }

    #[test]
    fn bad_byte_strings_are_refused() {
        let good = ChunkCrcs::new(vec![(7, 1), (0, 2), (7, 3)]);
        let Value::Bytes(bytes) = Value::serialized(&good).unwrap() else { panic!() };
        assert_eq!(decoded(bytes.clone()).unwrap(), good);
        assert_eq!((good.len(), good.at(7)), (2, Some(1)));
        assert!(decoded(bytes[..bytes.len() - 1].to_vec()).is_err());
        let swapped = [&bytes[ITEM..], &bytes[..ITEM]].concat();
        assert!(decoded(swapped).is_err());
        let twice = [&bytes[..ITEM], &bytes[..ITEM]].concat();
        assert!(decoded(twice).is_err());
        assert!(Value::Text("x".to_owned()).deserialized::<ChunkCrcs>().is_err());
    }
}
