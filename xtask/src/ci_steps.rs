//! The jobs of `.github/workflows/ci.yml` run the steps of `.ci/run`, each in one of them.

use std::collections::BTreeSet;

use xtask_host::workspace;

/// The names in double quotes of a line.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('"').skip(1).step_by(2)
}

#[test]
fn every_step_of_ci_is_in_one_job_of_the_workflow() {
    let read = |file: &str| std::fs::read_to_string(workspace::root().join(file)).unwrap();
    let (script, workflow) = (read(".ci/run"), read(".github/workflows/ci.yml"));
    let is_step = |line: &&str| line.starts_with("step \"") || line.starts_with("spare ");
    let steps: BTreeSet<&str> =
        script.lines().filter(is_step).filter_map(|line| quoted(line).next()).collect();
    let mut jobs = Vec::new();
    for line in workflow.lines().filter(|line| line.contains("steps: '")) {
        jobs.extend(quoted(line));
    }
    // Every job installs the tools; some need Python.
    let listed: BTreeSet<&str> = jobs.iter().copied().chain(["tools"]).collect();
    assert_eq!(listed, steps);
    for name in steps.iter().filter(|name| !["tools", "python"].contains(name)) {
        assert_eq!(jobs.iter().filter(|job| *job == name).count(), 1, "{name}");
    }
}
