//! The files of a folder without a checkpoint, for messages.

use dcp_core::format::Folder;
use dcp_core::text::Quoted;

/// The number of names in a message.
const SHOWN: usize = 3;

/// The first files of a folder and the number of the others; empty for a folder without files.
pub(crate) fn files_in(folder: &Folder<'_>) -> String {
    let names: Vec<String> =
        folder.files().take(SHOWN).map(|(name, _)| Quoted(name).to_string()).collect();
    let more = folder.files().count().saturating_sub(SHOWN);
    match (&*names, more) {
        ([], _) => String::new(),
        (names, 0) => format!("; it has {}", names.join(", ")),
        (names, more) => format!("; it has {} and {more} more files", names.join(", ")),
    }
}
