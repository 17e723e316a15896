//! The contents of a checkpoint, at a glance.

use std::fmt;

use dcp_convert::JobOptions;
use dcp_convert::jobs::inspect::{KeySummary, Summary};
use dcp_core::Key;
use dcp_core::format::Listing;
use dcp_core::storage::StorageExt;
use dcp_core::text::Quoted;
use dcp_megatron::StoredFormat;
use dcp_megatron::disk::{COMMON_STATE, METADATA_JSON};
use dcp_megatron::jobs::Description;
use dcp_planner::validate_metadata;
use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::setters::job_options;

impl Checkpoint {
    /// Summarizes this checkpoint: its keys, files and objects. No tensor is read.
    ///
    /// ```no_run
    /// # async fn example(run: dcp_checkpoint::Checkpoint) -> Result<(), dcp_checkpoint::Error> {
    /// let weights = run.inspect().filter(|key| key.ends_with(".weight")).run().await?;
    /// println!("{} bytes", weights.summary.tensor_bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub fn inspect(&self) -> Inspection<'_> {
        Inspection { checkpoint: self, wanted: Wanted::All, job: JobOptions::default() }
    }

    /// The common state of a checkpoint of Megatron-Core, as
    /// [`value_json`](dcp_convert::element::value_json) writes it.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a checkpoint of another program,
    /// [`Damaged`](ErrorKind::Damaged) where there is none or none can be recognized.
    pub async fn common_state(&self) -> Result<Map<String, Value>, Error> {
        self.common_state_for("--common").await
    }

    /// The arguments in the common state: those of the run that saved the checkpoint.
    ///
    /// # Errors
    ///
    /// As [`common_state`](Self::common_state).
    pub async fn arguments(&self) -> Result<Map<String, Value>, Error> {
        let mut state = self.common_state_for("--args").await?;
        state.remove("args").and_then(plain_dict).ok_or_else(|| {
            self.has_no("arguments in its common state")
                .with_hint("`dcp inspect --common` shows what there is")
        })
    }

    async fn common_state_for(&self, option: &str) -> Result<Map<String, Value>, Error> {
        if self.megatron.is_none() {
            return Err(self.no_common_state(option).await);
        }
        let found = self.inspect().filter(|name| name == COMMON_STATE).run().await?;
        match found.summary.keys.into_values().next() {
            Some(KeySummary::Object { value }) => {
                plain_dict(value).ok_or_else(|| self.has_no("common state that is a dict"))
            }
            _ => Err(self.has_no("common state")),
        }
    }

    fn has_no(&self, what: &str) -> Error {
        Error::new(ErrorKind::Damaged, format!("{:?} has no {what}", self.uri))
    }

    async fn no_common_state(&self, option: &str) -> Error {
        if self.is_folder
            && let Ok(config) = Key::new(METADATA_JSON)
            && self.storage.contains(&config).await.unwrap_or(false)
        {
            let message = format!(
                "{} has no common state that can be recognized: its {METADATA_JSON} does not name the \
                 backends of Megatron-Core, because it is damaged or of another program",
                Quoted(&self.uri)
            );
            return Error::new(ErrorKind::Damaged, message)
                .with_hint(format!("without {option} the command shows what else there is"));
        }
        let message =
            format!("{option} is for checkpoints of Megatron-Core, and {:?} is none", self.uri);
        Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out to see what there is")
    }

    /// Finds a problem of this checkpoint beyond its files: an index that contradicts itself, a tracker that
    /// names another checkpoint.
    async fn contradiction(&self, summary: &Summary) -> Result<Option<String>, Error> {
        if let Some(unfinished) = &self.unfinished {
            return Ok(Some(format!("it {}", unfinished.description)));
        }
        let damage = self.megatron.iter().flat_map(|megatron| megatron.damage()).next();
        if let Some(damage) = summary.unfinished.first().or(damage) {
            return Ok(Some(damage.clone()));
        }
        if let Some((file, problem)) = &self.tracker_problem {
            return Ok(Some(format!("{file}: {problem}")));
        }
        // That of an index of PyTorch was compared with its tensors.
        if self.megatron.is_some() || self.source.dcp_reader().is_some() {
            return Ok(None);
        }
        let errors = validate_metadata(&*self.source.metadata().await?);
        Ok(errors.first().map(ToString::to_string))
    }

    /// The files of the ranks of an old checkpoint of Megatron's, whose merged tensors lie in none.
    async fn rank_files(&self) -> Result<IndexMap<String, Option<u64>>, Error> {
        let mut files = IndexMap::new();
        let format = self.megatron.as_ref().map(|checkpoint| checkpoint.format());
        if !matches!(format, Some(StoredFormat::Legacy { .. })) {
            return Ok(files);
        }
        let listing = Listing::read(&*self.storage, &[]).await?;
        let root = listing.root();
        for meta in listing.objects() {
            let name = meta.key.as_str();
            let folder = name.split('/').next().unwrap_or_default();
            if name.ends_with(".pt") && self.opener.formats.owns(&root, folder) {
                files.insert(name.to_owned(), Some(meta.byte_len));
            }
        }
        files.sort_unstable_keys();
        Ok(files)
    }
}

/// The entries of a dict, or those of an object with a dict as its state.
fn plain_dict(value: Value) -> Option<Map<String, Value>> {
    let Value::Object(mut map) = value else { return None };
    match map.get("type").and_then(Value::as_str) {
        None => Some(map),
        Some(_) => match map.remove("state") {
            Some(Value::Object(state)) => Some(state),
            _ => None,
        },
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
    /// The description of a checkpoint of Megatron-Core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub megatron: Option<Description>,
    /// The reason that the checkpoint is not whole, as `dcp ls` says it, or a contradiction of its index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
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
        let megatron = match &checkpoint.megatron {
            Some(megatron) => Some(megatron.describe().await?),
            None => None,
        };
        let all = matches!(self.wanted, Wanted::All);
        let mut summary = match self.wanted {
            Wanted::All => dcp_convert::inspect(source, job, |_| true).await?,
            Wanted::Where(wanted) => dcp_convert::inspect(source, job, wanted).await?,
            Wanted::Tensor(fqn) => {
                dcp_convert::find(source, &fqn, None).await?;
                dcp_convert::inspect(source, job, |name| name == fqn).await?
            }
        };
        if megatron.is_some() {
            // That of the index below says nothing of Megatron-Core.
            summary.version = None;
        }
        if summary.files.is_empty() && all {
            summary.files = checkpoint.rank_files().await?;
        }
        let problem = match checkpoint.incomplete().await? {
            Some(problem) => Some(problem),
            None => checkpoint.contradiction(&summary).await?,
        };
        Ok(Inspected { summary, megatron, problem })
    }
}
