//! Other processes: this test program, started again with a job to do.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use dcp::collectives::TcpConfig;
use dcp::{Access, DcpWriter, Saver, StorageRegistry, StorageWriter};

use crate::state::state;

const JOB: &str = "DCP_TEST_JOB";
const PLACE: &str = "DCP_TEST_PLACE";

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
        "save" => save_for_ever(&place),
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

fn save_for_ever(place: &str) {
    for step in (1..=250).cycle() {
        dcp::blocking::save(&state(step, 0, 1), place).unwrap();
        say(&format!("saved {step}"));
    }
}

fn save_as_a_rank(place: &str) {
    let config = TcpConfig::from_env().unwrap().deadline(Duration::from_secs(60));
    let group = Arc::new(config.connect().unwrap());
    let (rank, world) = (dcp::Collective::rank(&*group), dcp::Collective::world_size(&*group));
    let saver = Saver::new().group(group);
    say("ready");
    for step in (1..=250).cycle() {
        let storage = StorageRegistry::with_defaults().open(place, Access::Write).unwrap();
        let writer: Arc<dyn StorageWriter> = Arc::new(DcpWriter::new(storage));
        match dcp::blocking::save_with(&saver, &state(step, rank, world), &writer) {
            Ok(_) => say(&format!("saved {step}")),
            Err(error) => {
                say(&format!("error {}", dcp::core::error_chain(&error)));
                return;
            }
        }
    }
}
