//! Files of a run that a storage does not read.

use std::collections::BTreeMap;

use dcp_core::Key;

use super::list_run::Listed;

/// Files that cannot be read, each with the reason, such as links that a file system does not follow.
pub type UnreadFiles = BTreeMap<Key, String>;

/// Marks the checkpoints of which a file cannot be read, and returns the files that belong to none.
pub(super) fn mark_unread(unread: &UnreadFiles, listed: &mut [Listed]) -> UnreadFiles {
    let is_in = |name: &str, key: &Key| {
        let below = key.as_str().strip_prefix(name);
        name == "." || below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut others = unread.clone();
    for Listed { entry, .. } in listed {
        others.retain(|key, _| !is_in(&entry.name, key));
        let first = unread.iter().find(|(key, _)| is_in(&entry.name, key));
        if let Some((_, reason)) = first.filter(|_| entry.is_complete()) {
            entry.complete = None;
            entry.problem = Some(reason.clone());
            entry.strays.clear();
        }
    }
    others
}
