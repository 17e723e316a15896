//! Locates tensors in `.distcp` files that are safetensors images.
//!
//! PyTorch's `FileSystemWriter` with `SerializationFormat.SAFETENSORS` (2.8 and later) writes
//! placements that no reader can use, its own included: one offset for all tensors of a file, and
//! bare lengths. The image's header, which follows the file's objects if there are any, has the
//! real positions.

use std::collections::BTreeMap;

use dcp_core::metadata::{Encoding, Entry, FileId, Layout, Placement};
use dcp_core::{CheckpointError, CheckpointMetadata, Dims, FormatError, Key, Storage};
use futures_util::stream;
use futures_util::{StreamExt as _, TryStreamExt as _};

use super::index::parallelism;
use crate::safetensors::{Image, read_image};

/// A chunk whose placement cannot be that of an archive.
struct Suspect {
    entry: usize,
    chunk: usize,
}

/// Corrects the placements of chunks in such files. Leaves other files alone.
pub(super) async fn locate(
    storage: &dyn Storage,
    metadata: &mut CheckpointMetadata,
    file_lens: &[Option<u64>],
) -> Result<(), CheckpointError> {
    let suspects = suspects(metadata);
    if suspects.is_empty() {
        return Ok(());
    }
    let objects_end = objects_end(metadata);
    let reads = suspects
        .keys()
        .filter_map(|file| {
            let key = metadata.file(*file)?.clone();
            let len = file_lens.get(file.index()).copied().flatten()?;
            let start = objects_end.get(file).copied().unwrap_or(0);
            Some(async move {
                Ok::<_, CheckpointError>((*file, read(storage, &key, start, len).await?))
            })
        })
        .collect::<Vec<_>>();
    let images: BTreeMap<FileId, Image> =
        stream::iter(reads).buffer_unordered(parallelism(storage)).try_collect().await?;
    let raw = metadata
        .intern_encoding(&Encoding::new(Layout::Raw))
        .ok_or_else(|| FormatError::new("metadata", "too many encodings"))?;
    for (file, chunks) in suspects {
        let (Some(image), Some(key)) = (images.get(&file), metadata.file(file).cloned()) else {
            continue;
        };
        for suspect in chunks {
            let placement = find(image, metadata, &suspect, file, raw).map_err(|problem| {
                FormatError::new("safetensors image", problem).in_file(key.as_str(), 0)
            })?;
            if let Some((_, Entry::Tensor(tensor))) = metadata.at_mut(suspect.entry) {
                tensor.chunks.place(suspect.chunk, placement);
            }
        }
    }
    Ok(())
}

/// Whether a file is such an image, by its placements.
pub(super) fn has_images(metadata: &CheckpointMetadata) -> bool {
    !suspects(metadata).is_empty()
}

/// The chunks whose placement has room for their elements, but not for an archive.
fn suspects(metadata: &CheckpointMetadata) -> BTreeMap<FileId, Vec<Suspect>> {
    let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (entry, (_, value)) in metadata.iter().enumerate() {
        let Entry::Tensor(tensor) = value else { continue };
        for (index, chunk) in tensor.chunks.iter().enumerate() {
            let Some(placement) = chunk.placement else { continue };
            let archive = metadata
                .encoding(&placement)
                .is_some_and(|e| e.layout == Layout::TorchArchive && e.transforms.is_empty());
            let bytes = Dims::from(chunk.sizes)
                .checked_volume()
                .and_then(|volume| volume.checked_mul(tensor.dtype.size() as u64));
            if archive && bytes == Some(placement.byte_len) {
                let suspect = Suspect { entry, chunk: index };
                found.entry(placement.file).or_default().push(suspect);
            }
        }
    }
    found
}

/// The end of the objects in each file.
fn objects_end(metadata: &CheckpointMetadata) -> BTreeMap<FileId, u64> {
    let mut ends = BTreeMap::new();
    for (_, entry) in metadata.iter() {
        if let Some(placement) = entry.as_object().and_then(|object| object.placement) {
            let end = placement.byte_offset.saturating_add(placement.byte_len);
            let known = ends.entry(placement.file).or_insert(0);
            *known = end.max(*known);
        }
    }
    ends
}

async fn read(
    storage: &dyn Storage,
    key: &Key,
    start: u64,
    file_len: u64,
) -> Result<Image, CheckpointError> {
    match read_image(storage, key, start, file_len).await? {
        (image, None) => Ok(image),
        (_, Some(problem)) => Err(problem.into_error().in_file(key.as_str(), start).into()),
    }
}

/// The position of a suspected chunk in an image.
fn find(
    image: &Image,
    metadata: &CheckpointMetadata,
    suspect: &Suspect,
    file: FileId,
    encoding: u16,
) -> Result<Placement, String> {
    let Some((fqn, Entry::Tensor(tensor))) = metadata.at(suspect.entry) else {
        return Err("an entry is gone".into());
    };
    let chunk = tensor.chunks.get(suspect.chunk).ok_or("a chunk is gone")?;
    let info = image.header.get(fqn).ok_or_else(|| format!("it does not hold {fqn:?}"))?;
    let saved = image.sharding.get(fqn).map(|saved| &**saved);
    if let Some(saved) = saved
        && *saved != *chunk.offsets
    {
        return Err(format!(
            "it holds {fqn:?} at {saved:?}, not at {:?}: PyTorch keeps only the last of several \
             chunks in a file, the others are lost",
            chunk.offsets
        ));
    }
    if info.dtype != tensor.dtype || *info.shape != *chunk.sizes {
        return Err(format!(
            "it holds {fqn:?} as {} of {}, the metadata says {} of {:?}",
            info.dtype, info.shape, tensor.dtype, chunk.sizes
        ));
    }
    Ok(Placement {
        file,
        encoding,
        byte_offset: image.data_start + info.byte_range.start,
        byte_len: info.byte_range.end - info.byte_range.start,
    })
}
