//! A checkpoint divided among the ranks of a Megatron-Core job.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointMetadata, Dims, Region};
use dcp_jobs::JobError;
use dcp_jobs::reshard::{Division, Held, Owner};

use super::heads::check_heads;
use super::key::{Counted, ModelKey, ObjectKey};
use super::ranks::Ranks;
use super::{TensorCut, tensor_cut};
use crate::args::MegatronArgs;
use crate::disk::common_state::COMMON_STATE;
use crate::error::MegatronError;
use crate::layout::{ParallelLayout, PipelineSplit};
use crate::optimizer::{is_optimizer_key, model_parallel_groups};

/// The most parts of one tensor; a larger number is none of a real model.
const PARTS_MAX: u64 = 1 << 22;
/// The most parts of all tensors together, all of which a job plans at once.
const PARTS_OF_ALL_MAX: u64 = 1 << 23;

/// The layers that are divided among stages as requested.
const DECODER: &str = "decoder.layers";

/// The parts of a checkpoint that each rank of a layout holds. Making it refuses tensors that cannot be
/// divided; the parts of a tensor are computed on request.
#[derive(Debug)]
pub(crate) struct MegatronDivision {
    survey: Survey,
    objects: HashMap<Arc<str>, u32>,
}

impl MegatronDivision {
    /// Divides everything that `metadata` has but the common state. `args` help where shapes do
    /// not show.
    ///
    /// # Errors
    ///
    /// [`MegatronError::Layout`], also when all tensors together would have more parts than any
    /// real model; [`MegatronError::Indivisible`]; [`MegatronError::FlatOptimizer`] when the
    /// optimizer's state belongs to ranks of another layout.
    pub(crate) fn new(
        metadata: &Arc<CheckpointMetadata>,
        layout: ParallelLayout,
        args: Option<&MegatronArgs>,
    ) -> Result<Self, MegatronError> {
        Self::within(PARTS_OF_ALL_MAX, metadata, layout, args)
    }

    /// Divides as [`new`](Self::new) does, into at most `parts_max` parts of all tensors together.
    fn within(
        parts_max: u64,
        metadata: &Arc<CheckpointMetadata>,
        layout: ParallelLayout,
        args: Option<&MegatronArgs>,
    ) -> Result<Self, MegatronError> {
        let ranks = Ranks::of(layout)?;
        refuse_flat_optimizer(metadata, layout, args)?;
        let survey = Survey::new(metadata, layout, ranks, args);
        let mut objects = HashMap::new();
        let mut left = parts_max;
        for (fqn, entry) in metadata.iter() {
            match entry {
                Entry::Tensor(tensor) => {
                    let parts = survey.check(fqn, tensor)?;
                    left = left.checked_sub(parts).ok_or_else(|| MegatronError::Layout {
                        layout,
                        problem: format!(
                            "the tensors up to {fqn:?} would be in more than {parts_max} parts; \
                             choose fewer of them at a time"
                        ),
                    })?;
                }
                Entry::Object(_) if &**fqn != COMMON_STATE => {
                    objects.insert(Arc::clone(fqn), survey.object(fqn)?);
                }
                _ => {}
            }
        }
        check_heads(layout, args)?;
        Ok(Self { survey, objects })
    }
}

impl Division for MegatronDivision {
    fn ranks(&self) -> u32 {
        self.survey.ranks.world()
    }

    fn tensor(&self, fqn: &str, tensor: &TensorEntry) -> Result<Held, JobError> {
        self.survey.tensor(fqn, tensor).map_err(|error| match error {
            MegatronError::Convert(error) => error,
            // The requested tensor is none of those that were compared.
            other => JobError::NotStorable { fqn: fqn.to_owned(), problem: other.to_string() },
        })
    }

    fn object(&self, fqn: &str) -> Owner {
        self.objects.get(fqn).map_or(Owner::Nobody, |rank| Owner::Rank(*rank))
    }

    /// Keys of Megatron-Core do not nest.
    fn is_nested(&self) -> bool {
        false
    }
}

/// Returns the split in the arguments, where these have as many stages as `layout`.
fn split_of_args(layout: ParallelLayout, args: Option<&MegatronArgs>) -> Option<PipelineSplit> {
    let was = args.and_then(MegatronArgs::pipeline_model_parallel_size);
    args.filter(|_| was == Some(layout.pp.into())).map(PipelineSplit::of_args)
}

/// Flat buffers have no parameters in them that could be cut: they stay with their ranks.
fn refuse_flat_optimizer(
    metadata: &CheckpointMetadata,
    layout: ParallelLayout,
    args: Option<&MegatronArgs>,
) -> Result<(), MegatronError> {
    let groups = model_parallel_groups(metadata.iter().map(|(fqn, _)| &**fqn));
    let Some(groups) = groups else { return Ok(()) };
    let was = |name: fn(&MegatronArgs) -> Option<u64>| args.and_then(name);
    let (tp, pp) = (
        was(MegatronArgs::tensor_model_parallel_size),
        was(MegatronArgs::pipeline_model_parallel_size),
    );
    let ep = was(MegatronArgs::expert_model_parallel_size);
    let changed = |was: Option<u64>, now: u32| was.is_some_and(|was| was != u64::from(now));
    let model_parallel = u64::from(layout.tp) * u64::from(layout.pp);
    if changed(tp, layout.tp)
        || changed(pp, layout.pp)
        || changed(ep, layout.ep)
        || groups != model_parallel
    {
        return Err(MegatronError::FlatOptimizer { groups, layout });
    }
    Ok(())
}

/// Facts about all names, which the division of one depends on.
#[derive(Debug)]
struct Survey {
    metadata: Arc<CheckpointMetadata>,
    ranks: Ranks,
    /// The number of layers of each stack.
    layers: HashMap<String, u64>,
    /// The end of each chunk of a stack's layers, and its stage.
    stages: HashMap<String, Vec<(u64, u32)>>,
    /// The number of experts of each stack, where names number them.
    experts: HashMap<String, u64>,
    gated: bool,
}

/// The cut of a tensor.
struct Cut {
    /// The axis of the parts of tensor-parallel ranks.
    axis: Option<usize>,
    /// The axes in front, of layers and experts.
    in_front: Vec<u64>,
    /// Along the axis.
    fragments: u64,
    /// The shape of every part.
    sizes: Dims,
}

impl Survey {
    fn new(
        metadata: &Arc<CheckpointMetadata>,
        layout: ParallelLayout,
        ranks: Ranks,
        args: Option<&MegatronArgs>,
    ) -> Self {
        let (mut layers, mut experts) = (HashMap::new(), HashMap::new());
        let note = |counts: &mut HashMap<String, u64>, stack: &str, count: u64| match counts
            .get_mut(stack)
        {
            Some(known) => *known = count.max(*known),
            None => _ = counts.insert(stack.to_owned(), count),
        };
        for (fqn, entry) in metadata.iter() {
            let object = ObjectKey::parse(fqn);
            let name = object.as_ref().map_or(&**fqn, |object| object.key);
            let key = ModelKey::parse(name);
            let Some((stack, layer)) = key.layers else { continue };
            let in_front = match (entry, &object) {
                (Entry::Tensor(tensor), _) => tensor.shape.first().copied(),
                (_, Some(object)) => object.grid.first().copied(),
                _ => None,
            };
            match layer {
                Counted::Axis => note(&mut layers, stack, in_front.unwrap_or(0)),
                Counted::Number(n) => note(&mut layers, stack, n.saturating_add(1)),
            }
            if let Some(Counted::Number(n)) = key.experts {
                note(&mut experts, stack, n.saturating_add(1));
            }
        }
        let gated = args.and_then(MegatronArgs::swiglu).unwrap_or(false);
        let was = split_of_args(layout, args);
        let stages = layers.iter().filter_map(|(stack, count): (&String, &u64)| {
            let (equal, count) = (PipelineSplit::default(), *count);
            let requested = if stack == DECODER { layout.split } else { equal };
            let was = was.filter(|_| stack == DECODER && requested == equal);
            let was = was.and_then(|split| split.ends(count, ranks.pp));
            Some((stack.clone(), was.or_else(|| requested.ends(count, ranks.pp))?))
        });
        let stages = stages.collect();
        Self { metadata: Arc::clone(metadata), ranks, layers, stages, experts, gated }
    }

    /// The pipeline stage of layer `n` of a stack, or of a parameter outside of all stacks.
    fn stage(&self, key: &ModelKey<'_>, n: Option<u64>) -> Result<u32, MegatronError> {
        if key.is_last() {
            return Ok(self.ranks.pp - 1);
        }
        let (Some((stack, _)), Some(n)) = (key.layers, n) else { return Ok(0) };
        let stage = self.stages.get(stack).and_then(|ends| {
            let at = ends.partition_point(|(end, _)| *end <= n);
            ends.get(at).map(|(_, stage)| *stage)
        });
        stage.ok_or_else(|| MegatronError::Indivisible {
            key: stack.to_owned(),
            what: "layers",
            axis: None,
            len: self.layers.get(stack).copied().unwrap_or(1),
            parts: self.ranks.pp.into(),
        })
    }

    /// The group of ranks that has expert `n` of `all`.
    fn expert_group(
        &self,
        key: &str,
        n: u64,
        all: u64,
        axis: Option<usize>,
    ) -> Result<u32, MegatronError> {
        let ep = u64::from(self.ranks.ep);
        share(n, all.max(1), ep).ok_or_else(|| MegatronError::Indivisible {
            key: key.to_owned(),
            what: "experts",
            axis,
            len: all,
            parts: ep,
        })
    }

    /// The ranks that cut a matrix of a layer.
    fn cutting(&self, key: &ModelKey<'_>) -> u32 {
        if key.experts.is_some() { self.ranks.etp } else { self.ranks.tp }
    }

    /// Returns the cut of a tensor; `None` of one that stays in the parts that are stored.
    fn cut(
        &self,
        fqn: &str,
        key: &ModelKey<'_>,
        tensor: &TensorEntry,
    ) -> Result<Option<Cut>, MegatronError> {
        let front = key.prepended();
        let Some(cut) = tensor_cut(key.param) else { return Ok(None) };
        let tp = self.cutting(key);
        let (axis, fragments) = match cut {
            TensorCut::Replicated => (None, 1),
            TensorCut::Column => (Some(front), u64::from(tp)),
            TensorCut::Row => (Some(front + 1), u64::from(tp)),
            TensorCut::Gated => {
                let twice = if self.is_gated(key, tensor, front) { 2 } else { 1 };
                (Some(front), twice * u64::from(tp))
            }
        };
        let shape = &tensor.shape;
        if shape.ndim() < front.max(axis.map_or(0, |axis| axis + 1)) || shape.contains(&0) {
            return Ok(None);
        }
        let len = axis.and_then(|axis| shape.get(axis)).copied().unwrap_or(1);
        if len % fragments != 0 {
            return Err(MegatronError::Indivisible {
                key: fqn.to_owned(),
                what: "elements",
                axis,
                len,
                parts: fragments,
            });
        }
        let in_front: Vec<u64> = shape.iter().take(front).copied().collect();
        let cells = in_front.iter().try_fold(fragments, |cells, len| cells.checked_mul(*len));
        if cells.is_none_or(|cells| cells > PARTS_MAX) {
            return Ok(None);
        }
        let mut sizes = shape.clone();
        sizes.iter_mut().take(front).for_each(|size| *size = 1);
        if let Some(size) = axis.and_then(|axis| sizes.get_mut(axis)) {
            *size = len / fragments;
        }
        Ok(Some(Cut { axis, in_front, fragments, sizes }))
    }

    /// Whether a tensor can be divided, and in how many parts that no index has yet.
    fn check(&self, fqn: &str, tensor: &TensorEntry) -> Result<u64, MegatronError> {
        let key = ModelKey::parse(fqn);
        let Some(cut) = self.cut(fqn, &key, tensor)? else {
            self.as_stored(tensor)?;
            return Ok(0);
        };
        for place in places(&cut.in_front) {
            self.place(fqn, &key, &place, &tensor.shape)?;
        }
        Ok(cut.in_front.iter().fold(cut.fragments, |parts, len| parts.saturating_mul(*len)))
    }

    fn tensor(&self, fqn: &str, tensor: &TensorEntry) -> Result<Held, MegatronError> {
        let key = ModelKey::parse(fqn);
        let Some(cut) = self.cut(fqn, &key, tensor)? else { return self.as_stored(tensor) };
        let Cut { axis, in_front, fragments, sizes } = cut;
        let (tp, shape) = (self.cutting(&key), &tensor.shape);
        let mut parts = Vec::new();
        for place in places(&in_front) {
            let (stage, group) = self.place(fqn, &key, &place, shape)?;
            for fragment in 0..fragments {
                let tp_rank = u32::try_from(fragment % u64::from(tp)).unwrap_or(0);
                let rank = match group {
                    Some(group) => self.ranks.expert(tp_rank, group, stage),
                    None => self.ranks.dense(tp_rank, stage),
                };
                let mut offsets = Dims::zeros(shape.ndim());
                offsets.iter_mut().zip(&place).for_each(|(offset, at)| *offset = *at);
                if let Some(offset) = axis.and_then(|axis| offsets.get_mut(axis)) {
                    *offset = fragment * sizes.get(axis.unwrap_or(0)).copied().unwrap_or(0);
                }
                parts.push((rank, region(fqn, offsets, &sizes)?));
            }
        }
        Ok(Held { sharded: parts.len() > 1, parts })
    }

    /// The stage and, of an expert, the group of ranks for the part at `place`, a position on the
    /// axes in front.
    fn place(
        &self,
        fqn: &str,
        key: &ModelKey<'_>,
        place: &[u64],
        shape: &[u64],
    ) -> Result<(u32, Option<u32>), MegatronError> {
        let layer = match key.layers {
            Some((_, Counted::Number(n))) => Some(n),
            Some((_, Counted::Axis)) => place.first().copied(),
            None => None,
        };
        let stage = self.stage(key, layer)?;
        let group = match (key.experts, key.expert_axis()) {
            (Some(Counted::Number(n)), _) => {
                let stack = key.layers.map_or("", |(stack, _)| stack);
                let all = self.experts.get(stack).copied().unwrap_or(n.saturating_add(1));
                Some(self.expert_group(fqn, n, all, None)?)
            }
            (Some(Counted::Axis), Some(axis)) => {
                let n = place.get(axis).copied().unwrap_or(0);
                let all = shape.get(axis).copied().unwrap_or(1);
                Some(self.expert_group(fqn, n, all, Some(axis))?)
            }
            _ => None,
        };
        Ok((stage, group))
    }

    /// Whether a first matrix is gated: it has twice as many outputs as the second one has inputs.
    fn is_gated(&self, key: &ModelKey<'_>, tensor: &TensorEntry, front: usize) -> bool {
        let out = tensor.shape.get(front).copied();
        let names = key.second_matrix().into_iter().flatten();
        let second = names.filter_map(|name| self.metadata.get(&name)?.as_tensor()).next();
        match (out, second.and_then(|second| second.shape.last().copied())) {
            (Some(out), Some(taken)) if taken > 0 && taken.checked_mul(2) == Some(out) => true,
            (Some(out), Some(taken)) if out == taken => false,
            _ => self.gated && out.is_some_and(|out| out % 2 == 0),
        }
    }

    /// The grid that a tensor is stored in, each part with the rank that writes its file.
    fn as_stored(&self, tensor: &TensorEntry) -> Result<Held, MegatronError> {
        if tensor.chunks.len() <= 1 || tensor.chunks.len() as u64 > PARTS_MAX {
            return Ok(Held::whole(0, tensor)?);
        }
        let mut parts = Vec::with_capacity(tensor.chunks.len());
        for chunk in tensor.chunks.iter() {
            let file = chunk.placement.and_then(|placement| self.metadata.file(placement.file));
            let rank = file.and_then(|file| rank_of_file(file.as_str())).unwrap_or(0);
            let region =
                chunk.region().map_err(|error| JobError::from(dcp_core::PlanError::from(error)))?;
            parts.push((rank % self.ranks.world(), region));
        }
        Ok(Held { sharded: true, parts })
    }

    fn object(&self, fqn: &str) -> Result<u32, MegatronError> {
        let Some(object) = ObjectKey::parse(fqn) else { return Ok(0) };
        let key = ModelKey::parse(object.key);
        let world = u64::from(self.ranks.world());
        let narrow = |n: u64| u32::try_from(n % world).unwrap_or(0);
        if is_optimizer_key(fqn) {
            let group = crate::optimizer::group_of(fqn).unwrap_or(0);
            let (tp, pp) = (u64::from(self.ranks.tp), u64::from(self.ranks.pp));
            let pipeline = (group / tp) % pp;
            return Ok(self.ranks.dense(narrow(group % tp), narrow(pipeline)));
        }
        match (object.key, &*object.offsets) {
            ("rng_state", [pp, tp])
                if *pp < u64::from(self.ranks.pp) && *tp < u64::from(self.ranks.tp) =>
            {
                Ok(self.ranks.dense(narrow(*tp), narrow(*pp)))
            }
            ("rerun_state_machine_state", [rank]) => Ok(narrow(*rank)),
            (_, offsets) if offsets.len() == key.prepended() || key.prepended() == 0 => {
                let (stage, group) = self.place(fqn, &key, offsets, &object.grid)?;
                Ok(match group {
                    Some(group) => self.ranks.expert(0, group, stage),
                    None => self.ranks.dense(0, stage),
                })
            }
            _ => Ok(0),
        }
    }
}

/// Returns the one of `parts` equal shares of `all` things that has number `n`; `None` when there
/// are no equal shares.
fn share(n: u64, all: u64, parts: u64) -> Option<u32> {
    if !all.is_multiple_of(parts) || n >= all {
        return None;
    }
    u32::try_from(n / (all / parts)).ok()
}

/// All positions on axes of these lengths, in row-major order.
fn places(lens: &[u64]) -> impl Iterator<Item = Vec<u64>> + '_ {
    let all = lens.iter().fold(1_u64, |all, len| all.saturating_mul(*len));
    (0..all).map(|n| {
        let mut rest = n;
        let mut place: Vec<u64> = lens
            .iter()
            .rev()
            .map(|len| {
                let at = rest % (*len).max(1);
                rest /= (*len).max(1);
                at
            })
            .collect();
        place.reverse();
        place
    })
}

/// The rank in the name of a data file, `[hint]__{rank}_{n}.distcp`.
pub(super) fn rank_of_file(name: &str) -> Option<u32> {
    name.rsplit_once("__")?.1.split_once('_')?.0.parse().ok()
}

fn region(fqn: &str, offsets: Dims, sizes: &Dims) -> Result<Region, MegatronError> {
    Region::new(offsets, sizes.clone()).map_err(|error| {
        MegatronError::Convert(dcp_core::PlanError::from(error).with_fqn(fqn).into())
    })
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    #[test]
    fn places_are_in_row_major_order() {
        let all: Vec<_> = places(&[2, 3]).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert_eq!(places(&[]).collect::<Vec<_>>(), [Vec::<u64>::new()]);
    }

    #[test]
    fn all_tensors_together_have_a_budget_of_parts() {
        let mut metadata = CheckpointMetadata::new();
        for n in 0..3 {
            let fqn = format!("decoder{n}.layers.mlp.linear_fc2.weight");
            let shape = Dims::from([1 << 14, 4, 4]);
            metadata.insert(fqn, Entry::Tensor(TensorEntry::new(DType::UInt8, shape)));
        }
        let layout = ParallelLayout::new(1, 1);
        let metadata = Arc::new(metadata);
        let error = MegatronDivision::within(1 << 15, &metadata, layout, None).unwrap_err();
        assert!(matches!(error, MegatronError::Layout { .. }), "{error:?}");
        assert!(error.to_string().contains("decoder2.layers"), "{error}");
    }
}
