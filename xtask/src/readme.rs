//! The two commands of README.md: they are what a reader tries first, so they are run as written.
//!
//! In README.md each stands in a code block behind a comment that is not rendered:
//! `<!-- run: show -->` the one that shows the main job, `<!-- run: test -->` the tests.

use std::process::Command;

use crate::{Result, process, workspace};

/// Runs the command that shows the main job.
pub(crate) fn main() -> Result {
    let path = workspace::root().join("README.md");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let script = block(&text, "show").ok_or("README.md has no code block behind `run: show`")?;
    let mut bash = Command::new("bash");
    bash.current_dir(workspace::root()).args(["-euo", "pipefail", "-c", &script]);
    process::run(&mut bash)
}

/// The commands of the code block behind `<!-- run: name -->`, prompts removed.
fn block(text: &str, name: &str) -> Option<String> {
    let (_, behind) = text.split_once(&format!("<!-- run: {name} -->"))?;
    let (_, fenced) = behind.split_once("```")?;
    let (_, body) = fenced.split_once('\n')?;
    let (body, _) = body.split_once("```")?;
    let lines = body.lines().map(|line| line.strip_prefix("$ ").unwrap_or(line));
    Some(lines.collect::<Vec<_>>().join("\n").trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marked_block_is_found() {
        let text = "# X\n```\nno\n```\n<!-- run: show -->\n```sh\n$ one \\\n    two\n```\nend\n";
        assert_eq!(block(text, "show").as_deref(), Some("one \\\n    two"));
        assert_eq!(block(text, "test"), None);
    }

    #[test]
    fn ci_runs_the_commands_of_the_readme() {
        let read = |file: &str| std::fs::read_to_string(workspace::root().join(file)).unwrap();
        let (readme, ci) = (read("README.md"), read(".ci/run"));
        assert!(block(&readme, "show").is_some(), "no command that shows the main job");
        let test = block(&readme, "test").unwrap();
        assert!(ci.contains(&test), "README's `{test}` is not what CI runs");
    }
}
