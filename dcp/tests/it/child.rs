//! Other processes: this test program, started again with a job to do.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use dcp::collectives::TcpConfig;
use dcp::{Checkpointer, Storage};
use dcp_conformance::StallStorage;

use crate::state::state;

const JOB: &str = "DCP_TEST_JOB";
const PLACE: &str = "DCP_TEST_PLACE";
/// Before which of its storage's operations, counted from 1, a child stops and says so.
pub(crate) const STOP: &str = "DCP_TEST_STOP";
/// The save during which a rank stops.
pub(crate) const STEP: u8 = 3;

/// Starts a child that does `job` in the folder `place`.
pub(crate) fn start(job: &str, place: &str, variables: &[(&str, String)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child::a_process", "--nocapture", "--quiet"])
        .env(JOB, job)
        .env(PLACE, place)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what a child does. Without a job it has nothing to do.
#[test]
fn a_process() {
    let (Ok(job), Ok(place)) = (std::env::var(JOB), std::env::var(PLACE)) else { return };
    match job.as_str() {
        "save" => save_once(&place),
        "rank" => save_as_a_rank(&place),
        #[cfg(feature = "megatron")]
        "megatron_rank" => crate::megatron::save_as_a_rank(&place),
        other => panic!("unknown job {other}"),
    }
}

pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// A storage that stops its caller before the operation that [`STOP`] names, and says so.
pub(crate) fn stopping(storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
    let Ok(operation) = std::env::var(STOP) else { return storage };
    let stalled = StallStorage::new(storage, operation.parse().unwrap());
    let watched = stalled.clone();
    std::thread::spawn(move || {
        dcp_testing::block_on(watched.stopped());
        say("stopped");
    });
    Arc::new(stalled)
}

fn save_once(place: &str) {
    let storages = dcp::default_storages().layer(|storage, _| stopping(storage));
    let checkpointer = Checkpointer::new().storages(storages);
    checkpointer.save(&state(STEP, 0, 1), place).blocking().unwrap();
    say("saved");
}

fn save_as_a_rank(place: &str) {
    let config = TcpConfig::from_env().unwrap().deadline(Duration::from_secs(120));
    let group = Arc::new(config.connect().unwrap());
    let (rank, world) = (dcp::Collective::rank(&*group), dcp::Collective::world_size(&*group));
    let opened = AtomicU8::new(0);
    let storages = dcp::default_storages().layer(move |storage, _| {
        let step = opened.fetch_add(1, Ordering::Relaxed) + 1;
        if step == STEP { stopping(storage) } else { storage }
    });
    let checkpointer = Checkpointer::new().group(group).storages(storages);
    for step in 1.. {
        match checkpointer.save(&state(step, rank, world), place).blocking() {
            Ok(_) => say(&format!("saved {step}")),
            Err(error) => return say(&format!("error {}", dcp::core::error::error_chain(&error))),
        }
    }
}
