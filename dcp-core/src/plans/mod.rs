//! Plans of saves and loads, the index of a checkpoint, and the checks of what a planner returns.

pub mod metadata;
pub mod plan;
mod plan_check;
pub mod planner;
