//! Reads a checkpoint's index: one `.metadata`, or the merged metadata of all ranks. Corrects known
//! errors of PyTorch in it, and checks it against the files.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::format::WantedKeys;
use dcp_core::metadata::{Entry, Placement, TensorEntry};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, FormatError, Key, Storage, StorageError,
    StorageErrorKind,
};
use futures_util::future::join;
use futures_util::stream;
use futures_util::{StreamExt as _, TryStreamExt as _};

use super::by_rank::{self, Differing};
use super::names::{METADATA, Named, sidecar as sidecar_name};
use super::{safetensors_files, wrapped};
use crate::metadata::{Decoded, check_chunks, decode_all, decode_selected};
use crate::pickle::ForeignName;
use crate::safetensors::INDEX_ENDING;

/// A checked index.
#[derive(Clone, Debug)]
pub(super) struct Index {
    pub(super) metadata: Arc<CheckpointMetadata>,
    /// All keys and files, where the metadata lacks tensors that are not needed.
    pub(super) names: Option<Arc<CheckpointMetadata>>,
    /// As [`Decoded::original_shapes`]; empty when the metadata of ranks were merged.
    pub(super) original_shapes: Arc<HashMap<Arc<str>, Dims>>,
    /// As [`Decoded::foreign_names`]; empty when the metadata of ranks were merged.
    pub(super) foreign_names: Arc<[ForeignName]>,
    /// CRC-32 of the `.metadata`; `None` for a merged one.
    pub(super) crc32: Option<u32>,
    /// Whether there may be a sidecar: a listing showed it, or there was no listing.
    pub(super) has_sidecar: bool,
    pub(super) warnings: Arc<[String]>,
    /// The warnings about ranks that saved without collectives.
    pub(super) rank_warnings: Arc<[String]>,
    /// Entries that differ between ranks that saved without collectives.
    pub(super) differing: Arc<[Differing]>,
}

/// The options of reading an index.
#[derive(Clone, Debug)]
pub(super) struct IndexOptions {
    /// Whether an index that contradicts itself or the files is accepted.
    pub(super) tolerant: bool,
    /// Whether a folder with a `.metadata` is listed, too.
    pub(super) check_files: bool,
    /// The rank whose entries are taken where those of ranks differ.
    pub(super) rank: Option<u32>,
    /// The tensors that are needed; `None` for all.
    pub(super) keys: Option<WantedKeys>,
}

/// The error for an answer with fewer bytes than the object has: a server or a proxy cut it, and the
/// checkpoint is not damaged.
async fn cut_short(storage: &dyn Storage, read: u64) -> Option<CheckpointError> {
    let key = Key::new(METADATA).ok()?;
    let there = storage.stat(&key).await.ok()?.byte_len;
    let error = StorageError::new(StorageErrorKind::Truncated, StorageOp::Read, Some(key));
    let message = format!("{read} bytes were returned, the object has {there}");
    (there > read).then(|| error.with_message(message).into())
}

/// Reads the index.
pub(super) async fn load(
    storage: &Arc<dyn Storage>,
    options: &IndexOptions,
) -> Result<Index, CheckpointError> {
    let IndexOptions { tolerant, check_files, rank, ref keys } = *options;
    let mut warnings = Vec::new();
    let (mut differing, mut rank_warnings, mut stale) = (Vec::new(), Vec::new(), None);
    let (mut original_shapes, mut foreign_names, mut names) = (HashMap::new(), Vec::new(), None);
    let list_early = async { if check_files { list_early(&**storage).await } else { None } };
    let (bytes, early) = join(read_if_there(&**storage, METADATA), list_early).await;
    let (mut metadata, crc32) = match bytes? {
        Some(bytes) => {
            let decoded = match keys {
                None => decode_all(&bytes),
                Some(keys) => decode_selected(&bytes, keys),
            };
            let decoded = match decoded {
                Ok(decoded) => decoded,
                Err(error) => {
                    let short = cut_short(&**storage, bytes.len() as u64).await;
                    return Err(short.unwrap_or_else(|| error.in_file(METADATA, 0).into()));
                }
            };
            original_shapes = decoded.original_shapes;
            (foreign_names, names) = (decoded.foreign_names, decoded.names);
            (decoded.metadata, Some(crc32fast::hash(&bytes)))
        }
        None => {
            let merged = by_rank::load(storage, tolerant, rank).await?;
            (differing, rank_warnings, stale) = (merged.differing, merged.warnings, merged.stale);
            let mut metadata = merged.metadata;
            if let Some(keys) = keys {
                names = leave_out(&mut metadata, keys);
            }
            (metadata, None)
        }
    };
    let early = early.and_then(|early| ListedFiles::early(&**storage, early, &metadata));
    let listed = match early {
        Some(listed) => Some(listed),
        None if !check_files && crc32.is_some() => None,
        None => Some(ListedFiles::read(&**storage, &metadata).await?),
    };
    let sidecar = crc32.and_then(|crc32| sidecar_name(crc32).ok());
    let may_be_there = |key| listed.as_ref().is_none_or(|listed| listed.sidecars.contains(&key));
    let has_sidecar = sidecar.is_some_and(may_be_there);
    if let (Some(listed), true) = (&listed, crc32.is_some()) {
        listed.warn_of_others(&mut warnings);
    }
    warnings.extend(rank_warnings.iter().cloned());
    let checked = check_geometry(&metadata, crc32.is_some(), tolerant, &mut warnings);
    checked.map_err(|error| match &stale {
        Some(stale) => FormatError::new(error.what(), format!("{}; {stale}", error.problem())),
        None => error,
    })?;
    let listed = match listed {
        // Their images end where the file ends.
        None if safetensors_files::has_images(&metadata) => Some(ListedFiles::default()),
        listed => listed,
    };
    let mut file_lens = None;
    if let Some(listed) = listed {
        let known = file_lens.insert(listed.byte_lens(&**storage, &metadata).await?);
        safetensors_files::locate(&**storage, &mut metadata, known).await?;
    }
    match check_placements(&metadata, file_lens.as_deref()) {
        Err(damage) if tolerant => warnings.push(damage.to_string()),
        checked => checked?,
    }
    wrapped::show_as_objects(&**storage, &mut metadata).await?;
    warn_of_lost_chunks(&metadata, &mut warnings);
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let (metadata, original_shapes) = (Arc::new(metadata), Arc::new(original_shapes));
    let (foreign_names, warnings) = (foreign_names.into(), warnings.into());
    let (differing, rank_warnings) = (differing.into(), rank_warnings.into());
    Ok(Index {
        metadata,
        names: names.map(Arc::new),
        original_shapes,
        foreign_names,
        crc32,
        has_sidecar,
        warnings,
        rank_warnings,
        differing,
    })
}

/// Removes tensors that are not needed. Returns all keys and files, without chunks, where it removes
/// any.
fn leave_out(metadata: &mut CheckpointMetadata, keys: &WantedKeys) -> Option<CheckpointMetadata> {
    let mut needed = keys.of(metadata).into_iter();
    let mut all = CheckpointMetadata::new();
    for (fqn, entry) in metadata.iter() {
        let name = match entry {
            Entry::Tensor(tensor) => {
                let mut name = TensorEntry::new(tensor.dtype, tensor.shape.clone());
                (name.path, name.properties) = (tensor.path.clone(), tensor.properties.clone());
                Entry::Tensor(name)
            }
            other => other.clone(),
        };
        all.insert(Arc::clone(fqn), name);
    }
    for file in metadata.files() {
        all.intern_file(file)?;
    }
    metadata.retain(|_, entry| needed.next() == Some(true) || entry.as_object().is_some());
    (metadata.len() < all.len()).then_some(all)
}

async fn read_if_there(
    storage: &dyn Storage,
    name: &str,
) -> Result<Option<Bytes>, CheckpointError> {
    let key = Key::new(name).map_err(StorageError::from)?;
    match storage.read_all(&key).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The number of objects of a folder that are listed while its metadata is read.
const LISTED_EARLY: usize = 10_000;

/// The objects of the folder. `None` where there are many, or they cannot be listed: the listing
/// after the metadata then gives the error, or takes no memory for files of others.
async fn list_early(storage: &dyn Storage) -> Option<Vec<ObjectMeta>> {
    let objects = storage.list_files(None).take(LISTED_EARLY + 1).try_collect::<Vec<_>>().await;
    objects.ok().filter(|objects| objects.len() <= LISTED_EARLY)
}

pub(super) fn decode(file: &str, bytes: &Bytes) -> Result<Decoded, FormatError> {
    decode_all(bytes).map_err(|error| error.in_file(file, 0))
}

/// Whether a file is in a folder below, which a listing does not show.
fn is_below(key: &Key) -> bool {
    key.as_str().contains('/')
}

/// The files in one listing of the folder.
#[derive(Default)]
struct ListedFiles {
    /// The lengths of the files of the index.
    byte_lens: HashMap<Key, u64>,
    /// Sidecars, of whichever save.
    sidecars: HashSet<Key>,
    /// Whether a file of this folder that was not listed is not there.
    complete: bool,
    /// Whether ranks have metadata of their own.
    by_rank: bool,
    /// Whether there is the index of a Hugging Face model.
    model: bool,
}

impl ListedFiles {
    fn new(storage: &dyn Storage) -> Self {
        Self { complete: storage.capabilities().complete_listing, ..Self::default() }
    }

    /// Returns the files of a listing that may be older than the metadata; `None` if it lacks a file,
    /// which a save may have made since.
    fn early(
        storage: &dyn Storage,
        objects: Vec<ObjectMeta>,
        metadata: &CheckpointMetadata,
    ) -> Option<Self> {
        let of_index: HashSet<&Key> = metadata.files().iter().collect();
        let mut listed = Self::new(storage);
        objects.into_iter().for_each(|meta| listed.add(meta, &of_index));
        let is_known = |key: &&Key| is_below(key) || listed.byte_lens.contains_key(*key);
        of_index.iter().all(is_known).then_some(listed)
    }

    fn add(&mut self, meta: ObjectMeta, of_index: &HashSet<&Key>) {
        let name = meta.key.as_str();
        self.by_rank |= matches!(Named::parse(name), Some(Named::RankMetadata { .. }));
        self.model |= name.ends_with(INDEX_ENDING);
        if Named::parse(name) == Some(Named::Sidecar) {
            self.sidecars.insert(meta.key);
        } else if of_index.contains(&meta.key) {
            self.byte_lens.insert(meta.key, meta.byte_len);
        }
    }

    async fn read(
        storage: &dyn Storage,
        metadata: &CheckpointMetadata,
    ) -> Result<Self, CheckpointError> {
        let of_index: HashSet<&Key> = metadata.files().iter().collect();
        let mut listed = Self::new(storage);
        let mut objects = storage.list_files(None);
        while let Some(meta) = objects.next().await {
            let meta = match meta {
                Ok(meta) => meta,
                Err(error) if error.kind() == StorageErrorKind::Unsupported => {
                    return Ok(Self::default());
                }
                Err(error) => return Err(error.into()),
            };
            listed.add(meta, &of_index);
        }
        Ok(listed)
    }

    /// Warns of rank-local metadata, which PyTorch (2.15) ignores while there is a `.metadata`, even
    /// a stale one, and of a Hugging Face model in the same folder.
    fn warn_of_others(&self, warnings: &mut Vec<String>) {
        if self.by_rank {
            warnings.push(
                "there are both a .metadata, which is used, and the __*.metadata of a save \
                 without collectives: one of the two is of another save"
                    .into(),
            );
        }
        if self.model {
            warnings.push(
                "there are both a .metadata, which is used, and the index of a Hugging Face \
                 model, which is another checkpoint"
                    .into(),
            );
        }
    }

    /// The length of each file; `None` for a missing one. Files in folders below, and those that a
    /// listing may lack, are looked up one by one.
    async fn byte_lens(
        &self,
        storage: &dyn Storage,
        metadata: &CheckpointMetadata,
    ) -> Result<Vec<Option<u64>>, CheckpointError> {
        let lens = metadata.files().iter().map(|key| async move {
            if let Some(len) = self.byte_lens.get(key) {
                return Ok(Some(*len));
            }
            if self.complete && !is_below(key) {
                return Ok(None);
            }
            match storage.stat(key).await {
                Ok(meta) => Ok(Some(meta.byte_len)),
                Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
                Err(error) => Err(CheckpointError::from(error)),
            }
        });
        let lens = lens.collect::<Vec<_>>();
        stream::iter(lens).buffered(parallelism(storage)).try_collect().await
    }
}

/// `one_file` is false for merged metadata.
fn check_geometry(
    metadata: &CheckpointMetadata,
    one_file: bool,
    tolerant: bool,
    warnings: &mut Vec<String>,
) -> Result<(), FormatError> {
    for (fqn, entry) in metadata.iter() {
        if let Entry::Tensor(tensor) = entry {
            let bad = |problem| {
                let problem = format!("{fqn:?}: {problem}");
                if one_file {
                    FormatError::new("metadata", problem).in_file(METADATA, 0)
                } else {
                    FormatError::new("metadata, merged from those of all ranks", problem)
                }
            };
            match check_chunks(tensor) {
                Ok(None) => {}
                Ok(Some(warning)) => warnings.push(format!("{fqn:?}: {warning}")),
                Err(problem) if tolerant => warnings.push(format!("{fqn:?}: {problem}")),
                Err(problem) => return Err(bad(problem)),
            }
        }
    }
    Ok(())
}

/// Every placement of every entry, with the entry's FQN.
fn placements(metadata: &CheckpointMetadata) -> impl Iterator<Item = (&Arc<str>, Placement)> {
    metadata.iter().flat_map(|(fqn, entry)| {
        let (chunks, object) = match entry {
            Entry::Tensor(tensor) => (Some(tensor.chunks.iter()), None),
            Entry::Object(object) => (None, object.placement),
            _ => (None, None),
        };
        let chunks = chunks.into_iter().flatten().filter_map(|chunk| chunk.placement);
        chunks.chain(object).map(move |placement| (fqn, placement))
    })
}

/// Fails unless every placement is within an existing file, as far as the lengths are known.
fn check_placements(
    metadata: &CheckpointMetadata,
    file_lens: Option<&[Option<u64>]>,
) -> Result<(), FormatError> {
    for (fqn, placement) in placements(metadata) {
        let Some(file) = metadata.file(placement.file) else {
            let problem = format!("{fqn:?} is in a file that has no name");
            return Err(FormatError::new("metadata", problem).in_file(METADATA, 0));
        };
        let Some(file_lens) = file_lens else { continue };
        let Placement { byte_offset, byte_len, .. } = placement;
        let problem = match file_lens.get(placement.file.index()).copied().flatten() {
            None => "the file is missing".to_owned(),
            Some(len) => match byte_offset.checked_add(byte_len) {
                Some(end) if end <= len => continue,
                _ => format!("the file ends at {len}"),
            },
        };
        let problem = format!("{fqn:?} has {byte_len} bytes here, but {problem}");
        return Err(FormatError::new("checkpoint", problem).in_file(file.as_str(), byte_offset));
    }
    Ok(())
}

/// Warns of keys whose bytes are missing: PyTorch (2.15) commits a save although a writer thread
/// died.
fn warn_of_lost_chunks(metadata: &CheckpointMetadata, warnings: &mut Vec<String>) {
    for (fqn, entry) in metadata.iter() {
        let lost = match entry {
            Entry::Tensor(tensor) => {
                tensor.chunks.iter().filter(|chunk| chunk.placement.is_none()).count()
            }
            Entry::Object(object) => usize::from(object.placement.is_none()),
            _ => 0,
        };
        if lost > 0 {
            warnings.push(format!(
                "{fqn:?} is listed, but the bytes of {lost} of its chunks were never stored"
            ));
        }
    }
}

pub(super) fn parallelism(storage: &dyn Storage) -> usize {
    usize::from(storage.capabilities().parallelism.max(1))
}
