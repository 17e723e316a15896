//! The suite for [`Collective`]: each rank of a group runs on its own thread.

mod exchange;
mod failure;
mod group;

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dcp_core::Collective;
use libtest_mimic::Trial;

use crate::case::{CASE_TIMEOUT, Outcome, report, run_thread};

/// Builds a group with a number of ranks and a deadline for its calls. Returns its members in rank
/// order.
pub type Build = dyn Fn(u32, Duration) -> Vec<Box<dyn Collective>> + Send + Sync;

/// Runs the whole suite as a test binary; see [`trials`].
pub fn main<F>(name: &str, build: F) -> ExitCode
where
    F: Fn(u32, Duration) -> Vec<Box<dyn Collective>> + Send + Sync + 'static,
{
    crate::run(trials(name, Arc::new(build)))
}

/// One trial per clause in the documentation of [`Collective`], named `name::clause`.
///
/// `build` is called for each group that a clause needs, possibly from several threads. It returns
/// `world_size` members in rank order, and panics if it cannot.
///
/// ```no_run
/// # fn local(_: u32, _: std::time::Duration) -> Vec<Box<dyn dcp_core::Collective>> { vec![] }
/// use std::sync::Arc;
///
/// let trials = dcp_conformance::collective::trials("local", Arc::new(local));
/// # drop(trials);
/// ```
#[must_use]
pub fn trials(name: &str, build: Arc<Build>) -> Vec<Trial> {
    cases()
        .map(|case| {
            let subject = Subject { build: Arc::clone(&build) };
            Trial::test(format!("{name}::{}", case.name), move || {
                report(run_thread(CASE_TIMEOUT, move || (case.run)(&subject)))
            })
            .with_kind("collective")
        })
        .collect()
}

struct Case {
    name: &'static str,
    run: fn(&Subject) -> Outcome,
}

fn cases() -> impl Iterator<Item = Case> {
    exchange::CASES.iter().chain(failure::CASES).map(|&(name, run)| Case { name, run })
}

/// The collective under test.
struct Subject {
    build: Arc<Build>,
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").finish_non_exhaustive()
    }
}

/// Turns the functions of a module into cases.
macro_rules! clauses {
    ($($name:ident),+ $(,)?) => {
        pub(super) const CASES: &[(&str, fn(&super::Subject) -> crate::case::Outcome)] =
            &[$((stringify!($name), $name)),+];
    };
}
use clauses;

#[cfg(test)]
mod tests;
