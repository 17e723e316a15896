//! The book of `docs/`: its links, and its pages in HTML.

use std::path::PathBuf;
use std::process::Command;

use xtask_host::process::{run, succeeds};
use xtask_host::{Result, workspace};

/// The version of mdBook that renders it.
const MDBOOK: &str = "0.5.4";

/// Renders the book into `target/book`.
///
/// mdBook reads one folder, and pages link to others at the root and in crates. So every page is copied to
/// its place in the repository, where links between pages hold without a change.
pub(crate) fn main() -> Result {
    if !succeeds(Command::new("mdbook").arg("--version")) {
        run(Command::new("cargo")
            .args(["install", "--quiet", "--locked", "--debug"])
            .args(["--no-default-features", &format!("mdbook@{MDBOOK}")]))?;
    }
    let book = workspace::root().join("target/book");
    let _ = std::fs::remove_dir_all(&book);
    for page in pages()? {
        let target = book.join("src").join(&page);
        std::fs::create_dir_all(target.parent().ok_or("a page without a folder")?)?;
        std::fs::copy(workspace::root().join(&page), target)?;
    }
    std::fs::copy(workspace::root().join("docs/book.toml"), book.join("book.toml"))?;
    std::fs::write(book.join("src/SUMMARY.md"), summary()?)?;
    run(Command::new("mdbook").arg("build").arg(&book))?;
    println!("{}", book.join("book/index.html").display());
    Ok(())
}

/// The chapters of the book: those of docs/SUMMARY.md, then the crates that it does not have.
fn summary() -> Result<String> {
    let chapters = std::fs::read_to_string(workspace::root().join("docs/SUMMARY.md"))?;
    let mut summary = chapters.replace("](", "](docs/").replace("](docs/../", "](");
    summary.push_str("\n# Crates\n\n");
    for page in pages()? {
        if let Some(name) = page.to_str().and_then(|page| page.strip_suffix("/README.md"))
            && name.starts_with("dcp")
            // mdBook refuses a page that is there twice.
            && !summary.contains(&format!("]({name}/README.md)"))
        {
            summary.push_str(&format!("- [{name}]({name}/README.md)\n"));
        }
    }
    Ok(summary)
}

/// The pages that people read, relative to the root.
fn pages() -> Result<Vec<PathBuf>> {
    let mut pages = workspace::files()?;
    pages.retain(|file| {
        file.extension().is_some_and(|kind| kind == "md") && !file.starts_with("fixtures")
    });
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The targets of links in a page, outside of code blocks, without those to other sites.
    fn links(text: &str) -> Vec<&str> {
        let mut found = Vec::new();
        let mut is_code = false;
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            }
            if is_code {
                continue;
            }
            for (at, _) in line.match_indices("](") {
                let link = line[at + 2..].split(')').next().unwrap_or_default();
                if !link.contains("://") && !link.starts_with('#') {
                    found.push(link);
                }
            }
        }
        found
    }

    /// The names by which GitHub and mdBook link to the headings of a page.
    fn anchors(text: &str) -> Vec<String> {
        let headings = text.lines().filter(|line| line.starts_with('#'));
        let anchor = |heading: &str| {
            let words = heading.trim_start_matches('#').trim().to_lowercase();
            words
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        };
        headings.map(anchor).collect()
    }

    /// What a link of `page` leads to, if it is not there.
    fn missing(page: &Path, link: &str) -> Option<String> {
        let (file, anchor) = link.split_once('#').map_or((link, None), |(f, a)| (f, Some(a)));
        let target = workspace::root().join(page).parent()?.join(file);
        if !target.exists() {
            return Some(format!("{}: {link} is not there", page.display()));
        }
        let text = std::fs::read_to_string(target).ok()?;
        let anchor = anchor?;
        let is_there = anchors(&text).iter().any(|name| name == anchor);
        (!is_there).then(|| format!("{}: {link} has no such heading", page.display()))
    }

    #[test]
    fn every_link_of_a_page_leads_somewhere() {
        let mut wrong = Vec::new();
        let mut count = 0;
        for page in pages().unwrap() {
            let text = std::fs::read_to_string(workspace::root().join(&page)).unwrap();
            // What a macro makes of rustdoc's links is no path.
            let links = links(&text);
            count += links.len();
            wrong.extend(links.into_iter().filter_map(|link| missing(&page, link)));
        }
        assert!(count > 100, "{count} links");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn every_page_of_the_book_is_in_its_summary_and_its_index() {
        let read = |file: &str| std::fs::read_to_string(workspace::root().join(file)).unwrap();
        let (summary, index) = (read("docs/SUMMARY.md"), read("docs/README.md"));
        for page in pages().unwrap().into_iter().filter(|page| page.starts_with("docs")) {
            let name = page.strip_prefix("docs").unwrap().display().to_string();
            if name != "SUMMARY.md" && name != "README.md" {
                assert!(summary.contains(&format!("({name})")), "SUMMARY.md lacks {name}");
                assert!(index.contains(&format!("({name})")), "README.md lacks {name}");
            }
        }
    }

    #[test]
    fn no_page_is_in_the_book_twice() {
        let summary = summary().unwrap();
        let mut pages = links(&summary);
        assert!(pages.len() > 30, "{} pages", pages.len());
        pages.sort_unstable();
        let twice: Vec<&[&str]> = pages.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }

    #[test]
    fn links_and_headings_are_found() {
        let text = "# A page: one\n[x](a.md#b) [y](https://z) [z](#here)\n```\n[n](no.md)\n```\n";
        assert_eq!(links(text), ["a.md#b"]);
        assert_eq!(anchors(text), ["a-page-one"]);
    }
}
