//! The contract of planners: descriptions in, plans out.

use std::fmt;

use crate::error::PlanError;
use crate::plans::metadata::CheckpointMetadata;
use crate::plans::plan::{GlobalPlan, LoadPlan, LoadReport, PlanContext, SavePlan, StateIndex};

/// Plans saves. Pure: the same input gives the same plan, in any order of ranks.
///
/// A planner of one's own mostly changes the input or the result of another one. This one
/// leaves names out of the checkpoint, and passes the suite of `dcp-conformance`:
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_core::PlanError;
/// use dcp_core::plan::{GlobalPlan, PlanContext, SavePlan, StateIndex};
/// use dcp_core::planner::SavePlanner;
///
/// /// Plans as `inner` does, without the names that begin with `prefix`.
/// #[derive(Debug)]
/// struct Without {
///     prefix: &'static str,
///     inner: Arc<dyn SavePlanner>,
/// }
///
/// impl SavePlanner for Without {
///     fn local_plan(&self, state: &StateIndex, rank: &PlanContext) -> Result<SavePlan, PlanError> {
///         let mut kept = state.clone();
///         kept.leaves.retain(|leaf| !leaf.fqn.starts_with(self.prefix));
///         self.inner.local_plan(&kept, rank)
///     }
///
///     fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
///         let mut global = self.inner.global_plan(locals)?;
///         // What is not stored and not listed here is an error of the planner.
///         let held = locals.iter().flat_map(|local| local.unoffered());
///         let names = held.map(|unoffered| Arc::clone(&unoffered.fqn));
///         global.left_out.extend(names.filter(|name| name.starts_with(self.prefix)));
///         Ok(global)
///     }
/// }
///
/// let inner = Arc::new(dcp_planner::DefaultSavePlanner::new());
/// let planner = Arc::new(Without { prefix: "teacher.", inner });
/// assert!(dcp_conformance::passes(dcp_conformance::planner::save_trials("without", planner)));
/// ```
///
/// A save takes it by `dcp::Settings::save_planner`.
pub trait SavePlanner: fmt::Debug + Send + Sync {
    /// The items that this rank offers to write.
    ///
    /// # Errors
    ///
    /// When the state cannot be saved.
    #[doc(alias = "create_local_plan")]
    fn local_plan(&self, state: &StateIndex, context: &PlanContext) -> Result<SavePlan, PlanError>;

    /// On the coordinator: selects the rank that writes each item, from every rank's offer in rank
    /// order.
    ///
    /// # Errors
    ///
    /// When ranks contradict each other, or the chunks do not cover whole tensors.
    #[doc(alias = "create_global_plan")]
    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError>;
}

/// Plans loads. Pure, like [`SavePlanner`].
pub trait LoadPlanner: fmt::Debug + Send + Sync {
    /// The items that this rank reads, and how the checkpoint differs from the request. The plan
    /// omits what differs; the caller decides whether that is an error.
    ///
    /// # Errors
    ///
    /// When the request itself is invalid.
    #[doc(alias = "create_local_plan")]
    fn local_plan(
        &self,
        wanted: &StateIndex,
        stored: &CheckpointMetadata,
        context: &PlanContext,
    ) -> Result<(LoadPlan, LoadReport), PlanError>;
}
