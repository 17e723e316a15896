//! Composes the pickle of a new file, and the storages that it refers to.

use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use dcp_core::error::StateProblem;
use dcp_core::value::Opaque;
use dcp_core::{FormatError, Key, PlanError, Tensor};

use super::graphs::TorchSaveGraphs;
use super::persistent::{Numbers, PersistentStorages};
use super::tree::Tree;
use super::write::{TorchSaveContent, TorchSaveItem};
use crate::pickle::{Limits, NodeId, Pickle, TensorSink, Writer};
use crate::torch_tensor::{ByteOrder, StorageRef, TensorLayout, byte_order, small_record};
use crate::torch_zip::{ArchiveIndex, Halt, Record, Sparse};

/// The maximum size of an inflated record of an object's own archive.
const INFLATED_MAX: u64 = 1 << 30;

/// A storage of the new file.
#[derive(Clone, Debug)]
pub(super) struct NewStorage {
    pub(super) content: StorageContent,
    pub(super) byte_len: u64,
    /// Bytes per element of the storage's class.
    pub(super) element: u64,
}

/// The origin of a storage's bytes.
#[derive(Clone, Debug)]
pub(super) enum StorageContent {
    /// The item at this position. In a file that is rewritten, the storage at this position in the
    /// list of kept ones.
    Item(usize),
    /// Bytes in memory.
    Bytes(Bytes),
    /// A record of another file, for the item at this position.
    Kept {
        /// The record.
        record: Record,
        /// The file.
        file: Key,
        /// The position.
        item: usize,
    },
}

/// A pickle and its storages, in order of first use.
#[derive(Debug)]
pub(super) struct Composed {
    pub(super) pickle: Bytes,
    pub(super) storages: Vec<NewStorage>,
}

/// Writes the items as one nested dict. Storage keys are numbers, padded with zeros to `key_width`.
pub(super) fn compose(
    items: &[TorchSaveItem],
    mut writer: Writer,
    key_width: usize,
    device: Option<&str>,
) -> Result<Composed, PlanError> {
    let tree = Tree::grow(items)?;
    let mut storages =
        Storages { key_width, device: device.map(str::to_owned), ..Storages::default() };
    let graphs = items.iter().find_map(|item| match &item.content {
        TorchSaveContent::Kept { graphs, .. } => Some(&**graphs),
        _ => None,
    });
    let kept = match graphs {
        Some(graphs) => {
            let pickle = graphs.pickle().map_err(|error| not_storable("", &error))?;
            Some(Kept { graphs, pickle, numbers: HashMap::new() })
        }
        None => None,
    };
    let mut composer = Composer { items, storages: &mut storages, kept };
    composer.tree(&mut writer, &tree)?;
    let pickle = writer.finish().map_err(|error| not_storable("", &error))?;
    Ok(Composed { pickle, storages: storages.all })
}

struct Composer<'i> {
    items: &'i [TorchSaveItem],
    storages: &'i mut Storages,
    kept: Option<Kept<'i>>,
}

/// The file from which objects are copied.
struct Kept<'i> {
    graphs: &'i TorchSaveGraphs,
    pickle: Pickle<'i>,
    /// The numbers of its storages in the new file, by their keys in it.
    numbers: HashMap<Box<str>, usize>,
}

impl Composer<'_> {
    /// The limited lengths of paths bound the recursion.
    fn tree(&mut self, writer: &mut Writer, tree: &Tree) -> Result<(), PlanError> {
        match tree {
            Tree::Item(position) => self.item(writer, *position),
            Tree::Dict(entries) => writer.dict(entries.iter(), |writer, (key, tree)| {
                writer.constant(key);
                self.tree(writer, tree)
            }),
            Tree::List(items) => writer.list(items.iter(), |writer, item| match item {
                Some(tree) => self.tree(writer, tree),
                None => {
                    writer.none();
                    Ok(())
                }
            }),
        }
    }

    fn item(&mut self, writer: &mut Writer, position: usize) -> Result<(), PlanError> {
        let Some(item) = self.items.get(position) else { return Ok(()) };
        let named = |error: FormatError| not_storable(&item.name, &error);
        match &item.content {
            TorchSaveContent::Kept { graphs, fqn } => self.kept(writer, graphs, fqn).map_err(named),
            TorchSaveContent::Object(value) => writer.value(value, self.storages).map_err(named),
            TorchSaveContent::Tensor { dtype, shape, same_as } => {
                let layout = TensorLayout::contiguous(*dtype, shape.clone()).map_err(named)?;
                let source = match same_as {
                    None => position,
                    Some(other) => self.tied(*other, &layout).map_err(|problem| {
                        StateProblem::NotStorable { problem }.of(item.name.to_string())
                    })?,
                };
                let number = self.storages.of_item(source, &layout);
                let key = self.storages.key(number);
                layout.with_storage_key(key).write(writer);
                Ok(())
            }
        }
    }

    /// Copies an object of another file, with its storages that are not copied yet.
    fn kept(
        &mut self,
        writer: &mut Writer,
        graphs: &TorchSaveGraphs,
        fqn: &str,
    ) -> Result<(), FormatError> {
        let Self { items, storages, kept } = self;
        let kept = kept.as_mut().filter(|kept| std::ptr::eq(kept.graphs, graphs));
        let absent = || FormatError::new("object", "it is in another file than the objects before");
        let Kept { pickle, numbers, .. } = kept.ok_or_else(absent)?;
        let device = storages.device.clone();
        let mut number = |storage: &StorageRef, element: u64| {
            let number = match numbers.get(&storage.key) {
                Some(number) => *number,
                None => {
                    let (record, file) = (graphs.record(storage)?, graphs.source().clone());
                    let item = items.len().saturating_add(numbers.len());
                    let byte_len = record.byte_len;
                    let content = StorageContent::Kept { record, file, item };
                    let number = storages.push(content, byte_len, element);
                    numbers.insert(storage.key.clone(), number);
                    number
                }
            };
            Ok(storages.key(number))
        };
        if let Some(layout) = graphs.tensor(fqn) {
            let key = number(layout.storage(), layout.storage_element_size())?;
            let layout = layout.clone().with_storage_key(key);
            match device {
                Some(device) => layout.with_device(&device).write(writer),
                None => layout.write(writer),
            }
            return Ok(());
        }
        let node = graphs.node(fqn).ok_or_else(absent)?;
        let mut renumbered = PersistentStorages { numbers: &mut number, device: device.as_deref() };
        writer.graph(pickle, node, &mut renumbered)
    }

    /// The item whose storage contains a tied tensor.
    fn tied(&self, other: usize, layout: &TensorLayout) -> Result<usize, String> {
        match self.items.get(other).map(|item| &item.content) {
            Some(TorchSaveContent::Tensor { dtype, shape, same_as: None })
                if *dtype == layout.dtype()
                    && shape.checked_volume() == layout.sizes().checked_volume() =>
            {
                Ok(other)
            }
            _ => {
                Err(format!("item {other} is not a tensor of the same type and size to share with"))
            }
        }
    }
}

fn not_storable(fqn: &str, error: &FormatError) -> PlanError {
    StateProblem::NotStorable { problem: error.problem().to_owned() }.of(fqn)
}

/// The storages of a new file.
#[derive(Debug, Default)]
pub(super) struct Storages {
    pub(super) all: Vec<NewStorage>,
    by_item: HashMap<usize, usize>,
    key_width: usize,
    /// The device for storages of objects; `None` keeps their own.
    device: Option<String>,
}

impl Storages {
    fn key(&self, number: usize) -> String {
        let width = self.key_width;
        format!("{number:0width$}")
    }

    fn push(&mut self, content: StorageContent, byte_len: u64, element: u64) -> usize {
        self.all.push(NewStorage { content, byte_len, element });
        self.all.len() - 1
    }

    fn of_item(&mut self, item: usize, layout: &TensorLayout) -> usize {
        if let Some(number) = self.by_item.get(&item) {
            return *number;
        }
        let (byte_len, element) = (layout.storage().byte_len, layout.storage_element_size());
        let number = self.push(StorageContent::Item(item), byte_len, element);
        self.by_item.insert(item, number);
        number
    }
}

impl TensorSink for Storages {
    fn tensor(&mut self, writer: &mut Writer, tensor: &Tensor) -> Result<(), FormatError> {
        let bad = |problem: &str| FormatError::new("tensor in an object", problem);
        let layout = TensorLayout::contiguous(tensor.dtype(), tensor.shape().clone())?;
        let bytes =
            tensor.to_vec().ok_or_else(|| bad("not all of the tensor is in host memory"))?;
        let (byte_len, element) = (bytes.len() as u64, layout.storage_element_size());
        let number = self.push(StorageContent::Bytes(bytes.into()), byte_len, element);
        layout.with_storage_key(self.key(number)).write(writer);
        Ok(())
    }

    /// Copies an opaque object out of its archive, with its storages.
    fn opaque(&mut self, writer: &mut Writer, opaque: &Opaque) -> Result<(), FormatError> {
        self.splice(writer, &opaque.encoded, |pickle| Ok(pickle.root()))
    }
}

impl Storages {
    /// Copies the part of an archive's object that `part` selects and may change, with its
    /// storages.
    pub(super) fn splice(
        &mut self,
        writer: &mut Writer,
        archive: &Bytes,
        mut part: impl FnMut(&mut Pickle<'_>) -> Result<NodeId, FormatError>,
    ) -> Result<(), FormatError> {
        Ok(self.splice_part(writer, archive, &mut part)?)
    }

    fn splice_part(
        &mut self,
        writer: &mut Writer,
        archive: &Bytes,
        part: &mut dyn FnMut(&mut Pickle<'_>) -> Result<NodeId, FormatError>,
    ) -> Result<(), Halt> {
        let blob = Sparse::whole(archive);
        let index = ArchiveIndex::read(&blob)?;
        let bytes = small_record(&blob, index.require("data.pkl")?, INFLATED_MAX)?;
        let mut pickle = Pickle::parse(&bytes, &Limits::DEFAULT)?;
        let root = part(&mut pickle)?;
        let swapped = byte_order(&blob, &index)? == ByteOrder::Big;
        let mut known = HashMap::new();
        let device = self.device.clone();
        let mut numbers = |storage: &StorageRef, element: u64| {
            if let Some(number) = known.get(&storage.key) {
                return Ok(self.key(*number));
            }
            if swapped {
                let problem = "its tensors are big-endian, and so cannot be put into this file";
                return Err(FormatError::new("object", problem));
            }
            let entry = index.require(&format!("data/{}", storage.key))?;
            let record = entry.locate(&blob)?.ready()?;
            let range = record.data.start as usize..record.data.end as usize;
            let kept = archive.get(range.clone()).unwrap_or_default();
            let bytes = match record.decode(kept, INFLATED_MAX)? {
                Cow::Borrowed(_) => archive.slice(range),
                Cow::Owned(bytes) => bytes.into(),
            };
            let content = StorageContent::Bytes(bytes);
            let number = self.push(content, record.byte_len, element);
            known.insert(storage.key.clone(), number);
            Ok(self.key(number))
        };
        let numbers: Numbers<'_> = &mut numbers;
        let mut renumbered = PersistentStorages { numbers, device: device.as_deref() };
        writer.graph(&pickle, root, &mut renumbered)?;
        Ok(())
    }
}
