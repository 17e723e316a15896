//! Ranks as processes over TCP: they save together, and one of them dies.

use std::io::{BufRead as _, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::child::start;
use crate::state::load;

pub(crate) struct Rank {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    _port: Arc<Socket>,
}

impl Rank {
    /// Reads until a line begins with `start`, and returns it.
    pub(crate) fn wait_for(&mut self, start: &str) -> String {
        self.lines
            .by_ref()
            .map_while(Result::ok)
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("the process ended without {start:?}"))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // A failing test must not leave processes behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ranks(world: u32, place: &str) -> Vec<Rank> {
    ranks_doing("rank", world, place)
}

/// Processes that do `job` together.
pub(crate) fn ranks_doing(job: &str, world: u32, place: &str) -> Vec<Rank> {
    // Nobody listens there, and nobody else gets it until rank 0 asks for it by number.
    let reserved = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    reserved.set_reuse_address(true).unwrap();
    reserved.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let port = reserved.local_addr().unwrap().as_socket().unwrap().port();
    let reserved = Arc::new(reserved);
    (0..world)
        .map(|rank| {
            let variables = [
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.to_string()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", world.to_string()),
            ];
            let mut child = start(job, place, &variables);
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            Rank { child, lines, _port: Arc::clone(&reserved) }
        })
        .collect()
}

#[test]
fn when_a_rank_is_killed_the_others_name_it_and_the_checkpoint_stays() {
    for (victim, delay) in [(0_usize, 2), (1, 5), (2, 11)] {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("run").display().to_string();
        let mut ranks = ranks(3, &place);
        for rank in &mut ranks {
            rank.wait_for("saved 2");
        }
        std::thread::sleep(Duration::from_millis(delay));
        ranks[victim].child.kill().unwrap();
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            let error = process.wait_for("error ");
            assert!(error.contains(&format!("rank {victim}")), "rank {rank}: {error}");
        }
        assert!(load(&place).unwrap() >= 2);
        // Other ranks, another number of them: the next job saves here without any help.
        drop(ranks);
        for rank in &mut self::ranks(2, &place) {
            rank.wait_for("saved 3");
        }
        assert!(load(&place).unwrap() >= 1);
    }
}
