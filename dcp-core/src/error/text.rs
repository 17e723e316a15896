//! Parts of the messages of [`PlanError`].

use super::PlanError;
use crate::text::Quoted;

pub(super) fn container(parent: &str) -> String {
    match parent {
        "" => "the state dict".to_owned(),
        parent => Quoted(parent).to_string(),
    }
}

pub(super) fn entry_and_chunk(entry: &u64, chunk: &Option<u64>) -> String {
    match chunk {
        Some(chunk) => format!("chunk {chunk} in entry {entry}"),
        None => format!("entry {entry}"),
    }
}

pub(super) fn quoted(names: &[String]) -> String {
    names.iter().map(|name| Quoted(name).to_string()).collect::<Vec<_>>().join(", ")
}

pub(super) fn list(errors: &[PlanError]) -> String {
    const SHOWN: usize = 10;
    let mut text = errors.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>();
    if errors.len() > SHOWN {
        text.push(format!("and {} more", errors.len() - SHOWN));
    }
    text.join("; ")
}
