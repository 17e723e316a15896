//! Completions in fish and zsh, and manual pages in groff: programs that a developer's machine
//! need not have, so missing ones are reported as skipped.

use std::io::Write;
use std::process::{Command, Stdio};

use xtask_host::process::{self, Scratch};
use xtask_host::{Result, workspace};

type Check = fn() -> Result;

const CHECKS: [(&str, Check); 3] = [("fish", fish), ("zsh", zsh), ("groff", groff)];

pub(crate) fn main() -> Result {
    workspace::build()?;
    for (program, check) in CHECKS {
        if process::succeeds(Command::new(program).arg("--version")) {
            check().map_err(|error| format!("{program}: {error}"))?;
            println!("{program}: fine");
        } else {
            println!("SKIPPED: there is no {program} here");
        }
    }
    Ok(())
}

fn fish() -> Result {
    let script = dcp(&["completions", "fish"])?;
    for (line, expected) in [
        ("dcp insp", "inspect\tShow what a checkpoint holds"),
        ("dcp inspect --sh", "--shards\t"),
        ("dcp inspect --color ne", "never"),
    ] {
        let typed = format!("{script}\ncomplete -C '{line}'\n");
        let found = fed(Command::new("fish").arg("--no-config"), &typed)?;
        if !found.starts_with(expected) {
            return Err(format!("{line:?} completes to {found:?}, not to {expected:?}").into());
        }
    }
    Ok(())
}

fn zsh() -> Result {
    let script = dcp(&["completions", "zsh"])?;
    let typed = format!(
        "autoload -Uz compinit && compinit -D -u\n{script}\n\
         whence -w _dcp _dcp_commands\nprint -l $_comps[dcp]\n"
    );
    let found = fed(Command::new("zsh").args(["-f", "-s"]), &typed)?;
    let expected = "_dcp: function\n_dcp_commands: function\n_dcp\n";
    if found == expected { Ok(()) } else { Err(format!("it offers {found:?}").into()) }
}

fn groff() -> Result {
    let scratch = Scratch::new(&std::env::temp_dir(), "dcp-man", false)?;
    let folder = scratch.path().to_str().ok_or("a folder without a name")?;
    dcp(&["man", folder])?;
    for page in std::fs::read_dir(scratch.path())? {
        let path = page?.path();
        let text = std::fs::read_to_string(&path)?;
        let shown = fed(Command::new("groff").args(["-Tutf8", "-man", "-ww", "-P-cbou"]), &text)?;
        for part in ["NAME", "SYNOPSIS", "EXAMPLES", "EXIT STATUS", "dcp manual"] {
            if !shown.contains(part) {
                return Err(format!("{}: no {part}\n{shown}", path.display()).into());
            }
        }
    }
    Ok(())
}

fn dcp(args: &[&str]) -> Result<String> {
    process::output(Command::new(workspace::target()?.join("debug/dcp")).args(args))
}

/// What a program prints when it reads `input`; it must have no complaints.
fn fed(command: &mut Command, input: &str) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().ok_or("no stdin")?;
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    writer.join().map_err(|_| "the writer failed")??;
    let complaints = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || !complaints.is_empty() {
        return Err(format!("{}: {complaints}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
