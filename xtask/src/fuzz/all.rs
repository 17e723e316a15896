//! Every fuzz target for a few seconds, from its seeds on, with the stable compiler: what runs in CI.
//!
//! There is no address sanitizer, which only a nightly compiler has. It would watch one module: the
//! one with unsafe code, on which CI runs miri.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use super::targets::{self, TARGETS, Target};
use xtask_host::{Result, process, workspace};

/// What cargo-fuzz compiles with, less the sanitizer.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module \
                     -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                     -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The profile of `fuzz/Cargo.toml` that all targets are built in.
const PROFILE: &str = "smoke";

/// Seconds that one input may take, and MiB that a process may have.
const LIMITS: [&str; 2] = ["-timeout=20", "-rss_limit_mb=2048"];

/// Builds all targets and runs them for about `seconds` together, as many at a time as there are
/// cores.
pub(crate) fn main(seconds: u64) -> Result {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    if !process::succeeds(Command::new(&compiler).arg("--version")) {
        println!("SKIPPED: libFuzzer is built with a C++ compiler, and there is none here");
        return Ok(());
    }
    let binaries = build()?;
    // A corpus of an earlier run would make this one depend on it.
    let corpora = workspace::target()?.join("fuzz-corpora");
    if corpora.exists() {
        std::fs::remove_dir_all(&corpora)?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let each = (seconds * cores as u64 / TARGETS.len() as u64).max(1);
    let open = Mutex::new(TARGETS.iter());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    // The guard is gone before the target runs.
                    let next = open.lock().ok().and_then(|mut open| open.next());
                    let Some(target) = next else { return };
                    let ran = run(target, &binaries, &corpora, each);
                    match (ran, failed.lock()) {
                        (Ok(done), _) => println!("{:<20} {done}", target.name),
                        (Err(error), Ok(mut failed)) => {
                            failed.push(format!("{}: {error}", target.name));
                        }
                        (Err(_), Err(_)) => return,
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n").into()) }
}

/// The folder of the programs, one for each target.
fn build() -> Result<PathBuf> {
    let host = workspace::host()?;
    let target = workspace::root().join("fuzz/target");
    let mut build = workspace::cargo();
    // The lock file follows the crates of the workspace: it is not held to be current here.
    // With a target named, build scripts and macros are not instrumented.
    build.args(["build", "--quiet", "--bins", "--profile", PROFILE, "--target", &host]);
    build.args(["--manifest-path", "fuzz/Cargo.toml", "--target-dir"]).arg(&target);
    process::run(build.env("RUSTFLAGS", FLAGS))?;
    Ok(target.join(host).join(PROFILE))
}

/// Runs one target, and returns what libFuzzer says that it has done.
fn run(target: &Target, binaries: &Path, corpora: &Path, seconds: u64) -> Result<String> {
    super::unpack_seeds(target.name, corpora)?;
    let corpus = corpora.join(target.name);
    let artifacts = workspace::root().join("fuzz/artifacts").join(target.name);
    std::fs::create_dir_all(&corpus)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut run = Command::new(binaries.join(target.name));
    run.current_dir(workspace::root()).args(LIMITS);
    run.arg(format!("-max_total_time={seconds}"));
    run.arg(format!("-artifact_prefix={}/", artifacts.display()));
    run.arg(corpus).args(targets::seeds(target.name)?);
    let output = run.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let from = said.lines().count().saturating_sub(40);
        let end: Vec<&str> = said.lines().skip(from).collect();
        return Err(format!("{}\n{}", output.status, end.join("\n")).into());
    }
    let done = said.lines().rev().find(|line| line.starts_with("Done "));
    Ok(done.unwrap_or("no input was run").to_owned())
}
