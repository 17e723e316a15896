//! What a folder is, by the names in it: whose checkpoint, and whether its save finished.

use std::sync::Arc;

use dcp_convert::Source;
use dcp_core::format::{Folder, FolderMatch, FormatInfo, FormatRegistry, Place};
use dcp_formats::hf::INDEX_ENDING;
use dcp_megatron::Tracked;
use dcp_megatron::disk::TRACKER;

use crate::error::Error;

/// Whether a folder is a checkpoint of PyTorch's format.
pub(crate) fn is_dcp(folder: &Folder<'_>) -> bool {
    folder.has(".metadata") || folder.has("__0.metadata")
}

/// A file that makes a folder a Hugging Face model, whatever else is there: an index, or one under
/// a name that loaders look for. Other safetensors files may be in any folder.
pub(crate) fn model_file<'a>(folder: &Folder<'a>) -> Option<&'a str> {
    let mut files = folder.files().map(|(name, _)| name);
    files.find(|name| {
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        is_weights || name.ends_with(INDEX_ENDING)
    })
}

/// The format that opens a folder, if that is one of this name, and what it says of the folder.
pub(crate) fn checkpoint_of(
    formats: &FormatRegistry,
    folder: &Folder<'_>,
    format: &str,
) -> Option<FolderMatch> {
    let mut found = formats.recognize(folder).into_iter();
    found.find(|one| one.format.info().name == format && one.found.is_checkpoint())
}

/// What an unfinished save left in a folder: the name and title of its format, and what shows it.
pub(crate) async fn unfinished(
    formats: &FormatRegistry,
    place: &Place,
) -> Result<Option<(FormatInfo, String)>, Error> {
    let folder = place.listing().root();
    let own = formats.classify(&folder).filter(|own| own.found.inner.is_none());
    if let Some(FolderMatch { format, found, .. }) = own
        && let Some(problem) = found.problem
    {
        return Ok(Some((format.info(), problem)));
    }
    // Only the index shows it, of some.
    let source = Source::dcp(Arc::clone(place.storage()), true);
    let metadata = match is_dcp(&folder) {
        true => source.metadata().await.ok(),
        false => None,
    };
    let found = metadata.and_then(|metadata| formats.unfinished(&folder, &metadata));
    Ok(found.map(|(info, found)| (info, format!("the folder {}", found.description))))
}

/// What makes a folder that of a run of Megatron-LM: its tracker, or an iteration. Readers open an
/// iteration of it instead of a checkpoint in the folder itself.
pub(crate) fn run_file(folder: &Folder<'_>) -> Option<String> {
    if folder.has(TRACKER) {
        return Some(TRACKER.to_owned());
    }
    let iteration = |name: &str| Tracked::of_folder(name)?.iteration();
    let found = folder.folders().find(|below| iteration(below.name()).is_some())?;
    Some(found.path().to_owned())
}
