//! The suite for save planners, with nodes of one, two and four ranks.

use std::num::NonZeroU32;
use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::planner;
use node_planner::NodePlanner;

fn main() -> ExitCode {
    let trials = [1, 2, 4].into_iter().filter_map(NonZeroU32::new).flat_map(|ranks| {
        let name = format!("nodes of {ranks}");
        planner::save_trials(&name, Arc::new(NodePlanner::new(ranks)))
    });
    dcp_conformance::run(trials.collect())
}
