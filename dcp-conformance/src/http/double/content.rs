//! The bytes of an object, in the pieces in which they arrived.

use std::io;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use crc32fast::Hasher;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};

use crate::http::server::Body;

/// Bytes that are never copied: not when they arrive, not when parts become an object, and not when
/// a range is sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    pieces: Vec<Bytes>,
    len: usize,
    crc: Hasher,
}

impl Content {
    /// The body of a request.
    pub(super) async fn receive(mut body: Incoming) -> io::Result<Self> {
        let mut content = Self::default();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
                content.crc.update(&data);
                content.len += data.len();
                content.pieces.push(data);
            }
        }
        Ok(content)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn append(&mut self, other: &Self) {
        self.pieces.extend_from_slice(&other.pieces);
        self.len += other.len;
        self.crc.combine(&other.crc);
    }

    /// Of the bytes alone, as the real ones mostly are. In quotes.
    pub(super) fn etag(&self) -> String {
        format!("\"{:08x}{:016x}\"", self.crc.clone().finalize(), self.len)
    }

    /// A range to send, which has no ETag.
    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        let (mut pieces, mut start) = (Vec::new(), 0);
        for piece in &self.pieces {
            let (from, to) = (range.start.max(start), range.end.min(start + piece.len()));
            if from < to {
                pieces.push(piece.slice(from - start..to - start));
            }
            start += piece.len();
        }
        let len = pieces.iter().map(Bytes::len).sum();
        Self { pieces, len, crc: Hasher::new() }
    }

    pub(super) fn to_bytes(&self) -> Bytes {
        match &*self.pieces {
            [] => Bytes::new(),
            [piece] => piece.clone(),
            pieces => {
                let mut bytes = BytesMut::with_capacity(self.len);
                pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
                bytes.freeze()
            }
        }
    }

    /// The body of an answer.
    pub(super) fn into_body(mut self) -> Body {
        match self.pieces.len() {
            0 | 1 => {
                let piece = self.pieces.pop().unwrap_or_default();
                Full::new(piece).map_err(|never| match never {}).boxed()
            }
            _ => {
                let frames = self.pieces.into_iter().map(|piece| Ok(Frame::data(piece)));
                BodyExt::boxed(StreamBody::new(stream::iter(frames)))
            }
        }
    }
}

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Self {
        let mut crc = Hasher::new();
        crc.update(&bytes);
        Self { len: bytes.len(), pieces: vec![bytes], crc }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_one_content() {
        let mut content = Content::default();
        for piece in ["012", "", "34", "56789"] {
            content.append(&Content::from(Bytes::from(piece)));
        }
        assert_eq!(content.etag(), Content::from(Bytes::from("0123456789")).etag());
        for start in 0..=10 {
            for end in start..=10 {
                let slice = content.slice(start..end);
                assert_eq!(slice.to_bytes(), &b"0123456789"[start..end]);
                assert_eq!(slice.len(), end - start);
            }
        }
    }
}
