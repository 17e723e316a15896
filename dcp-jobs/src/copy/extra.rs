//! Files of a target that its source has not.

use std::collections::BTreeSet;

use dcp_core::Key;
use dcp_core::text::Quoted;

use crate::error::{Error, ErrorKind};
use crate::run::StepNaming;

/// Names that a message lists.
const SHOWN_MAX: usize = 8;

/// The checkpoints of runs at the target that the source has no more: folders of steps.
///
/// A run is pruned while its copy keeps all steps. So a step that the source has not stays at the target,
/// if both have another step of that run: then the target is a copy of the same run, as the bytes of
/// the common steps are compared.
///
/// # Errors
///
/// [`OtherCheckpoint`](ErrorKind::OtherCheckpoint) for any other file.
pub(super) fn gone_at_source(
    target: &str,
    source: &BTreeSet<&Key>,
    existing: &BTreeSet<&Key>,
) -> Result<BTreeSet<String>, Error> {
    let common = source.intersection(existing).flat_map(|key| steps_of(key));
    let common: BTreeSet<&str> = common.map(|(run, _)| run).collect();
    let at_source: BTreeSet<&str> =
        source.iter().flat_map(|key| steps_of(key)).map(|(_, step)| step).collect();
    let (mut gone, mut others) = (BTreeSet::new(), Vec::new());
    for key in existing.difference(source) {
        let is_gone =
            |(run, step): &(&str, &str)| common.contains(run) && !at_source.contains(step);
        match steps_of(key).find(is_gone) {
            Some((_, step)) => drop(gone.insert(step.to_owned())),
            None => others.push(key.as_str()),
        }
    }
    match &*others {
        [] => Ok(gone),
        others => {
            let what = match others {
                [_] => "a file that the source has not".to_owned(),
                many => format!("{} files that the source has not", many.len()),
            };
            let message = format!("{target:?} has {what}: {}", listed(others.iter().copied()));
            Err(Error::new(ErrorKind::OtherCheckpoint, message)
                .with_hint("choose another folder, or remove what is there"))
        }
    }
}

/// The folders of steps that a file is in: that of the run of each, and its own.
fn steps_of(key: &Key) -> impl Iterator<Item = (&str, &str)> {
    let path = key.as_str();
    path.match_indices('/').filter_map(move |(end, _)| {
        let step = path.get(..end)?;
        let (run, name) = step.rsplit_once('/').unwrap_or(("", step));
        StepNaming::step_of(name).map(|_| (run, step))
    })
}

/// The first names in quotes.
pub(super) fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(SHOWN_MAX);
    let shown: Vec<_> = names.take(SHOWN_MAX).map(|name| Quoted(name).to_string()).collect();
    let shown = shown.join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
