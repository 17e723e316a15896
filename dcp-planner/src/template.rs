//! State made from a checkpoint alone, to load into when there is no model at hand.

use std::sync::Arc;

use dcp_core::dims::checked_volume;
use dcp_core::error::{ChunksProblem, StateProblem, TensorError};
use dcp_core::metadata::{Entry, Layout, TensorEntry};
use dcp_core::path::{PathItem, StatePath};
use dcp_core::plan::{LeafKind, StateIndex, StateLeaf};
use dcp_core::{CheckpointMetadata, PlanError, Rank, StateDict, Tensor, Value};

use crate::filter::KeyFilter;
use crate::flatten::tensor_kind;
use crate::mesh::{chunk_along, longest_axis};
use crate::unflatten::unflatten;

/// The largest expansion of a compressed byte; that of Zstandard is less.
const MAX_EXPANSION: u64 = 1 << 16;

/// Flat state with zeroed memory for what a checkpoint holds, as PyTorch's
/// `_EmptyStateDictLoadPlanner` allocates it.
///
/// It stays flat while it is loaded. PyTorch flattens the nested state dict again, and then requests
/// the gaps in lists that held empty dicts, which are not stored (2.15).
#[derive(Clone, Debug, Default)]
pub struct Template {
    leaves: Vec<TemplateLeaf>,
}

/// A leaf of a [`Template`].
#[derive(Clone, Debug)]
pub struct TemplateLeaf {
    /// The flat name.
    pub fqn: Arc<str>,
    /// The nested place, if the checkpoint has it.
    pub path: Option<StatePath>,
    /// A tensor of zeros, or `None` in the place of an object.
    pub value: Value,
}

/// The axis along which whole tensors are divided among the ranks of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShardAxis {
    /// Along axis 0, as FSDP does.
    #[default]
    Rows,
    /// Along the longest axis, so that more ranks get a part.
    LongestAxis,
}

impl Template {
    /// Whole tensors, of those that `filter` selects.
    ///
    /// # Errors
    ///
    /// [`ChunksProblem::Uncovered`] for a tensor of which fewer bytes are stored than it claims to
    /// have, so that no memory is claimed for data that does not exist.
    pub fn whole(metadata: &CheckpointMetadata, filter: &KeyFilter) -> Result<Self, PlanError> {
        Self::whole_within(metadata, filter, 0)
    }

    /// As [`whole`](Self::whole), where chunks that the reader [computes](Layout::Computed), such as
    /// those of Megatron-Core's merged ranks, have together up to `computed_bytes`.
    ///
    /// # Errors
    ///
    /// As [`whole`](Self::whole).
    pub fn whole_within(
        metadata: &CheckpointMetadata,
        filter: &KeyFilter,
        computed_bytes: u64,
    ) -> Result<Self, PlanError> {
        Self::of(metadata, filter, computed_bytes, |tensor| {
            Tensor::zeros(tensor.dtype, tensor.shape.clone())
        })
    }

    /// The template of `rank` of `world_size` for the tensors that `filter` selects, in consecutive
    /// parts of equal length but for the last. Tensors without axes are replicated; ranks behind
    /// the end of a tensor get no part of it.
    ///
    /// # Errors
    ///
    /// As [`Template::whole`].
    pub fn sharded(
        metadata: &CheckpointMetadata,
        filter: &KeyFilter,
        rank: Rank,
        world_size: u32,
        cut: ShardAxis,
    ) -> Result<Self, PlanError> {
        Self::of(metadata, filter, 0, |tensor| {
            let axis = match cut {
                ShardAxis::Rows => (tensor.shape.ndim() > 0).then_some(0),
                ShardAxis::LongestAxis => longest_axis(&tensor.shape),
            };
            let Some(axis) = axis else {
                return Tensor::zeros(tensor.dtype, tensor.shape.clone());
            };
            let region = chunk_along(&tensor.shape, axis, world_size, rank);
            Tensor::zeros_sharded(tensor.dtype, tensor.shape.clone(), region)
        })
    }

    fn of(
        metadata: &CheckpointMetadata,
        filter: &KeyFilter,
        mut computed_bytes: u64,
        mut zeros: impl FnMut(&TensorEntry) -> Result<Tensor, TensorError>,
    ) -> Result<Self, PlanError> {
        let mut leaves = Vec::new();
        for (fqn, entry) in metadata.iter().filter(|(fqn, entry)| filter.selects(fqn, entry.path()))
        {
            let value = match entry {
                Entry::Tensor(tensor) => {
                    check_claim(fqn, metadata, tensor, &mut computed_bytes)?;
                    Value::Tensor(zeros(tensor)?)
                }
                Entry::Object(_) => Value::None,
                _ => return Err(StateProblem::UnknownKind.of(fqn.to_string())),
            };
            leaves.push(TemplateLeaf { fqn: Arc::clone(fqn), path: entry.path().cloned(), value });
        }
        Ok(Self { leaves })
    }

    /// The leaves, in the order of the checkpoint.
    #[must_use]
    pub fn leaves(&self) -> &[TemplateLeaf] {
        &self.leaves
    }

    /// The leaves, to put loaded objects into.
    #[must_use]
    pub fn leaves_mut(&mut self) -> &mut [TemplateLeaf] {
        &mut self.leaves
    }

    /// The leaves as planners see them.
    #[must_use]
    pub fn index(&self) -> StateIndex {
        let leaf = |leaf: &TemplateLeaf| StateLeaf {
            fqn: Arc::clone(&leaf.fqn),
            path: leaf.path.clone(),
            kind: match &leaf.value {
                Value::Tensor(tensor) => tensor_kind(tensor),
                _ => LeafKind::Object { byte_len: 0 },
            },
        };
        StateIndex { leaves: self.leaves.iter().map(leaf).collect() }
    }

    /// The leaves as a nested state dict. Tensors share their memory with the template. A leaf
    /// without a path becomes an entry of the top level.
    ///
    /// # Errors
    ///
    /// As [`unflatten`], when paths contradict each other.
    pub fn to_state_dict(&self) -> Result<StateDict, PlanError> {
        unflatten(self.leaves.iter().map(|leaf| (leaf.place(), leaf.value.clone())))
    }
}

impl TemplateLeaf {
    /// The nested place, or one step of the flat name.
    #[must_use]
    pub fn place(&self) -> StatePath {
        match &self.path {
            Some(path) => Arc::clone(path),
            None => [PathItem::Key(Arc::clone(&self.fqn))].into(),
        }
    }
}

/// Whether the chunks of a tensor can hold what its shape claims. Computed ones take their bytes
/// from `computed_bytes`.
fn check_claim(
    fqn: &str,
    metadata: &CheckpointMetadata,
    tensor: &TensorEntry,
    computed_bytes: &mut u64,
) -> Result<(), PlanError> {
    let element = tensor.dtype.size() as u64;
    let expected = tensor
        .shape
        .checked_volume()
        .filter(|volume| volume.checked_mul(element).is_some())
        .ok_or_else(|| PlanError::TooLarge {
            what: format!("the size of {fqn:?}, of shape {},", tensor.shape),
            limit: u64::MAX,
        })?;
    let found = tensor.chunks.iter().fold(0_u64, |found, chunk| {
        let volume = checked_volume(chunk.sizes).unwrap_or(u64::MAX);
        let Some(placement) = chunk.placement else { return found };
        let encoding = metadata.encoding(&placement);
        if encoding.is_some_and(|encoding| encoding.layout == Layout::Computed) {
            let held = volume.min(*computed_bytes / element);
            *computed_bytes -= held * element;
            return found.saturating_add(held);
        }
        let packed = encoding.is_some_and(|encoding| !encoding.transforms.is_empty());
        let expansion = if packed { MAX_EXPANSION } else { 1 };
        let stored = placement.byte_len.saturating_mul(expansion) / element;
        found.saturating_add(volume.min(stored))
    });
    if found < expected {
        return Err(ChunksProblem::Uncovered { expected, found }.of(fqn));
    }
    Ok(())
}
