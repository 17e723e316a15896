//! How the items of a file are compressed, in builds with and without zstd.

use dcp_core::metadata::Encoding;
#[cfg(feature = "zstd")]
use dcp_core::metadata::Layout;

#[cfg(feature = "zstd")]
use super::zstd_encoder::{Zstd, frame_len_max};
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
    /// The encoding of items.
    pub(super) fn encoding(self) -> Encoding {
        match self {
            Self::None => Encoding::default(),
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => {
                Encoding::new(Layout::TorchArchive).with_transforms(["stream.zstd/1".into()])
            }
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

    /// The encoder of a file whose items have the lengths that `lens` returns.
    pub(super) fn encoder(self, lens: impl FnOnce() -> Vec<u64>) -> Option<Box<dyn ItemEncoder>> {
        match self {
            Self::None => {
                drop(lens);
                None
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(zstd) => Some(Box::new(zstd.encoder(lens()))),
        }
    }
}
