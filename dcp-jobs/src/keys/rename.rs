//! Substitutions in key names.

use std::sync::Arc;

use regex::Regex;

use crate::error::JobError;
use crate::keys::suggest::nearest;
use crate::keys::unmatched::UnmatchedPattern;

/// A substitution in key names, in the notation of `sed`: `s/PATTERN/REPLACEMENT/`. Any character
/// may replace `/` as the delimiter; a final `g` replaces every match instead of the first.
///
/// The pattern is a regular expression in the syntax of the `regex` crate; matching takes time
/// linear in the length of the name. In the replacement, `\1` or `$1` is the first group and `\0`
/// or `&` the whole match; a backslash makes any other character literal.
#[derive(Clone, Debug)]
pub struct Rename {
    text: String,
    is_prefix: bool,
    pattern: Regex,
    replacement: String,
    everywhere: bool,
}

impl Rename {
    /// Parses a substitution.
    ///
    /// # Errors
    ///
    /// [`JobError::InvalidOption`] when the text is not a substitution.
    pub fn parse(text: &str) -> Result<Self, JobError> {
        let bad = |problem: &str| JobError::invalid_option(format!("{text:?}"), problem);
        let form = "is not a substitution; write s/PATTERN/REPLACEMENT/";
        if text.len() > TEXT_BYTES_MAX {
            let problem = format!("is longer than {TEXT_BYTES_MAX} bytes");
            return Err(JobError::invalid_option("a substitution", problem));
        }
        let mut chars = text.strip_prefix('s').ok_or_else(|| bad(form))?.chars();
        let delimiter = chars.next().filter(|c| !c.is_alphanumeric() && *c != '\\');
        let delimiter = delimiter.ok_or_else(|| bad(form))?;
        let mut parts = vec![String::new()];
        while let Some(c) = chars.next() {
            match (c, parts.last_mut()) {
                (c, _) if c == delimiter => parts.push(String::new()),
                ('\\', Some(part)) => match chars.next() {
                    Some(c) if c == delimiter => part.push(c),
                    Some(c) => part.extend(['\\', c]),
                    None => return Err(bad("ends in a backslash")),
                },
                (c, Some(part)) => part.push(c),
                (_, None) => {}
            }
        }
        let [pattern, replacement, flags] = &*parts else { return Err(bad(form)) };
        let everywhere = match &**flags {
            "" => false,
            "g" => true,
            _ => return Err(bad("has flags other than g")),
        };
        let pattern = Regex::new(pattern)
            .map_err(|error| bad(&format!("has a bad pattern: {}", one_line(&error))))?;
        let replacement = expansion(replacement).ok_or_else(|| bad("ends in a backslash"))?;
        Ok(Self { text: text.to_owned(), is_prefix: false, pattern, replacement, everywhere })
    }

    /// The substitution that removes `prefix` from the start of names.
    ///
    /// # Errors
    ///
    /// [`JobError::InvalidOption`] when the text is too long for a pattern.
    pub fn without_prefix(prefix: &str) -> Result<Self, JobError> {
        let pattern = Regex::new(&format!("^{}", regex::escape(prefix)))
            .map_err(|error| JobError::invalid_option("the prefix", one_line(&error)))?;
        let (text, replacement) = (prefix.to_owned(), String::new());
        Ok(Self { text, is_prefix: true, pattern, replacement, everywhere: false })
    }

    /// Whether the substitution matches a name.
    #[must_use]
    pub fn is_match(&self, name: &str) -> bool {
        self.pattern.is_match(name)
    }

    /// Reports this substitution as one that matches none of these names.
    pub(crate) fn unmatched(&self, names: &[Arc<str>]) -> UnmatchedPattern {
        let option = if self.is_prefix { "strip" } else { "rename" };
        let like = glob_like(self.pattern.as_str());
        let nearest = nearest(&like, names.iter().map(|name| &**name));
        UnmatchedPattern { option: option.to_owned(), pattern: self.text.clone(), nearest }
    }

    /// The name after the substitution, which ends early behind 64 KiB.
    #[must_use]
    pub fn apply(&self, name: &str) -> Arc<str> {
        let (mut made, mut at) = (String::new(), 0);
        for groups in self.pattern.captures_iter(name) {
            let Some(found) = groups.get(0) else { break };
            made.push_str(name.get(at..found.start()).unwrap_or_default());
            groups.expand(&self.replacement, &mut made);
            at = found.end();
            if !self.everywhere || made.len() > NAME_BYTES_MAX {
                break;
            }
        }
        made.push_str(name.get(at..).unwrap_or_default());
        made.into()
    }
}

/// The longest name that a substitution may make, in bytes. Several substitutions grow names
/// exponentially.
pub(super) const NAME_BYTES_MAX: usize = 64 << 10;

/// The longest substitution, in bytes.
const TEXT_BYTES_MAX: usize = 4096;

/// The message of a regular expression's error, without its multi-line excerpt.
fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    last.trim().trim_start_matches("error: ").to_owned()
}

/// Translates a replacement from `sed`'s notation to that of the `regex` crate.
fn expansion(text: &str) -> Option<String> {
    let mut made = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next()? {
                digit @ '0'..='9' => made.push_str(&format!("${{{digit}}}")),
                '$' => made.push_str("$$"),
                c => made.push(c),
            },
            '&' => made.push_str("${0}"),
            '$' => {
                // `$1x` is the first group and an x, not a group named `1x`.
                let digits: String =
                    std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
                match digits.is_empty() {
                    true if chars.peek() == Some(&'{') => made.push('$'),
                    true => made.push_str("$$"),
                    false => made.push_str(&format!("${{{digits}}}")),
                }
            }
            c => made.push(c),
        }
    }
    Some(made)
}

/// A glob that matches about what a regular expression matches, to find similar names.
fn glob_like(pattern: &str) -> String {
    let anchored = (pattern.starts_with('^'), pattern.ends_with('$'));
    let mut glob = String::from(if anchored.0 { "" } else { "*" });
    let any = |glob: &mut String| {
        if !glob.ends_with('*') {
            glob.push('*');
        }
    };
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        match c {
            '^' | '$' => {}
            '\\' => match chars.next() {
                Some(c) if !c.is_ascii_alphanumeric() => glob.push(c),
                _ => any(&mut glob),
            },
            c if c.is_alphanumeric() || "_-/".contains(c) => glob.push(c),
            _ => any(&mut glob),
        }
    }
    if !anchored.1 {
        any(&mut glob);
    }
    glob
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rename(text: &str, name: &str) -> String {
        Rename::parse(text).unwrap().apply(name).to_string()
    }

    #[test]
    fn substitutions_are_seds() {
        assert_eq!(rename(r"s/^model\.//", "model.model.w"), "model.w");
        assert_eq!(rename("s|a|b|", "aa"), "ba");
        assert_eq!(rename("s/a/b/g", "aa"), "bb");
        assert_eq!(rename(r"s/layers\.(\d+)/h.\1x/", "layers.12.w"), "h.12x.w");
        assert_eq!(rename(r"s/(\d)/$1x/", "a7"), "a7x");
        assert_eq!(rename(r"s/(?<n>\d)/${n}!/", "a7"), "a7!");
        assert_eq!(rename("s/b/[&]/", "abc"), "a[b]c");
        assert_eq!(rename(r"s/b/\&\$1/", "abc"), "a&$1c");
        assert_eq!(rename(r"s/a\/b/x/", "a/b"), "x");
        assert_eq!(rename("s/x/y/", "abc"), "abc");
    }

    #[test]
    fn a_name_grows_within_bounds() {
        let grow = Rename::parse("s/./&&/g").unwrap();
        let mut name: Arc<str> = "a".into();
        for _ in 0..30 {
            name = grow.apply(&name);
        }
        assert!(
            name.len() > NAME_BYTES_MAX && name.len() <= 100 * NAME_BYTES_MAX,
            "{}",
            name.len()
        );
        let wide = Rename::parse(&format!("s/.*/{}/", "&".repeat(4000))).unwrap();
        assert!(wide.apply(&"a".repeat(100)).len() == 400_000);
        assert!(Rename::parse(&format!("s/a/{}/", "&".repeat(5000))).is_err());
    }

    #[test]
    fn what_is_no_substitution_is_refused() {
        for (text, problem) in [
            ("", "not a substitution"),
            ("model.", "not a substitution"),
            ("s/a/b", "not a substitution"),
            ("s/a", "not a substitution"),
            ("sxaxbx", "not a substitution"),
            ("s/a/b/i", "flags"),
            ("s/(/b/", "unclosed group"),
            (r"s/a/b\", "backslash"),
        ] {
            let error = Rename::parse(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn what_has_no_match_is_like_a_name() {
        let names = ["model.embed.weight".into(), "optim.lr".into()];
        let nearest = |text| Rename::parse(text).unwrap().unmatched(&names).nearest;
        assert_eq!(nearest(r"s/^modle\.//").as_deref(), Some("model.embed.weight"));
        assert_eq!(nearest(r"s/embde\.(\w+)$/x/").as_deref(), Some("model.embed.weight"));
        assert_eq!(nearest("s/quite other/x/"), None);
    }
}
