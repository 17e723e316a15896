//! The machine that benchmarks run on.

use std::path::PathBuf;

use xtask_host::{Result, process, workspace};

/// The programs and folders of a benchmark.
pub(crate) struct Machine {
    /// A Python with PyTorch.
    pub(crate) python: PathBuf,
    /// The `dcp` command.
    pub(crate) command: PathBuf,
    /// A folder in memory.
    pub(crate) tmpfs: PathBuf,
    /// A folder on a disk.
    pub(crate) disk: PathBuf,
}

/// Cores, memory and kernel, without naming the machine.
pub(crate) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let first = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let memory = first("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse().ok())
        .unwrap_or(0_u64)
        >> 20;
    let kernel = first("/proc/sys/kernel/osrelease");
    let kernel = kernel.split('-').next().unwrap_or_default().trim().to_owned();
    let load = first("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    let commit = workspace::commit();
    format!(
        "{cores} cores, {memory} GiB of memory, Linux {kernel}, load {load} from other work at \
         the start; commit {commit}."
    )
}

/// Builds the example and the `dcp` command as they are published.
pub(crate) fn build() -> Result<(PathBuf, PathBuf)> {
    let arguments = ["build", "--quiet", "--profile", "dist", "--workspace", "--example", "bench"];
    process::run(workspace::cargo().args(arguments).args(["--bin", "dcp"]))?;
    let built = workspace::target()?.join("dist");
    Ok((built.join("examples").join("bench"), built.join("dcp")))
}
