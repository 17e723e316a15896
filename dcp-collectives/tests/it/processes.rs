//! Real processes: killed, stopped, and leaving without a farewell.
//!
//! The test binary runs itself once for each rank, with the variables that torchrun would set;
//! [`rank_process`] is what the copies do.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests, and their only output"
)]

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use dcp_collectives::TcpConfig;
use dcp_core::{Collective, CollectiveError};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::groups::{PATIENT, loopback, reserved_port, with_growing_deadline};

/// What a copy does after its first barrier; unset in the test itself.
const ROLE: &str = "DCP_TEST_ROLE";
const DEADLINE: &str = "DCP_TEST_DEADLINE_MS";
/// Before which of its operations, counted from 1, a copy sends itself a signal.
const END: &str = "DCP_TEST_END";

/// A rank that sends itself a signal before one of its operations.
#[derive(Clone, Copy)]
struct Victim {
    rank: u32,
    operation: u32,
    signal: &'static str,
}

/// A rank in a process of its own. Killed when dropped.
pub(crate) struct RankProcess {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl RankProcess {
    pub(crate) fn command(
        role: &str,
        rank: u32,
        world_size: u32,
        port: u16,
        deadline: Duration,
    ) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["processes::rank_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DEADLINE, deadline.as_millis().to_string())
            .env("MASTER_ADDR", loopback().to_string())
            .env("MASTER_PORT", port.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env_remove("DCP_MASTER_PORT")
            .env_remove("DCP_JOB_ID")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        command
    }

    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The rest of the next line that holds `word`.
    pub(crate) fn hear(&mut self, word: &str) -> String {
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

fn start(
    role: &str,
    world_size: u32,
    deadline: Duration,
    victim: Option<Victim>,
) -> Vec<RankProcess> {
    let (_reserved, port) = reserved_port();
    let start = |rank| {
        let mut command = RankProcess::command(role, rank, world_size, port, deadline);
        if let Some(victim) = victim.filter(|victim| victim.rank == rank) {
            command.env(END, format!("{} {}", victim.operation, victim.signal));
        }
        RankProcess::start(&mut command)
    };
    let mut ranks = (0..world_size).map(start).collect::<Vec<_>>();
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
    let end = std::env::var(END).ok().map(|end| {
        let (operation, signal) = end.split_once(' ').unwrap();
        let signal = if signal == "stop" { Signal::STOP } else { Signal::KILL };
        (operation.parse::<u32>().unwrap(), signal)
    });
    let mut begun = 0;
    let mut until_error = |call: &mut dyn FnMut() -> Result<(), CollectiveError>| loop {
        begun += 1;
        match end {
            Some((operation, signal)) if operation == begun => {
                kill_process(getpid(), signal).unwrap();
            }
            _ => {}
        }
        if let Err(error) = call() {
            return error;
        }
    };
    let error = match role.as_str() {
        "barriers" => until_error(&mut || group.barrier()),
        "gathers to rank 5" => {
            until_error(&mut || group.gather(5, vec![1; 100_000].into()).map(drop))
        }
        "large broadcasts" => until_error(&mut || {
            let message = (rank == 0).then(|| Bytes::from(vec![7; 8 << 20]));
            group.broadcast(0, message).map(drop)
        }),
        "checked messages" => {
            for turn in 0..20_u8 {
                let mine = vec![turn ^ rank as u8; 50_000];
                let all = group.all_gather(mine.into()).unwrap();
                for (message, from) in all.iter().zip(0..) {
                    assert!(message.iter().all(|byte| *byte == turn ^ from), "from {from}");
                }
            }
            group.barrier().unwrap();
            say("done");
            return;
        }
        "exit" => {
            let _ = group.all_gather(vec![1; 300_000].into()).unwrap();
            say("done");
            // All have what they called for, and none takes leave.
            std::io::stdin().read_line(&mut String::new()).unwrap();
            std::process::exit(0);
        }
        "rank 1 exits" => {
            if rank == 1 {
                std::process::exit(0);
            }
            until_error(&mut || group.barrier())
        }
        role => panic!("no role {role}"),
    };
    say(&format!("error {error:?}"));
}

fn everyone_but(victim: u32, ranks: &mut [RankProcess]) -> Vec<String> {
    let others = (0..).zip(ranks).filter(|(rank, _)| *rank != victim);
    others.map(|(_, rank)| rank.hear("error")).collect()
}

#[test]
fn a_killed_rank_is_named_at_once_by_all_others() {
    let deadline = PATIENT;
    for (role, victim) in [
        ("barriers", 0),
        ("barriers", 4),
        ("barriers", 7),
        ("gathers to rank 5", 1),
        ("gathers to rank 5", 5),
        ("large broadcasts", 4),
    ] {
        for operation in [1, 2, 5] {
            let dies = Victim { rank: victim, operation, signal: "kill" };
            let mut ranks = start(role, 8, deadline, Some(dies));
            for error in everyone_but(victim, &mut ranks) {
                assert!(
                    error.starts_with(&format!("PeerLost {{ rank: {victim},")),
                    "{role}, rank {victim} killed before operation {operation}: {error}"
                );
            }
        }
    }
}

#[test]
fn a_rank_killed_at_whatever_it_does_is_named_by_all_others() {
    for role in ["barriers", "gathers to rank 5", "large broadcasts"] {
        let mut ranks = start(role, 6, PATIENT, None);
        ranks[5].signal(Signal::KILL);
        for error in everyone_but(5, &mut ranks) {
            assert!(error.starts_with("PeerLost { rank: 5,"), "{role}: {error}");
        }
    }
}

/// The others wait until the deadline is over, so that of all the cases passes at the same time.
#[test]
fn a_stopped_rank_is_named_within_the_deadline() {
    let stopped = |deadline, role, rank, operation| {
        let mut ranks = start(role, 5, deadline, Some(Victim { rank, operation, signal: "stop" }));
        for error in everyone_but(rank, &mut ranks) {
            assert!(
                error.starts_with(&format!("Timeout {{ rank: {rank},")),
                "{role}, rank {rank} stopped before operation {operation}: {error}"
            );
        }
        ranks[rank as usize].signal(Signal::CONT);
        let error = ranks[rank as usize].hear("error");
        assert!(!error.is_empty(), "{role}: the stopped rank goes on");
    };
    with_growing_deadline(|deadline| {
        std::thread::scope(|scope| {
            for (role, rank, operation) in
                [("barriers", 0, 1), ("barriers", 2, 4), ("large broadcasts", 3, 2)]
            {
                scope.spawn(move || stopped(deadline, role, rank, operation));
            }
        });
    });
}

#[test]
fn a_rank_that_exits_without_a_farewell_is_gone() {
    let mut ranks = start("rank 1 exits", 4, PATIENT, None);
    for error in everyone_but(1, &mut ranks) {
        assert!(error.starts_with("PeerLost { rank: 1,"), "{error}");
    }
}

#[test]
fn ranks_that_exit_after_their_last_call_do_not_disturb_each_other() {
    let mut ranks = start("exit", 5, PATIENT, None);
    for rank in &mut ranks {
        rank.hear("done");
    }
    for rank in &mut ranks {
        drop(rank.child.stdin.take());
        assert!(rank.child.wait().unwrap().success());
    }
}
