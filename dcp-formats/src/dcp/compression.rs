//! The compression of the items of a file, or another transform of them, in builds with and without zstd.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::FormatError;
use dcp_core::format::{StreamEncoder, StreamTransform};
use dcp_core::metadata::{Encoding, Layout};

#[cfg(feature = "zstd")]
use super::zstd_encoder::{Zstd, frame_len_max};
use crate::expansion::ItemKind;
use crate::upload::ItemEncoder;

/// The compression of a writer.
#[derive(Clone, Default)]
pub(super) enum Compression {
    #[default]
    None,
    #[cfg(feature = "zstd")]
    Zstd(Zstd),
    Transform(Arc<dyn StreamTransform>),
}

impl Compression {
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// The name and version in the index; `None` for no compression.
    fn descriptor(&self) -> Option<Arc<str>> {
        match self {
            Self::None => None,
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => Some("stream.zstd/1".into()),
            Self::Transform(of) => Some(format!("{}/{}", of.name(), of.version()).into()),
        }
    }

    /// The encodings of items: first the usual one, then that of items that are not compressed.
    pub(super) fn encodings(&self) -> Vec<Encoding> {
        let Some(descriptor) = self.descriptor() else { return vec![Encoding::default()] };
        let coded = Encoding::new(Layout::TorchArchive).with_transforms([descriptor]);
        vec![coded, Encoding::default()]
    }

    /// The position in [`encodings`](Self::encodings) of the encoding of an item of `byte_len` bytes.
    /// Items that no reader would decompress are not compressed; those of a plug-in's transform all go through it,
    /// because an item that is not encrypted is no reasonable substitute.
    pub(super) fn encoding_of(&self, kind: ItemKind, byte_len: u64) -> u16 {
        match self {
            Self::None | Self::Transform(_) => {
                let _ = (kind, byte_len);
                0
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => kind.stored_min(byte_len).is_none().into(),
        }
    }

    /// A number that differs between settings, and is 0 for none.
    pub(super) fn fingerprint(&self) -> u64 {
        match self {
            Self::None => 0,
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => zstd.fingerprint(),
            Self::Transform(_) => {
                let descriptor = self.descriptor().unwrap_or_default();
                u64::from(crc32fast::hash(descriptor.as_bytes())) << 1 | 1
            }
        }
    }

    /// The maximum stored length of an item of `byte_len` bytes.
    pub(super) fn byte_len_max(&self, byte_len: u64) -> u64 {
        match self {
            Self::None => byte_len,
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => frame_len_max(byte_len),
            Self::Transform(of) => of.stored_max(byte_len),
        }
    }

    /// The encoder of a file whose items have the kinds and lengths that `items` returns.
    pub(super) fn encoder(
        &self,
        items: impl FnOnce() -> Vec<(ItemKind, u64)>,
    ) -> Option<Box<dyn ItemEncoder>> {
        match self {
            Self::None => {
                drop(items);
                None
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => Some(Box::new(zstd.encoder(items()))),
            Self::Transform(of) => {
                let lens = items().into_iter().map(|(_, byte_len)| byte_len).collect();
                Some(Box::new(TransformedItems { lens, encoder: of.encoder() }))
            }
        }
    }
}

impl PartialEq for Compression {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }
}

impl fmt::Debug for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => zstd.fmt(f),
            _ => f.write_str(self.descriptor().as_deref().unwrap_or("None")),
        }
    }
}

/// The items of a file, through the encoder of a plug-in.
struct TransformedItems {
    /// Their lengths before that, in bytes.
    lens: Vec<u64>,
    encoder: Box<dyn StreamEncoder>,
}

impl ItemEncoder for TransformedItems {
    fn begin(&mut self, position: usize) -> Result<(), FormatError> {
        let Some(len) = self.lens.get(position) else {
            return Err(FormatError::new("stream transform", "no such item was announced"));
        };
        self.encoder.begin(*len)
    }

    fn push(&mut self, bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        self.encoder.push(bytes, out)
    }

    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        self.encoder.finish(out)
    }
}

#[cfg(all(test, feature = "zstd"))]
mod tests {
    use super::*;

    #[test]
    fn an_object_that_no_reader_decompresses_is_not_compressed() {
        let zstd = Compression::Zstd(Zstd::new());
        let encoding = |kind, byte_len| {
            zstd.encodings()[usize::from(zstd.encoding_of(kind, byte_len))].clone()
        };
        for (kind, byte_len) in [(ItemKind::Object, 1 << 30), (ItemKind::Chunk, 1 << 40)] {
            assert_eq!(encoding(kind, byte_len), zstd.encodings()[0]);
        }
        assert_eq!(encoding(ItemKind::Object, (1 << 30) + 1), Encoding::default());
    }
}
