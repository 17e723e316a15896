//! Transforms of the bytes of stored items, as plug-ins.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::FormatError;

/// A transform of the bytes of each stored item, such as encryption or a compression that is not built in: the
/// `StreamTransformExtension` of PyTorch 2.7 and later.
///
/// The index names it with every item, as `name/version`. A reader undoes it where it is
/// [registered](super::FormatRegistry::with_transform), and refuses the item by that name where it is not. A transform
/// changes items and not files, so a reader still reads the items that it needs, each of them whole.
pub trait StreamTransform: fmt::Debug + Send + Sync + 'static {
    /// Its name in the index, such as `stream.lz4` or `encrypted@example.org`, without a `/`.
    fn name(&self) -> &str;

    /// The version of what it writes, such as `1`.
    fn version(&self) -> &str;

    /// The maximum number of bytes that an item of `byte_len` bytes is stored in.
    fn stored_max(&self, byte_len: u64) -> u64;

    /// An encoder of the items of one file.
    fn encoder(&self) -> Box<dyn StreamEncoder>;

    /// Returns the item of at most `limit` bytes that `stored` was made of, by this transform in the version that the
    /// index names. The bytes are of anyone: they are damaged, or made to use much memory.
    ///
    /// # Errors
    ///
    /// For a version that it does not know, bytes that it did not write, and an item above the limit.
    fn undo(&self, stored: &[u8], version: &str, limit: u64) -> Result<Vec<u8>, FormatError>;
}

/// Transforms the items of a file, one after the other.
pub trait StreamEncoder: Send {
    /// Begins an item of `byte_len` bytes.
    ///
    /// # Errors
    ///
    /// When the item cannot be transformed. The save then fails, as for the other methods.
    fn begin(&mut self, byte_len: u64) -> Result<(), FormatError>;

    /// Transforms the next bytes of the item, and passes on what is to be stored.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    fn push(&mut self, bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError>;

    /// Ends the item, and passes on the rest of what is to be stored.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError>;
}

/// The registered transforms, by their names: the `ExtensionRegistry` of PyTorch.
#[derive(Clone, Debug, Default)]
pub struct StreamTransforms {
    transforms: Vec<Arc<dyn StreamTransform>>,
}

impl StreamTransforms {
    /// Adds a transform, or replaces the one of the same name.
    pub fn register(&mut self, transform: Arc<dyn StreamTransform>) {
        self.transforms.retain(|known| known.name() != transform.name());
        self.transforms.push(transform);
    }

    /// The transform of that name.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&Arc<dyn StreamTransform>> {
        self.transforms.iter().find(|known| known.name() == name)
    }

    /// Whether none is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transforms.is_empty()
    }
}

impl PartialEq for StreamTransforms {
    /// Whether both have the same objects, since transforms of one name may have other keys.
    fn eq(&self, other: &Self) -> bool {
        let pairs = || self.transforms.iter().zip(&other.transforms);
        self.transforms.len() == other.transforms.len() && pairs().all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

impl Eq for StreamTransforms {}
