//! The index of a checkpoint: its contents and their placements. Every format reads into it and
//! writes from it.
//!
//! Chunks are stored in columns and names are interned, because a checkpoint of thousands of ranks
//! has millions of chunks. Element counts are per axis; file positions are in bytes.

mod chunk_table;
mod entry_name;
mod rename;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use indexmap::IndexMap;

pub use self::chunk_table::{ChunkRef, ChunkTable};
use crate::names::key::Key;
use crate::state::path::StatePath;
use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;

/// The index of a checkpoint: its tensors and objects by FQN, the placements of their bytes, and
/// the nesting of the flat names.
///
/// Entries keep the order of insertion, which a writer makes deterministic. An FQN can be any text,
/// even empty: never use one as a file name.
#[derive(Clone, Debug, Default)]
pub struct CheckpointMetadata {
    entries: IndexMap<Arc<str>, Entry>,
    files: Vec<Key>,
    file_ids: HashMap<Key, FileId>,
    encodings: Vec<Encoding>,
    provenance: Provenance,
}

/// The entry of one FQN.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Entry {
    /// A tensor, in chunks.
    Tensor(TensorEntry),
    /// Any other value, encoded as one object.
    Object(ObjectEntry),
}

/// A tensor in the checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorEntry {
    /// The element type.
    pub dtype: DType,
    /// The shape of the whole tensor.
    pub shape: Dims,
    /// Its chunks and their placements.
    pub chunks: ChunkTable,
    /// Its path in the nested state dict, if known.
    pub path: Option<StatePath>,
    /// The properties that PyTorch records of one rank's tensor.
    pub properties: TensorProperties,
}

/// An object in the checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ObjectEntry {
    /// The placement of its bytes; `None` in a checkpoint that lost them.
    pub placement: Option<Placement>,
    /// Its path in the nested state dict, if known.
    pub path: Option<StatePath>,
    /// The tensor that PyTorch sees in it, if it does. Advisory: not sent to other ranks.
    pub tensor: Option<Arc<WrappedTensor>>,
}

/// A tensor of a subclass, such as a quantized one of torchao: PyTorch reports a dtype and a shape
/// for it, but stores an object of several tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrappedTensor {
    /// The class, with its module.
    pub class: Arc<str>,
    /// The dtype that it reports.
    pub dtype: DType,
    /// The shape that it reports.
    pub shape: Dims,
}

impl WrappedTensor {
    /// A tensor of `class`.
    #[must_use]
    pub fn new(class: impl Into<Arc<str>>, dtype: DType, shape: impl Into<Dims>) -> Self {
        Self { class: class.into(), dtype, shape: shape.into() }
    }
}

/// Advisory properties in PyTorch's metadata. They describe one rank's local tensor and have no
/// effect on the data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorProperties {
    /// Whether autograd tracked the tensor.
    pub requires_grad: bool,
    /// Whether it was in pinned memory.
    pub pin_memory: bool,
    /// PyTorch's memory format: 0 contiguous, 1 channels last, 2 preserve.
    pub memory_format: u8,
    /// The local strides, in elements (torch 2.15 and later).
    pub strides: Option<Vec<i64>>,
}

/// The number of a file in one checkpoint's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(NonZeroU32);

impl FileId {
    /// The id of the `index`-th file.
    ///
    /// Returns `None` past 2^32 - 2 files.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Self> {
        u32::try_from(index).ok()?.checked_add(1).and_then(NonZeroU32::new).map(Self)
    }

    /// The position in [`CheckpointMetadata::files`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// The position of a chunk's or object's stored bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The file.
    pub file: FileId,
    /// The encoding: a position in [`CheckpointMetadata::encodings`].
    pub encoding: u16,
    /// The offset in the file.
    pub byte_offset: u64,
    /// The stored length, after all transforms.
    pub byte_len: u64,
}

/// The encoding of stored bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Encoding {
    /// The layout below all transforms.
    pub layout: Layout,
    /// Stream transforms in PyTorch's list order (`stream.zstd/1`), reversed last first.
    pub transforms: Vec<Arc<str>>,
}

impl Encoding {
    /// `layout` without transforms.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        Self { layout, transforms: Vec::new() }
    }

    /// Adds stream transforms.
    #[must_use]
    pub fn with_transforms(mut self, transforms: impl IntoIterator<Item = Arc<str>>) -> Self {
        self.transforms = transforms.into_iter().collect();
        self
    }
}

/// The layout of stored bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// A whole `torch.save` archive, as in PyTorch's `.distcp` files.
    #[default]
    TorchArchive,
    /// The elements themselves, row-major and little-endian, as in safetensors.
    Raw,
    /// Elements that a reader computes from another reader's, such as quantized ones; only that
    /// reader can decode them. The length differs from that of the elements.
    Computed,
    /// A part of a `torch.save` file that only the file's reader can extract: an object in its
    /// pickle, or a tensor that is gathered from a storage (by strides, inflated, with bytes
    /// swapped or signs flipped). The range is the whole pickle or storage, so several items may
    /// share one.
    TorchSave,
}

impl Layout {
    /// Whether placement, dtype and shape determine a tensor's elements. False when the placement
    /// is that of a storage of which each tensor takes other elements.
    #[must_use]
    pub fn is_fixed_by_place(self) -> bool {
        self != Self::TorchSave
    }
}

/// The origin of a checkpoint; informational, never trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Provenance {
    /// The format's name here, such as `torch_dcp`.
    pub format: Option<Arc<str>>,
    /// The version that the format claims.
    pub version: Option<Arc<str>>,
    /// The path or URL of its first save.
    pub checkpoint_id: Option<Arc<str>>,
    /// The id of the save.
    pub save_id: Option<Arc<str>>,
    /// Further texts that its writer stored with it, by name, such as `__metadata__` of safetensors.
    pub annotations: Arc<[(Arc<str>, Arc<str>)]>,
}

impl CheckpointMetadata {
    /// An empty checkpoint.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of FQNs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry of `fqn`.
    #[must_use]
    pub fn get(&self, fqn: &str) -> Option<&Entry> {
        self.entries.get(fqn)
    }

    /// The entry of `fqn`, mutable.
    #[must_use]
    pub fn get_mut(&mut self, fqn: &str) -> Option<&mut Entry> {
        self.entries.get_mut(fqn)
    }

    /// The entry at a position.
    #[must_use]
    pub fn at(&self, index: usize) -> Option<(&Arc<str>, &Entry)> {
        self.entries.get_index(index)
    }

    /// The entry at a position, mutable.
    #[must_use]
    pub fn at_mut(&mut self, index: usize) -> Option<(&Arc<str>, &mut Entry)> {
        self.entries.get_index_mut(index)
    }

    /// The position of `fqn`.
    #[must_use]
    pub fn index_of(&self, fqn: &str) -> Option<usize> {
        self.entries.get_index_of(fqn)
    }

    /// All entries in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &Entry)> {
        self.entries.iter()
    }

    /// Adds or replaces an entry and returns its position.
    pub fn insert(&mut self, fqn: impl Into<Arc<str>>, entry: Entry) -> usize {
        self.entries.insert_full(fqn.into(), entry).0
    }

    /// Keeps only the entries that `keep` accepts, in their order.
    pub fn retain(&mut self, mut keep: impl FnMut(&str, &Entry) -> bool) {
        self.entries.retain(|fqn, entry| keep(fqn, entry));
    }

    /// The files that placements refer to, by [`FileId::index`].
    #[must_use]
    pub fn files(&self) -> &[Key] {
        &self.files
    }

    /// The name of a file.
    #[must_use]
    pub fn file(&self, id: FileId) -> Option<&Key> {
        self.files.get(id.index())
    }

    /// The id of the file of that name, which is added if it is new.
    ///
    /// Returns `None` past 2^32 - 2 files.
    pub fn intern_file(&mut self, key: &Key) -> Option<FileId> {
        if let Some(id) = self.file_ids.get(key) {
            return Some(*id);
        }
        let id = FileId::from_index(self.files.len())?;
        self.files.push(key.clone());
        self.file_ids.insert(key.clone(), id);
        Some(id)
    }

    /// The encodings that placements refer to.
    #[must_use]
    pub fn encodings(&self) -> &[Encoding] {
        &self.encodings
    }

    /// The encoding of a placement.
    #[must_use]
    pub fn encoding(&self, placement: &Placement) -> Option<&Encoding> {
        self.encodings.get(usize::from(placement.encoding))
    }

    /// The position of an encoding, which is added if it is new.
    ///
    /// Returns `None` past 256 different encodings. No save needs as many, and a hostile file with
    /// one per item would make look-ups slow.
    pub fn intern_encoding(&mut self, encoding: &Encoding) -> Option<u16> {
        const ENCODINGS_MAX: usize = 256;
        let known = self.encodings.iter().position(|e| e == encoding);
        let index = known.unwrap_or(self.encodings.len());
        let id = u16::try_from(index).ok().filter(|_| index < ENCODINGS_MAX)?;
        if known.is_none() {
            self.encodings.push(encoding.clone());
        }
        Some(id)
    }

    /// The origin of the checkpoint.
    #[must_use]
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    /// The origin of the checkpoint, mutable.
    #[must_use]
    pub fn provenance_mut(&mut self) -> &mut Provenance {
        &mut self.provenance
    }
}

impl TensorEntry {
    /// A tensor without chunks.
    #[must_use]
    pub fn new(dtype: DType, shape: impl Into<Dims>) -> Self {
        let shape = shape.into();
        Self {
            dtype,
            chunks: ChunkTable::new(shape.ndim()),
            shape,
            path: None,
            properties: TensorProperties::default(),
        }
    }

    /// The size of all elements in bytes; `None` if it exceeds `u64`.
    #[must_use]
    pub fn byte_len(&self) -> Option<u64> {
        self.shape.checked_volume()?.checked_mul(self.dtype.size() as u64)
    }
}

impl ObjectEntry {
    /// An object at `placement`.
    #[must_use]
    pub fn new(placement: Option<Placement>) -> Self {
        Self { placement, path: None, tensor: None }
    }

    /// Sets the tensor that PyTorch sees in the object.
    #[must_use]
    pub fn with_tensor(mut self, tensor: WrappedTensor) -> Self {
        self.tensor = Some(Arc::new(tensor));
        self
    }
}

impl Entry {
    /// The tensor, if the entry is one.
    #[must_use]
    pub fn as_tensor(&self) -> Option<&TensorEntry> {
        if let Self::Tensor(tensor) = self { Some(tensor) } else { None }
    }

    /// The object, if the entry is one.
    #[must_use]
    pub fn as_object(&self) -> Option<&ObjectEntry> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// The path in the nested state dict, if known.
    #[must_use]
    pub fn path(&self) -> Option<&StatePath> {
        match self {
            Self::Tensor(tensor) => tensor.path.as_ref(),
            Self::Object(object) => object.path.as_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compact_and_come_back() {
        assert!(size_of::<Option<Placement>>() <= 24);
        let mut table = ChunkTable::new(2);
        table.push(&[0, 0], &[2, 3], None).unwrap();
        table.push(&[2, 0], &[1, 3], None).unwrap();
        assert!(table.push(&[0], &[1], None).is_err());
        let file = FileId::from_index(0).unwrap();
        let placement = Placement { file, encoding: 0, byte_offset: 7, byte_len: 9 };
        table.place(1, placement);
        let rows: Vec<_> = table.iter().collect();
        assert_eq!((rows[0].sizes, rows[0].placement), (&[2, 3][..], None));
        assert_eq!(table.get(1), Some(rows[1]));
        assert_eq!(rows[1].placement, Some(placement));
        assert_eq!(table.get(2), None);
    }

    #[test]
    fn chunks_without_axes_are_rows_too() {
        let mut table = ChunkTable::new(0);
        table.push(&[], &[], None).unwrap();
        table.push(&[], &[], None).unwrap();
        assert_eq!(table.iter().len(), 2);
        assert_eq!(table.get(1).unwrap().region().unwrap().volume(), 1);
    }

    #[test]
    fn files_and_encodings_are_interned() {
        let mut metadata = CheckpointMetadata::new();
        let a = metadata.intern_file(&Key::new("a").unwrap()).unwrap();
        let b = metadata.intern_file(&Key::new("b").unwrap()).unwrap();
        assert_eq!(metadata.intern_file(&Key::new("a").unwrap()), Some(a));
        assert_eq!((a.index(), b.index(), metadata.files().len()), (0, 1, 2));
        let raw = Encoding::new(Layout::Raw);
        assert_eq!(metadata.intern_encoding(&Encoding::default()), Some(0));
        assert_eq!(metadata.intern_encoding(&raw), Some(1));
        assert_eq!(metadata.intern_encoding(&raw), Some(1));
        let other = |n: u16| raw.clone().with_transforms([n.to_string().into()]);
        for n in 2..256 {
            assert_eq!(metadata.intern_encoding(&other(n)), Some(n));
        }
        assert_eq!(metadata.intern_encoding(&other(256)), None);
        assert_eq!(metadata.intern_encoding(&other(7)), Some(7));
    }
}
