//! `cargo fuzz` for a while. Crashes of earlier runs are seeds that ordinary tests replay.

use std::path::Path;
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
            unpack_seeds(&folder, target)?;
            let limit = format!("-max_total_time={seconds}");
            process::run(&mut fuzz(&["run", target, "--", &limit]))
        }
    }
}

/// Adds the inputs that earlier campaigns kept to the corpus of a target.
fn unpack_seeds(folder: &Path, target: &str) -> Result {
    let seeds = folder.join("seeds").join(format!("{target}.tar.gz"));
    if !seeds.is_file() {
        return Ok(());
    }
    let corpus = folder.join("corpus");
    std::fs::create_dir_all(&corpus)?;
    process::run(Command::new("tar").arg("xzf").arg(&seeds).arg("-C").arg(&corpus))
}
