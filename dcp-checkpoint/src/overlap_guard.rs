//! Refuses targets that are, contain or are part of a source.

use std::path::{Path, PathBuf};

use dcp_convert::ConvertError;
use dcp_formats::hf::INDEX_ENDING;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};

/// What is written at a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One file, which takes the place of one that is there.
    File,
    /// Files in a folder, which take the place of a checkpoint that is there.
    Folder,
}

/// Refuses to write where a file of the source lies, before anything is opened for writing.
///
/// A file may have a free name in the folder of the source; a folder that is written must have
/// none of the source's files in it, nor lie in the source itself.
pub(crate) async fn keep_apart(
    source: &Checkpoint,
    target: &str,
    shape: Shape,
) -> Result<(), Error> {
    let same = || Error::from(ConvertError::SameTarget { target: target.to_owned() });
    let uri = &*source.uri;
    if uri == target {
        return Err(same());
    }
    let (Some(typed), Some(place), Some(to)) = (local(uri), local(&source.place), local(target))
    else {
        return Ok(());
    };
    let targets = names(&to);
    if [&typed, &place].iter().any(|place| names(place).iter().any(|at| targets.contains(at))) {
        return Err(same());
    }
    // Whatever takes the folder of the source for a checkpoint, copies or removes it as a whole.
    let inside = |place: &Path| {
        names(place).iter().any(|at| targets.iter().any(|target| target.starts_with(at)))
    };
    if shape == Shape::Folder && place.is_dir() && inside(&place) {
        let message = format!("{target:?} lies in the source {uri:?}");
        return Err(Error::new(ErrorKind::Overlap, message)
            .with_hint("write to another folder; files inside a checkpoint are deleted with it"));
    }
    for file in files(&place, source).await? {
        // A folder that belongs to the source as a whole has no room for anything else.
        let whole = file.is_dir();
        let at = names(&file);
        let touched = at.iter().any(|file| {
            targets.iter().any(|target| match shape {
                _ if whole && target.starts_with(file) => true,
                Shape::File => target == file,
                Shape::Folder => file.starts_with(target),
            })
        });
        if touched {
            let file = file.display().to_string();
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

/// The path that a URI names, if it names one of this machine.
fn local(uri: &str) -> Option<PathBuf> {
    match uri.split_once("://") {
        Some(("file", path)) => Some(path.into()),
        Some(_) => None,
        None => Some(uri.into()),
    }
}

/// The names of a place that do not depend on how it was written: with every link followed, and
/// with all but the last. What is not there yet has the name that it will have.
fn names(path: &Path) -> Vec<PathBuf> {
    let Ok(path) = std::path::absolute(path) else { return Vec::new() };
    let followed = followed(&path);
    let itself = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Some(self::followed(parent).join(name)),
        _ => None,
    };
    itself.into_iter().filter(|name| *name != followed).chain([followed.clone()]).collect()
}

fn followed(path: &Path) -> PathBuf {
    let known = path.ancestors().find_map(|known| Some((known, known.canonicalize().ok()?)));
    match known.and_then(|(known, real)| Some(real.join(path.strip_prefix(known).ok()?))) {
        // Joined with nothing, a path gets a separator at its end, which is no part of it.
        Some(real) => real.components().collect(),
        None => path.to_owned(),
    }
}

/// All that belongs to a checkpoint: what its index names, the index, and what lies beside it
/// under names that the formats use. Of Megatron-Core's, folders too.
async fn files(place: &Path, source: &Checkpoint) -> Result<Vec<PathBuf>, Error> {
    let is_folder = place.is_dir();
    let folder = if is_folder { place } else { place.parent().unwrap_or(place) };
    let metadata = source.source.metadata().await?;
    let mut files: Vec<_> = metadata.files().iter().map(|key| folder.join(key.as_str())).collect();
    if !is_folder {
        files.push(place.to_owned());
        return Ok(files);
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.extend(entries.map(|entry| entry.path()).filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
            name.ends_with(".distcp")
                || name.ends_with(".metadata")
                || name.ends_with(INDEX_ENDING)
                || name == "config.json"
                || source.megatron.is_some() && is_megatrons(path, name)
        })
    }));
    Ok(files)
}

/// Whether an entry in the folder of a checkpoint of Megatron-Core is one of its parts: a file of
/// a fixed name, the folder of a rank, or that of an array or of objects of zarr.
fn is_megatrons(path: &Path, name: &str) -> bool {
    if !path.is_dir() {
        return ["metadata.json", "common.pt", "integrity.json"].contains(&name);
    }
    let has_objects = || {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.take(1).any(|entry| entry.file_name().to_string_lossy().starts_with("shard_"))
    };
    name.starts_with("mp_rank_") || path.join(".zarray").exists() || has_objects()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_has_many_names() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("src")).unwrap();
        std::fs::write(at("src/file"), "").unwrap();
        let same = |a: &str, b: &str| names(&at(a)).iter().any(|name| names(&at(b)).contains(name));
        assert!(same("src", "./src/") && same("src", "src/../src"));
        assert!(same("new/x", "src/../new/x"));
        assert!(!same("src", "src2") && !same("src", "src/file"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(at("src"), at("link")).unwrap();
            std::os::unix::fs::symlink(at("src/file"), at("other")).unwrap();
            assert!(
                same("link", "src") && same("link/file", "src/file") && same("link/n", "src/n")
            );
            assert!(same("other", "src/file") && same("other", "other"));
        }
    }
}
