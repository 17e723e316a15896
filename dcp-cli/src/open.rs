//! From what was typed to a checkpoint to read or a place to write.

use std::path::Path;
use std::sync::Arc;

use dcp::convert::{ConvertError, Source, Target};
use dcp::core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind, StorageExt};
use dcp::formats::detect::{Detected, Detection, detect};
use dcp::formats::folder::OLMO_MODEL;
use dcp::formats::hf::INDEX_ENDING;
use dcp::{Access, DcpWriter, StorageRegistry};
use futures_util::StreamExt;

use crate::failure::{Exit, Failure};
pub(crate) use crate::interrupt::run;
use crate::nowhere::Nowhere;
use crate::output::Output;
use crate::undo;

/// How whole a checkpoint has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is only looked at, as far as it can be.
    Readable,
    /// All of it is taken somewhere.
    Whole,
}

impl Need {
    fn tolerant(self) -> bool {
        self == Self::Readable
    }
}

/// Opens a checkpoint to read: a directory, or one file of safetensors or `torch.save`, which are
/// told from each other by what they begin with.
pub(crate) async fn source(uri: &str, need: Need) -> Result<Source, Failure> {
    let directory = StorageRegistry::with_defaults().open(uri, Access::Read);
    let storage = match directory {
        Ok(storage) => storage,
        Err(error) => {
            return match file(uri).await {
                Some((storage, key)) => file_source(uri, storage, key, need).await,
                None => Err(cannot_open(uri, &error)),
            };
        }
    };
    let inner = inside(uri, &*storage).await?;
    let storage = match inner == uri {
        true => storage,
        false => StorageRegistry::with_defaults().open(&inner, Access::Read)?,
    };
    match Source::open(&storage, need.tolerant()).await {
        Ok(source) => Ok(source),
        Err(error) if is_missing(&error) => match detect(&storage).await {
            Ok(detection) => Err(no_checkpoint(uri, &storage, &detection, error).await),
            Err(_) => Err(error.into()),
        },
        Err(error) => Err(cannot_read(uri, error)),
    }
}

fn cannot_read(uri: &str, error: CheckpointError) -> Failure {
    Failure::from(error).context(format!("cannot read {uri:?}")).without_hint()
}

/// Whether there is no checkpoint, rather than a bad one.
fn is_missing(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::NotACheckpoint { .. } => true,
        CheckpointError::Storage(error) => error.kind() == StorageErrorKind::NotFound,
        _ => false,
    }
}

/// The URI of the checkpoint in a directory: of `model_and_optim` in a step of OLMo-core, of the
/// directory itself otherwise.
async fn inside(uri: &str, storage: &dyn Storage) -> Result<String, StorageError> {
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    let is_step =
        !contains(".metadata").await? && contains(&format!("{OLMO_MODEL}/.metadata")).await?;
    Ok(if is_step { format!("{}/{OLMO_MODEL}", uri.trim_end_matches('/')) } else { uri.to_owned() })
}

/// The place of a checkpoint that is there, to change something in it, or only to say what would
/// be changed.
pub(crate) async fn checkpoint_to_change(
    uri: &str,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Failure> {
    let registry = StorageRegistry::with_defaults();
    // Opened for writing, a directory that is not there would be made.
    let storage = registry.open(uri, Access::Read).map_err(|error| cannot_open(uri, &error))?;
    let uri = inside(uri, &*storage).await?;
    let access = if dry_run { Access::Read } else { Access::Write };
    registry.open(&uri, access).map_err(|error| cannot_open(&uri, &error))
}

pub(crate) fn cannot_open(uri: &str, error: &StorageError) -> Failure {
    match error.kind() {
        StorageErrorKind::NotFound => {
            Failure::new(Exit::Io, format!("there is nothing at {uri:?}"))
        }
        StorageErrorKind::Unsupported => Failure::new(Exit::Usage, error.to_string()),
        _ if Path::new(uri).is_file() => {
            Failure::new(Exit::Usage, format!("{uri:?} is a file, and a directory is needed"))
        }
        _ => Failure::new(Exit::Io, dcp::core::error_chain(error))
            .context(format!("cannot open {uri:?}")),
    }
}

/// The storage and key of a URI that names a file.
async fn file(uri: &str) -> Option<(Arc<dyn Storage>, Key)> {
    let (parent, name) = split(uri)?;
    let storage = StorageRegistry::with_defaults().open(&parent, Access::Read).ok()?;
    let key = Key::new(name).ok()?;
    storage.stat(&key).await.ok()?;
    Some((storage, key))
}

/// The folder that a URI lies in, and its name there.
fn split(uri: &str) -> Option<(String, String)> {
    let (scheme, path) = match uri.split_once("://") {
        Some((scheme, path)) => (format!("{scheme}://"), path),
        None => (String::new(), uri),
    };
    let path = path.trim_end_matches('/');
    let (parent, name) = match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((parent, name)) => (parent, name),
        None => (".", path),
    };
    (!name.is_empty()).then(|| (format!("{scheme}{parent}"), name.to_owned()))
}

async fn file_source(
    uri: &str,
    storage: Arc<dyn Storage>,
    key: Key,
    need: Need,
) -> Result<Source, Failure> {
    let name = key.file_name();
    if name.ends_with(".distcp") || name.ends_with(".metadata") {
        let (parent, _) = split(uri).unwrap_or_default();
        return Err(Failure::new(Exit::Bad, format!("{uri:?} is one file of a checkpoint"))
            .hint(format!("pass the directory: {parent}")));
    }
    Source::open_file(&storage, key, need.tolerant()).await.map_err(|error| match error {
        CheckpointError::NotACheckpoint { .. } => {
            let hint = "a checkpoint is a directory with a .metadata, or a file of torch.save or \
                        safetensors";
            Failure::new(Exit::Bad, format!("{uri:?} is a file, but no checkpoint")).hint(hint)
        }
        error => cannot_read(uri, error),
    })
}

/// Explains why a directory is no checkpoint, and names one that is near.
async fn no_checkpoint(
    uri: &str,
    storage: &Arc<dyn Storage>,
    detection: &Detection,
    error: CheckpointError,
) -> Failure {
    let failure = match &detection.kind {
        Detected::Dcp | Detected::DcpRankLocal { .. } => return Failure::from(error),
        Detected::Empty => Failure::new(Exit::Bad, format!("{uri:?} is an empty directory")),
        kind => {
            let mut message = format!("{uri:?} is no checkpoint: the directory {kind}");
            for also in &detection.also {
                message.push_str(&format!("; it also {also}"));
            }
            Failure::new(Exit::Bad, message)
        }
    };
    let below = |key: &Key| match uri.trim_end_matches('/') {
        "." => key.to_string(),
        base => format!("{base}/{key}"),
    };
    match &*detection.checkpoints {
        [] => failure,
        [one] => failure.hint(format!("there is a checkpoint below it: {}", below(one))),
        [.., last] => {
            let latest = dcp::convert::list_run(storage).await.ok().and_then(|run| run.latest);
            let latest = latest.and_then(|name| Key::new(name).ok());
            failure.hint(match latest {
                Some(name) => format!(
                    "the latest complete checkpoint below it is {}; `dcp ls` lists all",
                    below(&name)
                ),
                None => format!(
                    "there are {} checkpoints below it, such as {}; `dcp ls` lists all",
                    detection.checkpoints.len(),
                    below(last)
                ),
            })
        }
    }
}

/// A place to write to, or of a dry run to look at: that one makes nothing.
fn place_to_write(uri: &str, dry_run: bool) -> Result<Arc<dyn Storage>, Failure> {
    let access = if dry_run { Access::Read } else { Access::Write };
    match StorageRegistry::with_defaults().open(uri, access) {
        Ok(storage) if dry_run => Ok(storage),
        Ok(storage) => Ok(undo::watch(storage)),
        Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
            Ok(Arc::new(Nowhere))
        }
        Err(error) => Err(Failure::from(error).context(format!("cannot write to {uri:?}"))),
    }
}

/// A file to write. One that is there is an error, unless it may be replaced.
pub(crate) async fn target_file(
    uri: &str,
    overwrite: bool,
    dry_run: bool,
) -> Result<Target, Failure> {
    if StorageRegistry::with_defaults().open(uri, Access::Read).is_ok() {
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
pub(crate) async fn target_folder(
    uri: &str,
    model: bool,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Failure> {
    let storage = place_to_write(uri, dry_run)?;
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
pub(crate) async fn target_directory(
    uri: &str,
    overwrite: bool,
    dry_run: bool,
) -> Result<DcpWriter, Failure> {
    let storage = place_to_write(uri, dry_run)?;
    if !overwrite && is_dcp(&*storage).await? {
        return Err(ConvertError::TargetExists { target: uri.to_owned() }.into());
    }
    refuse_step(uri, &detect(&storage).await?)?;
    if let Some(key) = model_file(&*storage).await? {
        return Err(would_stay(uri, &format!("{key:?} is of a Hugging Face model")));
    }
    Ok(DcpWriter::builder(storage).overwrite(overwrite).build())
}

/// Whether a directory is a checkpoint of PyTorch's format.
async fn is_dcp(storage: &dyn Storage) -> Result<bool, StorageError> {
    for name in [".metadata", "__0.metadata"] {
        if storage.contains(&Key::new(name)?).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A file that makes a directory a Hugging Face model, whatever else is there: an index, or one
/// under a name that loaders look for. Other safetensors files may lie beside anything.
async fn model_file(storage: &dyn Storage) -> Result<Option<Key>, StorageError> {
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        let name = key.as_str();
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        if !name.contains('/') && (is_weights || name.ends_with(INDEX_ENDING)) {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Says of a directory that is two checkpoints at once which of them is taken.
pub(crate) async fn say_which(uri: &str, out: &Output) -> Result<(), Failure> {
    let Ok(storage) = StorageRegistry::with_defaults().open(uri, Access::Read) else {
        return Ok(());
    };
    if is_dcp(&*storage).await?
        && let Some(key) = model_file(&*storage).await?
    {
        out.note(&format!(
            "{uri:?} is a checkpoint of PyTorch's format, which is taken; {:?} of another \
             checkpoint lies there, too",
            key.as_str()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_split_into_folder_and_name() {
        let split = |uri| split(uri).unwrap();
        assert_eq!(split("a/b.npy"), ("a".into(), "b.npy".into()));
        assert_eq!(split("b.npy"), (".".into(), "b.npy".into()));
        assert_eq!(split("/b"), ("/".into(), "b".into()));
        assert_eq!(split("file:///x/y/"), ("file:///x".into(), "y".into()));
        assert!(super::split("/").is_none());
    }
}
