//! Other programs: run them, show what is run, and say which one failed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::Result;

/// Runs to the end, its output shown as it comes.
pub fn run(command: &mut Command) -> Result {
    println!("$ {}", shown(command));
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() { Ok(()) } else { Err(format!("{status}: {}", shown(command)).into()) }
}

/// Runs to the end and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, &error))?;
    checked(&shown(command), &output)
}

/// Whether a program can be started and succeeds; what it says is not shown.
pub fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn checked(shown: &str, output: &Output) -> Result<String> {
    if !output.status.success() {
        return Err(format!("{}: {shown}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout.clone())?)
}

/// Runs all at once, one rank each, and waits until all have ended or `limit` has passed.
///
/// The first rank that fails ends the others: what it printed is the cause, and the rest would
/// only report their deadlines.
pub fn run_ranks(commands: Vec<Command>, limit: Duration) -> Result {
    let mut ranks = Vec::new();
    for mut command in commands {
        match command.spawn() {
            Ok(child) => ranks.push((shown(&command), child)),
            Err(error) => {
                kill(&mut ranks);
                return Err(cannot_start(&command, &error).into());
            }
        }
    }
    let deadline = Instant::now() + limit;
    loop {
        let mut running = false;
        let mut failed = None;
        for (rank, (shown, child)) in ranks.iter_mut().enumerate() {
            match child.try_wait()? {
                Some(status) if !status.success() => {
                    failed = Some(format!("rank {rank}, {status}: {shown}"));
                    break;
                }
                Some(_) => {}
                None => running = true,
            }
        }
        if failed.is_none() && !running {
            return Ok(());
        }
        if failed.is_none() && Instant::now() > deadline {
            failed = Some(format!("ranks still running after {limit:?}"));
        }
        if let Some(failed) = failed {
            kill(&mut ranks);
            return Err(failed.into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kill(ranks: &mut [(String, Child)]) {
    for (_, child) in ranks {
        // A child that has ended already cannot be killed; there is nothing to do about it.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("cannot start {}: {error}", command.get_program().to_string_lossy())
}

fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| part.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// A folder that is removed when it goes out of scope, unless it is to be kept.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// A new folder under `parent`.
    pub fn new(parent: &Path, name: &str, keep: bool) -> Result<Self> {
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        if keep {
            println!("kept: {}", path.display());
        }
        Ok(Self { path, keep })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            // Nothing depends on it being gone.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
