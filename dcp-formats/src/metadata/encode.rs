//! Encodes an index as a `.metadata` pickle.

use std::collections::HashMap;

use bytes::Bytes;
use dcp_core::metadata::{Entry, Layout, Placement, TensorEntry};
use dcp_core::path::PathItem;
use dcp_core::{CheckpointMetadata, DType, FormatError};

use super::attributes::bad;
use super::class::{FILESYSTEM, METADATA, OLMO_FILESYSTEM, SHARDED_METADATA};
use super::profile::Profile;
use crate::pickle::{Repeated, Writer};

/// Encodes an index as a `.metadata`, a pickle of protocol 2.
///
/// Placements follow the order of the entries. An unknown path is written as a single key, the FQN.
/// `planner_data` is `None` when no path is known.
///
/// # Errors
///
/// When a chunk or object has no placement, or one that the profile cannot express: bytes that are
/// not a `torch.save` archive, and for OLMo-core any transformed bytes, such as compressed ones.
pub fn encode(metadata: &CheckpointMetadata, profile: Profile) -> Result<Bytes, FormatError> {
    let mut encoder = Encoder { writer: Writer::compact(), metadata, profile };
    encoder.whole()?;
    encoder.writer.finish()
}

struct Encoder<'m> {
    writer: Writer,
    metadata: &'m CheckpointMetadata,
    profile: Profile,
}

/// The names that are written for every chunk and place.
struct Names {
    size: Repeated,
    chunk: Repeated,
    index: Repeated,
    info: Repeated,
    chunk_attributes: [Repeated; 2],
    index_attributes: [Repeated; 3],
    info_attributes: [Repeated; 4],
    /// By the numbers of files.
    files: Vec<Repeated>,
    /// The numbers of `torch.strided` and of memory formats in the memo.
    layout: Option<u32>,
    memory_formats: HashMap<i64, u32>,
}

impl Names {
    fn new(metadata: &CheckpointMetadata, profile: Profile) -> Self {
        let filesystem = if profile.is_olmo() { OLMO_FILESYSTEM } else { FILESYSTEM };
        Self {
            size: Repeated::global("torch", "Size"),
            chunk: Repeated::global(METADATA, "ChunkStorageMetadata"),
            index: Repeated::global(METADATA, "MetadataIndex"),
            info: Repeated::global(filesystem, "_StorageInfo"),
            chunk_attributes: ["offsets", "sizes"].map(Repeated::constant),
            index_attributes: ["fqn", "index", "offset"].map(Repeated::constant),
            info_attributes: ["relative_path", "offset", "length", "transform_descriptors"]
                .map(Repeated::constant),
            files: metadata.files().iter().map(|file| Repeated::constant(file.as_str())).collect(),
            layout: None,
            memory_formats: HashMap::new(),
        }
    }
}

/// An entry of `storage_data`: FQN, position and offsets of the chunk, placement.
struct Place<'m> {
    fqn: &'m std::sync::Arc<str>,
    chunk: Option<(usize, &'m [u64])>,
    placement: Placement,
}

impl Encoder<'_> {
    fn whole(&mut self) -> Result<(), FormatError> {
        let (metadata, profile) = (self.metadata, self.profile);
        let places = places(metadata)?;
        let mut names = Names::new(metadata, profile);
        let mut attributes = vec!["state_dict_metadata", "planner_data", "storage_data"];
        if profile.has_origin() {
            attributes.push("storage_meta");
        }
        if profile == Profile::Torch2_15 {
            attributes.push("version");
        }
        self.instance(METADATA, "Metadata");
        self.writer.dict(attributes.into_iter(), |writer, name| {
            writer.constant(name);
            match name {
                "state_dict_metadata" => writer.dict(metadata.iter(), |writer, (fqn, entry)| {
                    writer.shared_str(fqn);
                    put_entry(writer, &mut names, profile, entry)
                }),
                "planner_data" => put_paths(writer, metadata),
                "storage_data" => writer.dict(places.iter(), |writer, place| {
                    put_index(writer, &mut names, place)?;
                    put_info(writer, &mut names, profile, metadata, place)
                }),
                "storage_meta" => put_origin(writer, metadata),
                _ => {
                    let version = metadata.provenance().version.as_deref();
                    writer.constant(version.unwrap_or("1.0.0"));
                    Ok(())
                }
            }
        })?;
        self.writer.build();
        Ok(())
    }

    fn instance(&mut self, module: &str, class: &str) {
        instance(&mut self.writer, module, class);
    }
}

fn instance(writer: &mut Writer, module: &str, class: &str) {
    writer.global(module, class);
    writer.empty_tuple();
    writer.new_object();
}

fn repeated_instance(writer: &mut Writer, class: &mut Repeated) {
    writer.repeated(class);
    writer.empty_tuple();
    writer.new_object();
}

fn places(metadata: &CheckpointMetadata) -> Result<Vec<Place<'_>>, FormatError> {
    let mut places = Vec::new();
    for (fqn, entry) in metadata.iter() {
        let lost = || bad(format!("{fqn:?} cannot be written: not all of it was stored"));
        match entry {
            Entry::Tensor(tensor) => {
                for (n, chunk) in tensor.chunks.iter().enumerate() {
                    let placement = chunk.placement.ok_or_else(lost)?;
                    places.push(Place { fqn, chunk: Some((n, chunk.offsets)), placement });
                }
            }
            Entry::Object(object) => {
                let placement = object.placement.ok_or_else(lost)?;
                places.push(Place { fqn, chunk: None, placement });
            }
            _ => return Err(bad(format!("{fqn:?} is of a kind that PyTorch does not know"))),
        }
    }
    Ok(places)
}

fn put_entry(
    writer: &mut Writer,
    names: &mut Names,
    profile: Profile,
    entry: &Entry,
) -> Result<(), FormatError> {
    let Entry::Tensor(tensor) = entry else {
        instance(writer, METADATA, "BytesStorageMetadata");
        return Ok(());
    };
    instance(writer, METADATA, "TensorStorageMetadata");
    writer.dict(["properties", "size", "chunks"].into_iter(), |writer, name| {
        writer.constant(name);
        match name {
            "properties" => put_properties(writer, names, profile, tensor),
            "size" => put_size(writer, &mut names.size, &tensor.shape),
            _ => writer.list(tensor.chunks.iter(), |writer, chunk| {
                repeated_instance(writer, &mut names.chunk);
                let dims = [chunk.offsets, chunk.sizes];
                let attributes = names.chunk_attributes.iter_mut().zip(dims);
                writer.dict(attributes, |writer, (name, dims)| {
                    writer.repeated(name);
                    put_size(writer, &mut names.size, dims)
                })?;
                writer.build();
                Ok(())
            }),
        }
    })?;
    writer.build();
    Ok(())
}

fn put_properties(
    writer: &mut Writer,
    names: &mut Names,
    profile: Profile,
    tensor: &TensorEntry,
) -> Result<(), FormatError> {
    let properties = &tensor.properties;
    let (module, memory_format) = match profile {
        Profile::Compat => (SHARDED_METADATA, "MEM_FORMAT_ENCODING"),
        _ => (METADATA, "_MEM_FORMAT_ENCODING"),
    };
    let with_strides = profile.has_strides();
    instance(writer, module, "TensorProperties");
    writer.tuple(5 + usize::from(with_strides), |writer| {
        put_dtype(writer, tensor.dtype);
        match names.layout {
            Some(memo) => writer.get(memo),
            None => {
                writer.global("torch.serialization", "_get_layout");
                one(writer, |writer| writer.constant("torch.strided"));
                names.layout = Some(writer.call_kept());
            }
        }
        writer.bool(properties.requires_grad);
        let format = i64::from(properties.memory_format);
        match names.memory_formats.get(&format) {
            Some(memo) => writer.get(*memo),
            None => {
                writer.global(module, memory_format);
                one(writer, |writer| writer.int(format));
                names.memory_formats.insert(format, writer.call_kept());
            }
        }
        writer.bool(properties.pin_memory);
        match &properties.strides {
            _ if !with_strides => {}
            None => writer.none(),
            Some(strides) => writer.tuple(strides.len(), |writer| {
                strides.iter().for_each(|stride| writer.int(*stride));
                Ok::<(), FormatError>(())
            })?,
        }
        Ok::<(), FormatError>(())
    })?;
    writer.build();
    Ok(())
}

fn put_dtype(writer: &mut Writer, dtype: DType) {
    writer.global("torch", dtype.name());
}

/// Writes a tuple of one item.
fn one(writer: &mut Writer, item: impl FnOnce(&mut Writer)) {
    let Ok(()) = writer.tuple(1, |writer| {
        item(writer);
        Ok::<(), std::convert::Infallible>(())
    });
}

/// Writes a `torch.Size`.
fn put_size(writer: &mut Writer, size: &mut Repeated, dims: &[u64]) -> Result<(), FormatError> {
    writer.repeated(size);
    one(writer, |writer| writer.uint_tuple(dims));
    writer.call();
    Ok(())
}

fn put_paths(writer: &mut Writer, metadata: &CheckpointMetadata) -> Result<(), FormatError> {
    if metadata.iter().all(|(_, entry)| entry.path().is_none()) && !metadata.is_empty() {
        writer.none();
        return Ok(());
    }
    writer.dict(metadata.iter(), |writer, (fqn, entry)| {
        writer.shared_str(fqn);
        let Some(path) = entry.path() else {
            one(writer, |writer| writer.shared_str(fqn));
            return Ok(());
        };
        writer.tuple(path.len(), |writer| {
            for item in path.iter() {
                match item {
                    PathItem::Key(key) => writer.constant(key),
                    PathItem::Index(index) => writer.uint(*index),
                }
            }
            Ok(())
        })
    })
}

fn put_index(writer: &mut Writer, names: &mut Names, place: &Place<'_>) -> Result<(), FormatError> {
    repeated_instance(writer, &mut names.index);
    let len = if place.chunk.is_some() { 3 } else { 2 };
    let attributes = names.index_attributes.iter_mut().take(len).enumerate();
    writer.dict(attributes, |writer, (at, name)| {
        writer.repeated(name);
        match (at, place.chunk) {
            (0, _) => writer.shared_str(place.fqn),
            (1, Some((n, _))) => writer.uint(n as u64),
            (2, Some((_, offsets))) => return put_size(writer, &mut names.size, offsets),
            _ => writer.none(),
        }
        Ok(())
    })?;
    writer.build();
    Ok(())
}

fn put_info(
    writer: &mut Writer,
    names: &mut Names,
    profile: Profile,
    metadata: &CheckpointMetadata,
    place: &Place<'_>,
) -> Result<(), FormatError> {
    let (fqn, placement) = (place.fqn, &place.placement);
    let file = names.files.get_mut(placement.file.index());
    let file = file.ok_or_else(|| bad(format!("the file of {fqn:?} has no name")))?;
    let encoding = metadata
        .encoding(placement)
        .filter(|encoding| encoding.layout == Layout::TorchArchive)
        .ok_or_else(|| bad(format!("{fqn:?} is not stored as PyTorch's archives")))?;
    repeated_instance(writer, &mut names.info);
    let mut len = 3;
    if let Some(transform) = encoding.transforms.first() {
        if profile.is_olmo() {
            let problem = format!(
                "{fqn:?} is stored through {transform:?}, which OLMo-core has no way to undo"
            );
            return Err(bad(problem));
        }
        len = 4;
    }
    let attributes = names.info_attributes.iter_mut().take(len).enumerate();
    writer.dict(attributes, |writer, (at, name)| {
        writer.repeated(name);
        match at {
            0 => writer.repeated(file),
            1 => writer.uint(placement.byte_offset),
            2 => writer.uint(placement.byte_len),
            _ => {
                return writer.list(encoding.transforms.iter(), |writer, transform| {
                    writer.constant(transform);
                    Ok::<_, FormatError>(())
                });
            }
        }
        Ok(())
    })?;
    writer.build();
    Ok(())
}

/// Writes `StorageMeta`, with the checkpoint's id as a string: earlier Python versions cannot load
/// a `PosixPath` of 3.13.
fn put_origin(writer: &mut Writer, metadata: &CheckpointMetadata) -> Result<(), FormatError> {
    let provenance = metadata.provenance();
    instance(writer, METADATA, "StorageMeta");
    let attributes = ["checkpoint_id", "save_id", "load_id", "modules"];
    writer.dict(attributes.into_iter(), |writer, name| {
        writer.constant(name);
        let text = match name {
            "checkpoint_id" => &provenance.checkpoint_id,
            "save_id" => &provenance.save_id,
            "modules" => {
                return writer.list(std::iter::empty::<()>(), |_, ()| Ok::<(), FormatError>(()));
            }
            _ => &None,
        };
        match text {
            Some(text) => writer.shared_str(text),
            None => writer.none(),
        }
        Ok(())
    })?;
    writer.build();
    Ok(())
}
