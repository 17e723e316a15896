//! Explains why nothing can be opened.

use dcp_core::Key;
use dcp_core::format::{Folder, Place};
use dcp_core::registry::Access;
use dcp_formats::incomplete_files::{LFS_PROBLEM, lfs_pointer};

use crate::checkpoint::opener::Opener;
use crate::error::{Error, ErrorKind};

/// Files that only Orbax and its storage OCDBT write.
const ORBAX: &[&str] = &["_CHECKPOINT_METADATA", "manifest.ocdbt", "orbax.checkpoint"];

impl Opener {
    /// The error of a file that is a pointer of Git LFS, where a checkpoint cannot be opened: a parser
    /// only finds that it is damaged.
    pub(crate) async fn unfetched(&self, uri: &str, error: &Error) -> Option<Error> {
        if !matches!(error.kind(), ErrorKind::Damaged | ErrorKind::NotACheckpoint) {
            return None;
        }
        let place = match self.storages.open(uri, Access::Read).await {
            Ok(storage) => self.look(uri, &storage).await.ok()?,
            Err(_) => {
                let (storage, file) = self.file(uri).await?;
                Place::file_of(&storage, file)
            }
        };
        let pointer = lfs_pointer(&place).await.ok()??;
        Some(not_fetched(uri, &pointer))
    }

    /// Explains why a directory is no checkpoint, and names one that is near.
    pub(crate) async fn no_checkpoint(&self, uri: &str, place: &Place) -> Error {
        let folder = place.listing().root();
        if let Some(refused) = self.refused_link(uri).await {
            return cannot_read(uri, refused);
        }
        let can = place.storage().capabilities();
        // Folders of an object store are prefixes of names: there are no empty ones.
        if folder.is_empty() && (can.complete_listing || !can.listable) {
            return Error::new(ErrorKind::NotFound, format!("there is nothing at {uri:?}"));
        }
        let message = if folder.is_empty() {
            format!("{uri:?} is an empty directory")
        } else {
            format!("{uri:?} is not a checkpoint: the directory {}", self.formats.describe(&folder))
        };
        let failure = Error::new(ErrorKind::NotACheckpoint, message);
        let is_orbax = |folder: &Folder<'_>| ORBAX.iter().any(|file| folder.has(file));
        if is_orbax(&folder) || folder.folders().any(|step| is_orbax(&step)) {
            return failure.with_hint(
                "it is a checkpoint of Orbax, which dcp does not read; restore it with Orbax, and \
                 save the arrays with safetensors",
            );
        }
        let below = |name: &str| match uri.trim_end_matches('/') {
            "." => name.to_owned(),
            base => format!("{base}/{name}"),
        };
        let checkpoints = self.formats.checkpoints_below(&folder);
        match &*checkpoints {
            [] => failure,
            [one] => failure.with_hint(format!("there is a checkpoint below it: {}", below(one))),
            [.., last] => {
                let run = crate::listing::list_run(place.storage(), &self.formats).await;
                failure.with_hint(match run.ok().and_then(|run| run.latest) {
                    Some(name) => format!(
                        "the latest complete checkpoint below it is {}; `Opener::list` lists all",
                        below(&name)
                    ),
                    None => format!(
                        "there are {} checkpoints below it, such as {}; `Opener::list` lists all",
                        checkpoints.len(),
                        below(last)
                    ),
                })
            }
        }
    }
}

/// The error of a pointer of Git LFS.
pub(crate) fn not_fetched(uri: &str, pointer: &Key) -> Error {
    Error::new(ErrorKind::Damaged, format!("cannot read {uri:?}: {pointer} {LFS_PROBLEM}"))
}

pub(crate) fn cannot_read(uri: &str, error: impl Into<Error>) -> Error {
    error.into().context(format!("cannot read {uri:?}")).with_hint_of_damage()
}
