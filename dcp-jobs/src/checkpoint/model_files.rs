//! The configuration and tokenizer files of a Hugging Face model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use dcp_core::registry::Access;
use dcp_core::storage::{FolderEntry, StorageExt};
use dcp_core::text::Quoted;
use dcp_core::{CheckpointMetadata, DType, Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::hf::{CONFIG_ASIDE, CONFIG_NAME, INDEX_ENDING, config_with_dtype};
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer, is_pointer_file};
use futures_util::StreamExt as _;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::framework::ModelFolder;
use crate::checkpoint::notes::Notes;
use crate::checkpoint::opener::Opener;
use crate::checkpoint::small_file::read_at_most;
use crate::error::{Error, ErrorKind, JobError};

/// Bytes of a `config.json` that are read at most.
const CONFIG_MAX: u64 = 16 << 20;
/// Bytes of such a file that are read at most; the largest are tokenizers.
const FILE_MAX: u64 = 256 << 20;

/// Bytes of a pointer of Git LFS at most.
const POINTER_MAX: u64 = 1024;

/// Files and their content.
pub(crate) type Files = Vec<(Key, Vec<u8>)>;

/// The most files of a folder, and of one in it, that are copied.
const FILES_MAX: usize = 1000;

/// The files that transformers looks for first. They are found without a list of the folder.
const NAMES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
];
/// The endings of files with weights, of any framework.
const WEIGHTS: &[&str] = &[
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".npz",
    ".nemo",
    ".pkl",
];
/// The beginnings of files with the state of a trainer.
const TRAINER: &[&str] = &[
    "trainer_state.json",
    "training_args",
    "global_step",
    "sampler",
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "random_states",
    "latest",
    "zero_to_fp32.py",
    "events.out.tfevents",
];

/// Whether a file has weights or the state of a trainer, or is an index of weights.
fn belongs_to_weights(name: &str) -> bool {
    let is_index = name.contains(".index.") && name.ends_with(".json");
    is_index || WEIGHTS.iter().any(|ending| name.ends_with(ending)) || belongs_to_trainer(name)
}

fn belongs_to_trainer(name: &str) -> bool {
    TRAINER.iter().any(|start| name.starts_with(start))
}

/// The files of a folder that are copied with the weights, and the names of those that are not.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    pub(crate) files: Files,
    /// Files and folders that are left, without the weights that are converted.
    pub(crate) left: Vec<String>,
}

/// The contents of a folder: the lengths of files by name, and the names of folders.
#[derive(Default)]
struct Folder {
    files: BTreeMap<String, u64>,
    folders: BTreeSet<String>,
}

impl Folder {
    /// The names of the files to copy, and of those that stay.
    fn divided(self) -> (Vec<String>, Vec<String>) {
        let (mut copied, mut left) = (Vec::new(), Vec::new());
        for (name, len) in self.files {
            if name.starts_with('.') || name == CONFIG_ASIDE || NAMES.contains(&&*name) {
                continue;
            }
            let is_copied =
                !belongs_to_weights(&name) && len <= FILE_MAX && copied.len() < FILES_MAX;
            if is_copied { copied.push(name) } else { left.push(name) }
        }
        (copied, left)
    }

    /// Whether all of a folder belongs to the configuration of a model, as `1_Pooling` and
    /// `additional_chat_templates` do.
    fn is_configuration(&self) -> bool {
        let is_one = |(name, len): (&String, &u64)| {
            !belongs_to_weights(name) && !name.starts_with('.') && *len <= FILE_MAX
        };
        !self.files.is_empty()
            && self.files.len() <= FILES_MAX
            && self.folders.is_empty()
            && self.files.iter().all(is_one)
    }
}

fn key_of(name: &str) -> Result<Key, Error> {
    Ok(Key::new(name).map_err(StorageError::from)?)
}

/// The folder of `Destination::config`, whose links lead no further than those of a checkpoint.
///
/// # Errors
///
/// When it is a file, is not there, or cannot be opened.
pub(crate) async fn open_config(opener: &Opener, folder: &Path) -> Result<Arc<dyn Storage>, Error> {
    let place = folder.display().to_string();
    if folder.is_file() {
        let message = format!("{place:?} is a file");
        return Err(Error::new(ErrorKind::InvalidOption, message)
            .with_hint("`Destination::config` takes the folder with a model's config.json"));
    }
    match opener.storages.open(&place, Access::Read).await {
        Err(error) if error.kind() == StorageErrorKind::NotFound => {
            Err(no_config(&place, ErrorKind::InvalidOption))
        }
        opened => Ok(opened?),
    }
}

/// The error of a folder without a configuration.
pub(crate) fn no_config(place: &str, kind: ErrorKind) -> Error {
    let message = format!("there is no {CONFIG_NAME} in {place:?}, which describes the model");
    Error::new(kind, message).with_hint("pass `Destination::config`, the folder that has it")
}

/// The files that belong to the model in `folder`, without its weights; a `config.json` must be there.
pub(crate) async fn files_in(opener: &Opener, folder: &Path) -> Result<Files, Error> {
    let storage = open_config(opener, folder).await?;
    let place = folder.display().to_string();
    let files = beside_weights(&*storage, &place).await?.files;
    match files.first() {
        Some((key, _)) if key.as_str() == CONFIG_NAME => Ok(files),
        _ => Err(no_config(&place, ErrorKind::InvalidOption)),
    }
}

/// Refuses a configuration that is no JSON object, and names the folder of `Destination::config`.
pub(crate) fn refuse_damaged(files: &Files, folder: &Path) -> Result<(), Error> {
    let Some((_, bytes)) = files.iter().find(|(key, _)| key.as_str() == CONFIG_NAME) else {
        return Ok(());
    };
    parse_configuration(bytes, folder).map(drop)
}

/// Parses the configuration in the folder of `Destination::config`.
///
/// # Errors
///
/// [`InvalidOption`](ErrorKind::InvalidOption) for one that is no JSON object.
pub(crate) fn parse_configuration(
    bytes: &[u8],
    folder: &Path,
) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
    serde_json::from_slice(bytes).map_err(|error| {
        let path = folder.join(CONFIG_NAME).display().to_string();
        if is_lfs_pointer(bytes) {
            let message = format!("the configuration {path:?} {LFS_PROBLEM}");
            return Error::new(ErrorKind::InvalidOption, message);
        }
        let message = format!("the configuration {path:?} is no JSON object");
        Error::new(ErrorKind::InvalidOption, message)
            .because(error)
            .with_hint("pass `Destination::config` with the folder of a model of Hugging Face")
    })
}

impl Checkpoint {
    /// The configuration of a model of Hugging Face: the `config.json` in `folder`, or that of the checkpoint.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a folder without one,
    /// [`Undecided`](ErrorKind::Undecided) for a checkpoint without one.
    pub async fn model_config(&self, folder: Option<&Path>) -> Result<serde_json::Value, Error> {
        let place =
            folder.map_or_else(|| self.place.clone(), |folder| folder.display().to_string());
        let storage = match folder {
            Some(folder) => open_config(&self.opener, folder).await?,
            None => Arc::clone(&self.storage),
        };
        let key = key_of(CONFIG_NAME)?;
        if !storage.contains(&key).await? {
            let kind =
                if folder.is_some() { ErrorKind::InvalidOption } else { ErrorKind::Undecided };
            return Err(no_config(&place, kind));
        }
        let len = storage.stat(&key).await?.byte_len;
        if len > CONFIG_MAX {
            let message = format!("{CONFIG_NAME} has {len} bytes, more than a configuration has");
            return Err(Error::new(ErrorKind::Damaged, message));
        }
        let bytes = storage.read_range(&key, 0..len).await?;
        if let Some(folder) = folder {
            return parse_configuration(&bytes, folder).map(serde_json::Value::Object);
        }
        serde_json::from_slice(&bytes).map_err(|error| {
            let message = format!("cannot read {CONFIG_NAME} in {place:?}");
            Error::new(ErrorKind::Damaged, message).because(error)
        })
    }
}

/// A digest of the `config.json` in `folder`; `None` if it cannot be read, which is an error later.
pub(crate) fn configuration_of(folder: &Path) -> Option<u128> {
    let bytes = read_at_most(&folder.join(CONFIG_NAME), FILE_MAX).ok()?;
    Some(dcp_core::digest::fnv1a_128(&bytes))
}

/// Refuses pointers of Git LFS among the files of a model.
pub(crate) fn refuse_pointers(files: &Files) -> Result<(), Error> {
    let pointers = files.iter().filter(|(_, bytes)| is_lfs_pointer(bytes));
    let names: Vec<_> = pointers.map(|(key, _)| Quoted(key.as_str()).to_string()).collect();
    let message = match &*names {
        [] => return Ok(()),
        [one] => format!("{one} {LFS_PROBLEM}"),
        _ => format!("{} are pointers of Git LFS, not the files", names.join(", ")),
    };
    Err(Error::new(ErrorKind::Damaged, message).with_hint(
        "fetch them with `git lfs pull`, or pass `Destination::config`, which has the configuration and the \
         tokenizer",
    ))
}

/// The configuration and tokenizer files in the folder of a model that are pointers of Git LFS.
pub(crate) async fn pointers_of(checkpoint: &Checkpoint) -> Result<Vec<Key>, Error> {
    let mut pointers = Vec::new();
    if !checkpoint.is_model_folder() {
        return Ok(pointers);
    }
    let storage = checkpoint.step.storage();
    let files = checkpoint.step.listing().objects().iter().map(|meta| (&meta.key, meta.byte_len));
    let small = files.filter(|(key, len)| {
        *len <= POINTER_MAX && !belongs_to_weights(key.file_name()) && !key.as_str().contains('/')
    });
    for (key, _) in small.take(FILES_MAX) {
        if is_pointer_file(&**storage, key).await? {
            pointers.push(key.clone());
        }
    }
    Ok(pointers)
}

/// The files that belong to a Hugging Face model, without its weights; none where the checkpoint is of
/// another format.
async fn files_of(checkpoint: &Checkpoint) -> Result<Beside, Error> {
    if let Some(folder) = checkpoint.source.extension::<ModelFolder>() {
        return beside_weights(&**folder.storage(), &checkpoint.place).await;
    }
    if !checkpoint.is_model_folder() {
        return Ok(Beside::default());
    }
    let mut beside = beside_weights(&*checkpoint.storage, &checkpoint.place).await?;
    let metadata = checkpoint.source.metadata().await?;
    let is_read = |name: &str| metadata.files().iter().any(|file| file.as_str() == name);
    beside.left.retain(|name| !is_read(name) && !name.ends_with(INDEX_ENDING));
    Ok(beside)
}

/// The files with the weights in a folder of a storage; none where it has no `config.json`.
async fn beside_weights(storage: &dyn Storage, place: &str) -> Result<Beside, Error> {
    let mut beside = Beside::default();
    for name in NAMES {
        let key = key_of(name)?;
        let len = match storage.stat(&key).await {
            Ok(meta) => meta.byte_len,
            Err(error)
                if error.kind() == StorageErrorKind::NotFound && !beside.files.is_empty() =>
            {
                continue;
            }
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(beside),
            Err(error) => return Err(error.into()),
        };
        if len > FILE_MAX {
            let message = format!("{place}/{name} has more than {FILE_MAX} bytes");
            return Err(Error::new(ErrorKind::Damaged, message).with_hint(
                "`Destination::config` takes the configuration and tokenizer from another folder",
            ));
        }
        let bytes = storage.read_range(&key, 0..len).await?;
        beside.files.push((key, bytes.to_vec()));
    }
    let Some(found) = listed_of(storage, None).await? else { return Ok(beside) };
    let mut names = Vec::new();
    for name in &found.folders {
        let inner = listed_of(storage, Some(&key_of(name)?)).await?.unwrap_or_default();
        if inner.is_configuration() {
            names.extend(inner.files.keys().map(|file| format!("{name}/{file}")));
        } else {
            beside.left.push(format!("{name}/"));
        }
    }
    let (copied, left) = found.divided();
    beside.left.extend(left);
    for name in names.into_iter().chain(copied) {
        let key = key_of(&name)?;
        let whole = storage.read_whole(&key, FILE_MAX).await?;
        beside.files.push((key, whole.bytes.to_vec()));
    }
    Ok(beside)
}

/// The note about a model that was written without a configuration.
const UNCONFIGURED: &str = "there is no config.json, without which transformers opens no model; \
                            `Destination::config` copies one";

/// Adds the files that belong to a Hugging Face model, and says which those are. Returns what is to be
/// said of the model when it is written.
pub(crate) async fn add_those_of(
    checkpoint: &Checkpoint,
    files: &mut Files,
    notes: &mut Notes,
) -> Result<Option<&'static str>, Error> {
    let beside = files_of(checkpoint).await?;
    if !beside.files.is_empty() {
        let names: Vec<_> = beside.files.iter().map(|(key, _)| key.as_str()).collect();
        notes.say(format!("copying {} from {:?}", names.join(", "), checkpoint.place));
    }
    if !beside.left.is_empty() {
        notes.say(format!(
            "not copying {}, which have weights or the state of a trainer",
            beside.left.join(", ")
        ));
    }
    complete(files, beside.files);
    let is_configured = files.iter().any(|(key, _)| key.as_str() == CONFIG_NAME);
    Ok((!is_configured).then_some(UNCONFIGURED))
}

/// The files of a trainer with a Hugging Face model, which are no part of the checkpoint that is read.
pub(crate) async fn trainer_files_of(checkpoint: &Checkpoint) -> Result<Vec<String>, Error> {
    if !checkpoint.is_model_folder() {
        return Ok(Vec::new());
    }
    let found = listed_of(&*checkpoint.storage, None).await?.unwrap_or_default();
    let folders = found.folders.into_iter().filter(|name| belongs_to_trainer(name));
    let files = found.files.into_keys().filter(|name| belongs_to_trainer(name));
    Ok(folders.map(|name| format!("{name}/")).chain(files).collect())
}

/// The files and folders in a folder of a storage; `None` if it cannot list.
async fn listed_of(storage: &dyn Storage, folder: Option<&Key>) -> Result<Option<Folder>, Error> {
    let mut found = Folder::default();
    let mut entries = storage.list_folder(folder);
    let last = |key: &Key| key.file_name().to_owned();
    while let Some(entry) = entries.next().await {
        match entry {
            Ok(FolderEntry::Object(meta)) => {
                found.files.insert(last(&meta.key), meta.byte_len);
            }
            Ok(FolderEntry::Folder(key)) if !last(&key).starts_with('.') => {
                found.folders.insert(last(&key));
            }
            Ok(_) => {}
            Err(error) if error.kind() == StorageErrorKind::Unsupported => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(found))
}

/// Makes the configuration name `dtype`, where it names one: transformers opens the model in it.
pub(crate) fn say_dtype(files: &mut Files, dtype: DType) -> Result<(), Error> {
    let Some((_, config)) = files.iter_mut().find(|(key, _)| key.as_str() == CONFIG_NAME) else {
        return Ok(());
    };
    let changed = config_with_dtype(config, dtype).map_err(JobError::from)?;
    if let Some(changed) = changed {
        *config = changed;
    }
    Ok(())
}

/// The configuration among the files of a model.
pub(crate) fn configuration(files: &Files) -> Option<serde_json::Value> {
    let (_, bytes) = files.iter().find(|(key, _)| key.as_str() == CONFIG_NAME)?;
    serde_json::from_slice(bytes).ok()
}

/// Notes where the configuration that comes with the weights contradicts them: it is copied as it is.
pub(crate) fn note_contradiction(
    opener: &Opener,
    files: &Files,
    tensors: &CheckpointMetadata,
    notes: &mut Notes,
) {
    let Some(config) = configuration(files) else { return };
    if let Err(error) = opener.frameworks.refuse_other_names(&config, tensors) {
        notes.say(format!(
            "{}; it is copied as it is, and `Destination::config` takes the one of this model",
            error.message()
        ));
    }
}

/// Adds the files that were found or made for the weights and that are not there yet.
pub(crate) fn complete(files: &mut Files, others: Files) {
    for (key, bytes) in others {
        if files.iter().all(|(there, _)| *there != key) {
            files.push((key, bytes));
        }
    }
}
