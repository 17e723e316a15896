//! Ranks in network namespaces of their own, whose links are slow, lose packets or are cut. Where a
//! process may not make namespaces, the tests say that they are skipped.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::groups::{PATIENT, with_growing_deadline};
use crate::processes::RankProcess;

const RANKS: u32 = 5;
/// Each network has its own port.
const PORT: u16 = 29500;

/// A namespace for each rank, and one with the switch between them. Deleted when dropped.
struct Network {
    name: String,
}

/// Runs `ip` or `tc`, and returns whether it succeeds.
fn succeeds(program: &str, args: &str) -> bool {
    let mut command = Command::new(program);
    command.args(args.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn ip(args: &str) {
    assert!(succeeds("ip", args), "ip {args}");
}

impl Network {
    /// `None`: no namespaces, or no links between them, can be made here.
    fn new() -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let network = Self { name: format!("dcp-{}-{number}", std::process::id()) };
        let switch = network.of("switch");
        let possible = succeeds("ip", &format!("netns add {switch}"))
            && succeeds("ip", &format!("-n {switch} link add hub type bridge"))
            && succeeds("ip", &format!("-n {switch} link set hub up"));
        if !possible {
            println!("SKIPPED: network namespaces and bridges cannot be made here");
            return None;
        }
        for rank in 0..RANKS {
            let own = network.of(&rank.to_string());
            ip(&format!("netns add {own}"));
            ip(&format!("link add rank netns {own} type veth peer name r{rank} netns {switch}"));
            ip(&format!("-n {own} addr add 10.77.0.{}/24 dev rank", rank + 1));
            ip(&format!("-n {own} link set rank up"));
            ip(&format!("-n {own} link set lo up"));
            ip(&format!("-n {switch} link set r{rank} master hub"));
            ip(&format!("-n {switch} link set r{rank} up"));
        }
        Some(network)
    }

    fn of(&self, member: &str) -> String {
        format!("{}-{member}", self.name)
    }

    /// Starts a rank process in each namespace, and waits until they form a group.
    fn start(&self, role: &str, deadline: Duration) -> Vec<RankProcess> {
        let start = |rank: u32| {
            let plain = RankProcess::command(role, rank, RANKS, PORT, deadline);
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.of(&rank.to_string())]);
            command.arg(plain.get_program()).args(plain.get_args());
            for (name, value) in plain.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            command.env("MASTER_ADDR", "10.77.0.1").env("DCP_SECRET", "a secret of this network");
            RankProcess::start(command.stdout(Stdio::piped()).stderr(Stdio::inherit()))
        };
        let mut ranks: Vec<_> = (0..RANKS).map(start).collect();
        ranks.iter_mut().for_each(|rank| drop(rank.hear("ready")));
        ranks
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let ranks = (0..RANKS).map(|rank| rank.to_string());
        for member in ranks.chain(["switch".to_owned()]) {
            succeeds("ip", &format!("netns del {}", self.of(&member)));
        }
    }
}

/// How `tc` disturbs the links: with delay and random loss, or with little room, which delays packets and
/// drops those that find no place.
const DISTURBANCES: [&str; 2] =
    ["netem delay 10ms 5ms loss 2%", "tbf rate 100mbit burst 15kb limit 30kb"];

#[test]
fn slow_links_that_lose_packets_change_no_message() {
    for disturbance in DISTURBANCES {
        let Some(network) = Network::new() else { return };
        let disturbed = (0..RANKS).all(|rank| {
            let own = network.of(&rank.to_string());
            succeeds("tc", &format!("-n {own} qdisc add dev rank root {disturbance}"))
        });
        if disturbed {
            for rank in &mut network.start("checked messages", PATIENT) {
                rank.hear("done");
            }
        } else {
            println!("SKIPPED: this system does not have tc {disturbance:?}");
        }
    }
}

/// A cut link sends no news: the other ranks wait until the deadline, and not longer.
#[test]
fn a_rank_behind_a_cut_link_is_named_within_the_deadline() {
    for victim in [0, 3] {
        with_growing_deadline(|deadline| {
            let Some(network) = Network::new() else { return };
            let mut ranks = network.start("barriers", deadline);
            ip(&format!("-n {} link set r{victim} down", network.of("switch")));
            for (rank, process) in (0..).zip(&mut ranks) {
                let error = process.hear("error");
                let named = ["Timeout", "PeerLost"]
                    .iter()
                    .any(|kind| error.starts_with(&format!("{kind} {{ rank: {victim},")));
                // The rank that is cut off waits for the others.
                let cut_off = rank == victim && error.starts_with("Timeout");
                assert!(named || cut_off, "rank {rank}, link of {victim} cut: {error}");
            }
        });
    }
}
