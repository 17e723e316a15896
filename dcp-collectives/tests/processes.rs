//! Real processes: killed, stopped, and leaving without a farewell.
//!
//! The test binary runs itself once for each rank, with the variables that torchrun would set;
//! [`rank_process`] is what the copies do.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests, and their only output"
)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use common::reserved_port;
use dcp_collectives::TcpConfig;
use dcp_core::{Collective, CollectiveError};
use rustix::process::{Pid, Signal, kill_process};

/// What a copy does after its first barrier; unset in the test itself.
const ROLE: &str = "DCP_TEST_ROLE";
const DEADLINE: &str = "DCP_TEST_DEADLINE_MS";

/// A rank in a process of its own. Killed when dropped.
struct RankProcess {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl RankProcess {
    fn spawn(role: &str, rank: u32, world_size: u32, port: u16, deadline: Duration) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DEADLINE, deadline.as_millis().to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env_remove("DCP_MASTER_PORT")
            .env_remove("DCP_JOB_ID")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The rest of the next line that holds `word`.
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("it ended without {word:?}");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn start(role: &str, world_size: u32, deadline: Duration) -> Vec<RankProcess> {
    let (_reserved, port) = reserved_port();
    let mut ranks = (0..world_size)
        .map(|rank| RankProcess::spawn(role, rank, world_size, port, deadline))
        .collect::<Vec<_>>();
    for rank in &mut ranks {
        rank.hear("ready");
    }
    ranks
}

/// Prints a line apart from what the test harness prints around it.
fn say(line: &str) {
    println!("\n{line}");
}

/// What the copies do; in the test itself, nothing.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let deadline = Duration::from_millis(std::env::var(DEADLINE).unwrap().parse().unwrap());
    let group = TcpConfig::from_env().unwrap().deadline(deadline).connect().unwrap();
    let rank = group.rank();
    group.barrier().unwrap();
    say("ready");
    let error = match role.as_str() {
        "barriers" => until_error(|| {
            std::thread::sleep(Duration::from_millis(2));
            group.barrier()
        }),
        "gathers to rank 5" => until_error(|| group.gather(5, vec![1; 100_000].into()).map(drop)),
        "large broadcasts" => until_error(|| {
            let message = (rank == 0).then(|| Bytes::from(vec![7; 8 << 20]));
            group.broadcast(0, message).map(drop)
        }),
        "exit" => {
            let _ = group.all_gather(vec![1; 300_000].into()).unwrap();
            say("done");
            std::process::exit(0);
        }
        "rank 1 exits" => {
            if rank == 1 {
                std::process::exit(0);
            }
            until_error(|| group.barrier())
        }
        role => panic!("no role {role}"),
    };
    say(&format!("error {error:?}"));
}

fn until_error(mut call: impl FnMut() -> Result<(), CollectiveError>) -> CollectiveError {
    loop {
        if let Err(error) = call() {
            return error;
        }
    }
}

fn everyone_but(victim: usize, ranks: &mut [RankProcess]) -> Vec<String> {
    let others = ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim);
    others.map(|(_, rank)| rank.hear("error")).collect()
}

#[test]
fn a_killed_rank_is_named_at_once_by_all_others() {
    let deadline = Duration::from_secs(120);
    for (role, victim) in [
        ("barriers", 0),
        ("barriers", 4),
        ("barriers", 7),
        ("gathers to rank 5", 1),
        ("gathers to rank 5", 5),
        ("large broadcasts", 4),
    ] {
        let mut ranks = start(role, 8, deadline);
        std::thread::sleep(Duration::from_millis(50));
        ranks[victim].signal(Signal::KILL);
        for error in everyone_but(victim, &mut ranks) {
            assert!(
                error.starts_with(&format!("PeerLost {{ rank: {victim},")),
                "{role}, rank {victim} killed: {error}"
            );
        }
    }
}

#[test]
fn a_stopped_rank_is_named_within_the_deadline() {
    let deadline = Duration::from_secs(3);
    for (role, victim) in [("barriers", 0), ("barriers", 2), ("large broadcasts", 3)] {
        let mut ranks = start(role, 6, deadline);
        std::thread::sleep(Duration::from_millis(50));
        ranks[victim].signal(Signal::STOP);
        for error in everyone_but(victim, &mut ranks) {
            assert!(
                error.starts_with(&format!("Timeout {{ rank: {victim},")),
                "{role}, rank {victim} stopped: {error}"
            );
        }
        ranks[victim].signal(Signal::CONT);
        let error = ranks[victim].hear("error");
        assert!(!error.is_empty(), "{role}: the stopped rank goes on");
    }
}

#[test]
fn a_rank_that_exits_without_a_farewell_is_gone() {
    let mut ranks = start("rank 1 exits", 4, Duration::from_secs(120));
    for error in everyone_but(1, &mut ranks) {
        assert!(error.starts_with("PeerLost { rank: 1,"), "{error}");
    }
}

#[test]
fn ranks_that_exit_after_their_last_call_do_not_disturb_each_other() {
    for mut rank in start("exit", 5, Duration::from_secs(120)) {
        rank.hear("done");
    }
}
