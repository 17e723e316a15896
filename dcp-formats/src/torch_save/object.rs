//! Extracts objects from a file's pickle.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::storage::StorageExt as _;
use dcp_core::value::Opaque;
use dcp_core::{CheckpointError, FormatError, Key, Storage, Value};
use indexmap::IndexMap;

use super::contents::{Contents, LIMITS};
use super::persistent::PersistentStorages;
use crate::pickle::{Converter, Node, NodeId, Pickle, Shared, Writer};
use crate::torch_object::Tensors;
use crate::torch_tensor::{StorageRef, stored};
use crate::torch_zip::{ArchiveEncoder, RecordSet};

/// The maximum total size of one object's storages, in bytes.
const STORAGES_MAX: u64 = 1 << 30;
/// The maximum number of nodes and references of all objects, per node of the pickle. Only shared
/// parts count more than once.
pub(super) const SHARED_MAX: usize = 8;

/// Extracts objects from a parsed pickle, one after the other.
pub(super) struct Objects<'a> {
    storage: &'a dyn Storage,
    key: &'a Key,
    contents: &'a Contents,
    pickle: Pickle<'a>,
    nodes_left: usize,
    /// State that conversions share.
    shared: Option<Shared>,
    pub(super) bytes_read: u64,
}

impl<'a> Objects<'a> {
    pub(super) fn new(
        storage: &'a dyn Storage,
        key: &'a Key,
        contents: &'a Contents,
    ) -> Result<Self, FormatError> {
        let pickle = Pickle::parse(&contents.pickle, &LIMITS)?;
        let size = pickle.node_count().saturating_add(pickle.reference_count());
        let nodes_left = size.saturating_mul(SHARED_MAX);
        Ok(Self { storage, key, contents, pickle, nodes_left, shared: None, bytes_read: 0 })
    }

    /// The items of the root dict under string keys; `None` if the root is not a dict.
    pub(super) fn items(&self) -> Option<Vec<(Box<str>, NodeId)>> {
        let Node::Dict(span) = self.pickle.node(self.pickle.root()) else { return None };
        let entries = self.pickle.entries(*span);
        Some(entries.filter_map(|(key, item)| Some((self.pickle.str(key)?.into(), item))).collect())
    }

    /// The value of a node: plain data as it is, anything else as the archive that `torch.save`
    /// writes for it.
    pub(super) async fn value(&mut self, node: NodeId) -> Result<Value, CheckpointError> {
        let (size, wanted) = survey(&self.pickle, node, &mut self.nodes_left)?;
        let mut storages = HashMap::new();
        let mut total = 0_u64;
        for storage in wanted {
            let record = self.contents.storage(&storage)?;
            total = total.saturating_add(record.byte_len);
            if total > STORAGES_MAX {
                let problem = format!("its tensors have more than {STORAGES_MAX} bytes");
                return Err(FormatError::new("object", problem).into());
            }
            let kept = self.storage.read_range(self.key, record.data.clone()).await?;
            self.bytes_read += kept.len() as u64;
            let bytes = match record.decode(&kept, STORAGES_MAX)? {
                Cow::Borrowed(_) => kept.clone(),
                Cow::Owned(bytes) => Bytes::from(bytes),
            };
            storages.insert(storage.key, bytes);
        }
        let mut tensors = Tensors::new(self.contents.byte_order, total, |layout| {
            let bytes = storages.get(&layout.storage().key).map(|bytes| &**bytes);
            Ok(Cow::Borrowed(bytes.unwrap_or_default()))
        });
        let converter = Converter::new(&self.pickle, &LIMITS, &mut tensors);
        let shared = self.shared.take().unwrap_or_else(|| Shared::new(&self.pickle));
        let converter = converter.with_size(size, &LIMITS).with_shared(shared);
        let (converted, shared) = converter.convert_one(node);
        self.shared = Some(shared);
        let converted = converted?;
        drop(tensors);
        if converted.faithful {
            return Ok(converted.value);
        }
        let encoded = self.encode(node, &storages)?;
        Ok(Value::Opaque(Arc::new(Opaque { encoded, view: converted.value })))
    }

    fn encode(
        &self,
        node: NodeId,
        storages: &HashMap<Box<str>, Bytes>,
    ) -> Result<Bytes, FormatError> {
        let mut writer = Writer::new();
        // Old keys, in the order of their new numbers.
        let mut used: IndexMap<Box<str>, ()> = IndexMap::new();
        let mut numbers = |storage: &StorageRef, _: u64| {
            Ok(used.insert_full(storage.key.clone(), ()).0.to_string())
        };
        let mut storages_of = PersistentStorages { numbers: &mut numbers, device: None };
        writer.graph(&self.pickle, node, &mut storages_of)?;
        let used: Vec<&[u8]> = used
            .keys()
            .map(|key| storages.get(key).map(|bytes| &**bytes).unwrap_or_default())
            .collect();
        ArchiveEncoder::encode(RecordSet::default(), writer.finish()?, &used)
    }
}

/// Counts an object's nodes and references, and finds its storages. Deducts the count from
/// `nodes_left`, which bounds all objects together.
pub(super) fn survey(
    pickle: &Pickle<'_>,
    node: NodeId,
    nodes_left: &mut usize,
) -> Result<(usize, Vec<StorageRef>), FormatError> {
    let mut seen = HashSet::from([node]);
    let mut open = vec![node];
    let mut storages = IndexMap::new();
    let (mut size, mut below) = (0_usize, Vec::new());
    while let Some(id) = open.pop() {
        if let Some((storage, _)) = stored(pickle, id) {
            storages.insert(storage.key.clone(), storage);
        }
        pickle.push_references(id, &mut below);
        size += 1 + below.len();
        *nodes_left = nodes_left.checked_sub(1 + below.len()).ok_or_else(|| {
            FormatError::new("object", "it is shared by too many others to be taken apart")
        })?;
        open.extend(below.drain(..).filter(|id| seen.insert(*id)));
    }
    Ok((size, storages.into_values().collect()))
}
