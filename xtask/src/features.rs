//! Each package by itself and each of its features, as a dependent would build them; and the plug-in
//! outside of the workspace.

use crate::{Result, process, workspace};

/// Checks every package alone, so that none lives from features that a sibling turns on, and
/// packages with features without any, with each, and with all; then tests the plug-in.
pub(crate) fn main() -> Result {
    for package in workspace::packages()? {
        println!("{} in {}", package.name, package.dir.display());
        let check = |args: &[&str]| {
            process::run(
                workspace::cargo().args(["check", "--quiet", "-p", &package.name]).args(args),
            )
        };
        check(&[])?;
        if package.features.is_empty() {
            continue;
        }
        check(&["--no-default-features"])?;
        for feature in &package.features {
            check(&["--no-default-features", "--features", feature])?;
        }
        check(&["--all-features"])?;
    }
    plugin()
}

/// Tests the plug-in of a format as a crate of another project, in the same target folder.
fn plugin() -> Result {
    let manifest = workspace::root().join("plugins/toy-format/Cargo.toml");
    let mut format = workspace::cargo();
    process::run(format.args(["fmt", "--check", "--manifest-path"]).arg(&manifest))?;
    // A crate that got a dependency changes the plug-in's lock file, too.
    let mut locked = workspace::cargo();
    locked
        .args(["metadata", "--format-version", "1", "--locked", "--manifest-path"])
        .arg(&manifest);
    if !process::succeeds(&mut locked) {
        return Err("plugins/toy-format/Cargo.lock is not that of its dependencies; run `cargo \
                    metadata --manifest-path plugins/toy-format/Cargo.toml` and commit the file"
            .into());
    }
    let mut test = workspace::cargo();
    test.args(["test", "--quiet", "--locked"]).arg("--manifest-path").arg(manifest);
    process::run(test.arg("--target-dir").arg(workspace::target()?))
}
