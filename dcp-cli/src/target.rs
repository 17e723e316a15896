//! From what was typed to a place to write.

use std::path::Path;
use std::sync::Arc;

use dcp::convert::{ConvertError, Source, Target};
use dcp::core::{Key, Storage, StorageErrorKind, StorageExt};
use dcp::formats::detect::{Detected, Detection, detect};
use dcp::formats::folder::{FolderKind, FolderNames, OLMO_MODEL};
use dcp::megatron::TRACKER;
use dcp::{Access, DcpWriter};
use futures_util::StreamExt;

use crate::absent_storage::AbsentStorage;
use crate::failure::{Exit, Failure};
use crate::folder::{is_dcp, is_megatron, model_file, split};
use crate::incomplete_save::Unfinished;
use crate::open::registry;
use crate::rollback;

/// A place to write to, or of a dry run to look at: that one makes nothing.
fn place_to_write(uri: &str, dry_run: bool) -> Result<Arc<dyn Storage>, Failure> {
    let access = if dry_run { Access::Read } else { Access::Write };
    match registry().open(uri, access) {
        Ok(storage) if dry_run => Ok(storage),
        #[cfg(test)]
        Ok(storage) => Ok(crate::every_operation::faulty(rollback::watch(storage))),
        #[cfg(not(test))]
        Ok(storage) => Ok(rollback::watch(storage)),
        Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
            Ok(Arc::new(AbsentStorage))
        }
        Err(_) if Path::new(uri).is_file() => Err(Failure::new(
            Exit::Usage,
            format!("{uri:?} is a file, and a directory is to be written"),
        )
        .hint("name another place, or a format of one file: --to safetensors or torch-save")),
        Err(error) => Err(Failure::from(error).context(format!("cannot write to {uri:?}"))),
    }
}

/// A file to write. One that is there is an error, unless it may be replaced.
pub(crate) async fn file(uri: &str, overwrite: bool, dry_run: bool) -> Result<Target, Failure> {
    if registry().open(uri, Access::Read).is_ok() {
        let base = uri.trim_end_matches('/');
        return Err(Failure::new(Exit::Usage, format!("{uri:?} is a directory"))
            .hint(format!("name a file, such as {base}/model.safetensors")));
    }
    if is_special(uri) {
        let message = format!("{uri:?} is a device, a FIFO or a socket, which is never replaced");
        return Err(Failure::new(Exit::Usage, message).hint("name a regular file, or a new one"));
    }
    let no_name = || Failure::new(Exit::Usage, format!("{uri:?} is no name for a file"));
    let (parent, name) = split(uri).ok_or_else(no_name)?;
    let key = Key::new(name).map_err(|_| no_name())?;
    let storage = place_to_write(&parent, dry_run)?;
    if !overwrite && storage.contains(&key).await? {
        return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
    }
    Ok(Target::new(storage, key).overwriting(overwrite))
}

/// Whether there is something that is neither a file nor a directory.
fn is_special(uri: &str) -> bool {
    let path = uri.strip_prefix("file://").unwrap_or(uri);
    std::fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
}

/// A directory to write plain files into, where there may be others, but no checkpoint of
/// PyTorch's format: that is what the directory would be taken for. For `model` files, which make
/// the directory itself a checkpoint, there must be none in a step of OLMo-core either.
pub(crate) async fn folder(
    uri: &str,
    model: bool,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Failure> {
    let storage = place_to_write(uri, dry_run)?;
    refuse_megatron(uri, &*storage).await?;
    if model {
        refuse_run(uri, &*storage).await?;
    }
    refuse_unfinished(uri, &storage, &[]).await?;
    let detection = detect(&storage).await?;
    let mut kinds = [&detection.kind].into_iter().chain(&detection.also);
    let is_dcp = |kind: &&Detected| {
        matches!(
            kind,
            Detected::Dcp | Detected::DcpRankLocal { .. } | Detected::DcpUnfinished { .. }
        )
    };
    match kinds.find(is_dcp) {
        Some(kind) => Err(would_stay(uri, &format!("the directory {kind}"))),
        None if model => refuse_step(uri, &detection).map(|()| storage),
        None => Ok(storage),
    }
}

fn refuse_step(uri: &str, detection: &Detection) -> Result<(), Failure> {
    if detection.checkpoints.iter().any(|key| key.as_str() == OLMO_MODEL) {
        return Err(would_stay(uri, &format!("it has a checkpoint in {OLMO_MODEL}")));
    }
    Ok(())
}

/// The refusal to make a directory two checkpoints at once.
fn would_stay(uri: &str, what: &str) -> Failure {
    Failure::new(Exit::Usage, format!("there is another checkpoint at {uri:?}: {what}"))
        .hint("choose another directory; --overwrite replaces only what has the same format")
}

/// A directory to write a checkpoint into. A checkpoint that is there is an error, unless it may
/// be replaced; one of another format always is.
pub(crate) async fn directory(
    uri: &str,
    overwrite: bool,
    dry_run: bool,
) -> Result<DcpWriter, Failure> {
    let storage = place_to_write(uri, dry_run)?;
    refuse_megatron(uri, &*storage).await?;
    refuse_run(uri, &*storage).await?;
    refuse_unfinished(uri, &storage, &[FolderKind::Dcp]).await?;
    if !overwrite && is_dcp(&*storage).await? {
        return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
    }
    refuse_step(uri, &detect(&storage).await?)?;
    if let Some(key) = model_file(&*storage).await? {
        return Err(would_stay(uri, &of_model(&key)));
    }
    Ok(DcpWriter::builder(storage).overwrite(overwrite).build())
}

/// A directory to write a checkpoint of Megatron-Core into. One of its format that is there is an
/// error, unless it may be replaced; one of another format always is.
pub(crate) async fn megatron(
    uri: &str,
    overwrite: bool,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Failure> {
    let storage = place_to_write(uri, dry_run)?;
    refuse_run(uri, &*storage).await?;
    refuse_unfinished(uri, &storage, &[FolderKind::Dcp, FolderKind::Megatron]).await?;
    let (is_megatrons, is_dcp) = (is_megatron(&*storage).await?, is_dcp(&*storage).await?);
    match (is_megatrons, is_dcp) {
        (true, true) if !overwrite => {
            return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
        }
        (true, false) => return Err(would_stay(uri, "it is one of an older Megatron-Core")),
        // What an unfinished save of this format left is replaced by one that finishes.
        (false, true) if unfinished(uri, &storage).await?.is_none() => {
            return Err(would_stay(uri, "it is one of PyTorch's format"));
        }
        _ => {}
    }
    refuse_step(uri, &detect(&storage).await?)?;
    if let Some(key) = model_file(&*storage).await? {
        return Err(would_stay(uri, &of_model(&key)));
    }
    Ok(storage)
}

/// What is said of a file that makes a directory a model.
fn of_model(key: &Key) -> String {
    format!("{key:?} is of a Hugging Face model")
}

/// What an unfinished save left: of which format, and what shows it.
async fn unfinished(
    uri: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Option<(FolderKind, String)>, Failure> {
    let mut names = FolderNames::new();
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        names.add(meta?.key.as_str());
    }
    let name = split(uri).map_or_else(String::new, |(_, name)| name);
    let told = names.verdict(&name).filter(|verdict| verdict.inner.is_none());
    if let Some(verdict) = told
        && let Some(problem) = verdict.problem
    {
        return Ok(Some((verdict.kind, problem)));
    }
    // Since Megatron-Core 0.19 only the index tells.
    let source = Source::dcp(Arc::clone(storage), true);
    if !is_dcp(&**storage).await? || source.metadata().await.is_err() {
        return Ok(None);
    }
    let found = Unfinished::find(&**storage, &source).await?;
    Ok(found.map(|found| (FolderKind::Megatron, found.problem("the folder"))))
}

/// Refuses a directory with what an unfinished save left, unless it is one of these formats, of
/// which a save that finishes replaces it.
async fn refuse_unfinished(
    uri: &str,
    storage: &Arc<dyn Storage>,
    replaced: &[FolderKind],
) -> Result<(), Failure> {
    let Some((kind, problem)) = unfinished(uri, storage).await? else { return Ok(()) };
    let own = match kind {
        FolderKind::Megatron | FolderKind::OlmoStep => replaced.contains(&kind),
        // These are told from what may stay where each of them is written.
        _ => true,
    };
    if own {
        return Ok(());
    }
    let message = format!("{uri:?} has what an unfinished save left ({kind}): {problem}");
    Err(Failure::new(Exit::Usage, message).hint(
        "choose another directory, remove this one, or finish the save: run it again with \
         --overwrite",
    ))
}

/// Refuses a directory with a checkpoint of Megatron-Core in it.
async fn refuse_megatron(uri: &str, storage: &dyn Storage) -> Result<(), Failure> {
    if is_megatron(storage).await? {
        return Err(would_stay(uri, "it is one of Megatron-Core"));
    }
    Ok(())
}

/// Refuses the folder of a run of Megatron-LM: a checkpoint in it would be taken for the run.
async fn refuse_run(uri: &str, storage: &dyn Storage) -> Result<(), Failure> {
    let is_run = |key: &str| {
        let iteration = key.strip_prefix("iter_").and_then(|rest| rest.split_once('/'));
        key == TRACKER
            || iteration.is_some_and(|(number, _)| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
    };
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        if is_run(key.as_str()) {
            let message = format!("{uri:?} is the folder of a run of Megatron-LM: there is {key}");
            let base = uri.trim_end_matches('/');
            return Err(Failure::new(Exit::Usage, message).hint(format!(
                "name a folder in it, such as {base}/release or {base}/iter_0000001, or another \
                 directory"
            )));
        }
    }
    Ok(())
}
