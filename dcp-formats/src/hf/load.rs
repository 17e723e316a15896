//! Finds the files of a model and reads their headers.

use std::sync::Arc;

use dcp_core::format::Listing;
use dcp_core::storage::StorageExt as _;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageError, StorageErrorKind,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::ENDING;
use super::complete::{Names, replacement, unfinished};
use super::finding::{Finding, FindingKind};
use super::index_file::{INDEX_MAX, INDEX_NAME, IndexFile, NAMES_NOTHING};
use super::layout::SINGLE_NAME;
use super::merge::{FileHeader, merge};
use super::other_program::IS_DELTA;
use super::variants::{IndexName, has_variant, target_of, variant_of_index, without_variants};
use crate::folder_contents::files_in;
use crate::incomplete_files::{LFS_PROBLEM, is_pointer_file};
use crate::safetensors::INDEX_ENDING;
use crate::safetensors::read_image;

/// The files to read.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// A folder, `None` for the storage itself.
    Folder(Option<Key>),
    /// The files of an index.
    Index(Key),
    /// One file.
    File(Key),
    /// A variant of the model in a folder.
    Variant(Option<Key>, String),
}

/// The merged index of a model's headers.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) metadata: Arc<CheckpointMetadata>,
    pub(super) findings: Arc<[Finding]>,
    pub(super) notes: Arc<[String]>,
    pub(super) variants: Arc<[Key]>,
}

/// The files to read, and their index.
#[derive(Default)]
pub(super) struct Files {
    pub(super) keys: Vec<Key>,
    pub(super) index: Option<Index>,
    /// Files of the folder that hold the model in another form.
    pub(super) variants: Vec<Key>,
    /// The findings about the file names.
    pub(super) findings: Vec<Finding>,
    pub(super) notes: Vec<String>,
}

impl Files {
    /// Files without an index.
    fn of(keys: Vec<Key>) -> Self {
        Self { keys, ..Self::default() }
    }
}

/// An index file, and its folder.
pub(super) struct Index {
    pub(super) key: Key,
    pub(super) file: IndexFile,
}

impl Index {
    /// The key of a file in the index.
    pub(super) fn resolve(&self, file: &Key) -> Result<Key, CheckpointError> {
        match self.key.as_str().rsplit_once('/') {
            None => Ok(file.clone()),
            Some((folder, _)) => join(Some(folder), file.as_str()),
        }
    }
}

fn join(folder: Option<&str>, name: &str) -> Result<Key, CheckpointError> {
    let key = match folder {
        None => Key::new(name),
        Some(folder) => Key::new(format!("{folder}/{name}")),
    };
    Ok(key.map_err(StorageError::from)?)
}

/// Reads all headers. A tolerant load returns findings; otherwise the first one is an error.
pub(super) async fn load(
    storage: &Arc<dyn Storage>,
    target: &Target,
    tolerant: bool,
) -> Result<Loaded, CheckpointError> {
    let chosen = match target {
        Target::Variant(folder, variant) => {
            Some(target_of(&**storage, folder.as_ref(), variant).await?)
        }
        _ => None,
    };
    let target = chosen.as_ref().unwrap_or(target);
    let single = matches!(target, Target::File(_));
    let files = files(storage, target, tolerant).await?;
    let reads: Vec<_> = files.keys.iter().map(|key| header(&**storage, key)).collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let headers: Vec<_> = stream::iter(reads).buffered(parallelism).try_collect().await?;
    let merged = merge(&files, headers, single)?;
    let (mut findings, mut notes) = (files.findings, merged.notes);
    findings.extend(merged.findings);
    notes.extend(files.notes);
    // A single file without a header has nothing to show.
    let nothing = single && merged.metadata.is_empty() && !findings.is_empty();
    if !tolerant || nothing {
        findings.extend(merged.visible);
        let others = findings.len().saturating_sub(1);
        if let Some(first) = findings.into_iter().next() {
            return Err(first
                .into_error(if single { "safetensors file" } else { "safetensors folder" }, others)
                .into());
        }
        findings = Vec::new();
    }
    for note in notes.iter().chain(&merged.incomplete) {
        tracing::warn!("{note}");
    }
    Ok(Loaded {
        metadata: Arc::new(merged.metadata),
        findings: findings.into(),
        notes: notes.into(),
        variants: files.variants.into(),
    })
}

async fn files(
    storage: &Arc<dyn Storage>,
    target: &Target,
    tolerant: bool,
) -> Result<Files, CheckpointError> {
    let folder = match target {
        Target::File(key) => return Ok(Files::of(vec![key.clone()])),
        Target::Index(key) => return indexed(&**storage, key.clone()).await,
        Target::Folder(folder) | Target::Variant(folder, _) => folder.as_ref(),
    };
    let prefix = folder.map(Key::as_str);
    let index = join(prefix, INDEX_NAME)?;
    if storage.contains(&index).await? {
        let single = join(prefix, SINGLE_NAME)?;
        let found = indexed(&**storage, index.clone()).await;
        let is_named = |files: &Files| files.keys.contains(&single);
        if found.as_ref().is_ok_and(is_named) || !storage.contains(&single).await? {
            return match found {
                Err(error) if tolerant => beside_index(&**storage, folder, &index, error).await,
                found => found,
            };
        }
        let folder = index.as_str().strip_suffix(INDEX_NAME).unwrap_or_default();
        let findings = replacement(&**storage, folder).await?.into_iter().collect();
        let notes = vec![format!(
            "{index:?} is left out, and so are the files that it names: {SINGLE_NAME} is the model"
        )];
        return Ok(Files { findings, notes, ..Files::of(vec![single]) });
    }
    let Some(names) = names(&**storage, folder, true).await? else {
        // Without listing, the model may still be the single file of small models.
        let model = join(prefix, SINGLE_NAME)?;
        if storage.contains(&model).await? {
            return Ok(Files::of(vec![model]));
        }
        return Err(CheckpointError::NotACheckpoint {
            message: format!(
                "there is neither {index:?} nor {model:?}, and this storage cannot be listed"
            ),
        });
    };
    let (of_variants, names): (Vec<_>, Vec<_>) =
        names.into_iter().partition(|key| variant_of_index(key).is_some());
    let (indexes, keys): (Vec<_>, Vec<_>) =
        names.into_iter().partition(|key| key.as_str().ends_with(INDEX_ENDING));
    match &*indexes {
        [one] => {
            return match indexed(&**storage, one.clone()).await {
                Err(error) if tolerant => beside_index(&**storage, folder, one, error).await,
                found => found,
            };
        }
        [first, second, ..] => {
            let problem = format!("{first:?} and {second:?} are both here: read one by its name");
            return Err(FormatError::new("safetensors folder", problem).into());
        }
        [] => {}
    }
    if keys.is_empty() {
        let message = match folder {
            None => {
                let listing = Listing::read(&**storage, &[]).await?;
                let found = files_in(&listing.root());
                format!("not a checkpoint: the directory has no safetensors files{found}")
            }
            Some(folder) => format!("there are no safetensors files in {folder:?}"),
        };
        return Err(CheckpointError::NotACheckpoint { message });
    }
    let (keys, variants) = without_variants(keys);
    // A folder of nothing but variants has the model as one of them.
    let mut of_variants = of_variants;
    of_variants.retain(|index| keys.iter().all(|key| has_variant(key, variant_of_index(index))));
    if let [one] = &*of_variants {
        return Ok(Files { variants, ..indexed(&**storage, one.clone()).await? });
    }
    let Names { keys, mut findings, notes } = Names::look(keys);
    let prefix = prefix.map_or_else(String::new, |prefix| format!("{prefix}/"));
    findings.extend(replacement(&**storage, &prefix).await?);
    findings.extend(unfinished(&**storage, &prefix).await?);
    Ok(Files { keys, index: None, variants, findings, notes })
}

/// The files of a folder whose index cannot be read, with that as a finding: each of them has its own header.
async fn beside_index(
    storage: &dyn Storage,
    folder: Option<&Key>,
    index: &Key,
    error: CheckpointError,
) -> Result<Files, CheckpointError> {
    let CheckpointError::Format(error) = error else { return Err(error) };
    let names = names(storage, folder, false).await?.unwrap_or_default();
    let keys = names.into_iter().filter(|key| key.as_str().ends_with(ENDING)).collect();
    let (keys, variants) = without_variants(keys);
    if keys.is_empty() {
        return Err(error.into());
    }
    let message = match is_pointer_file(storage, index).await? {
        true => format!("the index {LFS_PROBLEM}"),
        false => format!("bad {}: {}", error.what(), error.problem()),
    };
    let finding = Finding::new(FindingKind::Index, message).within(index);
    Ok(Files { variants, findings: vec![finding], ..Files::of(keys) })
}

/// The safetensors files and indexes of a folder, sorted, without those in subfolders. With
/// `any_index`, includes the indexes of variants. `None` if the storage cannot list.
pub(super) async fn names(
    storage: &dyn Storage,
    folder: Option<&Key>,
    any_index: bool,
) -> Result<Option<Vec<Key>>, CheckpointError> {
    let mut names = Vec::new();
    let mut objects = storage.list_files(folder);
    while let Some(meta) = objects.next().await {
        let key = match meta {
            Ok(meta) => meta.key,
            Err(error) if error.kind() == StorageErrorKind::Unsupported => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let name = match folder {
            None => Some(key.as_str()),
            Some(folder) => {
                key.as_str().strip_prefix(folder.as_str()).and_then(|name| name.strip_prefix('/'))
            }
        };
        let wanted = |name: &str| {
            let of_variant = any_index && IndexName::parse(name).is_some();
            let wanted = name.ends_with(ENDING) || name.ends_with(INDEX_ENDING) || of_variant;
            wanted && !name.contains('/')
        };
        if name.is_some_and(wanted) {
            names.push(key);
        }
    }
    names.sort_unstable();
    Ok(Some(names))
}

async fn indexed(storage: &dyn Storage, key: Key) -> Result<Files, CheckpointError> {
    let byte_len = storage.stat(&key).await?.byte_len;
    let in_file = |error: FormatError| error.in_file(key.as_str(), 0);
    if byte_len > INDEX_MAX {
        let problem = format!("it has {byte_len} bytes, the limit is {INDEX_MAX}");
        return Err(in_file(FormatError::new("safetensors index", problem)).into());
    }
    let json = storage.read_range(&key, 0..byte_len).await?;
    let file = IndexFile::parse(&json).map_err(in_file)?;
    if file.is_delta {
        let message = format!("the directory of {key} {IS_DELTA}");
        return Err(CheckpointError::NotACheckpoint { message });
    }
    if file.weight_map.is_empty() {
        return Err(in_file(FormatError::new("safetensors index", NAMES_NOTHING)).into());
    }
    let index = Index { key: key.clone(), file };
    let keys = index.file.files().map(|file| index.resolve(file)).collect::<Result<_, _>>()?;
    let name = key.file_name();
    let folder = key.as_str().strip_suffix(name).unwrap_or_default();
    let findings = replacement(storage, folder).await?.into_iter().collect();
    Ok(Files { index: Some(index), findings, ..Files::of(keys) })
}

/// Reads the header of one file. Problems of the file are findings; errors are the storage's.
async fn header(storage: &dyn Storage, key: &Key) -> Result<FileHeader, CheckpointError> {
    let finding =
        |kind, message: String| FileHeader::Unreadable(Finding::new(kind, message).within(key));
    let byte_len = match storage.stat(key).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => {
            return Ok(FileHeader::Missing);
        }
        Err(error) => return Err(error.into()),
    };
    match read_image(storage, key, 0, byte_len).await {
        Ok((image, problem)) => Ok(FileHeader::Read(Box::new(image), problem)),
        Err(CheckpointError::Format(error)) => {
            Ok(finding(FindingKind::Header, format!("bad {}: {}", error.what(), error.problem())))
        }
        Err(CheckpointError::Storage(error)) if error.kind() == StorageErrorKind::Truncated => {
            Ok(finding(FindingKind::Header, "the file ends in its header".to_owned()))
        }
        Err(error) => Err(error),
    }
}
