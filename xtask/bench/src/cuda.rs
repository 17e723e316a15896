//! Copies between a CUDA device and host memory: the program is `dcp-cuda/examples/staging.rs`.

use std::path::PathBuf;

use crate::machine::machine;
use xtask_host::process::Scratch;
use xtask_host::{Result, process, workspace};

const USAGE: &str = "usage: cargo xtask bench cuda [--gib N] [--disk DIR]";

/// Prints the speeds, or SKIPPED with the reason where there is no device.
pub(crate) fn main(args: &[&str]) -> Result {
    let (mut gib, mut disk) = ("8", workspace::target()?);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--gib" => gib = args.next().ok_or(USAGE)?,
            "--disk" => disk = PathBuf::from(args.next().ok_or(USAGE)?),
            _ => return Err(USAGE.into()),
        }
    }
    println!("{}", machine());
    let scratch = Scratch::new(&disk, "dcp-bench", false)?;
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--quiet", "--release", "-p", "dcp-cuda", "--features", "cuda"]);
    cargo.args(["--example", "staging", "--", gib]).arg(scratch.path());
    process::run(&mut cargo)
}
