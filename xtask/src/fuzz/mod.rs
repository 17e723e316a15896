//! Fuzz targets: one for a while under cargo-fuzz, or all of them for a minute without it. Crashes
//! of earlier runs are seeds that ordinary tests replay.

mod all;
mod targets;

use std::path::Path;
use std::process::Command;

use xtask_host::{Result, process, workspace};

const USAGE: &str = "usage: cargo xtask fuzz [TARGET [SECONDS]]\n       \
                     cargo xtask fuzz --all [--seconds N]";

/// Runs one target for some seconds (60 by default), all of them, or lists them.
pub(crate) fn main(args: &[&str]) -> Result {
    match *args {
        [] => {
            targets::TARGETS.iter().for_each(|target| println!("{}", target.name));
            Ok(())
        }
        ["--all"] => all::main(60),
        ["--all", "--seconds", seconds] => all::main(seconds.parse()?),
        [target] if !target.starts_with('-') => one(target, 60),
        [target, seconds] if !target.starts_with('-') => one(target, seconds.parse()?),
        _ => Err(USAGE.into()),
    }
}

/// Runs one target with cargo-fuzz, under the address sanitizer.
fn one(target: &str, seconds: u64) -> Result {
    let fuzz = |args: &[&str]| {
        let mut fuzz = Command::new("cargo");
        // The cargo that started this program pins its own toolchain through these.
        fuzz.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
        fuzz.current_dir(workspace::root()).args(["+nightly", "fuzz"]).args(args);
        fuzz
    };
    if !process::succeeds(&mut fuzz(&["--version"])) {
        return Err("a campaign of one target needs a nightly toolchain and cargo-fuzz:\n  \
             rustup toolchain install nightly && cargo install cargo-fuzz\n\
             `cargo xtask fuzz --all` needs neither"
            .into());
    }
    let corpus = workspace::root().join("fuzz/corpus");
    unpack_seeds(target, &corpus)?;
    let limit = format!("-max_total_time={seconds}");
    let corpus = corpus.join(target);
    std::fs::create_dir_all(&corpus)?;
    let seeds = targets::seeds(target)?;
    let mut run = fuzz(&["run", target]);
    process::run(run.arg(corpus).args(seeds).args(["--", &limit]))
}

/// Adds the inputs that earlier campaigns kept to the corpora below `corpus`.
fn unpack_seeds(target: &str, corpus: &Path) -> Result {
    let seeds = workspace::root().join("fuzz/seeds").join(format!("{target}.tar.gz"));
    if !seeds.is_file() {
        return Ok(());
    }
    std::fs::create_dir_all(corpus)?;
    process::run(Command::new("tar").arg("xzf").arg(&seeds).arg("-C").arg(corpus))
}
