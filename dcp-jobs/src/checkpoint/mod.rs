//! A checkpoint that was opened, the opener that opened it, and the frameworks that add to its jobs.
//!
//! The three are one module, since each holds the next: a checkpoint is opened again by its opener, an opener
//! has frameworks, and a framework is called with a checkpoint.

pub(crate) mod chosen_keys;
pub(crate) mod format;
pub mod framework;
pub(crate) mod model_files;
pub(crate) mod no_checkpoint;
pub(crate) mod notes;
pub(crate) mod open;
mod open_keys;
pub(crate) mod opener;
pub(crate) mod overlap_guard;
pub(crate) mod refuse_incomplete;
mod refused_links;
pub(crate) mod setters;
pub(crate) mod small_file;
pub(crate) mod step_naming;
pub mod text;
pub(crate) mod uri;
pub(crate) mod whole;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use dcp_core::format::{Examined, FormatInfo, Place, UnfinishedSave};
use dcp_core::text::without_secrets;
use dcp_core::{Key, Storage};
use dcp_formats::dcp::DcpReader;
use dcp_formats::incomplete_files::is_pointer_file;

use framework::{Framework, FrameworkCheckpoint};
use notes::Notes;
use opener::Opener;

use crate::error::Error;
use crate::listing::examined;
use crate::options::JobOptions;
use crate::source::Source;

/// A tracker, and what is wrong with it.
pub(crate) type TrackerProblem = (&'static str, String);

/// The framework of a checkpoint, and the checkpoint as the framework has it.
pub(crate) struct OfFramework {
    pub(crate) framework: Arc<dyn Framework>,
    pub(crate) checkpoint: Arc<dyn FrameworkCheckpoint>,
}

/// A checkpoint that an [`Opener`] opened to read.
pub struct Checkpoint {
    pub(crate) opener: Opener,
    /// Whether no key was left out.
    pub(crate) has_all_keys: bool,
    pub(crate) uri: String,
    pub(crate) place: String,
    /// The place that `ls` examines: the folder of the checkpoint, above `place` in a step of OLMo-core; or
    /// its file.
    pub(crate) step: Place,
    pub(crate) step_uri: String,
    pub(crate) format: FormatInfo,
    pub(crate) source: Source,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) is_folder: bool,
    pub(crate) framework: Option<OfFramework>,
    pub(crate) unfinished: Option<UnfinishedSave>,
    pub(crate) tracker_problem: Option<TrackerProblem>,
    pub(crate) notes: Vec<String>,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("uri", &without_secrets(&self.uri))
            .field("place", &without_secrets(&self.place))
            .field("format", &self.format)
            .field("storage", &self.storage)
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// The URL that was opened.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The URL of the checkpoint itself: the one that was opened, or that of a folder in it, such
    /// as the latest iteration of a run.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The names of its format.
    #[must_use]
    pub fn format(&self) -> FormatInfo {
        self.format
    }

    /// The source that jobs read.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The storage of the checkpoint's folder; of a file, that of the folder it is in.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Whether the checkpoint is a folder, and not one file.
    #[must_use]
    pub fn is_folder(&self) -> bool {
        self.is_folder
    }

    /// Whether this is a folder that may have the configuration of a Hugging Face model.
    #[must_use]
    pub fn is_model_folder(&self) -> bool {
        self.is_folder && self.format.model_folders
    }

    /// The opener that opened it.
    #[must_use]
    pub fn opener(&self) -> &Opener {
        &self.opener
    }

    /// The name of the framework of the checkpoint, if it is one of a framework that the opener has.
    #[must_use]
    pub fn framework(&self) -> Option<&'static str> {
        self.framework.as_ref().map(|of| of.framework.name())
    }

    /// The checkpoint as its framework has it, if it is one of a framework that the opener has.
    pub fn of_framework(&self) -> Option<&dyn FrameworkCheckpoint> {
        self.framework.as_ref().map(|of| &*of.checkpoint)
    }

    /// The checkpoint as the framework with this type has it.
    #[must_use]
    pub fn downcast<T: FrameworkCheckpoint>(&self) -> Option<&T> {
        let checkpoint: &dyn Any = self.of_framework()?;
        checkpoint.downcast_ref()
    }

    /// The sign that the save did not finish, although all of it can be read.
    #[must_use]
    pub fn unfinished(&self) -> Option<&UnfinishedSave> {
        self.unfinished.as_ref()
    }

    /// The problem of the tracker of the run whose latest checkpoint this is.
    #[must_use]
    pub fn tracker_problem(&self) -> Option<&str> {
        self.tracker_problem.as_ref().map(|(_, problem)| &**problem)
    }

    /// Returns why this checkpoint is not complete, as `Opener::list` says it; `None` for one that is. Names,
    /// lengths, indexes and headers are read, and no tensor.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn incomplete(&self) -> Result<Option<String>, Error> {
        Ok(self.examined().await?.problem)
    }

    /// Examines this checkpoint as `Opener::list` does.
    pub(crate) async fn examined(&self) -> Result<Examined, Error> {
        if let Some(refused) = self.opener.refused_link(&self.step_uri).await {
            return Err(refused.into());
        }
        let mut step = self.step.clone();
        if let Some(stored) = self.stored_dcp().filter(|_| self.has_all_keys) {
            let folder = self.place.strip_prefix(self.step_uri.trim_end_matches('/'));
            let folder = folder.map_or(".", |folder| folder.trim_start_matches('/'));
            let folder = if folder.is_empty() { "." } else { folder };
            step = step.with_index(folder, stored.metadata().await?);
        }
        Ok(examined(&self.opener.formats, &step).await?)
    }

    /// The checkpoint of PyTorch's format that this one is, or that its framework builds on.
    fn stored_dcp(&self) -> Option<&Source> {
        let stored = self.of_framework().map_or(Some(&self.source), |of| of.stored());
        stored.filter(|stored| stored.extension::<DcpReader>().is_some())
    }

    /// The first data file of PyTorch's format that is a pointer of Git LFS: a reader would only find that it
    /// is short. Only small files of a storage with a listing are read.
    pub(crate) async fn unfetched_data(&self) -> Result<Option<Key>, Error> {
        let Some(stored) = self.stored_dcp() else { return Ok(None) };
        let storage = &stored.storage;
        if !storage.capabilities().listable {
            return Ok(None);
        }
        for file in stored.metadata().await?.files() {
            if is_pointer_file(&**storage, file).await? {
                return Ok(Some(file.clone()));
            }
        }
        Ok(None)
    }

    /// Returns what the format says of a step that has its index, and not the file that is written last, as
    /// one of OLMo-core may, or not all of that file. The reader of the index does not see it.
    pub(crate) async fn lost_commit(&self) -> Result<Option<String>, Error> {
        if !self.is_folder || self.step_uri == self.place {
            return Ok(None);
        }
        let found = self.opener.formats.classify(&self.step.listing().root());
        let Some(found) = found else { return Ok(None) };
        match found.found.problem {
            Some(problem) => Ok(Some(problem)),
            None => Ok(found.format.examine(&self.step).await?.problem),
        }
    }

    /// Finds the problem of state that its framework stored, if any of it is among the keys `taken`: in words,
    /// when the state is not that of the model.
    ///
    /// # Errors
    ///
    /// When the state cannot be read.
    pub async fn state_problem(
        &self,
        taken: framework::Taken<'_>,
        job: &JobOptions,
    ) -> Result<Option<String>, Error> {
        match self.of_framework() {
            Some(of) => of.state_problem(&self.uri, taken, job).await,
            None => Ok(None),
        }
    }

    /// The notes of opening it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Notes that the optimizer's state among `shown` is not that of the model.
    pub(crate) async fn note_optimizer(
        &self,
        shown: impl Fn(&str) -> bool + Send + Sync,
        job: &JobOptions,
        notes: &mut Notes,
    ) {
        // State that cannot be read is an error of whatever needs it.
        if let Ok(Some(problem)) = self.state_problem(&shown, job).await {
            notes.say(format!("{problem}; `Checkpoint::verify` says what of each"));
        }
    }
}
