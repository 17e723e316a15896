//! The suite for collectives, its clauses on failures included.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use dcp_collectives::DEFAULT_MAX_MESSAGE;
use dcp_collectives::mesh::CallLimits;
use dcp_conformance::collective;
use dcp_core::Collective;

/// A group whose ranks are threads of this process.
fn group(folder: &Path, world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let limits = CallLimits {
        deadline,
        connect_timeout: Duration::from_secs(60),
        max_message: DEFAULT_MAX_MESSAGE,
    };
    thread::scope(|scope| {
        let join =
            |rank| scope.spawn(move || unix_collective::connect(folder, rank, world_size, limits));
        let ranks: Vec<_> = (0..world_size).map(join).collect();
        let members = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap());
        members.map(|member| Box::new(member) as Box<dyn Collective>).collect()
    })
}

fn main() -> ExitCode {
    let folder = tempfile::tempdir().unwrap();
    let (root, groups) = (folder.path().to_owned(), AtomicU32::new(0));
    collective::main("unix", move |world_size, deadline| {
        let number = groups.fetch_add(1, Ordering::Relaxed);
        group(&root.join(number.to_string()), world_size, deadline)
    })
}
