//! Refuses targets that are, contain or are part of a source.

use std::path::{Path, PathBuf};

use dcp_core::format::ListingEntry;
use dcp_core::location::Location;
use dcp_core::registry::StorageRegistry;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Shape;
use crate::checkpoint::uri::below;
use crate::error::{Error, ErrorKind, JobError};

/// Refuses to write over a file of the source, before anything is opened for writing.
///
/// A file may have a free name in the folder of the source; a folder that is written must have
/// none of the source's files in it, nor lie in the source itself.
pub(crate) async fn keep_apart(
    source: &Checkpoint,
    target: &str,
    shape: Shape,
) -> Result<(), Error> {
    let same = || Error::from(JobError::SameTarget { target: target.to_owned() });
    let (uri, place) = (&*source.uri, &*source.place);
    let storages = source.opener.storages();
    let targets = locations(storages, target);
    let is_same = |url: &str| locations(storages, url).iter().any(|at| targets.contains(at));
    if uri == target || is_same(uri) || is_same(place) {
        return Err(same());
    }
    // Whatever takes the folder of the source for a checkpoint, copies or removes it as a whole.
    let holds_target = |url: &str| {
        locations(storages, url).iter().any(|at| targets.iter().any(|target| target.is_in(at)))
    };
    if shape == Shape::Folder && source.is_folder && holds_target(place) {
        let message = format!("{target:?} is in the source {uri:?}");
        return Err(Error::new(ErrorKind::Overlap, message)
            .with_hint("write to another folder; files inside a checkpoint are deleted with it"));
    }
    for (file, is_folder) in parts(source).await? {
        let touched = locations(storages, &file).iter().any(|file| {
            targets.iter().any(|target| match shape {
                // A folder that belongs to the source as a whole has no room for anything else.
                _ if is_folder && target.is_in(file) => true,
                Shape::File => target == file,
                Shape::Folder => file.is_in(target),
            })
        });
        if touched {
            let message = match shape {
                Shape::File => format!("{target:?} is a file of the source {uri:?}"),
                Shape::Folder => format!("{target:?} has files of the source in it: {file:?}"),
            };
            return Err(Error::new(ErrorKind::Overlap, message)
                .with_hint("write to another place, then remove the old one"));
        }
    }
    Ok(())
}

/// Refuses a target that is the source, is in it, or has it in it.
pub(crate) fn keep_urls_apart(
    storages: &StorageRegistry,
    source: &str,
    target: &str,
) -> Result<(), Error> {
    let (sources, targets) = (locations(storages, source), locations(storages, target));
    if source == target || sources.iter().any(|at| targets.contains(at)) {
        return Err(JobError::SameTarget { target: target.to_owned() }.into());
    }
    let overlap = |outer: &[Location], inner: &[Location]| {
        inner.iter().any(|inner| outer.iter().any(|outer| inner.is_in(outer)))
    };
    if overlap(&sources, &targets) || overlap(&targets, &sources) {
        let message = format!("{source:?} and {target:?} lie in each other");
        return Err(Error::new(ErrorKind::Overlap, message).with_hint("choose another folder"));
    }
    Ok(())
}

/// The URLs of all that belongs to a checkpoint: what its index names, and what its formats own in
/// its folder; with whether it is a folder.
async fn parts(source: &Checkpoint) -> Result<Vec<(String, bool)>, Error> {
    let place = &*source.place;
    let metadata = source.source.names().await?;
    let folder = match crate::checkpoint::uri::split(place) {
        Some((parent, _)) if !source.is_folder => parent,
        _ => place.to_owned(),
    };
    let files = metadata.files().iter().map(|key| (below(&folder, key.as_str()), false));
    let mut parts: Vec<_> = files.collect();
    if !source.is_folder {
        parts.push((place.to_owned(), false));
        return Ok(parts);
    }
    let opener = &source.opener;
    let listed = opener.look(place, &source.storage).await?;
    let root = listed.listing().root();
    parts.extend(root.entries().filter_map(|entry| {
        let (name, is_folder) = match entry {
            ListingEntry::File(name, _) => (name, false),
            ListingEntry::Folder(folder) => (folder.name(), true),
        };
        opener.formats.owns(&root, name).then(|| (below(place, name), is_folder))
    }));
    Ok(parts)
}

/// The places that a URL names: those that its storage says, else those of a local path, else the
/// URL's own segments.
fn locations(storages: &StorageRegistry, url: &str) -> Vec<Location> {
    if let Some(found) = storages.locate(url) {
        return found;
    }
    match url.split_once("://") {
        Some((scheme, _)) if scheme != "file" => Location::of_url(url).into_iter().collect(),
        Some((_, path)) => local(Path::new(path)),
        None => local(Path::new(url)),
    }
}

/// The places of a local path that do not depend on how it was written: with every link followed,
/// and with all but the last. What is not there yet has the name that it will have.
fn local(path: &Path) -> Vec<Location> {
    let Ok(path) = std::path::absolute(path) else { return Vec::new() };
    let followed = followed(&path);
    let itself = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Some(self::followed(parent).join(name)),
        _ => None,
    };
    let paths = itself.into_iter().filter(|name| *name != followed).chain([followed.clone()]);
    let location = |path: PathBuf| {
        let names = path.components().map(|name| name.as_os_str().to_string_lossy().into_owned());
        Location::new("file", names.collect::<Vec<_>>())
    };
    paths.map(location).collect()
}

fn followed(path: &Path) -> PathBuf {
    let known = path.ancestors().find_map(|known| Some((known, known.canonicalize().ok()?)));
    match known.and_then(|(known, real)| Some(real.join(path.strip_prefix(known).ok()?))) {
        // Joined with nothing, a path gets a separator at its end, which is no part of it.
        Some(real) => real.components().collect(),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_has_many_names() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| local(&place.path().join(name));
        let path = |name: &str| place.path().join(name);
        std::fs::create_dir(path("src")).unwrap();
        std::fs::write(path("src/file"), "").unwrap();
        let same = |a: &str, b: &str| at(a).iter().any(|name| at(b).contains(name));
        assert!(same("src", "./src/") && same("src", "src/../src"));
        assert!(same("new/x", "src/../new/x"));
        assert!(!same("src", "src2") && !same("src", "src/file"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(path("src"), path("link")).unwrap();
            std::os::unix::fs::symlink(path("src/file"), path("other")).unwrap();
            assert!(
                same("link", "src") && same("link/file", "src/file") && same("link/n", "src/n")
            );
            assert!(same("other", "src/file") && same("other", "other"));
        }
    }
}
