//! Each package by itself and each of its features, as a dependent would build them; and the plug-ins
//! outside of the workspace.

use crate::formats;
use xtask_host::{Result, process, workspace};

/// The number of sets in which features are checked in pairs. A package with no more features than
/// that is checked with each alone.
const SETS: u32 = 7;

/// Plug-ins, in a workspace of their own.
const PLUGINS: &str = "examples/plugins";

/// Checks every package, or the one of this name, alone, so that none lives from features that a sibling turns on, and packages
/// with features without any, with each or in sets, and with all, the formats with each alone, too; then tests
/// the plug-ins.
pub(crate) fn main(only: Option<&str>) -> Result {
    let mut packages = workspace::packages()?;
    if let Some(name) = only {
        packages.retain(|package| package.name == name);
        if packages.is_empty() {
            return Err(format!("there is no package {name} in the workspace").into());
        }
    }
    for package in packages {
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
        let sets = match package.features.len() > SETS as usize {
            true => pairs(&package.features)?,
            false => package.features.clone(),
        };
        for set in &sets {
            println!("  with {set}");
            check(&["--no-default-features", "--features", set])?;
        }
        check(&["--all-features"])?;
        if package.name == formats::PACKAGE {
            formats::check()?;
        }
    }
    if only.is_some() { Ok(()) } else { plugins() }
}

/// Sets of features in which, for every two features, one set has both, one the first alone and one
/// the second alone; a feature that brings another one has it in all sets.
///
/// Each feature is in a different choice of four of seven sets. Two choices of four of seven have a
/// set in common, and neither is within the other. So seven builds do for the pairs of 35 features, and
/// a feature that needs another one without saying so fails in one of them.
fn pairs(features: &[String]) -> Result<Vec<String>> {
    let choices: Vec<u32> = (0..1 << SETS).filter(|sets: &u32| sets.count_ones() == 4).collect();
    if features.len() > choices.len() {
        return Err(format!("a package has more than {} features", choices.len()).into());
    }
    let is_in = |set: u32, choice: u32| (choice >> set) & 1 == 1;
    let set = |set: u32| {
        let members = features.iter().zip(&choices).filter(|(_, choice)| is_in(set, **choice));
        members.map(|(feature, _)| feature.as_str()).collect::<Vec<_>>().join(",")
    };
    Ok((0..SETS).map(set).collect())
}

/// Tests the plug-ins as crates of another project, in the same target folder.
fn plugins() -> Result {
    let manifest = workspace::root().join(PLUGINS).join("Cargo.toml");
    let cargo = |args: &[&str]| {
        let mut cargo = workspace::cargo();
        cargo.args(args).arg("--manifest-path").arg(&manifest);
        cargo
    };
    process::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    // A crate that got a dependency changes the lock file of the plug-ins, too.
    if !process::succeeds(&mut cargo(&["metadata", "--format-version", "1", "--locked"])) {
        return Err(format!(
            "{PLUGINS}/Cargo.lock is not that of its dependencies; run `cargo metadata \
             --manifest-path {PLUGINS}/Cargo.toml` and commit the file"
        )
        .into());
    }
    let mut test = cargo(&["test", "--quiet", "--workspace", "--locked"]);
    process::run(test.arg("--target-dir").arg(workspace::target()?))
}

#[test]
fn every_two_features_are_checked_together_and_without_each_other() {
    let names: Vec<String> = (0..35).map(|number| format!("f{number}")).collect();
    for count in [2, 20, 35] {
        let features = &names[..count];
        let sets = pairs(features).unwrap();
        let sets: Vec<Vec<&str>> = sets.iter().map(|set| set.split(',').collect()).collect();
        for a in features {
            for b in features.iter().filter(|b| *b != a) {
                let has = |set: &&Vec<&str>, name: &String| set.contains(&name.as_str());
                assert!(sets.iter().any(|set| has(&set, a) && has(&set, b)), "{a} and {b}");
                assert!(sets.iter().any(|set| has(&set, a) && !has(&set, b)), "{a}, not {b}");
            }
        }
    }
    let too_many: Vec<String> = (0..36).map(|number| number.to_string()).collect();
    assert!(pairs(&too_many).is_err());
}
