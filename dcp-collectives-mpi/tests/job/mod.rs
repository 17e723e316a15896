//! Runs a test program as the ranks of an MPI job.

use std::io;
use std::process::{Command, ExitCode, ExitStatus};

/// Names what the ranks do.
pub(crate) const CASE: &str = "DCP_MPI_CASE";

/// What this process does, if it is a rank.
pub(crate) fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Runs this program again under `mpirun` with so many ranks.
pub(crate) fn run(ranks: u32, case: &str) -> io::Result<ExitStatus> {
    Command::new("mpirun")
        .args(["--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(CASE, case)
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
        .env("OMPI_MCA_btl_tcp_if_include", "lo")
        .env("OMPI_MCA_oob_tcp_if_include", "lo")
        .status()
}

/// The outcome of a job that has to succeed, if `succeeds`, or to fail.
pub(crate) fn verdict(case: &str, outcome: &io::Result<ExitStatus>, succeeds: bool) -> ExitCode {
    match outcome {
        Ok(status) if status.success() == succeeds => {
            println!("test {case} ... ok");
            ExitCode::SUCCESS
        }
        Ok(status) => {
            println!("test {case} ... FAILED: mpirun ended with {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("SKIPPED: {case}: mpirun cannot be started: {error}");
            ExitCode::SUCCESS
        }
    }
}
