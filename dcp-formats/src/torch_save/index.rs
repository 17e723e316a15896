//! A file's index: its leaves as entries of a checkpoint.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::{CheckpointMetadata, Dims, FormatError, Key, Value};

use super::contents::{Contents, LIMITS};
use super::distributed::{DistributedTensor, Meshes, distributed};
use super::flatten::{self, Leaves, flatten};
use crate::pickle::{ForeignName, Node, NodeId, Pickle};
use crate::torch_tensor::{ByteOrder, TensorLayout, wrapped};
use crate::torch_zip::{Method, Record};

/// The size by which tensors may exceed their storages because they repeat elements
/// (`torch.Tensor.expand`): per byte of the storages, plus a fixed size.
const EXPANDED_RATIO: u64 = 16;
const EXPANDED_MIN: u64 = 1 << 30;

/// The contents of a file, and their positions.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) contents: Contents,
    pub(super) metadata: Arc<CheckpointMetadata>,
    /// By position of the entry in the metadata.
    pub(super) leaves: Vec<Leaf>,
    /// Offsets of non-empty storages, ascending, and their positions in the contents.
    pub(super) by_start: Vec<(u64, usize)>,
    /// CRC-32s of the file's records, by offset and length.
    pub(super) checksums: Arc<HashMap<(u64, u64), u32>>,
    /// Names in the pickle that are not known to be harmless.
    pub(super) foreign: Vec<ForeignName>,
    /// Observations about the names of leaves.
    pub(super) notes: Vec<String>,
    /// Tensors of several ranks, where the file is read as that of one rank.
    pub(super) distributed: Vec<DistributedTensor>,
}

/// The origin of an entry.
#[derive(Debug)]
pub(super) enum Leaf {
    /// A tensor and its storage.
    Tensor(Box<TensorLayout>, Record),
    /// A node of the pickle.
    Object(NodeId),
    /// A value that was decoded with the index.
    Plain(Value),
}

impl Index {
    /// The index of a file. With `of_rank`, tensors of several ranks are shown by the tensors that the file has of
    /// them, the first under the name of the whole.
    pub(super) fn new(key: &Key, contents: Contents, of_rank: bool) -> Result<Self, FormatError> {
        let pickle = Pickle::parse(&contents.pickle, &LIMITS)?;
        let mut metadata = CheckpointMetadata::new();
        let provenance = metadata.provenance_mut();
        provenance.format = Some("torch_save".into());
        provenance.version = contents.version.as_deref().map(Arc::from);
        let full = || FormatError::new("torch.save file", "it has too many parts");
        let file = metadata.intern_file(key).ok_or_else(full)?;
        let raw = metadata.intern_encoding(&Encoding::new(Layout::Raw)).ok_or_else(full)?;
        let inner = metadata.intern_encoding(&Encoding::new(Layout::TorchSave)).ok_or_else(full)?;
        let range = contents.pickle_range.clone();
        let in_pickle = Placement {
            file,
            encoding: inner,
            byte_offset: range.start,
            byte_len: range.end - range.start,
        };
        let kept = contents.storages.values().map(|r| r.data.end.saturating_sub(r.data.start));
        let kept = kept.fold(0, u64::saturating_add);
        let mut expansion_left = kept.saturating_mul(EXPANDED_RATIO).saturating_add(EXPANDED_MIN);
        let mut leaves = Vec::new();
        let (mut meshes, mut found) = (Meshes::new(), Vec::new());
        let mut add = |leaf: flatten::Leaf,
                       layout: Option<TensorLayout>,
                       metadata: &mut CheckpointMetadata|
         -> Result<(), FormatError> {
            let named = |error: FormatError| in_leaf(&leaf.fqn, &error);
            let (entry, part) = match layout.filter(is_plain) {
                Some(layout) => {
                    let record = contents.storage(layout.storage()).map_err(named)?;
                    let left = expansion_left.checked_sub(expansion(&layout));
                    expansion_left = left.ok_or_else(|| named(expanded(&layout, &record)))?;
                    let direct = direct_range(&layout, &record, contents.byte_order);
                    let (encoding, range) = match direct {
                        Some(range) => (raw, range),
                        None => (inner, record.data.clone()),
                    };
                    let (byte_offset, byte_len) = (range.start, range.end - range.start);
                    let placement = Placement { file, encoding, byte_offset, byte_len };
                    let mut entry = tensor_entry(&layout, placement).map_err(named)?;
                    entry.path = Some(leaf.path);
                    (Entry::Tensor(entry), Leaf::Tensor(Box::new(layout), record))
                }
                None => {
                    let mut entry = ObjectEntry::new(Some(in_pickle));
                    entry.path = Some(leaf.path);
                    entry.tensor = wrapped(&pickle, leaf.node).map(Arc::new);
                    let part = plain(&pickle, leaf.node).map(Leaf::Plain);
                    (Entry::Object(entry), part.unwrap_or(Leaf::Object(leaf.node)))
                }
            };
            metadata.insert(leaf.fqn, entry);
            leaves.push(part);
            Ok(())
        };
        let Leaves { all, notes } = flatten(&pickle)?;
        for leaf in all {
            let named = |error: FormatError| in_leaf(&leaf.fqn, &error);
            let whole = match of_rank {
                true => distributed(&pickle, leaf.node, &mut meshes).map_err(named)?,
                false => None,
            };
            let Some(whole) = whole else {
                let layout = TensorLayout::from_node(&pickle, leaf.node).map_err(named)?;
                add(leaf, layout, &mut metadata)?;
                continue;
            };
            let (fqn, path) = (Arc::clone(&leaf.fqn), leaf.path.clone());
            let mut locals = Vec::with_capacity(whole.locals.len());
            for (number, layout) in (0..).zip(whole.locals) {
                let part = match number {
                    0 => {
                        flatten::Leaf { fqn: Arc::clone(&fqn), path: path.clone(), node: leaf.node }
                    }
                    _ => leaf.part(number),
                };
                if metadata.get(&part.fqn).is_some() || !is_plain(&layout) {
                    let problem = "its shards have no names of their own, or packed elements";
                    return Err(in_leaf(&fqn, &FormatError::new("torch.save file", problem)));
                }
                locals.push(metadata.len());
                add(part, Some(layout), &mut metadata)?;
            }
            let (dtype, shape, division) = (whole.dtype, whole.shape, whole.division);
            found.push(DistributedTensor { fqn, path, dtype, shape, division, locals });
        }
        let records = contents.storages.values().filter(|r| r.method == Method::Stored);
        let checksums = records
            .filter_map(|r| Some(((r.data.start, r.data.end - r.data.start), r.crc32?)))
            .collect();
        let occupied = contents.storages.values().enumerate().filter(|(_, r)| !r.data.is_empty());
        let mut by_start: Vec<_> = occupied.map(|(at, r)| (r.data.start, at)).collect();
        by_start.sort_unstable();
        let foreign = pickle.foreign_names();
        drop(pickle);
        let (metadata, checksums) = (Arc::new(metadata), Arc::new(checksums));
        let distributed = found;
        Ok(Self { contents, metadata, leaves, by_start, checksums, foreign, notes, distributed })
    }
}

fn in_leaf(fqn: &str, error: &FormatError) -> FormatError {
    let problem = format!("{fqn:?}: {}", error.problem());
    FormatError::new("torch.save file", problem).at(error.byte_offset().unwrap_or(0))
}

/// The value of a node that is a number or a short string. Files have up to millions of them, and
/// parsing the pickle again for every batch would take longer each time.
fn plain(pickle: &Pickle<'_>, node: NodeId) -> Option<Value> {
    const TEXT_MAX: usize = 64;
    Some(match pickle.node(node) {
        Node::None => Value::None,
        Node::Bool(value) => Value::Bool(*value),
        Node::Int(value) => Value::Int(*value),
        Node::Float(value) => Value::Float(*value),
        Node::Str(text) if text.len() <= TEXT_MAX => Value::Str(Arc::from(*text)),
        _ => return None,
    })
}

/// Whether elements and dtype describe the tensor fully. Dtypes that pack several quantized values
/// into a byte have fewer bytes than elements, and elements with a scale have no meaning without
/// it; an entry has no field for a scale.
fn is_plain(layout: &TensorLayout) -> bool {
    let elements = layout.sizes().checked_volume();
    let bytes = elements.and_then(|n| n.checked_mul(layout.dtype().size() as u64));
    bytes == Some(layout.byte_len()) && layout.quantizer().is_none()
}

/// The number of bytes by which a tensor exceeds its storage.
fn expansion(layout: &TensorLayout) -> u64 {
    layout.byte_len().saturating_sub(layout.storage().byte_len)
}

fn expanded(layout: &TensorLayout, record: &Record) -> FormatError {
    let (byte_len, stored) = (layout.byte_len(), layout.storage().byte_len);
    let problem = format!(
        "it repeats the elements of a storage of {stored} bytes until it has {byte_len}, far more \
         than the file; save in PyTorch what was expanded, not the result of expand()"
    );
    FormatError::new("torch.save file", problem).at(record.data.start)
}

/// The range of the elements in the file, if they are stored unencoded.
fn direct_range(
    layout: &TensorLayout,
    record: &Record,
    byte_order: ByteOrder,
) -> Option<std::ops::Range<u64>> {
    let swapped = byte_order == ByteOrder::Big && layout.dtype().scalar_size() > 1;
    let range = layout.contiguous_range()?;
    if swapped || record.method != Method::Stored {
        return None;
    }
    let start = record.data.start;
    Some(start.checked_add(range.start)?..start.checked_add(range.end)?)
}

fn tensor_entry(layout: &TensorLayout, placement: Placement) -> Result<TensorEntry, FormatError> {
    let sizes = layout.sizes();
    let mut entry = TensorEntry::new(layout.dtype(), sizes.clone());
    entry.properties.requires_grad = layout.requires_grad();
    let strides = layout.strides().iter().map(|stride| i64::try_from(*stride));
    entry.properties.strides = strides.collect::<Result<_, _>>().ok();
    entry
        .chunks
        .push(&Dims::zeros(sizes.ndim()), sizes, Some(placement))
        .map_err(|error| FormatError::new("tensor", error.to_string()))?;
    Ok(entry)
}
