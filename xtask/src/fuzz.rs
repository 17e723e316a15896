//! `cargo fuzz` for a while; what it found before is replayed by ordinary tests.

use std::process::Command;

use crate::{Result, process, workspace};

/// Runs one target for some seconds (60 by default), or lists the targets.
pub(crate) fn main(args: &[&str]) -> Result {
    let (target, seconds) = match *args {
        [] => (None, 0),
        [target] => (Some(target), 60),
        [target, seconds] => (Some(target), seconds.parse::<u64>()?),
        _ => return Err("usage: cargo xtask fuzz [TARGET [SECONDS]]".into()),
    };
    let folder = workspace::root().join("fuzz");
    if !folder.join("Cargo.toml").is_file() {
        return Err("there is no fuzz/Cargo.toml".into());
    }
    let fuzz = |args: &[&str]| {
        let mut fuzz = Command::new("cargo");
        // The cargo that started this program pins its own toolchain through these.
        fuzz.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
        fuzz.current_dir(workspace::root()).args(["+nightly", "fuzz"]).args(args);
        fuzz
    };
    if !process::succeeds(&mut fuzz(&["--version"])) {
        return Err("fuzzing needs a nightly toolchain and cargo-fuzz:\n  \
             rustup toolchain install nightly && cargo install cargo-fuzz"
            .into());
    }
    match target {
        None => process::run(&mut fuzz(&["list"])),
        Some(target) => {
            let limit = format!("-max_total_time={seconds}");
            process::run(&mut fuzz(&["run", target, "--", &limit]))
        }
    }
}
