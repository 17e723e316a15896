//! Paths in a nested state dict.

use std::fmt;
use std::sync::Arc;

/// A path in a nested state dict, outermost step first.
pub type StatePath = Arc<[PathItem]>;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathItem {
    /// A dict key; keys of other types are converted to text (PyTorch's rule).
    Key(Arc<str>),
    /// An element of a list.
    Index(u64),
}

impl PathItem {
    /// The flattened name of a path: its steps, joined by dots.
    ///
    /// ```
    /// use dcp_core::path::PathItem;
    ///
    /// let path = [PathItem::Key("groups".into()), PathItem::Index(0), PathItem::Key("lr".into())];
    /// assert_eq!(PathItem::flat_name(&path), "groups.0.lr");
    /// ```
    #[must_use]
    pub fn flat_name(path: &[Self]) -> String {
        let mut name = String::new();
        for (position, step) in path.iter().enumerate() {
            if position > 0 {
                name.push('.');
            }
            match step {
                Self::Key(key) => name.push_str(key),
                Self::Index(index) => name.push_str(&index.to_string()),
            }
        }
        name
    }
}

impl fmt::Display for PathItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.write_str(key),
            Self::Index(index) => index.fmt(f),
        }
    }
}
