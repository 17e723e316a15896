//! The two commands of README.md: they are what a reader tries first, so they are run as written.

use std::process::Command;

use xtask_host::{Result, process, workspace};

/// Runs the command that shows the main job.
pub(crate) fn main() -> Result {
    let path = workspace::root().join("README.md");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let [show, _] = commands(&text).ok_or("README.md has no two commands")?;
    let mut bash = Command::new("bash");
    bash.current_dir(workspace::root()).args(["-euo", "pipefail", "-c", &show]);
    process::run(&mut bash)
}

/// The code blocks of the section "Two commands": what shows the main job, and the tests.
fn commands(text: &str) -> Option<[String; 2]> {
    let (_, behind) = text.split_once("\n## Two commands\n")?;
    let section = behind.split("\n## ").next()?;
    let mut blocks = section.split("```").skip(1).step_by(2);
    let mut next = || Some(blocks.next()?.split_once('\n')?.1.trim().to_owned());
    Some([next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_blocks_of_the_section_are_found() {
        let text = "# X\n```\nno\n```\n## Two commands\nfirst\n```sh\none \\\n  two\n```\n\
            then\n```sh\nthree\n```\n## More\n```\nfour\n```\n";
        let expected = ["one \\\n  two", "three"].map(str::to_owned);
        assert_eq!(commands(text), Some(expected));
        assert_eq!(
            commands("# X\n\n## Two commands\n```\none\n```\n## More\n```\ntwo\n```\n"),
            None
        );
    }

    /// The tag of a code block that rustdoc compiles and, without `no_run`, runs.
    fn is_rust(tag: &str) -> bool {
        tag.split(',').all(|word| ["", "rust", "no_run", "should_panic"].contains(&word.trim()))
    }

    #[test]
    fn every_published_library_is_documented_by_its_readme_with_an_example() {
        let mut wrong = Vec::new();
        for package in workspace::packages().unwrap().into_iter().filter(|p| p.is_public()) {
            let folder = workspace::root().join(&package.dir);
            let read = |file| std::fs::read_to_string(folder.join(file)).unwrap_or_default();
            let include = "#![doc = include_str!(\"../README.md\")]";
            if !read("src/lib.rs").starts_with(include) {
                wrong.push(format!("{}/src/lib.rs does not begin with {include}", package.name));
            }
            let readme = read("README.md");
            let fences: Vec<_> =
                readme.lines().filter_map(|line| line.strip_prefix("```")).collect();
            // Every second fence ends a block.
            if !fences.iter().step_by(2).any(|tag| is_rust(tag)) {
                wrong.push(format!("{}/README.md has no example that compiles", package.name));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn ci_runs_the_commands_of_the_readme() {
        let read = |file: &str| std::fs::read_to_string(workspace::root().join(file)).unwrap();
        let (readme, ci) = (read("README.md"), read(".ci/run"));
        let [_, test] = commands(&readme).unwrap();
        assert!(ci.contains(&test), "README's `{test}` is not what CI runs");
        assert!(ci.contains("cargo xtask readme"));
    }
}
