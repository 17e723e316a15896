//! Filters that select entries of a checkpoint by name.

use dcp_core::path::{PathItem, StatePath};

/// Patterns that select entries by name. An entry is selected when any of them
///
/// - is its FQN, or a part of it that ends before a dot (`model.layers` selects
///   `model.layers.0.weight`);
/// - is a prefix of its path, joined by dots, which is the rule of the `keys` of PyTorch's
///   `_EmptyStateDictLoadPlanner` (2.15) and differs where names of their own contain dots;
/// - matches its whole FQN as a glob: `*` matches any text, dots included, and `?` one
///   character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFilter {
    patterns: Option<Vec<String>>,
}

impl KeyFilter {
    /// Selects everything.
    #[must_use]
    pub fn all() -> Self {
        Self { patterns: None }
    }

    /// Selects the entries that any of the patterns selects; nothing when there are none.
    pub fn any_of<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self { patterns: Some(patterns.into_iter().map(Into::into).collect()) }
    }

    /// The patterns; none where everything is selected.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        self.patterns.as_deref().unwrap_or_default()
    }

    /// Whether an entry is selected.
    #[must_use]
    pub fn selects(&self, fqn: &str, path: Option<&StatePath>) -> bool {
        let Some(patterns) = &self.patterns else { return true };
        patterns.iter().any(|pattern| {
            is_dotted_prefix(pattern, fqn)
                || path.is_some_and(|path| is_path_prefix(pattern, path))
                || (pattern.contains(['*', '?']) && glob(pattern, fqn))
        })
    }
}

impl Default for KeyFilter {
    fn default() -> Self {
        Self::all()
    }
}

fn is_dotted_prefix(pattern: &str, fqn: &str) -> bool {
    fqn.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn is_path_prefix(pattern: &str, path: &[PathItem]) -> bool {
    let mut rest = pattern;
    for (position, step) in path.iter().enumerate() {
        if position > 0 {
            let Some(after) = rest.strip_prefix('.') else { return false };
            rest = after;
        }
        let after = match step {
            PathItem::Key(key) => rest.strip_prefix(&**key),
            PathItem::Index(index) => rest.strip_prefix(&*index.to_string()),
        };
        match after {
            Some("") => return true,
            Some(after) => rest = after,
            None => return false,
        }
    }
    false
}

/// Matches with one point of return, the last `*`: never more than length times length steps.
fn glob(pattern: &str, text: &str) -> bool {
    let (mut pattern, mut text) = (pattern.chars(), text.chars());
    let mut retry: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
    loop {
        let at = text.clone();
        match (pattern.next(), text.next()) {
            (Some('*'), _) => {
                retry = Some((pattern.clone(), at.clone()));
                text = at;
            }
            (Some('?'), Some(_)) => {}
            (Some(want), Some(found)) if want == found => {}
            (None, None) => return true,
            _ => {
                let Some((after_star, from)) = &mut retry else { return false };
                if from.next().is_none() {
                    return false;
                }
                pattern = after_star.clone();
                text = from.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*.weight", "a.b.weight", true),
            ("*.weight", "a.b.weights", false),
            ("a.?.c", "a.é.c", true),
            ("a.?.c", "a..c", false),
            ("*a*b*", "xxaxxaxbx", true),
            ("*a*b", "ab a", false),
            ("a**b", "ab", true),
            ("", "", true),
            ("?", "", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn f9_prefixes_match_by_dots_and_by_steps() {
        let path: StatePath = [PathItem::Key("model".into()), PathItem::Key("a.b".into())].into();
        let selects =
            |pattern: &str| KeyFilter::any_of([pattern]).selects("model.a.b", Some(&path));
        for pattern in ["model", "model.a", "model.a.b", "model.*", "*.b"] {
            assert!(selects(pattern), "{pattern}");
        }
        for pattern in ["mod", "model.a.b.c", "a.b", "", "model."] {
            assert!(!selects(pattern), "{pattern}");
        }
        let dotted: StatePath = [PathItem::Key("x".into()), PathItem::Index(3)].into();
        assert!(KeyFilter::any_of(["x.3"]).selects("renamed", Some(&dotted)));
        assert!(!KeyFilter::any_of(["x.30"]).selects("renamed", Some(&dotted)));
        assert!(!KeyFilter::any_of::<&str>([]).selects("x", None));
        assert!(KeyFilter::all().selects("", None));
    }
}
