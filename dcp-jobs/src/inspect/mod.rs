//! The contents of a checkpoint, at a glance.

mod sidecar_summary;
mod summary;

use std::fmt;

use dcp_core::format::Listing;
use dcp_formats::dcp::DcpReader;
use dcp_planner::validate_metadata;
use indexmap::IndexMap;
use serde::{Serialize, Serializer};

pub use sidecar_summary::{Coverage, SidecarFacts, SidecarSummary};
pub use summary::{ChunkSummary, KeySummary, Summary, TensorSummary, inspect};

use summary::natural;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::framework::PluginReport;
use crate::checkpoint::setters::job_options;
use crate::error::Error;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::options::JobOptions;

impl Checkpoint {
    /// Summarizes this checkpoint: its keys, files and objects. No tensor is read.
    ///
    /// ```no_run
    /// # async fn example(run: dcp_jobs::Checkpoint) -> Result<(), dcp_jobs::Error> {
    /// let weights = run.inspect().filter(|key| key.ends_with(".weight")).run().await?;
    /// println!("{} bytes", weights.summary.tensor_bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub fn inspect(&self) -> Inspection<'_> {
        Inspection { checkpoint: self, wanted: Wanted::All, job: JobOptions::default() }
    }

    /// Finds a problem of this checkpoint beyond its files: an index that contradicts itself, a tracker that
    /// names another checkpoint.
    async fn contradiction(&self, summary: &Summary) -> Result<Option<String>, Error> {
        if let Some(unfinished) = &self.unfinished {
            return Ok(Some(format!("it {}", unfinished.description)));
        }
        let damage = self.of_framework().and_then(|of| of.damage().first());
        if let Some(damage) = summary.unfinished.first().or(damage) {
            return Ok(Some(damage.clone()));
        }
        if let Some((file, problem)) = &self.tracker_problem {
            return Ok(Some(format!("{file}: {problem}")));
        }
        // That of an index of PyTorch was compared with its tensors.
        if self.framework.is_some() || self.source.extension::<DcpReader>().is_some() {
            return Ok(None);
        }
        let errors = validate_metadata(&*self.source.metadata().await?);
        Ok(errors.first().map(ToString::to_string))
    }

    /// The files of ranks whose merged tensors lie in none of them.
    async fn rank_files(&self) -> Result<IndexMap<String, Option<u64>>, Error> {
        let mut files = IndexMap::new();
        if !self.of_framework().is_some_and(|of| of.is_of_ranks()) {
            return Ok(files);
        }
        let listing = Listing::read(&*self.storage, &[]).await?;
        let root = listing.root();
        for meta in listing.objects() {
            let name = meta.key.as_str();
            let folder = name.split('/').next().unwrap_or_default();
            let is_archive = [".pt", ".bin"].iter().any(|ending| name.ends_with(ending));
            if is_archive && self.opener.formats.owns(&root, folder) {
                files.insert(name.to_owned(), Some(meta.byte_len));
            }
        }
        files.sort_unstable_keys();
        Ok(files)
    }
}

/// A look to [`run`](Self::run), from [`Checkpoint::inspect`].
#[derive(Debug)]
#[must_use = "a look does nothing before `run`"]
pub struct Inspection<'a> {
    checkpoint: &'a Checkpoint,
    wanted: Wanted<'a>,
    job: JobOptions,
}

/// The keys that are summarized.
enum Wanted<'a> {
    All,
    Tensor(String),
    Where(Box<dyn Fn(&str) -> bool + Send + Sync + 'a>),
}

impl fmt::Debug for Wanted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("All"),
            Self::Tensor(fqn) => f.debug_tuple("Tensor").field(fqn).finish(),
            Self::Where(_) => f.write_str("Where"),
        }
    }
}

/// The contents of a checkpoint.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Inspected {
    /// Keys and files.
    #[serde(flatten)]
    pub summary: Summary,
    /// The description of a checkpoint of a framework, under the name of that.
    #[serde(flatten, serialize_with = "under_its_name")]
    pub framework: Option<PluginReport>,
    /// The reason that the checkpoint is not whole, as `Opener::list` says it, or a contradiction of its index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

fn under_its_name<S: Serializer>(
    report: &Option<PluginReport>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(report.iter().map(|report| (report.name(), report)))
}

impl<'a> Inspection<'a> {
    job_options!();

    /// Summarizes only the keys for which `wanted` is true, and their files.
    pub fn filter(mut self, wanted: impl Fn(&str) -> bool + Send + Sync + 'a) -> Self {
        self.wanted = Wanted::Where(Box::new(wanted));
        self
    }

    /// Summarizes only this key, which must exist.
    pub fn key(mut self, fqn: impl Into<String>) -> Self {
        self.wanted = Wanted::Tensor(fqn.into());
        self
    }

    /// Reads the index and the objects.
    ///
    /// # Errors
    ///
    /// [`UnknownKey`](ErrorKind::UnknownKey) for a [`key`](Self::key) that does not exist, and when
    /// the index cannot be read.
    pub async fn run(self) -> Result<Inspected, Error> {
        let (checkpoint, job) = (self.checkpoint, &self.job);
        let source = &checkpoint.source;
        let framework = match checkpoint.of_framework() {
            Some(of) => Some(of.describe().await?),
            None => None,
        };
        let all = matches!(self.wanted, Wanted::All);
        let mut summary = match self.wanted {
            Wanted::All => inspect(source, job, |_| true).await?,
            Wanted::Where(wanted) => inspect(source, job, wanted).await?,
            Wanted::Tensor(fqn) => {
                crate::get::find(source, &fqn, None).await?;
                inspect(source, job, |name| name == fqn).await?
            }
        };
        if framework.is_some() {
            // That of the index below says nothing of the framework.
            summary.version = None;
        }
        if all {
            summary.files.extend(checkpoint.rank_files().await?);
            summary.files.sort_by_cached_key(|name, _| natural(name));
        }
        let problem = match checkpoint.incomplete().await? {
            Some(problem) => Some(problem),
            None => checkpoint.contradiction(&summary).await?,
        };
        Ok(Inspected { summary, framework, problem })
    }
}
