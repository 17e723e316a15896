//! Keeping what a command writes apart from what it reads.

use std::path::{Path, PathBuf};

use dcp::convert::{ConvertError, Source};
use dcp::formats::folder::OLMO_MODEL;
use dcp::formats::hf::INDEX_ENDING;

use crate::failure::{Exit, Failure};

/// What is written at a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One file, which takes the place of one that is there.
    File,
    /// Files in a folder, which take the place of a checkpoint that is there.
    Folder,
}

/// Refuses to write where a file of the source lies, before anything is opened for writing.
/// `source` is what was opened at `uri`.
///
/// A file may have a free name in the folder of the source; a folder that is written must have
/// none of the source's files in it.
pub(crate) async fn keep_apart(
    uri: &str,
    source: &Source,
    target: &str,
    shape: Shape,
) -> Result<(), Failure> {
    let same = || Failure::from(ConvertError::SameTarget { target: target.to_owned() });
    if uri == target {
        return Err(same());
    }
    let (Some(typed), Some(to)) = (local(uri), local(target)) else { return Ok(()) };
    let opened = opened(&typed);
    let targets = names(&to);
    if [&typed, &opened].iter().any(|place| names(place).iter().any(|at| targets.contains(at))) {
        return Err(same());
    }
    for file in files(&opened, source).await? {
        let at = names(&file);
        let touched = at.iter().any(|file| match shape {
            Shape::File => targets.contains(file),
            Shape::Folder => targets.iter().any(|folder| file.starts_with(folder)),
        });
        if touched {
            let file = file.display().to_string();
            let message = match shape {
                Shape::File => format!("{target:?} is a file of the source {uri:?}"),
                Shape::Folder => format!("{target:?} has files of the source in it: {file:?}"),
            };
            return Err(Failure::new(Exit::Usage, message)
                .hint("write to another place, then remove the old one"));
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

/// The place of the checkpoint that opens when `place` is opened.
fn opened(place: &Path) -> PathBuf {
    let inner = place.join(OLMO_MODEL);
    let is_step = !place.join(".metadata").exists() && inner.join(".metadata").exists();
    if is_step { inner } else { place.to_owned() }
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
/// under names that the formats use.
async fn files(opened: &Path, source: &Source) -> Result<Vec<PathBuf>, Failure> {
    let is_folder = opened.is_dir();
    let folder = if is_folder { opened } else { opened.parent().unwrap_or(opened) };
    let metadata = source.metadata().await?;
    let mut files: Vec<_> = metadata.files().iter().map(|key| folder.join(key.as_str())).collect();
    if !is_folder {
        files.push(opened.to_owned());
        return Ok(files);
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.extend(entries.map(|entry| entry.path()).filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
            name.ends_with(".distcp")
                || name.ends_with(".metadata")
                || name.ends_with(INDEX_ENDING)
                || name == "config.json"
        })
    }));
    Ok(files)
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
