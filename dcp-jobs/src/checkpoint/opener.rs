//! The opener of checkpoints.

use std::sync::Arc;

use dcp_core::format::{CheckpointFormat, FormatRegistry, OpenOptions, WantedKeys};
use dcp_core::registry::StorageRegistry;

use crate::checkpoint::format::Format;
use crate::checkpoint::notes::Notes;

use super::framework::{FrameworkTarget, Frameworks};

/// The completeness that a checkpoint needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// It is read as far as it can be.
    #[default]
    Readable,
    /// Damage of the index, and a choice that is open, are errors.
    Whole,
}

impl Need {
    pub(crate) fn tolerant(self) -> bool {
        self == Self::Readable
    }
}

/// Opens checkpoints by URL: folders, runs of folders, and files of every format.
///
/// ```
/// use dcp_jobs::{Need, Opener};
/// # use dcp_core::registry::{Access, StorageRegistry};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut storages = StorageRegistry::empty();
/// # storages.register("file", |request| Ok(std::sync::Arc::new(dcp_storage_fs::FsStorage::open(&request.url)?)));
/// # let url = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/pytorch/t21_plain");
/// let opener = Opener::new(storages).need(Need::Whole).on_note(|note| eprintln!("note: {note}"));
/// let checkpoint = opener.open(url).await?;
/// assert!(checkpoint.source().metadata().await?.len() > 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Opener {
    pub(crate) storages: StorageRegistry,
    pub(crate) formats: FormatRegistry,
    pub(crate) frameworks: Frameworks,
    pub(crate) need: Need,
    pub(crate) rank: Option<u32>,
    pub(crate) variant: Option<String>,
    /// The tensors that the next checkpoint is opened for; `None` for all.
    pub(crate) keys: Option<WantedKeys>,
    notes: Notes,
}

impl Opener {
    /// Opens what these storages serve, as checkpoints of PyTorch and Hugging Face. Others open with the
    /// [`formats`](Self::formats) and [`frameworks`](Self::frameworks) that are set.
    #[must_use]
    pub fn new(storages: StorageRegistry) -> Self {
        let notes = Notes::unheard();
        let (formats, frameworks) = (crate::listing::formats(), Frameworks::none());
        let need = Need::default();
        Self { storages, formats, frameworks, need, rank: None, variant: None, keys: None, notes }
    }

    /// The formats that are recognized; [`crate::listing::formats`] by default. A plug-in registers its own
    /// in addition to those.
    #[must_use]
    pub fn formats(mut self, formats: FormatRegistry) -> Self {
        self.formats = formats;
        self
    }

    /// Adds a format; it replaces one of the same name.
    #[must_use]
    pub fn format(mut self, format: Arc<dyn CheckpointFormat>) -> Self {
        self.formats.register(format);
        self
    }

    /// The training frameworks that add to jobs on what is opened; none by default.
    #[must_use]
    pub fn frameworks(mut self, frameworks: Frameworks) -> Self {
        self.frameworks = frameworks;
        self
    }

    /// Sets how whole a checkpoint has to be; [`Need::Readable`] by default.
    #[must_use]
    pub fn need(mut self, need: Need) -> Self {
        self.need = need;
        self
    }

    /// Reads what this rank saved, of ranks that saved without collectives and differ.
    #[must_use]
    pub fn rank(mut self, rank: impl Into<Option<u32>>) -> Self {
        self.rank = rank.into();
        self
    }

    /// Reads this variant of a Hugging Face model, such as `fp16` for
    /// `model.fp16.safetensors`; by default the main files.
    #[must_use]
    pub fn variant(mut self, name: impl Into<Option<String>>) -> Self {
        self.variant = name.into();
        self
    }

    /// Calls `listener` with every note of this opener and of jobs on what it opens, as soon as it
    /// is known. [`Checkpoint::notes`](crate::Checkpoint::notes) and the reports of jobs have them,
    /// too.
    #[must_use]
    pub fn on_note(mut self, listener: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.notes = Notes::listened(Arc::new(listener));
        self
    }

    /// The storages that URLs are opened in.
    #[must_use]
    pub fn storages(&self) -> &StorageRegistry {
        &self.storages
    }

    /// The target of a framework that a format is; `None` of every other format.
    #[must_use]
    pub fn framework_target(&self, format: Format) -> Option<&dyn FrameworkTarget> {
        match format {
            Format::Registered(name) => self.frameworks.target(name).map(|(_, target)| target),
            _ => None,
        }
    }

    /// Returns this opener for these tensors; for all where there is no condition.
    pub(crate) fn for_keys(&self, keys: Option<WantedKeys>) -> Self {
        Self { keys, ..self.clone() }
    }

    pub(crate) fn options(&self) -> OpenOptions {
        let options = OpenOptions::default().with_tolerant(self.need.tolerant());
        let options = options.with_rank(self.rank).with_keys(self.keys.clone());
        options.with_transforms(self.formats.transforms().clone())
    }

    /// The notes of a job on what this opener opens.
    #[must_use]
    pub fn notes(&self) -> Notes {
        self.notes.begin()
    }

    /// Returns this opener without a listener.
    pub(crate) fn unheard(&self) -> Self {
        Self { notes: Notes::unheard(), ..self.clone() }
    }
}
