//! The crate for MPI, which is a workspace of its own because it needs libmpi and libclang.

use std::process::Command;

use xtask_host::{Result, process, workspace};

/// What the crate is built and run with: a program and the package of Debian that has it.
const NEEDED: [(&str, &str); 2] = [("mpicc", "libopenmpi-dev"), ("mpirun", "openmpi-bin")];

/// Formats, lints, documents and tests the crate, its tests on the ranks of MPI jobs.
pub(crate) fn main() -> Result {
    for (program, package) in NEEDED {
        if !process::succeeds(Command::new(program).arg("--version")) {
            println!("SKIPPED: there is no {program} here ({package}, libclang-dev)");
            return Ok(());
        }
    }
    process::run(workspace::cargo().args(["fmt", "--check", "--manifest-path"]).arg(manifest()))?;
    run(&["clippy", "--quiet", "--all-targets"], &["--", "-D", "warnings"])?;
    run(&["doc", "--quiet", "--no-deps"], &[])?;
    run(&["test", "--quiet"], &[])
}

fn run(command: &[&str], rest: &[&str]) -> Result {
    let mut cargo = workspace::cargo();
    cargo.args(command).arg("--manifest-path").arg(manifest());
    cargo.arg("--target-dir").arg(workspace::target()?);
    process::run(cargo.args(rest).env("RUSTDOCFLAGS", "-D warnings"))
}

fn manifest() -> std::path::PathBuf {
    workspace::root().join("dcp-collectives-mpi/Cargo.toml")
}
