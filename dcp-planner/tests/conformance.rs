//! The default planners obey the laws of planners.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::planner::{load_trials, save_trials};
use dcp_planner::{DedupPolicy, DefaultLoadPlanner, DefaultSavePlanner};

fn main() -> ExitCode {
    let mut trials = load_trials("load", Arc::new(DefaultLoadPlanner::new()));
    for (name, policy) in [
        ("balanced", DedupPolicy::Balanced),
        ("torch_compatible", DedupPolicy::TorchCompatible),
        ("lowest_rank", DedupPolicy::LowestRank),
    ] {
        let planner = DefaultSavePlanner::new().dedup(policy);
        trials.extend(save_trials(name, Arc::new(planner)));
    }
    dcp_conformance::run(trials)
}
