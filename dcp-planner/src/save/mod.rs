//! The default planner of saves.

mod assemble;
mod dedup;
mod merge;

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::error::{ChunksProblem, StateProblem, TensorError};
use dcp_core::plan::{
    GlobalPlan, LeafKind, PlanContext, PlanKey, SavePlan, StateIndex, TensorSpec,
};
use dcp_core::planner::SavePlanner;
use dcp_core::{PlanError, Region};

/// The rule that chooses the rank that writes a chunk or object which several hold. One always does:
/// PyTorch's `dedup_replicated_tensors` has no effect either (2.15).
#[doc(alias = "dedup_replicated_tensors")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DedupPolicy {
    /// The rule by which ranks write about equally many bytes: the largest first, each to the rank that
    /// has the fewest bytes so far.
    #[default]
    Balanced,
    /// As PyTorch 2.2 and later: in the order of the first rank's items, each to the rank with
    /// the least so far, where a chunk counts as its whole tensor and an object as one byte.
    TorchCompatible,
    /// The lowest rank (PyTorch's `dedup_save_to_lowest_rank`, and its only rule up to 2.1).
    LowestRank,
}

/// Plans saves: every rank offers what it holds, replicas are written once.
///
/// ```
/// use dcp_core::{DType, Tensor, Value};
/// use dcp_core::plan::{PlanContext, StateIndex};
/// use dcp_core::planner::SavePlanner;
/// use dcp_planner::{DefaultSavePlanner, FlattenRule, flatten, index_of};
///
/// let weight = Tensor::zeros(DType::Float32, [4, 2])?;
/// let state = [("model", dcp_core::value::Dict::from([("weight", weight)]))].into();
/// let flat = flatten(&state, FlattenRule::default())?;
/// let index = index_of(&flat, |_, _| Ok::<_, dcp_core::PlanError>(0))?;
///
/// let planner = DefaultSavePlanner::new();
/// let offers = (0..2)
///     .map(|rank| planner.local_plan(&index, &PlanContext::new(rank, 2)))
///     .collect::<Result<Vec<_>, _>>()?;
/// let global = planner.global_plan(&offers)?;
/// assert_eq!(global.selections.iter().map(Vec::len).sum::<usize>(), 1);
/// # Ok::<(), dcp_core::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DefaultSavePlanner {
    dedup: DedupPolicy,
    validate: bool,
}

impl DefaultSavePlanner {
    /// A planner that balances bytes and validates.
    #[must_use]
    pub fn new() -> Self {
        Self { dedup: DedupPolicy::default(), validate: true }
    }

    /// Sets the policy that chooses the writer of each replicated part.
    #[must_use]
    pub fn dedup(mut self, dedup: DedupPolicy) -> Self {
        self.dedup = dedup;
        self
    }

    /// Sets whether the planner checks bounds, overlaps and coverage of the chunks. Ranks that
    /// contradict each other are refused in any case, and a saver checks the plan again
    /// ([`GlobalPlan::check_against`]).
    #[must_use]
    pub fn validate(mut self, validate: bool) -> Self {
        self.validate = validate;
        self
    }
}

impl Default for DefaultSavePlanner {
    fn default() -> Self {
        Self::new()
    }
}

impl SavePlanner for DefaultSavePlanner {
    /// Offers every shard and every object. Replicated tensors and objects are offered by every
    /// rank, as in PyTorch 2.4 and later.
    fn local_plan(&self, state: &StateIndex, context: &PlanContext) -> Result<SavePlan, PlanError> {
        let mut plan = SavePlan::new();
        let mut seen = HashSet::with_capacity(state.leaves.len());
        for leaf in &state.leaves {
            if !seen.insert(&*leaf.fqn) {
                return Err(StateProblem::Duplicate.of(leaf.fqn.to_string()));
            }
            let (fqn, path) = (Arc::clone(&leaf.fqn), leaf.path.clone());
            match &leaf.kind {
                LeafKind::Tensor { dtype, shape, sharded, regions } => {
                    let whole = Region::full(shape.clone())
                        .map_err(|error| PlanError::from(error).with_fqn(&*fqn))?;
                    if !sharded && !matches!(&**regions, [region] if *region == whole) {
                        let problem = "it is replicated and has regions other than the whole";
                        return Err(TensorError::Invalid {
                            fqn: Some(fqn.to_string()),
                            problem: problem.to_owned(),
                        }
                        .into());
                    }
                    if let Some(outside) = regions.iter().find(|region| !whole.contains(region)) {
                        return Err(ChunksProblem::Outside {
                            region: outside.to_string(),
                            bounds: format!("shape {shape}"),
                            rank: Some(context.rank),
                        }
                        .of(fqn.to_string()));
                    }
                    let tensor =
                        TensorSpec { dtype: *dtype, shape: shape.clone(), sharded: *sharded };
                    let key = plan.push_key(PlanKey { fqn, path, tensor: Some(tensor) });
                    for region in regions {
                        plan.push_chunk(key, region)?;
                    }
                }
                LeafKind::Object { byte_len } => {
                    let key = plan.push_key(PlanKey { fqn, path, tensor: None });
                    plan.push_object(key, *byte_len)?;
                }
                _ => return Err(StateProblem::UnknownKind.of(fqn.to_string())),
            }
        }
        Ok(plan)
    }

    /// Merges all offers.
    ///
    /// Entries and chunks are in the order in which the chosen items come, rank by rank, as in
    /// PyTorch; the path of a name is that of the lowest rank that has one. Of chunks without
    /// elements one per place is kept, and none where another chunk begins. With more than one
    /// rank the chunks of every tensor must cover it.
    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        let merged = merge::merge(locals)?;
        let writers = dedup::choose(self.dedup, &merged);
        assemble::assemble(&merged, writers, self.validate)
    }
}
