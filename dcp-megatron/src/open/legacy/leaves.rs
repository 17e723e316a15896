//! Renumbers layers and experts of a rank as in the whole model.

use std::collections::BTreeMap;

use dcp_core::metadata::Entry;
use dcp_core::path::PathItem;
use dcp_core::region::RegionError;
use dcp_core::{DType, Dims, Region};
use dcp_jobs::Source;
use indexmap::IndexMap;

use super::folders::{Grid, Place};
use super::fused;
use super::model_chunk;
use super::names::LocalName;
use crate::args::MegatronArgs;
use crate::error::MegatronError;

/// The module of a layer that is one of Mamba's, in hybrid models.
pub(super) const MIXER: &str = "mixer.";

/// Something in the model: a parameter, or an extra state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Slot {
    /// The stack of layers and the number of the layer in it.
    pub(super) layer: Option<(String, u64)>,
    /// The number of the expert.
    pub(super) expert: Option<u64>,
    /// The name in the layer, or the whole name.
    pub(super) name: String,
}

/// The part of a slot that one rank has.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    /// The rank's file, by its position.
    pub(super) part: usize,
    /// The entry in it.
    pub(super) entry: usize,
    /// The tensor's dtype and shape; `None` of an object.
    pub(super) tensor: Option<(DType, Dims)>,
    /// The offsets of the tensor in that of the entry.
    pub(super) start: Dims,
    /// For every axis of the tensor the one of the entry that it runs along.
    pub(super) axes: Vec<usize>,
}

impl Leaf {
    fn whole(part: usize, entry: usize, tensor: Option<(DType, Dims)>) -> Self {
        let ndim = tensor.as_ref().map_or(0, |(_, shape)| shape.ndim());
        Self { part, entry, tensor, start: Dims::zeros(ndim), axes: (0..ndim).collect() }
    }

    /// Makes an object that no file has.
    pub(super) fn nowhere(part: usize) -> Self {
        Self::whole(part, usize::MAX, None)
    }

    /// A box of the tensor, as one of the entry.
    pub(super) fn in_entry(&self, of: &Region) -> Result<Region, RegionError> {
        let (mut offsets, mut sizes) = (self.start.clone(), self.start.clone());
        sizes.iter_mut().for_each(|size| *size = 1);
        for ((axis, at), len) in self.axes.iter().zip(of.offsets().iter()).zip(of.sizes().iter()) {
            if let (Some(offset), Some(size)) = (offsets.get_mut(*axis), sizes.get_mut(*axis)) {
                *offset = offset.saturating_add(*at);
                *size = *len;
            }
        }
        Region::new(offsets, sizes)
    }
}

/// The parts that ranks of one stage have, by tensor-parallel rank, or by part of an expert.
#[derive(Clone, Debug, Default)]
pub(super) struct ByRank {
    pub(super) pp: u32,
    /// The group of experts, of what is of an expert.
    pub(super) group: Option<u32>,
    pub(super) leaves: BTreeMap<u32, Leaf>,
}

/// A leaf before the numbers of other ranks are known.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) place: usize,
    /// Its chunk of a virtual pipeline.
    pub(super) chunk: u64,
    pub(super) local: LocalName,
    pub(super) leaf: Leaf,
}

/// Everything in the models of all ranks, each thing once but for its tensor-parallel parts. What
/// is left out goes into `warnings`.
///
/// # Errors
///
/// [`MegatronError::Legacy`] when something would be lost: parameters of experts that do not say of
/// which expert they are, and copies that are none.
pub(super) async fn collect(
    grid: &Grid,
    sources: &[Source],
    args: Option<&MegatronArgs>,
    warnings: &mut Vec<String>,
) -> Result<IndexMap<Slot, ByRank>, MegatronError> {
    let mut found = Vec::new();
    for (place, source) in sources.iter().enumerate() {
        for (entry, (_, stored)) in source.metadata().await?.iter().enumerate() {
            let Some([PathItem::Key(first), rest @ ..]) = stored.path().map(|path| &**path) else {
                continue;
            };
            let Some(chunk) = model_chunk(first) else { continue };
            let tensor = match stored {
                Entry::Tensor(tensor) => Some((tensor.dtype, tensor.shape.clone())),
                _ => None,
            };
            let local = LocalName::parse(&PathItem::flat_name(rest));
            found.push(Found { place, chunk, local, leaf: Leaf::whole(place, entry, tensor) });
        }
    }
    let found = fused::taken_apart(found);
    let is_hybrid = found.iter().any(|found| found.local.name.starts_with(MIXER));
    // The norms of hybrid models have no other names.
    let is_local = !is_hybrid && is_local(&found, args);
    let tied = args.and_then(MegatronArgs::untie_embeddings_and_output_weights) == Some(false);
    let layers = Numbers::of(grid, &found);
    let mut all: IndexMap<Slot, ByRank> = IndexMap::new();
    let mut states_left_out = 0_u64;
    for Found { place, chunk, local, leaf } in found {
        let Some(rank) = grid.place(place) else { continue };
        // A copy of the embedding, for the last stage to compute with, and a state that distributed
        // checkpoints have of hybrid models only.
        if local.layer.is_none()
            && (tied && local.name == "output_layer.weight"
                || !is_hybrid && local.name == "output_layer._extra_state")
        {
            continue;
        }
        let is_state = local.name.ends_with("_extra_state");
        if grid.ep > 1 && local.is_of_all_experts() {
            if is_state {
                states_left_out += 1;
                continue;
            }
            let problem = format!(
                "{:?} is of all experts of the rank, and what part of it each of them has is not \
                 known here: have Megatron-Core save it as --ckpt-format torch_dist",
                local.name
            );
            return Err(MegatronError::Legacy { folder: rank.folder.clone(), problem });
        }
        let local = local.with_fused_norms(is_local);
        let layer = local.layer.map(|(stack, n)| {
            let before = layers.before(&stack, chunk, rank.pp);
            (stack, before.saturating_add(n))
        });
        let expert = local.expert.map(|n| {
            let each = layers.experts.get(place).copied().unwrap_or(0);
            each.saturating_mul(u64::from(rank.ep)).saturating_add(n)
        });
        let slot = Slot { layer, expert, name: local.name };
        let is_copy = expert.is_none() && !grid.is_first(place);
        let (part, group) = match expert {
            Some(_) => (rank.etp, Some(rank.ep)),
            None => (rank.tp, None),
        };
        let known = all.get(&slot);
        if let Some(known) = known {
            same(&slot, known, rank, part, &leaf)?;
        }
        let is_original = || known.is_some_and(|k| k.pp != rank.pp || k.leaves.contains_key(&part));
        if is_copy && !is_state && !is_original() {
            let problem = format!(
                "{:?} is in it, and not in the folder of the first group of experts, of which it \
                 should be a copy",
                slot.name
            );
            return Err(MegatronError::Legacy { folder: rank.folder.clone(), problem });
        }
        if is_copy {
            continue;
        }
        let known = all.entry(slot).or_insert_with(|| ByRank {
            pp: rank.pp,
            group,
            leaves: BTreeMap::new(),
        });
        // What several stages have is the same in all of them.
        if known.pp == rank.pp {
            known.leaves.entry(part).or_insert(leaf);
        }
    }
    if states_left_out > 0 {
        warnings.push(format!(
            "{states_left_out} extra states are each of all experts of a rank, not of one, and are \
             left out"
        ));
    }
    Ok(all)
}

/// Whether what a rank has is a copy of what is known, or its tensor-parallel part.
fn same(
    slot: &Slot,
    known: &ByRank,
    rank: &Place,
    part: u32,
    leaf: &Leaf,
) -> Result<(), MegatronError> {
    let refuse =
        |problem: String| Err(MegatronError::Legacy { folder: rank.folder.clone(), problem });
    if let (Some(n), true) = (slot.expert, known.group != Some(rank.ep)) {
        return refuse(format!(
            "{:?} of expert {n} is in it and in one of another group: the folders have different \
             numbers of experts",
            slot.name
        ));
    }
    let Some(first) = known.leaves.get(&part) else { return Ok(()) };
    if slot.name.ends_with("_extra_state") || first.tensor == leaf.tensor {
        return Ok(());
    }
    let shown = |leaf: &Leaf| match &leaf.tensor {
        Some((dtype, shape)) => format!("{dtype} of {shape}"),
        None => "no tensor".to_owned(),
    };
    refuse(format!(
        "{:?} is {} in it, and {} in the folder of which it should have a copy",
        slot.name,
        shown(leaf),
        shown(first)
    ))
}

/// Whether modules are those of the local implementation, whose norms are modules of their own.
fn is_local(found: &[Found], args: Option<&MegatronArgs>) -> bool {
    if let Some(implementation) = args.and_then(|args| args.text("transformer_impl")) {
        let latent = args.and_then(MegatronArgs::multi_latent_attention).unwrap_or(false);
        return implementation == "local" && !latent;
    }
    let has = |name: &str| found.iter().any(|found| found.local.name == name);
    has("self_attention.linear_qkv.weight") && !has("self_attention.linear_qkv.layer_norm_weight")
}

/// The numbers of layers and experts that ranks have.
struct Numbers {
    /// Of each stack, by chunk of the virtual pipeline and then by stage, which is the order of
    /// layers.
    layers: BTreeMap<String, BTreeMap<(u64, u32), u64>>,
    /// Experts of a layer, by position of the rank.
    experts: Vec<u64>,
}

impl Numbers {
    fn of(grid: &Grid, found: &[Found]) -> Self {
        let stages: Vec<u32> = grid.places().map(|place| place.pp).collect();
        let mut numbers = Self { layers: BTreeMap::new(), experts: vec![0; stages.len()] };
        for Found { place, chunk, local, .. } in found {
            let stage = stages.get(*place).copied().unwrap_or(0);
            if let Some((stack, n)) = &local.layer {
                let of_stack = numbers.layers.entry(stack.clone()).or_default();
                let known = of_stack.entry((*chunk, stage)).or_default();
                *known = n.saturating_add(1).max(*known);
            }
            if let (Some(n), Some(known)) = (local.expert, numbers.experts.get_mut(*place)) {
                *known = n.saturating_add(1).max(*known);
            }
        }
        numbers
    }

    /// The layers of a stack before those of a chunk of a stage.
    fn before(&self, stack: &str, chunk: u64, stage: u32) -> u64 {
        let of_stack = self.layers.get(stack).into_iter();
        let before = of_stack.flat_map(|counts| counts.range(..(chunk, stage)));
        before.fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }
}
