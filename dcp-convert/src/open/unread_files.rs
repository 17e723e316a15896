//! Files of a run that a storage does not read.

use std::collections::BTreeMap;

use dcp_core::Key;

use super::list_run::Listed;

/// Files that cannot be read, each with the reason, such as links that a file system does not follow.
pub type UnreadFiles = BTreeMap<Key, String>;

/// Marks the checkpoints of which a file cannot be read.
pub(super) fn mark_unread(unread: &UnreadFiles, listed: &mut [Listed]) {
    for Listed { entry, .. } in listed.iter_mut().filter(|one| one.entry.complete == Some(true)) {
        let is_in = |key: &Key| {
            let below = key.as_str().strip_prefix(&*entry.name);
            entry.name == "." || below.is_some_and(|rest| rest.starts_with('/'))
        };
        if let Some((_, reason)) = unread.iter().find(|(key, _)| is_in(key)) {
            entry.complete = None;
            entry.problem = Some(reason.clone());
        }
    }
}
