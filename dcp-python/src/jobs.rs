//! The jobs on checkpoints. Each returns its report as JSON, of which Python makes an object: the same fields as those
//! of `dcp COMMAND --json`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp::core::format::Compression;
use dcp::jobs::combine;
use dcp::jobs::keys::{Rename, StatePart};
use dcp::jobs::options::{JobOptions, JobProgress};
use dcp::jobs::run::{AnyOf, KeepBest, KeepEvery, KeepLast, StepOrder};
use dcp::jobs::{Destination, Keys};
use dcp::{DType, Format};
use pyo3::prelude::*;
use serde::Serialize;

use crate::call;
use crate::checkpoint::{Checkpoint, opener};
use crate::failure::Failure;

/// Calls a function of Python with the bytes that are done and those in all, at most as often as a person reads them.
struct Progress {
    function: Py<PyAny>,
    state: Mutex<(u64, u64, Instant)>,
}

impl Progress {
    const INTERVAL: Duration = Duration::from_millis(100);

    fn new(function: &Py<PyAny>) -> Self {
        let function = Python::attach(|py| function.clone_ref(py));
        Self { function, state: Mutex::new((0, 0, Instant::now())) }
    }

    fn call(&self, done: u64, total: u64) {
        Python::attach(|py| {
            if let Err(error) = self.function.call1(py, (done, total)) {
                error.write_unraisable(py, Some(self.function.bind(py)));
            }
        });
    }
}

impl JobProgress for Progress {
    fn start(&self, total_bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = (0, total_bytes, Instant::now());
        drop(state);
        self.call(0, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += bytes;
        let (done, total, called) = *state;
        if done < total && called.elapsed() < Self::INTERVAL {
            return;
        }
        state.2 = Instant::now();
        // The function may wait for another thread of Python, which may be in here.
        drop(state);
        self.call(done, total);
    }
}

/// Options that jobs share, by the names of their keyword arguments.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options {
    to: Option<String>,
    dtype: Option<String>,
    overwrite: bool,
    dry_run: bool,
    ranks: Option<u32>,
    max_shard_bytes: Option<u64>,
    config: Option<PathBuf>,
    compress: Option<i32>,
    include: Vec<String>,
    exclude: Vec<String>,
    part: Option<String>,
    rename: Vec<String>,
    max_memory: Option<u64>,
    parallelism: Option<usize>,
    progress: Option<Py<PyAny>>,
}

impl Options {
    fn job(&self) -> JobOptions {
        let job = JobOptions::default().with_dry_run(self.dry_run);
        let job = match self.max_memory {
            Some(bytes) => job.with_max_memory(bytes),
            None => job,
        };
        let job = match self.parallelism {
            Some(reads) => job.with_parallelism(reads),
            None => job,
        };
        match &self.progress {
            Some(function) => job.with_progress(Arc::new(Progress::new(function))),
            None => job,
        }
    }

    fn keys(&self) -> Result<Keys, Failure> {
        let keys = self.include.iter().fold(Keys::all(), |keys, pattern| keys.include(pattern));
        let keys = self.exclude.iter().fold(keys, |keys, pattern| keys.exclude(pattern));
        let keys = keys.part(self.part.as_deref().map(part).transpose()?);
        self.rename.iter().try_fold(keys, |keys, rename| {
            let rename =
                Rename::parse(rename).map_err(|error| Failure::Argument(error.to_string()))?;
            Ok(keys.rename(rename))
        })
    }

    fn destination(&self, target: &str) -> Result<Destination, Failure> {
        let to = self.to.as_deref().map(Format::from_str).transpose()?;
        let dtype = self.dtype.as_deref().map(DType::from_str).transpose();
        let dtype = dtype.map_err(|error| Failure::Argument(error.to_string()))?;
        let destination = Destination::new(target)
            .to(to)
            .dtype(dtype)
            .overwrite(self.overwrite)
            .ranks(self.ranks)
            .max_shard_bytes(self.max_shard_bytes)
            .compression(self.compression());
        Ok(match &self.config {
            Some(folder) => destination.config(folder),
            None => destination,
        })
    }

    fn compression(&self) -> Option<Compression> {
        self.compress.map(Compression::Zstd)
    }
}

fn part(name: &str) -> Result<StatePart, Failure> {
    match name {
        "everything" => Ok(StatePart::Everything),
        "model" => Ok(StatePart::Model),
        "without_optimizer" => Ok(StatePart::WithoutOptimizer),
        other => Err(Failure::Argument(format!(
            "part {other:?} is none of everything, model, without_optimizer"
        ))),
    }
}

fn json(report: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(report).map_err(|error| Failure::Argument(error.to_string()))
}

#[pymethods]
impl Checkpoint {
    #[pyo3(signature = (key=None))]
    fn inspect(&self, py: Python<'_>, key: Option<String>) -> Result<String, Failure> {
        let look = self.inner.inspect();
        let look = match key {
            Some(key) => look.key(key),
            None => look,
        };
        json(&call::run(py, || look.run())?)
    }

    fn verify(&self, py: Python<'_>, deep: bool, options: Options) -> Result<String, Failure> {
        json(&call::run(py, || self.inner.verify().deep(deep).job(options.job()).run())?)
    }

    #[pyo3(signature = (key, options))]
    fn stats(
        &self,
        py: Python<'_>,
        key: Option<String>,
        options: Options,
    ) -> Result<String, Failure> {
        json(&call::run(py, || self.inner.stats().key(key).job(options.job()).run())?)
    }

    fn diff(&self, py: Python<'_>, other: &Self, options: Options) -> Result<String, Failure> {
        json(&call::run(py, || self.inner.diff(&other.inner).job(options.job()).run())?)
    }

    fn convert(&self, py: Python<'_>, target: &str, options: Options) -> Result<String, Failure> {
        let conversion = self
            .inner
            .convert(options.destination(target)?)
            .keys(options.keys()?)
            .job(options.job());
        json(&call::run(py, || conversion.run())?)
    }

    fn reshard(&self, py: Python<'_>, target: &str, options: Options) -> Result<String, Failure> {
        let reshard =
            self.inner.reshard(target).ranks(options.ranks).compression(options.compression());
        let reshard = reshard.overwrite(options.overwrite).keys(options.keys()?).job(options.job());
        json(&call::run(py, || reshard.run())?)
    }
}

/// Writes several checkpoints with other keys as one.
#[pyfunction]
pub(crate) fn merge(
    py: Python<'_>,
    urls: Vec<String>,
    target: &str,
    options: Options,
) -> Result<String, Failure> {
    let (destination, keys, opener) = (options.destination(target)?, options.keys()?, opener(None));
    json(&call::run(py, || async {
        let opened = open_all(&opener, &urls).await?;
        combine::merge(&opened, destination).keys(keys).job(options.job()).run().await
    })?)
}

/// Writes the average of several checkpoints.
#[pyfunction]
pub(crate) fn average(
    py: Python<'_>,
    urls: Vec<String>,
    target: &str,
    options: Options,
) -> Result<String, Failure> {
    let (destination, keys, opener) = (options.destination(target)?, options.keys()?, opener(None));
    json(&call::run(py, || async {
        let opened = open_all(&opener, &urls).await?;
        combine::average(&opened, destination).keys(keys).job(options.job()).run().await
    })?)
}

async fn open_all(
    opener: &dcp::Opener,
    urls: &[String],
) -> Result<Vec<dcp::Checkpoint>, dcp::jobs::Error> {
    let mut opened = Vec::with_capacity(urls.len());
    for url in urls {
        opened.push(opener.open(url).await?);
    }
    Ok(opened)
}

/// Copies the files of a checkpoint or a run.
#[pyfunction]
pub(crate) fn copy(
    py: Python<'_>,
    source: &str,
    target: &str,
    options: Options,
) -> Result<String, Failure> {
    let opener = opener(None);
    json(&call::run(py, || opener.copy(source, target).job(options.job()).run())?)
}

/// Lists the checkpoints in a folder.
#[pyfunction]
#[pyo3(signature = (url, *, options=None))]
pub(crate) fn list_run(
    py: Python<'_>,
    url: &str,
    options: Option<BTreeMap<String, String>>,
) -> Result<String, Failure> {
    let opener = opener(options.as_ref());
    json(&call::run(py, || opener.list(url))?)
}

/// Deletes checkpoints of a run that no rule keeps; with `dry_run`, returns the plan.
#[pyfunction]
#[pyo3(signature = (url, *, keep_last=None, keep_every=None, keep_best=None, incomplete=None, by=None, dry_run=false))]
#[expect(
    clippy::too_many_arguments,
    reason = "they are the keyword arguments of Python's function"
)]
pub(crate) fn prune(
    py: Python<'_>,
    url: &str,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    keep_best: Option<BestOf>,
    incomplete: Option<f64>,
    by: Option<&str>,
    dry_run: bool,
) -> Result<String, Failure> {
    let policy = policy(keep_last, keep_every, keep_best);
    let mut prune = opener(None).run(url).prune();
    if !policy.is_empty() {
        prune = prune.policy(policy);
    }
    if let Some(seconds) = incomplete {
        let age = Duration::try_from_secs_f64(seconds);
        prune = prune.incomplete(age.map_err(|error| Failure::Argument(error.to_string()))?);
    }
    match by {
        None => {}
        Some("step") => prune = prune.by(StepOrder::Step),
        Some("time") => prune = prune.by(StepOrder::Time),
        Some(other) => {
            return Err(Failure::Argument(format!("by {other:?} is none of step, time")));
        }
    }
    match dry_run {
        true => json(&call::run(py, || prune.plan())?),
        false => json(&call::run(py, || prune.run())?),
    }
}

/// The number of the best checkpoints, the metric, and whether its lowest values are the best.
pub(crate) type BestOf = (usize, String, bool);

/// The policy that keeps what one of these rules keeps.
pub(crate) fn policy(last: Option<usize>, every: Option<u64>, best: Option<BestOf>) -> AnyOf {
    let mut policy = AnyOf::new();
    if let Some(last) = last {
        policy = policy.or(KeepLast(last));
    }
    if let Some(every) = every {
        policy = policy.or(KeepEvery(every));
    }
    if let Some((count, metric, lowest)) = best {
        let best = if lowest { KeepBest::lowest } else { KeepBest::highest };
        policy = policy.or(best(count, metric));
    }
    policy
}
