//! Whether a committed checkpoint that lost files still has its model.

use std::sync::Arc;

use dcp_core::format::{FormatRegistry, Listing, OpenOptions, Place};
use dcp_core::storage::ObjectMeta;
use dcp_core::{CheckpointError, Storage, StorageError};
use dcp_formats::dcp::DcpFiles;

use crate::keys::StatePart;
use crate::keys::select::Selection;

/// Returns why a committed checkpoint that lost files, in the folder `name` with these files, stays: its model opens.
pub(super) async fn model_left(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    name: &str,
    files: &[ObjectMeta],
) -> Result<Option<String>, StorageError> {
    let place = Place::folder(storage, Listing::new(files.iter().cloned())).below(name)?;
    let opens = model_opens(formats, &place).await?;
    Ok(opens.then(|| "its model still opens".to_owned()))
}

/// Whether a reader opens the model of a checkpoint that lacks files of other keys, such as those of the optimizer, and
/// conversions of the model write it. A save whose index is not there did not finish, and nothing in it is a model.
pub(super) async fn model_opens(
    formats: &FormatRegistry,
    place: &Place,
) -> Result<bool, StorageError> {
    let folder = place.listing().root();
    if !DcpFiles::of(&folder).metadata {
        return Ok(false);
    }
    let model = Selection::all().with_part(StatePart::Model);
    let options = OpenOptions::default().with_keys(Some(model.needed()));
    let opened = async {
        let opened = formats.open(place.storage(), &options).await?;
        let names = match &opened.names {
            Some(names) => names.clone(),
            None => opened.reader.metadata().await?,
        };
        Ok::<_, CheckpointError>(names)
    };
    let names = match opened.await {
        Ok(names) => names,
        Err(CheckpointError::Storage(error)) if error.is_retryable() => return Err(error),
        Err(_) => return Ok(false),
    };
    let chosen = model.of(&names).unwrap_or_default();
    let is_tensor =
        |entry: usize| names.at(entry).is_some_and(|(_, one)| one.as_tensor().is_some());
    // All keys together are no model beside something else, and what is wrong is wrong with them.
    let is_part = chosen.len() < names.len() && chosen.iter().any(|key| is_tensor(key.entry));
    Ok(is_part && formats.unfinished(&folder, &names).is_none())
}
