//! Training on processes that are killed, and goes on in other numbers of them.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

#[path = "../examples/train.rs"]
mod train;

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use dcp::collectives::TcpConfig;
use dcp_testing::{loopback, reserved_port};

const FOLDER: &str = "DCP_TEST_FOLDER";
const STEPS: &str = "DCP_TEST_STEPS";

/// What a rank does; in the test itself, nothing.
#[test]
fn rank_process() {
    let (Ok(folder), Ok(steps)) = (std::env::var(FOLDER), std::env::var(STEPS)) else { return };
    let group = Arc::new(TcpConfig::from_env().unwrap().connect().unwrap());
    let print = |step, loss: f32| println!("\nstep {step} {:08x}", loss.to_bits());
    train::train(group, &folder, steps.parse().unwrap(), print).unwrap();
}

/// The ranks of a job. Killed when dropped.
struct Job {
    ranks: Vec<Child>,
    lines: BufReader<ChildStdout>,
    /// Keeps the port from others until rank 0 listens there.
    _reserved: Box<dyn Any>,
}

impl Job {
    fn start(ranks: u32, folder: &Path, steps: u64) -> Self {
        let (reserved, port) = reserved_port();
        let rank = |rank: u32| {
            Command::new(std::env::current_exe().unwrap())
                .args(["rank_process", "--exact", "--nocapture"])
                .env(FOLDER, folder)
                .env(STEPS, steps.to_string())
                .env("MASTER_ADDR", loopback().to_string())
                .env("MASTER_PORT", port.to_string())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env_remove("DCP_MASTER_PORT")
                .env_remove("DCP_JOB_ID")
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut ranks: Vec<_> = (0..ranks).map(rank).collect();
        let lines = BufReader::new(ranks[0].stdout.take().unwrap());
        Self { ranks, lines, _reserved: Box::new(reserved) }
    }

    /// The bits of each step's loss, up to a step.
    fn losses(&mut self, until: u64) -> BTreeMap<u64, String> {
        let mut losses = BTreeMap::new();
        let mut line = String::new();
        while !losses.contains_key(&until) {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended before step {until}");
            if let Some((step, bits)) =
                line.strip_prefix("step ").and_then(|one| one.split_once(' '))
            {
                losses.insert(step.parse().unwrap(), bits.trim().to_owned());
            }
        }
        losses
    }

    fn wait(mut self) {
        // A rank that prints into a pipe that is full or closed does not end well.
        std::io::copy(&mut self.lines, &mut std::io::sink()).unwrap();
        for rank in &mut self.ranks {
            if let Some(mut lines) = rank.stdout.take() {
                std::io::copy(&mut lines, &mut std::io::sink()).unwrap();
            }
            assert!(rank.wait().unwrap().success());
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            drop(rank.kill());
            drop(rank.wait());
        }
    }
}

#[test]
fn a_killed_run_resumes_on_other_numbers_of_ranks_with_the_same_losses() {
    let [whole, killed] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut job = Job::start(1, whole.path(), 14);
    let expected = job.losses(14);
    job.wait();

    let mut found = BTreeMap::new();
    let mut job = Job::start(2, killed.path(), 100);
    found.extend(job.losses(7));
    drop(job);
    // Saved after steps 3 and 6, if not already after 9.
    for (ranks, last) in [(3, 12), (5, 14)] {
        let mut job = Job::start(ranks, killed.path(), last);
        let resumed = job.losses(last);
        assert!(*resumed.keys().next().unwrap() > 3, "it began again: {resumed:?}");
        for (step, bits) in &resumed {
            assert!(found.get(step).is_none_or(|before| before == bits), "step {step} changed");
        }
        found.extend(resumed);
        job.wait();
    }
    assert_eq!(found, expected);
}
