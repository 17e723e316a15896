//! Each package by itself and each of its features, as a dependent would build them; and the plug-ins
//! outside of the workspace.

use crate::{Result, process, workspace};

/// Plug-ins, each a workspace of its own.
const PLUGINS: &str = "examples/plugins";

/// Checks every package alone, so that none lives from features that a sibling turns on, and
/// packages with features without any, with each, and with all; then tests the plug-ins.
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
    plugins()
}

/// Tests each plug-in as a crate of another project, in the same target folder.
fn plugins() -> Result {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(workspace::root().join(PLUGINS))? {
        folders.push(entry?.path());
    }
    folders.retain(|folder| folder.join("Cargo.toml").is_file());
    folders.sort();
    for folder in folders {
        let manifest = folder.join("Cargo.toml");
        println!("{}", folder.display());
        let mut format = workspace::cargo();
        process::run(format.args(["fmt", "--check", "--manifest-path"]).arg(&manifest))?;
        // A crate that got a dependency changes the plug-in's lock file, too.
        let mut locked = workspace::cargo();
        locked
            .args(["metadata", "--format-version", "1", "--locked", "--manifest-path"])
            .arg(&manifest);
        if !process::succeeds(&mut locked) {
            let manifest = manifest.display();
            return Err(format!(
                "the Cargo.lock beside {manifest} is not that of its dependencies; run `cargo \
                 metadata --manifest-path {manifest}` and commit the file"
            )
            .into());
        }
        let mut test = workspace::cargo();
        test.args(["test", "--quiet", "--locked", "--manifest-path"]).arg(&manifest);
        process::run(test.arg("--target-dir").arg(workspace::target()?))?;
    }
    Ok(())
}
