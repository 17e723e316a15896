//! PyTorch's distributed checkpoints as a format that plugs in.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Existing, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, RankDifference, Recognized, RunSelection,
    RunTracker, UnfinishedSave, WriterOptions,
};
use dcp_core::metadata::{Entry, Layout, Placement};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Storage, StorageError, StorageErrorKind,
    StorageReader as _, StorageWriter,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::files::{DcpFiles, RANKS_MAX};
use super::names::{METADATA, Named};
use super::reader::DcpReader;
use super::safetensors_files::{has_images, locate};
use super::writer::DcpWriter;
use crate::incomplete_files::{LFS_PROBLEM, is_lfs_pointer, unwritten};
use crate::metadata::decode;
use crate::missing_files::{EXAMINED_INDEX_MAX, MissingFiles};

/// Folders below, with a checkpoint in them, that are looked at.
const NESTED_MAX: usize = 64;
/// Levels below the folder that are looked at for checkpoints.
const DEPTH_MAX: usize = 3;
/// The maximum number of data files of which the beginning is read, and its length in bytes.
const FILES_MAX: usize = 1 << 12;
const HEAD_BYTES: u64 = 64;
/// The opcode that ends a pickle.
const STOP: u8 = b'.';
/// The name of the format.
const NAME: &str = "dcp";
const NO_DATA: &str = "there are no data files";

/// Checkpoints of PyTorch's DCP: a folder with a `.metadata`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DcpFormat;

/// Whether a folder of this name has a part of the step around it, and is no step of its own.
#[must_use]
pub fn is_part_folder(name: &str) -> bool {
    const PARTS: [&str; 5] = ["model", "optimizer", "optim", "ckpt", "checkpoint"];
    // Of accelerate, with the number of the model or the optimizer.
    const NUMBERED: [&str; 2] = ["pytorch_model_fsdp_", "optimizer_"];
    PARTS.contains(&name) || NUMBERED.iter().any(|start| name.starts_with(start))
}

/// Checkpoints in folders below that belong together, such as the model and the optimizer of accelerate. Of
/// several the first that is committed is named, the model before its optimizer. Folders below a run are
/// checkpoints of their own: they are one together only if each has the name of a part, or one is an
/// optimizer and no two have the same name but for a number, as steps have.
fn nested(folder: &Folder<'_>) -> Option<Recognized> {
    let found = nested_files(folder);
    let has_parts = || {
        let stem = |path: &str| path.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let stems: BTreeSet<_> = found.iter().map(|(path, _)| stem(path)).collect();
        let is_optimizer = |(path, _): &(&str, DcpFiles)| path.starts_with("optim");
        stems.len() == found.len()
            && found.iter().any(is_optimizer)
            && found.iter().all(|(path, _)| !path.contains('/'))
    };
    if !found.iter().all(|(path, _)| is_part_folder(path)) && !has_parts() {
        return None;
    }
    let mut committed = found.iter().filter(|(_, files)| files.is_committed());
    let is_model = |one: &&(&str, DcpFiles)| !one.0.starts_with("optim");
    let model = committed.clone().find(is_model).or_else(|| committed.next());
    let (path, files) = model.or_else(|| found.first())?;
    let problem =
        found.iter().find_map(|(path, files)| Some(format!("{path}: {}", files.problem()?)));
    let inner = files.is_committed().then(|| (*path).to_owned());
    let description = "has PyTorch DCP checkpoints in folders below it";
    Some(Recognized::new(Evidence::Run, description).with_problem(problem).with_inner(inner))
}

/// The checkpoints in folders below, by their paths relative to `folder`.
fn nested_files<'a>(folder: &Folder<'a>) -> Vec<(&'a str, DcpFiles)> {
    let mut found = Vec::new();
    collect(folder, DEPTH_MAX, &mut found);
    let from = if folder.path() == "." { 0 } else { folder.path().len() + 1 };
    for (path, _) in &mut found {
        *path = path.get(from..).unwrap_or(path);
    }
    found
}

fn collect<'a>(folder: &Folder<'a>, depth: usize, found: &mut Vec<(&'a str, DcpFiles)>) {
    for below in folder.folders() {
        if found.len() >= NESTED_MAX {
            return;
        }
        let files = DcpFiles::of(&below);
        if files.is_any() {
            found.push((below.path(), files));
        }
        if depth > 1 {
            collect(&below, depth - 1, found);
        }
    }
}

#[async_trait]
impl CheckpointFormat for DcpFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new(NAME, "DCP").with_landmarks(&[METADATA, "__0.metadata"])
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        let files = DcpFiles::of(folder);
        if !files.is_any() {
            return nested(folder);
        }
        let evidence = if files.is_committed() { Evidence::Index } else { Evidence::Remains };
        Some(Recognized::new(evidence, files.description()).with_problem(files.problem()))
    }

    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let folder = place.listing().root();
        if DcpFiles::of(&folder).is_any() {
            return examine_one(place).await;
        }
        for (path, _) in nested_files(&folder) {
            let found = examine_one(&place.below(path)?).await?;
            if let Some(problem) = found.problem {
                return Ok(Examined::new(Some(format!("{path}: {problem}"))));
            }
            if found.unsupported.is_some() {
                return Ok(found);
            }
        }
        Ok(Examined::default().with_all_compared(true))
    }

    async fn tracker(&self, _run: &Place) -> Result<Option<RunTracker>, StorageError> {
        Ok(None)
    }

    async fn select(&self, _run: &Place) -> Result<Option<RunSelection>, StorageError> {
        Ok(None)
    }

    fn unfinished(
        &self,
        _folder: &Folder<'_>,
        _metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        None
    }

    fn owns(&self, _folder: &Folder<'_>, name: &str) -> bool {
        name.ends_with(".distcp") || name.ends_with(METADATA) || Named::parse(name).is_some()
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        let found = self.recognize(folder).filter(Recognized::is_checkpoint)?;
        Some(Occupant::Checkpoint(format!("the directory {found}")))
    }

    fn target(&self) -> Option<&dyn CheckpointTarget> {
        Some(self)
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let mut reader = DcpReader::builder(Arc::clone(place.storage()))
            .tolerant(options.tolerant)
            .verify_parts(options.for_load)
            .compare_saved(!options.in_group)
            .transforms(options.transforms.clone());
        if let Some(rank) = options.rank {
            reader = reader.rank(rank);
        }
        if let Some(keys) = &options.keys {
            reader = reader.keys(keys.clone());
        }
        let reader = Arc::new(reader.build());
        if let Err(error) = reader.metadata().await {
            return Err(match examine_one(place).await {
                Ok(Examined { unsupported: Some(description), .. }) => {
                    let message = format!("the directory {description}");
                    CheckpointError::NotACheckpoint { message }
                }
                _ => error,
            });
        }
        let opened = OpenedCheckpoint::new(Arc::clone(place.storage()), Arc::clone(&reader) as _);
        let differing = reader.differing().await?;
        let differing =
            differing.iter().map(|one| RankDifference::new(Arc::clone(&one.fqn), one.ranks()));
        let opened = opened
            .with_names(reader.names().await?)
            .with_notes(reader.rank_warnings().await?.iter().cloned())
            .with_differing(differing.collect());
        Ok(opened.with_audit(Arc::clone(&reader) as _).with_extension(reader))
    }
}

impl CheckpointTarget for DcpFormat {
    fn parts(&self) -> &'static [&'static str] {
        &[NAME]
    }

    fn existing(&self, folder: &Folder<'_>, _metadata: Option<&CheckpointMetadata>) -> Existing {
        let files = DcpFiles::of(folder);
        match (files.is_committed(), files.is_any()) {
            (true, _) => Existing::Checkpoint,
            (false, true) => Existing::Remains,
            (false, false) => Existing::Nothing,
        }
    }

    fn compresses(&self) -> bool {
        true
    }

    fn writer(
        &self,
        storage: Arc<dyn Storage>,
        options: &WriterOptions,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError> {
        // A conversion has no memory to lend: two parts of each file are in flight.
        let writer = DcpWriter::builder(storage).overwrite(options.overwrite).upload_bytes(0);
        Ok(Arc::new(writer.compression(options.compression.clone())?.build()))
    }
}

/// Compares the index of one checkpoint with its files, or the indexes of ranks that saved without
/// collectives, each of which names the files of its rank.
async fn examine_one(place: &Place) -> Result<Examined, StorageError> {
    if place.has_known_files() {
        return Ok(Examined::default().with_all_compared(true));
    }
    let folder = place.listing().root();
    let is_ranks = |name: &str| matches!(Named::parse(name), Some(Named::RankMetadata { .. }));
    let of_ranks = || folder.files().filter(|(name, _)| is_ranks(name)).take(RANKS_MAX).collect();
    let Some(index) = folder.file(METADATA) else {
        return examine_indexes(place, of_ranks()).await;
    };
    let found = examine_indexes(place, vec![(METADATA, index)]).await?;
    let ranks = DcpFiles { metadata: false, ..DcpFiles::of(&folder) };
    let Some(problem) = &found.problem else { return Ok(found) };
    if ranks.ranks.is_empty() || ranks.problem().is_some() {
        return Ok(found);
    }
    // Readers take the one index. It may be of another save (trap T23), and these are whole.
    let others = examine_indexes(place, of_ranks()).await?;
    if others.problem.is_some() || others.unsupported.is_some() {
        return Ok(found);
    }
    let problem = format!(
        "{problem}; the ranks have indexes of their own, and all that these name: move the {METADATA} away \
         to read them"
    );
    Ok(Examined::new(Some(problem)).with_opens(true))
}

/// Compares each of these indexes with its files.
async fn examine_indexes(
    place: &Place,
    indexes: Vec<(&str, &ObjectMeta)>,
) -> Result<Examined, StorageError> {
    let sound = Examined::default().with_all_compared(true);
    let is_one = indexes.iter().any(|(name, _)| *name == METADATA);
    let examined: Vec<_> =
        indexes.into_iter().map(|(name, index)| examine_index(place, name, index)).collect();
    let parallelism = usize::from(place.storage().capabilities().parallelism.max(1));
    let mut examined = stream::iter(examined).buffered(parallelism);
    let mut index = None;
    while let Some(found) = examined.try_next().await? {
        if found != Examined::default() {
            return Ok(found);
        }
        index = found.index;
    }
    // The index of one rank has a part of the tensors.
    Ok(sound.with_index(index.filter(|_| is_one)))
}

async fn examine_index(
    place: &Place,
    name: &str,
    index: &ObjectMeta,
) -> Result<Examined, StorageError> {
    let folder = place.listing().root();
    if index.byte_len >= EXAMINED_INDEX_MAX {
        let last = index.byte_len - 1;
        let last = place.storage().read_range(&index.key, last..index.byte_len).await?;
        if last.first() != Some(&STOP) {
            let problem = format!("the {name} was cut short: it has no end");
            return Ok(Examined::new(Some(problem)));
        }
        let any = folder.files().any(|(name, _)| name.ends_with(".distcp"));
        return Ok(Examined::new((!any).then(|| NO_DATA.to_owned())));
    }
    let read = place.index().filter(|read| name == METADATA && !has_images(read));
    let metadata = match read {
        Some(read) => Arc::clone(read),
        None => match read_index(place, name, index).await? {
            Ok(metadata) => Arc::new(metadata),
            Err(found) => return Ok(found),
        },
    };
    let mut missing = MissingFiles::default();
    for (file, end) in metadata.files().iter().zip(ends(&metadata)) {
        if !missing.look(place, file, end).await? {
            break;
        }
    }
    match missing.problem() {
        Some(problem) => Ok(Examined::new(Some(problem))),
        None => {
            let problem = unwritten_file(place, &metadata).await?;
            Ok(Examined::new(problem).with_index(Some(metadata)))
        }
    }
}

/// Reads an index, or says what is wrong with it.
async fn read_index(
    place: &Place,
    name: &str,
    index: &ObjectMeta,
) -> Result<Result<CheckpointMetadata, Examined>, StorageError> {
    let bytes = place.storage().read_range(&index.key, 0..index.byte_len).await?;
    let mut metadata = match decode(&bytes) {
        Ok(metadata) => metadata,
        Err(_) if is_lfs_pointer(&bytes) => {
            return Ok(Err(Examined::new(Some(format!("the {name} {LFS_PROBLEM}")))));
        }
        Err(error) => {
            let problem = format!("the {name} cannot be read: {}", error.problem());
            return Ok(Err(Examined::new(Some(problem))));
        }
    };
    Ok(match locate_images(place, &mut metadata).await? {
        Some(problem) => Err(Examined::new(Some(problem))),
        None => Ok(metadata),
    })
}

/// The problem of a data file that begins with zeros. Every file begins with an item, and an item with the
/// signature of its encoding, but for elements without one, which may be zero.
async fn unwritten_file(
    place: &Place,
    metadata: &CheckpointMetadata,
) -> Result<Option<String>, StorageError> {
    let storage = place.storage();
    let raw = raw_files(metadata);
    let signed = metadata.files().iter().enumerate().filter(|(file, _)| !raw.contains(file));
    let heads: Vec<_> = signed
        .filter_map(|(_, file)| place.listing().get(file))
        .filter(|meta| meta.byte_len >= HEAD_BYTES)
        .take(FILES_MAX)
        .map(|meta| async move {
            let head = storage.read_range(&meta.key, 0..HEAD_BYTES).await?;
            Ok::<_, StorageError>(unwritten(&head).map(|problem| format!("{} {problem}", meta.key)))
        })
        .collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let mut problems = stream::iter(heads).buffered(parallelism);
    while let Some(problem) = problems.try_next().await? {
        if problem.is_some() {
            return Ok(problem);
        }
    }
    Ok(None)
}

/// The positions of files that begin with elements, as those of ByteCheckpoint do.
fn raw_files(metadata: &CheckpointMetadata) -> BTreeSet<usize> {
    let tensors = metadata.iter().filter_map(|(_, entry)| entry.as_tensor());
    let placements = tensors.flat_map(|tensor| tensor.chunks.iter()).filter_map(|c| c.placement);
    let is_raw = |placement: &Placement| {
        let encoding = metadata.encoding(placement);
        placement.byte_offset == 0 && encoding.is_some_and(|e| e.layout == Layout::Raw)
    };
    placements.filter(is_raw).map(|placement| placement.file.index()).collect()
}

/// Corrects the placements in files that are safetensors images, or returns what is wrong with one.
async fn locate_images(
    place: &Place,
    metadata: &mut CheckpointMetadata,
) -> Result<Option<String>, StorageError> {
    if !has_images(metadata) {
        return Ok(None);
    }
    let storage = &**place.storage();
    let mut lens = Vec::with_capacity(metadata.files().len());
    for file in metadata.files() {
        lens.push(match storage.stat(file).await {
            Ok(meta) => Some(meta.byte_len),
            Err(error) if error.kind() == StorageErrorKind::NotFound => None,
            Err(error) => return Err(error),
        });
    }
    match locate(storage, metadata, &lens).await {
        Ok(()) => Ok(None),
        Err(CheckpointError::Storage(error)) => Err(error),
        Err(error) => Ok(Some(error_chain(&error))),
    }
}

/// For each file, where the last of what it holds ends.
fn ends(metadata: &CheckpointMetadata) -> Vec<u64> {
    let mut ends = vec![0_u64; metadata.files().len()];
    for (_, entry) in metadata.iter() {
        let (chunks, object) = match entry {
            Entry::Tensor(tensor) => (Some(&tensor.chunks), None),
            Entry::Object(object) => (None, object.placement),
            _ => (None, None),
        };
        let chunks =
            chunks.into_iter().flat_map(|chunks| chunks.iter()).filter_map(|c| c.placement);
        for placement in chunks.chain(object) {
            if let Some(end) = ends.get_mut(placement.file.index()) {
                *end = (*end).max(placement.byte_offset.saturating_add(placement.byte_len));
            }
        }
    }
    ends
}
