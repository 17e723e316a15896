//! Decodes a `.metadata` pickle to an index.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::format::WantedKeys;
use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry, TensorProperties};
use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointMetadata, DType, Dims, FormatError};

use super::attributes::{Graph, Wanted, bad, missing};
use super::class::{Class, describe};
use super::places::{LeftOut, Places};
use crate::pickle::{ForeignName, Limits, Node, NodeId, Pickle};

/// The value of [`dcp_core::metadata::Provenance::format`] for these checkpoints.
const FORMAT: &str = "torch_dcp";
/// The attributes of a chunk.
const CHUNK: [&str; 2] = ["offsets", "sizes"];

/// Decodes the index of a `.metadata`, or of the `__R.metadata` of one rank.
///
/// Chunks and objects that PyTorch (2.15) commits without a placement, because a writer thread
/// failed, have none here. Geometry is not checked: the reader checks that chunks are inside their
/// tensor and bytes inside their file. Placements of unknown FQNs or chunks are ignored.
///
/// # Errors
///
/// When it is not a pickle of `Metadata`, or contains classes that are not PyTorch's own, which the
/// error names; when a file name leaves the checkpoint's directory; for negative numbers.
pub fn decode(bytes: &[u8]) -> Result<CheckpointMetadata, FormatError> {
    Ok(decode_all(bytes)?.metadata)
}

/// The contents of a `.metadata`: the index, and what programs on top of PyTorch add to it.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Decoded {
    /// The index.
    pub metadata: CheckpointMetadata,
    /// The shapes of tensors for Megatron-Core (0.8 to 0.15), in elements, by key, where the index
    /// has another one: tensors of which each rank saved a range of a flattened shard.
    pub original_shapes: HashMap<Arc<str>, Dims>,
    /// Names that Python imports when it loads it, and that are not known to be harmless.
    pub foreign_names: Vec<ForeignName>,
    /// All keys and files, where the index lacks tensors that were not chosen; their tensors have no
    /// chunks, their objects no placement.
    pub names: Option<CheckpointMetadata>,
}

/// Like [`decode`], with what Megatron-Core adds.
///
/// # Errors
///
/// As [`decode`], and when an original shape is invalid.
pub fn decode_all(bytes: &[u8]) -> Result<Decoded, FormatError> {
    decode_bytes(bytes, None)
}

/// Like [`decode_all`], without the tensors that `wanted` does not choose, and without the files that
/// only those are in. Their chunks are not read, so that some tensors of a large index take less time
/// and memory than all. Objects are kept, whatever their names. [`Decoded::names`] has what was left
/// out.
///
/// # Errors
///
/// As [`decode_all`], but of the tensors that are left out no chunk is checked, and of their
/// placements only the key and the name of the file.
pub fn decode_selected(bytes: &[u8], wanted: &WantedKeys) -> Result<Decoded, FormatError> {
    decode_bytes(bytes, Some(wanted))
}

fn decode_bytes(bytes: &[u8], wanted: Option<&WantedKeys>) -> Result<Decoded, FormatError> {
    // What most of a large index consists of is read as records, in a tenth of the time and the
    // memory. A pickle that is not as picklers write it, or damaged, is read without.
    let index = Pickle::parse_with_records(bytes, &Limits::DEFAULT, Class::has_records);
    match index.and_then(|pickle| decode_graph(&pickle, wanted)) {
        Ok(decoded) => Ok(decoded),
        Err(_) => decode_graph(&Pickle::parse(bytes, &Limits::DEFAULT)?, wanted),
    }
}

/// Like [`decode_all`], for a pickle that was parsed.
///
/// # Errors
///
/// As [`decode_all`].
pub fn decode_parsed(pickle: &Pickle<'_>) -> Result<Decoded, FormatError> {
    decode_graph(pickle, None)
}

fn decode_graph(pickle: &Pickle<'_>, wanted: Option<&WantedKeys>) -> Result<Decoded, FormatError> {
    let graph = Graph::new(pickle);
    let root = pickle.root();
    let metadata = graph.instance(root, Class::Metadata, "the whole")?;

    let mut out = CheckpointMetadata::new();
    // The instances of entries whose chunks are read after the choice.
    let mut instances = Vec::new();
    if let Some(entries) = graph.attribute(metadata, "state_dict_metadata") {
        for [key, value] in graph.entries(entries, "state_dict_metadata")? {
            let fqn = graph.str(*key, "a name in state_dict_metadata")?;
            let entry = entry(&graph, fqn, *value, wanted.is_none())?;
            let position = out.insert(fqn, entry);
            match instances.get_mut(position) {
                Some(instance) => *instance = *value,
                None => instances.push(*value),
            }
        }
    }
    if let Some(paths) = graph.attribute(metadata, "planner_data") {
        set_paths(&graph, paths, &mut out);
    }
    let mut left_out = None;
    if let Some(wanted) = wanted {
        let mut kept = wanted.of(&out);
        for (kept, (_, entry)) in kept.iter_mut().zip(out.iter()) {
            *kept |= entry.as_object().is_some();
        }
        if kept.contains(&false) {
            left_out = Some(LeftOut { kept: kept.clone(), names: out.clone() });
        }
        for (position, (kept, instance)) in kept.into_iter().zip(instances).enumerate() {
            if let (true, Some((fqn, Entry::Tensor(tensor)))) = (kept, out.at_mut(position)) {
                read_chunks(&graph, &format!("tensor {fqn:?}"), instance, tensor)?;
            }
        }
    }
    if let Some(places) = graph.attribute(metadata, "storage_data") {
        let entries = graph.entries(places, "storage_data")?;
        let mut places = Places::new(&graph, &mut out, left_out.as_mut());
        for [index, info] in entries {
            places.place(*index, *info)?;
        }
        if let Some(tensors) = graph.attribute(metadata, "all_tensor_metadata") {
            for [index, tensor] in graph.entries(tensors, "all_tensor_metadata")? {
                places.locate_elements(*index, *tensor)?;
            }
        }
    }
    let names = left_out.map(|LeftOut { kept, mut names }| {
        let mut kept = kept.into_iter();
        out.retain(|_, _| kept.next() == Some(true));
        for file in out.files() {
            names.intern_file(file);
        }
        names
    });
    let provenance = out.provenance_mut();
    provenance.format = Some(FORMAT.into());
    let text = |id: Option<NodeId>| id.and_then(|id| pickle.str(id)).map(Arc::from);
    provenance.version = text(graph.attribute(metadata, "version"));
    let storage_meta = graph.attribute(metadata, "storage_meta");
    if let Some(storage_meta) = storage_meta.filter(|id| !matches!(pickle.node(*id), Node::None)) {
        let storage_meta = graph.instance(storage_meta, Class::StorageMeta, "storage_meta")?;
        let id = graph.attribute(storage_meta, "checkpoint_id");
        provenance.checkpoint_id = id.and_then(|id| path_text(&graph, id)).map(Arc::from);
        provenance.save_id = text(graph.attribute(storage_meta, "save_id"));
    }
    let original_shapes = match graph.attribute(metadata, "mcore_data") {
        Some(data) => original_shapes(&graph, data)?,
        None => HashMap::new(),
    };
    let foreign_names = pickle.foreign_names();
    Ok(Decoded { metadata: out, original_shapes, foreign_names, names })
}

/// The original shapes that Megatron-Core (0.8 to 0.15) records for tensors. Attributes of other
/// names are ignored.
fn original_shapes(
    graph: &Graph<'_, '_>,
    data: NodeId,
) -> Result<HashMap<Arc<str>, Dims>, FormatError> {
    const ATTRIBUTE: &str = "nd_reformulated_orig_global_shape";
    let Ok(entries) = graph.entries(data, "mcore_data") else {
        tracing::warn!("mcore_data is {}: it is not looked at", describe(graph.pickle, data));
        return Ok(HashMap::new());
    };
    let mut shapes = HashMap::new();
    for [fqn, notes] in entries {
        let Ok(notes) = graph.entries(*notes, "mcore_data of a tensor") else { continue };
        // A tensor has one such record; the cost of a dict of many is bounded for all tensors
        // together.
        graph.spend(notes.len())?;
        let shape = notes.iter().find(|[name, _]| graph.pickle.str(*name) == Some(ATTRIBUTE));
        let Some([_, shape]) = shape else { continue };
        let fqn = graph.str(*fqn, "a name in mcore_data")?;
        let mut dims = Vec::new();
        graph.dims(*shape, &format!("{fqn:?}: {ATTRIBUTE}"), &mut dims)?;
        shapes.insert(fqn.into(), dims.into());
    }
    Ok(shapes)
}

/// `with_chunks` is whether the chunks of a tensor are read.
fn entry(
    graph: &Graph<'_, '_>,
    fqn: &str,
    id: NodeId,
    with_chunks: bool,
) -> Result<Entry, FormatError> {
    match graph.class(id) {
        Some(Class::BytesMetadata) => Ok(Entry::Object(ObjectEntry::new(None))),
        Some(Class::TensorMetadata) => tensor(graph, fqn, id, with_chunks).map(Entry::Tensor),
        _ => Err(graph.unexpected(&format!("{fqn:?}"), id)),
    }
}

fn tensor(
    graph: &Graph<'_, '_>,
    fqn: &str,
    id: NodeId,
    with_chunks: bool,
) -> Result<TensorEntry, FormatError> {
    let what = format!("tensor {fqn:?}");
    let attributes = graph.instance(id, Class::TensorMetadata, &what)?;
    let (dtype, properties) =
        properties(graph, &what, graph.require(attributes, "properties", &what)?)?;
    let mut shape = Vec::new();
    graph.dims(graph.require(attributes, "size", &what)?, &format!("{what}: size"), &mut shape)?;
    let mut tensor = TensorEntry::new(dtype, shape);
    tensor.properties = properties;
    if with_chunks {
        read_chunks(graph, &what, id, &mut tensor)?;
    }
    Ok(tensor)
}

/// Reads the chunks of the instance `id` of a tensor.
fn read_chunks(
    graph: &Graph<'_, '_>,
    what: &str,
    id: NodeId,
    tensor: &mut TensorEntry,
) -> Result<(), FormatError> {
    let attributes = graph.instance(id, Class::TensorMetadata, what)?;
    let chunks = graph.require(attributes, "chunks", what)?;
    let Node::List(chunks) = *graph.pickle.node(chunks) else {
        return Err(graph.unexpected(&format!("{what}: chunks"), chunks));
    };
    let (mut offsets, mut sizes) = (Vec::new(), Vec::new());
    graph.spend(chunks.len())?;
    let wanted = Wanted::new(CHUNK);
    for chunk in graph.pickle.children(chunks) {
        let parts = graph.parts(*chunk, Class::Chunk, &wanted, || what.to_owned())?;
        offsets.clear();
        sizes.clear();
        for ((part, name), dims) in parts.iter().zip(CHUNK).zip([&mut offsets, &mut sizes]) {
            let part = part.ok_or_else(|| missing(what, name))?;
            graph.field_dims(part, what, dims)?;
        }
        tensor.chunks.push(&offsets, &sizes, None).map_err(|error| {
            bad(format!("{what} of {} axes has a chunk of others", tensor.shape.ndim()))
                .with_source(error)
        })?;
    }
    Ok(())
}

/// Decodes a state of five items (PyTorch up to 2.14), or of six, with strides (2.15).
fn properties(
    graph: &Graph<'_, '_>,
    what: &str,
    id: NodeId,
) -> Result<(DType, TensorProperties), FormatError> {
    let pickle = graph.pickle;
    if graph.class(id) != Some(Class::Properties) {
        return Err(graph.unexpected(&format!("{what}: properties"), id));
    }
    let state = pickle.object(id).and_then(|object| object.state).map(|id| pickle.tuple(id));
    let (dtype, requires_grad, memory_format, pin_memory, strides) = match state {
        Some([dtype, _layout, grad, format, pin]) => (*dtype, *grad, *format, *pin, None),
        Some([dtype, _layout, grad, format, pin, strides]) => {
            (*dtype, *grad, *format, *pin, Some(*strides))
        }
        _ => return Err(bad(format!("{what}: properties are not the five or six that are known"))),
    };
    let Some(Class::DType(dtype)) = graph.meaning(dtype) else {
        let found = describe(pickle, dtype);
        return Err(bad(format!("{what}: its dtype is {found}, which is not known")));
    };
    let is_true = |id| matches!(pickle.node(id), Node::Bool(true));
    let mut properties = TensorProperties::default();
    properties.requires_grad = is_true(requires_grad);
    properties.pin_memory = is_true(pin_memory);
    properties.memory_format = memory_code(graph, memory_format).unwrap_or(0);
    properties.strides = strides.and_then(|strides| graph.strides(strides));
    Ok((dtype, properties))
}

/// The number of a memory format; the pickle calls the enum with it.
fn memory_code(graph: &Graph<'_, '_>, id: NodeId) -> Option<u8> {
    let object = graph.pickle.object(id)?;
    (graph.class(id)? == Class::MemoryFormat).then_some(())?;
    let code = graph.pickle.tuple(object.args).first()?;
    u8::try_from(graph.pickle.int(*code)?).ok()
}

/// Sets the paths of `planner_data`, which custom planners may fill with any value. Invalid paths
/// are ignored.
fn set_paths(graph: &Graph<'_, '_>, paths: NodeId, out: &mut CheckpointMetadata) {
    let Ok(entries) = graph.entries(paths, "planner_data") else {
        tracing::warn!("planner_data is {}: names stay flat", describe(graph.pickle, paths));
        return;
    };
    let (mut keys, mut paths) = (HashMap::new(), HashMap::new());
    for [fqn, items] in entries {
        let fqn = graph.str(*fqn, "a name in planner_data").ok();
        let Some(entry) = fqn.and_then(|fqn| out.get_mut(fqn)) else { continue };
        let path = paths.entry(*items).or_insert_with(|| path(graph, *items, &mut keys)).clone();
        match entry {
            Entry::Tensor(tensor) => tensor.path = path,
            Entry::Object(object) => object.path = path,
            _ => {}
        }
    }
}

fn path<'p>(
    graph: &Graph<'p, '_>,
    id: NodeId,
    keys: &mut HashMap<&'p str, Arc<str>>,
) -> Option<StatePath> {
    let Node::Tuple(items) = *graph.pickle.node(id) else { return None };
    let item = |id: &NodeId| match graph.pickle.int(*id) {
        Some(index) => u64::try_from(index).ok().map(PathItem::Index),
        None => {
            let key = graph.str(*id, "a path").ok()?;
            let key = keys.entry(key).or_insert_with(|| key.into());
            Some(PathItem::Key(Arc::clone(key)))
        }
    };
    graph.pickle.children(items).iter().map(item).collect()
}

/// The text of a path: a plain string (fsspec), a `PosixPath` of its parts (Python up to 3.12), or
/// of whole strings (3.13).
fn path_text(graph: &Graph<'_, '_>, id: NodeId) -> Option<String> {
    if let Some(text) = graph.pickle.str(id) {
        return Some(text.to_owned());
    }
    (graph.class(id)? == Class::Path).then_some(())?;
    let object = graph.pickle.object(id)?;
    let mut text = String::new();
    for part in graph.pickle.tuple(object.args) {
        if !text.is_empty() && !text.ends_with(['/', '\\']) {
            text.push('/');
        }
        text.push_str(graph.pickle.str(*part)?);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::{Profile, encode};

    fn records(bytes: &[u8]) -> usize {
        let pickle = Pickle::parse_with_records(bytes, &Limits::DEFAULT, Class::has_records);
        let pickle = pickle.unwrap();
        decode_parsed(&pickle).unwrap();
        pickle.record_count()
    }

    #[test]
    fn what_pytorch_and_dcp_write_becomes_records() {
        let file = include_bytes!("../../../fixtures/pytorch/fsdp2_adam_2r/.metadata");
        let metadata = decode(file).unwrap();
        let tensors = metadata.iter().filter_map(|(_, entry)| entry.as_tensor());
        let chunks = tensors.map(|tensor| tensor.chunks.len()).sum::<usize>();
        // A chunk, a key and a place for each. The first of a kind names its class; a file begins a
        // frame within few.
        let expected = 3 * chunks - 8..=3 * metadata.len() + 3 * chunks;
        assert!(expected.contains(&records(file)), "{} of {chunks} chunks", records(file));
        for profile in Profile::ALL {
            let count = records(&encode(&metadata, profile).unwrap());
            assert!(expected.contains(&count), "{profile}: {count} of {chunks} chunks");
        }
    }
}
