//! Which keys of a checkpoint are needed.

use std::fmt;
use std::sync::Arc;

/// A condition on the keys of a checkpoint.
#[derive(Clone)]
pub struct WantedKeys(Arc<dyn Fn(&str) -> bool + Send + Sync>);

impl WantedKeys {
    /// The keys for which `accepts` is true.
    #[must_use]
    pub fn new(accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(accepts))
    }

    /// One key.
    #[must_use]
    pub fn one(key: impl Into<String>) -> Self {
        let key = key.into();
        Self::new(move |name| name == key)
    }

    /// Whether a key is needed.
    #[must_use]
    pub fn accepts(&self, key: &str) -> bool {
        (self.0)(key)
    }
}

/// Conditions are equal where one is a clone of the other.
impl PartialEq for WantedKeys {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for WantedKeys {}

impl fmt::Debug for WantedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WantedKeys").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::WantedKeys;

    #[test]
    fn a_condition_equals_its_clones_alone() {
        let one = WantedKeys::one("a.weight");
        assert!(one.accepts("a.weight") && !one.accepts("a.bias"));
        assert_eq!(one, one.clone());
        assert_ne!(one, WantedKeys::one("a.weight"));
    }
}
