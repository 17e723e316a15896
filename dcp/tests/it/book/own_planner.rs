//! A planner of one's own.

use std::sync::Arc;

use dcp::core::PlanError;
use dcp::core::plan::{GlobalPlan, PlanContext, SavePlan, StateIndex};
use dcp::core::planner::SavePlanner;

/// Leaves the weights of a teacher out of checkpoints.
#[derive(Debug)]
pub struct WithoutTeacher(pub dcp::planner::DefaultSavePlanner);

impl SavePlanner for WithoutTeacher {
    fn local_plan(&self, state: &StateIndex, rank: &PlanContext) -> Result<SavePlan, PlanError> {
        let mut kept = state.clone();
        kept.leaves.retain(|leaf| !leaf.fqn.starts_with("teacher."));
        self.0.local_plan(&kept, rank)
    }

    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        let mut plan = self.0.global_plan(locals)?;
        let held = locals.iter().flat_map(SavePlan::unoffered).map(|part| Arc::clone(&part.fqn));
        plan.left_out.extend(held.filter(|name| name.starts_with("teacher.")));
        Ok(plan)
    }
}
