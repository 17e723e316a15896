//! The compression of the items of a file, in builds with and without zstd.

use dcp_core::metadata::Encoding;
#[cfg(feature = "zstd")]
use dcp_core::metadata::Layout;

#[cfg(feature = "zstd")]
use super::zstd_encoder::{Zstd, frame_len_max};
use crate::expansion::ItemKind;
use crate::upload::ItemEncoder;

/// The compression of a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Compression {
    #[default]
    None,
    #[cfg(feature = "zstd")]
    Zstd(Zstd),
}

impl Compression {
    /// The encodings of items: first the usual one, then that of items that are not compressed.
    pub(super) fn encodings(self) -> Vec<Encoding> {
        match self {
            Self::None => vec![Encoding::default()],
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => {
                let zstd = Encoding::new(Layout::TorchArchive);
                vec![zstd.with_transforms(["stream.zstd/1".into()]), Encoding::default()]
            }
        }
    }

    /// The position in [`encodings`](Self::encodings) of the encoding of an item of `byte_len` bytes.
    /// Items that no reader would decompress are not compressed.
    pub(super) fn encoding_of(self, kind: ItemKind, byte_len: u64) -> u16 {
        match self {
            Self::None => {
                let _ = (kind, byte_len);
                0
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => kind.stored_min(byte_len).is_none().into(),
        }
    }

    /// A number that differs between settings, and is 0 for none.
    pub(super) fn fingerprint(self) -> u64 {
        match self {
            Self::None => 0,
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => zstd.fingerprint(),
        }
    }

    /// The maximum stored length of an item of `byte_len` bytes.
    pub(super) fn byte_len_max(self, byte_len: u64) -> u64 {
        match self {
            Self::None => byte_len,
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => frame_len_max(byte_len),
        }
    }

    /// The encoder of a file whose items have the kinds and lengths that `items` returns.
    pub(super) fn encoder(
        self,
        items: impl FnOnce() -> Vec<(ItemKind, u64)>,
    ) -> Option<Box<dyn ItemEncoder>> {
        match self {
            Self::None => {
                drop(items);
                None
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => Some(Box::new(zstd.encoder(items()))),
        }
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
