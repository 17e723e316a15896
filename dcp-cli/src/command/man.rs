//! `dcp man`: the help of every command as manual pages.

use std::fmt::Write as _;

use clap::{Args, Command};
use clap_mangen::Man;
use dcp::core::registry::Access;
use dcp::core::storage::PutMode;
use dcp::core::{Key, Payload, StorageError};
use dcp::jobs::text::count;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::session::Session;

/// Write the manual pages.
///
/// Writes dcp.1 and a page for every command, such as dcp-inspect.1, into a directory. Pages that
/// are there already are replaced. Without a directory, the page of dcp itself is printed.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp man ~/.local/share/man/man1
  dcp man | man -l -                 read it now")]
pub(crate) struct ManPages {
    /// The directory to write to; made if it is missing.
    pub(crate) directory: Option<String>,

    /// Print the names of the files as JSON.
    #[arg(long, requires = "directory")]
    pub(crate) json: bool,
}

/// Writes the pages of `program`.
pub(crate) fn man(args: &ManPages, program: Command, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let pages = pages(program)?;
    let Some(directory) = &args.directory else {
        let (_, page) = pages.first().ok_or_else(|| Failure::new(Exit::Io, "there is no page"))?;
        return out.write_own(page);
    };
    session.run(true, async {
        let storage = session.opener().storages().open(directory, Access::Write).await?;
        let storage = session.rollback.watch(storage);
        for (name, page) in &pages {
            let key = Key::new(name.clone()).map_err(StorageError::from)?;
            let payload = Payload::from(page.clone().into_bytes());
            storage.put(&key, payload, PutMode::Overwrite).await?;
        }
        Ok(())
    })?;
    let names: Vec<&String> = pages.iter().map(|(name, _)| name).collect();
    if args.json {
        return out.json(&json!({ "directory": directory, "files": names }));
    }
    if out.quiet {
        return Ok(());
    }
    out.write(&format!("{directory}: {}\n", count(names.len(), "manual page")))
}

/// The name and the text of every page, that of `dcp` first.
fn pages(mut root: Command) -> Result<Vec<(String, String)>, Failure> {
    root.build();
    let commands: Vec<&Command> = root.get_subcommands().filter(|c| !c.is_hide_set()).collect();
    let names: Vec<String> = commands.iter().map(|command| page_name(command)).collect();
    let mut all = vec![("dcp.1".to_owned(), page(&root, &root, &names)?)];
    for (command, name) in commands.iter().zip(&names) {
        all.push((format!("{name}.1"), page(command, &root, &["dcp".to_owned()])?));
    }
    Ok(all)
}

fn page_name(command: &Command) -> String {
    format!("dcp-{}", command.get_name())
}

fn page(command: &Command, root: &Command, others: &[String]) -> Result<String, Failure> {
    let version = root.get_version().unwrap_or_default();
    let man = Man::new(command.clone());
    let title = command.get_display_name().unwrap_or("dcp").to_uppercase();
    let mut roff = format!(
        ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n\
         .TH \"{}\" 1 \"\" \"dcp {version}\" \"dcp manual\"\n",
        escaped(&title)
    )
    .into_bytes();
    man.render_name_section(&mut roff)?;
    man.render_synopsis_section(&mut roff)?;
    man.render_description_section(&mut roff)?;
    man.render_options_section(&mut roff)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut roff)?;
    }
    let mut text = String::from_utf8_lossy(&roff).into_owned();
    let mut sections = sections(command);
    if !sections.iter().any(|(name, _)| name == EXIT_CODES) {
        let codes = self::sections(root).into_iter().filter(|(name, _)| name == EXIT_CODES);
        sections.extend(codes);
    }
    for (name, lines) in &sections {
        section(&mut text, name, lines);
    }
    text.push_str(".SH SEE ALSO\n");
    let others: Vec<_> =
        others.iter().map(|name| format!("\\fB{}\\fR(1)", escaped(name))).collect();
    text.push_str(&others.join(",\n"));
    text.push('\n');
    Ok(ascii(&text))
}

const EXAMPLES: &str = "Examples";
const EXIT_CODES: &str = "Exit codes";

/// What stands below the options in the long help: headings, and the lines below each.
fn sections(command: &Command) -> Vec<(String, Vec<String>)> {
    let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let mut sections: Vec<(String, Vec<String>)> = Vec::new();
    for line in help.lines() {
        match line.strip_suffix(':').filter(|heading| !heading.starts_with(' ')) {
            Some(heading) => sections.push((heading.to_owned(), Vec::new())),
            None => {
                if !line.starts_with(' ') && !line.is_empty() {
                    // Text after the last heading's lines is copied.
                    if sections.last().is_none_or(|(name, _)| name != "Notes") {
                        sections.push(("Notes".to_owned(), Vec::new()));
                    }
                }
                if let Some((_, lines)) = sections.last_mut() {
                    lines.push(line.to_owned());
                }
            }
        }
    }
    sections
}

fn section(roff: &mut String, name: &str, lines: &[String]) {
    let title = if name == EXIT_CODES { "EXIT STATUS".to_owned() } else { name.to_uppercase() };
    let _ = writeln!(roff, ".SH {}", escaped(&title));
    let mut lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    while lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    let in_columns = |line: &&str| line.trim_start().contains("   ");
    if name == EXAMPLES || name == EXIT_CODES {
        for line in lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty()) {
            let (term, text) = line.split_once("  ").unwrap_or((line, ""));
            let _ = writeln!(roff, ".TP\n\\fB{}\\fR", escaped(term));
            let text = text.trim();
            if !text.is_empty() {
                let _ = writeln!(roff, "{}", protected(text));
            }
        }
    } else if lines.iter().any(in_columns) {
        let _ = writeln!(roff, ".nf");
        for line in lines {
            let _ = writeln!(roff, "{}", protected(line.strip_prefix("  ").unwrap_or(line)));
        }
        let _ = writeln!(roff, ".fi");
    } else {
        for line in lines {
            match line.trim() {
                "" => roff.push_str(".PP\n"),
                line => {
                    let _ = writeln!(roff, "{}", protected(line));
                }
            }
        }
    }
}

/// The text without a meaning for roff.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq")
}

/// The same as a line of its own, which must not look like a request.
fn protected(line: &str) -> String {
    let text = escaped(line);
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}

/// Other characters by their number, which every roff accepts in any locale.
fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let _ = write!(out, "\\[u{:04X}]", u32::from(c));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn every_command_has_a_page_with_examples_and_exit_status() {
        let pages = pages(Cli::command()).unwrap();
        let commands = Cli::command().get_subcommands().count();
        assert_eq!(pages.len(), commands + 1);
        for (name, page) in &pages {
            for part in [".TH ", ".SH SYNOPSIS", ".SH EXAMPLES", ".SH EXIT STATUS", ".SH SEE ALSO"]
            {
                assert!(page.contains(part), "{name}: {part}");
            }
            assert_eq!(page.matches(".SH EXIT STATUS").count(), 1, "{name}");
            assert!(page.is_ascii(), "{name}");
        }
    }

    #[test]
    fn lines_are_text_only() {
        assert_eq!(protected(".so /etc/passwd"), "\\&.so /etc/passwd");
        assert_eq!(protected("'a\\b-c"), "\\(aqa\\eb\\-c");
        assert_eq!(ascii("a…"), "a\\[u2026]");
    }
}
