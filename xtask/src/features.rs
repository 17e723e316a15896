//! Each package by itself and each of its features, as a dependent would build them; and the plug-ins
//! outside of the workspace.

use crate::{Result, process, workspace};

/// The package whose features are checked in pairs.
const FACADE: &str = "distcp";

/// Plug-ins, each a workspace of its own.
const PLUGINS: &str = "examples/plugins";

/// Checks every package alone, so that none lives from features that a sibling turns on, and
/// packages with features without any, with each, and with all, and the facade's features in pairs;
/// then tests the plug-ins.
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
        if package.name == FACADE {
            for together in pairs(&package.features)? {
                println!("  with {together}");
                check(&["--no-default-features", "--features", &together])?;
            }
        }
    }
    plugins()
}

/// Sets of features in which, for every two features, one set has both, one the first alone and one
/// the second alone; a feature that brings another one has it in all sets.
///
/// Each feature is in a different choice of four of seven sets. Two choices of four of seven have a
/// set in common, and neither is within the other. So seven builds do for the pairs of 35 features.
fn pairs(features: &[String]) -> Result<Vec<String>> {
    const SETS: u32 = 7;
    let choices: Vec<u32> = (0..1 << SETS).filter(|sets: &u32| sets.count_ones() == 4).collect();
    if features.len() > choices.len() {
        return Err(format!("{FACADE} has more than {} features", choices.len()).into());
    }
    let is_in = |set: u32, choice: u32| (choice >> set) & 1 == 1;
    let set = |set: u32| {
        let members = features.iter().zip(&choices).filter(|(_, choice)| is_in(set, **choice));
        members.map(|(feature, _)| feature.as_str()).collect::<Vec<_>>().join(",")
    };
    Ok((0..SETS).map(set).collect())
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
