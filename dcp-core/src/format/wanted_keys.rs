//! The choice of the keys of a checkpoint that are needed.

use std::fmt;
use std::sync::Arc;

use crate::plans::metadata::CheckpointMetadata;

/// Says of each key, by position, whether it is needed.
type Choose = dyn Fn(&CheckpointMetadata) -> Vec<bool> + Send + Sync;

/// A choice among the keys of a checkpoint.
#[derive(Clone)]
pub struct WantedKeys(Arc<Choose>);

impl WantedKeys {
    /// The keys for which `accepts` is true.
    #[must_use]
    pub fn new(accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self::choosing(move |keys| keys.iter().map(|(key, _)| accepts(key)).collect())
    }

    /// The keys that `choose` says are needed, by their positions. It sees all keys with their dtypes,
    /// shapes and paths; tensors may have no chunks.
    #[must_use]
    pub fn choosing(
        choose: impl Fn(&CheckpointMetadata) -> Vec<bool> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(choose))
    }

    /// One key.
    #[must_use]
    pub fn one(key: impl Into<String>) -> Self {
        let key = key.into();
        Self::new(move |name| name == key)
    }

    /// Whether each of `keys` is needed, by position.
    #[must_use]
    pub fn of(&self, keys: &CheckpointMetadata) -> Vec<bool> {
        let mut needed = (self.0)(keys);
        needed.resize(keys.len(), false);
        needed
    }
}

/// Choices are equal where one is a clone of the other.
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
    use super::*;
    use crate::plans::metadata::{Entry, ObjectEntry};

    fn keys(names: &[&str]) -> CheckpointMetadata {
        let mut keys = CheckpointMetadata::new();
        for name in names {
            keys.insert(*name, Entry::Object(ObjectEntry::new(None)));
        }
        keys
    }

    #[test]
    fn a_choice_equals_its_clones_alone() {
        let one = WantedKeys::one("a.weight");
        assert_eq!(one.of(&keys(&["a.bias", "a.weight"])), [false, true]);
        assert_eq!(one, one.clone());
        assert_ne!(one, WantedKeys::one("a.weight"));
    }

    #[test]
    fn what_a_choice_does_not_mention_is_not_needed() {
        let first = WantedKeys::choosing(|_| vec![true]);
        assert_eq!(first.of(&keys(&["a", "b", "c"])), [true, false, false]);
        assert_eq!(WantedKeys::choosing(|_| vec![true; 9]).of(&keys(&["a"])), [true]);
    }
}
