//! Finds what Python imports and calls when it loads a checkpoint's objects.
//!
//! dcp runs none of it. But an object that dcp copies carries the same instructions to the next
//! Python, which may load it with fewer checks. So every job that reads a checkpoint names what is
//! not known to be harmless, and a job that writes refuses it unless the caller allows it.

use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Value};
use dcp_formats::pickle::ForeignName;
use dcp_formats::torch_object::foreign_names;

use crate::error::{ForeignCallable, JobError};
use crate::options::JobOptions;
use crate::read::objects::{object_entries, read_objects};
use crate::source::Source;

/// Objects decoded at once.
const AT_ONCE: usize = 64;

/// The functions and classes that Python calls when it loads the object `key` with this value, and
/// that are not known to be harmless.
///
/// # Errors
///
/// When it holds an object whose stored archive is damaged.
pub fn foreign_callables(
    key: &Arc<str>,
    value: &Value,
) -> Result<Vec<ForeignCallable>, FormatError> {
    let names = foreign_names(value)?.into_iter();
    Ok(names.map(|name| ForeignCallable::new(Some(key), name)).collect())
}

/// Like [`foreign_callables`], for an object whose names are already extracted.
pub(crate) fn of_names(key: &Arc<str>, names: &[ForeignName]) -> Vec<ForeignCallable> {
    names.iter().map(|name| ForeignCallable::new(Some(key), name.clone())).collect()
}

/// Finds those in what the format stores besides objects, such as the `.metadata` of PyTorch's
/// format.
pub(crate) async fn in_index(source: &Source) -> Result<Vec<ForeignCallable>, CheckpointError> {
    let callables = source.index_facts().await?.callables;
    Ok(callables.into_iter().map(ForeignCallable::from).collect())
}

/// Finds those of a whole checkpoint. Skips objects that cannot be read or are not in `readable`.
pub(crate) async fn in_checkpoint(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    readable: impl Fn(usize) -> bool,
) -> Result<Vec<ForeignCallable>, CheckpointError> {
    let mut found = in_index(source).await?;
    if source.single_pickle().is_some() {
        return Ok(found);
    }
    let mut entries = object_entries(metadata);
    entries.retain(|entry| readable(*entry));
    for batch in entries.chunks(AT_ONCE) {
        let values = read_objects(source, metadata, batch).await;
        for at in batch {
            if let (Some(Ok(value)), Some((fqn, Entry::Object(_)))) =
                (values.get(at), metadata.at(*at))
            {
                found.extend(foreign_callables(fqn, value).unwrap_or_default());
            }
        }
    }
    Ok(found)
}

/// Returns the [`foreign_callables`] of a value that is written as the object `key`, if
/// [`JobOptions::callables`] allows all of them.
///
/// # Errors
///
/// [`JobError::Callables`] with all that it does not allow; also when the value holds an object
/// whose stored archive is damaged.
pub fn admit_callables(
    key: &Arc<str>,
    value: &Value,
    options: &JobOptions,
) -> Result<Vec<ForeignCallable>, JobError> {
    admit(foreign_callables(key, value)?, options)
}

/// Returns `found` if all of it is allowed.
pub(crate) fn admit(
    found: Vec<ForeignCallable>,
    options: &JobOptions,
) -> Result<Vec<ForeignCallable>, JobError> {
    let admitted = |one: &ForeignCallable| options.callables.selects(&one.name, None);
    let (found, refused): (Vec<_>, Vec<_>) = found.into_iter().partition(admitted);
    if refused.is_empty() { Ok(found) } else { Err(JobError::Callables { found: refused }) }
}
