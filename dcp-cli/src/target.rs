//! From what was typed to a place to write.

use std::path::Path;
use std::sync::Arc;

use dcp::convert::{ConvertError, Target};
use dcp::core::{Key, Storage, StorageErrorKind, StorageExt};
use dcp::formats::detect::{Detected, Detection, detect};
use dcp::formats::folder::OLMO_MODEL;
use dcp::megatron::TRACKER;
use dcp::{Access, DcpWriter};
use futures_util::StreamExt;

use crate::failure::{Exit, Failure};
use crate::folder::{is_dcp, is_megatron, model_file, split};
use crate::nowhere::Nowhere;
use crate::open::registry;
use crate::undo;

/// A place to write to, or of a dry run to look at: that one makes nothing.
fn place_to_write(uri: &str, dry_run: bool) -> Result<Arc<dyn Storage>, Failure> {
    let access = if dry_run { Access::Read } else { Access::Write };
    match registry().open(uri, access) {
        Ok(storage) if dry_run => Ok(storage),
        Ok(storage) => Ok(undo::watch(storage)),
        Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
            Ok(Arc::new(Nowhere))
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
    let no_name = || Failure::new(Exit::Usage, format!("{uri:?} is no name for a file"));
    let (parent, name) = split(uri).ok_or_else(no_name)?;
    let key = Key::new(name).map_err(|_| no_name())?;
    let storage = place_to_write(&parent, dry_run)?;
    if !overwrite && storage.contains(&key).await? {
        return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
    }
    Ok(Target::new(storage, key).overwriting(overwrite))
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
    if !overwrite && is_dcp(&*storage).await? {
        return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
    }
    refuse_step(uri, &detect(&storage).await?)?;
    if let Some(key) = model_file(&*storage).await? {
        return Err(would_stay(uri, &format!("{key:?} is of a Hugging Face model")));
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
    let (is_megatrons, is_dcp) = (is_megatron(&*storage).await?, is_dcp(&*storage).await?);
    match (is_megatrons, is_dcp) {
        (true, true) if !overwrite => {
            return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
        }
        (true, false) => return Err(would_stay(uri, "it is one of an older Megatron-Core")),
        (false, true) => return Err(would_stay(uri, "it is one of PyTorch's format")),
        _ => {}
    }
    refuse_step(uri, &detect(&storage).await?)?;
    if let Some(key) = model_file(&*storage).await? {
        return Err(would_stay(uri, &format!("{key:?} is of a Hugging Face model")));
    }
    Ok(storage)
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
