//! Other processes: this test program, started again with a job to do.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use dcp::collectives::TcpConfig;
use dcp::core::CollectiveError;
use dcp::core::bytes::Bytes;
use dcp::{Checkpointer, Collective, Storage};
use dcp_conformance::StallStorage;

use crate::state::state;

const JOB: &str = "DCP_TEST_JOB";
const PLACE: &str = "DCP_TEST_PLACE";
/// Before which of its storage's operations, counted from 1, a child stops and says so.
pub(crate) const STOP: &str = "DCP_TEST_STOP";
/// Before which call of its collective in save number [`STEP`], counted from 1, a rank stops.
pub(crate) const STOP_CALL: &str = "DCP_TEST_STOP_CALL";
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
    let group = config.connect().unwrap();
    let (rank, world) = (group.rank(), group.world_size());
    let left = Arc::new(AtomicU64::new(0));
    let group = Arc::new(StoppingCollective { inner: Box::new(group), left: Arc::clone(&left) });
    let opened = AtomicU8::new(0);
    let storages = dcp::default_storages().layer(move |storage, _| {
        let step = opened.fetch_add(1, Ordering::Relaxed) + 1;
        if step == STEP { stopping(storage) } else { storage }
    });
    let checkpointer = Checkpointer::in_group(group).storages(storages);
    for step in 1.. {
        if step == STEP {
            let stop = std::env::var(STOP_CALL).map_or(0, |call| call.parse().unwrap());
            left.store(stop, Ordering::Relaxed);
        }
        match checkpointer.save(&state(step, rank, world), place).blocking() {
            Ok(_) => say(&format!("saved {step}")),
            Err(error) => return say(&format!("error {}", dcp::core::error::error_chain(&error))),
        }
    }
}

/// A member of a group that says so and waits for its end when it has no calls left.
#[derive(Debug)]
struct StoppingCollective {
    inner: Box<dyn Collective>,
    /// Calls until it stops, with the one before which it does; 0 while it does not.
    left: Arc<AtomicU64>,
}

impl StoppingCollective {
    fn next(&self) -> &dyn Collective {
        let before = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if before == Ok(1) {
            say("stopped");
            loop {
                std::thread::park();
            }
        }
        &*self.inner
    }
}

impl Collective for StoppingCollective {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: u32, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.next().gather(root, mine)
    }

    fn scatter(&self, root: u32, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.next().scatter(root, all)
    }

    fn broadcast(&self, root: u32, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.next().broadcast(root, from_root)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.next().all_gather(mine)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.next().barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
