//! The suites for [`SavePlanner`] and [`LoadPlanner`]: laws that hold for every layout.
//!
//! States come from a fixed sequence of numbers: groups of one to six ranks; tensors by rows,
//! columns and blocks, even and uneven, replicated, empty, without axes, on one rank only; and
//! objects. They are small enough to count every element.

mod load;
mod save;
mod states;

use std::process::ExitCode;
use std::sync::Arc;

use dcp_core::planner::{LoadPlanner, SavePlanner};
use libtest_mimic::Trial;

use self::load::LOAD_LAWS;
use self::save::SAVE_LAWS;
use crate::case::{CASE_TIMEOUT, Outcome, report, run_thread};

/// The number of states that every law is tried with.
const STATES: u64 = 60;

/// Runs the suite for save planners as a test binary; see [`save_trials`].
pub fn save_main(name: &str, planner: Arc<dyn SavePlanner>) -> ExitCode {
    crate::run(save_trials(name, planner))
}

/// Runs the suite for load planners as a test binary; see [`load_trials`].
pub fn load_main(name: &str, planner: Arc<dyn LoadPlanner>) -> ExitCode {
    crate::run(load_trials(name, planner))
}

/// One trial per law of [`SavePlanner`], named `name::law`. Planners without validation fail the
/// laws on contradictions.
#[must_use]
pub fn save_trials(name: &str, planner: Arc<dyn SavePlanner>) -> Vec<Trial> {
    trials(name, "save planner", planner, SAVE_LAWS)
}

/// One trial per law of [`LoadPlanner`], named `name::law`.
#[must_use]
pub fn load_trials(name: &str, planner: Arc<dyn LoadPlanner>) -> Vec<Trial> {
    trials(name, "load planner", planner, LOAD_LAWS)
}

type Laws<P> = &'static [(&'static str, fn(&P) -> Outcome)];

fn trials<P>(name: &str, kind: &str, planner: Arc<P>, laws: Laws<P>) -> Vec<Trial>
where
    P: ?Sized + Send + Sync + 'static,
{
    let trial = |&(law, run): &(&str, fn(&P) -> Outcome)| {
        let planner = Arc::clone(&planner);
        let body = move || report(run_thread(CASE_TIMEOUT, move || run(&planner)));
        Trial::test(format!("{name}::{law}"), body).with_kind(kind)
    };
    laws.iter().map(trial).collect()
}

macro_rules! laws {
    ($($law:ident),+ $(,)?) => { &[$((stringify!($law), $law)),+] };
}

use laws;

#[cfg(test)]
mod tests;
