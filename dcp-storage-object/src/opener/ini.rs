//! The form of AWS's `credentials` and `config` files: sections of properties.
//!
//! As AWS's own programs read it: a line that begins with `#` or `;` is a comment, and so is what
//! follows either after a space; an indented line below a property without a value is a property of
//! it; names of properties have no case; of equal names the last one counts.

use std::collections::BTreeMap;
use std::fmt;

/// The sections of a file by name, such as `default` or `profile eu`.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Ini(BTreeMap<String, Section>);

/// The properties of a section by name; that of a property of another one is `outer.inner`.
pub(crate) type Section = BTreeMap<String, String>;

/// The reason why a file cannot be read. It has nothing of the file, which has secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IniError {
    /// The number of the line, from 1; 0 for the file.
    pub(crate) line: usize,
    pub(crate) problem: &'static str,
}

impl Ini {
    /// Reads a file.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, IniError> {
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|_| IniError { line: 0, problem: "it is not UTF-8" })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut sections: BTreeMap<String, Section> = BTreeMap::new();
        let (mut section, mut property) = (None::<String>, None::<String>);
        for (line, text) in (1..).zip(text.lines()) {
            let bad = |problem| Err(IniError { line, problem });
            let is_indented = text.starts_with([' ', '\t']);
            let text = without_comment(text).trim();
            if text.is_empty() {
                continue;
            }
            if let Some(header) = text.strip_prefix('[').filter(|_| !is_indented) {
                let Some((name, "")) = header.split_once(']') else {
                    return bad("a section is written [NAME]");
                };
                let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
                if name.is_empty() {
                    return bad("a section has no name");
                }
                sections.entry(name.clone()).or_default();
                (section, property) = (Some(name), None);
                continue;
            }
            let Some(properties) = section.as_ref().and_then(|name| sections.get_mut(name)) else {
                return bad("a property is before the first section");
            };
            let outer = property.as_deref().filter(|_| is_indented);
            if is_indented && outer.is_none() {
                return bad("an indented line is below no property");
            }
            if let Some(value) = outer.and_then(|outer| properties.get_mut(outer))
                && !value.is_empty()
            {
                value.push('\n');
                value.push_str(text);
                continue;
            }
            let Some((name, value)) = text.split_once('=') else {
                return bad("a property is written NAME = VALUE");
            };
            let name = name.trim().to_ascii_lowercase();
            if name.is_empty() {
                return bad("a property has no name");
            }
            let value = value.trim().to_owned();
            match outer {
                Some(outer) => drop(properties.insert(format!("{outer}.{name}"), value)),
                None => {
                    properties.insert(name.clone(), value);
                    property = Some(name);
                }
            }
        }
        Ok(Self(sections))
    }

    /// The section of that name.
    pub(crate) fn section(&self, name: &str) -> Option<&Section> {
        self.0.get(name)
    }
}

/// Values are secrets.
impl fmt::Debug for Ini {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

fn without_comment(line: &str) -> &str {
    if line.trim_start().starts_with(['#', ';']) {
        return "";
    }
    let begins = [" #", " ;", "\t#", "\t;"].iter().filter_map(|mark| line.find(mark)).min();
    begins.and_then(|at| line.get(..at)).unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value<'a>(ini: &'a Ini, section: &str, name: &str) -> Option<&'a str> {
        ini.section(section)?.get(name).map(String::as_str)
    }

    #[test]
    fn files_are_read_as_the_programs_of_aws_read_them() {
        let text = "# comment\n[default]\nAWS_Access_Key_Id = AK#1 ; mine\r\n\
            aws_secret_access_key=a=b/c+;d\n\n[ profile   eu ] # in Europe\nregion = eu-west-1\n\
            s3 =\n  endpoint_url = http://x\n\tuse = # nothing\nlong = a\n  b\n[default]\nregion=x\n";
        let ini = Ini::parse(text.as_bytes()).unwrap();
        assert_eq!(value(&ini, "default", "aws_access_key_id"), Some("AK#1"));
        assert_eq!(value(&ini, "default", "aws_secret_access_key"), Some("a=b/c+;d"));
        assert_eq!(value(&ini, "default", "region"), Some("x"));
        assert_eq!(value(&ini, "profile eu", "region"), Some("eu-west-1"));
        assert_eq!(value(&ini, "profile eu", "s3.endpoint_url"), Some("http://x"));
        assert_eq!(value(&ini, "profile eu", "s3.use"), Some(""));
        assert_eq!(value(&ini, "profile eu", "long"), Some("a\nb"));
        assert!(!format!("{ini:?}").contains("AK#1"));
    }

    #[test]
    fn what_is_no_such_file_is_refused_by_its_line() {
        for (text, line) in [
            ("a = b", 1),
            ("[x]\nsecret", 2),
            ("[x\n", 1),
            ("[x] y\n", 1),
            ("[]\n", 1),
            ("[x]\n  a = b", 2),
            ("[x]\n= b", 2),
            ("[x]\na =\n  secret", 3),
        ] {
            let error = Ini::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.line, line, "{text:?}");
            assert!(!format!("{error:?}").contains("secret"));
        }
        assert_eq!(Ini::parse(b"\xff").unwrap_err().line, 0);
        assert_eq!(Ini::parse(b"").unwrap(), Ini::default());
    }

    #[test]
    fn the_seeds_of_the_fuzzer_are_read_or_refused() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/aws_profile");
        let mut read = 0;
        for seed in std::fs::read_dir(seeds).unwrap() {
            let bytes = std::fs::read(seed.unwrap().path()).unwrap();
            read += usize::from(Ini::parse(&bytes).is_ok());
        }
        assert!(read >= 2);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[\\[\\]=#; \t\na-c]{0,60}") {
            if let Ok(ini) = Ini::parse(text.as_bytes()) {
                let all = ini.0.values().flatten().map(|(name, value)| name.len() + value.len());
                // A name is repeated for each property of it.
                prop_assert!(all.sum::<usize>() <= text.len() * text.len() + text.len());
            }
        }
    }
}
