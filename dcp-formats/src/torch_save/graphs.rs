//! Copies objects of one `torch.save` file into another: their part of its pickle, and their
//! storages.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use dcp_core::{FormatError, Key};

use super::contents::LIMITS;
use super::index::{Index, Leaf};
use super::object::{SHARED_MAX, survey};
use super::persistent::PersistentStorages;
use crate::pickle::{ForeignName, NodeId, Pickle, Writer};
use crate::torch_tensor::{ByteOrder, StorageRef, TensorLayout};
use crate::torch_zip::{Method, Record};

/// Objects and tensors of a `torch.save` file that are copied unchanged into another. A storage
/// that several of them use is written once.
///
/// A tensor is included if an object uses its storage too, or if all tensors of the storage
/// together have at least as many bytes as the storage.
#[derive(Clone)]
pub struct TorchSaveGraphs {
    source: Key,
    index: Arc<Index>,
    /// By FQN in the file: the node, and the names that Python imports and that are not known to be
    /// harmless.
    nodes: HashMap<Arc<str>, (NodeId, Vec<ForeignName>)>,
    /// Tensors that share their storage with others of these, by FQN.
    tensors: HashMap<Arc<str>, TensorLayout>,
}

/// The selected tensors of one storage.
#[derive(Default)]
struct Sharing {
    /// The total size of their elements in bytes.
    byte_len: u64,
    count: u64,
    /// Whether an object uses the storage.
    in_object: bool,
}

impl TorchSaveGraphs {
    /// Collects those of `wanted`, by FQN, that can be copied: none of a big-endian or deflated
    /// file, and nothing that refers to anything but whole storages.
    pub(super) fn new(
        source: Key,
        index: Arc<Index>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self, FormatError> {
        let (mut nodes, mut tensors) = (HashMap::new(), HashMap::new());
        let mut sharing: HashMap<&str, Sharing> = HashMap::new();
        let mut object_storages = Vec::new();
        let contents = &index.contents;
        let deflated = contents.storages.values().any(|record| record.method != Method::Stored);
        if contents.byte_order != ByteOrder::Big && !deflated {
            let pickle = Pickle::parse(&contents.pickle, &LIMITS)?;
            let size = pickle.node_count().saturating_add(pickle.reference_count());
            let mut nodes_left = size.saturating_mul(SHARED_MAX);
            for ((fqn, _), leaf) in index.metadata.iter().zip(&index.leaves) {
                match leaf {
                    Leaf::Object(node) if wanted(fqn) => {
                        let Ok((_, storages)) = survey(&pickle, *node, &mut nodes_left) else {
                            continue;
                        };
                        let Ok(names) = foreign_names(&pickle, *node) else { continue };
                        nodes.insert(Arc::clone(fqn), (*node, names));
                        object_storages.extend(storages);
                    }
                    Leaf::Tensor(layout, _) if wanted(fqn) => {
                        let sharing = sharing.entry(&layout.storage().key).or_default();
                        sharing.byte_len = sharing.byte_len.saturating_add(layout.byte_len());
                        sharing.count += 1;
                    }
                    _ => {}
                }
            }
            for storage in &object_storages {
                if let Some(sharing) = sharing.get_mut(&*storage.key) {
                    sharing.in_object = true;
                }
            }
            for ((fqn, _), leaf) in index.metadata.iter().zip(&index.leaves) {
                let Leaf::Tensor(layout, _) = leaf else { continue };
                let of = sharing.get(&*layout.storage().key).filter(|_| wanted(fqn));
                let together =
                    |of: &Sharing| of.count > 1 && of.byte_len >= layout.storage().byte_len;
                if of.is_some_and(|of| of.in_object || together(of)) {
                    tensors.insert(Arc::clone(fqn), TensorLayout::clone(layout));
                }
            }
        }
        drop(sharing);
        Ok(Self { source, index, nodes, tensors })
    }

    /// Whether the tensor `fqn` is included.
    #[must_use]
    pub fn has_tensor(&self, fqn: &str) -> bool {
        self.tensors.contains_key(fqn)
    }

    pub(super) fn tensor(&self, fqn: &str) -> Option<&TensorLayout> {
        self.tensors.get(fqn)
    }

    /// The Python callables of an object that are not known to be harmless; `None` if the object is
    /// not included.
    #[must_use]
    pub fn foreign_names(&self, fqn: &str) -> Option<&[ForeignName]> {
        self.nodes.get(fqn).map(|(_, names)| &**names)
    }

    pub(super) fn node(&self, fqn: &str) -> Option<NodeId> {
        self.nodes.get(fqn).map(|(node, _)| *node)
    }

    pub(super) fn pickle(&self) -> Result<Pickle<'_>, FormatError> {
        Pickle::parse(&self.index.contents.pickle, &LIMITS)
    }

    pub(super) fn record(&self, storage: &StorageRef) -> Result<Record, FormatError> {
        self.index.contents.storage(storage)
    }

    /// The file that contains the objects.
    #[must_use]
    pub fn source(&self) -> &Key {
        &self.source
    }
}

/// Finds the callables of one object by writing it as a pickle of its own.
fn foreign_names(pickle: &Pickle<'_>, node: NodeId) -> Result<Vec<ForeignName>, FormatError> {
    let mut writer = Writer::new();
    let mut numbers = |storage: &StorageRef, _: u64| Ok(storage.key.to_string());
    let mut renumbered = PersistentStorages { numbers: &mut numbers, device: None };
    writer.graph(pickle, node, &mut renumbered)?;
    let alone = writer.finish()?;
    Ok(Pickle::parse(&alone, &LIMITS)?.foreign_names())
}

impl fmt::Debug for TorchSaveGraphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let objects = self.nodes.len();
        f.debug_struct("TorchSaveGraphs").field("objects", &objects).finish_non_exhaustive()
    }
}
