//! Errors about the file of one rank.

use dcp_core::{CheckpointError, FormatError};

/// An error about the file of a rank.
pub(crate) fn bad(file: &str, problem: impl Into<String>) -> CheckpointError {
    FormatError::new("file of a rank", problem).in_file(file, 0).into()
}

/// The first of some names, and how many more there are.
pub(crate) fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    if let Some(more) = names.len().checked_sub(SHOWN).filter(|more| *more > 0) {
        shown.push(format!("and {more} more"));
    }
    shown.join(", ")
}
