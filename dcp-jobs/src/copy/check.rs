//! Compares a copy with what its formats and its own checksums say.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::format::Examined;
use dcp_core::registry::Access;
use dcp_core::text::Quoted;

use crate::checkpoint::opener::{Need, Opener};
use crate::checkpoint::uri::below;
use crate::copy::Comparing;
use crate::error::{Error, ErrorKind};
use crate::integrity::{Problem, ProblemKind};
use crate::listing::examined;
use crate::options::JobOptions;
use crate::source::Source;

/// The problem of a copy.
#[derive(Debug)]
pub(super) struct Wrong {
    /// That of the first checkpoint.
    pub(super) error: Error,
    /// The folders of checkpoints that are not whole.
    pub(super) folders: BTreeSet<String>,
}

impl<E: Into<Error>> From<E> for Wrong {
    fn from(error: E) -> Self {
        Self { error: error.into(), folders: BTreeSet::new() }
    }
}

/// Checks the checkpoints at the target: that each has the files which its format needs, and the bytes of
/// its own checksums. The bytes that were read from the source may have been damaged on the way.
pub(super) async fn check(
    opener: &Opener,
    target: &str,
    folders: BTreeSet<String>,
    compare: Comparing,
    job: &JobOptions,
) -> Result<(), Wrong> {
    if job.dry_run {
        return Ok(());
    }
    if let Some(group) = &job.group {
        // Rank 0 has copied the indices.
        group.all_gather(Vec::new().into()).await?;
    }
    let mut silent = job.clone();
    silent.progress = None;
    let opener = opener.unheard().need(Need::Readable);
    let mut checked = BTreeSet::new();
    let mut wrong: Option<Wrong> = None;
    for folder in folders {
        let uri = if folder.is_empty() { target.to_owned() } else { below(target, &folder) };
        // A file may only have the name of an index.
        let Ok(checkpoint) = opener.open(&uri).await else { continue };
        // The rest of a save is copied as what it is.
        if !checked.insert(checkpoint.place.clone()) || checkpoint.unfinished.is_some() {
            continue;
        }
        let source = match checkpoint.of_framework() {
            // The bytes are those of PyTorch's format, on which the framework builds.
            Some(_) => Source::dcp(Arc::clone(&checkpoint.storage), true),
            None => checkpoint.source.clone(),
        };
        let deep = compare == Comparing::Bytes;
        let report = match crate::verify::verify(&source, deep, &silent).await {
            Err(error) => match Error::from(error) {
                // One without an index of PyTorch.
                error if error.kind() == ErrorKind::NotACheckpoint => continue,
                error => return Err(error.into()),
            },
            Ok(report) => report,
        };
        let is_lost = |problem: &Problem| {
            use ProblemKind::{ChangedFile, Corrupt, MissingFile, ShortFile};
            matches!(problem.kind, MissingFile | ShortFile | ChangedFile | Corrupt)
        };
        if !job.is_coordinator() {
            continue;
        }
        let mut lost = report.problems.into_iter().find(is_lost);
        if lost.is_none() && checkpoint.is_folder {
            lost = problem_of(checkpoint.examined().await?);
        }
        if lost.is_none() {
            lost = problem_around(&opener, target, &folder).await?;
        }
        if let Some(Problem { file, message, .. }) = lost {
            let file = file.map_or(String::new(), |file| format!("{}: ", Quoted(&file)));
            let message = format!("the copy {uri:?} is not a whole checkpoint: {file}{message}");
            let error = Error::new(ErrorKind::Damaged, message).with_hint(
                "`Verification::deep` of the source says whether it is whole; if it is, remove the copy \
                 and copy again",
            );
            wrong.get_or_insert_with(|| error.into()).folders.insert(folder);
        }
    }
    wrong.map_or(Ok(()), Err)
}

/// Returns why the step around the checkpoint in `folder` is not complete, such as that of OLMo-core.
async fn problem_around(
    opener: &Opener,
    target: &str,
    folder: &str,
) -> Result<Option<Problem>, Error> {
    let (step, inner) = match folder.rsplit_once('/') {
        Some((step, inner)) => (below(target, step), inner),
        None if folder.is_empty() => return Ok(None),
        None => (target.to_owned(), folder),
    };
    let storage = opener.storages().open(&step, Access::Read).await?;
    let place = opener.look(&step, &storage).await?;
    let found = opener.formats.classify(&place.listing().root());
    if found.is_none_or(|found| found.found.inner.as_deref() != Some(inner)) {
        return Ok(None);
    }
    Ok(problem_of(examined(&opener.formats, &place).await?))
}

/// The problem of a checkpoint that its reader does not open all the same.
fn problem_of(examined: Examined) -> Option<Problem> {
    let mut problem = Problem::default();
    problem.message = examined.problem.filter(|_| !examined.opens)?;
    Some(problem)
}
