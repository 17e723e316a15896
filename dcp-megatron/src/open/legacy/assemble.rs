//! Assembles the parts of ranks to whole tensors.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::{DType, Dims, Region, Tensor, Value};
use dcp_jobs::Source;
use dcp_jobs::get::{Found, find};
use dcp_jobs::read::read_object;
use dcp_jobs::view::{AssembledBuilder, Piece, PieceFrom};
use indexmap::IndexMap;

use super::MODEL_FILE;
use super::folders::Grid;
use super::leaves::{ByRank, Leaf, MIXER, Slot};
use crate::args::MegatronArgs;
use crate::error::MegatronError;
use crate::partition::{TensorCut, tensor_cut};

/// The leaves that have one name in a distributed checkpoint: by their places on the axes of layers
/// and experts, the parts that ranks have of each.
#[derive(Default)]
struct Named<'l> {
    cells: BTreeMap<Vec<u64>, (&'l Slot, &'l ByRank)>,
}

/// Adds everything to the view.
pub(super) async fn add(
    view: &mut AssembledBuilder,
    leaves: IndexMap<Slot, ByRank>,
    grid: &Grid,
    args: Option<&MegatronArgs>,
    sources: &[Source],
) -> Result<(), MegatronError> {
    let model = Model { leaves: &leaves, grid, args };
    let stacked = model.stacked()?;
    let mut all: IndexMap<String, Named<'_>> = IndexMap::new();
    for (slot, by_rank) in &leaves {
        let (mut name, mut cell) = (slot.name.clone(), Vec::new());
        if let Some((stack, n)) = &slot.layer {
            if stacked.contains(stack.as_str()) {
                name = format!("{stack}.{name}");
                cell.push(*n);
            } else {
                name = format!("{stack}.{n}.{name}");
            }
        }
        cell.extend(slot.expert);
        all.entry(name).or_default().cells.insert(cell, (slot, by_rank));
    }
    for (fqn, named) in all {
        let extents = model.extents(&fqn, &named)?;
        if fqn.ends_with("_extra_state") {
            for (cell, (_, by_rank)) in &named.cells {
                let Some(leaf) = by_rank.leaves.values().next() else { continue };
                let (cell, grid) = match cell.is_empty() {
                    true => ("0".to_owned(), "1".to_owned()),
                    false => (dotted(cell), dotted(&extents)),
                };
                let value = extra_state(sources, leaf).await?;
                view.object(format!("{fqn}/shard_{cell}_{grid}"), None, Value::List(vec![value]))?;
            }
            continue;
        }
        let Some(whole) = model.whole(&fqn, &named, &extents)? else { continue };
        view.tensor(fqn, None, whole.dtype, whole.shape, whole.pieces)?;
    }
    Ok(())
}

fn dotted(numbers: &[u64]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(".")
}

/// The value of an extra state, whatever it is stored as.
async fn extra_state(sources: &[Source], leaf: &Leaf) -> Result<Value, MegatronError> {
    let Some(source) = sources.get(leaf.part) else { return Ok(Value::None) };
    let metadata = source.metadata().await?;
    let Some((fqn, _)) = metadata.at(leaf.entry) else { return Ok(Value::None) };
    let Some((dtype, shape)) = &leaf.tensor else { return Ok(read_object(source, fqn).await?) };
    let Found::Tensor(found) = find(source, fqn, None).await? else { return Ok(Value::None) };
    let bytes = found.read().await?;
    let tensor = Tensor::replicated(*dtype, shape.clone(), bytes.to_vec());
    let tensor = tensor.map_err(|error| MegatronError::Legacy {
        folder: MODEL_FILE.to_owned(),
        problem: format!("{fqn:?}: {error}"),
    })?;
    Ok(Value::Tensor(tensor))
}

struct Model<'l> {
    leaves: &'l IndexMap<Slot, ByRank>,
    grid: &'l Grid,
    args: Option<&'l MegatronArgs>,
}

/// A tensor put together.
struct Whole {
    dtype: DType,
    shape: Dims,
    pieces: Vec<Piece>,
}

/// The part of a parameter that one box of a rank's tensor is.
struct Part<'l> {
    /// In the parameter, without the axes of layers and experts.
    region: Region,
    leaf: &'l Leaf,
    /// In the rank's tensor.
    local: Region,
}

impl<'l> Model<'l> {
    fn error(&self, by_rank: &ByRank, tp: u32, problem: String) -> MegatronError {
        let folder = self.grid.folder(tp, by_rank.pp, by_rank.group);
        MegatronError::Legacy { folder, problem }
    }

    /// Whether Megatron-Core keeps layers one by one, alike or not: the arguments let them differ.
    fn layers_may_differ(&self) -> bool {
        let arg = |name: &str| self.args.and_then(|args| args.get(name)).map(Value::view);
        let by_frequency = |name| match arg(name) {
            Some(Value::Int(every)) => *every > 1,
            Some(Value::List(_)) => true,
            _ => false,
        };
        let given = |name| arg(name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
        ["moe_layer_freq", "linear_attention_freq"].into_iter().any(by_frequency)
            || [
                "hybrid_layer_pattern",
                "hybrid_override_pattern",
                "heterogeneous_layers_config_path",
                "heterogeneous_layers_config_encoded_json",
            ]
            .into_iter()
            .any(given)
            || matches!(arg("hetereogenous_dist_checkpoint"), Some(Value::Bool(true)))
    }

    /// The stacks of layers that are all alike, which distributed checkpoints keep as tensors with
    /// an axis of layers. Layers of multi-token prediction and of hybrid models are kept one by one.
    fn stacked(&self) -> Result<BTreeSet<&'l str>, MegatronError> {
        let mut stacks: BTreeMap<&str, BTreeMap<u64, BTreeSet<_>>> = BTreeMap::new();
        let mut numbered = BTreeSet::new();
        for (slot, by_rank) in self.leaves {
            let Some((stack, n)) = &slot.layer else { continue };
            if slot.name.starts_with(MIXER) {
                numbered.insert(&**stack);
            }
            let tensor = by_rank.leaves.values().next().and_then(|leaf| leaf.tensor.as_ref());
            let shape = tensor.map(|(dtype, shape)| (dtype.name(), shape));
            let layers = stacks.entry(stack).or_default().entry(*n).or_default();
            layers.insert((&slot.name, slot.expert, shape));
        }
        let mut alike = BTreeSet::new();
        for (stack, layers) in stacks {
            if let Some((n, _)) = (0..).zip(layers.keys()).find(|(n, found)| n != *found) {
                return Err(MegatronError::Legacy {
                    folder: "mp_rank_*".to_owned(),
                    problem: format!("layer {n} of {stack:?} is in none of the folders"),
                });
            }
            let mut contents = layers.values();
            let first = contents.next();
            let may_differ = numbered.contains(stack) || self.layers_may_differ();
            if !may_differ
                && !stack.starts_with("mtp.")
                && contents.all(|other| Some(other) == first)
            {
                alike.insert(stack);
            }
        }
        Ok(alike)
    }

    /// Returns the numbers of layers and experts of a name, after checking that all are there.
    fn extents(&self, fqn: &str, named: &Named<'_>) -> Result<Vec<u64>, MegatronError> {
        let axes = named.cells.keys().next().map_or(0, Vec::len);
        let extents: Vec<u64> = (0..axes)
            .map(|axis| {
                let at = named.cells.keys().filter_map(|cell| cell.get(axis));
                at.max().map_or(0, |most| most.saturating_add(1))
            })
            .collect();
        let same = named.cells.keys().all(|cell| cell.len() == axes);
        if same && dcp_core::dims::checked_volume(&extents) == Some(named.cells.len() as u64) {
            return Ok(extents);
        }
        Err(MegatronError::Legacy {
            folder: "mp_rank_*".to_owned(),
            problem: format!(
                "{fqn:?} is there for {} layers and experts, which should be {extents:?}",
                named.cells.len()
            ),
        })
    }

    /// A tensor of all layers and experts; `None` of what is no tensor.
    fn whole(
        &self,
        fqn: &str,
        named: &Named<'l>,
        extents: &[u64],
    ) -> Result<Option<Whole>, MegatronError> {
        let front = extents.len();
        let mut first: Option<(DType, Dims)> = None;
        let mut pieces = Vec::new();
        for (cell, (slot, by_rank)) in &named.cells {
            let Some((dtype, own, parts)) = self.parameter(fqn, slot, by_rank)? else {
                return Ok(None);
            };
            let known = first.get_or_insert_with(|| (dtype, own.clone()));
            if *known != (dtype, own.clone()) {
                let problem = format!(
                    "{fqn:?} is {dtype} of {own} in layer or expert {cell:?}, and {} of {} before",
                    known.0, known.1
                );
                return Err(self.error(by_rank, 0, problem));
            }
            for part in parts {
                let bad = |error| self.error(by_rank, 0, format!("{fqn:?}: {error}"));
                let axes = part.leaf.axes.iter().copied().map(Some);
                let axes = std::iter::repeat_n(None, front).chain(axes);
                let offsets: Dims =
                    cell.iter().chain(part.region.offsets().iter()).copied().collect();
                let ones = std::iter::repeat_n(&1, front);
                let sizes: Dims = ones.chain(part.region.sizes().iter()).copied().collect();
                pieces.push(Piece {
                    region: Region::new(offsets, sizes).map_err(bad)?,
                    from: PieceFrom::Box {
                        part: part.leaf.part,
                        entry: part.leaf.entry,
                        region: part.leaf.in_entry(&part.local).map_err(bad)?,
                        axes: axes.collect(),
                    },
                });
            }
        }
        let whole = first.map(|(dtype, own)| {
            let shape = extents.iter().chain(own.iter()).copied().collect();
            Whole { dtype, shape, pieces }
        });
        Ok(whole)
    }

    /// One parameter of one layer: its dtype and shape, and the parts that ranks have of it.
    fn parameter(
        &self,
        fqn: &str,
        slot: &Slot,
        by_rank: &'l ByRank,
    ) -> Result<Option<(DType, Dims, Vec<Part<'l>>)>, MegatronError> {
        let tensor = by_rank.leaves.values().find_map(|leaf| leaf.tensor.as_ref());
        let Some((dtype, local)) = tensor else { return Ok(None) };
        let tp = if slot.expert.is_some() { self.grid.etp } else { self.grid.tp };
        let cut = tensor_cut(&slot.name);
        if cut.is_none() && tp > 1 {
            let problem = format!(
                "{fqn:?} has a part in each of {tp} folders, and no rule says what parts of it they \
                 are"
            );
            return Err(self.error(by_rank, 0, problem));
        }
        let leaves: Vec<&Leaf> = (0..tp)
            .map(|rank| {
                let absent = || self.error(by_rank, rank, format!("{fqn:?} is not in it"));
                let leaf = by_rank.leaves.get(&rank).ok_or_else(absent)?;
                match &leaf.tensor {
                    Some((other, shape)) if (other, shape) == (dtype, local) => Ok(leaf),
                    Some((other, shape)) => {
                        let problem = format!(
                            "{fqn:?} is {other} of {shape} in it, and {dtype} of {local} elsewhere"
                        );
                        Err(self.error(by_rank, rank, problem))
                    }
                    None => {
                        Err(self.error(by_rank, rank, format!("{fqn:?} is not a tensor in it")))
                    }
                }
            })
            .collect::<Result<_, _>>()?;
        let axis = match cut {
            _ if tp == 1 => None,
            None | Some(TensorCut::Replicated) => None,
            Some(TensorCut::Column | TensorCut::Gated) => Some(0),
            Some(TensorCut::Row) => Some(1),
        };
        let bad = |error: dcp_core::region::RegionError| {
            self.error(by_rank, 0, format!("{fqn:?}: {error}"))
        };
        let full = Region::full(local.clone()).map_err(bad)?;
        let Some(axis) = axis else {
            let leaf = leaves.first().copied();
            let parts = leaf.map(|leaf| Part { region: full.clone(), leaf, local: full.clone() });
            return Ok(Some((*dtype, local.clone(), parts.into_iter().collect())));
        };
        let len = *local.get(axis).ok_or_else(|| {
            let problem = format!("{fqn:?} is cut along axis {axis}, and has the shape {local}");
            self.error(by_rank, 0, problem)
        })?;
        let twice = cut == Some(TensorCut::Gated) && self.is_gated(slot, local);
        let fragments = if twice { 2 } else { 1 };
        if len % fragments != 0 {
            let problem = format!("{fqn:?} is two matrices, and has {len} rows");
            return Err(self.error(by_rank, 0, problem));
        }
        let each = len / fragments;
        let mut shape = local.clone();
        if let Some(size) = shape.get_mut(axis) {
            *size = len.saturating_mul(u64::from(tp));
        }
        let boxed = |start: u64| {
            let (mut offsets, mut sizes) = (Dims::zeros(local.ndim()), local.clone());
            if let (Some(offset), Some(size)) = (offsets.get_mut(axis), sizes.get_mut(axis)) {
                (*offset, *size) = (start, each);
            }
            Region::new(offsets, sizes)
        };
        let mut parts = Vec::new();
        for (rank, leaf) in (0_u64..).zip(leaves) {
            for fragment in 0..fragments {
                // Ranks' parts of the first matrix, then their parts of the second.
                let at = (fragment * u64::from(tp) + rank).saturating_mul(each);
                let region = boxed(at).map_err(bad)?;
                let local = boxed(fragment * each).map_err(bad)?;
                parts.push(Part { region, leaf, local });
            }
        }
        Ok(Some((*dtype, shape, parts)))
    }

    /// Whether the first matrix of an MLP is two: it puts out twice what the second one takes in.
    fn is_gated(&self, slot: &Slot, local: &Dims) -> bool {
        let second = slot
            .name
            .rsplit_once("linear_fc1.")
            .map(|(module, _)| Slot { name: format!("{module}linear_fc2.weight"), ..slot.clone() });
        let second = second.and_then(|second| self.leaves.get(&second));
        let second = second.and_then(|by_rank| by_rank.leaves.values().next()?.tensor.as_ref());
        let taken = second.and_then(|(_, shape)| shape.last().copied());
        match (local.first().copied(), taken) {
            (Some(out), Some(taken)) if out == taken => false,
            (Some(out), Some(taken)) if taken.checked_mul(2) == Some(out) => true,
            _ => self.args.and_then(MegatronArgs::swiglu).unwrap_or(false),
        }
    }
}
