//! The files that make a checkpoint visible, as formats name them.

use std::cmp::Reverse;

use dcp_core::format::{Evidence, FolderMatch, FormatRegistry, Listing};
use dcp_core::storage::ObjectMeta;

/// Files of one checkpoint that are tried as the one that is removed first.
const INDICES_MAX: usize = 8;

/// Files that carry data, and those that make a checkpoint visible, in the order in which they are
/// written: in the deepest folders first, so that the tracker of a run comes last.
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

/// The files that make the checkpoint in the folder `name` visible, in an order of which the first
/// removal makes it incomplete, and no later one complete again, for every format. `None` where there
/// is no such order, as for a format without an index. `files` are all files in the folder; the name
/// of the root is empty.
///
/// A deletion takes this order, a copy the opposite one.
pub(crate) fn removal_order(
    formats: &FormatRegistry,
    name: &str,
    files: &[ObjectMeta],
) -> Option<Vec<ObjectMeta>> {
    let (data, mut indices) = split_indices(formats, files.to_vec());
    // The last written goes first where that will do.
    indices.reverse();
    // Files that only have the name of an index may be many.
    let first = (0..indices.len().min(INDICES_MAX)).find(|first| {
        let mut order = indices.clone();
        let chosen = order.remove(*first);
        order.insert(0, chosen);
        (1..=order.len().min(INDICES_MAX)).all(|gone| {
            let rest = order.iter().skip(gone).chain(&data);
            let rest: Vec<_> = rest.cloned().collect();
            !seems_whole(formats, name, &rest, files)
        })
    })?;
    let chosen = indices.remove(first);
    indices.insert(0, chosen);
    Some(indices)
}

/// Whether the rest of a checkpoint seems complete. Loose files, such as those of torch.save beside
/// a model, are no rest of it.
fn seems_whole(
    formats: &FormatRegistry,
    name: &str,
    rest: &[ObjectMeta],
    all: &[ObjectMeta],
) -> bool {
    let was = classify(formats, name, all);
    classify(formats, name, rest).is_some_and(|found| {
        let is_same = was.is_some_and(|was| was.format.info().name == found.format.info().name);
        is_whole(&found) && (is_same || found.found.evidence == Evidence::Index)
    })
}

/// Classifies a folder with these files.
pub(crate) fn classify(
    formats: &FormatRegistry,
    name: &str,
    files: &[ObjectMeta],
) -> Option<FolderMatch> {
    let listing = Listing::new(files.iter().cloned());
    let root = listing.root();
    formats.classify(&if name.is_empty() { root } else { root.folder(name)? })
}

/// Whether the format finds nothing missing.
pub(crate) fn is_whole(found: &FolderMatch) -> bool {
    found.found.problem.is_none()
}
