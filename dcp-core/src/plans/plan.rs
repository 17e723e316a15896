//! Plans: the items that each rank writes, with their places, and those that it reads.
//!
//! A rank describes its state as a [`StateIndex`]; a
//! [`SavePlanner`](crate::planner::SavePlanner) turns that into a [`SavePlan`]
//! with one row per item. The coordinator merges all ranks' plans and selects the rank that writes
//! each item ([`GlobalPlan`]). A [`StorageWriter`](crate::StorageWriter) assigns a placement to
//! every selected item and a [`WritePlan`] to each rank. Plans contain no data, files or clocks.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use crate::error::{ChunksProblem, DataProblem, PlanError};
use crate::names::key::Key;
use crate::names::rank::Rank;
use crate::plans::metadata::{CheckpointMetadata, Encoding, Placement};
use crate::state::path::StatePath;
use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;
use crate::tensors::region::Region;

/// The rank and group that a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanContext {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks in the group.
    pub world_size: u32,
    /// The rank that merges plans and commits.
    pub coordinator: Rank,
}

impl PlanContext {
    /// A context for `rank` of `world_size`, with rank 0 as the coordinator.
    #[must_use]
    pub fn new(rank: Rank, world_size: u32) -> Self {
        Self { rank, world_size, coordinator: 0 }
    }

    /// A context for a single process.
    #[must_use]
    pub fn solo() -> Self {
        Self::new(0, 1)
    }

    /// Sets the coordinator.
    #[must_use]
    pub fn with_coordinator(mut self, coordinator: Rank) -> Self {
        self.coordinator = coordinator;
        self
    }

    /// Whether this rank is the coordinator.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.rank == self.coordinator
    }
}

/// The flat state of one rank, without its data: the input of planners.
#[derive(Clone, Debug, Default)]
pub struct StateIndex {
    /// The leaves, in the order of the state dict.
    pub leaves: Vec<StateLeaf>,
}

/// One leaf of a flattened state dict.
#[derive(Clone, Debug)]
pub struct StateLeaf {
    /// The flat name.
    pub fqn: Arc<str>,
    /// The nested path; `None` when the state dict is saved unflattened.
    pub path: Option<StatePath>,
    /// Its kind.
    pub kind: LeafKind,
}

/// The kind of a leaf.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LeafKind {
    /// A tensor, of which this rank holds `regions`.
    Tensor {
        /// Element type.
        dtype: DType,
        /// Shape of the whole tensor.
        shape: Dims,
        /// Whether ranks hold different parts. A replicated tensor has one region, the whole.
        sharded: bool,
        /// The regions that this rank holds, in the order of the shards.
        regions: Vec<Region>,
    },
    /// Any other value.
    Object {
        /// The size of the encoded object in bytes: exact for saves, unused for loads.
        byte_len: u64,
    },
}

/// The items that one rank offers to write, over a table of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavePlan {
    pub(crate) outline: Arc<PlanOutline>,
    /// Offsets and sizes of chunks, and sizes of objects in bytes, which items refer to.
    pub(crate) values: Arc<Vec<u64>>,
    pub(crate) unoffered: Arc<Vec<Unoffered>>,
}

/// The part of a [`SavePlan`] that ranks with the same names and other regions share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanOutline {
    pub(crate) keys: Arc<Vec<PlanKey>>,
    /// The key of each item.
    pub(crate) item_keys: Vec<u32>,
    /// For a tensor, the index of its first offset in the values; for an object, that of its size.
    pub(crate) item_values: Vec<u64>,
}

/// Something that a rank holds and its [`SavePlan`] does not offer, mostly because another rank
/// offers it. [`SavePlan::check_against`] finds it, and [`GlobalPlan::check_against`] verifies that
/// it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unoffered {
    /// The tensor or object.
    pub fqn: Arc<str>,
    /// The part of the tensor; `None` for an object, and for a tensor without elements.
    pub region: Option<Region>,
}

/// One FQN of a [`SavePlan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanKey {
    /// The flat name.
    pub fqn: Arc<str>,
    /// The nested path.
    pub path: Option<StatePath>,
    /// The tensor's description; `None` for an object.
    pub tensor: Option<TensorSpec>,
}

/// The dtype, shape and sharding that all chunks of a tensor share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole tensor.
    pub shape: Dims,
    /// Whether ranks hold different parts.
    pub sharded: bool,
}

/// One row of a [`SavePlan`].
#[derive(Clone, Copy, Debug)]
pub struct WriteItem<'a> {
    /// The position of the key in [`SavePlan::keys`].
    pub key_index: usize,
    /// The key.
    pub key: &'a PlanKey,
    /// The offsets of the part of the tensor; empty for an object.
    pub offsets: &'a [u64],
    /// The sizes of the part of the tensor; empty for an object.
    pub sizes: &'a [u64],
    /// The size of the elements, or of the encoded object, in bytes.
    pub byte_len: u64,
}

impl WriteItem<'_> {
    /// Whether the item is a part of a tensor.
    #[must_use]
    pub fn is_tensor(&self) -> bool {
        self.key.tensor.is_some()
    }
}

impl SavePlan {
    /// An empty plan.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key for subsequent items, and returns its position.
    pub fn push_key(&mut self, key: PlanKey) -> usize {
        let keys = Arc::make_mut(&mut Arc::make_mut(&mut self.outline).keys);
        keys.push(key);
        keys.len() - 1
    }

    /// Adds a part of the tensor `key_index`.
    ///
    /// # Errors
    ///
    /// When the key is not a tensor, the region has another number of axes, or a table is full.
    pub fn push_chunk(&mut self, key_index: usize, region: &Region) -> Result<(), PlanError> {
        let fqn = || self.name_of(key_index);
        let spec = self.keys().get(key_index).and_then(|key| key.tensor.as_ref());
        let spec = spec.ok_or_else(|| PlanError::not_a_tensor(fqn()))?;
        let (expected, found) = (spec.shape.ndim(), region.ndim());
        if expected != found {
            return Err(ChunksProblem::Axes { expected, found }.of(fqn()));
        }
        let key = u32::try_from(key_index).map_err(|_| PlanError::TooLarge {
            what: "the number of keys".into(),
            limit: u32::MAX.into(),
        })?;
        self.push_item(key);
        let values = Arc::make_mut(&mut self.values);
        values.extend_from_slice(region.offsets());
        values.extend_from_slice(region.sizes());
        Ok(())
    }

    /// Adds the object `key_index`, with `byte_len` encoded bytes.
    ///
    /// # Errors
    ///
    /// When the key is a tensor or the table is full.
    pub fn push_object(&mut self, key_index: usize, byte_len: u64) -> Result<(), PlanError> {
        let is_object = self.keys().get(key_index).is_some_and(|key| key.tensor.is_none());
        match u32::try_from(key_index) {
            Ok(key) if is_object => {
                self.push_item(key);
                Arc::make_mut(&mut self.values).push(byte_len);
                Ok(())
            }
            _ => Err(PlanError::not_an_object(self.name_of(key_index))),
        }
    }

    /// Adds an item whose values are pushed next.
    fn push_item(&mut self, key: u32) {
        let outline = Arc::make_mut(&mut self.outline);
        outline.item_keys.push(key);
        outline.item_values.push(self.values.len() as u64);
    }

    fn name_of(&self, key_index: usize) -> String {
        let key = self.keys().get(key_index);
        key.map_or_else(|| format!("key {key_index}"), |key| key.fqn.to_string())
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &[PlanKey] {
        &self.outline.keys
    }

    /// Whether both plans have one table of keys, as those of ranks with the same keys do after
    /// [`from_answers`](Self::from_answers). False does not mean that the keys differ.
    #[must_use]
    pub fn shares_keys_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.outline.keys, &other.outline.keys)
    }

    /// The positions of plans that share all memory, as equal plans do after
    /// [`from_answers`](Self::from_answers): a list for each such plan, in the order of the first
    /// positions. Positions in different lists do not mean that the plans differ.
    #[must_use]
    pub fn group_shared(plans: &[Self]) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut known = HashMap::new();
        for (position, plan) in plans.iter().enumerate() {
            let Self { outline, values, unoffered } = plan;
            let memory = (Arc::as_ptr(outline), Arc::as_ptr(values), Arc::as_ptr(unoffered));
            let group = *known.entry(memory).or_insert(groups.len());
            match groups.get_mut(group) {
                Some(group) => group.push(position),
                None => groups.push(vec![position]),
            }
        }
        groups
    }

    /// The parts of the state that the plan does not offer, known after the comparison with the state.
    #[must_use]
    pub fn unoffered(&self) -> &[Unoffered] {
        &self.unoffered
    }

    /// The number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.outline.item_keys.len()
    }

    /// Whether there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.outline.item_keys.is_empty()
    }

    /// The item at `index`.
    #[must_use]
    pub fn item(&self, index: usize) -> Option<WriteItem<'_>> {
        let PlanOutline { keys, item_keys, item_values } = &*self.outline;
        let key_index = *item_keys.get(index)? as usize;
        let key = keys.get(key_index)?;
        let start = usize::try_from(*item_values.get(index)?).ok()?;
        let Some(spec) = &key.tensor else {
            let byte_len = *self.values.get(start)?;
            return Some(WriteItem { key_index, key, offsets: &[], sizes: &[], byte_len });
        };
        let ndim = spec.shape.ndim();
        let row = self.values.get(start..start.checked_add(2 * ndim)?)?;
        let (offsets, sizes) = row.split_at(ndim);
        let volume = crate::tensors::dims::checked_volume(sizes)?;
        let byte_len = volume.checked_mul(spec.dtype.size() as u64)?;
        Some(WriteItem { key_index, key, offsets, sizes, byte_len })
    }

    /// All items in order.
    pub fn items(&self) -> impl Iterator<Item = WriteItem<'_>> {
        (0..self.len()).filter_map(|index| self.item(index))
    }
}

/// The coordinator's decision: the contents of the checkpoint, and the rank that writes each item.
#[derive(Clone, Debug, Default)]
pub struct GlobalPlan {
    /// The contents of the checkpoint, without placements.
    pub metadata: CheckpointMetadata,
    /// For each rank, in rank order, the items of its [`SavePlan`] that it writes, in order.
    pub selections: Vec<Vec<SelectedItem>>,
    /// Names that the planner omits from the checkpoint on purpose. Anything else that ranks hold
    /// and the plan does not store is the planner's error.
    pub left_out: BTreeSet<Arc<str>>,
}

/// An item that a rank was selected to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectedItem {
    /// The position in the rank's [`SavePlan`].
    pub item: u32,
    /// The position of its entry in the metadata.
    pub entry: u32,
    /// The position in the entry's [`ChunkTable`](crate::metadata::ChunkTable); 0 for an object.
    pub chunk: u32,
}

/// The items that one rank writes, with their placements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WritePlan {
    /// The files of the placements, by [`FileId::index`](crate::metadata::FileId::index). Files
    /// without items
    /// are created empty.
    pub files: Vec<Key>,
    /// The encodings of the placements.
    pub encodings: Vec<Encoding>,
    /// The items, in file order.
    pub orders: Vec<WriteOrder>,
}

/// An item to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOrder {
    /// The position in the rank's [`SavePlan`].
    pub item: u32,
    /// The placement of its stored bytes.
    pub placement: Placement,
}

/// The items that one rank reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadPlan {
    /// The items; no two fill the same element.
    pub items: Vec<ReadItem>,
}

/// One copy from the checkpoint into a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadItem {
    /// The position of the entry in the [`CheckpointMetadata`].
    pub entry: u32,
    /// The position of the leaf in the load's [`StateIndex`].
    pub leaf: u32,
    /// The data to copy.
    pub kind: ReadKind,
}

impl ReadItem {
    /// The error of a sink that gets data for this item, which it did not request.
    #[must_use]
    pub fn unrequested(&self) -> PlanError {
        PlanError::Data(DataProblem::Unrequested { entry: self.entry, leaf: self.leaf })
    }
}

/// The data that a [`ReadItem`] copies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadKind {
    /// Elements of a tensor.
    Tensor {
        /// The stored chunk.
        chunk: u32,
        /// The shard of the leaf.
        shard: u32,
        /// The elements, in the coordinates of the whole tensor; inside both chunk and shard.
        region: Region,
    },
    /// The whole object.
    Object,
}

/// The differences between a checkpoint and the state to load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Requested names that are not stored.
    pub missing: Vec<Arc<str>>,
    /// Stored names that are not requested.
    pub unexpected: Vec<Arc<str>>,
    /// Tensors of another shape: FQN, stored, requested.
    pub shapes: Vec<(Arc<str>, Dims, Dims)>,
    /// Tensors of another dtype: FQN, stored, requested.
    pub dtypes: Vec<(Arc<str>, DType, DType)>,
    /// A tensor on one side and an object on the other: FQN, and whether the stored one is the
    /// tensor.
    pub kinds: Vec<(Arc<str>, bool)>,
    /// Requested elements that no stored chunk contains: FQN, and their number.
    pub uncovered: Vec<(Arc<str>, u64)>,
}

impl LoadReport {
    /// Whether everything requested can be loaded exactly and completely. Unexpected entries do not
    /// count.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
            && self.shapes.is_empty()
            && self.dtypes.is_empty()
            && self.kinds.is_empty()
            && self.uncovered.is_empty()
    }
}

impl fmt::Display for LoadReport {
    /// The first differences of each kind, on one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 5;
        let mut separator = "";
        let mut part = |f: &mut fmt::Formatter<'_>, what: &str, all: Vec<String>| {
            if all.is_empty() {
                return Ok(());
            }
            let more = all.len().saturating_sub(SHOWN);
            let shown = all.into_iter().take(SHOWN).collect::<Vec<_>>().join(", ");
            write!(f, "{separator}{what} {shown}")?;
            separator = "; ";
            if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
        };
        let quoted = |all: &[Arc<str>]| all.iter().map(|fqn| format!("{fqn:?}")).collect();
        part(f, "missing", quoted(&self.missing))?;
        let shapes = self.shapes.iter();
        part(
            f,
            "shape of",
            shapes
                .map(|(fqn, has, want)| format!("{fqn:?} (stored {has}, wanted {want})"))
                .collect(),
        )?;
        let dtypes = self.dtypes.iter();
        part(
            f,
            "dtype of",
            dtypes
                .map(|(fqn, has, want)| format!("{fqn:?} (stored {has}, wanted {want})"))
                .collect(),
        )?;
        let kinds = self.kinds.iter();
        let kind = |tensor: bool| if tensor { "tensor" } else { "object" };
        part(
            f,
            "kind of",
            kinds
                .map(|(fqn, tensor)| {
                    format!("{fqn:?} (stored {}, wanted {})", kind(*tensor), kind(!*tensor))
                })
                .collect(),
        )?;
        let uncovered = self.uncovered.iter();
        part(
            f,
            "elements absent from",
            uncovered.map(|(fqn, n)| format!("{fqn:?} ({n})")).collect(),
        )?;
        part(f, "unexpected", quoted(&self.unexpected))
    }
}
