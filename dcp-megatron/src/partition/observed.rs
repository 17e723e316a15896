//! Infers the parallel layout of a checkpoint from its chunks and file names.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::{ChunkRef, Entry, TensorEntry};

use super::division::rank_of_file;
use super::key::{Counted, ModelKey};
use super::{TensorCut, tensor_cut};
use crate::optimizer::is_optimizer_key;

/// Sizes that the files show; `None` where they do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    pub(crate) tensor: Option<u64>,
    pub(crate) pipeline: Option<u64>,
    pub(crate) expert: Option<u64>,
    pub(crate) expert_tensor: Option<u64>,
}

/// A parameter that a rule names.
struct Parameter<'m> {
    key: ModelKey<'m>,
    cut: TensorCut,
    tensor: &'m TensorEntry,
}

/// A layer, an expert, or something on its own, whose parts lie next to each other: its first
/// rank.
type FirstRanks<'m> = HashMap<Unit<'m>, u32>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Unit<'m> {
    Alone(&'m str),
    Layer(&'m str, u64),
    Expert(&'m str, u64, u64),
}

impl Observed {
    /// Looks at the model's parameters. Ranks that share what they write, as with
    /// `--ckpt-fully-parallel-save`, leave the parts of a layer in files of several of them, which
    /// then show no pipeline stage and no group of experts.
    pub(crate) fn of(metadata: &CheckpointMetadata) -> Self {
        let parameters: Vec<Parameter<'_>> = metadata
            .iter()
            .filter(|(fqn, _)| !is_optimizer_key(fqn))
            .filter_map(|(fqn, entry)| {
                let Entry::Tensor(tensor) = entry else { return None };
                let key = ModelKey::parse(fqn);
                let cut = tensor_cut(key.param)?;
                key.prefix.is_empty().then_some(Parameter { key, cut, tensor })
            })
            .collect();
        let of_experts = |parameter: &&Parameter<'_>| parameter.key.experts.is_some();
        let dense = || parameters.iter().filter(|parameter| !of_experts(parameter));
        let experts = || parameters.iter().filter(of_experts);
        let vocabulary = dense().find(|p| p.key.param.ends_with("word_embeddings.weight"));
        let parts = |p: &Parameter<'_>| p.parts();
        let tensor = vocabulary.and_then(parts).or_else(|| dense().filter_map(parts).max());
        let expert_tensor = experts().filter_map(parts).max();
        let pipeline = tensor
            .and_then(|parts| first_ranks(metadata, dense(), parts))
            .filter(|first| first.keys().any(|unit| matches!(unit, Unit::Layer(..))))
            .map(|first| first.values().collect::<BTreeSet<_>>().len() as u64);
        let expert = expert_tensor
            .and_then(|parts| first_ranks(metadata, experts(), parts))
            .and_then(|first| groups(&first));
        Self { tensor, pipeline, expert, expert_tensor }
    }
}

impl<'m> Parameter<'m> {
    /// The axis that ranks have different parts of.
    fn axis(&self) -> Option<usize> {
        match self.cut {
            TensorCut::Replicated => None,
            TensorCut::Column | TensorCut::Gated => Some(self.key.prepended()),
            TensorCut::Row => Some(self.key.prepended() + 1),
        }
    }

    /// Counts the different parts that ranks have of it. Of a gated matrix there are as many or
    /// twice as many as ranks, so it shows nothing.
    fn parts(&self) -> Option<u64> {
        let axis = self.axis().filter(|_| self.cut != TensorCut::Gated)?;
        let starts: BTreeSet<u64> =
            self.tensor.chunks.iter().filter_map(|c| c.offsets.get(axis).copied()).collect();
        (!starts.is_empty()).then_some(starts.len() as u64)
    }

    /// The layer or expert of a chunk of it; `None` for a chunk of several layers.
    fn unit(&self, chunk: &ChunkRef<'_>) -> Option<Unit<'m>> {
        let Some((stack, layer)) = self.key.layers else {
            return Some(Unit::Alone(self.key.param));
        };
        let layer = match layer {
            Counted::Number(n) => n,
            Counted::Axis => {
                chunk.sizes.first().filter(|len| **len == 1)?;
                *chunk.offsets.first()?
            }
        };
        match (self.key.experts, self.key.expert_axis()) {
            (Some(Counted::Number(n)), _) => Some(Unit::Expert(stack, layer, n)),
            (Some(_), Some(axis)) => Some(Unit::Expert(stack, layer, *chunk.offsets.get(axis)?)),
            _ => Some(Unit::Layer(stack, layer)),
        }
    }

    /// Returns the position, among `parts` adjacent ranks, of the rank that has a chunk of it.
    fn part(&self, chunk: &ChunkRef<'_>, parts: u64) -> Option<u32> {
        let Some(axis) = self.axis() else { return Some(0) };
        let (start, len) = (*chunk.offsets.get(axis)?, *chunk.sizes.get(axis)?);
        let number = start.checked_div(len).filter(|number| number * len == start)?;
        u32::try_from(number % parts).ok()
    }
}

/// The first rank of everything; `None` when parts are not where their ranks have them.
fn first_ranks<'m>(
    metadata: &CheckpointMetadata,
    parameters: impl Iterator<Item = &'m Parameter<'m>>,
    parts: u64,
) -> Option<FirstRanks<'m>> {
    let mut first = FirstRanks::new();
    for parameter in parameters {
        for chunk in parameter.tensor.chunks.iter() {
            let rank = rank_of_file(metadata.file(chunk.placement?.file)?.as_str())?;
            let base = rank.checked_sub(parameter.part(&chunk, parts)?)?;
            if *first.entry(parameter.unit(&chunk)?).or_insert(base) != base {
                return None;
            }
        }
    }
    Some(first)
}

/// Among how many groups of ranks the experts of every layer are.
fn groups(first: &FirstRanks<'_>) -> Option<u64> {
    let mut layers: BTreeMap<(&str, u64), BTreeSet<u32>> = BTreeMap::new();
    for (unit, rank) in first {
        let Unit::Expert(stack, layer, _) = unit else { continue };
        layers.entry((stack, *layer)).or_default().insert(*rank);
    }
    let mut counts = layers.values().map(BTreeSet::len);
    let count = counts.next()?;
    counts.all(|other| other == count).then_some(count as u64)
}
