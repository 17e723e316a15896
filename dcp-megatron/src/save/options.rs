//! Options of a save.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use dcp_core::Collective;
use dcp_core::value::Dict;
use dcp_engine::{Saver, Settings};
use dcp_formats::dcp::FileLayout;
use dcp_formats::metadata::Profile;
use dcp_planner::FlattenRule;

use super::SaveDistribution;
use crate::disk::config::Backend;
use crate::open::strategy::{Strategies, WriterSettings};
use crate::writer::MegatronForm;

/// A change to the common state before it is compared between ranks.
type Preprocess = dyn Fn(&Dict) -> Dict + Send + Sync;

/// Options of a save. Every rank passes the same, but for the group's own rank.
///
/// One kept for several saves remembers plans between them, so that unchanged states exchange a
/// few bytes only.
#[derive(Clone)]
pub struct MegatronSaveOptions {
    pub(super) saver: Saver,
    pub(super) strategies: Strategies,
    pub(super) backend: Backend,
    pub(super) validate: bool,
    pub(super) common_must_agree: bool,
    pub(super) preprocess: Option<Arc<Preprocess>>,
    pub(super) content_metadata: Option<Dict>,
    pub(super) allow_mixed_lists: bool,
    pub(super) distribution: Option<Arc<dyn SaveDistribution>>,
    pub(super) settings: WriterSettings,
}

impl Default for MegatronSaveOptions {
    /// This process alone, to `torch_dist` in the form that most versions read, everything
    /// checked, nothing replaced.
    fn default() -> Self {
        Self {
            saver: Saver::with_settings(settings()),
            strategies: Strategies::default(),
            backend: Backend::first("torch_dist"),
            validate: true,
            common_must_agree: true,
            preprocess: None,
            content_metadata: None,
            allow_mixed_lists: false,
            distribution: None,
            settings: WriterSettings::default(),
        }
    }
}

/// Keys are whole names, in which dots mean nothing.
pub(super) fn settings() -> Settings {
    Settings::new().flatten_rule(FlattenRule::TopLevel)
}

impl MegatronSaveOptions {
    /// The default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Saves together with the other ranks of `group`; rank 0 coordinates.
    #[must_use]
    pub fn group(mut self, group: Arc<dyn Collective>) -> Self {
        self.saver = Saver::with_settings(settings().group(group));
        self
    }

    /// Whether it is checked that all ranks' shards make whole tensors (the default). Without,
    /// only overlaps and gaps of what is written are noticed, and then on the coordinator.
    #[must_use]
    pub fn validate_access_integrity(mut self, validate: bool) -> Self {
        self.validate = validate;
        self
    }

    /// Whether a common state that differs between ranks is an error (the default) or, as in
    /// Megatron-Core (0.16), only a warning; then that of rank 0 is stored and the others' is
    /// lost.
    #[must_use]
    pub fn common_must_agree(mut self, must: bool) -> Self {
        self.common_must_agree = must;
        self
    }

    /// Changes the common state for the comparison between ranks, such as to leave out what may
    /// differ. What is stored is not changed.
    #[must_use]
    #[doc(alias = "preprocess_common_before_consistancy_check")]
    pub fn preprocess_common_before_consistency_check(
        mut self,
        preprocess: impl Fn(&Dict) -> Dict + Send + Sync + 'static,
    ) -> Self {
        self.preprocess = Some(Arc::new(preprocess));
        self
    }

    /// Sets the description of the content, such as the optimizer's layout; stored in the common
    /// state.
    #[must_use]
    pub fn content_metadata(mut self, content: Dict) -> Self {
        self.content_metadata = Some(content);
        self
    }

    /// Whether lists that hold sharded and plain elements side by side are saved. By default they
    /// are refused, because Megatron-Core saves them and can never load them again.
    #[must_use]
    pub fn allow_mixed_lists(mut self, allow: bool) -> Self {
        self.allow_mixed_lists = allow;
        self
    }

    /// Lets ranks share the writing of what several of them hold.
    #[must_use]
    #[doc(alias = "FullyParallelSaveStrategyWrapper")]
    pub fn distribution(mut self, distribution: Arc<dyn SaveDistribution>) -> Self {
        self.distribution = Some(distribution);
        self
    }

    /// Sets the backend that the checkpoint is written to, and the strategies that have it.
    #[must_use]
    #[doc(alias = "sharded_strategy")]
    pub fn strategy(mut self, strategies: Strategies, backend: Backend) -> Self {
        (self.strategies, self.backend) = (strategies, backend);
        self
    }

    /// Sets the place of the common state, and so the versions of Megatron-Core that read the
    /// checkpoint.
    #[must_use]
    pub fn form(mut self, form: MegatronForm) -> Self {
        self.settings.form = form;
        self
    }

    /// The form of the `.metadata` pickle; by default the one that all versions read.
    #[must_use]
    pub fn profile(mut self, profile: Profile) -> Self {
        self.settings.profile = Some(profile);
        self
    }

    /// Files of each rank, with about the same number of bytes in each; one by default. Short for
    /// [`files`](Self::files) with [`FileLayout::SplitBySize`].
    #[must_use]
    pub fn thread_count(self, files: NonZeroUsize) -> Self {
        self.files(match files.get() {
            1 => FileLayout::OnePerRank,
            _ => FileLayout::SplitBySize(files),
        })
    }

    /// Sets the division of each rank's data into files; one file by default.
    /// [`FileLayout::MegatronCompatible`] divides as Megatron-Core's `thread_count` does: with
    /// [`ShareRule::Megatron`](crate::parallel::ShareRule::Megatron) the files then hold what
    /// Megatron-Core's would.
    #[must_use]
    pub fn files(mut self, layout: FileLayout) -> Self {
        self.settings.files = layout;
        self
    }

    /// Whether `integrity.json` is written, with a hash of every file. Every rank reads the files
    /// that it wrote once more for it.
    #[must_use]
    #[doc(alias = "verify_integrity")]
    pub fn integrity(mut self, integrity: bool) -> Self {
        self.settings.integrity = integrity;
        self
    }

    /// Whether an existing checkpoint is replaced; it stays loadable until the new one is
    /// complete.
    #[must_use]
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.settings.overwrite = overwrite;
        self
    }
}

impl fmt::Debug for MegatronSaveOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MegatronSaveOptions")
            .field("backend", &self.backend)
            .field("validate", &self.validate)
            .field("common_must_agree", &self.common_must_agree)
            .field("content_metadata", &self.content_metadata)
            .field("allow_mixed_lists", &self.allow_mixed_lists)
            .field("distribution", &self.distribution)
            .finish_non_exhaustive()
    }
}
