//! Places to write: what may be replaced there, and what is refused.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::format::{
    CheckpointTarget, Evidence, Existing, FolderMatch, FormatInfo, FormatRegistry, Occupant,
    OccupantRun, OpenOptions, Place as FolderPlace,
};
use dcp_core::registry::Access;
use dcp_core::storage::StorageExt;
use dcp_core::{CheckpointMetadata, Key, Storage, StorageError, StorageErrorKind};
use futures_util::StreamExt as _;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Shape;
use crate::checkpoint::opener::Opener;
use crate::checkpoint::overlap_guard::keep_apart;
use crate::checkpoint::uri::{below, split};
use crate::error::{Error, ErrorKind, JobError};
use crate::place::absent_storage::AbsentStorage;
use crate::place::held_target::{CLAIMED, HeldTarget};
use crate::place::new_folders::NewFolders;
use crate::rollback::Rollback;
use crate::write::Target;

/// The name of the format of Hugging Face models, which jobs of their own write.
const MODELS: &str = "huggingface";

/// The options of writing a target.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TargetOptions {
    /// Whether what is there is replaced, if it is of the same format. Until the new one is
    /// complete, the old one stays.
    pub overwrite: bool,
    /// Whether nothing is written, or made.
    pub dry_run: bool,
    /// The record of the objects that are created.
    pub rollback: Rollback,
}

impl TargetOptions {
    /// The same, replacing what is there or not.
    #[must_use]
    pub fn with_overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// The same, for a job that writes nothing.
    #[must_use]
    pub fn with_dry_run(mut self, dry_run: bool) -> Self {
        self.dry_run = dry_run;
        self
    }

    /// The same; what is created is recorded in `rollback`.
    #[must_use]
    pub fn with_rollback(mut self, rollback: &Rollback) -> Self {
        self.rollback = rollback.clone();
        self
    }
}

/// A file that may be written. Folders that were made for it are removed when it is dropped
/// without [`keep`](Self::keep).
#[derive(Debug)]
pub struct TargetFile {
    target: Target,
    held: Option<Arc<HeldTarget>>,
    folders: NewFolders,
}

impl TargetFile {
    /// The target that jobs on a source write.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The file was written: its folders stay.
    pub fn keep(self) {
        if let Some(held) = self.held {
            held.release();
        }
        self.folders.keep();
    }
}

impl Checkpoint {
    /// Prepares to write a file that is made of this checkpoint.
    ///
    /// # Errors
    ///
    /// [`SameTarget`](ErrorKind::SameTarget) and [`Overlap`](ErrorKind::Overlap) for a file of
    /// this checkpoint, [`TargetExists`](ErrorKind::TargetExists),
    /// [`InvalidPlace`](ErrorKind::InvalidPlace) for a directory or a device.
    pub async fn target_file(
        &self,
        uri: &str,
        options: &TargetOptions,
    ) -> Result<TargetFile, Error> {
        keep_apart(self, uri, Shape::File).await?;
        let folders = NewFolders::before(uri, &options.rollback);
        let place = Place::new(&self.opener, uri, options);
        let target = place.file().await?;
        Ok(TargetFile {
            target,
            held: place.held.into_inner().unwrap_or_else(PoisonError::into_inner),
            folders,
        })
    }
}

/// A place to write to.
pub(crate) struct Place<'a> {
    opener: &'a Opener,
    uri: &'a str,
    options: &'a TargetOptions,
    claims: bool,
    held: Mutex<Option<Arc<HeldTarget>>>,
}

impl<'a> Place<'a> {
    pub(crate) fn new(opener: &'a Opener, uri: &'a str, options: &'a TargetOptions) -> Self {
        Self { opener, uri, options, claims: true, held: Mutex::default() }
    }

    /// Sets that this is a rank of a group, of which rank 0 holds the place.
    pub(crate) fn held_by_rank_0(mut self, is_rank_0: bool) -> Self {
        self.claims = is_rank_0;
        self
    }

    /// Ends the claim of the place, when all is written.
    pub(crate) fn release(&self) {
        if let Some(held) = &*self.held.lock().unwrap_or_else(PoisonError::into_inner) {
            held.release();
        }
    }

    /// The storage of a folder to write to, in which `claimed` is claimed, or of a dry run to look at:
    /// that one makes nothing.
    async fn storage(&self, uri: &str, claimed: Key) -> Result<Arc<dyn Storage>, Error> {
        let dry_run = self.options.dry_run;
        let access = if dry_run { Access::Read } else { Access::Write };
        match self.opener.storages().open(uri, access).await {
            // In an object store, a name and a folder of that name go together, and would be read
            // as two checkpoints.
            Ok(storage)
                if uri == self.uri
                    && storage.capabilities().complete_listing
                    && self.opener.file(uri).await.is_some() =>
            {
                Err(self.is_file())
            }
            Ok(storage) if dry_run => Ok(storage),
            Ok(storage) if !self.claims => Ok(self.options.rollback.watch(storage)),
            Ok(storage) => {
                self.options.rollback.begin();
                // What a rollback removes later is still claimed then.
                let held = HeldTarget::take(storage, claimed, self.uri).await?;
                *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&held));
                Ok(self.options.rollback.watch(held))
            }
            Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
                Ok(Arc::new(AbsentStorage))
            }
            Err(_) if Path::new(uri).is_file() => Err(self.is_file()),
            Err(error) => Err(Error::from(error).context(format!("cannot write to {uri:?}"))),
        }
    }

    /// The storage of the folder at the place.
    async fn folder(&self) -> Result<Arc<dyn Storage>, Error> {
        let claimed = Key::new(CLAIMED).map_err(StorageError::from)?;
        self.storage(self.uri, claimed).await
    }

    /// Whether there is a folder: on a file system one without files as well.
    async fn is_folder(&self) -> bool {
        let Ok(storage) = self.opener.storages().open(self.uri, Access::Read).await else {
            return false;
        };
        let mut entries = storage.list_folder(None);
        Path::new(self.uri).is_dir() || matches!(entries.next().await, Some(Ok(_)))
    }

    fn is_file(&self) -> Error {
        let message = format!("{:?} is a file, and a directory is to be written", self.uri);
        Error::new(ErrorKind::InvalidPlace, message).with_hint(
            "name another place, or a format of one file: `Destination::to` safetensors or torch-save",
        )
    }

    /// A file to write. One that is there is an error, unless it may be replaced.
    pub(crate) async fn file(&self) -> Result<Target, Error> {
        let uri = self.uri;
        if self.is_folder().await {
            let message = format!("{uri:?} is a directory");
            return Err(Error::new(ErrorKind::InvalidPlace, message)
                .with_hint(format!("name a file, such as {}", below(uri, "model.safetensors"))));
        }
        if is_special(uri) {
            let message =
                format!("{uri:?} is a device, a FIFO or a socket, which is never replaced");
            return Err(Error::new(ErrorKind::InvalidPlace, message)
                .with_hint("name a regular file, or a new one"));
        }
        let no_name =
            || Error::new(ErrorKind::InvalidPlace, format!("{uri:?} is not a name for a file"));
        let (parent, name) = split(uri).ok_or_else(no_name)?;
        let key = Key::new(name).map_err(|_| no_name())?;
        let storage = self.storage(&parent, key.clone()).await?;
        if !self.options.overwrite && storage.contains(&key).await? {
            return Err(JobError::TargetExists { target: uri.to_owned() }.into());
        }
        Ok(Target::new(storage, key).overwrite(self.options.overwrite))
    }

    /// A folder to write plain files into, beside others. No format that readers open as a whole
    /// may have a checkpoint there.
    pub(crate) async fn plain_files(&self) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.folder().await?;
        let place = self.opener.look(self.uri, &storage).await?;
        self.refuse_others(&place, &[MODELS], false).await?;
        Ok(storage)
    }

    /// A folder to write a Hugging Face model into. What is there of one, its writer replaces or
    /// refuses.
    pub(crate) async fn model(&self) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.folder().await?;
        let place = self.opener.look(self.uri, &storage).await?;
        self.refuse_others(&place, &[MODELS], true).await?;
        Ok(storage)
    }

    /// A folder to write a checkpoint of a format into. One of the format is an error unless it may
    /// be replaced; one of another format always is.
    pub(crate) async fn checkpoint(
        &self,
        target: &dyn CheckpointTarget,
    ) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.folder().await?;
        let place = self.opener.look(self.uri, &storage).await?;
        let metadata = self.refuse_others(&place, target.parts(), true).await?;
        match target.existing(&place.listing().root(), metadata.as_deref()) {
            Existing::Checkpoint if !self.options.overwrite => {
                Err(JobError::TargetExists { target: self.uri.to_owned() }.into())
            }
            Existing::Other(what) => Err(self.other_checkpoint(&what)),
            _ => Ok(storage),
        }
    }

    /// Refuses a folder with a checkpoint, or with the files of an unfinished save, of a format
    /// that is not one of `parts`; with `runs`, also the folder of a run. Returns the index of the
    /// checkpoint that is there.
    async fn refuse_others(
        &self,
        place: &FolderPlace,
        parts: &[&str],
        runs: bool,
    ) -> Result<Option<Arc<CheckpointMetadata>>, Error> {
        let folder = place.listing().root();
        let formats = &self.opener.formats;
        let metadata = index_of(formats, place).await;
        let occupants = formats.occupants(&folder);
        let mut checkpoint = None;
        for (format, occupant) in occupants {
            let is_other = !parts.contains(&format.name);
            match occupant {
                Occupant::Run(run) if runs => return Err(self.run_folder(&run)),
                Occupant::Unfinished(problem) if is_other => {
                    return Err(self.unfinished(format, &problem));
                }
                Occupant::Checkpoint(what) if is_other => {
                    checkpoint = checkpoint.or(Some(what));
                }
                _ => {}
            }
        }
        let found = metadata.as_ref().and_then(|metadata| formats.unfinished(&folder, metadata));
        if let Some((format, save)) = found
            && !parts.contains(&format.name)
        {
            return Err(self.unfinished(format, &format!("the folder {}", save.description)));
        }
        checkpoint.map_or(Ok(metadata), |what| Err(self.other_checkpoint(&what)))
    }

    /// The refusal to make a folder two checkpoints at once.
    fn other_checkpoint(&self, what: &str) -> Error {
        let message = format!("there is another checkpoint at {:?}: {what}", self.uri);
        Error::new(ErrorKind::OtherCheckpoint, message).with_hint(
            "choose another directory; `Destination::overwrite` replaces only what has the same format",
        )
    }

    fn unfinished(&self, format: FormatInfo, problem: &str) -> Error {
        let (uri, title) = (self.uri, format.title);
        let message = format!("{uri:?} has files of an unfinished save ({title}): {problem}");
        Error::new(ErrorKind::OtherCheckpoint, message).with_hint(
            "choose another directory, remove this one, or finish the save: run it again with \
             `Destination::overwrite`",
        )
    }

    fn run_folder(&self, run: &OccupantRun) -> Error {
        let message = format!("{:?} is {}: there is {}", self.uri, run.description, run.file);
        let base = self.uri.trim_end_matches('/');
        let names: Vec<_> = run.folders.iter().map(|name| format!("{base}/{name}")).collect();
        let hint = match &*names {
            [] => "name another directory".to_owned(),
            names => {
                format!("name a folder in it, such as {}, or another directory", names.join(" or "))
            }
        };
        Error::new(ErrorKind::OtherCheckpoint, message).with_hint(hint)
    }
}

/// The index of the checkpoint in a folder, as the format reads it that the others build on.
async fn index_of(
    formats: &FormatRegistry,
    place: &FolderPlace,
) -> Option<Arc<CheckpointMetadata>> {
    let matches = formats.recognize(&place.listing().root());
    let is_index =
        |one: &&FolderMatch| one.found.evidence == Evidence::Index && one.found.inner.is_none();
    let base = matches.iter().rev().find(is_index)?;
    let opened = base.format.open(place, &OpenOptions::default().with_tolerant(true)).await.ok()?;
    opened.reader.metadata().await.ok()
}

/// Whether there is something that is neither a file nor a directory.
fn is_special(uri: &str) -> bool {
    let path = uri.strip_prefix("file://").unwrap_or(uri);
    std::fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
}
