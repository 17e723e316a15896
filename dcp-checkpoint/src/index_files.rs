//! The files that make a checkpoint visible, as formats name them.

use std::cmp::Reverse;

use dcp_core::format::FormatRegistry;
use dcp_core::storage::ObjectMeta;

/// Files that carry data, and those that make a checkpoint visible, in the order in which they are
/// written: in the deepest folders first, so that the tracker of a run comes last. A deletion takes
/// the opposite order.
pub(crate) fn split_indices(
    formats: &FormatRegistry,
    files: Vec<ObjectMeta>,
) -> (Vec<ObjectMeta>, Vec<ObjectMeta>) {
    let infos: Vec<_> = formats.formats().iter().map(|format| format.info()).collect();
    let is_index = |file: &ObjectMeta| {
        let name = file.key.file_name();
        infos.iter().any(|info| info.landmarks.contains(&name))
    };
    let (mut indices, data): (Vec<_>, Vec<_>) = files.into_iter().partition(is_index);
    let depth = |file: &ObjectMeta| file.key.as_str().matches('/').count();
    // `.metadata` sorts before `metadata.json` of Megatron-Core, which is written after it.
    indices.sort_by_cached_key(|file| (Reverse(depth(file)), file.key.clone()));
    (data, indices)
}
