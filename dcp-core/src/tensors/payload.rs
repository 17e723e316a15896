//! Bytes to write, as a list of pieces.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

/// Bytes to write, as a gather list: pieces in order, without a copy to join them.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    pieces: Arc<[Bytes]>,
    len: u64,
    crc32: Option<u32>,
}

impl Payload {
    /// The total length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the CRC-32 of all bytes, so that a writer that needs it does not compute it. A wrong one
    /// ends up in the file.
    #[must_use]
    pub fn with_crc32(mut self, crc32: u32) -> Self {
        self.crc32 = Some(crc32);
        self
    }

    /// The CRC-32 of all bytes, if it is known. A [`slice`](Self::slice) has none.
    #[must_use]
    pub fn crc32(&self) -> Option<u32> {
        self.crc32
    }

    /// The pieces, in order; none is empty.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }

    /// The bytes in `range`, sharing memory, clamped to the end.
    #[must_use]
    pub fn slice(&self, range: Range<u64>) -> Payload {
        let mut start = 0_u64;
        let mut pieces = Vec::new();
        for piece in &*self.pieces {
            let end = start + piece.len() as u64;
            let (from, to) = (range.start.max(start), range.end.min(end));
            if from < to {
                // Both are within the piece, whose length is a `usize`.
                pieces.push(piece.slice((from - start) as usize..(to - start) as usize));
            }
            start = end;
        }
        pieces.into()
    }

    /// All bytes as one buffer; free for a single piece, a copy otherwise.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &*self.pieces {
            [] => Bytes::new(),
            [one] => one.clone(),
            many => many.concat().into(),
        }
    }
}

impl FromIterator<Bytes> for Payload {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        let pieces: Arc<[Bytes]> = pieces.into_iter().filter(|p| !p.is_empty()).collect();
        let len = pieces.iter().map(|p| p.len() as u64).sum();
        Self { pieces, len, crc32: None }
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self::from_iter([bytes])
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::from(Bytes::from(bytes))
    }
}

impl From<Vec<Bytes>> for Payload {
    fn from(pieces: Vec<Bytes>) -> Self {
        pieces.into_iter().collect()
    }
}

impl From<&'static [u8]> for Payload {
    fn from(bytes: &'static [u8]) -> Self {
        Self::from(Bytes::from_static(bytes))
    }
}

impl From<&'static str> for Payload {
    fn from(text: &'static str) -> Self {
        Self::from(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cross_pieces_and_share_memory() {
        let payload = Payload::from(vec![
            Bytes::from_static(b"abc"),
            Bytes::new(),
            Bytes::from_static(b"defg"),
        ]);
        assert_eq!((payload.len(), payload.pieces().len()), (7, 2));
        assert_eq!(payload.slice(2..5).to_bytes(), b"cde"[..]);
        assert_eq!(payload.slice(3..4).to_bytes(), b"d"[..]);
        assert_eq!(payload.slice(5..99).to_bytes(), b"fg"[..]);
        assert!(payload.slice(4..4).is_empty());
        assert_eq!(payload.clone().with_crc32(5).slice(1..7).crc32(), None);
        let whole = payload.slice(0..7);
        assert_eq!(whole.pieces()[1].as_ptr(), payload.pieces()[1].as_ptr());
    }
}
