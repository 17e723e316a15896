//! Rebuilds objects that one checkpoint stores whole and a `torch.save` file splits.
//!
//! A `torch.save` file is one object; its keys follow from its dicts and lists. A dict that is one
//! object in the other checkpoint is many keys there. The comparison rebuilds the dict.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::path::PathItem;
use dcp_core::{CheckpointMetadata, Value};
use dcp_formats::torch_save::TorchSaveReader;

use crate::error::JobError;
use crate::options::JobOptions;
use crate::source::Source;
use crate::view::Assembled;

/// `source`, with parts rebuilt to the objects that `other` has.
pub(super) async fn whole_as_in(
    source: &Source,
    other: &Source,
    options: &JobOptions,
) -> Result<Source, JobError> {
    let Some(save) = source.extension::<TorchSaveReader>() else { return Ok(source.clone()) };
    let (metadata, other) = (source.metadata().await?, other.metadata().await?);
    let is_whole = |name: &Arc<str>| matches!(other.get(name), Some(Entry::Object(_)));
    let parts = metadata.iter().filter_map(|(_, entry)| outermost(entry));
    let names: HashSet<&Arc<str>> = parts.filter(|name| is_whole(name)).collect();
    if names.is_empty() || names.iter().any(|name| metadata.get(name).is_some()) {
        return Ok(source.clone());
    }
    let wanted = |key: &str| names.iter().any(|name| &***name == key);
    let Some(values) = save.values(wanted).await? else { return Ok(source.clone()) };
    let mut view = Assembled::builder(std::slice::from_ref(source), options).await?;
    pass_others(&mut view, &metadata, &names)?;
    for (key, value) in values {
        if let Value::Str(key) = key {
            view.object(key, None, value)?;
        }
    }
    view.finish()
}

fn pass_others(
    view: &mut crate::view::AssembledBuilder,
    metadata: &CheckpointMetadata,
    names: &HashSet<&Arc<str>>,
) -> Result<(), JobError> {
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if outermost(entry).is_none_or(|name| !names.contains(name)) {
            view.pass(Arc::clone(fqn), entry.path().cloned(), 0, at)?;
        }
    }
    Ok(())
}

/// The outermost dict that contains an entry.
fn outermost(entry: &Entry) -> Option<&Arc<str>> {
    match entry.path().map(|path| &**path) {
        Some([PathItem::Key(first), _, ..]) => Some(first),
        _ => None,
    }
}
