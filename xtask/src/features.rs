//! Each package by itself and each of its features, as a dependent would build them.

use crate::{Result, process, workspace};

/// Checks every package alone, so that none lives from features that a sibling turns on, and
/// packages with features without any, with each, and with all.
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
    Ok(())
}
