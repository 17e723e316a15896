//! Names of entries in messages.

use std::borrow::Cow;

use super::CheckpointMetadata;

impl CheckpointMetadata {
    /// The name of an entry for messages: its FQN, or its number where the metadata has no such
    /// entry, so that no error has an empty name.
    #[must_use]
    pub fn entry_name(&self, entry: usize) -> Cow<'_, str> {
        match self.at(entry) {
            Some((fqn, _)) => Cow::Borrowed(fqn),
            None => Cow::Owned(format!("entry {entry}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plans::metadata::{CheckpointMetadata, Entry, ObjectEntry};

    #[test]
    fn an_absent_entry_has_its_number_as_name() {
        let mut metadata = CheckpointMetadata::new();
        metadata.insert("a", Entry::Object(ObjectEntry::new(None)));
        assert_eq!(metadata.entry_name(0), "a");
        assert_eq!(metadata.entry_name(7), "entry 7");
    }
}
