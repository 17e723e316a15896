//! Classes and functions that Python imports when it loads an object.

use std::fmt;
use std::sync::Arc;

use dcp_core::format::IndexCallable;
use dcp_core::text::{Message, Quoted};
use dcp_formats::pickle::{ForeignName, Trust};
use serde::Serialize;

/// A class or function in an object that Python imports, and most likely calls, when it loads the
/// object, and that is not known to be harmless.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ForeignCallable {
    /// The object's FQN; `None` in a pickle that holds the whole checkpoint.
    pub key: Option<Arc<str>>,
    /// The path in the object: keys and positions, joined by dots. `None` where Python discards the
    /// value it builds.
    pub path: Option<String>,
    /// The qualified name, such as `os.system`.
    pub name: String,
    /// Whether it is known to run commands or code. `false` means unknown, not safe.
    pub dangerous: bool,
}

impl ForeignCallable {
    pub(crate) fn new(key: Option<&Arc<str>>, name: ForeignName) -> Self {
        let dangerous = name.trust == Trust::Dangerous;
        Self { key: key.cloned(), name: name.to_string(), path: name.path, dangerous }
    }

    /// The path as text, for messages.
    #[must_use]
    pub fn place(&self) -> String {
        let path = match &self.path {
            None => Some("outside of what it makes".to_owned()),
            Some(path) if path.is_empty() => None,
            Some(path) => Some(format!("at {}", Quoted(path))),
        };
        match (&self.key, path) {
            (Some(key), Some(path)) => format!("{} {path}", Quoted(key)),
            (Some(key), None) => Quoted(key).to_string(),
            (None, Some(path)) => format!("the file {path}"),
            (None, None) => "the whole".to_owned(),
        }
    }
}

impl From<IndexCallable> for ForeignCallable {
    fn from(found: IndexCallable) -> Self {
        let IndexCallable { index, name, path, dangerous, .. } = found;
        Self { key: index.map(Arc::from), path, name, dangerous }
    }
}

impl fmt::Display for ForeignCallable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.dangerous { ", which runs commands or code" } else { "" };
        write!(f, "{} in {}{what}", Message(&self.name), self.place())
    }
}
