//! A checkpoint with a file for each rank, opened.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::text::counted;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Key, Storage, StorageError};
use dcp_jobs::framework::{FrameworkCheckpoint, PluginReport, Taken};
use dcp_jobs::integrity::{Problem, ProblemKind};
use dcp_jobs::verify::VerifyReport;
use dcp_jobs::view::Assembled;
use dcp_jobs::{Error, JobError, JobOptions, Source};

use crate::copies::{BYTES_MAX, Copies};
use crate::folder::RankFolder;
use crate::leaves::Files;
use crate::merge::{Findings, Merge};
use crate::messages::{bad, first_of};
use crate::names::{Program, State};
use crate::optimizer::{self, Renaming};
use crate::parameters::Names;
use crate::report::RankFilesReport;

/// The name of the format and of the framework.
pub(crate) const NAME: &str = "rank_files";

/// A checkpoint with a file for each rank.
///
/// Its [`source`](Self::source) shows the model below `model`, the optimizer below `optimizer` under the names of
/// parameters, and other state below `extra_state`; a file with all state in one dict keeps its own names.
#[derive(Debug)]
pub struct RankCheckpoint {
    storage: Arc<dyn Storage>,
    source: Source,
    folder: RankFolder,
    findings: Findings,
    notes: Vec<String>,
    has_shards: bool,
}

impl RankCheckpoint {
    /// Opens the files of a folder. No tensor is read but copies that have no checksums, up to 64 MiB.
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        folder: RankFolder,
        copies: u64,
    ) -> Result<Self, CheckpointError> {
        if let Some(problem) = &folder.problem {
            let message = format!("the files of ranks are not complete: {problem}");
            return Err(CheckpointError::NotACheckpoint { message });
        }
        let mut all = Vec::new();
        let mut parts = Vec::new();
        for group in &folder.groups {
            let files = Files::open(storage, group, folder.world, parts.len()).await?;
            refuse_local_state(&files)?;
            parts.extend(files.ranks.values().map(|file| file.source.clone()));
            all.push(files);
        }
        let mut copies = Copies::new(copies);
        let mut findings = Findings::default();
        let mut notes = folder.notes.clone();
        let merged = merge(&all, &parts, &mut copies, &mut findings, &mut notes).await;
        let source = merged.map_err(of_job)?;
        if !findings.differing.is_empty() {
            let names: Vec<_> = findings.differing.iter().cloned().collect();
            notes.push(format!(
                "ranks have different copies, and those of the lowest rank are taken: {}",
                first_of(&names)
            ));
        }
        if findings.by_rank > 0 {
            let count = counted(findings.by_rank, "value");
            notes.push(format!("{count} differing between ranks: each is kept below `rank_R`"));
        }
        if copies.left_out > 0 {
            let count = counted(copies.left_out, "copy");
            notes.push(format!(
                "not compared, for lack of checksums: {count}; a deep check does it"
            ));
        }
        let storage = Arc::clone(storage);
        let has_shards = all.iter().any(|files| !files.places.is_empty());
        Ok(Self { storage, source, folder, findings, notes, has_shards })
    }

    /// The merged checkpoint.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Whether these are the files of ranks, and not others with such names: those of verl and accelerate are by
    /// their names.
    pub(crate) fn is_of_ranks_alone(&self) -> bool {
        self.has_shards || self.folder.program != Program::Torch
    }

    /// Observations about what was merged.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// An error of a job as one of a checkpoint.
fn of_job(error: JobError) -> CheckpointError {
    match error {
        JobError::Checkpoint(error) => error,
        error => CheckpointError::Plugin(Box::new(Error::from(error))),
    }
}

/// Refuses flat parameters, of which nothing has the names and shapes.
fn refuse_local_state(files: &Files) -> Result<(), CheckpointError> {
    let flat = files.all.keys().find(|fqn| fqn.ends_with("_flat_param"));
    let Some(flat) = flat else { return Ok(()) };
    let problem = format!(
        "{flat:?} is a flat parameter of LOCAL_STATE_DICT, and no file has the names and shapes of the \
         parameters in it: load it with the program that saved it, and save a SHARDED_STATE_DICT"
    );
    Err(bad(files.file(0), problem))
}

async fn merge(
    all: &[Files],
    parts: &[Source],
    copies: &mut Copies,
    findings: &mut Findings,
    notes: &mut Vec<String>,
) -> Result<Source, JobError> {
    let mut view = Assembled::builder(parts, &JobOptions::default()).await?;
    view.format(NAME);
    for files in all {
        let mut merge = Merge { files, copies, findings };
        let state = files.group.name.state;
        let numbers = match state {
            State::Optimizer => optimizer::numbers(files).await?,
            _ => None,
        };
        let Some(numbers) = numbers else {
            if matches!(state, State::Optimizer | State::Whole) {
                optimizer::check_steps(&mut merge).await?;
            }
            merge.add(&mut view, |_| false).await?;
            continue;
        };
        let is_model = |other: &&Files| {
            let name = other.group.name;
            name.state == State::Model && name.index == files.group.name.index
        };
        match renaming(files, numbers, all.iter().find(is_model), merge.copies).await? {
            Ok(renaming) => {
                merge.add(&mut view, optimizer::is_numbered).await?;
                renaming.add(&mut merge, &mut view).await?;
            }
            Err(reason) => notes.push(format!(
                "the state of the optimizer is left out, because it has numbers for parameters: {reason}"
            )),
        }
    }
    view.finish()
}

/// The names of the numbers in an optimizer, or the reason that they are not known.
async fn renaming<'f>(
    files: &'f Files,
    numbers: Vec<Vec<u64>>,
    model: Option<&Files>,
    copies: &mut Copies,
) -> Result<Result<Renaming<'f>, String>, CheckpointError> {
    let Some(model) = model else {
        return Ok(Err("there is no model beside it, which has the names".to_owned()));
    };
    let count = numbers.iter().map(Vec::len).sum();
    let mut reason = "the model has no parameters".to_owned();
    for names in Names::candidates(model, count, copies).await? {
        match Renaming::new(files, numbers.clone(), model, names) {
            Ok(found) => return Ok(Ok(found)),
            Err(other) => reason = other,
        }
    }
    Ok(Err(reason))
}

#[async_trait]
impl FrameworkCheckpoint for RankCheckpoint {
    fn stored(&self) -> Option<&Source> {
        None
    }

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
        let states = self.folder.groups.iter().map(|group| group.name.root());
        PluginReport::new(
            NAME,
            RankFilesReport {
                program: self.folder.program.title(),
                ranks: self.folder.world,
                files: self.folder.files().count(),
                states: states.filter(|root| !root.is_empty()).collect(),
                differing: self.findings.differing.iter().cloned().collect(),
                by_rank: self.findings.by_rank,
            },
        )
    }

    /// Each file is verified as the archive that it is; a deep check also compares all copies.
    async fn verify(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error> {
        let mut report = VerifyReport::default();
        report.deep = deep;
        report.files = self.folder.files().count();
        for file in self.folder.files() {
            let key = Key::new(file).map_err(StorageError::from)?;
            let source = Source::torch_save(Arc::clone(&self.storage), key);
            match dcp_jobs::verify::verify(&source, deep, job).await {
                Ok(one) => {
                    report.bytes_checked += one.bytes_checked;
                    report.problems.extend(one.problems);
                    report.notes.extend(one.notes);
                }
                Err(JobError::Checkpoint(CheckpointError::Format(error))) => {
                    let mut problem = Problem::default();
                    problem.kind = ProblemKind::Corrupt;
                    problem.file = Some(file.to_owned());
                    problem.message = error.in_file(file, 0).to_string();
                    report.problems.push(problem);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let metadata = self.source.metadata().await?;
        report.tensors = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some()).count();
        report.objects = metadata.len() - report.tensors;
        NAME.clone_into(&mut report.format);
        let notes = match deep && report.problems.is_empty() && job.is_coordinator() {
            true => Self::open(&self.storage, self.folder.clone(), u64::MAX).await?.notes,
            false => self.notes.clone(),
        };
        report.notes.extend(notes);
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

/// Opens a folder with the usual limit on what is read.
pub(crate) async fn open_folder(
    storage: &Arc<dyn Storage>,
    folder: RankFolder,
) -> Result<RankCheckpoint, CheckpointError> {
    RankCheckpoint::open(storage, folder, BYTES_MAX).await
}
