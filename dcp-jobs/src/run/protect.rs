//! Checks before a deletion begins: each complete checkpoint is looked at by itself, and what a kept one
//! needs stays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::format::{
    Evidence, Examined, Folder, FolderMatch, FormatRegistry, Listing, Place, Recognized,
};
use dcp_core::storage::ObjectMeta;
use dcp_core::text::Quoted;
use dcp_core::{CheckpointMetadata, Key, Storage, StorageError};
use dcp_formats::find_incomplete_files_where;
use dcp_formats::hf::{Weights, model_is_whole};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::error::{Error, ErrorKind, Reasons};
use crate::listing::examine_match;

use super::look::{Look, Seen};
use super::model_left::model_opens;
use super::notes::Note;
use super::order::{StepOrder, describe, disagreement};
use super::prune::PrunePlan;
use super::retention::{Decision, Retention};
use super::sidecar::names_folder;
use super::state_files::{compared_name, latest_problem, unusable};

/// The names of folders that have the state of an optimizer, without a model; a number may follow.
const OPTIMIZERS: [&str; 3] = ["optim", "optimizer", "optimizers"];
/// The ending of files that are a model without an index.
const SHARD_ENDING: &str = ".safetensors";
/// The beginning of the names of those that each rank writes.
const RANK_SHARDS: &str = "shard-";
/// Checkpoints whose problems an error lists.
const PROBLEMS_MAX: usize = 8;

/// Examines every complete checkpoint by itself. A listing examines one for all that have files of the
/// same names and lengths.
pub(super) async fn examine(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    steps: &mut [Seen],
) -> Result<(), StorageError> {
    let complete = steps.iter_mut().filter(|one| one.step.is_complete());
    let examined = complete.map(|one| async move {
        match look_at(storage, formats, &one.step.name).await {
            Ok((found, files)) => {
                if let Some(description) = found.unsupported {
                    one.step.complete = None;
                    one.step.problem = Some(format!("it {description}"));
                } else if found.problem.is_some() {
                    one.step.complete = if found.opens { None } else { Some(false) };
                    one.step.problem = found.problem;
                    one.step.strays = found.strays.iter().map(ToString::to_string).collect();
                }
                // The others may have what only has the name of such a file here.
                for stray in &found.strays {
                    let name = compared_name(stray.as_str(), 1);
                    one.state_files.retain(|file| Some(file) != name.as_ref());
                }
                let (storage, name) = (&**storage, &one.step.name);
                let unusable = unusable(storage, name, &files).await?;
                one.state_files.retain(|file| !unusable.contains(&**file));
                let latest = latest_problem(storage, name, &files).await?;
                if let (true, Some(problem)) = (one.step.is_complete(), latest) {
                    one.step.count_as_unknown(problem);
                }
            }
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => one.step.count_as_unknown(error_chain(&error)),
        }
        Ok(())
    });
    let parallelism = usize::from(storage.capabilities().parallelism.clamp(1, 16));
    let examined: Vec<_> = examined.collect();
    stream::iter(examined).buffer_unordered(parallelism).try_collect().await
}

/// Counts a checkpoint as unknown that lacks a file which a resume needs and all complete ones before it
/// have: a save that died between two files leaves what no format can tell from a whole checkpoint.
/// `steps` are in the order in which newer ones come later.
pub(super) fn compare_with_older(steps: &mut [&mut Seen]) {
    let mut common: BTreeMap<&'static str, BTreeSet<String>> = BTreeMap::new();
    for one in steps.iter_mut().filter(|one| one.step.is_complete()) {
        let Some(older) = common.get_mut(one.step.format) else {
            common.insert(one.step.format, one.state_files.clone());
            continue;
        };
        if let Some(file) = older.difference(&one.state_files).next() {
            let problem =
                format!("it has no usable {file:?}, which the complete ones before it have");
            one.step.count_as_unknown(problem);
        } else {
            older.retain(|file| one.state_files.contains(file));
        }
    }
}

async fn look_at(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    name: &str,
) -> Result<(Examined, Vec<ObjectMeta>), StorageError> {
    let listed = storage.list(Some(&Key::new(name)?));
    let files: Vec<_> = listed.take(Listing::OBJECTS_MAX).try_collect().await?;
    let found = examine_files(storage, formats, name, &files).await?;
    Ok((found, files))
}

/// Examines the checkpoint in the folder `name`, which has these files, as the only one of its run.
pub(super) async fn examine_files(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    name: &str,
    files: &[ObjectMeta],
) -> Result<Examined, StorageError> {
    let place = Place::folder(storage, Listing::new(files.iter().cloned()));
    let Some(found) = place.listing().root().folder(name).and_then(|one| formats.classify(&one))
    else {
        return Ok(Examined::new(Some("it is no checkpoint".to_owned())));
    };
    examine_match(formats, &found, &place.below(name)?).await
}

/// Returns why the rest of a save, in the folder `name` with these files, is worth more than the space that it
/// takes: whole weights beside a damaged file, what a committed step holds in a folder of its own, or a whole checkpoint
/// inside that is not the state of an optimizer alone, such as the model of accelerate.
pub(super) async fn worth_keeping(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    name: &str,
    files: &[ObjectMeta],
) -> Result<Option<String>, StorageError> {
    let place = Place::folder(storage, Listing::new(files.iter().cloned()));
    let step = place.below(name)?;
    if model_is_whole(&step, Weights::Any).await? || shards_are_whole(formats, &step).await? {
        return Ok(Some("its model is whole".to_owned()));
    }
    if let Some(found) = formats.classify(&step.listing().root())
        && let Some(reason) = whole_inside(formats, &found, &step).await?
    {
        return Ok(Some(reason));
    }
    let root = place.listing().root();
    let is_part =
        |folder: &Folder<'_>, name: &str| is_of_optimizer(name) || formats.owns(folder, name);
    let mut folders: Vec<_> = root.folder(name).into_iter().collect();
    while let Some(folder) = folders.pop() {
        for inner in folder.folders().filter(|inner| !is_part(&folder, inner.name())) {
            let found = formats.classify(&inner).filter(|found| found.found.is_checkpoint());
            if let Some(found) = found {
                let place = place.below(inner.path())?;
                let examined = examine_match(formats, &found, &place).await?;
                if examined.problem.is_none()
                    || examined.opens
                    || model_is_whole(&place, Weights::Any).await?
                {
                    let inner = Quoted(inner.path());
                    return Ok(Some(format!("{inner} in it is a whole checkpoint")));
                }
            }
            folders.push(inner);
        }
    }
    Ok(None)
}

/// Returns what a committed step has in the folder of its checkpoint: all of it, such as the model and optimizer of
/// OLMo-core in a step that lost a file of its trainer, or its model. Without its last file the save of the step did not
/// finish.
async fn whole_inside(
    formats: &FormatRegistry,
    found: &FolderMatch,
    step: &Place,
) -> Result<Option<String>, StorageError> {
    let Some(inner) =
        found.found.inner.as_ref().filter(|_| found.found.evidence == Evidence::Index)
    else {
        return Ok(None);
    };
    let place = step.below(inner)?;
    let Some(stored) = formats.classify(&place.listing().root()) else { return Ok(None) };
    let examined = examine_match(formats, &stored, &place).await?;
    let root = step.listing().root();
    let Some(index) = examined.index.as_deref().filter(|_| examined.problem.is_none()) else {
        let is_finished = formats.unfinished(&root, &CheckpointMetadata::new()).is_none();
        let opens = is_finished && model_opens(formats, &place).await?;
        return Ok(opens.then(|| format!("the model of its {} still opens", Quoted(inner))));
    };
    let problem = found.found.problem.as_deref().unwrap_or_default();
    let unfinished = formats.unfinished(&root, index);
    Ok(unfinished.is_none().then(|| format!("its {} is whole: {problem}", Quoted(inner))))
}

/// Whether the safetensors files of a folder are a model that needs no index: no number of a series is missing, and
/// each file is whole. Beside the shards of ranks, others are none of theirs.
async fn shards_are_whole(formats: &FormatRegistry, step: &Place) -> Result<bool, StorageError> {
    let folder = step.listing().root();
    let is_whole =
        |found: &Recognized| found.evidence == Evidence::Files && found.problem.is_none();
    let models = formats.formats().iter().filter(|format| format.info().model_folders);
    if !models.filter_map(|format| format.recognize(&folder)).any(|found| is_whole(&found)) {
        return Ok(false);
    }
    let is_direct = |key: &Key| !key.as_str().contains('/') && key.as_str().ends_with(SHARD_ENDING);
    let of_rank = |key: &Key| is_direct(key) && key.as_str().starts_with(RANK_SHARDS);
    let by_ranks = step.listing().objects().iter().any(|meta| of_rank(&meta.key));
    // Under other names they may be of the user, in the folder of a save that did not finish.
    let is_model =
        |found: &FolderMatch| found.format.info().model_folders && is_whole(&found.found);
    if !by_ranks && !formats.classify(&folder).is_some_and(|found| is_model(&found)) {
        return Ok(false);
    }
    let is_shard = |key: &Key| if by_ranks { of_rank(key) } else { is_direct(key) };
    Ok(find_incomplete_files_where(step, is_shard).await?.is_empty())
}

/// Whether a folder has the state of an optimizer, by its name, such as accelerate's `optimizer_0`.
fn is_of_optimizer(name: &str) -> bool {
    let word = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('_');
    OPTIMIZERS.contains(&word)
}

/// Fails where nothing must be deleted: a policy compares a metric that no checkpoint has, numbers and
/// times disagree and the caller has not chosen, or no checkpoint is whole.
pub(super) fn refuse(
    look: &Look,
    plan: &PrunePlan,
    policy: Option<&dyn Retention>,
    by: Option<StepOrder>,
) -> Result<(), Error> {
    let Some(policy) = policy else { return Ok(()) };
    let complete = || look.steps.iter().map(|one| &one.step).filter(|step| step.is_complete());
    let others = look
        .steps
        .iter()
        .map(|one| &one.step)
        .filter(|step| !step.deleting && !step.format.is_empty());
    if complete().next().is_none() && others.clone().count() > 1 {
        let problems = others.rev().take(PROBLEMS_MAX).map(|step| {
            let problem = step.problem.as_deref().unwrap_or("it is not complete");
            format!("{}: {problem}", step.name)
        });
        let message = "no checkpoint of the run is complete, so nothing is deleted";
        let error = Error::new(ErrorKind::Damaged, message)
            .with_hint("`Verification::deep` lists all that is wrong with a checkpoint");
        return Err(match Reasons::new(problems.collect()) {
            Some(reasons) => error.because(reasons),
            None => error,
        });
    }
    for metric in policy.metrics() {
        let known = |name: &String| complete().any(|step| step.metrics.contains_key(name));
        if complete().next().is_none() || known(&metric) {
            continue;
        }
        let mut names: Vec<_> = complete().flat_map(|step| step.metrics.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
        let hint = match &*names {
            [] => "no metrics are recorded in this run: see `KeepBest`".to_owned(),
            names => format!("the checkpoints have {}", names.join(", ")),
        };
        let message = format!("no checkpoint of the run has the metric {metric:?}");
        return Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint));
    }
    if !plan.deleted().any(|step| step.is_complete()) {
        return Ok(());
    }
    match by {
        Some(StepOrder::Step) => Ok(()),
        Some(StepOrder::Time) => match complete().find(|step| step.modified.is_none()) {
            Some(step) => {
                let message = format!("nothing says when {:?} was written", step.name);
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint("use `StepOrder::Step`"))
            }
            None => Ok(()),
        },
        None => match disagreement(complete()) {
            Some(pair) => Err(Error::new(ErrorKind::Undecided, describe(pair)).with_hint(
                "`StepOrder::Time` keeps those that were written last, as after a start from scratch; \
                 `StepOrder::Step` keeps the highest steps, as where files were copied",
            )),
            None => Ok(()),
        },
    }
}

/// Keeps the best checkpoint by the newest notes of the trainer, and all complete ones where the newest
/// note does not say which one that is.
pub(super) fn keep_best(look: &Look, plan: &mut PrunePlan, by: Option<StepOrder>) {
    let unclear = look.notes.unclear(&look.steps, by);
    let newest = look.notes.newest();
    let mut holds = false;
    for one in plan.steps.iter_mut().filter(|one| one.decision.delete && !one.step.deleting) {
        if !one.step.is_complete() {
            // Its weights may be whole, and it may name itself.
            if let Some((_, problem)) = unclear.iter().find(|(note, _)| note.is_of(&one.step.name))
            {
                one.decision = Decision::keep(format!("it may be the best one: {problem}"));
            }
            continue;
        }
        let names = |paths: &[String]| paths.iter().any(|path| names_folder(path, &one.step.name));
        let is_of =
            |(note, paths): &&(&Note, &[String])| note.is_of(&one.step.name) && !paths.is_empty();
        if let Some((note, _)) = newest.iter().find(|(_, paths)| names(paths)) {
            let named_by = Quoted(note.of_step.as_ref().unwrap_or(&note.file));
            one.decision = Decision::keep(format!("{named_by} names it as the best"));
        } else if let Some((note, _)) = newest.iter().find(is_of) {
            // Without it, the next deletion does not know the best one.
            let file = Quoted(&note.file);
            one.decision = Decision::keep(format!("{file} is the newest that names the best one"));
        } else if let Some((_, problem)) = unclear.first() {
            one.decision = Decision::keep(format!("it may be the best one: {problem}"));
            holds = true;
        }
    }
    if holds {
        plan.unclear_notes = unclear.into_iter().map(|(_, problem)| problem).collect();
    }
}

/// Keeps what kept checkpoints need: the best one that a trainer has noted, and files that are theirs,
/// too.
pub(super) fn keep_needed(look: &Look, plan: &mut PrunePlan) {
    loop {
        let is_kept: Vec<_> = plan.steps.iter().map(|one| !one.decision.delete).collect();
        let kept =
            || look.steps.iter().zip(&is_kept).filter(|(_, kept)| **kept).map(|(one, _)| one);
        let mut changed = false;
        for (one, planned) in look.steps.iter().zip(&mut plan.steps) {
            if !planned.decision.delete {
                continue;
            }
            let reason = kept().find_map(|other| need(other, one));
            if let Some(reason) = reason {
                planned.decision = Decision::keep(reason);
                changed = true;
            }
        }
        if !changed {
            return;
        }
    }
}

/// Returns why `kept` needs `one`.
fn need(kept: &Seen, one: &Seen) -> Option<String> {
    let name = &kept.step.name;
    if kept.best.iter().any(|best| names_folder(best, &one.step.name)) {
        return Some(format!("{name:?} names it as the best"));
    }
    if kept.linked.contains(&one.step.name) {
        return Some(format!("links in {name:?} lead into it"));
    }
    if one.identity.is_some() && kept.identity == one.identity {
        return Some(format!("its files are those of {name:?}, which stays"));
    }
    None
}
