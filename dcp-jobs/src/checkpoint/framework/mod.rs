//! Training frameworks as plug-ins of jobs.
//!
//! A *format* is the meaning of bytes; a *framework* is what a training program adds to the jobs on its
//! checkpoints: state beside the tensors, an optimizer that has to be put in order, a target with options of
//! its own, a tracker of its runs. Jobs hold no framework's name. They call the ones that an
//! [`Opener`](crate::Opener) has, in the order in which those were added:
//!
//! 1. [`Framework::checkpoint`] recognizes its own among opened checkpoints, which
//!    [`FrameworkCheckpoint`] then describes and verifies.
//! 2. [`Framework::prepare`] makes the source of a job that writes. Each framework looks for its own
//!    [`FrameworkOptions`] in the job's [`Options`]; one without options there, and whose checkpoint it is
//!    not, returns the source as it is.
//! 3. [`NameMapping::apply`] gives tensors the names of another program.
//! 4. [`FrameworkTarget::layout`] decides how a target is divided, and [`TargetLayout::write`] writes it.
//!
//! Options travel by their type and not as fields of a job: a framework of another project has as many as
//! it needs, and a build without a framework has no setter for it.

mod frameworks;
mod mapping;
mod model_folder;
mod options;
mod report;
mod target;

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::value::Dict;
use dcp_core::{Storage, StorageError};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::chosen_keys::taken_of;
use crate::checkpoint::format::Format;
use crate::checkpoint::notes::Notes;
use crate::checkpoint::step_naming::StepNaming;
use crate::error::Error;
use crate::integrity::VerifyReport;
use crate::keys::select::Selection;
use crate::options::JobOptions;
use crate::source::Source;

pub use frameworks::Frameworks;
pub(crate) use mapping::refuse_idle_config;
pub use mapping::{NameMapping, Named, Towards};
pub use model_folder::ModelFolder;
pub use options::{Concern, FrameworkOptions, Options};
pub use report::PluginReport;
pub use target::{FrameworkTarget, TargetLayout, TargetRequest};

/// Whether a key is taken by a job.
pub type Taken<'a> = &'a (dyn Fn(&str) -> bool + Send + Sync);

/// A training framework, as far as it adds to jobs on checkpoints.
///
/// It is added to an opener with [`Opener::frameworks`](crate::Opener::frameworks). Its formats are
/// registered beside it, with [`Opener::formats`](crate::Opener::formats).
#[async_trait]
pub trait Framework: fmt::Debug + Send + Sync {
    /// Its name: that of the registered format of its checkpoints, where those are of a format of their own.
    fn name(&self) -> &'static str;

    /// The name of the program, for messages.
    fn title(&self) -> &'static str;

    /// The checkpoint in what the format of this framework opened, which may pass it as an
    /// [extension](OpenedCheckpoint::extension); `None` where jobs treat it as any other.
    fn checkpoint(&self, opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>>;

    /// Makes `source` what a job reads of `checkpoint`: with state in another form or order, as the options
    /// of this framework have it. State that no job copies unless an option says so is an error.
    ///
    /// # Errors
    ///
    /// [`Damaged`](crate::ErrorKind::Damaged) for state that is not to be copied,
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) for options that do not apply to the checkpoint.
    async fn prepare(
        &self,
        source: Source,
        checkpoint: &Checkpoint,
        request: &mut Preparation<'_>,
    ) -> Result<Source, Error>;

    /// Refuses state of `sources` that must not become a part of one checkpoint of `format` that is made of all
    /// of them, where `taken` takes any of it.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare).
    async fn refuse_state(
        &self,
        sources: &[&Checkpoint],
        taken: Taken<'_>,
        format: Format,
        options: &Options,
        job: &JobOptions,
    ) -> Result<(), Error>;

    /// Its checkpoints as a target of conversions; `None` if they are written as those of a registered format
    /// are, or not at all.
    fn target(&self) -> Option<&dyn FrameworkTarget>;

    /// The naming and the tracker of its runs; `None` if it has no tracker.
    fn runs(&self) -> Option<&dyn RunLayout>;

    /// Finds a checkpoint in a folder that is being replaced by another: the program that did it ended before
    /// it was done. `None` where no file has to be read otherwise than it is stored.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    async fn half_replaced(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<Option<&'static str>, StorageError>;
}

/// A checkpoint of a framework, which a format opened.
#[async_trait]
pub trait FrameworkCheckpoint: Any + fmt::Debug + Send + Sync {
    /// The checkpoint of PyTorch's format that it is stored as, if it is.
    fn stored(&self) -> Option<&Source>;

    /// The reasons that it is not whole, as far as they were found when it was opened.
    fn damage(&self) -> &[String];

    /// Whether its tensors are merged from files of ranks, so that no tensor names the file that it is in.
    fn is_of_ranks(&self) -> bool;

    /// The arguments of the run that saved it.
    fn arguments(&self) -> Option<Dict>;

    /// The function that prints the state under `key`, in backticks, where the state has the key.
    fn shown_by(&self, key: &str) -> Option<&'static str>;

    /// Describes it: what `Checkpoint::inspect` shows of it beside its tensors.
    ///
    /// # Errors
    ///
    /// When the checkpoint cannot be read.
    async fn describe(&self) -> Result<PluginReport, Error>;

    /// Verifies it, `deep` with every byte.
    ///
    /// # Errors
    ///
    /// When the storage fails; damage is in the report.
    async fn verify(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error>;

    /// Finds the problem of state that was stored, but is not that of its model, if `taken` takes any of it.
    /// `uri` is the checkpoint, for the message.
    ///
    /// # Errors
    ///
    /// When the state cannot be read.
    async fn state_problem(
        &self,
        uri: &str,
        taken: Taken<'_>,
        job: &JobOptions,
    ) -> Result<Option<String>, Error>;
}

/// The files in the folder of a run beside its checkpoints.
#[async_trait]
pub trait RunLayout: fmt::Debug + Send + Sync {
    /// The naming of the folders.
    fn naming(&self) -> StepNaming;

    /// Notes in the tracker of the run in `storage` that the checkpoint of `step` is the latest.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    async fn note_latest(&self, storage: &dyn Storage, step: u64) -> Result<(), Error>;
}

/// A job whose source is prepared.
#[derive(Debug)]
#[non_exhaustive]
pub struct Preparation<'a> {
    /// The options of the job.
    pub options: &'a Options,
    /// The keys that the job takes.
    pub selection: &'a Selection,
    /// The format that is written.
    pub format: Format,
    /// The job's use of the machine.
    pub job: &'a JobOptions,
    /// The notes of the job.
    pub notes: &'a mut Notes,
}

impl Preparation<'_> {
    /// The keys of `source` that the job takes, by the names that they have in it.
    ///
    /// # Errors
    ///
    /// When the names cannot be read.
    pub async fn taken(&self, source: &Source) -> Result<HashSet<Arc<str>>, Error> {
        taken_of(self.selection, source).await
    }
}
