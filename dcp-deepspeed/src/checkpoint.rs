//! A checkpoint of DeepSpeed, opened for every job.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::error_chain;
use dcp_core::format::Folder;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Key, Storage};
use dcp_jobs::framework::{FrameworkCheckpoint, PluginReport, Taken};
use dcp_jobs::integrity::{Problem, ProblemKind};
use dcp_jobs::verify::VerifyReport;
use dcp_jobs::{Error, JobError, JobOptions, Source};
use serde::Serialize;

use crate::assemble::assemble;
use crate::opened::OpenedFiles;
use crate::rounding;

/// The name of the format and of the framework.
pub(crate) const NAME: &str = "deepspeed";

/// A checkpoint of DeepSpeed: a folder of one step, or a universal one.
#[derive(Debug)]
pub struct DeepSpeedCheckpoint {
    source: Source,
    opened: OpenedFiles,
    notes: Vec<String>,
}

/// The save, as its files describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeepSpeedDescription {
    /// `zero` with files of ranks, or `universal`.
    pub format: &'static str,
    /// The stage of ZeRO.
    pub stage: Option<u64>,
    /// The ranks that share the optimizer's state.
    pub data_parallel: usize,
    /// The ranks that share the model: stages of a pipeline.
    pub model_parallel: usize,
    /// The files of experts.
    pub experts: usize,
    /// The files of layers of a pipeline.
    pub layers: usize,
    /// Parameters with master weights.
    pub trained_parameters: usize,
    /// The steps of the run.
    pub global_steps: Option<i64>,
    /// The version of DeepSpeed that wrote it.
    pub written_by: Option<String>,
}

impl DeepSpeedCheckpoint {
    /// Opens the checkpoint in a folder. The pickles of all files are read, and no tensor but a few elements of
    /// universal folders.
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        folder: &Folder<'_>,
    ) -> Result<Self, CheckpointError> {
        let opened = OpenedFiles::open(storage, folder).await?;
        let (source, notes) = assemble(&opened).await?;
        Ok(Self { source, opened, notes })
    }

    /// The whole tensors, as a source of every job.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Notes of what was left out, or kept as it is.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The files that it was opened from.
    pub(crate) fn files(&self) -> Vec<Key> {
        let names = self.opened.files.iter().map(|file| Key::new(file.name.as_str()));
        names.filter_map(Result::ok).collect()
    }

    /// Describes the save.
    #[must_use]
    pub fn description(&self) -> DeepSpeedDescription {
        let model = self.opened.models.first();
        let stage = model.and_then(|model| model.stage);
        DeepSpeedDescription {
            format: if self.opened.is_universal { "universal" } else { "zero" },
            stage: stage.or((self.opened.ranks == 0 && !self.opened.is_universal).then_some(0)),
            data_parallel: self.opened.ranks,
            model_parallel: self.opened.mp_ranks,
            experts: self.opened.experts.len(),
            layers: self.opened.layers.len(),
            trained_parameters: self.opened.masters.parameters.len(),
            global_steps: model.and_then(|model| model.global_steps),
            written_by: model.and_then(|model| model.version.clone()),
        }
    }

    /// Checks the file of every rank by itself.
    async fn verify_files(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error> {
        let mut report = VerifyReport::default();
        report.deep = deep;
        report.files = self.opened.files.len();
        for file in &self.opened.files {
            match dcp_jobs::verify::verify(&file.source, deep, job).await {
                Ok(one) => {
                    report.bytes_checked += one.bytes_checked;
                    report.problems.extend(one.problems);
                    for note in one.notes {
                        if !report.notes.contains(&note) {
                            report.notes.push(note);
                        }
                    }
                }
                Err(JobError::Checkpoint(CheckpointError::Format(error))) => {
                    let error = error.in_file(file.name.as_str(), 0).to_string();
                    report.problems.push(problem(&file.name, error));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(report)
    }
}

fn problem(file: &str, message: String) -> Problem {
    let mut problem = Problem::default();
    problem.kind = ProblemKind::Corrupt;
    problem.file = Some(file.into());
    problem.message = message;
    problem
}

#[async_trait]
impl FrameworkCheckpoint for DeepSpeedCheckpoint {
    fn stored(&self) -> Option<&Source> {
        None
    }

    /// Nothing: what is wrong is an error of opening.
    fn damage(&self) -> &[String] {
        &[]
    }

    fn is_of_ranks(&self) -> bool {
        true
    }

    fn arguments(&self) -> Option<Dict> {
        None
    }

    fn shown_by(&self, _key: &str) -> Option<&'static str> {
        None
    }

    async fn describe(&self) -> Result<PluginReport, Error> {
        PluginReport::new(NAME, self.description())
    }

    /// Each file is a checkpoint of its own. Where none of them is damaged, the first elements of the master weights
    /// are compared with the rounded ones of the model.
    async fn verify(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error> {
        let mut report = self.verify_files(deep, job).await?;
        report.format = NAME.to_owned();
        let metadata = self.source.metadata().await?;
        report.tensors = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some()).count();
        report.objects = metadata.len() - report.tensors;
        report.notes.extend(self.notes.iter().cloned());
        if report.problems.is_empty() && job.is_coordinator() {
            let rounded = |name: &str| self.opened.rounded(name);
            let masters = &self.opened.masters;
            match rounding::first_difference(masters, &self.opened.files, rounded).await {
                Ok(None) => {}
                Ok(Some(name)) => report.notes.push(format!(
                    "the float32 weights of {name:?} do not round to those in the model states, as when these are \
                     of another step"
                )),
                Err(error) => report.problems.push(problem("", error_chain(&error))),
            }
        }
        report.ok = report.problems.is_empty();
        Ok(report)
    }

    async fn state_problem(
        &self,
        _uri: &str,
        _taken: Taken<'_>,
        _job: &JobOptions,
    ) -> Result<Option<String>, Error> {
        Ok(None)
    }
}
