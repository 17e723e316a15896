//! The public names of each published crate, as text in `api/`: a change of them shows in a diff.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask_host::{Result, process, workspace};

/// What the text is made with. Another compiler or tool may write the same names otherwise.
const TOOLCHAIN: &str = "nightly-2026-10-30";
const TOOL: &str = "cargo-public-api@0.52.0";

/// Compares what is public with `api/`, or writes that with `--update`.
pub(crate) fn main(args: &[&str]) -> Result {
    let update = match *args {
        [] => false,
        ["--update"] => true,
        _ => return Err("usage: cargo xtask api [--update]".into()),
    };
    if !(has_toolchain() && has_tool()) {
        let missing = format!("{TOOLCHAIN} or {TOOL} cannot be installed here");
        if update {
            return Err(missing.into());
        }
        println!("SKIPPED: {missing}");
        return Ok(());
    }
    let folder = workspace::root().join("api");
    std::fs::create_dir_all(&folder)?;
    let described = described()?;
    let mut kept = BTreeSet::new();
    let mut differences = Vec::new();
    for package in workspace::packages()?.into_iter().filter(|package| package.is_public()) {
        let file = folder.join(format!("{}.txt", package.name));
        let is = public_names(&described, &package.library.unwrap_or_default())?;
        if update {
            std::fs::write(&file, &is)?;
        } else {
            let was = std::fs::read_to_string(&file).unwrap_or_default();
            differences.extend(difference(&package.name, &was, &is));
        }
        kept.insert(file);
    }
    for file in of_no_crate(&folder, &kept)? {
        if update {
            std::fs::remove_file(&file)?;
        } else {
            differences.push(format!("{} is of no published crate", file.display()));
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    let said = differences.join("\n");
    Err(format!("{said}\n`cargo xtask api --update` writes what is public to api/").into())
}

/// A cargo of the pinned toolchain, whichever started this program.
fn nightly() -> Command {
    let mut cargo = Command::new("cargo");
    cargo.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
    cargo.current_dir(workspace::root()).arg(format!("+{TOOLCHAIN}"));
    cargo
}

fn has_toolchain() -> bool {
    let mut install = Command::new("rustup");
    install.args(["toolchain", "install", TOOLCHAIN, "--profile", "minimal", "--no-self-update"]);
    process::succeeds(nightly().arg("--version")) || process::run(&mut install).is_ok()
}

fn has_tool() -> bool {
    let (_, version) = TOOL.split_once('@').unwrap_or((TOOL, ""));
    let installed = nightly().args(["public-api", "--version"]).output();
    let is_there = installed.is_ok_and(|output| {
        String::from_utf8_lossy(&output.stdout).trim().ends_with(&format!(" {version}"))
    });
    // Unoptimized, it is built in a third of the time and fast enough.
    let mut install = workspace::cargo();
    install.args(["install", "--quiet", "--locked", "--debug", TOOL]);
    is_there || process::run(&mut install).is_ok()
}

/// Describes all libraries in one build, and returns the folder of the descriptions. One build for each
/// would compile dependencies again, with the features that it alone turns on.
fn described() -> Result<PathBuf> {
    let target = workspace::target()?.join("public-names");
    let mut doc = nightly();
    doc.args(["doc", "--quiet", "--workspace", "--lib", "--no-deps", "--all-features"]);
    doc.arg("--target-dir").arg(&target);
    // The lints of documentation are those of the compiler that the workspace is built with.
    let flags = "-Z unstable-options --output-format json --cap-lints allow";
    process::run(doc.env("RUSTDOCFLAGS", flags))?;
    Ok(target.join("doc"))
}

/// One line for each public item, without those that a compiler derives or implements.
fn public_names(described: &Path, library: &str) -> Result<String> {
    let mut list = nightly();
    list.args(["public-api", "-sss", "--color", "never", "--rustdoc-json"]);
    let output = list.arg(described.join(format!("{library}.json"))).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cannot list what is public in {library}\n{said}").into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Lines that came and went.
fn difference(package: &str, was: &str, is: &str) -> Vec<String> {
    let (was, is): (BTreeSet<&str>, BTreeSet<&str>) = (was.lines().collect(), is.lines().collect());
    let gone = was.difference(&is).map(|line| format!("{package}: - {line}"));
    gone.chain(is.difference(&was).map(|line| format!("{package}: + {line}"))).collect()
}

fn of_no_crate(folder: &PathBuf, kept: &BTreeSet<PathBuf>) -> Result<Vec<PathBuf>> {
    let files = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let files: Vec<PathBuf> = files.collect::<Result<_>>()?;
    Ok(files.into_iter().filter(|file| !kept.contains(file)).collect())
}

#[test]
fn lines_that_differ_are_named() {
    let (was, is) = ("pub fn a()\npub fn b()\n", "pub fn b()\npub fn c()\n");
    assert_eq!(difference("x", was, is), ["x: - pub fn a()", "x: + pub fn c()"]);
    assert!(difference("x", was, was).is_empty());
}
