//! Places to write: what may be replaced there, and what is refused.

use std::path::Path;
use std::sync::Arc;

use dcp_convert::{ConvertError, Target};
use dcp_core::format::{Evidence, Folder, Place as FolderPlace};
use dcp_core::registry::Access;
use dcp_core::storage::StorageExt;
use dcp_core::{Key, Storage, StorageErrorKind};

use crate::absent_storage::AbsentStorage;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::new_folders::NewFolders;
use crate::opener::Opener;
use crate::overlap_guard::{Shape, keep_apart};
use crate::recognize::{checkpoint_of, is_dcp, model_file, run_file, unfinished};
use crate::rollback::Rollback;
use crate::uri::{below, split};

/// The names of formats that are written.
const DCP: &str = "dcp";
const MEGATRON: &str = "megatron";
const OLMO: &str = "olmo";

/// How a target is written.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TargetOptions {
    /// Whether what is there is replaced, if it is of the same format. Until the new one is
    /// complete, the old one stays.
    pub overwrite: bool,
    /// Whether nothing is written, or made.
    pub dry_run: bool,
    /// What records the objects that are created.
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
    pub fn as_dry_run(mut self, dry_run: bool) -> Self {
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
    folders: NewFolders,
}

impl TargetFile {
    /// What jobs of [`dcp_convert`] write.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The file was written: its folders stay.
    pub fn keep(self) {
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
        let target = Place::new(&self.opener, uri, options).file().await?;
        Ok(TargetFile { target, folders })
    }
}

/// A place to write to.
pub(crate) struct Place<'a> {
    opener: &'a Opener,
    uri: &'a str,
    options: &'a TargetOptions,
}

impl<'a> Place<'a> {
    pub(crate) fn new(opener: &'a Opener, uri: &'a str, options: &'a TargetOptions) -> Self {
        Self { opener, uri, options }
    }

    /// The storage of a folder to write to, or of a dry run to look at: that one makes nothing.
    fn storage(&self, uri: &str) -> Result<Arc<dyn Storage>, Error> {
        let dry_run = self.options.dry_run;
        let access = if dry_run { Access::Read } else { Access::Write };
        match self.opener.storages().open(uri, access) {
            Ok(storage) if dry_run => Ok(storage),
            Ok(storage) => Ok(self.options.rollback.watch(storage)),
            Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
                Ok(Arc::new(AbsentStorage))
            }
            Err(_) if Path::new(uri).is_file() => {
                let message = format!("{uri:?} is a file, and a directory is to be written");
                Err(Error::new(ErrorKind::InvalidPlace, message).with_hint(
                    "name another place, or a format of one file: --to safetensors or torch-save",
                ))
            }
            Err(error) => Err(Error::from(error).context(format!("cannot write to {uri:?}"))),
        }
    }

    fn exists(&self) -> Error {
        ConvertError::TargetExists { target: self.uri.to_owned() }.into()
    }

    /// A file to write. One that is there is an error, unless it may be replaced.
    pub(crate) async fn file(&self) -> Result<Target, Error> {
        let uri = self.uri;
        if self.opener.storages().open(uri, Access::Read).is_ok() {
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
            || Error::new(ErrorKind::InvalidPlace, format!("{uri:?} is no name for a file"));
        let (parent, name) = split(uri).ok_or_else(no_name)?;
        let key = Key::new(name).map_err(|_| no_name())?;
        let storage = self.storage(&parent)?;
        if !self.options.overwrite && storage.contains(&key).await? {
            return Err(self.exists());
        }
        Ok(Target::new(storage, key).overwriting(self.options.overwrite))
    }

    /// A folder to write plain files into, where there may be others, but no checkpoint of
    /// PyTorch's format: readers would open that one. For `model` files, which make the folder
    /// itself a checkpoint, there must be none in a step of OLMo-core either.
    pub(crate) async fn folder(&self, model: bool) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.storage(self.uri)?;
        let place = self.opener.look(self.uri, &storage).await?;
        let folder = place.listing().root();
        self.refuse_megatron(&folder)?;
        if model {
            self.refuse_run(&folder)?;
        }
        self.refuse_unfinished(&place, &[]).await?;
        match checkpoint_of(&self.opener.formats, &folder, DCP) {
            Some(one) => Err(self.would_stay(&format!("the directory {}", one.found))),
            None if model => self.refuse_step(&folder).map(|()| storage),
            None => Ok(storage),
        }
    }

    /// A folder to write a checkpoint of PyTorch's format into. One that is there is an error,
    /// unless it may be replaced; one of another format always is.
    pub(crate) async fn dcp(&self) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.storage(self.uri)?;
        let place = self.opener.look(self.uri, &storage).await?;
        let folder = place.listing().root();
        self.refuse_megatron(&folder)?;
        self.refuse_run(&folder)?;
        self.refuse_unfinished(&place, &[DCP]).await?;
        if !self.options.overwrite && is_dcp(&folder) {
            return Err(self.exists());
        }
        self.refuse_step(&folder)?;
        self.refuse_model(&folder)?;
        Ok(storage)
    }

    /// A folder to write a checkpoint of Megatron-Core into. One of its format that is there is an
    /// error, unless it may be replaced; one of another format always is.
    pub(crate) async fn megatron(&self) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.storage(self.uri)?;
        let place = self.opener.look(self.uri, &storage).await?;
        let folder = place.listing().root();
        self.refuse_run(&folder)?;
        self.refuse_unfinished(&place, &[DCP, MEGATRON]).await?;
        match (self.is_megatron(&folder), is_dcp(&folder)) {
            (true, true) if !self.options.overwrite => return Err(self.exists()),
            (true, false) => return Err(self.would_stay("it is one of an older Megatron-Core")),
            // What an unfinished save of this format left is replaced by one that finishes.
            (false, true) if unfinished(&self.opener.formats, &place).await?.is_none() => {
                return Err(self.would_stay("it is one of PyTorch's format"));
            }
            _ => {}
        }
        self.refuse_step(&folder)?;
        self.refuse_model(&folder)?;
        Ok(storage)
    }

    /// Whether a folder itself is a checkpoint of Megatron-Core.
    fn is_megatron(&self, folder: &Folder<'_>) -> bool {
        let found = checkpoint_of(&self.opener.formats, folder, MEGATRON);
        found.is_some_and(|one| one.found.evidence == Evidence::Index && one.found.inner.is_none())
    }

    /// The refusal to make a folder two checkpoints at once.
    fn would_stay(&self, what: &str) -> Error {
        let message = format!("there is another checkpoint at {:?}: {what}", self.uri);
        Error::new(ErrorKind::OtherCheckpoint, message).with_hint(
            "choose another directory; --overwrite replaces only what has the same format",
        )
    }

    /// Refuses a folder with the checkpoint of a step of OLMo-core.
    fn refuse_step(&self, folder: &Folder<'_>) -> Result<(), Error> {
        let step = checkpoint_of(&self.opener.formats, folder, OLMO);
        match step.and_then(|step| step.found.inner) {
            Some(inner) => Err(self.would_stay(&format!("it has a checkpoint in {inner}"))),
            None => Ok(()),
        }
    }

    fn refuse_model(&self, folder: &Folder<'_>) -> Result<(), Error> {
        match model_file(folder) {
            Some(name) => Err(self.would_stay(&format!("{name:?} is of a Hugging Face model"))),
            None => Ok(()),
        }
    }

    /// Refuses a folder with what an unfinished save left, unless it is one of these formats, of
    /// which a save that finishes replaces it.
    async fn refuse_unfinished(&self, place: &FolderPlace, replaced: &[&str]) -> Result<(), Error> {
        let found = unfinished(&self.opener.formats, place).await?;
        let Some((format, problem)) = found else { return Ok(()) };
        // What writes each of the other formats tells its own files from what may stay.
        let is_replaced = [MEGATRON, OLMO].iter().all(|name| *name != format.name)
            || replaced.contains(&format.name);
        if is_replaced {
            return Ok(());
        }
        let (uri, title) = (self.uri, format.title);
        let message = format!("{uri:?} has what an unfinished save left ({title}): {problem}");
        Err(Error::new(ErrorKind::OtherCheckpoint, message).with_hint(
            "choose another directory, remove this one, or finish the save: run it again with \
             --overwrite",
        ))
    }

    fn refuse_megatron(&self, folder: &Folder<'_>) -> Result<(), Error> {
        match self.is_megatron(folder) {
            true => Err(self.would_stay("it is one of Megatron-Core")),
            false => Ok(()),
        }
    }

    /// Refuses the folder of a run of Megatron-LM: readers would open an iteration instead.
    fn refuse_run(&self, folder: &Folder<'_>) -> Result<(), Error> {
        let Some(name) = run_file(folder) else { return Ok(()) };
        let message =
            format!("{:?} is the folder of a run of Megatron-LM: there is {name}", self.uri);
        let base = self.uri.trim_end_matches('/');
        Err(Error::new(ErrorKind::OtherCheckpoint, message).with_hint(format!(
            "name a folder in it, such as {base}/release or {base}/iter_0000001, or another \
             directory"
        )))
    }
}

/// Whether there is something that is neither a file nor a directory.
fn is_special(uri: &str) -> bool {
    let path = uri.strip_prefix("file://").unwrap_or(uri);
    std::fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
}
