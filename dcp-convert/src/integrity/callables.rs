//! What Python would import and call where it loads the objects of a checkpoint.
//!
//! Nothing of it is run here. But an object that is written again says to the next Python what it
//! said before, and that one may load it with fewer doubts than its owner had. So what is not
//! known to be harmless is named wherever a checkpoint is looked at, and written only on request.

use std::sync::Arc;

use dcp_core::{CheckpointError, CheckpointMetadata, Entry, FormatError, Value};
use dcp_formats::pickle::ForeignName;
use dcp_formats::torch_object::foreign_names;

use crate::error::ConvertError;
use crate::foreign_callable::ForeignCallable;
use crate::job::JobOptions;
use crate::read::objects::{object_entries, read_objects};
use crate::source::Source;

/// Objects to hold as values at once.
const AT_ONCE: usize = 64;

/// What Python would run when it loads the object `key`, which has this value, and what is not
/// known to be harmless.
///
/// # Errors
///
/// When it holds an object whose kept archive is damaged.
pub fn foreign_callables(
    key: &Arc<str>,
    value: &Value,
) -> Result<Vec<ForeignCallable>, FormatError> {
    let names = foreign_names(value)?.into_iter();
    Ok(names.map(|name| ForeignCallable::new(Some(key), name)).collect())
}

/// Those of an object of which the names are known.
pub(crate) fn of_names(key: &Arc<str>, names: &[ForeignName]) -> Vec<ForeignCallable> {
    names.iter().map(|name| ForeignCallable::new(Some(key), name.clone())).collect()
}

/// Those in what the format keeps besides its objects: the pickle that is a file of `torch.save`,
/// or the `.metadata` of PyTorch's format.
pub(crate) async fn in_index(source: &Source) -> Result<Vec<ForeignCallable>, CheckpointError> {
    let (key, names) = match (source.save_reader(), source.dcp_reader()) {
        (Some(save), _) => (None, save.foreign_names().await?),
        (None, Some(dcp)) => (Some(Arc::from(".metadata")), dcp.foreign_names().await?.to_vec()),
        (None, None) => return Ok(Vec::new()),
    };
    Ok(names.into_iter().map(|name| ForeignCallable::new(key.as_ref(), name)).collect())
}

/// All of a checkpoint. Objects that cannot be read, or are not among `readable`, are passed over.
pub(crate) async fn in_checkpoint(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    readable: impl Fn(usize) -> bool,
) -> Result<Vec<ForeignCallable>, CheckpointError> {
    let mut found = in_index(source).await?;
    if source.save_reader().is_some() {
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

/// Those of [`foreign_callables`] in a value that is about to be written as the object `key`, if [`JobOptions::callables`]
/// admits them all.
///
/// # Errors
///
/// [`ConvertError::Callables`] with all that it does not admit; when the value holds an object
/// whose kept archive is damaged.
pub fn admit_callables(
    key: &Arc<str>,
    value: &Value,
    options: &JobOptions,
) -> Result<Vec<ForeignCallable>, ConvertError> {
    admit(foreign_callables(key, value)?, options)
}

/// What was `found`, if all of it is admitted.
pub(crate) fn admit(
    found: Vec<ForeignCallable>,
    options: &JobOptions,
) -> Result<Vec<ForeignCallable>, ConvertError> {
    let admitted = |one: &ForeignCallable| options.callables.selects(&one.name, None);
    let (found, refused): (Vec<_>, Vec<_>) = found.into_iter().partition(admitted);
    if refused.is_empty() { Ok(found) } else { Err(ConvertError::Callables { found: refused }) }
}
