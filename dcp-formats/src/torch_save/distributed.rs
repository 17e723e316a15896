//! Tensors of several ranks in the file of one rank: `DTensor` and `ShardedTensor`.
//!
//! Both are pickled as a wrapper without a storage, which has the shape of the whole tensor, and a state with the
//! tensors of this rank. [`distributed`] reads the state as data: of a `DTensor` the mesh and the placements, of a
//! `ShardedTensor` the region of each shard. What the shards make up is for the caller to say. Class paths of
//! PyTorch 2.4 to 2.15 are known by their last part, because modules moved between versions. A mesh is
//! pickled once for a file and is parsed once.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::path::StatePath;
use dcp_core::{DType, Dims, FormatError, Region};

use crate::pickle::{Node, NodeId, Pickle};
use crate::torch_tensor::{TensorLayout, wrapped};

/// The maximum number of ranks in a mesh.
const RANKS_MAX: u64 = 1 << 22;

/// A tensor of several ranks, of which the file has the part of one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DistributedTensor {
    /// The name in the file.
    pub fqn: Arc<str>,
    /// The path in the file.
    pub path: StatePath,
    /// The dtype of the whole tensor.
    pub dtype: DType,
    /// The shape of the whole tensor.
    pub shape: Dims,
    /// The division of the tensor.
    pub division: RankDivision,
    /// The tensors of this rank, by position in the reader's metadata.
    pub locals: Vec<usize>,
}

/// The division of a tensor among ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RankDivision {
    /// A `DTensor`: one placement for each axis of the mesh.
    Mesh {
        /// The mesh.
        mesh: Arc<RankMesh>,
        /// The placements.
        placements: Vec<MeshPlacement>,
        /// The axes of the mesh in the order in which they cut, where the file has one (2.15).
        order: Option<Vec<usize>>,
    },
    /// A `ShardedTensor`.
    Shards {
        /// The shards of this rank, in the order of [`DistributedTensor::locals`].
        own: Vec<Region>,
        /// The shards of all ranks.
        all: Vec<Region>,
        /// The rank that wrote the file.
        rank: u64,
        /// The number of ranks.
        world: u64,
    },
}

/// The mesh of a `DTensor`, as the file of one rank has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankMesh {
    /// The size of each axis.
    pub shape: Vec<u64>,
    /// The place of this rank; `None` where it is not in the mesh.
    pub coordinate: Option<Vec<u64>>,
    /// The rank that wrote the file, where the file has it.
    pub rank: Option<u64>,
    /// The number of ranks in the mesh, or in the mesh of which it is a part.
    pub world: u64,
    /// The names of axes.
    pub names: Vec<String>,
}

/// The placement of a `DTensor` along one axis of its mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeshPlacement {
    /// All ranks have the same.
    Replicate,
    /// The axis `dim` of the tensor is cut.
    Shard {
        /// The axis of the tensor.
        dim: usize,
    },
    /// The axis `dim` is cut after later axes of the mesh have cut it into `split` parts.
    StridedShard {
        /// The axis of the tensor.
        dim: usize,
        /// The number of parts before.
        split: u64,
    },
    /// Ranks have addends.
    Partial,
}

/// A wrapper that was read, before its tensors have positions.
pub(super) struct Wrapper {
    pub(super) dtype: DType,
    pub(super) shape: Dims,
    pub(super) division: RankDivision,
    pub(super) locals: Vec<TensorLayout>,
}

/// The meshes of a file by node.
pub(super) type Meshes = HashMap<NodeId, Arc<RankMesh>>;

fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new("distributed tensor", problem)
}

/// The distributed tensor of a node; `None` for any other node.
///
/// # Errors
///
/// When a `DTensor` or `ShardedTensor` has a state of an unknown form.
pub(super) fn distributed(
    pickle: &Pickle<'_>,
    node: NodeId,
    meshes: &mut Meshes,
) -> Result<Option<Wrapper>, FormatError> {
    let Some(found) = wrapped(pickle, node) else { return Ok(None) };
    let (dtype, shape) = (found.dtype, found.shape);
    let Some([_, _, _, state]) = pickle.object(node).map(|object| pickle.tuple(object.args)) else {
        return Ok(None);
    };
    let (division, locals) = match found.class.rsplit('.').next() {
        Some("DTensor") => of_mesh(pickle, *state, meshes)?,
        Some("ShardedTensor") => of_shards(pickle, *state)?,
        _ => return Ok(None),
    };
    Ok(Some(Wrapper { dtype, shape, division, locals }))
}

fn of_mesh(
    pickle: &Pickle<'_>,
    state: NodeId,
    meshes: &mut Meshes,
) -> Result<(RankDivision, Vec<TensorLayout>), FormatError> {
    let [_, slots] = pickle.tuple(state) else { return Err(bad("a DTensor has no slots")) };
    let local = field(pickle, *slots, "_local_tensor").ok_or_else(|| bad("no _local_tensor"))?;
    let local = TensorLayout::from_node(pickle, local)?
        .ok_or_else(|| bad("its local tensor is not a plain tensor"))?;
    let spec = field(pickle, *slots, "_spec").and_then(|spec| attributes(pickle, spec));
    let spec = spec.ok_or_else(|| bad("a DTensor has no spec"))?;
    let mesh = field(pickle, spec, "mesh").ok_or_else(|| bad("a DTensor has no mesh"))?;
    let mesh = match meshes.get(&mesh) {
        Some(known) => Arc::clone(known),
        None => {
            let read = attributes(pickle, mesh).and_then(|state| read_mesh(pickle, state));
            let read = Arc::new(read.ok_or_else(|| bad("its mesh has an unknown form"))?);
            Arc::clone(meshes.entry(mesh).or_insert(read))
        }
    };
    let placements = field(pickle, spec, "placements").map(|of| items(pickle, of));
    let placements: Option<Vec<_>> =
        placements.and_then(|all| all.iter().map(|one| placement(pickle, *one)).collect());
    let placements = placements.ok_or_else(|| bad("its placements have an unknown form"))?;
    if placements.len() != mesh.shape.len() {
        let (placements, axes) = (placements.len(), mesh.shape.len());
        return Err(bad(format!("{placements} placements on a mesh of {axes} axes")));
    }
    let order = field(pickle, spec, "shard_order").and_then(|order| shard_order(pickle, order));
    Ok((RankDivision::Mesh { mesh, placements, order }, vec![local]))
}

/// The axes of a mesh in the order in which they cut, of `(ShardOrderEntry(tensor_dim, mesh_dims), ...)`.
fn shard_order(pickle: &Pickle<'_>, node: NodeId) -> Option<Vec<usize>> {
    let mut order = Vec::new();
    for entry in pickle.tuple(node) {
        let [_, axes] = pickle.tuple(pickle.object(*entry)?.args) else { return None };
        for axis in items(pickle, *axes) {
            order.push(usize::try_from(pickle.int(*axis)?).ok()?);
        }
    }
    (!order.is_empty()).then_some(order)
}

fn placement(pickle: &Pickle<'_>, node: NodeId) -> Option<MeshPlacement> {
    let object = pickle.object(node)?;
    let (_, class) = pickle.global_name(object.class)?;
    let number = |name: &str| pickle.int(field(pickle, object.state?, name)?);
    let dim = || usize::try_from(number("dim")?).ok();
    Some(match class {
        "Replicate" => MeshPlacement::Replicate,
        "Shard" => MeshPlacement::Shard { dim: dim()? },
        "_StridedShard" => {
            let split = u64::try_from(number("split_factor")?).ok()?;
            MeshPlacement::StridedShard { dim: dim()?, split }
        }
        "Partial" | "_Partial" => MeshPlacement::Partial,
        _ => return None,
    })
}

fn read_mesh(pickle: &Pickle<'_>, state: NodeId) -> Option<RankMesh> {
    let number = |name: &str| u64::try_from(pickle.int(field(pickle, state, name)?)?).ok();
    let list = |name: &str| Some(items(pickle, field(pickle, state, name)?));
    let coordinate = list("_coordinate_on_dim").filter(|all| !all.is_empty());
    let coordinate: Option<Vec<u64>> =
        coordinate.and_then(|all| all.iter().map(|id| uint(pickle, *id)).collect());
    let names = list("_mesh_dim_names").or_else(|| list("mesh_dim_names")).unwrap_or_default();
    let names = names.iter().filter_map(|name| Some(pickle.str(*name)?.to_owned())).collect();
    let (shape, ranks): (Vec<u64>, &str) = match field(pickle, state, "_layout") {
        Some(layout) => {
            let axes = field(pickle, attributes(pickle, layout)?, "axes")?;
            let axes = pickle.tuple(axes).iter().map(|axis| {
                let sizes = field(pickle, attributes(pickle, *axis)?, "shape")?;
                let sizes = items(pickle, sizes).iter().map(|size| uint(pickle, *size));
                sizes.collect::<Option<Vec<_>>>()?.into_iter().try_fold(1, u64::checked_mul)
            });
            (axes.collect::<Option<_>>()?, "_rank_map")
        }
        None => {
            let mesh = TensorLayout::from_node(pickle, field(pickle, state, "mesh")?).ok()??;
            (mesh.sizes().to_vec(), "mesh")
        }
    };
    let world = TensorLayout::from_node(pickle, field(pickle, state, ranks)?).ok()??;
    let world = world.sizes().checked_volume()?;
    let volume = shape.iter().try_fold(1, |all: u64, size| all.checked_mul(*size))?;
    let fits = coordinate.as_ref().is_none_or(|at| {
        at.len() == shape.len() && at.iter().zip(&shape).all(|(at, size)| at < size)
    });
    let flat = || {
        let ranks = list("_flatten_mesh_list")?;
        let at = coordinate.as_ref()?.iter().zip(&shape).fold(0, |all, (at, size)| all * size + at);
        uint(pickle, *ranks.get(usize::try_from(at).ok()?)?)
    };
    if volume > world || world > RANKS_MAX || !fits {
        return None;
    }
    let rank = number("_rank").or_else(flat);
    Some(RankMesh { shape, coordinate, rank, world, names })
}

fn of_shards(
    pickle: &Pickle<'_>,
    state: NodeId,
) -> Result<(RankDivision, Vec<TensorLayout>), FormatError> {
    let [shards, metadata, group, ..] = pickle.tuple(state) else {
        return Err(bad("a ShardedTensor has a state of an unknown form"));
    };
    let unknown = || bad("the metadata of a ShardedTensor has an unknown form");
    let (mut own, mut locals) = (Vec::new(), Vec::new());
    for shard in items(pickle, *shards) {
        let shard = attributes(pickle, *shard).ok_or_else(unknown)?;
        let tensor = field(pickle, shard, "tensor").ok_or_else(unknown)?;
        let tensor = TensorLayout::from_node(pickle, tensor)?
            .ok_or_else(|| bad("a shard is not a plain tensor"))?;
        let metadata = field(pickle, shard, "metadata").ok_or_else(unknown)?;
        own.push(region(pickle, metadata).ok_or_else(unknown)?);
        locals.push(tensor);
    }
    let all = attributes(pickle, *metadata).ok_or_else(unknown)?;
    let all = field(pickle, all, "shards_metadata").ok_or_else(unknown)?;
    let all: Option<Vec<_>> = items(pickle, all).iter().map(|one| region(pickle, *one)).collect();
    let all = all.ok_or_else(unknown)?;
    let group = attributes(pickle, *group).ok_or_else(unknown)?;
    let number = |name: &str| uint(pickle, field(pickle, group, name)?);
    let rank = number("global_rank").ok_or_else(unknown)?;
    let world = number("global_world_size").ok_or_else(unknown)?;
    Ok((RankDivision::Shards { own, all, rank, world }, locals))
}

fn region(pickle: &Pickle<'_>, metadata: NodeId) -> Option<Region> {
    let metadata = attributes(pickle, metadata)?;
    let numbers = |name: &str| -> Option<Dims> {
        let all = items(pickle, field(pickle, metadata, name)?);
        all.iter().map(|id| uint(pickle, *id)).collect()
    };
    Region::new(numbers("shard_offsets")?, numbers("shard_sizes")?).ok()
}

fn uint(pickle: &Pickle<'_>, id: NodeId) -> Option<u64> {
    u64::try_from(pickle.int(id)?).ok()
}

/// The items of a list or tuple; none for other nodes.
fn items<'p>(pickle: &'p Pickle<'_>, id: NodeId) -> &'p [NodeId] {
    match pickle.node(id) {
        Node::List(span) | Node::Tuple(span) => pickle.children(*span),
        _ => &[],
    }
}

/// The dict of an instance's attributes: its state, or the second half of the state of a class with slots.
fn attributes(pickle: &Pickle<'_>, id: NodeId) -> Option<NodeId> {
    let state = pickle.object(id)?.state?;
    match pickle.tuple(state) {
        [_, slots] => Some(*slots),
        _ => Some(state),
    }
}

/// The value of a string key in a dict node.
fn field(pickle: &Pickle<'_>, dict: NodeId, name: &str) -> Option<NodeId> {
    let Node::Dict(span) = pickle.node(dict) else { return None };
    pickle.entries(*span).find(|(key, _)| pickle.str(*key) == Some(name)).map(|(_, value)| value)
}
