//! Ranks as processes over TCP: they save together, and one of them dies.

use std::io::{BufRead as _, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout};
use std::sync::Arc;

use dcp_testing::Tortured;
use socket2::{Domain, Socket, Type};

use crate::child::{STEP, STOP, STOP_CALL, start};
use crate::state::load;

pub(crate) struct Rank {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    _port: Arc<Socket>,
}

impl Rank {
    /// Reads until a line is one of those, and returns it.
    pub(crate) fn wait_until(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        lines.find(|line| wanted(line)).unwrap_or_else(|| panic!("the process ended before"))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // A failing test must not leave processes behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Three processes that do `job` together, of which one stops before an operation of save number
/// [`STEP`]; true once that one was killed there, and the others have named it.
pub(crate) fn killed_before(job: &str, place: &str, victim: u32, stop: &[(&str, String)]) -> bool {
    let mut ranks = ranks_doing(job, 3, place, |rank| if rank == victim { stop } else { &[] });
    let saved = format!("saved {STEP}");
    let stopped = |line: &str| line == "stopped" || line == saved;
    if ranks[victim as usize].wait_until(stopped) == saved {
        return false;
    }
    ranks[victim as usize].child.kill().unwrap();
    for (rank, process) in (0..).zip(&mut ranks).filter(|(rank, _)| *rank != victim) {
        let error = process.wait_until(|line| line.starts_with("error "));
        assert!(error.contains(&format!("rank {victim}")), "rank {rank}: {error}");
    }
    true
}

/// Processes that do `job` together, each with variables of its own.
pub(crate) fn ranks_doing<'a>(
    job: &str,
    world: u32,
    place: &str,
    more: impl Fn(u32) -> &'a [(&'a str, String)],
) -> Vec<Rank> {
    // Nobody listens there, and nobody else gets it until rank 0 requests it by number.
    let reserved = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    reserved.set_reuse_address(true).unwrap();
    reserved.bind(&SocketAddr::from((dcp_testing::loopback(), 0)).into()).unwrap();
    let port = reserved.local_addr().unwrap().as_socket().unwrap().port();
    let reserved = Arc::new(reserved);
    (0..world)
        .map(|rank| {
            let variables = [
                ("MASTER_ADDR", dcp_testing::loopback().to_string()),
                ("MASTER_PORT", port.to_string()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", world.to_string()),
            ];
            let variables = [&variables, more(rank)].concat();
            let mut child = start(job, place, &variables);
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            Rank { child, lines, _port: Arc::clone(&reserved) }
        })
        .collect()
}

#[test]
fn when_a_rank_is_killed_at_any_operation_the_others_name_it_and_the_checkpoint_stays() {
    for victim in 0..3 {
        let how = if victim == 0 { "SIGKILL of the coordinator" } else { "SIGKILL of a rank" };
        let mut row = Tortured::new("overwrite, 3 processes over TCP", how);
        let mut loaded = STEP - 1;
        for operation in 1.. {
            let folder = tempfile::tempdir().unwrap();
            let place = folder.path().join("run").display().to_string();
            let stop = [(STOP, operation.to_string())];
            if !killed_before("rank", &place, victim, &stop) {
                break;
            }
            let step = load(&place).unwrap();
            assert!(step == loaded || step == STEP, "{step} at operation {operation}");
            loaded = step;
            row.points += 1;
            row.count(if step == STEP { "new" } else { "old" });
            if operation == 1 {
                // Other ranks, another number of them: the next job saves here without any help.
                for rank in &mut ranks_doing("rank", 2, &place, |_| &[]) {
                    rank.wait_until(|line| line == format!("saved {STEP}"));
                }
                assert!(load(&place).unwrap() >= STEP);
            }
        }
        row.report();
        assert_eq!(loaded, if victim == 0 { STEP } else { STEP - 1 });
    }
}

#[test]
fn when_a_rank_is_killed_at_any_message_the_others_name_it_and_the_checkpoint_stays() {
    for victim in 0..3 {
        let how = match victim {
            0 => "SIGKILL of the coordinator before a message",
            _ => "SIGKILL of a rank before a message",
        };
        let mut row = Tortured::new("overwrite, 3 processes over TCP", how);
        for call in 1.. {
            let folder = tempfile::tempdir().unwrap();
            let place = folder.path().join("run").display().to_string();
            if !killed_before("rank", &place, victim, &[(STOP_CALL, call.to_string())]) {
                assert!(call > 2, "rank {victim} exchanges {call} messages");
                break;
            }
            let step = load(&place).unwrap();
            assert!(step == STEP - 1 || step == STEP, "{step} at message {call}");
            row.points += 1;
            row.count(if step == STEP { "new" } else { "old" });
        }
        row.report();
    }
}
