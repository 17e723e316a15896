//! Writing several checkpoints as one.

use std::collections::HashSet;

use dcp_core::format::WantedKeys;
use serde::Serialize;

use crate::checkpoint::chosen_keys::{Keys, taken_of, unmatched_in};
use crate::checkpoint::format::Format;
use crate::checkpoint::refuse_incomplete::refuse_incomplete;
use crate::checkpoint::setters::{destination_options, format_options, job_options};
use crate::checkpoint::whole::Whole;
use crate::checkpoint::{Checkpoint, model_files};
use crate::convert::Written;
use crate::convert::destination::{Destination, SourceFacts};
use crate::error::{Error, ErrorKind, JobError};
use crate::keys::StatePart;
use crate::options::JobOptions;
use crate::place::same_place::same_sources;
use crate::view::{AverageOptions, Averaged, Duplicates, Merged};

/// Writes several checkpoints with different keys as one: everything of the first, then what the
/// second has, and so on.
///
/// ```no_run
/// # use dcp_jobs::{Checkpoint, Error, Format};
/// # async fn example(model: Checkpoint, optimizer: Checkpoint) -> Result<(), Error> {
/// let both = [model, optimizer];
/// let written = dcp_jobs::combine::merge(&both, "whole").to(Format::Dcp).run().await?;
/// # drop(written);
/// # Ok(())
/// # }
/// ```
pub fn merge(checkpoints: &[Checkpoint], target: impl Into<Destination>) -> Merge<'_> {
    Merge {
        checkpoints,
        destination: target.into(),
        keys: Keys::all(),
        job: JobOptions::default(),
        duplicates: Duplicates::Refuse,
    }
}

/// Writes the average of several checkpoints with the same keys and shapes.
///
/// ```no_run
/// # use dcp_jobs::{Checkpoint, Error, Format};
/// # async fn example(soup: Vec<Checkpoint>) -> Result<(), Error> {
/// let averaged = dcp_jobs::combine::average(&soup, "soup.safetensors").run().await?;
/// println!("{} tensors", averaged.averaged);
/// # Ok(())
/// # }
/// ```
pub fn average(checkpoints: &[Checkpoint], target: impl Into<Destination>) -> Average<'_> {
    Average {
        checkpoints,
        destination: target.into(),
        keys: Keys::all(),
        job: JobOptions::default(),
        options: AverageOptions::default(),
    }
}

/// A merge to [`run`](Self::run), from [`merge`].
#[derive(Debug)]
#[must_use = "a merge does nothing before `run`"]
pub struct Merge<'a> {
    checkpoints: &'a [Checkpoint],
    destination: Destination,
    keys: Keys,
    job: JobOptions,
    duplicates: Duplicates,
}

impl Merge<'_> {
    job_options!();
    destination_options!();
    format_options!();

    /// The treatment of keys that several checkpoints have; they are refused by default.
    pub fn duplicates(mut self, duplicates: Duplicates) -> Self {
        self.duplicates = duplicates;
        self
    }

    /// Merges the checkpoints. Keys are chosen and renamed in the whole.
    ///
    /// # Errors
    ///
    /// [`Disagreement`](ErrorKind::Disagreement) for keys that several have, and those of
    /// [`Conversion::run`](crate::convert::Conversion::run).
    pub async fn run(self) -> Result<Written, Error> {
        let format = self.destination.format()?;
        let selection = self.keys.selection(StatePart::Everything);
        let (first, all) = whole(self.checkpoints, None).await?;
        self.destination.refuse_idle_options(&first.opener, false)?;
        self.destination.refuse_idle_config(format)?;
        let mut notes = first.opener.notes();
        let refs: Vec<&Checkpoint> = all.iter().map(|whole| &**whole).collect();
        let work = self.destination.work("merge", first, &self.job).await?;
        let work = work.option("keys", &selection);
        let work = work.option("`Merge::duplicates`", &self.duplicates);
        same_sources(&self.job, work, &refs).await?;
        for checkpoint in &all {
            self.destination.keep_apart(checkpoint).await?;
            refuse_incomplete(checkpoint, selection.part, &self.job, &mut notes).await?;
        }
        let layout = self.destination.layout(format, first).await?;
        let mut how = SourceFacts { layout, ..SourceFacts::default() };
        let unconfigured = match format {
            Format::HuggingFace if self.destination.config_folder().is_none() => {
                let added = model_files::add_those_of(first, &mut how.files, &mut notes).await?;
                let tensors = first.source.metadata().await?;
                model_files::note_contradiction(&first.opener, &how.files, &tensors, &mut notes);
                added
            }
            _ => None,
        };
        let (job, duplicates) = (&self.job, self.duplicates);
        let sources: Vec<_> = all.iter().map(|checkpoint| checkpoint.source.clone()).collect();
        let merged = Merged::apply(&sources, duplicates, job).await;
        let merged = merged.map_err(|error| match error {
            JobError::Disagreement { .. } if duplicates == Duplicates::Refuse => Error::from(error)
                .with_hint(
                    "`Merge::duplicates` takes keys once that hold the same in all checkpoints",
                ),
            error => error.into(),
        })?;
        let taken = taken_of(&selection, &merged).await?;
        let (frameworks, options) = (&first.opener.frameworks, self.destination.options());
        // Where a state is corrupt, rank 0 of a group fails, and all ranks with it.
        if let Some(job) = &job.of_coordinator() {
            let taken = |fqn: &str| taken.contains(fqn);
            frameworks.refuse_state(&refs, &taken, format, options, job).await?;
        }
        let unmatched = unmatched_in(&selection, [&merged]).await?;
        let merged = selection.apply(&merged, job).await?;
        let mut report = self.destination.write(&merged, first, how, job).await?;
        if let Some(note) = unconfigured {
            notes.say(note);
        }
        report.unmatched.splice(..0, unmatched);
        Ok(Written { report, mapping: None, notes: notes.into_said() })
    }
}

/// An average to [`run`](Self::run), from [`average`].
#[derive(Debug)]
#[must_use = "an average does nothing before `run`"]
pub struct Average<'a> {
    checkpoints: &'a [Checkpoint],
    destination: Destination,
    keys: Keys,
    job: JobOptions,
    options: AverageOptions,
}

/// The result of an average.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct AverageWritten {
    /// The written checkpoint.
    #[serde(flatten)]
    pub written: Written,
    /// Tensors that are averages.
    pub averaged: usize,
    /// Keys that have no average, and come from one of the checkpoints.
    pub taken: usize,
}

impl Average<'_> {
    job_options!();
    destination_options!();
    format_options!();

    /// Weights, the dtype of sums, and the treatment of values without an average. The dtype of the result
    /// is that of the destination.
    pub fn options(mut self, options: AverageOptions) -> Self {
        self.options = options;
        self
    }

    /// Averages the checkpoints. Keys are chosen and renamed in each of them.
    ///
    /// # Errors
    ///
    /// [`Disagreement`](ErrorKind::Disagreement) for other keys, shapes or values that have no
    /// average, and those of [`Conversion::run`](crate::convert::Conversion::run).
    pub async fn run(self) -> Result<AverageWritten, Error> {
        let format = self.destination.format()?;
        let selection = self.keys.selection(format.usual_part());
        let (first, all) = whole(self.checkpoints, Some(&selection.needed())).await?;
        self.destination.refuse_idle_options(&first.opener, false)?;
        self.destination.refuse_idle_config(format)?;
        let mut notes = first.opener.notes();
        let refs: Vec<&Checkpoint> = all.iter().map(|whole| &**whole).collect();
        let work = self.destination.work("average", first, &self.job).await?;
        let work = work.option("keys", &selection);
        same_sources(&self.job, work.option("how it averages", &self.options), &refs).await?;
        for checkpoint in &all {
            self.destination.keep_apart(checkpoint).await?;
            refuse_incomplete(checkpoint, selection.part, &self.job, &mut notes).await?;
        }
        let job = &self.job;
        let mut sources = Vec::with_capacity(all.len());
        let mut not_taken = 0;
        let mut taken = HashSet::new();
        for checkpoint in &all {
            taken.extend(taken_of(&selection, &checkpoint.source).await?);
            let chosen = self.keys.apply(&selection, &checkpoint.source, job, &mut notes).await?;
            let (source, more) = chosen;
            not_taken = not_taken.max(more);
            sources.push(source);
        }
        let layout = self.destination.layout(format, first).await?;
        let mut how = SourceFacts { layout, ..SourceFacts::default() };
        let unconfigured = match format {
            Format::HuggingFace if self.destination.config_folder().is_none() => {
                let added = model_files::add_those_of(first, &mut how.files, &mut notes).await?;
                let tensors = first.source.metadata().await?;
                model_files::note_contradiction(&first.opener, &how.files, &tensors, &mut notes);
                added
            }
            _ => None,
        };
        let stored = all.iter().map(|checkpoint| &checkpoint.source);
        let unmatched = unmatched_in(&selection, stored).await?;
        let (frameworks, options) = (&first.opener.frameworks, self.destination.options());
        // Where a state is corrupt, rank 0 of a group fails, and all ranks with it.
        if let Some(job) = &job.of_coordinator() {
            let taken = |fqn: &str| taken.contains(fqn);
            frameworks.refuse_state(&refs, &taken, format, options, job).await?;
        }
        let rule = match sources.first() {
            Some(source) => self.destination.cast_rule(&*source.metadata().await?),
            None => None,
        };
        let casts = rule.is_some();
        let options = match rule {
            Some(rule) => self.options.dtypes(rule),
            None => self.options,
        };
        let averaged = Averaged::apply(&sources, &options, job).await;
        let (source, view) = averaged
            .and_then(|(source, view)| match view.counts() {
                (0, taken) => {
                    let problem = format!("computes nothing: none of {taken} keys has an average");
                    Err(JobError::InvalidOption { option: "the average".to_owned(), problem })
                }
                _ => Ok((source, view)),
            })
            .map_err(|error| match error {
                JobError::Disagreement { structure: true, .. } => Error::from(error).with_hint(
                    "`Keys::include`, `Keys::exclude` and `Keys::rename` choose keys that all \
                 checkpoints have in one shape; `DiffOptions::keys_only` lists the others",
                ),
                JobError::Disagreement { .. } => Error::from(error).with_hint(
                    "`Keys::include` 'model.*' leaves the rest of a training state out; \
                 `AverageOptions::non_float` takes what has no average from the first checkpoint",
                ),
                error => error.into(),
            })?;
        let mut report = self.destination.write(&source, first, how, job).await?;
        if let Some(note) = unconfigured {
            notes.say(note);
        }
        report.not_taken = not_taken;
        report.unmatched.splice(..0, unmatched);
        if let Some(group) = &job.group {
            view.gather_counts(group).await?;
        }
        let cast = view.report();
        if casts || cast.lost_range().next().is_some() {
            report.cast = Some(cast);
        }
        report.overflowed = view.overflowed();
        let (averaged, taken) = view.counts();
        let written = Written { report, mapping: None, notes: notes.into_said() };
        Ok(AverageWritten { written, averaged, taken })
    }
}

/// All of the checkpoints, whole or with the keys that are needed, and the first of them as it was
/// opened.
async fn whole<'a>(
    checkpoints: &'a [Checkpoint],
    needed: Option<&WantedKeys>,
) -> Result<(&'a Checkpoint, Vec<Whole<'a>>), Error> {
    let Some(first) = checkpoints.first() else {
        return Err(Error::new(ErrorKind::InvalidOption, "there is no checkpoint to write"));
    };
    Ok((first, Whole::of_all(checkpoints, needed).await?))
}
