//! Completions in bash, and the manual pages. `cargo xtask shells` tests other shells and a
//! formatter, where they are installed.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::dcp;

/// What bash completes in place of the last word.
fn completed(words: &str) -> String {
    let script = dcp(["completions", "bash"]).ok();
    let last = words.split(' ').count() - 1;
    let typed = format!(
        "{script}\nCOMP_WORDS=({words})\nCOMP_CWORD={last}\n\
         _dcp dcp \"${{COMP_WORDS[{last}]}}\" \"${{COMP_WORDS[{last} - 1]}}\"\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    );
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-eu", "-s"]);
    bash.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut bash = bash.spawn().unwrap();
    bash.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let output = bash.wait_with_output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && complaints.is_empty(), "{complaints}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn bash_completes_commands_options_and_values() {
    assert_eq!(completed("dcp insp"), "inspect\n");
    let options = completed("dcp inspect --");
    for option in ["--json", "--shards", "--filter", "--color"] {
        assert!(options.lines().any(|line| line == option), "{options}");
    }
    assert_eq!(completed("dcp inspect --color ne"), "never\n");
    assert!(completed("dcp report --st").contains("--stats"));
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("man1");
    let uri = place.to_str().unwrap();
    let said = dcp(["man", uri, "--json"]).json();
    let files = said["files"].as_array().unwrap();
    assert_eq!(files[0], "dcp.1");
    assert_eq!(fs::read_dir(&place).unwrap().count(), files.len());
    let page = |name: &str| fs::read_to_string(place.join(name)).unwrap();
    assert_eq!(dcp(["man"]).ok(), page("dcp.1"));
    let help = dcp(["--help"]).ok();
    for file in files.iter().skip(1) {
        let name = file.as_str().unwrap();
        let command = name.strip_prefix("dcp-").and_then(|n| n.strip_suffix(".1")).unwrap();
        assert!(help.contains(&format!("\n  {command}")), "{command}");
        let text = page(name).replace("\\-", "-");
        assert!(text.contains(&format!("\\fBdcp {command}")), "an example of {command}");
        assert!(text.contains(".SH EXIT STATUS\n.TP\n\\fB0\\fR\n"), "{command}");
    }
    fs::write(place.join("dcp.1"), "old").unwrap();
    assert!(dcp(["man", uri]).ok().contains("manual pages"));
    assert_ne!(page("dcp.1"), "old");
}
