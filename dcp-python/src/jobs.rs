//! The jobs on checkpoints. Each returns its report as JSON, of which Python makes an object: the same fields as those
//! of `dcp COMMAND --json`.

use std::collections::BTreeMap;
use std::io::BufWriter;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use dcp::core::format::Compression;
use dcp::jobs::combine;
use dcp::jobs::keys::{Rename, StatePart};
use dcp::jobs::options::JobOptions;
use dcp::jobs::report::{ReportLimits, render_html};
use dcp::jobs::run::{AnyOf, KeepBest, KeepEvery, KeepLast, StepOrder};
use dcp::jobs::{Destination, Keys, TargetOptions};
use dcp::trace::{Trace, TraceSummary, create_trace};
use dcp::{DType, Format};
use pyo3::prelude::*;
use serde::Serialize;

use crate::call;
use crate::checkpoint::{Checkpoint, opener};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::storages::storages;
use crate::terms;

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
    progress: Option<Progress>,
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
            Some(progress) => job.with_progress(Arc::new(progress.clone())),
            None => job,
        }
    }

    /// Runs a job with these options to its end, or to that of its progress function.
    fn run<T: Send, E: Into<Failure>, F: Future<Output = Result<T, E>>>(
        &self,
        py: Python<'_>,
        make: impl FnOnce() -> F + Send,
    ) -> Result<T, Failure> {
        call::run_with(py, self.progress.as_ref(), make)
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

/// A report with the names of Python in its messages. No term has a character that JSON escapes.
fn json(report: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(report);
    let text = text.map_err(|error| Failure::Argument(error.to_string()))?;
    Ok(terms::of_python(&text).into_owned())
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
        json(&options.run(py, || self.inner.verify().deep(deep).job(options.job()).run())?)
    }

    #[pyo3(signature = (key, options))]
    fn stats(
        &self,
        py: Python<'_>,
        key: Option<String>,
        options: Options,
    ) -> Result<String, Failure> {
        json(&options.run(py, || self.inner.stats().key(key).job(options.job()).run())?)
    }

    fn diff(&self, py: Python<'_>, other: &Self, options: Options) -> Result<String, Failure> {
        json(&options.run(py, || self.inner.diff(&other.inner).job(options.job()).run())?)
    }

    /// The report, whose page goes to the file `target`.
    #[pyo3(signature = (target, stats, options))]
    fn report(
        &self,
        py: Python<'_>,
        target: Option<&str>,
        stats: bool,
        options: Options,
    ) -> Result<String, Failure> {
        let job = options.job();
        json(&options.run(py, || async {
            let settings = TargetOptions::default().with_overwrite(options.overwrite);
            let file = match target {
                Some(target) => Some(self.inner.target_file(target, &settings).await?),
                None => None,
            };
            let report = self.inner.report(stats, &ReportLimits::default(), &job).await?;
            if let Some(file) = file {
                file.target().put_report(render_html(&report).into_bytes()).await?;
                file.keep();
            }
            Ok::<_, dcp::jobs::Error>(report)
        })?)
    }

    fn convert(&self, py: Python<'_>, target: &str, options: Options) -> Result<String, Failure> {
        let conversion = self
            .inner
            .convert(options.destination(target)?)
            .keys(options.keys()?)
            .job(options.job());
        json(&options.run(py, || conversion.run())?)
    }

    fn reshard(&self, py: Python<'_>, target: &str, options: Options) -> Result<String, Failure> {
        let reshard =
            self.inner.reshard(target).ranks(options.ranks).compression(options.compression());
        let reshard = reshard.overwrite(options.overwrite).keys(options.keys()?).job(options.job());
        json(&options.run(py, || reshard.run())?)
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
    json(&options.run(py, || async {
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
    json(&options.run(py, || async {
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
    json(&options.run(py, || opener.copy(source, target).job(options.job()).run())?)
}

/// The summary of traces. Their events go to the file `merged`.
#[pyfunction]
#[pyo3(signature = (urls, merged))]
pub(crate) fn trace(
    py: Python<'_>,
    urls: Vec<String>,
    merged: Option<PathBuf>,
) -> Result<String, Failure> {
    let storages = storages();
    let trace = call::run(py, || async {
        let mut all = Trace::default();
        for url in &urls {
            all.merge(Trace::open(&storages, url).await?);
        }
        Ok::<_, Failure>(all)
    })?;
    if let Some(file) = merged {
        // Of files that exist, only a trace is replaced.
        let written = create_trace(&file).and_then(|out| trace.write(BufWriter::new(out)));
        written.map_err(PyErr::from)?;
    }
    json(&TraceSummary::of(&trace))
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
    let policy = policy(keep_last, keep_every, keep_best)?;
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
///
/// # Errors
///
/// For a rule of zero checkpoints, which keeps nothing.
pub(crate) fn policy(
    last: Option<usize>,
    every: Option<u64>,
    best: Option<BestOf>,
) -> Result<AnyOf, Failure> {
    let zeros = [
        ("keep_last", last == Some(0)),
        ("keep_every", every == Some(0)),
        ("keep_best", best.as_ref().is_some_and(|best| best.0 == 0)),
    ];
    if let Some((name, _)) = zeros.into_iter().find(|(_, is_zero)| *is_zero) {
        return Err(Failure::Argument(format!("{name}=0 keeps nothing; leave it out, or give 1")));
    }
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
    Ok(policy)
}
